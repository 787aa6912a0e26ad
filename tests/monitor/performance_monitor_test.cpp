#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "oxytorch/error.h"
#include "oxytorch/monitor.h"

namespace oxytorch::monitor {
namespace {

using ::testing::HasSubstr;

template <class Call>
std::string error_of(Call&& call, ErrorCode code) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

void spin(std::chrono::nanoseconds duration) {
  const auto end = std::chrono::steady_clock::now() + duration;
  while (std::chrono::steady_clock::now() < end) {
  }
}

struct Kept {
  std::uint64_t step;
  bool timed;
  std::int64_t duration, gap, samples;
  std::uint64_t dropped_before;
  std::vector<std::pair<std::string, PhaseTime>> phases;
  std::vector<std::pair<std::string, double>> scalars;
};

class Collector : public Sink {
 public:
  [[nodiscard]] std::string name() const override { return "collector"; }
  void write(const StepRecord& record) override {
    Kept kept{record.step, record.timed, record.duration_ns, record.gap_ns, record.samples, record.dropped_before, {},
              {}};
    for (const PhaseTime& phase : record.phases) kept.phases.emplace_back(phase.name, phase);
    for (const ScalarValue& scalar : record.scalars) kept.scalars.emplace_back(scalar.name, scalar.value);
    records.push_back(std::move(kept));
  }
  void flush() override { ++flushes; }
  void close() override { ++closes; }
  std::vector<Kept> records;
  int flushes = 0, closes = 0;
};

TEST(PerformanceMonitor, TimesNestedPhasesSoThatTheyAddUp) {
  auto sink = std::make_shared<Collector>();
  PerformanceMonitor monitor({}, {sink});
  const PhaseId outer = monitor.phase("outer"), inner = monitor.phase("inner"), last = monitor.phase("last");
  EXPECT_EQ(monitor.phase("outer"), outer);
  for (int i = 0; i < 3; ++i) {
    const Step step(monitor, 10);
    {
      const Phase a(monitor, outer);
      spin(std::chrono::microseconds(200));
      for (int k = 0; k < 2; ++k) {
        const Phase b(monitor, inner);
        spin(std::chrono::microseconds(100));
      }
    }
    const Phase c(monitor, last);
  }
  monitor.flush();
  ASSERT_EQ(sink->records.size(), 3u);
  for (const Kept& record : sink->records) {
    ASSERT_EQ(record.phases.size(), 3u);
    const PhaseTime &a = record.phases[0].second, &b = record.phases[1].second, &c = record.phases[2].second;
    EXPECT_EQ(record.phases[0].first, "outer");
    EXPECT_EQ(a.parent, -1);
    EXPECT_EQ(b.parent, 0);
    EXPECT_EQ(c.parent, -1);
    EXPECT_EQ(a.count, 1u);
    EXPECT_EQ(b.count, 2u);
    EXPECT_EQ(a.total_ns, a.self_ns + b.total_ns);
    EXPECT_EQ(b.total_ns, b.self_ns);
    EXPECT_GE(b.total_ns, 200'000);
    EXPECT_GE(a.self_ns, 200'000);
    EXPECT_LE(a.total_ns + c.total_ns, record.duration);
    EXPECT_GE(a.start_ns, 0);
    EXPECT_GE(b.start_ns, a.start_ns + 200'000);
    EXPECT_EQ(record.samples, 10);
  }
  const Summary summary = monitor.summary();
  EXPECT_EQ(summary.steps, 3u);
  EXPECT_EQ(summary.samples, 30);
  ASSERT_EQ(summary.phases.size(), 3u);
  EXPECT_EQ(summary.phases[1].name, "inner");
  EXPECT_EQ(summary.phases[1].depth, 1);
  EXPECT_EQ(summary.phases[1].entries, 6u);
  double self = summary.other_share;
  for (const PhaseSummary& phase : summary.phases) self += phase.self_share;
  EXPECT_NEAR(self, 1, 1e-9);
  EXPECT_NEAR(summary.phases[0].share, summary.phases[0].self_share + summary.phases[1].share, 1e-9);
  EXPECT_NEAR(summary.samples_per_second, 30 / summary.step.sum, 1e-6);
}

TEST(PerformanceMonitor, APhaseInsideItselfCountsOnce) {
  auto sink = std::make_shared<Collector>();
  PerformanceMonitor monitor({}, {sink});
  const PhaseId id = monitor.phase("again");
  {
    const Step step(monitor);
    const Phase a(monitor, id);
    spin(std::chrono::microseconds(100));
    const Phase b(monitor, id);
    spin(std::chrono::microseconds(100));
  }
  monitor.flush();
  const PhaseTime& phase = sink->records.at(0).phases.at(0).second;
  EXPECT_EQ(phase.count, 2u);
  EXPECT_EQ(phase.total_ns, phase.self_ns);
  EXPECT_LE(phase.total_ns, sink->records[0].duration);
}

TEST(PerformanceMonitor, ScalarsKeepTheLastValueOfTheStepAndMayNotBeFinite) {
  auto sink = std::make_shared<Collector>();
  PerformanceMonitor monitor({}, {sink});
  const ScalarId loss = monitor.scalar("loss");
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (double value : {2.0, nan, infinity, 4.0}) {
    const Step step(monitor);
    monitor.scalar(loss, 100);
    monitor.scalar(loss, value);
  }
  monitor.scalar(loss, 6);  // after the step, as a validation loss is
  monitor.flush();
  ASSERT_EQ(sink->records.size(), 5u);
  EXPECT_EQ(sink->records[0].scalars, (std::vector<std::pair<std::string, double>>{{"loss", 2.0}}));
  EXPECT_TRUE(std::isnan(sink->records[1].scalars[0].second));
  EXPECT_FALSE(sink->records[4].timed);
  EXPECT_EQ(sink->records[4].step, 4u);
  const Summary summary = monitor.summary();
  EXPECT_EQ(summary.steps, 4u);
  const ScalarSummary& scalar = summary.scalars.at(0);
  EXPECT_EQ(scalar.count, 5u);
  EXPECT_EQ(scalar.non_finite, 2u);
  EXPECT_EQ(scalar.last, 6);
  EXPECT_EQ(scalar.min, 2);
  EXPECT_EQ(scalar.max, 6);
  EXPECT_EQ(scalar.mean, 4);
}

TEST(PerformanceMonitor, AFullRingDropsTheOldestAndSaysHowMany) {
  auto sink = std::make_shared<Collector>();
  MonitorOptions options;
  options.ring_records = 8;
  PerformanceMonitor monitor(options, {sink});
  for (int i = 0; i < 20; ++i) const Step step(monitor);
  EXPECT_EQ(monitor.summary().dropped, 12u);
  monitor.flush();
  ASSERT_EQ(sink->records.size(), 8u);
  EXPECT_EQ(sink->records[0].step, 13u);
  EXPECT_EQ(sink->records[0].dropped_before, 12u);
  EXPECT_EQ(sink->records[1].dropped_before, 0u);
  const Summary summary = monitor.summary();
  EXPECT_EQ(summary.dropped, 12u);
  EXPECT_EQ(summary.steps, 20u);  // statistics miss nothing
  EXPECT_THAT(monitor.table(TextStyle::Ascii), HasSubstr("12 records reached no sink"));
}

TEST(PerformanceMonitor, MisuseIsNamed) {
  PerformanceMonitor monitor;
  const PhaseId a = monitor.phase("a"), b = monitor.phase("b");
  EXPECT_THAT(error_of([&] { monitor.end_step(); }, ErrorCode::InvalidState), HasSubstr("no step is open"));
  EXPECT_THAT(error_of([&] { monitor.begin_step(-1); }, ErrorCode::InvalidArgument), HasSubstr("-1"));
  monitor.begin_step();
  EXPECT_THAT(error_of([&] { monitor.begin_step(); }, ErrorCode::InvalidState), HasSubstr("step 1 is still open"));
  EXPECT_THAT(error_of([&] { monitor.set_next_step(9); }, ErrorCode::InvalidState), HasSubstr("step 1 is open"));
  monitor.begin_phase(a);
  monitor.begin_phase(b);
  EXPECT_THAT(error_of([&] { monitor.end_phase(a); }, ErrorCode::InvalidState), HasSubstr("'b'"));
  EXPECT_THAT(error_of([&] { monitor.end_step(); }, ErrorCode::InvalidState), HasSubstr("'b' is still open"));
  EXPECT_THAT(error_of([&] { monitor.begin_phase(PhaseId{7}); }, ErrorCode::OutOfRange), HasSubstr("7"));
  std::thread other([&] {
    EXPECT_THAT(error_of([&] { monitor.begin_phase(b); }, ErrorCode::InvalidState), HasSubstr("another thread"));
  });
  other.join();
  monitor.end_phase(b);
  monitor.end_phase(a);
  EXPECT_THAT(error_of([&] { monitor.end_phase(a); }, ErrorCode::InvalidState), HasSubstr("not open"));
  for (int i = 0; i < 64; ++i) monitor.begin_phase(a);
  EXPECT_THAT(error_of([&] { monitor.begin_phase(a); }, ErrorCode::InvalidState), HasSubstr("64"));
  for (int i = 0; i < 64; ++i) monitor.end_phase(a);
  monitor.end_step();
  EXPECT_EQ(monitor.summary().steps, 1u);
  error_of([&] { monitor.phase(""); }, ErrorCode::InvalidArgument);
  MonitorOptions options;
  options.max_phases = 1;
  PerformanceMonitor small(options);
  small.phase("one");
  EXPECT_THAT(error_of([&] { small.phase("two"); }, ErrorCode::OutOfRange), HasSubstr("max_phases"));
  options.ring_records = 0;
  error_of([&] { PerformanceMonitor none(options); }, ErrorCode::InvalidArgument);
  options = {};
  options.drain_seconds = -1;
  error_of([&] { PerformanceMonitor none(options); }, ErrorCode::InvalidArgument);
}

TEST(PerformanceMonitor, AStepLeftByAnExceptionIsNotTimed) {
  PerformanceMonitor monitor;
  const PhaseId id = monitor.phase("forward");
  for (int i = 0; i < 3; ++i) {
    try {
      const Step step(monitor);
      const Phase phase(monitor, id);
      if (i == 1) throw std::runtime_error("out of data");
    } catch (const std::runtime_error&) {
    }
  }
  EXPECT_FALSE(monitor.in_step());
  EXPECT_EQ(monitor.current_step(), 2u);
  const Summary summary = monitor.summary();
  EXPECT_EQ(summary.steps, 2u);
  EXPECT_EQ(summary.cancelled, 1u);
}

TEST(PerformanceMonitor, PhasesOutsideStepsAreCountedNotTimed) {
  PerformanceMonitor monitor;
  const PhaseId id = monitor.phase("forward");
  { const Phase phase(monitor, id); }
  EXPECT_EQ(monitor.summary().phases_outside, 1u);
  EXPECT_TRUE(monitor.summary().phases.empty());
  EXPECT_THAT(monitor.table(TextStyle::Ascii), HasSubstr("1 phase entered outside any step"));
}

TEST(PerformanceMonitor, ResumedRunsContinueTheirNumbers) {
  auto sink = std::make_shared<Collector>();
  PerformanceMonitor monitor({}, {sink});
  monitor.set_next_step(500);
  { const Step step(monitor); }
  { const Step step(monitor); }
  monitor.flush();
  EXPECT_EQ(sink->records.at(0).step, 500u);
  EXPECT_EQ(sink->records.at(1).step, 501u);
  EXPECT_EQ(sink->records[0].gap, 0);
  EXPECT_GT(sink->records[1].gap, 0);
}

TEST(PerformanceMonitor, LateScalarsJoinTheirStep) {
  auto sink = std::make_shared<Collector>();
  PerformanceMonitor monitor({}, {sink});
  const ScalarId loss = monitor.scalar("loss"), norm = monitor.scalar("norm");
  std::vector<LateScalar> ready;
  monitor.set_late_source([&](std::vector<LateScalar>& values) {
    values.insert(values.end(), ready.begin(), ready.end());
    ready.clear();
  });
  for (int i = 1; i <= 3; ++i) {
    const Step step(monitor);
    monitor.scalar(loss, i);
    ready.push_back({monitor.current_step(), norm, 10.0 * i});
    if (i == 3) {  // a drain in the middle of step 3 must keep step 3's value for its record
      monitor.flush();
      EXPECT_EQ(sink->records.size(), 2u);
    }
  }
  ready.push_back({1, norm, 11.0});  // too late for its record: comes on its own
  monitor.flush();
  ASSERT_EQ(sink->records.size(), 4u);
  const std::vector<std::pair<std::string, double>> second{{"loss", 2.0}, {"norm", 20.0}};
  EXPECT_EQ(sink->records[1].scalars, second);
  EXPECT_EQ(sink->records[2].step, 1u);
  EXPECT_FALSE(sink->records[2].timed);
  EXPECT_EQ(sink->records[3].scalars.back().second, 30.0);
  const Summary summary = monitor.summary();
  EXPECT_EQ(summary.scalars.at(1).count, 4u);
  EXPECT_EQ(summary.scalars.at(1).max, 30);
}

TEST(PerformanceMonitor, FlushesBesideAStepLoseAndRepeatNothing) {
  auto sink = std::make_shared<Collector>();
  MonitorOptions options;
  options.ring_records = 1 << 15;
  PerformanceMonitor monitor(options, {sink});
  const PhaseId id = monitor.phase("work");
  const ScalarId value = monitor.scalar("value");
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done) {
      monitor.flush();
      const Summary summary = monitor.summary();
      EXPECT_LE(summary.phases.empty() ? 0 : summary.phases[0].entries, summary.step.count + 30'000);
      monitor.phase("work");
    }
  });
  constexpr std::uint64_t kSteps = 20'000;
  for (std::uint64_t i = 0; i < kSteps; ++i) {
    const Step step(monitor, 1);
    const Phase phase(monitor, id);
    monitor.scalar(value, static_cast<double>(i));
  }
  done = true;
  reader.join();
  monitor.close();
  ASSERT_EQ(sink->records.size(), kSteps);
  for (std::uint64_t i = 0; i < kSteps; ++i) {
    ASSERT_EQ(sink->records[i].step, i + 1);
    ASSERT_EQ(sink->records[i].scalars.at(0).second, static_cast<double>(i));
    ASSERT_EQ(sink->records[i].phases.at(0).first, "work");
  }
  EXPECT_EQ(sink->closes, 1);
  EXPECT_EQ(monitor.summary().dropped, 0u);
}

TEST(PerformanceMonitor, ABackgroundThreadDrainsOnItsOwn) {
  std::atomic<std::uint64_t> last{0};
  class Watcher : public Sink {
   public:
    explicit Watcher(std::atomic<std::uint64_t>& last) : last_(last) {}
    [[nodiscard]] std::string name() const override { return "watcher"; }
    void write(const StepRecord& record) override { last_ = record.step; }

   private:
    std::atomic<std::uint64_t>& last_;
  };
  MonitorOptions options;
  options.drain_seconds = 0.001;
  PerformanceMonitor monitor(options, {std::make_shared<Watcher>(last)});
  for (int i = 0; i < 5; ++i) const Step step(monitor);
  while (last != 5) std::this_thread::yield();  // the test's time limit is the failure
  monitor.close();
}

TEST(PerformanceMonitor, AFailingSinkIsReportedOnceAndLeavesTheOthersAlone) {
  class Failing : public Sink {
   public:
    [[nodiscard]] std::string name() const override { return "failing"; }
    void write(const StepRecord& record) override {
      ++calls;
      throw std::runtime_error("disk full");
    }
    int calls = 0;
  };
  auto bad = std::make_shared<Failing>();
  auto good = std::make_shared<Collector>();
  PerformanceMonitor monitor({}, {bad, good});
  for (int i = 0; i < 3; ++i) const Step step(monitor);
  EXPECT_THROW(monitor.flush(), std::runtime_error);
  EXPECT_NO_THROW(monitor.flush());
  EXPECT_EQ(bad->calls, 1);
  EXPECT_EQ(good->records.size(), 3u);
  EXPECT_THAT(monitor.summary().failed_sinks, ::testing::ElementsAre("failing: disk full"));
  EXPECT_THAT(monitor.table(TextStyle::Ascii), HasSubstr("disk full"));
  monitor.close();
  monitor.close();
  EXPECT_EQ(good->closes, 1);
  error_of([&] { monitor.add_sink(good); }, ErrorCode::InvalidState);
}

TEST(PerformanceMonitor, ReportAndTableOfNothingSayso) {
  PerformanceMonitor monitor;
  EXPECT_THAT(monitor.table(TextStyle::Ascii), HasSubstr("No finished steps"));
  EXPECT_THAT(monitor.report().to_html(), HasSubstr("No finished steps"));
}

TEST(PerformanceMonitor, ReportHoldsPhasesAndScalars) {
  PerformanceMonitor monitor;
  const PhaseId forward = monitor.phase("forward");
  const ScalarId loss = monitor.scalar("loss");
  for (int i = 0; i < 2000; ++i) {
    const Step step(monitor, 4);
    const Phase phase(monitor, forward);
    monitor.scalar(loss, 1.0 / (1 + i));
  }
  const Report report = monitor.report("My run");
  EXPECT_EQ(report.title(), "My run");
  int lines = 0, bars = 0;
  for (const Block& block : report.blocks()) {
    lines += std::holds_alternative<LineChart>(block);
    bars += std::holds_alternative<BarChart>(block);
    if (const auto* chart = std::get_if<LineChart>(&block)) {
      EXPECT_LE(chart->series.at(0).x.size(), 512u);
    }
  }
  EXPECT_EQ(lines, 2);
  EXPECT_EQ(bars, 1);
  EXPECT_THAT(monitor.table(TextStyle::Ascii), HasSubstr("forward"));
}

}  // namespace
}  // namespace oxytorch::monitor
