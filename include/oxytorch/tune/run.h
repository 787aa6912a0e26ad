/// Run: a training run as strategies see it: model, optimizer, batches, one step of it, and where it may be changed.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/strategy.h"

namespace oxytorch::tune {

/// An optimizer that does the steps of the user's one.
struct Replacement {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::function<void()> hand_back;  ///< gives the state it has now to the user's optimizer; may be called many times
  bool clips = false;               ///< it clips by Run::clip_norm() itself
};

/// A step is: zero_grad, loss, backward, clip (with `clip_norm`), optimizer step. Model and optimizer are borrowed and
/// must outlive the run. Not for use from several threads at once.
class OXY_API Run {
 public:
  using Scope = std::function<std::shared_ptr<void>()>;
  using Transform = std::function<Batch(const Batch&)>;
  /// Makes a replacement that carries on where the user's optimizer stands.
  using MakeReplacement = std::function<Replacement(torch::optim::Optimizer& original)>;

  /// Error(InvalidArgument) without a loss function, a batch or a parameter.
  Run(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, std::vector<Batch> batches,
      double clip_norm = 0);
  /// Takes back what is in force.
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  [[nodiscard]] torch::nn::Module& model() const noexcept { return model_; }
  [[nodiscard]] torch::optim::Optimizer& original() const noexcept { return original_; }  ///< the user's
  [[nodiscard]] torch::optim::Optimizer& optimizer() const noexcept;                      ///< the one that steps now
  [[nodiscard]] const std::vector<Batch>& batches() const noexcept { return batches_; }
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const noexcept {
    return parameters_;
  }  ///< of the optimizer
  [[nodiscard]] at::Device device() const noexcept { return device_; }
  [[nodiscard]] double clip_norm() const noexcept { return clip_norm_; }

  /// The loss under what is in force, with its graph. Error(InvalidArgument) where it is no scalar.
  [[nodiscard]] at::Tensor loss(const Batch& batch) const;
  /// Zeroes gradients, then forward and backward; the detached loss.
  at::Tensor backward(const Batch& batch);
  /// Clips and lets the optimizer step. Learning rates set on the user's optimizer count.
  void update();
  at::Tensor step(const Batch& batch);

  // -- where a strategy may change it ---------------------------------------------------------------------------------

  void scope(const std::string& name, Scope enter);        ///< entered around each forward; empty: taken away
  void inputs(const std::string& name, Transform change);  ///< of each batch on its way in; empty: taken away
  /// Pieces that a batch is cut into along its first dimension, gradients averaged by their rows.
  void set_micro_batches(int pieces);
  [[nodiscard]] int micro_batches() const noexcept { return micro_batches_; }
  /// Lets what `make` returns do the steps; empty: the user's optimizer itself again, with the state reached.
  void replace_optimizer(MakeReplacement make);
  /// Brings the user's optimizer up to date with its replacement, which goes on.
  void hand_back();
  /// Makes the replacement anew, as the user's optimizer was changed.
  void renew_replacement();

  // -- strategies -----------------------------------------------------------------------------------------------------

  [[nodiscard]] const std::vector<std::string>& in_force() const noexcept { return in_force_; }
  [[nodiscard]] Strategy& strategy(const std::string& name);
  /// Puts exactly these in force: others are taken back, the last first, then the missing ones applied. Where one
  /// cannot be applied, those of this call are taken back again and its exception passes through. Where one cannot be
  /// taken back, the others are, nothing is applied, and its exception passes through.
  void bring(const std::vector<std::string>& names);

 private:
  torch::nn::Module& model_;
  torch::optim::Optimizer& original_;
  LossFunction loss_;
  std::vector<Batch> batches_;
  std::vector<at::Tensor> parameters_;
  at::Device device_;
  double clip_norm_;
  int micro_batches_ = 1;
  std::vector<std::pair<std::string, Scope>> scopes_;
  std::vector<std::pair<std::string, Transform>> inputs_;
  MakeReplacement make_;
  Replacement replacement_;
  std::map<std::string, std::unique_ptr<Strategy>> strategies_;
  std::vector<std::string> in_force_;
};

/// Rows of a batch: the size of its input's first dimension.
[[nodiscard]] OXY_API std::int64_t rows(const Batch& batch);

}  // namespace oxytorch::tune
