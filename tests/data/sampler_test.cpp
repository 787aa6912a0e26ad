#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "oxytorch/data/order.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

using Samples = std::vector<std::int64_t>;
using SamplerPtr = std::shared_ptr<const Sampler>;

Samples epoch_of(const Sampler& sampler, std::uint64_t epoch = 0, std::uint64_t seed = 0) {
  Samples found(static_cast<std::size_t>(sampler.size()));
  for (std::size_t i = 0; i < found.size(); ++i) found[i] = sampler.at(static_cast<std::int64_t>(i), epoch, seed);
  return found;
}

Samples counted(std::int64_t size) {
  Samples all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

Samples sorted(Samples samples) {
  std::sort(samples.begin(), samples.end());
  return samples;
}

std::vector<std::int32_t> some_lengths(std::int64_t size) {
  std::vector<std::int32_t> lengths;
  PhiloxStream random(4);
  for (std::int64_t i = 0; i < size; ++i) lengths.push_back(static_cast<std::int32_t>(random.below(500)));
  return lengths;
}

/// Samplers that draw every sample once an epoch, in random order.
std::vector<SamplerPtr> shuffles(std::int64_t size) {
  std::vector<SamplerPtr> found{shuffled(size)};
  for (const std::int64_t block : {1, 2, 7, 16, 1000}) {
    for (const std::int64_t window : {1, 2, 3, 1000}) {
      found.push_back(shuffled_blocks(size, block, window));
      found.push_back(bucketed(some_lengths(size), block, block * window));
    }
  }
  return found;
}

TEST(Sampler, SequentialCounts) {
  const auto sampler = sequential(5);
  EXPECT_EQ(epoch_of(*sampler, 3, 9), counted(5));
  EXPECT_EQ(sampler->next(3, {0, 2}, 0), (Draw{0, 3}));
  EXPECT_EQ(sampler->next(3, {0, 3}, 0), (Draw{0, 3}));
  EXPECT_EQ(sampler->next(3, {0, 4}, 0), (Draw{1, 3}));
  EXPECT_EQ(sampler->next(5, {}, 0), std::nullopt);
  EXPECT_EQ(sampler->next(-1, {0, -5}, 0), std::nullopt);
}

TEST(Sampler, AShuffleDrawsEverySampleOnce) {
  for (const std::int64_t size : {0, 1, 2, 3, 13, 16, 17, 101, 500}) {
    for (const auto& sampler : shuffles(size)) {
      ASSERT_EQ(sampler->size(), size);
      for (std::uint64_t epoch = 0; epoch < 4; ++epoch) ASSERT_EQ(sorted(epoch_of(*sampler, epoch, 7)), counted(size));
    }
  }
}

TEST(Sampler, EpochsAndSeedsHaveOrdersOfTheirOwn) {
  for (const auto& sampler : shuffles(500)) {
    std::set<Samples> orders;
    for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
      for (std::uint64_t seed = 0; seed < 3; ++seed) orders.insert(epoch_of(*sampler, epoch, seed));
    }
    EXPECT_GE(orders.size(), 9U) << sampler->fingerprint();
    EXPECT_EQ(epoch_of(*sampler, 2, 1), epoch_of(*sampler, 2, 1));
  }
}

/// Whether next() says of every draw of three epochs where its sample comes again, as far as they tell.
void expect_known(const Sampler& sampler, std::uint64_t first_epoch) {
  std::map<std::int64_t, Draw> next;
  for (auto epoch = first_epoch + 3; epoch-- > first_epoch;) {
    for (auto position = sampler.size(); position-- > 0;) {
      const Draw here{epoch, position};
      const auto sample = sampler.at(position, epoch, 6);
      if (next.contains(sample)) {
        ASSERT_EQ(sampler.next(sample, {epoch, position + 1}, 6), next[sample]);
      }
      ASSERT_EQ(sampler.next(sample, here, 6), here);
      next[sample] = here;
    }
  }
}

TEST(Sampler, NextIsWhereASampleComes) {
  for (const std::int64_t size : {1, 13, 16, 17, 101}) {
    expect_known(*shuffled(size), 5);
    for (const std::int64_t block : {1, 2, 7, 1000}) expect_known(*shuffled_blocks(size, block, 3), 5);
  }
}

