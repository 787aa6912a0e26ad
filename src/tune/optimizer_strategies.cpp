/// Strategies of the optimizer's step: which code takes it, in what format its state is kept and where, and when each
/// parameter is updated.
#include <torch/types.h>

#include <map>
#include <utility>

#include "oxytorch/error.h"
#include "oxytorch/memory/parked.h"
#include "oxytorch/optim.h"
#include "oxytorch/tune/run.h"
#include "tune/native_optimizer.h"
#include "tune/optimizer_state.h"
#include "tune/strategies.h"

namespace oxytorch::tune {
namespace {

using torch::optim::Optimizer;

/// Replaces each optimizer of the run that it fits.
struct OfOptimizers : Strategy {
  /// Why it is not for this one; empty where it is.
  virtual std::string unfit(Run& run, Optimizer& original) = 0;
  virtual Replacement replacement(Run& run, Optimizer& original) = 0;

  Applicability applies(Run& run) override {
    std::string whys;
    for (const auto& slot : run.slots()) {
      auto why = unfit(run, slot.original());
      if (why.empty()) return true;
      if (run.slots().size() == 1) return why;
      whys += (whys.empty() ? "" : " ") + slot.name() + ": " + why;
    }
    return whys;
  }
  void apply(Run& run) override {
    run.replace_optimizer([this, &run](Optimizer& original) {
      const bool left = run.slots().size() > 1 && !unfit(run, original).empty();
      return left ? Replacement() : replacement(run, original);
    });
  }
  void revert(Run& run) override { run.replace_optimizer({}); }
};

struct NativeStep : OfOptimizers {
  std::string unfit(Run& run, Optimizer& original) override {
    const auto here = on_cpu(run);
    return here.holds ? native_optimizer_differs(original) : here.reason;
  }
  Replacement replacement(Run& /*run*/, Optimizer& original) override {
    return {native_optimizer(original), [] {}};  // it steps on the state of the user's
  }
};

template <optim::StateFormat Format>
struct Tail : OfOptimizers {
  std::string unfit(Run& run, Optimizer& original) override {
    if (dynamic_cast<optim::TailOptimizer*>(&original) != nullptr) {
      return "the optimizer is one of oxytorch::optim already.";
    }
    try {
      static_cast<void>(optim::replace(original, options(run)));
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  }
  Replacement replacement(Run& run, Optimizer& original) override {
    auto tail = optim::replace(original, options(run));
    tail->set_accumulating(run.updates_in_backward());  // the run says which backward completes gradients
    auto hand_back = [this, from = tail.get(), &original] { give_back(*from, original); };
    return {std::move(tail), std::move(hand_back), run.clip_norm() > 0};
  }
  virtual void give_back(const optim::TailOptimizer& from, Optimizer& original) { optim::hand_back(from, original); }

  static optim::TailOptions options(const Run& run) {
    optim::TailOptions tail;
    tail.clip_norm = run.clip_norm();
    tail.nonfinite = optim::NonFinite::Propagate;
    tail.step_in_backward = run.updates_in_backward();
    const auto asked = run.asked.find("optimizer_state");
    const bool bf16 = Format == optim::StateFormat::Auto && asked != run.asked.end() && asked->second == "bf16";
    tail.state_dtype = bf16 ? optim::StateFormat::BFloat16 : Format;
    return tail;
  }
};

void move_to_files(Optimizer& optimizer) {
  each_state_tensor(optimizer, [](const at::Tensor&, at::Tensor& value) { memory::move_to_file(value); });
}

void move_to_memory(const Run& run) {
  for (const auto& slot : run.slots()) {
    each_state_tensor(slot.original(), [](const at::Tensor&, at::Tensor& value) { memory::move_to_memory(value); });
  }
}

/// Once it stays, the state as torch keeps it waits in a file: trials would ask for it again and again.
struct Int8State : Tail<optim::StateFormat::Int8> {
  void settle_in(Run& run) override {
    settled = true;
    for (const auto& slot : run.slots()) {
      if (slot.tail() != nullptr) static_cast<void>(slot.tail()->tail());  // has its own, made of the wide ones
      move_to_files(slot.original());
    }
  }
  void revert(Run& run) override {
    Tail::revert(run);
    move_to_memory(run);
  }
  void give_back(const optim::TailOptimizer& from, Optimizer& original) override {
    Tail::give_back(from, original);
    if (settled) move_to_files(original);
  }
  bool settled = false;
};

/// Why an optimizer cannot step a part of its parameters at a time; empty where it can.
std::string not_by_parameter(const Optimizer& original) {
  if (dynamic_cast<const optim::TailOptimizer*>(&original) != nullptr) {
    return "the optimizer is one of oxytorch::optim already.";
  }
  if (is_by_parameter(original)) return {};
  return "the optimizer may look at all parameters together.";
}

/// Steps the user's optimizer, or in native code as it does, a part of its parameters after the other; their state is
/// in files.
class SteppingFiles : public Optimizer {
 public:
  explicit SteppingFiles(Optimizer& original)
      : Optimizer(original.param_groups(), original.defaults().clone()), original_(original) {
    if (native_optimizer_differs(original).empty()) native_ = native_optimizer(original);
    move_to_files(original);
  }

