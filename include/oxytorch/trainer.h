/// The training loop for C++ programs: the step of oxytorch/tune/training_step.h under a configuration (accumulate,
/// autocast, backward, step tail, average, schedule), and an account of what was on.
///
/// ```cpp
/// oxytorch::optim::AdamW optimizer(model->parameters(), oxytorch::optim::AdamWOptions(1e-3).clip_norm(1.0));
/// oxytorch::Trainer trainer(*model, optimizer, oxytorch::supervised(model, torch::nn::CrossEntropyLoss()));
/// for (auto& example : *loader) trainer.step(example);
/// std::cout << trainer.report();
/// ```
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/config.h"
#include "oxytorch/monitor/report.h"
#include "oxytorch/trainer/early_stopping.h"
#include "oxytorch/trainer/step_graph.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/models.h"
#include "oxytorch/tune/setting_lines.h"

namespace oxytorch {

class MemoryManager;
class Plan;
namespace data {
class TensorLoader;
}

/// How a call of `fit` ended.
struct FitResult {
  std::string stop_reason;               ///< "epochs", "max_steps", "early_stopping", "SIGTERM" or "SIGINT"
  int64_t steps = 0;                     ///< optimizer steps of this call
  std::vector<double> losses;            ///< mean loss of each finished epoch
  std::vector<double> validations = {};  ///< what `validate` returned, where one was given
};

struct TrainerOptions {
  /// Whether anything may be tried: without, what is "auto" stays as it is, and two runs are alike to the bit.
  bool calibrate = true;
  /// Its step() is called after each optimizer step. Borrowed: it must outlive the trainer.
  MemoryManager* memory = nullptr;
};

/// Runs training steps under a PerformanceConfig.
///
/// Model and optimizer are borrowed and must outlive the trainer. With an optimizer of oxytorch::optim nothing on the
/// step path reads the device on the host; another optimizer is served too, with one host read a step under float16 or
/// where `nonfinite` is not "propagate".
///
/// What is named is active from the start, at any level. What is "auto" is decided on the first batch by what
/// accelerate() does: whole steps with and without each change, verified, within a second or 2 % of the planned run
/// (tune_seconds says another number). Model, optimizer, gradients and generators are put back, bit for bit, before the
/// first step is taken; what the loss function reaches beside them is not, and it is called some hundreds of times.
/// Nothing is tried where the first batch is a closure, or a parameter has a hook that acts in backward. The run is
/// watched then, as that of a plan: on a CPU each step reads the loss. Nor is anything tried in one of several
/// processes, which would decide differently (WORLD_SIZE says so). The end of a trainer is a revert(). Not for use from
/// several threads at once.
///
/// Errors: NotSupported for a setting that was given and cannot be honoured, InvalidArgument for settings that
/// contradict each other or the optimizer's own options, or a loss that is no scalar. An exception of the
/// loss function passes through; the gradients of its window are dropped and the counters are right.
class OXY_API Trainer {
 public:
  /// An earlier plan or trainer of the model that still lives is reverted first.
  Trainer(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
          PerformanceConfig config = PerformanceConfig("advanced"), TrainerOptions options = {});
  Trainer(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, std::string_view level,
          TrainerOptions options = {})
      : Trainer(model, optimizer, std::move(loss), PerformanceConfig(level), options) {}
  /// Takes the steps of a plan of accelerate(), which must outlive it; Plan::step() then does what this configuration
  /// says as well: accumulation, clip_value, ema_decay, nonfinite where it was given, grad_scaler, the schedule. What
  /// the plan has decided is not decided again, and what concerns the process is left as it is. InvalidArgument for a
  /// clip_norm that is not the plan's.
  explicit Trainer(Plan& plan, PerformanceConfig config = PerformanceConfig("basic"), MemoryManager* memory = nullptr);
  ~Trainer();
  Trainer(Trainer&&) noexcept;
  Trainer& operator=(Trainer&&) noexcept;

