/// The settings of a run that are of its loader.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/config.h"
#include "oxytorch/data/tensors.h"

namespace oxytorch::data {

/// The settings `num_workers`, `prefetch`, `pin_memory` and `cache` of a configuration, brought about on a loader: the
/// same batches in the same order. One that has no device puts its batches on the model's. All of it is taken back by
/// revert(), and at the end of this object, which the loader must outlive.
class OXY_API LoaderSettings {
 public:
  /// What became of one of them.
  struct Line {
    std::string name;  ///< of the setting, or "device"
    bool is_in_effect = false;
    std::string reason;  ///< why it is or is not
    std::string cost = {};
  };

  /// `device`: of the model; empty where it lies on several.
  LoaderSettings(TensorLoader& loader, const PerformanceConfig& config, std::optional<at::Device> device);
  ~LoaderSettings();
  LoaderSettings(const LoaderSettings&) = delete;
  LoaderSettings& operator=(const LoaderSettings&) = delete;

  /// One for each that asks for something.
  [[nodiscard]] const std::vector<Line>& lines() const noexcept { return lines_; }
  void revert();

 private:
  TensorLoader* loader_;  // null once it is taken back
  LoaderOptions before_;
  bool is_changed_ = false, is_moved_ = false;
  std::vector<Line> lines_;
};

}  // namespace oxytorch::data
