#include "oxytorch/data/batch_sizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "counted_samples.h"

namespace oxytorch::data {
namespace {

using testing::SizeIs;

std::vector<std::int64_t> some_sizes(std::int64_t count) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t i = 0; i < count; ++i) sizes.push_back((i * 7919 + 13) % 50);  // 0 among them
  return sizes;
}

std::int64_t weight_of(const std::vector<std::int64_t>& samples, const BatchSizer& sizer) {
  std::int64_t total = 0, longest = 0;
  for (const auto sample : samples) {
    total += sizer.sizes[static_cast<std::size_t>(sample)];
    longest = std::max(longest, sizer.sizes[static_cast<std::size_t>(sample)]);
  }
  return sizer.limit.padded ? longest * static_cast<std::int64_t>(samples.size()) : total;
}

TEST(BatchFill, HoldsSizesThatWouldOverflow) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  for (const bool padded : {false, true}) {
    BatchFill fill({kMost, padded});
    EXPECT_FALSE(fill.add(kMost - 1));
    EXPECT_TRUE(fill.add(kMost));
    EXPECT_TRUE(fill.is_full());
    EXPECT_TRUE(fill.add(2));
    EXPECT_FALSE(fill.add(0));
  }
}

TEST(Loader, BatchesUnderALimitAreFullAndNeverAboveIt) {
  constexpr std::int64_t kSamples = 333;
  for (const bool padded : {false, true}) {
    for (const std::int64_t most : {std::int64_t{3}, std::numeric_limits<std::int64_t>::max()}) {
      const BatchSizer sizer{some_sizes(kSamples), {120, padded, most}};
      Loader loader(std::make_shared<Counting>(kSamples), {.batch_sizer = sizer, .shuffle = true, .threads = 2});
      std::vector<std::string> epochs;
      for (int epoch = 0; epoch < 2; ++epoch) {
        const auto batches = loader.size();
        const auto all = epoch_of(loader);
        EXPECT_EQ(static_cast<std::int64_t>(all.size()), batches);
        std::vector<std::int64_t> drawn;
        for (std::size_t i = 0; i < all.size(); ++i) {
          EXPECT_EQ(all[i].index, static_cast<std::int64_t>(i));
          EXPECT_LE(weight_of(all[i].samples, sizer), 120);
          EXPECT_LE(all[i].size, most);
          drawn.insert(drawn.end(), all[i].samples.begin(), all[i].samples.end());
          if (i + 1 == all.size()) continue;
          auto with_next = all[i].samples;
          with_next.push_back(all[i + 1].samples.front());
          EXPECT_TRUE(weight_of(with_next, sizer) > 120 || all[i].size == most) << "batch " << i << " has place left";
        }
        epochs.push_back(testing::PrintToString(drawn));
        std::sort(drawn.begin(), drawn.end());
        std::vector<std::int64_t> each(kSamples);
        std::iota(each.begin(), each.end(), 0);
        EXPECT_EQ(drawn, each);
      }
      EXPECT_NE(epochs[0], epochs[1]);
    }
  }
}

TEST(Loader, BatchesUnderALimitGoOnFromAnyState) {
  const auto make = [](std::int64_t rank, std::int64_t world, int threads) {
    return std::make_unique<Loader>(std::make_shared<Counting>(100),
                                    LoaderOptions{.batch_sizer = BatchSizer{some_sizes(100), {240 / world, true}},
                                                  .stages = {randomly()},
                                                  .shuffle = true,
                                                  .seed = 5,
                                                  .rank = rank,
                                                  .world_size = world,
                                                  .threads = threads});
  };
  for (const std::int64_t world : {1, 2, 3}) {
    const auto rank = world - 1;
    auto whole = make(rank, world, 2);
    std::vector<std::string> stream, states;
    for (int i = 0; i < 40; ++i) {
      states.push_back(whole->state());
      EXPECT_LE(states.back().size(), 256U);
      auto batch = whole->next();
      stream.push_back(batch ? text_of_batch(*batch) + std::to_string(batch->index) : "end");
    }
    for (std::size_t at = 0; at < states.size(); at += 3) {
      auto resumed = make(rank, world, 1);
      resumed->load_state(states[at]);
      for (std::size_t i = at; i < states.size(); ++i) {
        auto batch = resumed->next();
        ASSERT_EQ(batch ? text_of_batch(*batch) + std::to_string(batch->index) : "end", stream[i]) << at << " " << i;
      }
    }
  }
  auto other = make(0, 1, 1);
  Loader wider(std::make_shared<Counting>(100),
               {.batch_sizer = BatchSizer{some_sizes(100), {240, false}}, .shuffle = true});
  EXPECT_THROW(wider.load_state(other->state()), Error);
}

TEST(Loader, ProcessesTakeBatchesUnderALimitInTurn) {
  constexpr std::int64_t kSamples = 101;
  for (const bool drop_last : {false, true}) {
    const BatchSizer sizer{some_sizes(kSamples), {90}};
    Loader alone(std::make_shared<Counting>(kSamples), {.batch_sizer = sizer, .shuffle = true});
    const auto all = epoch_of(alone);
    std::vector<std::vector<Batch>> parts;
    for (std::int64_t rank = 0; rank < 3; ++rank) {
      Loader loader(std::make_shared<Counting>(kSamples),
                    {.batch_sizer = sizer, .shuffle = true, .rank = rank, .world_size = 3, .drop_last = drop_last});
      parts.push_back(epoch_of(loader));
      EXPECT_EQ(static_cast<std::int64_t>(parts.back().size()), (loader.set_epoch(0), loader.size()));
    }
    EXPECT_THAT(parts[1], SizeIs(parts[0].size()));
    EXPECT_THAT(parts[2], SizeIs(parts[0].size()));
    EXPECT_GE(parts[0].size(), all.size() / 3 - (drop_last ? 1 : 0));
    for (std::size_t i = 0; i < 3 * parts[0].size(); ++i) {
      const auto expected = all[std::min(i, all.size() - 1)].samples;  // the last one is repeated
      EXPECT_EQ(parts[i % 3][i / 3].samples, expected) << i;
    }
  }
}

}  // namespace
}  // namespace oxytorch::data
