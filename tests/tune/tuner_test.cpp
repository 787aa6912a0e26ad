// The tuner on a workload that is a table of seconds: what it decides, in which order, and that it leaves no trace.
#include "oxytorch/tune/tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "oxytorch/error.h"
#include "oxytorch/load.h"
#include "oxytorch/logging.h"
#include "oxytorch/tune/policy.h"
#include "oxytorch/tune/timing.h"
#include "oxytorch/tune/watch.h"

namespace oxytorch::tune {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

/// What a strategy is in this world.
struct Planted {
  Offer offer;
  double factor = 1;          ///< of the step's seconds while it is active
  bool honest = true;         ///< what the verifier says of it
  double cost = 0;            ///< one-off seconds, said and taken
  std::string throws = {};    ///< the member that throws: "applies", "expected_cost", "apply", "step"
  std::int64_t bytes = -100;  ///< of a step's memory while it is active
  std::int64_t resident = 0;  ///< more of the process in memory
  bool shows_late = false;    ///< a glance does not see that it is not honest
};

/// Interrupts are no failure of a strategy.
struct Interrupt : std::exception {
  [[nodiscard]] const char* what() const noexcept override { return "interrupted"; }
};

class Table : public Workload {
 public:
  std::map<std::string, Planted> planted;
  std::int64_t given_bytes = 1000;  ///< of the step as given
  std::vector<std::string> order, now, said;
  double step_seconds = 0.02;
  double alone = 0;              ///< of steps in a row: the host before the first and after the last, on a device
  std::string everything;        ///< hindrance()
  int calls = 0, throw_at = -1;  ///< steps taken; the one that throws
  bool interrupt = false;        ///< what it throws then
  int restored = 0;
  int measured = 0;    ///< combinations whose bytes were asked for
  bool moved = false;  ///< the state is not as it was
  double time = 0;
  double faults = 0;  ///< of pages, a second

  void plant(Planted one) {
    order.push_back(one.offer.name);
    planted[one.offer.name] = std::move(one);
  }
  void plant(const std::string& name, double factor, Kind kind = Kind::Exact) {
    plant({.offer = {.name = name, .kind = kind}, .factor = factor});
  }

  std::vector<Offer> offers() override {
    std::vector<Offer> found;
    for (const auto& name : order) found.push_back(planted[name].offer);
    return found;
  }
  std::string hindrance() override { return everything; }
  Applicability applies(const std::string& name) override { return throw_from(name, "applies"), true; }
  double expected_cost(const std::string& name) override {
    throw_from(name, "expected_cost");
    return planted[name].cost;
  }
  std::vector<std::string> active() override { return now; }
  void activate(const std::vector<std::string>& names) override {
    std::erase_if(now, [&](const auto& name) { return std::find(names.begin(), names.end(), name) == names.end(); });
    for (const auto& name : names) {
      if (std::find(now.begin(), now.end(), name) != now.end()) continue;
      throw_from(name, "apply");
      if (planted[name].cost > 0 && paid_[name]++ == 0) time += planted[name].cost;
      now.push_back(name);
    }
  }
  void restore() override {
    moved = false;
    ++restored;
  }
  std::map<std::string, std::string> covered() override { return {{"restored", "all of it"}}; }
  std::vector<std::size_t> shapes() override { return {0}; }
  StepTimes steps(std::size_t first, int count, bool updates, bool /*drawn*/) override {
    StepTimes found;
    for (int i = 0; i < count; ++i) {
      if (++calls == throw_at) {
        if (interrupt) throw Interrupt();
        throw std::runtime_error("the data ran out\nat a line that nobody wants to read");
      }
      for (const auto& name : now) throw_from(name, "step");
      moved = true;
      // A little jitter, so that no two times are equal.
      const double jitter = 1 + 0.002 * (static_cast<double>((calls + first) * 2654435761 % 1000) / 1000 - 0.5);
      double seconds_taken = step_seconds * jitter;
      for (const auto& name : now) seconds_taken *= planted[name].factor;
      found.seconds += seconds_taken;
      if (updates) found.updates.push_back(0.1 * seconds_taken);
    }
    found.seconds += alone;
    time += found.seconds;
    return found;
  }
  double update() override {
    time += 0.1 * step_seconds;
    return 0.1 * step_seconds;
  }
  std::optional<std::int64_t> tuning_bytes() override { return 1500; }
  std::optional<std::int64_t> step_bytes() override {
    ++measured;
    time += 2 * step_seconds;
    for (const auto& name : now) throw_from(name, "step_bytes");
    std::int64_t bytes = given_bytes;
    for (const auto& name : now) bytes += planted[name].bytes;
    return bytes;
  }
  std::optional<std::int64_t> step_resident() override {
    time += 3 * step_seconds;
    for (const auto& name : now) throw_from(name, "step_resident");
    std::int64_t bytes = 5000;
    for (const auto& name : now) bytes += planted[name].resident;
    return bytes;
  }
  bool on_host() override { return alone == 0; }
  Ruling verify(Kind kind, bool glance) override {
    verified.emplace_back(now, glance);
    time += step_seconds;
    for (const auto& name : now) {
      if (!planted[name].honest && !(glance && planted[name].shows_late))
        return {false, name + " is off by half as a " + std::string(tune::name(kind)), {}};
    }
    return {true, "held", {{"steps", glance ? 1 : 12}}};
  }
  std::optional<std::string> told(const std::exception& error) override {
    if (dynamic_cast<const Interrupt*>(&error) != nullptr) return std::nullopt;
    return Workload::told(error);
  }
  void say(const std::string& what) override { said.push_back(what); }
  double seconds() override { return time += 1e-7; }
  double processor_seconds() override { return time; }
  double page_faults() override { return faults * time; }

