#include "oxytorch/logging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "oxytorch/error.h"

namespace oxytorch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

class Logging : public testing::Test {
 protected:
  void SetUp() override {
    level_ = log_level();
    set_log_level(LogLevel::Warn);
    reset_log_once();
    previous_ = set_log_sink(
        [this](const LogRecord& record) { lines_.emplace_back(name(record.level), std::string(record.message)); });
  }
  void TearDown() override {
    set_log_sink(previous_);
    set_log_level(level_);
  }
  std::vector<std::pair<std::string, std::string>> lines_;

 private:
  LogSink previous_;
  LogLevel level_ = LogLevel::Warn;
};

TEST_F(Logging, DropsWhatIsBelowTheLevel) {
  log(LogLevel::Info, "quiet");
  log(LogLevel::Warn, "heard");
  log(LogLevel::Error, "loud {} %s");
  EXPECT_THAT(lines_, ElementsAre(Pair("warn", "heard"), Pair("error", "loud {} %s")));
  EXPECT_FALSE(logs(LogLevel::Info));
  EXPECT_TRUE(logs(LogLevel::Warn));
}

TEST_F(Logging, LevelsCanBeLoweredAndSwitchedOff) {
  set_log_level(LogLevel::Trace);
  log(LogLevel::Trace, "a");
  set_log_level(LogLevel::Off);
  log(LogLevel::Error, "b");
  log(LogLevel::Off, "c");
  EXPECT_THAT(lines_, ElementsAre(Pair("trace", "a")));
  EXPECT_FALSE(logs(LogLevel::Off));
}

TEST_F(Logging, OnceIsOncePerKey) {
  EXPECT_TRUE(log_once(LogLevel::Warn, "k1", "first"));
  EXPECT_FALSE(log_once(LogLevel::Warn, "k1", "again"));
  EXPECT_TRUE(log_once(LogLevel::Warn, "k2", "other"));
  reset_log_once();
  EXPECT_TRUE(log_once(LogLevel::Warn, "k1", "anew"));
  EXPECT_THAT(lines_, ElementsAre(Pair("warn", "first"), Pair("warn", "other"), Pair("warn", "anew")));
}

TEST_F(Logging, OnceFromManyThreadsIsOnce) {
  set_log_sink({});
  std::atomic<int> heard{0};
  set_log_sink([&heard](const LogRecord&) { ++heard; });
  std::atomic<int> first{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&first] {
      for (int j = 0; j < 100; ++j) first += log_once(LogLevel::Warn, "shared", "x") ? 1 : 0;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(first, 1);
  EXPECT_EQ(heard, 1);
}

TEST_F(Logging, SinkMayLogAndThrow) {
  set_log_sink([](const LogRecord& record) {
    if (record.message != "inner") log(LogLevel::Warn, "inner");
    throw std::runtime_error("broken sink");
  });
  testing::internal::CaptureStderr();
  EXPECT_NO_THROW(log(LogLevel::Warn, "outer"));
  const std::string written = testing::internal::GetCapturedStderr();
  EXPECT_THAT(written, HasSubstr("broken sink"));
  EXPECT_THAT(written, HasSubstr("outer"));
}

TEST_F(Logging, SetSinkGivesBackTheOneBefore) {
  int heard = 0;
  const LogSink mine = [&heard](const LogRecord&) { ++heard; };
  set_log_sink(mine);
  LogSink back = set_log_sink({});
  ASSERT_TRUE(back);
  back({LogLevel::Warn, "", "x"});
  EXPECT_EQ(heard, 1);
  EXPECT_FALSE(set_log_sink({}));
}

TEST_F(Logging, ASinkIsToldWhichModuleSpeaks) {
  std::vector<std::string> modules;
  set_log_sink([&](const LogRecord& record) { modules.emplace_back(record.module); });
  log(LogLevel::Warn, "a");
  log(LogLevel::Warn, "b", "tune");
  log_once(LogLevel::Warn, "key", "c", "optim");
  EXPECT_THAT(modules, ElementsAre("", "tune", "optim"));
}

TEST_F(Logging, StderrIsThereBesideASink) {
  testing::internal::CaptureStderr();
  log_to_stderr(LogLevel::Debug, "undelivered");
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("oxytorch debug: undelivered\n"));
  EXPECT_TRUE(lines_.empty());
}

TEST_F(Logging, WritesToStderrWithoutASink) {
  set_log_sink({});
  testing::internal::CaptureStderr();
  log(LogLevel::Warn, "plain words");
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("plain words\n"));
}

TEST(LogLevelNames, RoundTripAndRefuse) {
  for (const char* text : {"trace", "debug", "info", "warn", "error", "off"}) {
    EXPECT_STREQ(name(parse_log_level(text)), text);
  }
  try {
    parse_log_level("wran");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "unknown log level 'wran'; did you mean 'warn'? use 'trace', 'debug', 'info', 'warn', 'error' or 'off'.");
  }
}

// Each in a process of its own: the variable is read once.
TEST(LoggingDeathTest, VariableSetsTheLevel) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("OXYTORCH_LOG", "debug", 1);
        log(LogLevel::Debug, "heard from below");
        std::_Exit(log_level() == LogLevel::Debug ? 7 : 1);
      },
      testing::ExitedWithCode(7), "heard from below");
}

TEST(LoggingDeathTest, BadVariableWarnsAndKeepsTheDefault) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("OXYTORCH_LOG", "loud", 1);
        std::_Exit(log_level() == LogLevel::Warn ? 7 : 1);
      },
      testing::ExitedWithCode(7), "OXYTORCH_LOG is ignored: unknown log level 'loud'");
}

}  // namespace
}  // namespace oxytorch
