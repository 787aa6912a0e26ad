#include "oxytorch/data/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "counted_samples.h"

namespace oxytorch::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

/// The samples of Counting one after the other, `size` of them in each epoch.
class Flowing final : public Stream {
 public:
  explicit Flowing(std::int64_t size, std::set<std::int64_t> damaged = {}) : from_(size, false, std::move(damaged)) {}
  [[nodiscard]] const Schema& schema() const noexcept override { return from_.schema(); }
  void begin(std::int64_t epoch) override {
    begun.push_back(epoch);
    at_ = 0;
  }
  [[nodiscard]] std::optional<Sample> next() override {
    if (at_ == from_.size()) return std::nullopt;
    return from_.read(at_++);
  }
  [[nodiscard]] std::string fingerprint() const override { return from_.fingerprint(); }
  std::vector<std::int64_t> begun;

 private:
  Counting from_;
  std::int64_t at_ = 0;
};

TEST(Loader, DrawsFromAStreamToItsEnd) {
  const auto stream = std::make_shared<Flowing>(10);
  Loader loader(stream, {.batch_size = 4, .threads = 3});
  EXPECT_EQ(loader.size(), -1);
  for (int epoch = 0; epoch < 3; ++epoch) {
    const auto batches = epoch_of(loader);
    ASSERT_THAT(batches, SizeIs(3));
    EXPECT_THAT(numbers_of(batches[0]), ElementsAre(0, 1, 2, 3));
    EXPECT_THAT(numbers_of(batches[2]), ElementsAre(8, 9));
    EXPECT_EQ(batches[1].index, 1);
    EXPECT_EQ(loader.epoch(), epoch + 1);
  }
  EXPECT_THAT(stream->begun, ElementsAre(0, 1, 2));
  EXPECT_EQ(loader.stats().samples, 30);
  Loader dropping(std::make_shared<Flowing>(10), {.batch_size = 4, .drop_last = true});
  EXPECT_THAT(epoch_of(dropping), SizeIs(2));
  Loader empty(std::make_shared<Flowing>(0), {.batch_size = 4});
  EXPECT_THAT(epoch_of(empty), SizeIs(0));
  EXPECT_THAT(epoch_of(empty), SizeIs(0));
}

TEST(Loader, AStreamGivesTheSameBytesFromAnyState) {
  const auto make = [](int threads, int prefetch, std::int64_t rank = 0, std::int64_t world = 1) {
    return std::make_unique<Loader>(std::make_shared<Flowing>(61), LoaderOptions{.batch_size = 6 / world,
                                                                                 .stages = {randomly()},
                                                                                 .shuffle = true,
                                                                                 .shuffle_window = 16,
                                                                                 .seed = 4,
                                                                                 .rank = rank,
                                                                                 .world_size = world,
                                                                                 .threads = threads,
                                                                                 .prefetch = prefetch});
  };
  auto whole = make(2, 3);
  std::vector<std::string> stream, states;
  for (int i = 0; i < 30; ++i) {
    states.push_back(whole->state());
    auto batch = whole->next();
    stream.push_back(batch ? text_of_batch(*batch) : "end");
  }
  EXPECT_NE(stream[0], stream[12]) << "each epoch has its own order";
  for (std::size_t at = 0; at < states.size(); ++at) {
    auto resumed = make(at % 2 == 0 ? 1 : 5, 1 + static_cast<int>(at % 4));
    if (at % 3 == 0) static_cast<void>(resumed->next());
    resumed->load_state(states[at]);
    for (std::size_t i = at; i < states.size(); ++i) {
      auto batch = resumed->next();
      ASSERT_EQ(batch ? text_of_batch(*batch) : "end", stream[i]) << "from " << at << ", batch " << i;
    }
  }
  auto alone = make(2, 2);
  const auto all = epoch_of(*alone);
  for (const std::int64_t world : {2, 3}) {
    std::vector<std::vector<std::int64_t>> joined(all.size());
    for (std::int64_t rank = 0; rank < world; ++rank) {
      auto part = make(1, 2, rank, world);
      const auto batches = epoch_of(*part);
      ASSERT_THAT(batches, SizeIs(all.size()));
      for (std::size_t i = 0; i < all.size(); ++i) {
        joined[i].insert(joined[i].end(), batches[i].samples.begin(), batches[i].samples.end());
      }
    }
    for (std::size_t i = 0; i + 1 < all.size(); ++i) EXPECT_EQ(joined[i], all[i].samples) << world;
    EXPECT_EQ(joined.back().front(), all.back().samples.front());  // the last one is filled up
  }
  std::set<std::int64_t> drawn;
  for (const auto& batch : all) drawn.insert(batch.samples.begin(), batch.samples.end());
  EXPECT_THAT(drawn, SizeIs(61));
  EXPECT_THAT(std::vector<std::int64_t>(drawn.begin(), drawn.end()).back(), 60);
}