  std::vector<std::pair<std::vector<std::string>, bool>> verified;

 private:
  void throw_from(const std::string& name, const std::string& member) {
    if (planted[name].throws == member) throw std::runtime_error(name + " throws from " + member);
  }
  std::map<std::string, int> paid_;
};

class TunerTest : public testing::Test {
 protected:
  TunerTest() : folder_(std::filesystem::path(testing::TempDir()) / ("oxytorch_tuner_" + std::to_string(getpid()))) {
    std::filesystem::remove_all(folder_);
    set_load_source([this] { return LoadSample{.wall = watched_ += 1}; });
  }
  ~TunerTest() override {
    set_load_source({});
    std::filesystem::remove_all(folder_);
  }

  static const CertificateEntry& entry(const Certificate& made, const std::string& name) {
    const auto found =
        std::find_if(made.entries.begin(), made.entries.end(), [&](const auto& one) { return one.strategy == name; });
    if (found == made.entries.end()) throw std::runtime_error("no entry " + name);
    return *found;
  }

  Certificate tuned(TunerOptions options = {}, const CertificateStore* store = nullptr) {
    return tuned(table, std::move(options), store);
  }
  static Certificate tuned(Table& table, TunerOptions options = {}, const CertificateStore* store = nullptr) {
    Tuner tuner(table, {"here", "2", "model", "options"}, std::move(options));
    auto made = tuner.tune(store);
    EXPECT_THAT(table.now, IsEmpty());
    EXPECT_FALSE(table.moved);
    return made;
  }

  Table table;
  std::filesystem::path folder_;

 private:
  double watched_ = 0;
};

TEST_F(TunerTest, KeepsWhatPaysAndSaysWhyTheRestIsNotThere) {
  table.plant("half", 0.5);
  table.plant("worse", 1.5);
  table.plant("nothing", 1);
  table.plant({.offer = {.name = "not_here", .refused = "the loop is yours"}, .factor = 0.1});
  table.plant("rounds", 0.1, Kind::Tolerance);
  const auto made = tuned({.level = "basic"});
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_NEAR(made.speedup->mid, 2, 0.02);
  EXPECT_NEAR(made.baseline_seconds, 0.02, 1e-4);
  EXPECT_NEAR(made.tuned_seconds, 0.01, 1e-4);
  EXPECT_EQ(entry(made, "worse").status, Status::Rejected);
  EXPECT_EQ(entry(made, "nothing").status, Status::Rejected);
  EXPECT_EQ(entry(made, "not_here").reason, "the loop is yours");
  EXPECT_THAT(entry(made, "rounds").reason, HasSubstr("level basic does not allow the kind tolerance"));
  EXPECT_THAT(made.verification, Contains(Pair("all together, as exact", "held")));
  EXPECT_THAT(made.verification, Contains(Pair("restored", "all of it")));
  EXPECT_GT(made.tuning_seconds, 0);
  EXPECT_EQ(made.given_peak_bytes, 1000);
  EXPECT_EQ(made.tuned_peak_bytes, 900);
  EXPECT_EQ(made.tuning_peak_bytes, 1500);
  EXPECT_THAT(table.said, Contains("half against nothing"));
}

TEST_F(TunerTest, SaysWhatToSetWhereOtherProgramsKeepTheMachineBusy) {
  std::vector<std::string> said;
  const LogSink before = set_log_sink([&](const LogRecord& record) { said.emplace_back(record.message); });
  double wall = 0;
  set_load_source([&] {
    ++wall;
    return LoadSample{.wall = wall, .busy = 2 * wall, .waited = 0.5 * wall, .cores = 2};
  });
  std::map<std::string, std::optional<std::string>> given;
  for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}) {
    const char* const value = std::getenv(name);
    given[name] = value == nullptr ? std::nullopt : std::optional<std::string>(value);
    ::unsetenv(name);
  }
  tuned();
  ::setenv("OMP_WAIT_POLICY", "passive", 1);
  tuned();
  for (const auto& [name, value] : given) {
    value ? ::setenv(name.c_str(), value->c_str(), 1) : ::unsetenv(name.c_str());
  }
  set_log_sink(before);
  const std::string busy =
      "accelerate: the machine is busy: other programs used 2.0 of its 2 cores, and threads of this one waited 50 % of "
      "the time for one. ";
  ASSERT_EQ(std::count_if(said.begin(), said.end(), [&](const auto& text) { return text.starts_with(busy); }), 2);
  EXPECT_THAT(said, Contains(busy + advice_on_shared_cores(true)));
  EXPECT_THAT(advice_on_shared_cores(true), HasSubstr("OMP_WAIT_POLICY=passive"));
  EXPECT_THAT(said, Contains(busy + advice_on_shared_cores(false)));
}

