/// Which batch sizes to run to find the largest that fits, or the fastest, and what their trials say. Knows no torch:
/// Python and C++ run the steps.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch {

/// One batch size, as it ran.
struct BatchTrial {
  std::int64_t size = 0;                         ///< samples in the batch
  bool fits = false;                             ///< its steps ran within the limit, headroom left
  std::optional<std::uint64_t> peak_bytes = {};  ///< most in use during the steps; empty where they ran out of it
  std::optional<double> step_seconds = {};       ///< median; empty where they ran out of memory
  std::string reason = {};                       ///< why it does not fit; empty where it does
  /// 0 where it did not run.
  [[nodiscard]] double samples_per_second() const {
    return step_seconds ? static_cast<double>(size) / *step_seconds : 0;
  }
};

/// What batch sizes take and give. Every size in it has been run.
struct OXY_API BatchPlan {
  std::int64_t largest = 0;        ///< that ran within the limit with headroom left
  std::int64_t fastest = 0;        ///< the smallest size within 2 % of the most samples a second
  std::vector<BatchTrial> trials;  ///< by size
  std::uint64_t limit_bytes = 0;
  double headroom = 0;                       ///< share of the limit that is left free
  std::optional<std::int64_t> samples = {};  ///< in an epoch, where given
  std::optional<std::int64_t> current = {};  ///< the batch size of today, where given

  /// (samples a piece, pieces) that make up exactly `batch` with the fewest pieces that fit: accumulating gradients
  /// over them keeps the batch, and so the updates, as they are. Error(InvalidArgument) for a batch under 1.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> split(std::int64_t batch) const;
  /// The sizes as a table, and what another batch size does to convergence.
  [[nodiscard]] std::string table() const;
};

struct BatchSearchOptions {
  std::int64_t start = 1;       ///< the first size
  std::int64_t most = 1 << 20;  ///< the largest to try
  std::int64_t multiple = 1;    ///< of which sizes are multiples
  double headroom = 0.1;        ///< share of the limit that the peak must leave free
  double resolution = 0.02;     ///< the search ends where what is left to find is under this share of the size
  /// Samples a second against size in place of the largest: sizes double, until two doublings in a row gave under 2 %
  /// more, or one does not fit.
  bool curve = false;
};

/// Sizes double until one does not fit or is predicted not to, then the gap between the last that ran and the first
/// that did not is closed. A straight line through the peaks measured so far only chooses which size to run next.
class OXY_API BatchSearch {
 public:
  /// `limit` and `base`: bytes that may be used, and that are in use before any batch. Error(InvalidArgument) for
  /// options that cannot be meant.
  BatchSearch(const BatchSearchOptions& options, std::uint64_t limit, std::uint64_t base);

  /// The size to run next; empty: the search is over.
  [[nodiscard]] std::optional<std::int64_t> next();
  /// What the size of next() showed. Error(OutOfMemory) where the first one does not fit.
  void ran(std::uint64_t peak_bytes, std::span<const double> step_seconds);
  void ran_out(const std::string& why);

  [[nodiscard]] BatchPlan plan(std::optional<std::int64_t> samples, std::optional<std::int64_t> current) const;

 private:
  void note(BatchTrial trial);
  [[nodiscard]] double predicted(std::int64_t size) const;
  [[nodiscard]] std::int64_t stride() const;

  BatchSearchOptions options_;
  std::uint64_t limit_, base_;
  double usable_;
  std::vector<BatchTrial> trials_;  // by size
  std::optional<std::int64_t> pending_;
  std::int64_t good_ = 0, bad_ = 0;  // the last that fits, the first that does not
  bool refused_ = false, guided_ = false;
  int idle_ = 0;
  double best_ = 0;
};

/// Whether what a step threw says that there was no memory, whatever its type.
[[nodiscard]] OXY_API bool says_out_of_memory(std::string_view message);
/// Whether it is one of having run out of memory: std::bad_alloc, an Error of that code, torch's c10::OutOfMemoryError
/// whatever its message, or one that says so.
[[nodiscard]] OXY_API bool is_out_of_memory(const std::exception& error);

}  // namespace oxytorch
