#include "oxytorch/data/tune.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "counted_samples.h"
#include "device/torch_device.h"
#include "oxytorch/error.h"
#include "oxytorch/system.h"
#include "test_folder.h"

namespace oxytorch::data {
namespace {

using testing::HasSubstr;

/// Reads that take a while, as those of a slow disk do: more threads are faster, and a cache is.
class Slow final : public Dataset {
 public:
  explicit Slow(std::int64_t size) : size_(size) {
    schema_.fields = {{"number", Kind::Array, DType::I64, {}}, {"bytes", Kind::Array, DType::U8, {1000}}};
  }
  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return size_; }
  [[nodiscard]] Sample read(std::int64_t index) const override {
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    OXY_CHECK(index != damaged, Io, "damaged at byte 7.");
    const std::vector<std::byte> bytes(1000, static_cast<std::byte>(index));
    return {scalar(DType::I64, index), own(DType::U8, {1000}, bytes)};
  }
  [[nodiscard]] std::string place(std::int64_t index) const override { return "slow " + std::to_string(index); }
  [[nodiscard]] std::string fingerprint() const override { return "slow"; }
  [[nodiscard]] std::string format() const override { return "slow"; }
  std::int64_t damaged = -1;

 private:
  std::int64_t size_;
  Schema schema_;
};

LoaderOptions shuffled_by(int threads, std::int64_t batch = 4) {
  LoaderOptions options;
  options.batch_size = batch;
  options.shuffle = true;
  options.threads = threads;
  return options;
}

std::vector<std::int64_t> numbers_left(TensorLoader& loader) {
  std::vector<std::int64_t> numbers;
  while (const auto batch = loader.next()) {
    const auto& column = batch->tensors[0];
    for (std::int64_t i = 0; i < column.size(0); ++i) numbers.push_back(column[i].item<std::int64_t>());
  }
  return numbers;
}

class TuneLoader : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::test_device().is_cpu()) GTEST_SKIP() << "nothing in it depends on a device";
  }
};

const LoaderTrial* trial_with(const LoaderTuning& found, const std::string& part) {
  for (const auto& trial : found.trials) {
    if (trial.setting.find(part) != std::string::npos) return &trial;
  }
  return nullptr;
}

TEST_F(TuneLoader, FindsACacheAndStaysWhereItWas) {
  const auto dataset = std::make_shared<Slow>(64);
  TensorLoader plain(dataset, shuffled_by(1)), loader(dataset, shuffled_by(1));
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(loader.next() && plain.next());
  const auto before = loader.state();
  std::vector<std::string> lines;
  const auto found = tune(
      loader, {.seconds = 1.5, .memory = "1MB", .progress = [&](const std::string& line) { lines.push_back(line); }});
  EXPECT_EQ(loader.state(), before);
  ASSERT_TRUE(found.cache);
  EXPECT_EQ(loader.options().cache, found.cache);
  EXPECT_EQ(loader.options().threads, found.threads);
  EXPECT_EQ(found.bottleneck, "read");
  const auto* cached = trial_with(found, "cache of");
  ASSERT_NE(cached, nullptr);
  EXPECT_GT(*cached->ratio, 2);
  EXPECT_THAT(cached->note, HasSubstr("taken; the epoch that fills it takes"));
  EXPECT_THAT(found.trials[0].setting, HasSubstr("as given: 1 thread, 2 ahead"));
  EXPECT_EQ(lines.size(), found.trials.size() - 1);
  EXPECT_GE(found.cache->stats().memory.limit, 64 * 1100);  // that all fit into
  EXPECT_LE(found.cache->stats().memory.limit, 1'000'000);
  EXPECT_EQ(numbers_left(loader), numbers_left(plain));
  EXPECT_EQ(numbers_left(loader), numbers_left(plain));
}

