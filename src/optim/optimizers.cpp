#include "oxytorch/optim/optimizers.h"

#include <ATen/ops/full.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <typeindex>

#include "oxytorch/error.h"

namespace oxytorch::optim {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// A hyperparameter: its name in archives, its accessor in our options and in torch's, its place in GroupOptions.
template <class Get, class Put>
struct Field {
  const char* name;
  Get get;
  Put put;
  bool of_torch = true;  // torch's options and archives have it too
};

#define OXY_FIELD_AS(hyperparameter, place, ...)                                                 \
  Field {                                                                                        \
    #hyperparameter, [](auto& o) -> decltype(o.hyperparameter()) { return o.hyperparameter(); }, \
        [](GroupOptions& g, const auto& v) { g.place = v; } __VA_OPT__(, ) __VA_ARGS__           \
  }
#define OXY_FIELD(hyperparameter) OXY_FIELD_AS(hyperparameter, hyperparameter)

constexpr auto kLr = OXY_FIELD(lr);
constexpr auto kEps = OXY_FIELD(eps);
constexpr auto kDecay = OXY_FIELD(weight_decay);
constexpr auto kMomentum = OXY_FIELD(momentum);
constexpr auto kNesterov = OXY_FIELD(nesterov);
constexpr auto kAmsgrad = OXY_FIELD(amsgrad);
constexpr auto kMaximize = OXY_FIELD_AS(maximize, maximize, false);
constexpr Field kBetas{"betas", [](auto& o) -> auto& { return o.betas(); },
                       [](GroupOptions& g, const std::tuple<double, double>& v) { std::tie(g.beta1, g.beta2) = v; }};

// torch's class of the same algorithm.
template <class OptimizerType, class OptionsType, class StateType>
struct Peer {
  using Optimizer = OptimizerType;
  using Options = OptionsType;
  using State = StateType;
};

// All that one optimizer differs by from the others.
template <class Options>
struct Traits;

template <>
struct Traits<AdamWOptions> {
  using Optimizer = AdamW;
  using Torch = Peer<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState>;
  static constexpr const char* kName = "AdamW";
  static constexpr Algorithm kAlgorithm = Algorithm::Adam;
  static constexpr std::tuple kFields{kLr, kBetas, kEps, kDecay, kAmsgrad, kMaximize};
};

template <>
struct Traits<AdamOptions> {
  using Optimizer = Adam;
  using Torch = Peer<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState>;
  static constexpr const char* kName = "Adam";
  static constexpr Algorithm kAlgorithm = Algorithm::Adam;
  static constexpr std::tuple kFields{kLr, kBetas, kEps, kDecay, kAmsgrad, kMaximize};
};

template <>
struct Traits<SGDOptions> {
  using Optimizer = SGD;
  using Torch = Peer<torch::optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState>;
  static constexpr const char* kName = "SGD";
  static constexpr Algorithm kAlgorithm = Algorithm::SGD;
  static constexpr std::tuple kFields{kLr, kMomentum, OXY_FIELD(dampening), kDecay, kNesterov, kMaximize};
};

template <>
struct Traits<LionOptions> {
  static constexpr const char* kName = "Lion";
  static constexpr Algorithm kAlgorithm = Algorithm::Lion;
  static constexpr std::tuple kFields{kLr, kBetas, kDecay, kMaximize};
};

template <>
struct Traits<AdagradOptions> {
  using Optimizer = Adagrad;
  using Torch = Peer<torch::optim::Adagrad, torch::optim::AdagradOptions, torch::optim::AdagradParamState>;
  static constexpr const char* kName = "Adagrad";
  static constexpr Algorithm kAlgorithm = Algorithm::Adagrad;
  static constexpr std::tuple kFields{kLr,      OXY_FIELD(lr_decay), kDecay, OXY_FIELD(initial_accumulator_value), kEps,
                                      kMaximize};
};

template <>
struct Traits<RMSpropOptions> {
  using Optimizer = RMSprop;
  using Torch = Peer<torch::optim::RMSprop, torch::optim::RMSpropOptions, torch::optim::RMSpropParamState>;
  static constexpr const char* kName = "RMSprop";
  static constexpr Algorithm kAlgorithm = Algorithm::RMSprop;
  static constexpr std::tuple kFields{kLr, OXY_FIELD(alpha), kEps, kDecay, kMomentum, OXY_FIELD(centered), kMaximize};
};

template <>
struct Traits<MuonOptions> {
  static constexpr const char* kName = "Muon";
  static constexpr Algorithm kAlgorithm = Algorithm::Muon;
  static constexpr std::tuple kFields{kLr,
                                      kDecay,
                                      kMomentum,
                                      kNesterov,
                                      OXY_FIELD(ns_coefficients),
                                      kEps,
                                      OXY_FIELD(ns_steps),
                                      OXY_FIELD_AS(adjust_lr_fn, adjust_lr)};
};

template <class Options, class Visit>
void each_field(Visit visit) {
  std::apply([&](const auto&... fields) { (visit(fields), ...); }, Traits<Options>::kFields);
}

template <class T>
c10::IValue archived(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return static_cast<std::int64_t>(value);
  } else if constexpr (std::is_same_v<T, std::array<double, 3>>) {
    return std::vector<double>(value.begin(), value.end());
  } else {
    return value;
  }
}