TEST(Sampler, NextOfAMixtureIsWhereASampleComes) {
  const std::vector<std::vector<std::int64_t>> sizes{{3}, {1, 40}, {7, 5, 3}, {20, 0, 1, 9, 2, 30, 4}};
  const std::vector<std::vector<double>> weights{{2}, {1e-3, 1}, {1, 1, 1}, {3, 0, 0.2, 0.5, 2, 0, 1}};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    for (const std::int64_t draws : {1, 5, 64, 1000}) {
      const auto sampler = mixed(sizes[i], weights[i], draws);
      expect_known(*sampler, 0);
      expect_known(*sampler, 1'000'000);
    }
  }
  // What is far away is found without drawing what lies between.
  const auto rare = mixed({1'000'000, 1'000'000}, {1, 1e9}, 100);
  const auto found = rare->next(5, {0, 0}, 3);
  ASSERT_TRUE(found.has_value());
  EXPECT_GT(found->epoch, 1'000'000U);
  EXPECT_EQ(rare->at(found->position, found->epoch, 3), 5);
  EXPECT_EQ(mixed({4, 4}, {1, 0}, 10)->next(6, {}, 1), std::nullopt);  // never drawn
  EXPECT_EQ(mixed({4, 4}, {1, 1}, 10)->next(8, {}, 1), std::nullopt);
}

TEST(Sampler, BlocksOfAGroupAreDrawnTogether) {
  constexpr std::int64_t kBlock = 10, kWindow = 4, kSize = 997;
  const auto order = epoch_of(*shuffled_blocks(kSize, kBlock, kWindow), 1, 2);
  std::size_t begin = 0;
  std::set<std::int64_t> first_group;
  while (begin < order.size()) {
    // Blocks that begin here end within one group.
    std::set<std::int64_t> blocks;
    std::int64_t samples = 0;
    std::size_t i = begin;
    for (; i < order.size() && (blocks.size() < kWindow || blocks.contains(order[i] / kBlock)); ++i) {
      blocks.insert(order[i] / kBlock);
      ++samples;
    }
    std::int64_t whole = 0;
    for (const auto block : blocks) whole += std::min(kBlock, kSize - block * kBlock);
    ASSERT_EQ(samples, whole);
    if (begin == 0) first_group = blocks;
    begin = i;
  }
  EXPECT_NE(*first_group.rbegin() - *first_group.begin(), kWindow - 1);  // the blocks of a group are not neighbours
}

TEST(Sampler, WeightsDecideHowOftenASampleIsDrawn) {
  const std::vector<double> weights{0, 1, 2, 0, 4, 1e-320, 0.5, 0};
  constexpr std::int64_t kDraws = 200'000;
  const auto sampler = weighted(weights, kDraws);
  ASSERT_EQ(sampler->size(), kDraws);
  std::vector<double> counts(weights.size());
  for (const auto sample : epoch_of(*sampler, 1, 1)) ++counts[static_cast<std::size_t>(sample)];
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double share = weights[i] / 7.5;
    EXPECT_NEAR(counts[i], share * kDraws, 5 * std::sqrt(kDraws * share * (1 - share))) << i;
  }
  EXPECT_NE(epoch_of(*sampler, 1, 1), epoch_of(*sampler, 2, 1));
  EXPECT_EQ(sampler->next(1, {}, 0), std::nullopt);
}

TEST(Sampler, WhatHasNoWeightIsNeverDrawn) {
  PhiloxStream random(8);
  for (int round = 0; round < 50; ++round) {
    std::vector<double> weights;
    for (int i = 0; i < 37; ++i)
      weights.push_back(random.below(2) == 0 ? 0 : std::pow(10.0, random.uniform_double() * 600 - 300));
    weights[5] = 1e308;
    for (const auto sample : epoch_of(*weighted(weights, 500), 0, static_cast<std::uint64_t>(round))) {
      ASSERT_GT(weights[static_cast<std::size_t>(sample)], 0);
    }
  }
  EXPECT_EQ(epoch_of(*weighted({3}, 4)), (Samples{0, 0, 0, 0}));
  EXPECT_EQ(weighted({1, 1}, 0)->size(), 0);
}

