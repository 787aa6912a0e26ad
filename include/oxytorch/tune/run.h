/// Run: a training run as strategies see it: its step, some of its batches, and what is active on it.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/models.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/training_step.h"

namespace oxytorch::tune {

/// Models and optimizers are borrowed and must outlive the run. Not for use from several threads at once.
class OXY_API Run : public TrainingStep {
 public:
  /// Without batches nothing can be tried on it. Error(InvalidArgument) as TrainingStep.
  Run(const Models& models, const Optimizers& optimizers, std::vector<LossFunction> losses, std::vector<Batch> batches,
      double clip_norm = 0);
  Run(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, std::vector<Batch> batches,
      double clip_norm = 0);
  /// Takes back what is active.
  ~Run() override;

  [[nodiscard]] const std::vector<Batch>& batches() const noexcept { return batches_; }
  void set_batches(std::vector<Batch> batches) { batches_ = std::move(batches); }

  [[nodiscard]] const std::vector<std::string>& active() const noexcept { return active_; }
  /// Active, and not asked for by the caller's settings.
  [[nodiscard]] std::vector<std::string> beside_required() const;
  [[nodiscard]] Strategy& strategy(const std::string& name);
  /// Strategies that the caller's settings ask for: set_active() leaves them active, and puts them first.
  std::vector<std::string> required;
  /// Settings that the caller named by a word, for strategies that have a choice.
  std::map<std::string, std::string> asked;
  bool owns_loop = true;  ///< the plan takes the steps, so that a strategy may change how a batch is stepped with
  std::optional<std::uint64_t> retain_limit;  ///< bytes that the allocator may keep; empty: its own choice
  /// Bytes of the tensors on its device that a step on `batch` begins with, each memory once: models, optimizer state,
  /// batch.
  /// Gradients are made anew.
  [[nodiscard]] std::int64_t held_bytes(const Batch& batch) const;

  /// Makes exactly these active: others are taken back, the last first, then the missing ones applied. Where one
  /// cannot be applied, those of this call are taken back again and its exception passes through. Where one cannot be
  /// taken back, the others are, nothing is applied, and its exception passes through.
  void set_active(const std::vector<std::string>& names);
  /// Tells what is active that trials are over and it stays.
  void settle();

 private:
  std::vector<Batch> batches_;
  std::map<std::string, std::unique_ptr<Strategy>> strategies_;
  std::vector<std::string> active_;
};

}  // namespace oxytorch::tune
