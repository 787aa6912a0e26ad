/// `accelerate`: tries strategies on the program's own training step, keeps what pays and is proven, and says so.
///
/// ```cpp
/// auto plan = oxytorch::accelerate(*model, optimizer, oxytorch::supervised(model, torch::nn::CrossEntropyLoss()),
///                                  {first, second, third, fourth});
/// for (auto& example : *loader) plan.step(example);
/// std::cout << plan.report();
/// ```
#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/config.h"
#include "oxytorch/statistics.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/models.h"

namespace oxytorch {

struct AccelerateOptions {
  /// "basic" allows what changes no bit; "advanced" what is rounded differently, bf16 included; "ultra" 8-bit state
  /// too. Empty: that of config, else "advanced".
  TORCH_ARG(std::string, level);
  /// Length of the run, over which what turning a strategy on costs must be repaid.
  TORCH_ARG(std::int64_t, steps_planned) = 10'000;
  /// Largest global norm of the gradients; 0: no clipping. The step does it.
  TORCH_ARG(double, clip_norm) = 0;
  /// Who takes the steps: "plan", by Plan::step(); or "yours", by Plan::loss() or Plan::scope(), and Plan::update().
  /// What changes how a batch is stepped with (split_2 and its like) is then not tried.
  TORCH_ARG(std::string, loop) = "plan";
  /// To be tried; empty: all that are registered.
  TORCH_ARG(std::vector<std::string>, strategies);
  /// Of those, what is not to be tried.
  TORCH_ARG(std::vector<std::string>, exclude);
  /// Seconds for all trials; 0: as tune::SearchOptions::for_run().
  TORCH_ARG(double, tune_seconds) = 0;
  /// Reuse the certificate of an earlier run after a short check, and store this one.
  TORCH_ARG(bool, remember) = true;
  /// Where it is remembered; empty: as tune::CertificateStore. Not beside remember(false).
  TORCH_ARG(std::string, folder);
  /// Settings of the run. What is named in it is honoured: precision, channels_last,
  /// attention, allocator, threads, flush_denormals, deterministic by value, "off" by leaving out; clip_norm,
  /// steps_planned or max_steps, tune_seconds and seed where the option beside is left alone; remember = false here
  /// too. What belongs to a training loop is Error(NotSupported): see PerformanceOptimizer.
  TORCH_ARG(std::optional<PerformanceConfig>, config);
  /// Of the order of measuring and of the verifier.
  TORCH_ARG(std::uint64_t, seed) = 0;
};

/// A training run in which what pays is active. A program that keeps its own loop leaves out step():
///
/// ```cpp
/// for (auto& example : *loader) {
///   optimizer.zero_grad();
///   plan.loss(example).backward();  // or a forward of another shape, with `auto scope = plan.scope();` around it
///   plan.update();                  // in the place of clipping and optimizer.step()
/// }
/// ```
///
/// Models and optimizers stay the caller's and must outlive it; its end is a revert(). Movable. Not for use from
/// several threads at once.
class OXY_API Plan {
 public:
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;

  /// One batch of the run, as oxytorch/tune/training_step.h says; the detached loss. Without a Trainer on this plan
  /// that is a whole training step. Now and then a step is taken without the strategies, to compare; where they no
  /// longer pay, or the losses of one batch are further apart than their kind allows, they are taken back, said once in
  /// the log and in certificate().events. What the step throws passes through, and its gradients are dropped.
  at::Tensor step(const Batch& batch);

  /// The loss of a batch under what is active, with its graph, for a loop of one's own; of several losses that number.
  [[nodiscard]] at::Tensor loss(const Batch& batch, std::size_t number = 0);
  /// What is active around a forward, until the returned guard ends; keep backward outside of it. Inputs are not laid
  /// out otherwise then, as loss() does.
  [[nodiscard]] std::shared_ptr<void> scope() const;
  /// Clips and lets the optimizer step with the gradients that there are, all of them, or of several losses the one
  /// of that number; looks at the run as step() does, by the time from one last update to the next.
  void update(std::size_t number = 0);

  [[nodiscard]] std::vector<std::string> accepted() const;  ///< active
  [[nodiscard]] Interval speedup() const;  ///< seconds as given over seconds now; ones where nothing is active
  [[nodiscard]] const tune::Certificate& certificate() const noexcept;
  [[nodiscard]] std::string report() const;  ///< the certificate as a table

  /// The optimizer that takes the steps now in the place of that one of the caller's. Learning rates are to be set on
  /// the caller's own. std::out_of_range where there are fewer.
  [[nodiscard]] torch::optim::Optimizer& optimizer(std::size_t number = 0) const;
  /// Brings the caller's optimizers up to date with those that step in their place, as before saving them.
  void hand_back();
  /// Takes everything back: the caller's optimizers go on where these stand. step() goes on as given.
  void revert();

 private:
  friend class Trainer;
  friend class Decisions;
  friend OXY_API Plan accelerate(const Models& models, const Optimizers& optimizers, std::vector<LossFunction> losses,
                                 std::vector<Batch> batches, const AccelerateOptions& options);
  struct Impl;
  explicit Plan(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Makes a training step (zero_grad, loss, backward, clip, optimizer step) faster: whole steps are taken on `batches`
/// with and without each registered strategy, in turn; what is faster and passes the verifier is kept. Then model,
/// optimizer and random generators are put back, proven by hash to be bit for bit what they were, and what was accepted
/// is made active. An earlier plan or trainer of the model that still lives is reverted first. A strategy that throws,
/// does not pay or changes numbers beyond its kind is left out, with the reason in the certificate.
///
/// `batches` are some of the run's own, four to eight; they are kept. Model and optimizer state are held twice
/// meanwhile, and by the verifier up to five times.
///
/// Errors: InvalidArgument for options that cannot be meant, before anything ran. What the step as given throws passes
/// through, with everything restored.
OXY_API Plan accelerate(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                        std::vector<Batch> batches, const AccelerateOptions& options = {});

/// The same for a step of several models and several optimizers, such as a GAN's:
///
/// ```cpp
/// auto plan = oxytorch::accelerate({*generator, *discriminator}, {of_discriminator, of_generator},
///                                  {loss_of_discriminator, loss_of_generator}, batches);
/// ```
///
/// Each strategy acts on all models, or on all optimizers that it fits, and all of them are held and verified. One loss
/// is stepped by all optimizers. Of several there is one for each, in the order in which they step; for one after the
/// other a step does its zero_grad, loss, backward, clipping and update, and returns their sum. A loss calls the models
/// itself. A Trainer does not take such a plan.
///
/// Errors: InvalidArgument too where something is given twice, or losses are neither one nor one for each optimizer.
OXY_API Plan accelerate(const Models& models, const Optimizers& optimizers, std::vector<LossFunction> losses,
                        std::vector<Batch> batches, const AccelerateOptions& options = {});

}  // namespace oxytorch