TEST(Loader, MixesAStreamWithinItsWindow) {
  Loader loader(std::make_shared<Flowing>(40), {.batch_size = 8, .shuffle = true, .shuffle_window = 8, .seed = 1});
  bool mixed = false;
  std::set<std::vector<std::int64_t>> orders;
  for (const auto& batch : epoch_of(loader)) {
    auto samples = batch.samples;
    auto order = samples;
    for (auto& sample : order) sample -= batch.index * 8;
    orders.insert(order);
    mixed = mixed || !std::is_sorted(samples.begin(), samples.end());
    std::sort(samples.begin(), samples.end());
    std::vector<std::int64_t> window(8);
    std::iota(window.begin(), window.end(), batch.index * 8);
    EXPECT_EQ(samples, window);
  }
  EXPECT_TRUE(mixed);
  EXPECT_THAT(orders, SizeIs(5)) << "each window has an order of its own";
}

TEST(Loader, AStreamThatFailsIsToldAndGoesOn) {
  Loader raising(std::make_shared<Flowing>(12, std::set<std::int64_t>{5}), {.batch_size = 4});
  EXPECT_THAT(numbers_of(*raising.next()), ElementsAre(0, 1, 2, 3));
  try {
    static_cast<void>(raising.next());
    FAIL() << "the second batch has a damaged sample";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Io);
    EXPECT_THAT(error.what(), HasSubstr("sample 5 (of the stream): damaged at byte 7"));
  }
  Loader skipping(std::make_shared<Flowing>(12, std::set<std::int64_t>{4, 5}),
                  {.batch_size = 4, .on_error = OnError::Skip});
  const auto batches = epoch_of(skipping);
  ASSERT_THAT(batches, SizeIs(3));
  EXPECT_THAT(numbers_of(batches[1]), ElementsAre(6, 7));
  EXPECT_EQ(skipping.stats().skipped, 2);
}

TEST(Loader, AStreamThatOnlyFailsEnds) {
  std::set<std::int64_t> all;
  for (std::int64_t i = 3; i < 500; ++i) all.insert(i);
  Loader loader(std::make_shared<Flowing>(500, all), {.batch_size = 4, .on_error = OnError::Skip});
  EXPECT_THAT(epoch_of(loader), SizeIs(1));
  EXPECT_LE(loader.stats().skipped, 16);
}

TEST(Loader, LetsGoOfAStreamInTheMiddle) {
  for (int i = 0; i < 20; ++i) {
    Loader loader(std::make_shared<Flowing>(1'000'000), {.batch_size = 4, .threads = 2});
    for (int batch = 0; batch < i % 4; ++batch) static_cast<void>(loader.next());
    if (i % 2 == 0) {
      loader.set_epoch(3);
      EXPECT_EQ(loader.next()->epoch, 3);
    }
  }
}

TEST(Loader, RefusesWhatAStreamCannotDo) {
  const auto problem = [&](LoaderOptions options) -> std::string {
    try {
      Loader loader(std::make_shared<Flowing>(10), std::move(options));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(problem({.sampler = shuffled(10)}), HasSubstr("no sampler for a stream"));
  EXPECT_THAT(problem({.batch_sizer = BatchSizer{{1}, {5}}}), HasSubstr("no batch_sizer for a stream"));
  EXPECT_THAT(problem({.on_error = OnError::Replace}), HasSubstr("in the place of a damaged one for a stream"));
  EXPECT_THAT(problem({.shuffle_window = 0}), HasSubstr("shuffle_window is 0"));
}

}  // namespace
}  // namespace oxytorch::data
