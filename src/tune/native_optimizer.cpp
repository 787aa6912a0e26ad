#include "tune/native_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <optional>
#include <typeinfo>
#include <vector>

#include "oxytorch/tune/native_step.h"
#include "tune/optimizer_state.h"

namespace oxytorch::tune {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// A group's step: its tensors, and what takes it.
struct GroupStep {
  StepTensors tensors;
  std::vector<double> steps;
  std::vector<std::int64_t*> counts;  // of the state, to go up by one
};

template <class State>
State* state_of(Optimizer& optimizer, const at::Tensor& param) {
  const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : dynamic_cast<State*>(found->second.get());
}

// Calls with(param, state) for each parameter that has a gradient; false where the step must be torch's.
template <class State, class With>
bool each_param(Optimizer& optimizer, const OptimizerParamGroup& group, bool needs_state, GroupStep& step, With with) {
  for (const auto& param : group.params()) {
    if (!param.grad().defined()) continue;
    auto* const state = state_of<State>(optimizer, param);
    if (param.grad().layout() != at::kStrided || param.is_complex() || (needs_state && state == nullptr)) return false;
    step.tensors.params.push_back(param);
    step.tensors.grads.push_back(param.grad());
    if (state != nullptr && !with(*state)) return false;
  }
  return true;
}

template <class TorchClass, class TorchOptions, class State, bool kDecoupled>
struct AdamKind {
  using Torch = TorchClass;
  using Options = TorchOptions;
  static std::optional<GroupStep> group(Optimizer& optimizer, OptimizerParamGroup& group, const Options& options) {
    GroupStep step;
    const bool whole = each_param<State>(optimizer, group, true, step, [&](State& state) {
      step.tensors.exp_avgs.push_back(state.exp_avg());
      step.tensors.exp_avg_sqs.push_back(state.exp_avg_sq());
      if (options.amsgrad()) step.tensors.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
      step.counts.push_back(&state.step());
      step.steps.push_back(static_cast<double>(state.step() + 1));
      return !options.amsgrad() || state.max_exp_avg_sq().defined();
    });
    return whole ? std::optional(std::move(step)) : std::nullopt;
  }
  static void take(const Options& options, const GroupStep& step) {
    const auto [beta1, beta2] = options.betas();
    adam_step({.front_end = FrontEnd::Cpp,
               .lr = options.lr(),
               .beta1 = beta1,
               .beta2 = beta2,
               .eps = options.eps(),
               .weight_decay = options.weight_decay(),
               .decoupled_weight_decay = kDecoupled},
              step.tensors, step.steps);
    for (std::int64_t* count : step.counts) ++*count;
  }
};
using AdamW =
    AdamKind<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState, /*kDecoupled=*/true>;
using Adam =
    AdamKind<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState, /*kDecoupled=*/false>;

struct Sgd {
  using Torch = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static std::optional<GroupStep> group(Optimizer& optimizer, OptimizerParamGroup& group, const Options& options) {
    GroupStep step;
    const bool momentum = options.momentum() != 0;
    const bool whole = each_param<State>(optimizer, group, momentum, step, [&](State& state) {
      if (momentum) step.tensors.momentum_buffers.push_back(state.momentum_buffer());
      return !momentum || state.momentum_buffer().defined();
    });
    return whole ? std::optional(std::move(step)) : std::nullopt;
  }
  static void take(const Options& options, const GroupStep& step) {
    sgd_step({.front_end = FrontEnd::Cpp,
              .lr = options.lr(),
              .momentum = options.momentum(),
              .dampening = options.dampening(),
              .weight_decay = options.weight_decay(),
              .nesterov = options.nesterov()},
             step.tensors);
  }
};

template <class Kind>
class Native : public Optimizer {
 public:
  explicit Native(Optimizer& original)
      : Optimizer(original.param_groups(), original.defaults().clone()), original_(original) {}

  at::Tensor step(LossClosure closure) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode with_grad(true);
      loss = closure();
    }
    std::vector<GroupStep> steps;
    for (auto& group : original_.param_groups()) {
      auto found = Kind::group(original_, group, options(group));
      if (!found) {
        original_.step();
        return loss;
      }
      steps.push_back(std::move(*found));
    }
    for (std::size_t g = 0; g < steps.size(); ++g) Kind::take(options(original_.param_groups()[g]), steps[g]);
    return loss;
  }

 private:
  static const typename Kind::Options& options(const OptimizerParamGroup& group) {
    return static_cast<const typename Kind::Options&>(group.options());
  }
  Optimizer& original_;
};

template <class Kind>
std::string differs_as(const Optimizer& original) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  const auto normal = [&](std::int64_t size) { return at::empty({size}, at::kFloat).normal_(0, 1, generator); };
  std::vector<OptimizerParamGroup> groups[2];
  for (const auto& group : original.param_groups()) {
    std::vector<at::Tensor> first, second;
    for (const std::int64_t size : {1, 37, 1030}) {
      first.push_back(normal(size));
      second.push_back(first.back().clone());
    }
    groups[0].emplace_back(std::move(first), group.options().clone());
    groups[1].emplace_back(std::move(second), group.options().clone());
  }
  const typename Kind::Options defaults(original.defaults().get_lr());
  typename Kind::Torch wanted(groups[0], defaults), followed(groups[1], defaults);
  Native<Kind> native(followed);
  std::vector<at::Tensor> traces[2];
  for (int step = 0; step < 4; ++step) {
    for (std::size_t g = 0; g < groups[0].size(); ++g) {
      for (std::size_t i = 0; i < wanted.param_groups()[g].params().size(); ++i) {
        at::Tensor& param = wanted.param_groups()[g].params()[i];
        param.mutable_grad() = normal(param.numel());
        followed.param_groups()[g].params()[i].mutable_grad() = param.grad().clone();
      }
    }
    wanted.step();
    native.step(nullptr);
  }
  const auto trace = [](Optimizer& optimizer, std::vector<at::Tensor>& to) {
    for (const auto& group : optimizer.param_groups())
      to.insert(to.end(), group.params().begin(), group.params().end());
    each_state_tensor(optimizer, [&](const at::Tensor&, at::Tensor& value) { to.push_back(value); });
  };
  trace(wanted, traces[0]);
  trace(followed, traces[1]);
  for (std::size_t i = 0; i < traces[0].size(); ++i) {
    if (!at::equal(traces[0][i], traces[1][i])) return "the native step differs from this torch's.";
  }
  return {};
}

// Calls with(kind) where the class is one that is served, and not derived from it; else returns `otherwise`.
template <class Result, class With>
Result as_kind(Optimizer& original, Result otherwise, With with) {
  const auto& type = typeid(original);
  if (type == typeid(AdamW::Torch)) return with(AdamW());
  if (type == typeid(Adam::Torch)) return with(Adam());
  if (type == typeid(Sgd::Torch)) return with(Sgd());
  return otherwise;
}

}  // namespace

std::unique_ptr<Optimizer> native_optimizer(Optimizer& original) {
  return as_kind(original, std::unique_ptr<Optimizer>(), [&](auto kind) -> std::unique_ptr<Optimizer> {
    return std::make_unique<Native<decltype(kind)>>(original);
  });
}

std::string native_optimizer_differs(Optimizer& original) {
  if (const auto& reason = native_step_differs(); !reason.empty()) return reason + ".";
  return as_kind(original, std::string("there is no native step of this optimizer."),
                 [&](auto kind) { return differs_as<decltype(kind)>(original); });
}

}  // namespace oxytorch::tune
