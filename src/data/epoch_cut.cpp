#include "data/epoch_cut.h"

#include "data/file.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

void check_sizes(const BatchSizer& sizer, std::int64_t samples) {
  OXY_CHECK(static_cast<std::int64_t>(sizer.sizes.size()) == samples, InvalidArgument, "there are ", sizer.sizes.size(),
            " sizes for ", samples, " samples; give one for each.");
  BatchFill fill(sizer.limit);
  for (std::size_t i = 0; i < sizer.sizes.size(); ++i) {
    try {
      fill.add(sizer.sizes[i]);
    } catch (const Error& error) {
      throw Error(error.code(), "sample " + std::to_string(i) + ": " + error.what());
    }
  }
}

}  // namespace

EpochCut::EpochCut(const LoaderOptions& options, std::int64_t samples)
    : options_(options), sharding_{options.batch_size, options.rank, options.world_size, options.drop_last} {
  if (!options.batch_sizer) return;
  check_sizes(*options.batch_sizer, samples);
  std::int64_t all = 0;
  OXY_CHECK(!__builtin_mul_overflow(options.batch_sizer->limit.most, options.world_size, &all), InvalidArgument,
            "a limit of ", options.batch_sizer->limit.most, " on ", options.world_size,
            " processes is more than fits into 64 bits.");
}

std::int64_t EpochCut::of_all_processes() const noexcept {
  return (options_.batch_sizer ? options_.batch_sizer->limit.most : options_.batch_size) * options_.world_size;
}

std::string EpochCut::fingerprint() const {
  const auto order = options_.sampler->fingerprint();
  if (!options_.batch_sizer) return order;
  const auto& [sizes, limit] = *options_.batch_sizer;
  return fingerprint_of({order, limit.padded ? "padded" : "", std::to_string(limit.max_samples),
                         std::string(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(sizes[0]))});
}

std::optional<EpochCut::Part> EpochCut::part(std::int64_t epoch, std::uint64_t seed, std::int64_t position) const {
  const auto size = options_.sampler->size();
  if (size == 0) return std::nullopt;
  if (options_.batch_sizer) return part_under_limit(epoch, seed, position);
  const auto all = of_all_processes(), index = position / all;
  if (index >= sharding_.batches(size)) return std::nullopt;
  Part found;
  sharding_.range(size, index, found.first, found.last);
  found.end = (index + 1) * all;
  return found;
}

// One batch for each process, one after the other; where the samples end before there are so many, the last processes
// repeat the last of them.
std::optional<EpochCut::Part> EpochCut::part_under_limit(std::int64_t epoch, std::uint64_t seed,
                                                         std::int64_t position) const {
  const auto size = options_.sampler->size();
  if (position >= size) return std::nullopt;
  const auto& [sizes, limit] = *options_.batch_sizer;
  BatchFill fill(limit);
  std::int64_t process = 0, begin = position, end = position;
  Part found{position, position, position};
  for (;; ++end) {
    const bool at_end = end == size;
    bool begins = at_end;
    if (!at_end) {
      const auto sample = options_.sampler->at(end, static_cast<std::uint64_t>(epoch), seed);
      OXY_CHECK(sample >= 0 && sample < static_cast<std::int64_t>(sizes.size()), OutOfRange, "the sampler drew sample ",
                sample, " of a dataset of ", sizes.size(), ".");
      begins = fill.add(sizes[static_cast<std::size_t>(sample)]);
    }
    if (!begins) continue;
    const bool whole = !at_end || fill.is_full();
    if (process <= options_.rank) found = {begin, end, 0};
    ++process;
    begin = end;
    if (at_end && options_.drop_last && !(process == options_.world_size && whole)) return std::nullopt;
    if (at_end || process == options_.world_size) break;
  }
  found.end = end;
  return found;
}

std::int64_t EpochCut::batches(std::int64_t epoch, std::uint64_t seed) const {
  if (!options_.batch_sizer) return options_.sampler->size() == 0 ? 0 : sharding_.batches(options_.sampler->size());
  if (!counted_ || counted_->epoch != epoch || counted_->seed != seed) {
    std::int64_t batches = 0, position = 0;
    while (const auto one = part(epoch, seed, position)) {
      position = one->end;
      ++batches;
    }
    counted_ = {epoch, batches, seed};
  }
  return counted_->batches;
}

}  // namespace oxytorch::data