  at::Tensor step(LossClosure closure) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode with_grad(true);
      loss = closure();
    }
    const auto all = parts();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i + 1 < all.size()) {
        const NarrowedOptimizer next(original_, all[i + 1]);
        each_state_tensor(original_, [](const at::Tensor&, at::Tensor& value) { memory::read_ahead(value); });
      }
      const NarrowedOptimizer part(original_, all[i]);
      each_state_tensor(original_, [](const at::Tensor&, at::Tensor& value) { memory::populate(value); });
      native_ ? native_->step() : original_.step();
      each_state_tensor(original_, [](const at::Tensor&, at::Tensor& value) {
        memory::move_to_file(value);  // what the step has made
        memory::rest(value);
      });
    }
    return loss;
  }

 private:
  [[nodiscard]] std::vector<std::vector<at::Tensor>> parts() {
    std::map<const void*, std::size_t> bytes;
    each_state_tensor(original_, [&](const at::Tensor& parameter, at::Tensor& value) {
      bytes[parameter.unsafeGetTensorImpl()] += value.nbytes();
    });
    std::vector<at::Tensor> parameters;
    std::vector<std::size_t> sizes;
    for (const auto& group : original_.param_groups()) {
      for (const auto& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        const auto known = bytes.find(parameter.unsafeGetTensorImpl());
        sizes.push_back(known == bytes.end() ? 2 * parameter.nbytes() : known->second);
        parameters.push_back(parameter);
      }
    }
    std::vector<std::vector<at::Tensor>> all;
    auto next = parameters.begin();
    for (const auto count : memory::parked_parts(sizes)) {
      const auto first = std::exchange(next, next + static_cast<std::ptrdiff_t>(count));
      all.emplace_back(first, next);
    }
    return all;
  }

  Optimizer& original_;
  std::unique_ptr<Optimizer> native_;
};

struct StateInFile : OfOptimizers {
  std::string unfit(Run& run, Optimizer& original) override {
    const auto here = on_cpu(run);
    return here.holds ? not_by_parameter(original) : here.reason;
  }
  Replacement replacement(Run& /*run*/, Optimizer& original) override {
    return {std::make_unique<SteppingFiles>(original), [] {}};  // it steps on the state of the user's
  }
  void revert(Run& run) override {
    OfOptimizers::revert(run);
    move_to_memory(run);
  }
};

struct UpdateInBackward : Strategy {
  Applicability applies(Run& run) override {
    if (run.slots().size() > 1) return "there are several optimizers.";
    if (run.clip_norm() > 0 || run.clip_value > 0) return "gradients are clipped, which takes all of them.";
    if (run.scaler || run.guard.policy() != optim::NonFinite::Propagate) {
      return "a step with a gradient that is not finite is left out, which is known after backward.";
    }
    if (auto why = not_by_parameter(run.original()); !why.empty()) return why;
    return true;
  }
  void apply(Run& run) override { run.set_updates_in_backward(true); }
  void revert(Run& run) override { run.set_updates_in_backward(false); }
};

}  // namespace

std::vector<RegisteredStrategy> optimizer_strategies() {
  using enum Kind;
  return {
      registered<NativeStep>("native_step", Exact,
                             {.group = "optimizer", .max_speedup = 1.8, .expected_speedup = 1.15}),
      registered<Tail<optim::StateFormat::Auto>>(
          "step_tail", Tolerance,
          {.group = "optimizer", .interacts = {"channels_last"}, .max_speedup = 1.8, .expected_speedup = 1.2}),
      registered<Int8State>("int8_state", Trade,
                            {.group = "optimizer",
                             .interacts = {"channels_last"},
                             .cost = "the optimizer's running averages are rounded to 8 bits; the wide ones wait in a "
                                     "file while it may be taken back.",
                             .max_speedup = 1.8}),
      registered<StateInFile>("state_in_file", Exact,
                              {.group = "optimizer",
                               .settle = 2,
                               .cost = "the optimizer's state is in a file, in TMPDIR or /var/tmp, read and "
                                       "written in each step.",
                               .max_speedup = 1}),
      registered<UpdateInBackward>("update_in_backward", Trade,
                                   {.group = "update",
                                    .settle = 2,
                                    .cost = "gradients are gone after a step; one that fails in its backward has "
                                            "updated some parameters.",
                                    .max_speedup = 1,
                                    .needs_loop = true}),
  };
}

}  // namespace oxytorch::tune
