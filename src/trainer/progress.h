/// The line on stderr that says how far a call of fit is.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace oxytorch {

/// Written at most twice a second, when the loss is read for it; ended by a new line.
class ProgressLine {
 public:
  /// `setting` is "on", "off" or "auto": on where stderr is a terminal. `max_steps` 0: not known.
  ProgressLine(const std::string& setting, std::int64_t max_steps);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void show(std::int64_t epoch, std::int64_t steps, const at::Tensor& loss);

 private:
  bool on_;
  bool written_ = false;
  std::int64_t max_steps_;
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace oxytorch
