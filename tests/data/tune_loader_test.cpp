#include "oxytorch/data/tune.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "counted_samples.h"
#include "data/tune_loader.h"
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
    std::this_thread::sleep_for(pause);
    OXY_CHECK(index != damaged, Io, "damaged at byte 7.");
    const std::vector<std::byte> bytes(1000, static_cast<std::byte>(index));
    return {scalar(DType::I64, index), own(DType::U8, {1000}, bytes)};
  }
  [[nodiscard]] std::string place(std::int64_t index) const override { return "slow " + std::to_string(index); }
  [[nodiscard]] std::string fingerprint() const override { return "slow"; }
  [[nodiscard]] std::string format() const override { return "slow"; }
  std::int64_t damaged = -1;
  std::chrono::microseconds pause{500};

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

/// What tune() finds where a batch takes as long as `cost` says, by a clock that steps alone move.
LoaderTuning found_where(TensorLoader& loader, const std::function<double(const LoaderOptions&)>& cost,
                         TuneOptions options = {.memory = "0"}) {
  double now = 0;
  options.step = [&](const TensorBatch&) { now += cost(loader.options()); };
  return tune_by(loader, options, [&] { return now; });
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
  const auto found =
      found_where(loader, [](const LoaderOptions& options) { return options.cache ? 0.001 : 0.01; },
                  {.seconds = 2, .memory = "1MB", .progress = [&](const std::string& line) { lines.push_back(line); }});
  EXPECT_EQ(loader.state(), before);
  ASSERT_TRUE(found.cache);
  EXPECT_EQ(loader.options().cache, found.cache);
  EXPECT_EQ(loader.options().threads, found.threads);
  const auto* cached = trial_with(found, "cache of");
  ASSERT_NE(cached, nullptr);
  EXPECT_NEAR(*cached->ratio, 10, 1e-6);
  EXPECT_EQ(cached->note, "taken; the epoch that fills it takes 0.10 times as long");  // as the clock has it
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
  const auto cost = [](const LoaderOptions& options) {
    if (!options.cache) return 0.01;
    return options.cache->stats().memory.limit > 0 ? 0.001 : 0.002;
  };
  const auto found =
      found_where(loader, cost, {.seconds = 2, .memory = "20000", .disk = "30000", .folder = folder.path()});
  const auto* cached = trial_with(found, "of disk");
  ASSERT_NE(cached, nullptr) << found.trials.size();
  EXPECT_THAT(cached->note, HasSubstr("it holds 7"));  // 50,000 of 64 samples of about 1,060 bytes
  EXPECT_GT(*cached->ratio, 2);                        // a quarter is read, as slowly as before
  ASSERT_TRUE(found.cache);
  const auto stats = found.cache->stats();
  EXPECT_NEAR(static_cast<double>(stats.memory.limit), 20000, 6000);
  EXPECT_NEAR(static_cast<double>(stats.disk.limit), 30000, 6000);
}

TEST_F(TuneLoader, TellsWhereTimeGoes) {
  const auto dataset = std::make_shared<Slow>(64);
  dataset->pause = std::chrono::milliseconds(5);
  TensorLoader loader(dataset, shuffled_by(1));
  EXPECT_EQ(found_where(loader, [](const LoaderOptions&) { return 1.0; }).bottleneck, "read");
}

/// Of a file, whose samples are quick.
std::shared_ptr<const Dataset> quick_rows(const TestFolder& folder) {
  return open_raw(folder.write("x.bin", std::string(4000, 'x')), DType::F32, {4});
}

TEST_F(TuneLoader, TakesAsManyThreadsAsPay) {
  const TestFolder folder;
  const int usable = read_cores().usable;
  if (usable < 2) GTEST_SKIP() << "one core";
  TensorLoader loader(quick_rows(folder), shuffled_by(1));
  const auto found = found_where(loader, [](const LoaderOptions& options) { return 0.01 / options.threads; });
  EXPECT_EQ(found.threads, loader.options().threads);
  if (usable <= 128) EXPECT_GE(found.threads * 3, usable * 2);  // the numbers that are tried are no further apart
  const auto* taken = trial_with(found, std::to_string(found.threads) + " threads, " + std::to_string(found.prefetch));
  ASSERT_NE(taken, nullptr);
  EXPECT_EQ(taken->note, "taken");
  EXPECT_NEAR(*taken->ratio, found.threads, 1e-6);
  EXPECT_NEAR(*taken->batches_per_second, 100.0 * found.threads, 1e-3);
  EXPECT_EQ(found.trials[0].note, "");
  EXPECT_THAT(taken->text(), testing::ContainsRegex("threads, [0-9]+ ahead +[0-9.e+]+ +[0-9.]+x  taken"));
}

TEST_F(TuneLoader, TakesNothingThatIsNotSurelyFaster) {
  const TestFolder folder;
  const auto of_threads = [](double by_two) {
    return [by_two](const LoaderOptions& options) { return options.threads == 1 ? 0.01 : by_two; };
  };
  const std::vector<std::function<double(const LoaderOptions&)>> costs = {
      of_threads(0.01), of_threads(0.02), of_threads(0.01 / 1.015),
      // Faster in the median by a tenth, and slower in two rounds of five.
      [turn = 0, was_one = true](const LoaderOptions& options) mutable {
        if (options.threads > 1 && was_one) ++turn;
        was_one = options.threads == 1;
        return was_one ? 0.01 : turn % 3 == 2 ? 0.015 : 0.009;
      }};
  for (std::size_t i = 0; i < costs.size(); ++i) {
    TensorLoader loader(quick_rows(folder), shuffled_by(1));
    const auto found = found_where(loader, costs[i]);
    EXPECT_EQ(found.threads, 1) << i;
    EXPECT_EQ(found.prefetch, 2) << i;
    EXPECT_EQ(found.trials[0].note, "nothing is at least 2 % faster") << i;
  }
  if (read_cores().usable < 2) return;
  TensorLoader loader(quick_rows(folder), shuffled_by(1));
  EXPECT_GT(found_where(loader, of_threads(0.01 / 1.03)).threads, 1);
}

TEST_F(TuneLoader, TakesMoreAheadWhileThatPays) {
  const TestFolder folder;
  const auto cost = [](const LoaderOptions& options) { return 0.01 / std::min(options.prefetch, 4); };
  TensorLoader loader(quick_rows(folder), shuffled_by(read_cores().usable));
  auto options = loader.asked();
  options.prefetch = 1;
  loader.change(options);
  const auto found = found_where(loader, cost);
  EXPECT_EQ(found.prefetch, 4);
  EXPECT_EQ(loader.options().prefetch, 4);
}

TEST_F(TuneLoader, EndsInTime) {
  const TestFolder folder;
  for (const double batch : {0.0001, 0.01, 1.0}) {
    TensorLoader loader(quick_rows(folder), shuffled_by(1));
    double spent = 0;
    (void)found_where(loader, [&](const LoaderOptions&) { return spent += batch, batch; },
                      {.seconds = 5, .memory = "0"});
    EXPECT_LT(spent, std::max(10.0, 400 * batch)) << batch;
  }
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
