#include "tune/optimizer_state.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <array>
#include <map>
#include <set>
#include <sstream>
#include <typeindex>
#include <utility>

#include "oxytorch/error.h"
#include "oxytorch/memory/parked.h"
#include "oxytorch/optim/optimizer.h"

namespace oxytorch::tune {
namespace {

using torch::optim::OptimizerParamState;

template <class State>
bool visit_as(OptimizerParamState& any, const EachTensor& tensor, const EachCount& count) {
  auto* const state = dynamic_cast<State*>(&any);
  if (state == nullptr) return false;
  if constexpr (requires { state->step(); }) count(state->step());
  if constexpr (requires { state->exp_avg(); }) {
    tensor("exp_avg", state->exp_avg());
    tensor("exp_avg_sq", state->exp_avg_sq());
    tensor("max_exp_avg_sq", state->max_exp_avg_sq());
  }
  if constexpr (requires { state->momentum_buffer(); }) tensor("momentum_buffer", state->momentum_buffer());
  if constexpr (requires { state->sum(); }) tensor("sum", state->sum());
  if constexpr (requires { state->square_avg(); }) {
    tensor("square_avg", state->square_avg());
    tensor("grad_avg", state->grad_avg());
  }
  return true;
}

template <class... States>
bool visit_as_one_of(OptimizerParamState& any, const EachTensor& tensor, const EachCount& count) {
  return (visit_as<States>(any, tensor, count) || ...);
}

template <class Serializable>
std::string bytes_of(const Serializable& value) {
  torch::serialize::OutputArchive archive;
  value.serialize(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

// A class of the user's may not serialise its options; then the learning rate is what can be known of them.
std::string bytes_of_options(const torch::optim::OptimizerOptions& options) {
  try {
    return bytes_of(options);
  } catch (const c10::Error&) {
    return std::to_string(options.get_lr());
  }
}

template <class Visit>
void each_native_entry(optim::ParamState& state, Visit visit) {
  visit("step", state.step);
  for (auto& moment : state.moments) visit("moment", moment);
  for (auto& scale : state.scales) visit("scale", scale);
  visit("master", state.master);
  visit("low_bits", state.low_bits);
  visit("ema", state.ema);
  visit("copy", state.copy);
}

optim::ParamState copy_of(optim::ParamState state) {
  each_native_entry(state, [](const char*, at::Tensor& t) {
    if (t.defined()) t = t.clone();
  });
  return state;
}

std::array<at::Tensor, 7> stats_of(const optim::TailOptimizer& tail) {
  const auto& s = tail.tail_stats();
  return {s.grad_norm, s.found_inf, s.applied, s.skipped, s.grad_norms, s.param_norms, s.update_norms};
}

struct HeldState {
  std::unique_ptr<OptimizerParamState> value;  // with tensors of its own, or the object whose bytes are beside
  std::string bytes;
};

// A copy, with what `copy` makes of its tensors.
HeldState held(const OptimizerParamState& state, at::Tensor (*copy)(const at::Tensor&)) {
  HeldState result{state.clone(), ""};
  const bool known = each_entry(
      *result.value,
      [copy](const char*, at::Tensor& t) {
        if (t.defined()) t = copy(t);
      },
      [](std::int64_t&) {});
  if (!known) result.bytes = bytes_of(state);
  return result;
}

std::unique_ptr<OptimizerParamState> made_from(const HeldState& state) {
  if (state.bytes.empty()) {
    return held(*state.value, [](const at::Tensor& t) { return t.clone(); }).value;
  }
  auto made = state.value->clone();
  torch::serialize::InputArchive archive;
  std::istringstream stream(state.bytes);
  archive.load_from(stream);
  made->serialize(archive);
  return made;
}

}  // namespace

bool each_entry(OptimizerParamState& state, const EachTensor& tensor, const EachCount& count) {
  return visit_as_one_of<torch::optim::AdamWParamState, torch::optim::AdamParamState, torch::optim::SGDParamState,
                         torch::optim::AdagradParamState, torch::optim::RMSpropParamState>(state, tensor, count);
}

bool each_state_tensor(torch::optim::Optimizer& optimizer,
                       const std::function<void(const at::Tensor&, at::Tensor&)>& visit) {
  if (dynamic_cast<optim::TailOptimizer*>(&optimizer) != nullptr) return false;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& param : group.params()) {
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto tensor = [&](const char*, at::Tensor& value) {
        if (value.defined()) visit(param, value);
      };
      if (!each_entry(*found->second, tensor, [](std::int64_t&) {})) return false;
    }
  }
  return true;
}

bool is_by_parameter(const torch::optim::Optimizer& optimizer) {
  const std::type_index type = typeid(optimizer);
  return type == typeid(torch::optim::AdamW) || type == typeid(torch::optim::Adam) ||
         type == typeid(torch::optim::SGD) || type == typeid(torch::optim::Adagrad) ||
         type == typeid(torch::optim::RMSprop);
}

NarrowedOptimizer::NarrowedOptimizer(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters)
    : optimizer_(optimizer) {
  std::set<const void*> chosen;
  for (const auto& parameter : parameters) chosen.insert(parameter.unsafeGetTensorImpl());
  for (auto& group : optimizer.param_groups()) {
    std::vector<at::Tensor> own;
    for (const auto& parameter : group.params()) {
      if (chosen.contains(parameter.unsafeGetTensorImpl())) own.push_back(parameter);
    }
    held_.push_back(std::exchange(group.params(), std::move(own)));
  }
}

NarrowedOptimizer::~NarrowedOptimizer() {
  for (std::size_t g = 0; g < held_.size(); ++g) optimizer_.param_groups()[g].params() = std::move(held_[g]);
}

struct HeldOptimizer::Impl {
  torch::optim::Optimizer& optimizer;
  optim::TailOptimizer* tail;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  std::vector<std::string> option_bytes;
  std::map<void*, HeldState> states;
  std::vector<optim::ParamState> native;
  std::array<at::Tensor, 7> stats;
};

HeldOptimizer::HeldOptimizer(torch::optim::Optimizer& optimizer)
    : impl_(std::make_unique<Impl>(
          Impl{optimizer, dynamic_cast<optim::TailOptimizer*>(&optimizer), {}, {}, {}, {}, {}})) {
  auto& self = *impl_;
  for (const auto& group : optimizer.param_groups()) {
    self.options.push_back(group.options().clone());
    self.option_bytes.push_back(bytes_of_options(group.options()));
  }
  if (self.tail == nullptr) {
    for (const auto& [param, state] : optimizer.state())
      self.states.emplace(param, held(*state, [](const at::Tensor& t) { return memory::park(t); }));
    return;
  }
  for (std::size_t i = 0; i < self.tail->tail().param_count(); ++i) {
    self.native.push_back(copy_of(self.tail->tail().state(i)));
  }
  self.stats = stats_of(*self.tail);
  for (auto& value : self.stats) value = value.defined() ? value.clone() : value;
}

HeldOptimizer::~HeldOptimizer() = default;

void HeldOptimizer::restore() const {
  const auto& self = *impl_;
  auto& groups = self.optimizer.param_groups();
  OXY_CHECK(groups.size() == self.options.size(), InvalidState, "the optimizer had ", self.options.size(),
            " parameter groups and has ", groups.size(), " now; add groups before or after tuning.");
  // Someone may hold a reference to the options: they are replaced only where they changed.
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (bytes_of_options(groups[g].options()) != self.option_bytes[g]) groups[g].set_options(self.options[g]->clone());
  }
  if (self.tail == nullptr) {
    auto& state = self.optimizer.state();
    state.clear();
    for (const auto& [param, held_state] : self.states) state[param] = made_from(held_state);
    return;
  }
  // A tail that had not stepped has no statistics: built anew, it has none again.
  if (!self.stats.front().defined() && self.tail->tail_stats().grad_norm.defined()) self.tail->adopt_dtypes();
  for (std::size_t i = 0; i < self.native.size(); ++i) self.tail->set_state(i, copy_of(self.native[i]));
  auto now = stats_of(*self.tail);
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i].defined() && self.stats[i].defined()) now[i].copy_(self.stats[i]);
  }
}

