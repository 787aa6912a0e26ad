/// Snapshot: all that a training step may write, held aside, put back bit for bit, and proven to be back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "oxytorch/api.h"
#include "oxytorch/tune/run.h"

namespace oxytorch::tune {

/// Holds parameters and buffers of the models, parameters of the optimizers that are not in them, gradients, the
/// optimizers' state and options (native state byte for byte), training flags, and the generators of the CPU and of the
/// parameters' device. Costs their memory once more. May be taken and restored with active strategies; where they
/// change the layout of a tensor, its values are what counts. The run must outlive it.
///
/// An optimizer class that torch does not know is held by what its state and options serialise.
class OXY_API Snapshot {
 public:
  /// Without `generators` random states are neither held nor put back: other threads may draw from them meanwhile.
  explicit Snapshot(Run& run, bool generators = true);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  void restore();
  /// 16 hexadecimal digits over the present state.
  [[nodiscard]] std::string digest() const;
  [[nodiscard]] const std::string& held() const noexcept;  ///< digest() when it was taken
  /// Error(Internal) that names the first thing that differs from what was held.
  void prove() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::tune
