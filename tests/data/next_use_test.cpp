#include "data/next_use.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "oxytorch/data/cache.h"

namespace oxytorch::data {
namespace {

constexpr std::int64_t kNeverAgain = NextUse::kNever, kSamples = 2000, kEpochs = 6;
constexpr std::uint64_t kSeed = 7;

using SamplerPtr = std::shared_ptr<const Sampler>;

/// A user's own, which does not say where a sample comes next.
class Strided final : public Sampler {
 public:
  [[nodiscard]] std::int64_t size() const noexcept override { return kSamples; }
  [[nodiscard]] std::int64_t at(std::int64_t position, std::uint64_t epoch, std::uint64_t) const override {
    return (position * 7 + static_cast<std::int64_t>(epoch) * 13) % kSamples;
  }
  [[nodiscard]] std::string fingerprint() const override { return "0123456789abcdef"; }
};

std::vector<std::pair<std::string, SamplerPtr>> samplers() {
  std::vector<double> weights;
  std::vector<std::int32_t> lengths;
  for (int i = 0; i < kSamples; ++i) {
    weights.push_back(1.0 / (1 + i % 50));
    lengths.push_back(i * 31 % 97);
  }
  return {{"shuffled", shuffled(kSamples)},
          {"blocks", shuffled_blocks(kSamples, 16, 4)},
          {"weighted", weighted(weights, kSamples)},
          {"bucketed", bucketed(lengths, 8, 256)},
          {"mixed", mixed({1500, 400, 100}, {0.3, 0.3, 0.4}, kSamples)},
          {"mixed in short epochs", mixed({1500, 400, 100}, {0.3, 0.3, 0.4}, 50)},
          {"of a user", std::make_shared<Strided>()}};
}

/// The draws of one process in as many epochs as make `kEpochs` passes over the samples.
std::vector<std::pair<Draw, std::int64_t>> draws_of(const LoaderOptions& options) {
  std::vector<std::pair<Draw, std::int64_t>> draws;
  const auto size = options.sampler->size();
  const Sharding sharding{options.batch_size, options.rank, options.world_size, options.drop_last};
  for (std::uint64_t epoch = 0; epoch < static_cast<std::uint64_t>(kEpochs * kSamples / size); ++epoch) {
    for (std::int64_t batch = 0; batch < sharding.batches(size); ++batch) {
      std::int64_t first = 0, last = 0;
      sharding.range(size, batch, first, last);
      for (auto i = first; i < last; ++i)
        draws.push_back({{epoch, i % size}, options.sampler->at(i % size, epoch, kSeed)});
    }
  }
  return draws;
}

/// Hits of draws where nobody could do better: of what is in, that which is drawn last again goes.
std::int64_t best_hits(const std::vector<std::pair<Draw, std::int64_t>>& draws, std::int64_t capacity) {
  std::vector<std::int64_t> next(draws.size(), kNeverAgain);
  std::map<std::int64_t, std::int64_t> seen;
  for (auto i = static_cast<std::int64_t>(draws.size()) - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (seen.contains(draws[at].second)) next[at] = seen[draws[at].second];
    seen[draws[at].second] = i;
  }
  std::set<std::pair<std::int64_t, std::int64_t>> held;
  std::map<std::int64_t, std::int64_t> when;
  std::int64_t hits = 0;
  for (std::size_t i = 0; i < draws.size(); ++i) {
    if (when.contains(draws[i].second)) {
      ++hits;
      held.erase({when[draws[i].second], draws[i].second});
    }
    when[draws[i].second] = next[i];
    held.emplace(next[i], draws[i].second);
    if (static_cast<std::int64_t>(held.size()) > capacity) {
      when.erase(held.rbegin()->second);
      held.erase(std::prev(held.end()));
    }
  }
  return hits;
}

std::int64_t hits_of(const std::vector<std::pair<Draw, std::int64_t>>& draws, const NextUse& next_use,
                     std::int64_t capacity) {
  constexpr std::int64_t kBytes = 1000;
  Cache cache({.memory = std::to_string(capacity * kBytes)});
  const std::string content(kBytes - 8, 'x');
  std::int64_t hits = 0;
  for (const auto& [draw, sample] : draws) {
    auto key = std::to_string(sample);
    key.insert(0, 8 - key.size(), '0');
    auto found = cache.find(key);
    hits += found.has_value() ? 1 : 0;
    if (!found) found = View{std::as_bytes(std::span(content)), {}};
    cache.put(key, *found, next_use.draws_until(sample, draw, kSeed));
  }
  return hits;
}

TEST(NextUse, HitsWithinAHundredthOfTheBestPossible) {
  for (const auto& [name, sampler] : samplers()) {
    LoaderOptions options;
    options.sampler = sampler;
    const NextUse next_use(options, kSamples);
    const auto draws = draws_of(options);
    for (const double share : {0.1, 0.25, 0.5, 0.75}) {
      const auto capacity = static_cast<std::int64_t>(share * kSamples);
      const auto best = static_cast<double>(best_hits(draws, capacity));
      EXPECT_GE(static_cast<double>(hits_of(draws, next_use, capacity)), 0.99 * best) << name << ", " << share;
    }
  }
}

// Of what it keeps, a process that knew nothing of the others would draw one in four in the next epoch.
TEST(NextUse, AProcessKeepsWhatItDrawsItself) {
  for (const auto& [name, sampler] : samplers()) {
    LoaderOptions options;
    options.sampler = sampler;
    options.batch_size = 5;
    options.rank = 2;
    options.world_size = 4;
    const NextUse next_use(options, kSamples);
    const auto draws = draws_of(options);
    for (const double share : {0.05, 0.1, 0.25}) {
      const auto capacity = static_cast<std::int64_t>(share * kSamples);
      const auto best = static_cast<double>(best_hits(draws, capacity));
      EXPECT_GE(static_cast<double>(hits_of(draws, next_use, capacity)), 0.99 * best) << name << ", " << share;
    }
  }
}

TEST(NextUse, CountsTheDrawsOfThisProcess) {
  LoaderOptions options;
  options.sampler = sequential(12);
  EXPECT_EQ(NextUse(options, 12).draws_until(3, {0, 3}, 1), 12);
  EXPECT_EQ(NextUse(options, 12).draws_until(3, {0, 1}, 1), 2);
  options.batch_size = 2;
  options.world_size = 3;
  EXPECT_EQ(NextUse(options, 12).draws_until(0, {5, 0}, 1), 4);
  EXPECT_EQ(NextUse(options, 12).draws_until(2, {5, 2}, 1), NextUse::kNever);  // the second process draws it always
  options.sampler = mixed({1'000'000, 1'000'000}, {1, 1e9}, 100);
  options.world_size = 1;
  const auto first = NextUse(options, 2'000'000).draws_until(5, {0, 0}, 3);
  EXPECT_GT(first, 100'000'000);
  EXPECT_LT(first, NextUse::kNever);
}

TEST(NextUse, WhatIsTooLargeToDrawAheadIsNeverUsed) {
  LoaderOptions options;
  options.sampler = weighted({1, 2, 3}, std::int64_t{1} << 40);
  EXPECT_EQ(NextUse(options, 3).draws_until(1, {0, 0}, 1), NextUse::kNever);
  options.sampler = weighted({1, 0, 3}, 10);
  EXPECT_EQ(NextUse(options, 3).draws_until(1, {0, 0}, 1), NextUse::kNever);
  EXPECT_EQ(NextUse(options, 3).draws_until(7, {0, 0}, 1), NextUse::kNever);
}

TEST(NextUse, ThreadsAgree) {
  LoaderOptions options;
  options.sampler = weighted(std::vector<double>(500, 1.0), 2000);
  const NextUse alone(options, 500), shared(options, 500);
  std::vector<std::int64_t> expected, found(8000);
  for (std::int64_t i = 0; i < 8000; ++i) {
    const Draw draw{static_cast<std::uint64_t>(i / 2000), i % 2000};
    expected.push_back(alone.draws_until(options.sampler->at(draw.position, draw.epoch, 2), draw, 2));
  }
  std::vector<std::thread> threads;
  for (std::int64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::int64_t i = thread; i < 8000; i += 4) {
        const Draw draw{static_cast<std::uint64_t>(i / 2000), i % 2000};
        found[static_cast<std::size_t>(i)] =
            shared.draws_until(options.sampler->at(draw.position, draw.epoch, 2), draw, 2);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace oxytorch::data