TEST_F(TunerTest, StepsOfADeviceAreTimedInARow) {
  table.alone = 0.005;  // by one step at a time it would be 25 over 15, and 25 over 7
  table.plant("half", 0.5);
  EXPECT_NEAR(tuned().speedup->mid, 2, 0.1);
  Table other;
  other.alone = 0.005;
  other.plant({.offer = {.name = "tenth", .traits = {.max_speedup = 50}}, .factor = 0.1});
  EXPECT_GT(tuned(other).speedup->mid, 8);
}

TEST_F(TunerTest, APeakThatCannotBeMeasuredIsLeftOut) {
  table.plant({.offer = {.name = "half"}, .factor = 0.5, .throws = "step_bytes"});
  const auto made = tuned();
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_EQ(made.given_peak_bytes, 1000);
  EXPECT_FALSE(made.tuned_peak_bytes);
}

TEST_F(TunerTest, TheGoalMemoryAddsWhatMakesAStepSmallerAsFarAsItMayBeSlower) {
  table.plant({.offer = {.name = "half"}, .factor = 0.5, .bytes = 0});
  table.plant({.offer = {.name = "small"}, .factor = 1.5, .bytes = -200});
  table.plant({.offer = {.name = "smaller"}, .factor = 1.6, .bytes = -300});
  table.plant({.offer = {.name = "smallest"}, .factor = 9, .bytes = -500});
  table.plant({.offer = {.name = "liar"}, .factor = 1, .honest = false, .bytes = -400});
  table.plant({.offer = {.name = "grows"}, .factor = 0.4, .bytes = 300});
  table.plant({.offer = {.name = "process", .traits = {.group = "threads"}}, .factor = 1.01, .bytes = -600});
  const auto fast = tuned();
  EXPECT_THAT(fast.accepted(), ElementsAre("half", "grows"));
  EXPECT_EQ(fast.tuned_peak_bytes, 1300);
  const auto made = tuned({.goal = Goal::Memory, .max_slowdown = 1.3});
  EXPECT_THAT(made.accepted(), ElementsAre("half", "small", "smaller"));
  EXPECT_EQ(made.given_peak_bytes, 1000);
  EXPECT_EQ(made.tuned_peak_bytes, 500);
  EXPECT_NEAR(1 / made.speedup->mid, 0.5 * 1.5 * 1.6, 0.02);
  EXPECT_THAT(entry(made, "smaller").reason, HasSubstr("a step takes 700 B of memory instead of 1000 B; 0.8"));
  EXPECT_EQ(entry(made, "smallest").status, Status::Rejected);
  EXPECT_THAT(entry(made, "smallest").reason, HasSubstr("its time"));
  EXPECT_EQ(entry(made, "liar").status, Status::Refused);
  EXPECT_EQ(entry(made, "grows").status, Status::Refused);
  EXPECT_THAT(entry(made, "grows").reason, HasSubstr("a step takes 1.27 KiB of memory, and 1000 B as given"));
  EXPECT_NE(entry(made, "process").status, Status::Accepted) << "a setting of the process is not asked";
  EXPECT_EQ(tuned({.goal = Goal::Memory, .max_slowdown = 1}).tuned_peak_bytes, 700) << "0.5 * 1.6 is faster than given";
  EXPECT_THROW(tuned({.max_slowdown = 0.9}), Error);
}