template <class T>
T restored(const c10::IValue& saved) {
  if constexpr (std::is_same_v<T, AdjustLr>) {
    return saved.toInt() == 0 ? AdjustLr::Original : AdjustLr::MatchRmsAdamW;
  } else if constexpr (std::is_same_v<T, std::array<double, 3>>) {
    const std::vector<double> values = saved.toDoubleVector();
    OXY_CHECK(values.size() == 3, InvalidArgument, "ns_coefficients in the archive has ", values.size(),
              " values; it must have 3.");
    return {values[0], values[1], values[2]};
  } else {
    return saved.to<T>();
  }
}

}  // namespace

template <class Derived>
const char* TailArguments<Derived>::optimizer_name() const noexcept {
  return Traits<Derived>::kName;
}

template <class Derived>
Algorithm TailArguments<Derived>::algorithm() const noexcept {
  return Traits<Derived>::kAlgorithm;
}

template <class Derived>
GroupOptions TailArguments<Derived>::group() const {
  GroupOptions result;
  const auto& own = static_cast<const Derived&>(*this);
  each_field<Derived>([&](const auto& field) { field.put(result, field.get(own)); });
  result.decoupled_weight_decay = std::is_same_v<Derived, AdamWOptions>;
  return result;
}

template <class Derived>
void TailArguments<Derived>::validate() const {
  if constexpr (std::is_same_v<Derived, SGDOptions>) {
    const auto& o = static_cast<const SGDOptions&>(*this);
    OXY_CHECK(!o.nesterov() || (o.momentum() > 0 && o.dampening() == 0), InvalidArgument,
              "nesterov needs a momentum above 0 and no dampening; momentum is ", o.momentum(), " and dampening ",
              o.dampening(), ".");
  }
}

template <class Derived>
void TailArguments<Derived>::inherit(const TailOptimizerOptions& defaults) {
  const Derived fresh;
  auto& own = static_cast<Derived&>(*this);
  each_field<Derived>([&](const auto& field) {
    if (field.get(own) == field.get(fresh)) field.get(own) = field.get(static_cast<const Derived&>(defaults));
  });
}

template <class Derived>
std::unique_ptr<torch::optim::OptimizerOptions> TailArguments<Derived>::clone() const {
  return std::make_unique<Derived>(static_cast<const Derived&>(*this));
}

template <class Derived>
void TailArguments<Derived>::serialize(OutputArchive& archive) const {
  const auto& own = static_cast<const Derived&>(*this);
  each_field<Derived>([&](const auto& field) { archive.write(field.name, archived(field.get(own))); });
}

template <class Derived>
void TailArguments<Derived>::serialize(InputArchive& archive) {
  auto& own = static_cast<Derived&>(*this);
  each_field<Derived>([&](const auto& field) {
    c10::IValue saved;
    const bool found = archive.try_read(field.name, saved);
    OXY_CHECK(found || !field.of_torch, InvalidArgument, "a parameter group of the archive has no '", field.name,
              "'; it is not one of ", optimizer_name(), ".");
    auto& value = field.get(own);
    if (found) value = restored<std::remove_reference_t<decltype(value)>>(saved);
  });
}

template <class Derived>
double TailArguments<Derived>::get_lr() const {
  return static_cast<const Derived&>(*this).lr();
}

template <class Derived>
void TailArguments<Derived>::set_lr(double value) {
  static_cast<Derived&>(*this).lr(value);
}

template class TailArguments<AdamWOptions>;
template class TailArguments<AdamOptions>;
template class TailArguments<SGDOptions>;
template class TailArguments<LionOptions>;
template class TailArguments<AdagradOptions>;
template class TailArguments<RMSpropOptions>;
template class TailArguments<MuonOptions>;

