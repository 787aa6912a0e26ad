#include "data/next_use.h"

#include <algorithm>
#include <utility>

namespace oxytorch::data {
namespace {

constexpr int kDrawsLookedAt = 64;  // draws of a sample by any process, until it is this one's
constexpr std::int64_t kMostDrawnAhead = std::int64_t{1} << 25;  // draws and samples of all epochs: 128 MiB
constexpr std::int64_t kEpochsAhead = 4;  // by process: one in four of its samples comes back later

}  // namespace

/// Where each sample comes in an epoch.
struct NextUse::DrawnEpoch {
  std::uint64_t epoch, seed;
  std::once_flag once;
  std::vector<std::uint32_t> ends;       // of each sample's part of `positions`
  std::vector<std::uint32_t> positions;  // by sample, in order

  void draw(const Sampler& sampler, std::int64_t samples) {
    std::vector<std::uint32_t> order(static_cast<std::size_t>(sampler.size()));
    ends.resize(static_cast<std::size_t>(samples) + 1);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto sample = sampler.at(static_cast<std::int64_t>(i), epoch, seed);
      // One that there is not ends the run where it is read.
      order[i] = static_cast<std::uint32_t>(sample >= 0 && sample < samples ? sample : samples);
      ++ends[order[i]];
    }
    for (std::uint32_t sum = 0; auto& end : ends) sum = std::exchange(end, sum) + sum;  // where each part begins
    positions.resize(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) positions[ends[order[i]]++] = static_cast<std::uint32_t>(i);
  }

  [[nodiscard]] std::optional<std::int64_t> next(std::int64_t sample, std::int64_t position) const {
    const auto at = static_cast<std::size_t>(sample);
    const auto begin = positions.begin() + (at == 0 ? 0 : ends[at - 1]), end = positions.begin() + ends[at];
    const auto found = std::lower_bound(begin, end, static_cast<std::uint32_t>(position));
    return found == end ? std::nullopt : std::optional<std::int64_t>(*found);
  }
};

NextUse::NextUse(const LoaderOptions& options, std::int64_t samples)
    : options_(options),
      samples_(samples),
      epochs_ahead_(
          std::min(kEpochsAhead * options.world_size,
                   kMostDrawnAhead / std::max<std::int64_t>(options.sampler->size() / 2 + samples / 2, 1) / 2 - 1)) {}
NextUse::~NextUse() = default;

std::int64_t NextUse::draws_until(std::int64_t sample, const Draw& draw, std::uint64_t seed) const {
  const auto size = options_.sampler->size();
  Draw from{draw.epoch, draw.position + 1};
  for (int looked = 0; looked < kDrawsLookedAt; ++looked) {
    auto found = options_.sampler->next(sample, from, seed);
    if (!found) found = next_drawn(sample, from, draw.epoch, seed);
    if (!found) break;
    from = {found->epoch, found->position + 1};
    if (!is_ours(found->position)) continue;
    std::int64_t draws = 0;  // an epoch of a mixture may be short, and the next draw far away
    const bool fits = found->epoch - draw.epoch <= static_cast<std::uint64_t>(kNever) &&
                      !__builtin_mul_overflow(static_cast<std::int64_t>(found->epoch - draw.epoch), size, &draws) &&
                      !__builtin_add_overflow(draws, found->position - draw.position, &draws);
    return fits ? draws / options_.world_size : kNever;
  }
  return kNever;
}

bool NextUse::is_ours(std::int64_t position) const {
  if (options_.world_size == 1 || options_.batch_sizer) return true;
  const Sharding sharding{options_.batch_size, options_.rank, options_.world_size, options_.drop_last};
  std::int64_t first = 0, last = 0;
  sharding.range(options_.sampler->size(), position / (sharding.batch * sharding.world), first, last);
  return first <= position && position < last;
}

std::optional<Draw> NextUse::next_drawn(std::int64_t sample, Draw from, std::uint64_t now, std::uint64_t seed) const {
  if (epochs_ahead_ < 1 || sample < 0 || sample >= samples_) return std::nullopt;
  for (; from.epoch <= now + static_cast<std::uint64_t>(epochs_ahead_); from = {from.epoch + 1, 0}) {
    if (const auto found = drawn(from.epoch, seed)->next(sample, from.position)) return Draw{from.epoch, *found};
  }
  return std::nullopt;
}

std::shared_ptr<const NextUse::DrawnEpoch> NextUse::drawn(std::uint64_t epoch, std::uint64_t seed) const {
  std::shared_ptr<DrawnEpoch> found;
  {
    const std::scoped_lock lock(mutex_);
    auto it = std::find_if(drawn_.begin(), drawn_.end(),
                           [&](const auto& one) { return one->epoch == epoch && one->seed == seed; });
    if (it == drawn_.end()) {
      // Threads ahead may be in the next epoch already.
      if (static_cast<std::int64_t>(drawn_.size()) > epochs_ahead_ + 1) drawn_.pop_back();
      found = std::make_shared<DrawnEpoch>();
      found->epoch = epoch;
      found->seed = seed;
      it = drawn_.insert(drawn_.end(), found);
    }
    std::rotate(drawn_.begin(), it, it + 1);
    found = drawn_.front();
  }
  std::call_once(found->once, [&] { found->draw(*options_.sampler, samples_); });  // outside of the lock
  return found;
}

}  // namespace oxytorch::data