TEST_F(TunerTest, WhatIsFasterMayTakeAsMuchMoreMemoryAsIsAllowed) {
  constexpr std::int64_t kMiB = 1 << 20;
  table.given_bytes = 100 * kMiB;
  table.plant({.offer = {.name = "within"}, .factor = 0.8, .bytes = 5 * kMiB});
  table.plant({.offer = {.name = "grows"}, .factor = 0.4, .bytes = 30 * kMiB});
  const auto made = tuned();
  EXPECT_THAT(made.accepted(), ElementsAre("within"));
  EXPECT_EQ(entry(made, "grows").status, Status::Refused);
  EXPECT_THAT(entry(made, "grows").reason,
              HasSubstr("a step takes 135 MiB of memory, and 100 MiB as given; max_growth allows 1.050x"));
  EXPECT_THAT(tuned({.max_growth = 1.5}).accepted(), ElementsAre("within", "grows"));
  EXPECT_THAT(tuned({.max_growth = std::numeric_limits<double>::infinity()}).accepted(),
              ElementsAre("within", "grows"));
  EXPECT_THROW(tuned({.max_growth = 0.9}), Error);
}

TEST_F(TunerTest, WhatSavesMemoryTakesThePlaceOfWhatSavesLess) {
  table.plant({.offer = {.name = "fast", .traits = {.group = "one"}}, .factor = 0.8, .bytes = 0});
  table.plant({.offer = {.name = "small", .traits = {.group = "one"}}, .factor = 1.1, .bytes = -200});
  table.plant({.offer = {.name = "needy", .traits = {.requires_ = {"fast"}}}, .factor = 1.2, .bytes = -50});
  const auto made = tuned({.goal = Goal::Memory});
  EXPECT_THAT(made.accepted(), ElementsAre("small"));
  EXPECT_EQ(entry(made, "fast").status, Status::Rejected);
  EXPECT_THAT(entry(made, "fast").reason, HasSubstr("small saves more memory in its place"));
  EXPECT_NE(entry(made, "needy").status, Status::Accepted);
}

TEST_F(TunerTest, WhatMakesAStepSmallerHasItsTurnInAShortRun) {
  table.step_seconds = 0.5;
  table.plant("half", 0.5);
  for (int i = 0; i < 10; ++i)
    table.plant({.offer = {.name = "slightly_" + std::to_string(i)}, .factor = 0.98, .bytes = 0});
  for (const char* name : {"small_0", "small_1", "small_2"}) {
    table.plant({.offer = {.name = name}, .factor = 1.02, .bytes = -200});
  }
  const auto made = tuned({.steps_planned = 1000, .goal = Goal::Memory});
  EXPECT_THAT(made.accepted(), testing::IsSupersetOf({"small_0", "small_1", "small_2"}));
  EXPECT_LT(made.tuning_seconds, kPolicy.total_share * 1000 * 0.5);
}

TEST_F(TunerTest, WhatSavedLittleIsMeasuredAgainOnlyAtTheEnd) {
  table.given_bytes = 10'000;
  for (int i = 0; i < 10; ++i) table.plant({.offer = {.name = "idle_" + std::to_string(i)}, .factor = 1, .bytes = 0});
  for (int i = 0; i < 4; ++i) {
    table.plant({.offer = {.name = "small_" + std::to_string(i)}, .factor = 1.01, .bytes = -1000 * (i + 1)});
  }
  EXPECT_THAT(tuned({.goal = Goal::Memory}).accepted(), ElementsAre("small_0", "small_1", "small_2", "small_3"));
  // As given and each by itself; then one for each that is added, and the idle ones once more.
  EXPECT_EQ(table.measured, 1 + 14 + 3 + 10);
}

