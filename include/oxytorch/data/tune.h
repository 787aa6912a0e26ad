/// Threads, batches ahead and cache of a loader, chosen by measuring.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/data/tensors.h"

namespace oxytorch::data {

struct TuneOptions {
  double seconds = 20;  ///< of measuring; a slow loader takes a few batches of each setting, however long that is
  /// What a training step does with a batch, called between draws, so that what it takes of the processors counts.
  std::function<void(const TensorBatch&)> step{};
  std::string memory = "auto";  ///< that a cache may take: as `CacheOptions::memory`; "0" tries none
  std::string disk = "0";       ///< the same of a disk, for what memory does not hold
  std::string folder{};         ///< of the disk; as `CacheOptions::folder`
  std::function<void(const std::string&)> progress{};  ///< called with each trial
};

/// A setting that was tried.
struct OXY_API LoaderTrial {
  std::string setting;
  std::optional<double> batches_per_second{};  ///< the median over rounds; empty where it was not measured
  std::optional<double> ratio{};               ///< of its speed to that as given, the median over rounds
  std::string note{};                          ///< why it was left out, that it was taken, or what it costs
  /// A line of a table: "4 threads, 3 ahead    812.5    1.42x  taken".
  [[nodiscard]] std::string text() const;
};

/// What tune() found and set.
struct LoaderTuning {
  std::vector<LoaderTrial> trials;  ///< as given first
  int threads = 0, prefetch = 0;
  std::shared_ptr<Cache> cache;  ///< as it was given where none pays
  std::string bottleneck;        ///< where most of the threads' time goes: "read", "collate" or a stage's name
};

/// Finds faster settings of a loader and leaves it with them: the number of threads, then how many batches are ahead,
/// then a cache, split between memory and a disk by what it would hold. Settings take turns; one is taken where it is
/// at least 2 % faster in the median of three rounds or more, and faster in three of four. The same batches follow, in
/// the same order, and the loader stands where it stood.
///
/// A cache is timed with its samples in it and counted by the share of the dataset that it would hold. Its first epoch,
/// which fills it, is slower; the note says how much. A loader with a cache keeps it. A stream is left alone: what is
/// drawn of it cannot be drawn again.
/// Errors: what the loader, or the step, throws; the loader then is as it was.
OXY_API LoaderTuning tune(TensorLoader& loader, const TuneOptions& options = {});

}  // namespace oxytorch::data