TEST_F(TuneLoader, SplitsACacheBetweenMemoryAndDisk) {
  const TestFolder folder;
  TensorLoader loader(std::make_shared<Slow>(64), shuffled_by(2));
  const auto found = tune(loader, {.seconds = 1, .memory = "20000", .disk = "30000", .folder = folder.path()});
  const auto* cached = trial_with(found, "of disk");
  ASSERT_NE(cached, nullptr) << found.trials.size();
  EXPECT_THAT(cached->note, HasSubstr("it holds 7"));  // 50,000 of 64 samples of about 1,060 bytes
  ASSERT_TRUE(found.cache);
  const auto stats = found.cache->stats();
  EXPECT_NEAR(static_cast<double>(stats.memory.limit), 20000, 6000);
  EXPECT_NEAR(static_cast<double>(stats.disk.limit), 30000, 6000);
}

TEST_F(TuneLoader, TakesMoreThreadsWhereReadsWait) {
  if (read_cores().usable < 2) GTEST_SKIP() << "one core";
  TensorLoader loader(std::make_shared<Slow>(400), shuffled_by(1));
  const auto found = tune(loader, {.seconds = 1.5, .memory = "0"});
  EXPECT_GE(found.threads, 2);
  EXPECT_EQ(found.cache, nullptr);
  EXPECT_EQ(loader.options().threads, found.threads);
  const auto* taken = trial_with(found, std::to_string(found.threads) + " threads, " + std::to_string(found.prefetch));
  ASSERT_NE(taken, nullptr);
  EXPECT_THAT(taken->note, HasSubstr("taken"));
  EXPECT_THAT(taken->text(), testing::ContainsRegex("threads, [0-9]+ ahead +[0-9.e+]+ +[0-9.]+x  taken"));
}

TEST_F(TuneLoader, AStepCountsAndSeesEachBatch) {
  TensorLoader loader(std::make_shared<Slow>(40), shuffled_by(1));
  int steps = 0;
  const auto slow = [&](const TensorBatch& batch) {
    EXPECT_EQ(batch.tensors[0].size(0), 4);
    ++steps;
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
  };
  const auto found = tune(loader, {.seconds = 1, .step = slow, .memory = "1MB"});
  EXPECT_GT(steps, 20);
  EXPECT_GE(found.trials.size(), 3U);
}

TEST_F(TuneLoader, AnErrorLeavesItAsItWas) {
  const auto dataset = std::make_shared<Slow>(40);
  TensorLoader loader(dataset, shuffled_by(1));
  const auto before = loader.state();
  int left = 20;
  const auto breaks = [&](const TensorBatch&) {
    if (--left == 0) throw std::runtime_error("the step fails");
  };
  EXPECT_THROW(tune(loader, {.seconds = 1, .step = breaks}), std::runtime_error);
  EXPECT_EQ(loader.state(), before);
  EXPECT_EQ(loader.asked().threads, 1);
  EXPECT_EQ(loader.asked().cache, nullptr);
  dataset->damaged = 7;
  EXPECT_THROW(tune(loader, {.seconds = 1}), Error);
  EXPECT_EQ(loader.state(), before);
  EXPECT_THROW(tune(loader, {.seconds = 0}), Error);
  EXPECT_THROW(tune(loader, {.seconds = 1, .memory = "much"}), Error);
}

TEST_F(TuneLoader, LeavesWhatCannotBeChosen) {
  TensorLoader empty(std::make_shared<Slow>(0), shuffled_by(1));
  EXPECT_EQ(tune(empty, {.seconds = 1}).trials.at(0).note, "it has no batches");
  const auto given = std::make_shared<Cache>(CacheOptions{.memory = "1MB"});
  auto options = shuffled_by(1);
  options.cache = given;
  TensorLoader cached(std::make_shared<Slow>(40), options);
  const auto found = tune(cached, {.seconds = 0.5});
  EXPECT_EQ(found.cache, given);
  EXPECT_EQ(trial_with(found, "cache of"), nullptr);
}

}  // namespace
}  // namespace oxytorch::data