TEST_F(TunerTest, TheAllocatorThatLeavesLeastInMemoryIsTheLastChoice) {
  table.faults = 1e7;  // or no allocator could make a step faster
  table.plant(
      {.offer = {.name = "keeps", .traits = {.group = "host_memory"}}, .factor = 0.8, .bytes = 0, .resident = 900});
  table.plant({.offer = {.name = "small"}, .factor = 1.1, .bytes = -300, .resident = 200});
  table.plant({.offer = {.name = "host_pool"}, .factor = 1.05, .bytes = 0, .resident = -600});
  EXPECT_THAT(tuned().accepted(), ElementsAre("keeps"));
  const auto made = tuned({.goal = Goal::Memory, .max_slowdown = 1.3});
  EXPECT_THAT(made.accepted(), ElementsAre("small", "host_pool"));
  EXPECT_NEAR(1 / made.speedup->mid, 1.1 * 1.05, 0.02);
  EXPECT_THAT(entry(made, "host_pool").reason,
              testing::StartsWith("the process has 4.49 KiB in memory instead of 5.96 KiB; 1.15"));
  EXPECT_EQ(entry(made, "keeps").status, Status::Rejected);
  EXPECT_THAT(entry(made, "keeps").reason, HasSubstr("without it the process has 4.49 KiB in memory"));

  table.planted["host_pool"].factor = 1.4;  // too slow: the next best
  const auto without = tuned({.goal = Goal::Memory, .max_slowdown = 1.3});
  EXPECT_THAT(without.accepted(), ElementsAre("small"));
  EXPECT_THAT(entry(without, "host_pool").reason, HasSubstr("and its time"));
  table.planted["host_pool"].throws = "step_resident";
  table.planted["keeps"].resident = 50;  // without it 50 bytes less, and not 10% of a step as given
  EXPECT_THAT(tuned({.goal = Goal::Memory, .max_slowdown = 1.3}).accepted(), ElementsAre("keeps", "small"));
}

TEST_F(TunerTest, WhatIsRefusedBesideOthersTakesNoMemoryGainWithIt) {
  table.plant({.offer = {.name = "late_liar"}, .factor = 0.8, .honest = false, .bytes = 0, .shows_late = true});
  table.plant({.offer = {.name = "small"}, .factor = 1.1, .bytes = -300});
  const auto made = tuned({.goal = Goal::Memory});
  EXPECT_THAT(made.accepted(), ElementsAre("small"));
  EXPECT_EQ(made.tuned_peak_bytes, 700);
  EXPECT_EQ(entry(made, "late_liar").status, Status::Refused);
  EXPECT_THAT(entry(made, "late_liar").reason, HasSubstr("is off by half"));
}

TEST_F(TunerTest, ARememberedPlanForMemoryHoldsThoughItIsSlower) {
  table.plant({.offer = {.name = "small"}, .factor = 1.1, .bytes = -200});
  const CertificateStore store(folder_.string());
  const auto first = tuned({.goal = Goal::Memory}, &store);
  EXPECT_THAT(first.accepted(), ElementsAre("small"));
  ASSERT_EQ(store.try_put(first), "");
  const auto again = tuned({.goal = Goal::Memory}, &store);
  ASSERT_FALSE(again.events.empty());
  EXPECT_THAT(again.events.back(), HasSubstr("reused"));
  table.planted["small"].factor = 1.4;
  EXPECT_THAT(tuned({.goal = Goal::Memory}, &store).accepted(), IsEmpty());
}

TEST_F(TunerTest, RefusesWhatIsFastAndWrong) {
  table.plant({.offer = {.name = "liar"}, .factor = 0.1, .honest = false});
  table.plant("half", 0.5);
  const auto made = tuned();
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_EQ(entry(made, "liar").status, Status::Refused);
  EXPECT_THAT(entry(made, "liar").reason, HasSubstr("off by half"));
  // A glance where it won, and all steps of what is kept.
  EXPECT_THAT(table.verified, Contains(Pair(ElementsAre("half"), true)));
  EXPECT_THAT(table.verified, Contains(Pair(ElementsAre("half"), false)));
}

TEST_F(TunerTest, AStrategysOwnFailureIsItsOwn) {
  for (const char* member : {"applies", "expected_cost", "apply", "step"}) {
    Table table;
    table.plant({.offer = {.name = "broken"}, .factor = 0.1, .throws = member});
    table.plant("half", 0.5);
    const auto made = tuned(table);
    EXPECT_THAT(made.accepted(), ElementsAre("half")) << member;
    EXPECT_EQ(entry(made, "broken").status, Status::Failed) << member;
    EXPECT_THAT(entry(made, "broken").reason, HasSubstr("broken throws from " + std::string(member)));
  }
}

TEST_F(TunerTest, WhatTheStepThrowsPassesThroughFromWhereverItIsWithEverythingBack) {
  const auto fill = [](Table& table) {
    table.plant("half", 0.5);
    table.plant({.offer = {.name = "compiled"}, .factor = 0.8, .cost = 0.5});
  };
  fill(table);
  static_cast<void>(tuned());
  const int all = table.calls;
  ASSERT_GT(all, 50);
  for (const bool interrupt : {false, true}) {
    for (int point = 1; point <= all; ++point) {
      Table table;
      fill(table);
      table.throw_at = point;
      table.interrupt = interrupt;
      Tuner tuner(table, {}, {});
      // One throw of the step under a strategy is that strategy's failure; an interrupt is nobody's.
      try {
        static_cast<void>(tuner.tune(nullptr));
        EXPECT_FALSE(interrupt) << point;
      } catch (const Interrupt&) {
        EXPECT_TRUE(interrupt) << point;
      } catch (const std::runtime_error& error) {
        EXPECT_THAT(error.what(), HasSubstr("the data ran out"));
      }
      EXPECT_THAT(table.now, IsEmpty()) << point;
      EXPECT_FALSE(table.moved) << point;
    }
  }
}

