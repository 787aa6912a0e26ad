/// Batches of as many samples as fit under a limit of tokens or bytes.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::data {

/// The most that a batch may hold.
struct BatchLimit {
  std::int64_t most = 1;  ///< of the sizes of its samples, in whatever they count
  bool padded = false;    ///< whether samples are padded to the longest of the batch, and count as that
  std::int64_t max_samples = std::numeric_limits<std::int64_t>::max();
};

/// Fills batches, sample by sample.
class OXY_API BatchFill {
 public:
  /// Errors: `InvalidArgument` for a limit below 1.
  explicit BatchFill(const BatchLimit& limit);
  /// Takes a sample; whether it begins the next batch, because it does not fit into the one before.
  /// Errors: `InvalidArgument` for a size that is negative or above the limit.
  bool add(std::int64_t size);
  /// Whether no sample of a size above 0 fits any more.
  [[nodiscard]] bool is_full() const noexcept;

 private:
  BatchLimit limit_;
  std::int64_t samples_ = 0, total_ = 0, longest_ = 0;
};

/// Cuts an order of samples into batches: a batch ends where the next sample does not fit.
struct BatchSizer {
  std::vector<std::int64_t> sizes;  ///< of each sample of the dataset: tokens, or bytes
  BatchLimit limit;                 ///< of a process
};

}  // namespace oxytorch::data