void digest_options(const torch::optim::Optimizer& optimizer, const std::string& called, Digest& digest) {
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    digest.add("options of parameter group " + std::to_string(g) + " of " + called,
               std::string_view(bytes_of_options(optimizer.param_groups()[g].options())));
  }
}

void digest_optimizer(torch::optim::Optimizer& optimizer, const std::string& called, Digest& digest) {
  digest_options(optimizer, called, digest);
  auto* const tail = dynamic_cast<optim::TailOptimizer*>(&optimizer);
  std::size_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& param : group.params()) {
      const std::string name = " of " + called + "'s parameter " + std::to_string(index);
      const auto tensor = [&](const char* entry, at::Tensor& value) { digest.add(entry + name, value); };
      if (tail != nullptr) {
        auto state = tail->tail().state(index);
        each_native_entry(state, tensor);
      } else if (const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
                 found != optimizer.state().end()) {
        const auto count = [&](std::int64_t& steps) { digest.add("steps" + name, std::to_string(steps)); };
        if (!each_entry(*found->second, tensor, count)) {
          digest.add("state" + name, std::string_view(bytes_of(*found->second)));
        }
      }
      ++index;
    }
  }
  if (tail == nullptr) return;
  for (const auto& value : stats_of(*tail)) digest.add("statistics of the step tail of " + called, value);
}

}  // namespace oxytorch::tune