TEST_F(TunerTest, TriesNothingWhereNothingCanBeVerified) {
  table.plant("half", 0.5);
  table.everything = "the loss is nan";
  const auto made = tuned();
  EXPECT_THAT(made.accepted(), IsEmpty());
  EXPECT_EQ(entry(made, "half").reason, "the loss is nan");
}

TEST_F(TunerTest, ReusesWhatHoldsAndMeasuresAnewWhatDoesNot) {
  const CertificateStore store(folder_.string());
  table.plant("half", 0.5);
  table.plant("less", 0.8);
  auto made = tuned({}, &store);
  EXPECT_THAT(made.accepted(), ElementsAre("half", "less"));
  store.put(made);
  const int searched = table.calls;
  for (int run = 0; run < 15; ++run) {
    table.calls = 0;
    made = tuned({}, &store);
    EXPECT_LT(table.calls, searched);
    EXPECT_THAT(made.events.back(), HasSubstr("reused, canary"));
    EXPECT_LE(made.events.size(), 10U);
    store.put(made);
  }
  table.planted["less"].factor = 1.2;
  made = tuned({}, &store);
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_THAT(made.events.back(), HasSubstr("did not hold and was measured anew: the rest is faster without less"));
}

TEST_F(TunerTest, ARememberedStrategyThatThrowsIsLeftOut) {
  for (const char* member : {"applies", "expected_cost", "apply", "step"}) {
    Table table;
    const CertificateStore store((folder_ / member).string());
    table.plant("half", 0.5);
    table.plant("less", 0.8);
    store.put(tuned(table, {}, &store));
    table.planted["less"].throws = member;
    const auto made = tuned(table, {}, &store);
    EXPECT_THAT(made.accepted(), ElementsAre("half")) << member;
    EXPECT_EQ(entry(made, "less").status, Status::Failed) << member;
  }
}

TEST_F(TunerTest, EndsWithTheSecondsForEverything) {
  for (int i = 0; i < 30; ++i) table.plant("equal " + std::to_string(i), 1);
  table.step_seconds = 0.002;
  tuned({.total = 1});
  EXPECT_LT(table.time, 1.1);
  const auto most = table.time;
  table.time = 0;
  tuned({.total = 1, .total_share = 0.1});  // of 10,000 steps of 2 ms
  EXPECT_GT(table.time, most);
  EXPECT_LT(table.time, 2.1);
}

TEST_F(TunerTest, ATrialOfManyStepsABlockEndsWithTheSecondsForEverything) {
  // Of short steps a block holds forty: nine pairs take 70 ms.
  table.plant("hardly", 1 / 1.0102);
  table.step_seconds = 1e-4;
  EXPECT_THAT(tuned({.tune_seconds = 100}).accepted(), ElementsAre("hardly"));
  const auto made = tuned({.tune_seconds = 100, .total = 0.07});
  EXPECT_THAT(entry(made, "hardly").reason, HasSubstr("stopped, as tuning has taken what it may of this run"));
}

TEST_F(TunerTest, TriesNothingWhereAFewStepsTakeTheSecondsForEverything) {
  table.plant("half", 0.5);
  table.step_seconds = 0.1;
  const auto made = tuned({.total = 1});
  EXPECT_LT(table.time, 0.5);
  EXPECT_THAT(made.accepted(), IsEmpty());
  EXPECT_THAT(entry(made, "half").reason, HasSubstr("a step takes 100 ms, and everything together may take 1 s"));
  EXPECT_THAT(tuned({.total = 1, .total_share = 0.1}).accepted(), ElementsAre("half"));  // of 10,000 steps
}