TEST(Sampler, BucketsHoldLikeLengths) {
  constexpr std::int64_t kSize = 1030, kBatch = 8, kWindow = 200;
  const auto lengths = some_lengths(kSize);
  const auto length = [&](std::int64_t sample) { return lengths[static_cast<std::size_t>(sample)]; };
  const auto sampler = bucketed(lengths, kBatch, kWindow);
  const auto order = epoch_of(*sampler, 1, 1);
  // A window holds the samples of the shuffled order that it would without lengths; each batch is a run of its sorted
  // lengths.
  const auto plain = epoch_of(*shuffled(kSize), 1, 1);
  std::int64_t spread = 0, plain_spread = 0, ascending = 0;
  for (std::size_t begin = 0; begin < order.size(); begin += kBatch) {
    const auto end = std::min(order.size(), begin + kBatch);
    ASSERT_TRUE(std::is_sorted(order.begin() + static_cast<std::ptrdiff_t>(begin),
                               order.begin() + static_cast<std::ptrdiff_t>(end),
                               [&](auto a, auto b) { return length(a) < length(b); }));
    spread += length(order[end - 1]) - length(order[begin]);
    const auto [low, high] = std::minmax_element(plain.begin() + static_cast<std::ptrdiff_t>(begin),
                                                 plain.begin() + static_cast<std::ptrdiff_t>(end),
                                                 [&](auto a, auto b) { return length(a) < length(b); });
    plain_spread += length(*high) - length(*low);
    ascending += begin > 0 && length(order[begin]) >= length(order[begin - 1]);
  }
  EXPECT_LT(spread * 10, plain_spread);
  EXPECT_LT(ascending, 85);  // of 128: batches come in random order
  for (std::size_t begin = 0; begin < order.size(); begin += kWindow) {
    const auto end = static_cast<std::ptrdiff_t>(std::min(order.size(), begin + kWindow)),
               first = static_cast<std::ptrdiff_t>(begin);
    ASSERT_EQ(sorted({order.begin() + first, order.begin() + end}),
              sorted({plain.begin() + first, plain.begin() + end}));
  }
}

TEST(Sampler, TheBatchThatIsNotFullIsOfAnyLength) {
  std::vector<std::int32_t> lengths(41);
  std::iota(lengths.begin(), lengths.end(), 0);
  std::set<std::int64_t> last;
  for (std::uint64_t epoch = 0; epoch < 50; ++epoch) last.insert(bucketed(lengths, 8, 48)->at(40, epoch, 0));
  EXPECT_EQ(last, (std::set<std::int64_t>{0, 8, 16, 24, 32, 40}));
}

/// Of a draw: which set it is of, and which sample of it.
std::pair<std::size_t, std::int64_t> set_and_sample(const std::vector<std::int64_t>& sizes, std::int64_t drawn) {
  std::size_t set = 0;
  for (; drawn >= sizes[set]; ++set) drawn -= sizes[set];
  return {set, drawn};
}

TEST(Sampler, AMixtureHasItsSharesAnywhere) {
  const std::vector<std::int64_t> sizes{7, 1, 40, 0, 1000, 13};
  const std::vector<double> weights{0.1, 3e-3, 0.4, 0, 0.25, 1};
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const auto sampler = mixed(sizes, weights, 997);
  for (const std::uint64_t seed : {0, 1, 2}) {
    std::vector<std::int64_t> counts(sizes.size());
    for (std::int64_t n = 0; n < 20 * 997; ++n) {
      ++counts[set_and_sample(sizes, sampler->at(n % 997, static_cast<std::uint64_t>(n / 997), seed)).first];
      for (std::size_t set = 0; set < sizes.size(); ++set) {
        const double share = static_cast<double>(n + 1) * weights[set] / sum;
        ASSERT_LT(std::abs(static_cast<double>(counts[set]) - share), 3.0) << set << " of the first " << n + 1;
      }
    }
    EXPECT_EQ(counts[3], 0);
  }
}