namespace {

// The state of one of torch's optimizers; moments are where moment_names() has their names.
template <class State>
ParamState carried_over(const State& theirs, const at::Tensor& param) {
  ParamState ours;
  if constexpr (requires { theirs.step(); }) {
    ours.step = at::full({}, theirs.step(), at::TensorOptions(at::kFloat).device(param.device()));
  }
  if constexpr (requires { theirs.exp_avg(); }) {
    ours.moments = {theirs.exp_avg(), theirs.exp_avg_sq(), theirs.max_exp_avg_sq()};
  }
  if constexpr (requires { theirs.momentum_buffer(); }) ours.moments[0] = theirs.momentum_buffer();
  if constexpr (requires { theirs.sum(); }) ours.moments[1] = theirs.sum();
  if constexpr (requires { theirs.square_avg(); }) ours.moments[1] = theirs.square_avg();
  if constexpr (requires { theirs.grad_avg(); }) ours.moments[2] = theirs.grad_avg();
  return ours;
}

template <class State>
void put_back(const ParamState& ours, State& theirs) {
  if constexpr (requires { theirs.step(); }) {
    if (ours.step.defined()) theirs.step(static_cast<std::int64_t>(ours.step.template item<double>()));
  }
  const auto put = [](at::Tensor& place, const at::Tensor& value) {
    if (value.defined()) place = value;
  };
  if constexpr (requires { theirs.exp_avg(); }) {
    put(theirs.exp_avg(), ours.moments[0]);
    put(theirs.exp_avg_sq(), ours.moments[1]);
    put(theirs.max_exp_avg_sq(), ours.moments[2]);
  }
  if constexpr (requires { theirs.momentum_buffer(); }) put(theirs.momentum_buffer(), ours.moments[0]);
  if constexpr (requires { theirs.sum(); }) put(theirs.sum(), ours.moments[1]);
  if constexpr (requires { theirs.square_avg(); }) put(theirs.square_avg(), ours.moments[1]);
  if constexpr (requires { theirs.grad_avg(); }) put(theirs.grad_avg(), ours.moments[2]);
}

// True where `optimizer` is of the class that `Options` replaces.
template <class Options>
bool hand_back_as(const StepTail& tail, torch::optim::Optimizer& optimizer) {
  using Torch = typename Traits<Options>::Torch;
  if (typeid(optimizer) != typeid(typename Torch::Optimizer)) return false;
  std::size_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      OXY_CHECK(index < tail.param_count() && tail.param(index).is_same(param), InvalidArgument, "parameter ", index,
                " is not the same in both optimizers; hand back to the one that was replaced.");
      const ParamState ours = tail.decoded_state(index++);
      const bool any = std::any_of(ours.moments.begin(), ours.moments.end(), [](const auto& t) { return t.defined(); });
      auto& theirs = optimizer.state()[param.unsafeGetTensorImpl()];
      if (theirs == nullptr && any) theirs = std::make_unique<typename Torch::State>();
      if (theirs == nullptr) {
        optimizer.state().erase(param.unsafeGetTensorImpl());
      } else {
        put_back(ours, static_cast<typename Torch::State&>(*theirs));
      }
    }
  }
  return true;
}

template <class... Options>
bool hand_back_as_one_of(const StepTail& tail, torch::optim::Optimizer& optimizer) {
  return (hand_back_as<Options>(tail, optimizer) || ...);
}

template <class Options>
std::unique_ptr<TailOptimizer> carry_on(const torch::optim::Optimizer& old, const TailOptions& tail) {
  using Torch = typename Traits<Options>::Torch;
  const auto converted = [&tail](const torch::optim::OptimizerOptions& theirs) {
    auto ours = std::make_unique<Options>();
    ours->tail(tail);
    each_field<Options>([&](const auto& field) {
      if constexpr (requires { field.get(static_cast<const typename Torch::Options&>(theirs)); }) {
        field.get(*ours) = field.get(static_cast<const typename Torch::Options&>(theirs));
      }
    });
    return ours;
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& group : old.param_groups()) groups.emplace_back(group.params());
  auto made = std::make_unique<typename Traits<Options>::Optimizer>(groups, *converted(old.defaults()));
  std::size_t index = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    // Not by the constructor, which takes a value equal to its class's default for one that was left out.
    made->param_groups()[g].set_options(converted(old.param_groups()[g].options()));
    for (const at::Tensor& param : groups[g].params()) {
      const auto found = old.state().find(param.unsafeGetTensorImpl());
      if (found != old.state().end()) {
        made->set_state(index, carried_over(static_cast<const typename Torch::State&>(*found->second), param));
      }
      ++index;
    }
  }
  return made;
}

// One of `Options` whose torch class is exactly that of `old`; null if none is.
template <class... Options>
std::unique_ptr<TailOptimizer> carry_on_as_one_of(const torch::optim::Optimizer& old, const TailOptions& tail) {
  std::unique_ptr<TailOptimizer> made;
  const std::type_index type = typeid(old);
  static_cast<void>(((type == typeid(typename Traits<Options>::Torch::Optimizer) &&
                      (made = carry_on<Options>(old, tail)) != nullptr) ||
                     ...));
  return made;
}

}  // namespace

std::unique_ptr<TailOptimizer> replace(const torch::optim::Optimizer& optimizer, const TailOptions& tail) {
  auto made =
      carry_on_as_one_of<AdamWOptions, AdamOptions, SGDOptions, AdagradOptions, RMSpropOptions>(optimizer, tail);
  OXY_CHECK(made != nullptr, InvalidType, "no replacement for ", c10::demangle(typeid(optimizer).name()),
            "; there is one for exactly torch::optim::AdamW, Adam, SGD, Adagrad and RMSprop.");
  return made;
}

void hand_back(const TailOptimizer& from, torch::optim::Optimizer& optimizer) {
  OXY_CHECK((hand_back_as_one_of<AdamWOptions, AdamOptions, SGDOptions, AdagradOptions, RMSpropOptions>(from.tail(),
                                                                                                        optimizer)),
            InvalidType, "nothing can be handed back to ", c10::demangle(typeid(optimizer).name()),
            "; replace() serves exactly torch::optim::AdamW, Adam, SGD, Adagrad and RMSprop.");
}

}  // namespace oxytorch::optim