TEST_F(TunerTest, MakesActiveWhatSettingsAskFor) {
  table.plant("nothing", 1);
  table.plant({.offer = {.name = "wrong"}, .honest = false});
  table.plant({.offer = {.name = "absent", .refused = "not on this device"}});
  Tuner tuner(table, {}, {.required = {{"a", "1", {"nothing"}}, {"b", "2", {"wrong"}}, {"c", "3", {"absent"}}}});
  auto made = tuner.tune(nullptr);
  EXPECT_THAT(made.accepted(), IsEmpty());
  tuner.activate(made);
  EXPECT_THAT(tuner.activate_required(made), ElementsAre("nothing"));
  EXPECT_THAT(table.now, ElementsAre("nothing"));
  EXPECT_THAT(entry(made, "nothing").reason, HasSubstr("asked for by a = '1', whatever it gains"));
  EXPECT_THAT(entry(made, "wrong").reason, HasSubstr("b = '2' asks for it, and it cannot be: wrong is off"));
  EXPECT_THAT(entry(made, "absent").reason, HasSubstr("c = '3' asks for it, and it cannot be: not on this device"));
}

TEST_F(TunerTest, NotesWhatCannotBeMadeActiveAtTheEnd) {
  table.plant("half", 0.5);
  table.plant("less", 0.8);
  Tuner tuner(table, {}, {});
  auto made = tuner.tune(nullptr);
  table.planted["half"].throws = "apply";
  tuner.activate(made);
  EXPECT_THAT(table.now, ElementsAre("less"));
  EXPECT_EQ(entry(made, "half").status, Status::Failed);
  EXPECT_THAT(entry(made, "half").reason, HasSubstr("could not be made active: half throws"));
}

TEST_F(TunerTest, AShortRunPaysForNoProofThatItCannotRepay) {
  const auto after = [](Kind kind, TunerOptions options) {
    Table table;
    table.step_seconds = 0.3;
    table.plant("two_thirds", 2.0 / 3, kind);
    auto made = tuned(table, std::move(options));
    const bool proven =
        std::any_of(table.verified.begin(), table.verified.end(), [](const auto& v) { return !v.second; });
    EXPECT_EQ(proven, !made.accepted().empty());
    return made;
  };
  const auto brief = after(Kind::Precision, {.steps_planned = 200});
  EXPECT_THAT(brief.accepted(), IsEmpty());
  EXPECT_EQ(entry(brief, "two_thirds").status, Status::Rejected);
  EXPECT_THAT(entry(brief, "two_thirds").reason,
              HasSubstr("Verifying takes about 27 s, and in the 200 steps that are planned 20 s are saved."));
  EXPECT_THAT(after(Kind::Precision, {.steps_planned = 400}).accepted(), ElementsAre("two_thirds"));
  EXPECT_THAT(after(Kind::Exact, {.steps_planned = 200}).accepted(), ElementsAre("two_thirds"));
  EXPECT_THAT(after(Kind::Precision, {.steps_planned = 200, .tune_seconds = 60}).accepted(), ElementsAre("two_thirds"));
}

TEST_F(TunerTest, SaysWhatCannotBeMeant) {
  table.plant("half", 0.5);
  const auto make = [&](TunerOptions options) { Tuner(table, {}, std::move(options)); };
  EXPECT_THROW(make({.exclude = {"hlaf"}}), Error);
  EXPECT_THROW(make({.steps_planned = 0}), Error);
  EXPECT_THROW(make({.tune_seconds = -1}), Error);
  EXPECT_THROW(make({.total = -1}), Error);
  EXPECT_THROW(make({.total = 1, .total_share = 2}), Error);
  try {
    make({.level = "utlra"});
    ADD_FAILURE() << "there is no such level";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("'basic', 'advanced' or 'ultra'"));
  }
}

// -- the watch --------------------------------------------------------------------------------------------------------

struct Seen : Watched {
  std::vector<std::string> now{"half"};
  BothWays shown{1, 1};
  int comparisons = 0;
  std::string throws = {};
  bool budget = false;
  bool has_budget() override { return budget; }
  void activate(const std::vector<std::string>& names) override {
    now = names;
    if (throws == "activate") throw std::runtime_error("a hook is in the way");
  }
  Apart rounding;
  BothWays compare(const std::vector<std::string>& first) override {
    if (!first.empty()) return {1, 1, rounding};
    ++comparisons;
    if (throws == "compare") throw std::runtime_error("the batch is gone");
    return shown;
  }
};

class WatchTest : public TunerTest {
 protected:
  WatchTest() : store(folder_.string()) {
    made.key = {"here", "2", "model", "options"};
    made.entries.push_back({.strategy = "half", .status = Status::Accepted, .reason = ""});
    made.entries.push_back({.strategy = "other", .status = Status::Rejected, .reason = "slow"});
    store.put(made);
  }
  Watch watch() { return {seen, made, &store, {.names = {"half"}, .drawn_by = 7}}; }

  Seen seen;
  Certificate made;
  CertificateStore store;
};

