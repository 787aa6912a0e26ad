/// Training steps taken with all written down that the verifier needs, as given, in float64, or under autocast.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/host.h"
#include "oxytorch/tune/kinks.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"

namespace oxytorch::tune {

using Tensors = std::vector<at::Tensor>;

/// In a file where it is large; see memory::park().
at::Tensor copied(const at::Tensor& t);
Tensors copies(const Tensors& all);
double number(const at::Tensor& loss);

/// Model, gradients and where asked optimizer state in float64 until the end of the scope.
class InDouble {
 public:
  InDouble(Run& run, bool state);
  /// Of one parameter of an optimizer alone, whose groups hold no other.
  InDouble(torch::optim::Optimizer& optimizer, const at::Tensor& parameter);
  ~InDouble();
  InDouble(const InDouble&) = delete;
  InDouble& operator=(const InDouble&) = delete;
  [[nodiscard]] bool knows_optimizers() const noexcept { return knows_optimizers_; }

 private:
  void widen(at::Tensor& tensor);

  HostSetting mapped_ = map_large_blocks();  // a heap would hold twice what is in use
  std::vector<std::pair<at::Tensor, at::Tensor>> held_;
  bool knows_optimizers_ = true;
};

/// What a step showed before and after the update. Of several losses `gradients` are those that each optimizer was
/// given, and `between` is what each but the last left in its parameters, where the next loss began.
struct Observed {
  at::Tensor loss;
  Tensors gradients, buffers, parameters;
  std::vector<Tensors> between;
  std::map<std::string, at::Tensor> states;
};

/// Steps of the run are under stock bfloat16 autocast meanwhile.
class UnderAutocast {
 public:
  explicit UnderAutocast(Run& run);
  ~UnderAutocast();
  UnderAutocast(const UnderAutocast&) = delete;
  UnderAutocast& operator=(const UnderAutocast&) = delete;

 private:
  Run& run_;
};

/// Takes steps of a run, which must outlive it, with what is active on it.
class Recorder {
 public:
  explicit Recorder(Run& run);

  /// Names of the run's parameters and of its models' buffers.
  [[nodiscard]] const std::vector<std::string>& labels() const noexcept { return labels_; }
  [[nodiscard]] const std::vector<std::string>& buffer_labels() const noexcept { return buffer_labels_; }

  /// Takes the step up to its last update, without parameters and states. Of several losses each but the first begins
  /// where `taken` stood then, the step that is compared with it; without it, where the run's own updates lead.
  Observed forward_backward(const Batch& batch, const Observed* taken = nullptr);
  void last_update() { run_.update(run_.parts() - 1); }
  /// Adds parameters and states as they are.
  void note_updated(Observed& seen);
  /// Lets the optimizers step with these gradients from where the run stands; parameters and states after it.
  Observed updated_by(const Tensors& gradients);
  /// The same in float64, one parameter after the other where that can be; empty where an optimizer's state is not
  /// known. The run is to be restored.
  std::optional<Observed> updated_in_float64(const Tensors& gradients);
  /// State of the optimizers by the parameter that it is of; without those whose class is not known.
  std::map<std::string, at::Tensor> states();

  /// From `before`, `taken` as forward_backward() says. What a model that does not run in float64 throws passes.
  Observed in_float64(const Batch& batch, Snapshot& before, const Observed& taken);
  /// Moves the run's parameters.
  void move(Nudge nudge);
  /// From where the run stands, as UnderAutocast.
  Observed under_autocast(const Batch& batch, const Observed& taken);

 private:
  /// Whether each parameter may be stepped by itself: by whom, and with its gradient as it is.
  [[nodiscard]] bool is_by_parameter() const;

  Run& run_;
  std::vector<std::string> labels_, buffer_labels_;
};

}  // namespace oxytorch::tune
