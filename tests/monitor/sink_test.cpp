#include "oxytorch/monitor/sink.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "oxytorch/error.h"
#include "oxytorch/monitor/performance_monitor.h"

namespace oxytorch::monitor {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

class JsonlSinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("oxytorch_sink_test." + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "run.jsonl").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::vector<Json> lines() const {
    std::ifstream file(path_);
    std::vector<Json> parsed;
    for (std::string line; std::getline(file, line);) parsed.push_back(Json::parse(line));
    return parsed;
  }

  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(JsonlSinkTest, EachStepIsOneLineAndItsPartsAddUp) {
  {
    PerformanceMonitor monitor({}, {std::make_shared<JsonlSink>(path_)});
    const PhaseId outer = monitor.phase("outer"), inner = monitor.phase("in \"quotes\"\n"),
                  other = monitor.phase("other");
    const ScalarId loss = monitor.scalar("loss");
    for (int i = 0; i < 500; ++i) {
      const Step step(monitor, 7);
      {
        const Phase a(monitor, outer);
        const Phase b(monitor, inner);
      }
      const Phase c(monitor, other);
      monitor.scalar(loss, i * 0.1);
    }
  }  // the destructor flushes
  const std::vector<Json> records = lines();
  ASSERT_EQ(records.size(), 500u);
  double previous_end = 0;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Json& record = records[i];
    EXPECT_EQ(record["step"], i + 1);
    EXPECT_EQ(record["samples"], 7);
    EXPECT_EQ(record["scalars"]["loss"].get<double>(), static_cast<double>(i) * 0.1);
    const double duration = record["duration"], outer = record["phases"]["outer"];
    EXPECT_GT(duration, 0);
    EXPECT_LE(outer + record["phases"]["other"].get<double>(), duration + 1e-12);
    EXPECT_LE(record["phases"]["in \"quotes\"\n"].get<double>(), outer);
    EXPECT_EQ(record["parents"]["in \"quotes\"\n"], "outer");
    const double start = record["time"];
    if (i > 0) {
      EXPECT_NEAR(start, previous_end + record["gap"].get<double>(), 3e-6);
    }
    previous_end = start + duration;
  }
}

TEST_F(JsonlSinkTest, NonFiniteNumbersAreNamed) {
  PerformanceMonitor monitor({}, {std::make_shared<JsonlSink>(path_)});
  const ScalarId value = monitor.scalar("value");
  for (double v : {std::numeric_limits<double>::quiet_NaN(), HUGE_VAL, -HUGE_VAL}) monitor.scalar(value, v);
  monitor.close();
  const std::vector<Json> records = lines();
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0]["scalars"]["value"], "NaN");
  EXPECT_EQ(records[1]["scalars"]["value"], "Infinity");
  EXPECT_EQ(records[2]["scalars"]["value"], "-Infinity");
  EXPECT_FALSE(records[0].contains("duration"));
}

TEST_F(JsonlSinkTest, AppendsAfterWhatIsThereEvenAHalfLine) {
  std::ofstream(path_) << "{\"step\":1}\n{\"step\":2,\"dura";
  {
    PerformanceMonitor monitor({}, {std::make_shared<JsonlSink>(path_)});
    const Step step(monitor);
  }
  std::ifstream file(path_);
  std::vector<std::string> text;
  for (std::string line; std::getline(file, line);) text.push_back(line);
  ASSERT_EQ(text.size(), 3u);
  EXPECT_EQ(text[1], "{\"step\":2,\"dura");
  EXPECT_TRUE(Json::accept(text[2]));
}

TEST_F(JsonlSinkTest, AnUnwritablePathIsNamed) {
  const std::string missing = (folder_ / "missing" / "run.jsonl").string();
  try {
    JsonlSink sink(missing);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Io);
    EXPECT_THAT(error.what(), HasSubstr(missing));
  }
}

TEST_F(JsonlSinkTest, AFullDiskIsAnErrorOfFlush) {
  PerformanceMonitor monitor({}, {std::make_shared<JsonlSink>("/dev/full")});
  { const Step step(monitor); }
  try {
    monitor.flush();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Io);
    EXPECT_THAT(error.what(), HasSubstr("/dev/full"));
  }
}

TEST(ConsoleSink, PrintsALineAtEachDrainOrAtTheEnd) {
  for (double every : {0.0, 3600.0}) {
    std::vector<std::string> printed;
    PerformanceMonitor monitor(
        {}, {std::make_shared<ConsoleSink>(every, [&](std::string_view line) { printed.emplace_back(line); })});
    const PhaseId forward = monitor.phase("forward");
    const ScalarId loss = monitor.scalar("loss");
    for (int i = 0; i < 4; ++i) {
      const Step step(monitor, 32);
      const Phase phase(monitor, forward);
      monitor.scalar(loss, 0.5);
    }
    monitor.flush();
    EXPECT_EQ(printed.size(), every == 0 ? 1u : 0u);
    monitor.close();
    ASSERT_EQ(printed.size(), 1u);
    EXPECT_THAT(printed[0], HasSubstr("step 4 "));
    EXPECT_THAT(printed[0], HasSubstr("samples/s"));
    EXPECT_THAT(printed[0], HasSubstr("forward "));
    EXPECT_THAT(printed[0], HasSubstr("loss 0.5"));
    EXPECT_EQ(printed[0].back(), '\n');
  }
  EXPECT_THROW(ConsoleSink(-1), Error);
}

}  // namespace
}  // namespace oxytorch::monitor