TEST_F(WatchTest, GoesOnWhileItHolds) {
  auto on = watch();
  int without = 0;
  for (int i = 0; i < 1'000; ++i) {
    ASSERT_TRUE(on.before());
    without += seen.now.empty() ? 1 : 0;
    on.after(seen.now.empty() ? 0.02 : 0.01);
  }
  EXPECT_GT(without, 0);
  EXPECT_GE(seen.comparisons, 2);
  EXPECT_THAT(made.accepted(), ElementsAre("half"));
  EXPECT_THAT(on.reason(), HasSubstr("still pay"));
}

TEST_F(WatchTest, TakesBackWhatStopsPayingAndForgetsTheCertificate) {
  auto on = watch();
  int steps = 0;
  for (; on.before(); ++steps) on.after(seen.now.empty() ? 0.01 : 0.02);
  EXPECT_LT(steps, 200);
  EXPECT_TRUE(on.over());
  EXPECT_THAT(seen.now, IsEmpty());
  EXPECT_EQ(made.entries[0].status, Status::RolledBack);
  EXPECT_EQ(made.entries[1].status, Status::Rejected);
  EXPECT_THAT(made.events, ElementsAre(HasSubstr("half taken back: The changes stopped paying")));
  EXPECT_FALSE(store.find(made.key));
  EXPECT_FALSE(on.before());
  EXPECT_THAT(made.events, testing::SizeIs(1));
}

TEST_F(WatchTest, TakesNoStepWithoutWhatKeepsItWithinABudget) {
  made.given_peak_bytes = 200;
  for (const std::int64_t tuned : {100, 200}) {
    made.tuned_peak_bytes = tuned;
    made.events.clear();
    auto on = watch();
    int without = 0;
    for (int i = 0; i < 1'000; ++i) {
      seen.budget = i >= 52 && i < 500;  // it begins in the middle of a check, which is dropped
      ASSERT_TRUE(on.before());
      without += seen.budget && seen.now.empty() ? 1 : 0;
      on.after(seen.now.empty() ? 0.02 : 0.01);
    }
    EXPECT_EQ(without > 0, tuned == 200);
    EXPECT_THAT(made.events, ElementsAre(HasSubstr(tuned == 200 ? "losses, and no gradients" : "and no times")));
    EXPECT_THAT(on.reason(), HasSubstr("still pay"));  // once there is no budget any more
  }
  EXPECT_GE(seen.comparisons, 4);
}

TEST_F(WatchTest, GradientsThatWereNoiseAsGivenMayBeFurtherApart) {
  for (const double usual : {0.04, 0.4, 40.0}) {
    made.entries[0].evidence["usual_error"] = usual;
    made.entries[1].evidence["usual_error"] = 1e9;  // of what is not active
    for (const auto kind : {Kind::Exact, Kind::Tolerance, Kind::Precision}) {
      Watch on(seen, made, nullptr, {.names = {"half"}, .kind = kind});
      const double may = kind == Kind::Tolerance ? 0.1 : 0.5;
      seen.shown.gradients = {.gradient = 3.9 * usual, .factor = 3.9 * usual};
      on.doubt();
      EXPECT_EQ(on.before(), kind != Kind::Exact && usual > may) << usual;
    }
  }
}

TEST_F(WatchTest, GradientsThatStockAutocastRoundsAwayAreNoFault) {
  for (const double usual : {0.0, 0.1, 0.53}) {
    for (const auto* autocast : {"bf16_autocast", "other"}) {
      Watch on(seen, made, nullptr, {.names = {"half", autocast}, .kind = Kind::Precision});
      seen.shown.gradients = {.gradient = 0.54};
      seen.rounding = {.gradient = usual};
      on.doubt();
      EXPECT_EQ(on.before(), usual > 0.5 && autocast != std::string("other")) << usual << ' ' << autocast;
    }
  }
}

TEST_F(WatchTest, WhatCannotBeComparedOrSwitchedIsTakenBackOnce) {
  for (const char* member : {"compare", "activate"}) {
    seen.throws = member;
    auto on = watch();
    on.doubt();
    if (seen.throws == "compare") {
      EXPECT_FALSE(on.before());
    } else {
      EXPECT_THROW(on.before(), std::runtime_error);  // and cannot be taken back either
    }
    EXPECT_TRUE(on.over());
    EXPECT_THAT(made.events.back(), HasSubstr("they could not be switched"));
    EXPECT_FALSE(on.before());
  }
  EXPECT_THAT(made.events, testing::SizeIs(2));
}

}  // namespace
}  // namespace oxytorch::tune
