/// The order in which samples are drawn: any position of any epoch in constant time and memory, so that a run resumes
/// anywhere, and processes and threads agree without a word between them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/random.h"

namespace oxytorch::data {

/// A permutation of [0, size), one for each key: a Feistel network over the next square number, walked until it lands
/// inside (J. Black, P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). A square is so near that one
/// turn does almost always, where the next power of four would take up to four. 24 bytes for any size.
class OXY_API Permutation {
 public:
  Permutation(std::int64_t size, std::uint64_t key);
  [[nodiscard]] std::int64_t size() const noexcept { return size_; }
  /// The element at a position; -1 for one outside of [0, size).
  [[nodiscard]] std::int64_t operator()(std::int64_t position) const noexcept;
  /// The position of an element: undoes operator(). -1 for one outside of [0, size).
  [[nodiscard]] std::int64_t position_of(std::int64_t element) const noexcept;

 private:
  std::int64_t size_;
  std::uint64_t key_;
  std::uint64_t side_;  ///< of the square
};

/// The random numbers of one sample in one epoch: those of augmentation, whatever thread or process draws them.
OXY_API PhiloxStream sample_random(std::uint64_t seed, std::uint64_t epoch, std::int64_t sample);

/// A place in the order of draws: epochs follow one another.
struct Draw {
  std::uint64_t epoch = 0;
  std::int64_t position = 0;  ///< in the epoch
  bool operator==(const Draw&) const = default;
};

/// Draws samples of a dataset, an epoch at a time. Every method may be called by several threads at once.
class OXY_API Sampler {
 public:
  Sampler() = default;
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;
  virtual ~Sampler();
  /// Samples in one epoch.
  [[nodiscard]] virtual std::int64_t size() const noexcept = 0;
  /// The sample at a position of an epoch, by a seed.
  /// Errors: `OutOfRange` for a position outside of [0, size()).
  [[nodiscard]] virtual std::int64_t at(std::int64_t position, std::uint64_t epoch, std::uint64_t seed) const = 0;
  /// The first draw of a sample at or after `from`, in that epoch or a later one, where it is known without drawing;
  /// empty elsewhere. A cache keeps by it what is used again soonest; where it is empty, a loader draws epochs ahead.
  [[nodiscard]] virtual std::optional<Draw> next(std::int64_t sample, const Draw& from, std::uint64_t seed) const;
  /// What two samplers that draw alike share; 16 hexadecimal digits.
  [[nodiscard]] virtual std::string fingerprint() const = 0;
};

/// 0, 1, 2, ...
OXY_API std::shared_ptr<const Sampler> sequential(std::int64_t size);
/// Every sample once an epoch, in an order of the whole set that differs from epoch to epoch.
OXY_API std::shared_ptr<const Sampler> shuffled(std::int64_t size);
/// As shuffled, but storage-aware: blocks of consecutive samples in random order, and random order inside of each group
/// of `window` blocks. What a disk or a shard holds together is read together.
OXY_API std::shared_ptr<const Sampler> shuffled_blocks(std::int64_t size, std::int64_t block, std::int64_t window);
/// `draws` samples an epoch with replacement, each with a probability in proportion to its weight (alias method:
/// M. Vose, "A linear algorithm for generating random numbers with a given distribution", 1991).
/// Errors: `InvalidArgument` for weights that are negative, not finite or all zero.
OXY_API std::shared_ptr<const Sampler> weighted(const std::vector<double>& weights, std::int64_t draws);
/// Draws from several sets of samples, those of the first before those of the second (`sizes` of each), in proportion
/// to their weights. Epochs of `draws` follow one another as one stream without an end: of its first n samples n times
/// the share of a set are of it, but for fewer than one more or less at each of the log2 splits of the sets into
/// halves, and every sample of a set comes once before one comes again, in an order that differs from pass to pass.
/// Errors: `InvalidArgument` for other than one weight a set, for weights that are negative, not finite or all zero,
/// and for a set without samples that has a weight.
OXY_API std::shared_ptr<const Sampler> mixed(const std::vector<std::int64_t>& sizes, const std::vector<double>& weights,
                                             std::int64_t draws);
/// As shuffled, but samples of like length together: of each `window` samples of the shuffled order the batches of
/// `batch` (of all processes) are cut from the order by length, and come in random order. `window` is rounded up to
/// whole batches, and a batch that is not full ends the epoch. A window is sorted when it is first drawn from.
OXY_API std::shared_ptr<const Sampler> bucketed(std::vector<std::int32_t> lengths, std::int64_t batch,
                                                std::int64_t window);

/// Cuts an epoch into batches of the same size on each process: batch k of a global size B is positions [k*B, (k+1)*B)
/// of the sampler, and rank r of w takes the r-th of w equal parts of it. So the samples of a batch do not depend on w.
///
/// The last batch may have fewer positions. It is filled up to the next multiple of w, so that each rank has as many
/// and none has none: with at most w - 1 positions at or after `samples`, which repeat samples and are the last ones of
/// the last ranks. One process repeats nothing, and the positions before `samples` are the same, in the same order, for
/// any w.
struct OXY_API Sharding {
  std::int64_t batch = 1;  ///< samples a process
  std::int64_t rank = 0;
  std::int64_t world = 1;
  bool drop_last = false;  ///< whether an epoch ends before a batch that is not full
  /// Batches in an epoch of `samples`, the same on each rank; 0 where the global batch size is not in [1, 2^63).
  [[nodiscard]] std::int64_t batches(std::int64_t samples) const noexcept;
  /// Positions [first, last) of this rank in a batch; position p at or after `samples` stands for p % samples. Empty
  /// for a batch that the epoch does not have.
  void range(std::int64_t samples, std::int64_t batch_index, std::int64_t& first, std::int64_t& last) const noexcept;
};

}  // namespace oxytorch::data
