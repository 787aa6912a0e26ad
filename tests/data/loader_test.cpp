#include "oxytorch/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <set>
#include <thread>

#include "counted_samples.h"
#include "data/loader_state.h"
#include "oxytorch/error.h"
#include "test_folder.h"

namespace oxytorch::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

TEST(Loader, GivesEverySampleInOrder) {
  Loader loader(std::make_shared<Counting>(10), {.batch_size = 4});
  EXPECT_EQ(loader.size(), 3);
  const auto batches = epoch_of(loader);
  ASSERT_THAT(batches, SizeIs(3));
  EXPECT_THAT(numbers_of(batches[0]), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(numbers_of(batches[2]), ElementsAre(8, 9));
  EXPECT_THAT(batches[2].samples, ElementsAre(8, 9));
  EXPECT_THAT(batches[1].columns[1].texts, ElementsAre("text 4", "text 5", "text 6", "text 7"));
  EXPECT_THAT(batches[0].columns[2].lengths, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(batches[0].columns[2].array.shape, ElementsAre(10));
  EXPECT_EQ(loader.epoch(), 1);
  EXPECT_THAT(epoch_of(loader), SizeIs(3));
  EXPECT_THAT(epoch_of(loader), SizeIs(3));
}

TEST(Loader, DropsTheLastBatchWhereAsked) {
  Loader loader(std::make_shared<Counting>(10), {.batch_size = 4, .drop_last = true});
  EXPECT_THAT(epoch_of(loader), SizeIs(2));
  Loader small(std::make_shared<Counting>(3), {.batch_size = 4, .drop_last = true});
  EXPECT_EQ(small.size(), 0);
  EXPECT_THAT(epoch_of(small), SizeIs(0));
  EXPECT_TRUE(small.wait(0));
}

TEST(Loader, IsEmptyWithoutSamples) {
  Loader loader(std::make_shared<Counting>(0), {.batch_size = 4, .shuffle = true});
  EXPECT_EQ(loader.size(), 0);
  EXPECT_FALSE(loader.next().has_value());
}

TEST(Loader, GivesTheSameBytesForAnyThreadsAndPrefetch) {
  std::vector<std::string> first;
  for (const int threads : {1, 2, 5, 8}) {
    for (const int prefetch : {1, 3, 17}) {
      Loader loader(std::make_shared<Counting>(101, true), {.batch_size = 7,
                                                            .stages = {randomly()},
                                                            .shuffle = true,
                                                            .seed = 3,
                                                            .threads = threads,
                                                            .prefetch = prefetch});
      std::vector<std::string> found;
      for (int epoch = 0; epoch < 3; ++epoch) {
        for (const auto& batch : epoch_of(loader)) found.push_back(text_of_batch(batch));
      }
      if (first.empty()) first = found;
      ASSERT_EQ(found, first) << threads << " threads, prefetch " << prefetch;
    }
  }
  EXPECT_EQ(std::set<std::string>(first.begin(), first.end()).size(), 45U) << "epochs differ";
}

TEST(Loader, ProcessesShareAGlobalBatch) {
  constexpr std::int64_t kGlobal = 12, kSamples = 144;
  std::vector<std::vector<std::int64_t>> first;
  for (const std::int64_t world : {1, 2, 3, 6}) {
    std::vector<std::vector<std::int64_t>> found(kSamples / kGlobal);
    for (std::int64_t rank = 0; rank < world; ++rank) {
      Loader loader(std::make_shared<Counting>(kSamples), {.batch_size = kGlobal / world,
                                                           .stages = {randomly()},
                                                           .shuffle = true,
                                                           .rank = rank,
                                                           .world_size = world,
                                                           .threads = 2});
      std::size_t at = 0;
      for (const auto& batch : epoch_of(loader)) {
        const auto numbers = numbers_of(batch);
        found[at].insert(found[at].end(), numbers.begin(), numbers.end());
        ++at;
      }
    }
    if (first.empty()) first = found;
    EXPECT_EQ(found, first) << world << " processes";
  }
}

TEST(Loader, GoesOnFromAnyState) {
  const auto make = [](int threads, std::int64_t world = 1) {
    return std::make_unique<Loader>(std::make_shared<Counting>(64), LoaderOptions{.batch_size = 8 / world,
                                                                                  .stages = {randomly()},
                                                                                  .shuffle = true,
                                                                                  .seed = 9,
                                                                                  .world_size = world,
                                                                                  .threads = threads});
  };
  auto whole = make(2);
  std::vector<std::string> stream;
  std::vector<std::string> states;
  for (int i = 0; i < 30; ++i) {
    states.push_back(whole->state());
    EXPECT_LE(states.back().size(), 256U);
    auto batch = whole->next();
    stream.push_back(batch ? text_of_batch(*batch) : "end");
  }
  for (std::size_t at = 0; at < states.size(); ++at) {
    auto resumed = make(at % 2 == 0 ? 1 : 8);
    if (at % 3 == 0) static_cast<void>(resumed->next());
    resumed->load_state(states[at]);
    for (std::size_t i = at; i < states.size(); ++i) {
      auto batch = resumed->next();
      ASSERT_EQ(batch ? text_of_batch(*batch) : "end", stream[i]) << "from " << at << ", batch " << i;
    }
  }
  auto pair = make(1, 2);
  pair->load_state(states[5]);
  EXPECT_EQ(pair->next()->index, 5);
}

TEST(Loader, ResumesAtTheEndOfABillionSamples) {
  constexpr std::int64_t kSamples = 1'000'000'000, kBatch = 256, kBatches = kSamples / kBatch * 99 / 100;
  const TestFolder folder;
  const auto path = folder.write("numbers", "");
  std::filesystem::resize_file(path, 8 * static_cast<std::uintmax_t>(kSamples));  // of holes
  Loader loader(open_raw(path, DType::I64, {}), {.batch_size = kBatch, .shuffle = true, .seed = 3});
  auto state = read_loader_state(loader.state());
  state.batches = kBatches;
  state.samples = kBatches * kBatch;
  loader.load_state(write_loader_state(state));
  EXPECT_LE(loader.state().size(), 256U);
  const auto batch = loader.next();
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->index, kBatches);
  for (std::int64_t i = 0; i < kBatch; ++i) {
    ASSERT_EQ(batch->samples[static_cast<std::size_t>(i)], loader.options().sampler->at(kBatches * kBatch + i, 0, 3));
  }
}

TEST(Loader, RefusesAStateOfAnother) {
  const auto problem = [](Loader& loader, const std::string& state) -> std::string {
    try {
      loader.load_state(state);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  Loader one(std::make_shared<Counting>(64), {.batch_size = 8});
  Loader bigger(std::make_shared<Counting>(65), {.batch_size = 8});
  Loader shuffling(std::make_shared<Counting>(64), {.batch_size = 8, .shuffle = true});
  Loader pair(std::make_shared<Counting>(64), {.batch_size = 8, .world_size = 2});
  EXPECT_THAT(problem(bigger, one.state()), HasSubstr("another dataset"));
  EXPECT_THAT(problem(shuffling, one.state()), HasSubstr("another order"));
  EXPECT_THAT(problem(pair, one.state()), HasSubstr("batches of 8 over all processes"));
  for (const char* nonsense : {"", "{}", "[1]", "{\"v\":1}", "{\"v\":2}", "\x80", "null"}) {
    EXPECT_THAT(problem(one, nonsense), HasSubstr("state of")) << nonsense;
  }
  auto state = one.state();
  for (const char* number : {"1e300", "99999999999999999999999", "0.5", "true", "\"8\""}) {
    auto changed = state;
    changed.replace(changed.find("\"batch\":8"), 9, std::string("\"batch\":") + number);
    EXPECT_THAT(problem(one, changed), HasSubstr("'batch' of the loader's state is")) << number;
  }
  for (std::size_t at = 0; at < state.size(); ++at) {
    auto changed = state;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    static_cast<void>(problem(one, changed));
    static_cast<void>(problem(one, state.substr(0, at)));
  }
  one.load_state(state);
  EXPECT_THAT(epoch_of(one), SizeIs(8));
}

TEST(Loader, BeginsAnEpochAnew) {
  Loader loader(std::make_shared<Counting>(32), {.batch_size = 8, .shuffle = true});
  const auto first = text_of_batch(*loader.next());
  loader.set_epoch(5);
  const auto fifth = text_of_batch(*loader.next());
  loader.set_epoch(0);
  EXPECT_EQ(text_of_batch(*loader.next()), first);
  loader.set_epoch(5);
  EXPECT_EQ(text_of_batch(*loader.next()), fifth);
  EXPECT_NE(first, fifth);
  EXPECT_THROW(loader.set_epoch(-1), Error);
}

TEST(Loader, SaysWhatCannotBeRead) {
  const auto dataset = std::make_shared<Counting>(12, false, std::set<std::int64_t>{5});
  Loader loader(dataset, {.batch_size = 4});
  EXPECT_TRUE(loader.next().has_value());
  try {
    static_cast<void>(loader.next());
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "sample 5 (counted 5): damaged at byte 7.");
    EXPECT_EQ(error.code(), ErrorCode::Io);
  }
  EXPECT_THAT(numbers_of(*loader.next()), ElementsAre(8, 9, 10, 11)) << "it goes on";
}

TEST(Loader, SkipsOrReplacesWhatCannotBeRead) {
  const auto dataset = [] {
    return std::make_shared<Counting>(12, false, std::set<std::int64_t>{0, 5, 6, 8, 9, 10, 11});
  };
  Loader skipping(dataset(), {.batch_size = 4, .on_error = OnError::Skip});
  auto batches = epoch_of(skipping);
  ASSERT_THAT(batches, SizeIs(2)) << "a batch of nothing is left out";
  EXPECT_THAT(numbers_of(batches[0]), ElementsAre(1, 2, 3));
  EXPECT_THAT(batches[0].columns[1].texts, ElementsAre("text 1", "text 2", "text 3"));
  EXPECT_THAT(numbers_of(batches[1]), ElementsAre(4, 7));
  EXPECT_EQ(skipping.stats().skipped, 7);
  Loader replacing(dataset(), {.batch_size = 4, .on_error = OnError::Replace});
  batches = epoch_of(replacing);
  ASSERT_THAT(batches, SizeIs(3));
  EXPECT_THAT(numbers_of(batches[1]), ElementsAre(4, 7, 7, 7));
  EXPECT_THAT(batches[1].samples, ElementsAre(4, 7, 7, 7));
  EXPECT_THAT(numbers_of(batches[2]), ElementsAre(1, 1, 1, 1)) << "from the start again";
}

TEST(Loader, NamesTheStageThatThrows) {
  const auto failing = stage("mine", [](Item& item, PhiloxStream&) {
    if (item.index == 3) throw std::runtime_error("no good");
  });
  Loader loader(std::make_shared<Counting>(4), {.batch_size = 4, .stages = {failing}});
  try {
    static_cast<void>(loader.next());
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "sample 3 (counted 3): stage mine: no good");
  }
}

TEST(Loader, WritesImages) {
  Loader loader(
      std::make_shared<Counting>(3, true),
      {.batch_size = 3, .image = {.normalize = true, .mean = {0.5F, 0.5F, 0.5F}, .deviation = {0.25F, 0.25F, 0.25F}}});
  const auto batch = *loader.next();
  const auto& image = batch.columns.at(3).array;
  EXPECT_EQ(image.dtype, DType::F32);
  EXPECT_THAT(image.shape, ElementsAre(3, 3, 4, 6));
  std::vector<float> values(image.data.bytes.size() / 4);
  std::memcpy(values.data(), image.data.bytes.data(), image.data.bytes.size());
  EXPECT_NEAR(values.back(), (2.0 / 255 - 0.5) / 0.25, 1e-6);
}

TEST(Loader, PadsWhatDiffersInLength) {
  Loader loader(std::make_shared<Counting>(5), {.batch_size = 5, .pad = {{"some", -7}}});
  const auto batch = *loader.next();
  const auto& some = batch.columns.at(2);
  EXPECT_THAT(some.lengths, SizeIs(0));
  EXPECT_THAT(some.array.shape, ElementsAre(5, 4));
  std::vector<std::int32_t> values(20);
  std::memcpy(values.data(), some.array.data.bytes.data(), 80);
  EXPECT_THAT(values, ElementsAre(0, -7, -7, -7, 1, 1, -7, -7, 2, 2, 2, -7, 3, 3, 3, 3, 4, -7, -7, -7));
}

TEST(Loader, MovesBoxesWithTheImage) {
  class Boxed final : public Dataset {
   public:
    Boxed() {
      schema_.fields = {{"image", Kind::Image, DType::U8, {}},
                        {"boxes", Kind::Array, DType::F32, {-1, 4}},
                        {"kinds", Kind::Array, DType::I64, {-1}}};
    }
    [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
    [[nodiscard]] std::int64_t size() const noexcept override { return 2; }
    [[nodiscard]] Sample read(std::int64_t) const override {
      const std::vector<std::uint8_t> pixels(10 * 10 * 3);
      const std::array<float, 8> boxes{0, 0, 2, 2, 4, 4, 6, 6};
      const std::array<std::int64_t, 2> kinds{11, 22};
      return {own(DType::U8, {10, 10, 3}, std::as_bytes(std::span(pixels))),
              own(DType::F32, {2, 4}, std::as_bytes(std::span(boxes))),
              own(DType::I64, {2}, std::as_bytes(std::span(kinds)))};
    }
    [[nodiscard]] std::string place(std::int64_t) const override { return "boxed"; }
    [[nodiscard]] std::string fingerprint() const override { return "boxed"; }
    [[nodiscard]] std::string format() const override { return "boxed"; }

   private:
    Schema schema_;
  };
  Loader loader(std::make_shared<Boxed>(),
                {.batch_size = 2, .stages = {center_crop(4, 4)}, .boxes = "boxes", .per_box = {"kinds"}});
  const auto batch = *loader.next();
  EXPECT_THAT(batch.columns.at(1).lengths, ElementsAre(1, 1));
  std::array<float, 8> boxes{};
  std::memcpy(boxes.data(), batch.columns.at(1).array.data.bytes.data(), 32);
  EXPECT_THAT(boxes, ElementsAre(1, 1, 3, 3, 1, 1, 3, 3));
  std::array<std::int64_t, 2> kinds{};
  std::memcpy(kinds.data(), batch.columns.at(2).array.data.bytes.data(), 16);
  EXPECT_THAT(kinds, ElementsAre(22, 22));
}

TEST(Loader, SaysWhichImagesDiffer) {
  const auto odd = stage("odd", [](Item& item, PhiloxStream&) {
    if (item.index == 1) item.image = LazyImage(resize_pixels(item.image.pixels(), 3, 3));
  });
  Loader loader(std::make_shared<Counting>(2, true), {.batch_size = 2, .stages = {odd}});
  try {
    static_cast<void>(loader.next());
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("Images of a batch must have one size"));
  }
}

TEST(Loader, ReadsFromTheCacheInLaterEpochs) {
  const auto dataset = std::make_shared<Counting>(40, true);
  const auto cache = std::make_shared<Cache>(CacheOptions{.memory = "10MB"});
  // One thread: two may draw a sample for two epochs at once, and read it twice.
  Loader loader(
      dataset,
      {.batch_size = 8, .stages = {randomly()}, .shuffle = true, .threads = 1, .cache = cache, .strip_jpegs = true});
  Loader plain(std::make_shared<Counting>(40, true), {.batch_size = 8, .stages = {randomly()}, .shuffle = true});
  for (int epoch = 0; epoch < 3; ++epoch) {
    const auto found = epoch_of(loader), expected = epoch_of(plain);
    for (std::size_t i = 0; i < found.size(); ++i) ASSERT_EQ(text_of_batch(found[i]), text_of_batch(expected[i]));
  }
  EXPECT_EQ(dataset->reads, 40) << "each once";
  EXPECT_GE(loader.stats().cache->memory.hits, 80);
}

// A quarter of all samples is what one of four processes draws in an epoch. Kept without looking at who draws what
// next, a quarter of its draws would be hits.
TEST(Loader, KeepsWhatItsProcessDrawsAgain) {
  constexpr std::int64_t kSamples = 400, kEpochs = 12;
  const auto whole = std::make_shared<Cache>(CacheOptions{.memory = "10MB"});
  Loader all(std::make_shared<Counting>(kSamples), {.batch_size = 100, .cache = whole});
  (void)epoch_of(all);
  const auto bytes = whole->stats().memory.bytes;
  const auto dataset = std::make_shared<Counting>(kSamples);
  const auto cache = std::make_shared<Cache>(CacheOptions{.memory = std::to_string(bytes / 4)});
  Loader loader(dataset, {.batch_size = 5, .shuffle = true, .rank = 1, .world_size = 4, .threads = 1, .cache = cache});
  for (int epoch = 0; epoch < kEpochs; ++epoch) (void)epoch_of(loader);
  EXPECT_LE(dataset->reads, 0.62 * kSamples / 4 * kEpochs);
}

TEST(Loader, ReadsRemoteSamplesWithThreadsOfTheirOwn) {
  const auto dataset = std::make_shared<Counting>(50, false, std::set<std::int64_t>{44});
  dataset->is_remote = true;
  Loader loader(dataset, {.batch_size = 5, .threads = 2});
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_EQ(numbers_of(*loader.next()).front(), 5 * i);
  EXPECT_THROW(static_cast<void>(loader.next()), Error);
  EXPECT_THAT(numbers_of(*loader.next()), ElementsAre(45, 46, 47, 48, 49));
}

TEST(Loader, BatchesOutliveIt) {
  auto loader = std::make_unique<Loader>(std::make_shared<Counting>(100), LoaderOptions{.batch_size = 10});
  const auto kept = *loader->next();
  for (int i = 0; i < 5; ++i) static_cast<void>(loader->next());
  EXPECT_THAT(numbers_of(kept), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  loader.reset();
  EXPECT_THAT(numbers_of(kept), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
}

TEST(Loader, EndsInTheMiddleOfItsWork) {
  std::atomic<int> began{0};
  const auto slow = stage("slow", [&](Item&, PhiloxStream&) {
    ++began;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  });
  for (int i = 0; i < 20; ++i) {
    Loader loader(std::make_shared<Counting>(1000), {.batch_size = 4, .stages = {slow}, .threads = 4, .prefetch = 8});
    if (i % 2 == 0) static_cast<void>(loader.next());
    static_cast<void>(loader.wait(0));
  }
  EXPECT_GT(began, 0);
}

TEST(Loader, SaysThatItWasForked) {
  Loader loader(std::make_shared<Counting>(10), {.batch_size = 2});
  static_cast<void>(loader.next());
  const auto child = ::fork();
  if (child == 0) {
    try {
      static_cast<void>(loader.next());
    } catch (const Error& error) {
      ::_exit(std::string(error.what()).find("forked") != std::string::npos ? 0 : 1);
    }
    ::_exit(2);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(loader.next().has_value()) << "the parent's goes on";
}

TEST(Loader, RefusesWhatCannotBeMeant) {
  const auto dataset = std::make_shared<Counting>(10, true);
  const auto problem = [&](LoaderOptions options) -> std::string {
    try {
      Loader loader(dataset, std::move(options));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(problem({.batch_size = 0}), HasSubstr("batch_size is 0"));
  EXPECT_THAT(problem({.rank = 2, .world_size = 2}), HasSubstr("rank 2 of world_size 2"));
  EXPECT_THAT(problem({.threads = -1}), HasSubstr("threads is -1"));
  EXPECT_THAT(problem({.prefetch = -1}), HasSubstr("prefetch is -1"));
  EXPECT_THAT(problem({.boxes = "none"}), HasSubstr("no field 'none'"));
  EXPECT_THAT(problem({.boxes = "number"}), HasSubstr("float32 of [n, 4]"));
  EXPECT_THAT(problem({.masks = {"text"}}), HasSubstr("holds no encoded image"));
  EXPECT_THAT(problem({.pad = {{"number", 0}}}), HasSubstr("do not differ in length"));
  EXPECT_THAT(problem({.image = {.normalize = true, .deviation = {0, 1, 1}}}), HasSubstr("standard deviation"));
  EXPECT_THROW(Loader(std::shared_ptr<const Dataset>(), {}), Error);
  EXPECT_THROW(Loader(std::shared_ptr<Stream>(), {}), Error);
  const auto sized = [&](std::vector<std::int64_t> sizes, BatchLimit limit, std::int64_t batch_size = 1) {
    return problem({.batch_size = batch_size, .batch_sizer = BatchSizer{std::move(sizes), limit}});
  };
  const std::vector<std::int64_t> ones(10, 1);
  EXPECT_THAT(sized({1, 2}, {5}), HasSubstr("2 sizes for 10 samples"));
  EXPECT_THAT(sized(ones, {0}), HasSubstr("a batch may hold 0"));
  EXPECT_THAT(sized(ones, {5, false, 0}), HasSubstr("may have 0 samples"));
  EXPECT_THAT(sized(ones, {5}, 4), HasSubstr("batch_size is 4 beside a batch_sizer"));
  EXPECT_THAT(sized({1, 1, 6, 1, 1, 1, 1, 1, 1, 1}, {5}),
              HasSubstr("sample 2: a sample has a size of 6, more than the 5"));
  EXPECT_THAT(sized({1, -1, 1, 1, 1, 1, 1, 1, 1, 1}, {5}), HasSubstr("sample 1: a sample has a size of -1"));
}

TEST(Loader, TellsWhereTimeGoes) {
  const auto slow =
      stage("slow", [](Item&, PhiloxStream&) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  Loader loader(std::make_shared<Counting>(20), {.batch_size = 5, .stages = {slow}});
  EXPECT_EQ(loader.stats().bottleneck(), "");
  epoch_of(loader);
  const auto stats = loader.stats();
  EXPECT_EQ(stats.batches, 4);
  EXPECT_EQ(stats.samples, 20);
  EXPECT_EQ(stats.bottleneck(), "slow");
  EXPECT_EQ(stats.stage_seconds.at(0).first, "slow");
}

}  // namespace
}  // namespace oxytorch::data