TEST(Sampler, AMixtureDrawsEachSampleOfASetBeforeOneComesAgain) {
  const std::vector<std::int64_t> sizes{7, 40, 13};
  const auto sampler = mixed(sizes, {1, 2, 3}, 100);
  std::vector<Samples> drawn(sizes.size());
  for (std::int64_t n = 0; n < 2000; ++n) {
    const auto [set, sample] = set_and_sample(sizes, sampler->at(n % 100, static_cast<std::uint64_t>(n / 100), 5));
    drawn[set].push_back(sample);
  }
  for (std::size_t set = 0; set < sizes.size(); ++set) {
    std::set<Samples> orders;
    const auto whole = static_cast<std::int64_t>(drawn[set].size()) / sizes[set];
    ASSERT_GE(whole, 10);
    for (std::int64_t pass = 0; pass < whole; ++pass) {
      const auto begin = drawn[set].begin() + pass * sizes[set];
      const Samples order(begin, begin + sizes[set]);
      EXPECT_EQ(sorted(order), counted(sizes[set]));
      orders.insert(order);
    }
    EXPECT_EQ(orders.size(), static_cast<std::size_t>(whole));  // each pass has an order of its own
  }
}

TEST(Sampler, AMixtureOfOneSetIsThatSet) {
  const auto sampler = mixed({9}, {0.3}, 9);
  EXPECT_EQ(sorted(epoch_of(*sampler)), counted(9));
  EXPECT_NE(epoch_of(*sampler), epoch_of(*sampler, 1));
  EXPECT_NE(epoch_of(*sampler), epoch_of(*sampler, 0, 1));
}

TEST(Sampler, BucketsDoNotDependOnWhatWasDrawnBefore) {
  const auto lengths = some_lengths(700);
  const auto expected = epoch_of(*bucketed(lengths, 4, 40), 3, 2);
  const auto sampler = bucketed(lengths, 4, 40);
  const Permutation anyhow(700, 1);
  for (std::int64_t i = 0; i < 700; ++i) {
    const std::int64_t position = anyhow(i);
    ASSERT_EQ(sampler->at(position, 3, 2), expected[static_cast<std::size_t>(position)]);
    sampler->at(position, static_cast<std::uint64_t>(i % 3), 5);
  }
}

TEST(Sampler, ThreadsDrawAtOnce) {
  for (const auto& sampler :
       {shuffled(400), shuffled_blocks(400, 7, 3), bucketed(some_lengths(400), 4, 20), weighted({1, 2, 3}, 400)}) {
    const auto expected = epoch_of(*sampler, 1, 1);
    std::vector<Samples> found(4, Samples(400));
    {
      std::vector<std::jthread> threads;
      for (std::size_t t = 0; t < found.size(); ++t) {
        threads.emplace_back([&, t] {
          const Permutation order(400, t);
          for (std::int64_t i = 0; i < 400; ++i)
            found[t][static_cast<std::size_t>(order(i))] = sampler->at(order(i), 1, 1);
        });
      }
    }
    for (const auto& each : found) EXPECT_EQ(each, expected);
  }
}

TEST(Sampler, FingerprintsDifferWhereTheOrderDoes) {
  const std::vector<SamplerPtr> different{sequential(10),
                                          sequential(11),
                                          shuffled(10),
                                          shuffled(11),
                                          shuffled_blocks(10, 2, 2),
                                          shuffled_blocks(10, 2, 3),
                                          shuffled_blocks(10, 3, 2),
                                          weighted({1, 2}, 10),
                                          weighted({1, 2}, 11),
                                          weighted({2, 1}, 10),
                                          mixed({5, 5}, {1, 2}, 10),
                                          mixed({5, 5}, {1, 2}, 11),
                                          mixed({5, 5}, {2, 1}, 10),
                                          mixed({4, 6}, {1, 2}, 10),
                                          bucketed({1, 2, 3}, 1, 2),
                                          bucketed({1, 2, 3}, 1, 3),
                                          bucketed({1, 2, 4}, 1, 2),
                                          bucketed({1, 2, 3}, 2, 2)};
  std::set<std::string> found;
  for (const auto& sampler : different) {
    EXPECT_EQ(sampler->fingerprint().size(), 16U);
    found.insert(sampler->fingerprint());
  }
  EXPECT_EQ(found.size(), different.size());
  EXPECT_EQ(weighted({1, 2}, 10)->fingerprint(), weighted({1, 2}, 10)->fingerprint());
}