  /// Takes one batch to the model's device, through forward and backward, and the optimizer once a window of
  /// `accumulation_steps` is full. Returns the detached loss of this batch, not read on the host.
  at::Tensor step(const Batch& batch);
  /// The same for a loop of another shape: taken with what is active, and not watched. Where it is the first, nothing
  /// is tried.
  at::Tensor step(const std::function<at::Tensor()>& closure);
  /// Steps with the batches of an unfinished window, averaged over their actual number; false where none waited.
  bool flush();

  /// Trains over `loader` (a range of batches, or of what a Batch is made of, such as torch's examples) until `epochs`
  /// or `max_steps` optimizer steps, the settings' max_steps or early stopping. 0 is no bound; one of them is needed.
  /// Both count in total, with those of earlier calls and of a run that was loaded. An epoch that was broken off goes
  /// on where it was with a loader that can say where that is, such as oxytorch::data::TensorLoader; with another it is
  /// begun anew. A window of batches that is unfinished at the end of an epoch is stepped with, averaged over the
  /// batches it has. Early stopping goes by what `validate` returns after each epoch, or by the mean training loss;
  /// with early_stopping_restore_best the weights of its best epoch are back at the end, unless a signal ended it.
  /// The settings num_workers, prefetch, pin_memory and cache are of an oxytorch::data::TensorLoader, and so is the
  /// model's device where it has none; they are taken back at the end.
  /// Where the settings do not say how long the run is, the trials go by these bounds and the size of `loader`.
  /// SIGTERM and SIGINT end it after the step in progress; the handlers of before are put back.
  template <class Loader>
  FitResult fit(Loader& loader, int64_t epochs, int64_t max_steps = 0, const std::function<double()>& validate = {}) {
    int64_t length = 0;
    if constexpr (requires { std::size(loader); }) length = static_cast<int64_t>(std::size(loader));
    Position position;
    if constexpr (requires { loader.load_state(loader.state()); }) {
      position.state = [&loader] { return loader.state(); };
      position.load = [&loader](const std::string& state) { loader.load_state(state); };
    }
    if constexpr (std::is_base_of_v<data::TensorLoader, Loader>) position.loader = &loader;
    if constexpr (requires { loader.set_epoch(int64_t{0}); }) {
      position.set_epoch = [&loader](int64_t epoch) { loader.set_epoch(epoch); };
    }
    return run_fit(
        [&loader](const std::function<bool(const Batch&)>& take) {
          for (auto&& example : loader) {
            if (!take(Batch(example))) return;
          }
        },
        position, length, epochs, max_steps, validate);
  }

  [[nodiscard]] int64_t global_step() const noexcept;  ///< optimizer steps taken
  [[nodiscard]] int64_t epoch() const noexcept;        ///< epochs finished
  [[nodiscard]] int64_t batches() const noexcept;      ///< batches seen, those of failed steps excluded

  /// Puts the averaged weights into the model until the returned guard ends. InvalidState where none are kept.
  [[nodiscard]] std::shared_ptr<void> ema_weights();

  /// Model, optimizer, schedule, scaler, early stopping, counters, generator, decisions and where the loader of the
  /// last fit() stood: a run continues from them to the bit. Gradients of an unfinished window are not in it: flush()
  /// first, or lose them.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  [[nodiscard]] const std::vector<SettingLine>& settings() const;
  /// Settings, times of the phases of a step and counters as a table.
  [[nodiscard]] std::string report() const;
  [[nodiscard]] std::string report_json() const;
  /// The report as a document, with what `gradient_checkpointing` found:
  /// `trainer.report_page().write_html("run.html")`.
  [[nodiscard]] monitor::Report report_page() const;

  /// Takes back what is active on the model, the optimizer and the process; of a plan, Plan::revert() does. What was
  /// trained stays, and steps go on as given.
  void revert();

 private:
  using Feed = std::function<void(const std::function<bool(const Batch&)>&)>;
  /// Where a loader is and may be put; empty functions of one that cannot say.
  struct Position {
    std::function<std::string()> state;
    std::function<void(const std::string&)> load;
    std::function<void(int64_t)> set_epoch;
    data::TensorLoader* loader = nullptr;  // which takes settings
  };
  FitResult run_fit(const Feed& feed, const Position& position, int64_t length, int64_t epochs, int64_t max_steps,
                    const std::function<double()>& validate);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch
