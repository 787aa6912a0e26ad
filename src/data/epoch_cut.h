/// Where the batches of an epoch begin and end.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "oxytorch/data/loader.h"

namespace oxytorch::data {

/// Cuts the order of a sampler into batches of one number of samples, or of as many as fit under a limit. A batch of
/// all processes follows from the position at which it begins alone, so a run goes on anywhere.
class EpochCut {
 public:
  /// `options` have a sampler, and outlive this.
  /// Errors: `InvalidArgument` for sizes that are not those of `samples` samples.
  EpochCut(const LoaderOptions& options, std::int64_t samples);

  /// The part of this process: positions [first, last), of which one at or after the sampler's size stands for the
  /// rest of a division by it. The next batch of all processes begins at `end`.
  struct Part {
    std::int64_t first = 0, last = 0, end = 0;
  };
  /// The batch that begins at `position`; none at the end of the epoch.
  [[nodiscard]] std::optional<Part> part(std::int64_t epoch, std::uint64_t seed, std::int64_t position) const;
  /// Batches in an epoch, the same on each process. Under a limit it goes through the epoch, once.
  [[nodiscard]] std::int64_t batches(std::int64_t epoch, std::uint64_t seed) const;
  /// What a batch of all processes may hold: samples, or sizes.
  [[nodiscard]] std::int64_t of_all_processes() const noexcept;
  /// Of all that decides which sample is where.
  [[nodiscard]] std::string fingerprint() const;

 private:
  [[nodiscard]] std::optional<Part> part_under_limit(std::int64_t epoch, std::uint64_t seed,
                                                     std::int64_t position) const;
  const LoaderOptions& options_;
  Sharding sharding_;
  struct Counted {
    std::int64_t epoch, batches;
    std::uint64_t seed;
  };
  mutable std::optional<Counted> counted_;  // one thread asks
};

}  // namespace oxytorch::data