TEST(Sampler, RefusesWhatMakesNoOrder) {
  EXPECT_THROW(sequential(-1), Error);
  EXPECT_THROW(shuffled(std::numeric_limits<std::int64_t>::max()), Error);
  EXPECT_THROW(shuffled_blocks(5, 0, 1), Error);
  EXPECT_THROW(shuffled_blocks(5, 1, 0), Error);
  EXPECT_THROW(weighted({}, 3), Error);
  EXPECT_THROW(weighted({0, 0}, 3), Error);
  EXPECT_THROW(weighted({1, -1}, 3), Error);
  EXPECT_THROW(weighted({1, std::nan("")}, 3), Error);
  EXPECT_THROW(weighted({1, std::numeric_limits<double>::infinity()}, 3), Error);
  EXPECT_THROW(weighted({1}, -3), Error);
  EXPECT_THROW(mixed({}, {}, 3), Error);
  EXPECT_THROW(mixed({3}, {1, 1}, 3), Error);
  EXPECT_THROW(mixed({3, 0}, {1, 1}, 3), Error);
  EXPECT_THROW(mixed({3, -1}, {1, 0}, 3), Error);
  EXPECT_THROW(mixed({3, 1}, {0, 0}, 3), Error);
  EXPECT_THROW(mixed({3, 1}, {1, 1}, -1), Error);
  EXPECT_THROW(bucketed({1, -2}, 1, 1), Error);
  EXPECT_THROW(bucketed({1}, 0, 1), Error);
  EXPECT_THROW(bucketed({1}, 1, 0), Error);
  for (const auto& sampler : shuffles(5)) {
    EXPECT_THROW(sampler->at(-1, 0, 0), Error);
    EXPECT_THROW(sampler->at(5, 0, 0), Error);
  }
  EXPECT_THROW(shuffled(0)->at(0, 0, 0), Error);
}

TEST(Sampler, OrdersStayWhatTheyAre) {  // a later version goes on where this one stopped
  EXPECT_EQ(epoch_of(*shuffled(8), 2, 1), (Samples{6, 7, 1, 0, 2, 3, 4, 5}));
  EXPECT_EQ(epoch_of(*shuffled_blocks(8, 3, 2), 2, 1), (Samples{4, 5, 3, 7, 6, 2, 1, 0}));
  EXPECT_EQ(epoch_of(*weighted({1, 2, 3}, 8), 2, 1), (Samples{2, 1, 1, 1, 1, 2, 1, 0}));
  EXPECT_EQ(epoch_of(*bucketed({1, 1, 2, 2, 3, 3, 4, 4}, 2, 5), 2, 1), (Samples{2, 3, 1, 0, 6, 7, 4, 5}));
  EXPECT_EQ(epoch_of(*mixed({3, 5}, {1, 2}, 8), 2, 1), (Samples{4, 1, 6, 3, 1, 7, 4, 0}));
  EXPECT_EQ(sample_random(1, 2, 3).next64(), 4'879'360'871'508'595'706U);
}

TEST(Sampler, HugeSetsCostNothing) {
  constexpr std::int64_t kSize = 1'000'000'000'000;
  for (const auto& sampler :
       {shuffled(kSize), shuffled_blocks(kSize, 4096, 64), shuffled_blocks(kSize - 1, 4096, 64)}) {
    std::set<std::int64_t> found;
    for (std::int64_t i = 0; i < 2000; ++i) {
      const std::int64_t sample = sampler->at(sampler->size() - 1 - i, 1, 1);
      found.insert(sample);
      ASSERT_EQ(sampler->next(sample, {1, 0}, 1), (Draw{1, sampler->size() - 1 - i}));
    }
    EXPECT_EQ(found.size(), 2000U);
  }
}

TEST(SampleRandom, EverySampleOfEveryEpochHasNumbersOfItsOwn) {
  std::set<std::uint64_t> found;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    for (std::uint64_t epoch = 0; epoch < 10; ++epoch) {
      for (std::int64_t sample = 0; sample < 10; ++sample) {
        auto random = sample_random(seed, epoch, sample);
        for (int i = 0; i < 3; ++i) found.insert(random.next64());
      }
    }
  }
  EXPECT_EQ(found.size(), 3000U);
  EXPECT_EQ(sample_random(1, 2, 3).next64(), sample_random(1, 2, 3).next64());
}

}  // namespace
}  // namespace oxytorch::data
