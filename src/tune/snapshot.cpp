#include "oxytorch/tune/snapshot.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <unordered_set>
#include <vector>

#include "generators/generators.h"
#include "oxytorch/error.h"
#include "oxytorch/memory/parked.h"
#include "tune/digest.h"
#include "tune/optimizer_state.h"
#include "tune/record.h"

namespace oxytorch::tune {
namespace {

struct HeldTensor {
  std::string name;
  at::Tensor tensor;  // the handle that model and optimizer share
  at::Tensor copy;
  at::Tensor gradient, gradient_copy;
  bool requires_grad;
};

struct Mode {
  torch::nn::Module* module;
  bool training;
};

}  // namespace

struct Snapshot::Impl {
  Impl(Run& r, bool random) : run(r), holds_random(random) {
    if (random) generators = generators::states(r.device());
    run.hand_back();
    for (const auto& slot : run.slots()) optimizers.push_back(std::make_unique<HeldOptimizer>(slot.original()));
    std::unordered_set<const void*> seen;
    const auto hold = [&](const std::string& name, const at::Tensor& tensor) {
      if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) return;
      const auto gradient = tensor.is_leaf() ? tensor.grad() : at::Tensor();
      tensors.push_back({name, tensor, copied(tensor), gradient, copied(gradient), tensor.requires_grad()});
    };
    for (const auto& item : run.model().named_parameters()) hold("parameter " + item.key(), item.value());
    for (const auto& item : run.model().named_buffers()) hold("buffer " + item.key(), item.value());
    for (const auto& slot : run.slots()) {
      std::size_t index = 0;
      for (const auto& parameter : slot.parameters()) {
        hold(slot.name() + "'s parameter " + std::to_string(index++), parameter);
      }
    }
    modes.push_back({&run.model(), run.model().is_training()});
    for (const auto& module : run.model().modules(/*include_self=*/false)) {
      modes.push_back({module.get(), module->is_training()});
    }
    taken = present();
    text = taken.text();
  }

  [[nodiscard]] Digest present() const {
    run.hand_back();
    Digest digest;
    for (const auto& held : tensors) {
      digest.add(held.name, held.tensor);
      digest.add("gradient of " + held.name, held.tensor.is_leaf() ? held.tensor.grad() : at::Tensor());
      digest.add("requires_grad of " + held.name, held.tensor.requires_grad() ? "1" : "0");
    }
    for (const auto& slot : run.slots()) digest_optimizer(slot.original(), slot.name(), digest);
    for (const auto& mode : modes) {
      digest.add("training flag of " + mode.module->name(), mode.module->is_training() ? "1" : "0");
    }
    if (holds_random) {
      for (const auto& state : generators::states(run.device())) digest.add("random generator", state);
    }
    return digest;
  }

  void restore() {
    const at::NoGradGuard no_grad;
    for (auto& held : tensors) {
      if (held.tensor.scalar_type() != held.copy.scalar_type()) held.tensor.set_data(held.copy.clone());
      held.tensor.detach().copy_(held.copy);
      held.tensor.set_requires_grad(held.requires_grad);
      if (!held.tensor.is_leaf()) continue;
      // What is written to a detached sparse tensor does not reach the one it is of.
      auto gradient = held.gradient.defined() && !held.gradient.is_sparse() ? held.gradient.detach() : held.gradient;
      if (gradient.defined()) gradient.copy_(held.gradient_copy);
      held.tensor.mutable_grad() = held.gradient;
    }
    for (const auto& optimizer : optimizers) optimizer->restore();
    // train() reaches the children too: they come after their parents.
    for (const auto& mode : modes) {
      if (mode.module->is_training() != mode.training) mode.module->train(mode.training);
    }
    generators::set_states(run.device(), generators);
    run.renew_replacement();
    memory::rest_all();
  }

  Run& run;
  bool holds_random;
  std::vector<HeldTensor> tensors;
  std::vector<std::unique_ptr<HeldOptimizer>> optimizers;
  std::vector<Mode> modes;
  std::vector<at::Tensor> generators;
  Digest taken;
  std::string text;
};

Snapshot::Snapshot(Run& run, bool generators) : impl_(std::make_unique<Impl>(run, generators)) {}
Snapshot::~Snapshot() = default;
void Snapshot::restore() { impl_->restore(); }
std::string Snapshot::digest() const { return impl_->present().text(); }
const std::string& Snapshot::held() const noexcept { return impl_->text; }

void Snapshot::prove() const {
  const auto differs = impl_->taken.first_difference(impl_->present());
  OXY_CHECK(differs.empty(), Internal, "after restoring, the ", differs,
            " is not what it was before tuning. A strategy changed it and did not take that back.");
}

}  // namespace oxytorch::tune
