#include "oxytorch/memory/recompute_plan.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "oxytorch/error.h"

namespace oxytorch::memory {
namespace {

using testing::HasSubstr;

/// A chain of blocks, each of which keeps some tensors for its backward and gives back some at once.
class Chain {
 public:
  struct Part {
    std::int64_t kept, passing, output;
    double seconds;
  };

  explicit Chain(const std::vector<Part>& parts) {
    std::vector<std::vector<std::uint64_t>> kept;
    std::vector<std::uint64_t> outputs;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      timeline.names.push_back("block" + std::to_string(i));
      const int region = static_cast<int>(i);
      mark(region, true, outputs.empty() ? std::vector<std::uint64_t>{} : std::vector{outputs.back()});
      kept.push_back({take(parts[i].kept, region)});
      give_back(take(parts[i].passing, region));
      outputs.push_back(take(parts[i].output, region));
      time_ns += static_cast<std::int64_t>(parts[i].seconds * 1e9);
      mark(region, false, {outputs.back()});
    }
    for (std::size_t i = parts.size(); i-- > 0;) {
      const int region = static_cast<int>(i);
      const auto gradient = take(8, region, true);
      for (const auto address : kept[i]) give_back(address);
      give_back(outputs[i]);
      give_back(gradient);
    }
  }

  [[nodiscard]] StepTape tape() const { return StepTape::of(timeline, timeline.names); }

  Timeline timeline;

 private:
  std::uint64_t take(std::int64_t bytes, int region, bool in_backward = false) {
    live += bytes;
    timeline.events.push_back({time_ns, next_address, bytes, live, -1, region, -1, in_backward});
    sizes.push_back(bytes);
    return next_address++;
  }
  void give_back(std::uint64_t address) {
    const auto bytes = sizes[address - 1];
    live -= bytes;
    timeline.events.push_back({time_ns, address, -bytes, live});
  }
  void mark(int region, bool begins, std::vector<std::uint64_t> addresses) {
    timeline.marks.push_back(
        {static_cast<std::int64_t>(timeline.events.size()), time_ns, region, begins, false, std::move(addresses)});
  }

  std::int64_t live = 0, time_ns = 0;
  std::uint64_t next_address = 1;
  std::vector<std::int64_t> sizes;
};

Chain random_chain(std::mt19937& random, std::size_t length) {
  std::vector<Chain::Part> parts;
  for (std::size_t i = 0; i < length; ++i) {
    parts.push_back({static_cast<std::int64_t>(random() % 1000), static_cast<std::int64_t>(random() % 300),
                     static_cast<std::int64_t>(1 + random() % 100), static_cast<double>(1 + random() % 50)});
  }
  return Chain(parts);
}

std::vector<bool> flags(std::uint32_t bits, std::size_t count) {
  std::vector<bool> found(count);
  for (std::size_t i = 0; i < count; ++i) found[i] = (bits >> i & 1) != 0;
  return found;
}

TEST(RecomputePlanTest, ATapeHasWhatBlocksKeepAndWhatTheyCost) {
  const Chain chain({{100, 30, 10, 1}, {200, 0, 20, 2}});
  const auto tape = chain.tape();
  ASSERT_EQ(tape.calls.size(), 2U);
  EXPECT_EQ(tape.calls[0].saved_bytes, 100) << "its output is the next one's input";
  EXPECT_EQ(tape.calls[1].saved_bytes, 200);
  EXPECT_EQ(tape.calls[0].forward_peak, 130);
  EXPECT_EQ(tape.calls[1].forward_peak, 220);
  EXPECT_DOUBLE_EQ(tape.calls[1].seconds, 2);
  EXPECT_EQ(tape.peak({false, false}), 338);
  EXPECT_EQ(tape.peak({true, false}), 238) << "the first block keeps 10, and both run backward with 8 more";
  EXPECT_DOUBLE_EQ(tape.seconds({true, true}), 3);
}

TEST(RecomputePlanTest, NoChoiceIsFasterByExhaustion) {
  std::mt19937 random(1);
  for (int turn = 0; turn < 150; ++turn) {
    const std::size_t length = 1 + random() % 9;
    const auto tape = random_chain(random, length).tape();
    const auto plain = tape.peak(std::vector<bool>(length));
    std::int64_t lowest = plain;
    for (std::uint32_t bits = 0; bits < 1U << length; ++bits) lowest = std::min(lowest, tape.peak(flags(bits, length)));
    EXPECT_LE(lowest_peak(tape).peak_bytes, lowest + lowest / 2000 + 1);
    double least_before = 0;
    for (int percent = 100; percent >= 0; percent -= 20) {
      const auto budget = lowest + (plain - lowest) * percent / 100;
      std::optional<double> least;
      for (std::uint32_t bits = 0; bits < 1U << length; ++bits) {
        const auto again = flags(bits, length);
        if (tape.peak(again) <= budget) least = std::min(least.value_or(1e9), tape.seconds(again));
      }
      const auto plan = plan_recomputation(tape, budget);
      EXPECT_TRUE(plan.is_optimal);
      EXPECT_LE(plan.peak_bytes, budget);
      EXPECT_EQ(plan.peak_bytes, tape.peak(plan.again));
      EXPECT_DOUBLE_EQ(plan.seconds, *least);
      EXPECT_GE(plan.seconds, least_before) << "less memory never takes less time";
      least_before = plan.seconds;
    }
  }
}

TEST(RecomputePlanTest, ABudgetUnderTheLowestPeakIsRefusedWithIt) {
  const Chain chain({{100, 30, 10, 1}, {200, 0, 20, 2}});
  const auto tape = chain.tape();
  try {
    (void)plan_recomputation(tape, 10);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::OutOfMemory);
    EXPECT_THAT(error.what(), HasSubstr(std::to_string(lowest_peak(tape).peak_bytes) + " B"));
  }
}

TEST(RecomputePlanTest, ASearchCorrectsItselfByWhatIsMeasured) {
  const std::vector<Chain::Part> parts(8, {1000, 200, 50, 0.01});
  const auto tape = Chain(parts).tape();
  const auto plain = tape.peak(std::vector<bool>(8));
  BudgetSearch search(tape, /*base=*/500, 500 + plain, 500 + plain / 2);
  EXPECT_EQ(search.floor(), 500 + lowest_peak(tape).peak_bytes);
  const auto first = search.next().value();
  EXPECT_LE(search.predicted_peak(), search.budget());
  search.measured(search.budget() + 900);
  const auto second = search.next().value();
  EXPECT_GT(second.size(), first.size());
  search.measured(search.budget() - 1);
  EXPECT_FALSE(search.next());
  EXPECT_EQ(search.recomputed(), second);
  search.timed(0.1, 0.125);
  EXPECT_THAT(search.table(), HasSubstr("A step takes 125 ms instead of 100 ms. A step leaves the same bits."));
  const auto curve = search.curve(9);
  ASSERT_GT(curve.size(), 3U);
  EXPECT_EQ(curve.front(), (std::pair<std::int64_t, double>{500 + plain, 0}));
  for (std::size_t i = 1; i < curve.size(); ++i) {
    EXPECT_LT(curve[i].first, curve[i - 1].first);
    EXPECT_GT(curve[i].second, curve[i - 1].second);
  }
}

TEST(RecomputePlanTest, ASearchThatCannotEndWellIsRefused) {
  const auto tape = Chain({{100, 30, 10, 1}, {200, 0, 20, 2}}).tape();
  EXPECT_FALSE(BudgetSearch(tape, 0, 338, 338).next()) << "nothing is to be done";
  EXPECT_THROW((void)BudgetSearch(tape, 0, 338, 0), Error);
  EXPECT_THROW((void)BudgetSearch({}, 0, 338, 10), Error);
  BudgetSearch low(tape, 0, 338, 20);
  EXPECT_EQ(low.next()->size(), 1U) << "the lowest choice is measured before it is refused";
  low.measured(21);
  EXPECT_EQ(low.floor(), 21);
  EXPECT_THROW((void)low.next(), Error);
  BudgetSearch worse(tape, 0, 338, 300);
  const auto never = [&] {
    for (int i = 0; i < 9; ++i) {
      if (!worse.next()) return;
      worse.measured(301);
    }
  };
  EXPECT_THROW(never(), Error) << "each plan peaks over the budget";
}

TEST(RecomputePlanTest, TwoHundredBlocksOfAKind) {
  const std::vector<Chain::Part> parts(200, {1'000'000, 200'000, 50'000, 0.01});
  const auto tape = Chain(parts).tape();
  const auto plain = tape.peak(std::vector<bool>(200));
  const auto plan = plan_recomputation(tape, plain / 2);
  const auto count = std::count(plan.again.begin(), plan.again.end(), true);
  // 1 MB each has to go, from the start of the chain so that what is run again finds the rest gone.
  EXPECT_NEAR(static_cast<double>(count), 106, 1);
  EXPECT_LE(plan.peak_bytes, plain / 2);
}

TEST(RecomputePlanTest, BackwardComesToTheLastCallOfABlockFirst) {
  // Forward: a, b, a; backward: a, b, a. Each call keeps 100.
  Timeline timeline;
  timeline.names = {"a", "b"};
  std::int64_t live = 0;
  std::uint64_t address = 0;
  const auto event = [&](std::uint64_t at, std::int64_t bytes, int region, bool in_backward) {
    live += bytes;
    timeline.events.push_back({0, at, bytes, live, -1, region, -1, in_backward});
  };
  for (const int region : {0, 1, 0}) {
    timeline.marks.push_back({static_cast<std::int64_t>(timeline.events.size()), 0, region, true});
    event(++address, 100, region, false);
    timeline.marks.push_back({static_cast<std::int64_t>(timeline.events.size()), 0, region, false});
  }
  for (const int region : {0, 1, 0}) {
    event(10 + address, 8, region, true);
    event(10 + address, -8, -1, false);
    event(address--, -100, -1, false);
  }
  const auto tape = StepTape::of(timeline, timeline.names);
  ASSERT_EQ(tape.calls.size(), 3U);
  EXPECT_EQ(tape.calls[0].backward_begin, 9);
  EXPECT_EQ(tape.calls[1].backward_begin, 6);
  EXPECT_EQ(tape.calls[2].backward_begin, 3);
  EXPECT_EQ(tape.calls[0].saved_bytes, 100);
  EXPECT_EQ(tape.peak({false, false}), 308);
  EXPECT_EQ(tape.peak({true, false}), 208);
}

TEST(RecomputePlanTest, RegionsThatAreNoBlocksAndCallsWithoutBackwardAreLeftOut) {
  Chain chain({{100, 30, 10, 1}, {200, 0, 20, 2}});
  EXPECT_EQ(StepTape::of(chain.timeline, {"block1", "elsewhere"}).calls.size(), 1U);
  EXPECT_TRUE(StepTape::of(chain.timeline, {}).calls.empty());
  EXPECT_TRUE(StepTape::of({}, {"block0"}).calls.empty());
  EXPECT_EQ(StepTape::of({}, {"block0"}).peak({false}), 0);
  for (auto& event : chain.timeline.events) event.in_backward = false;
  EXPECT_TRUE(chain.tape().calls.empty());
}

TEST(StepTapeTest, SeveralRecordingsGiveTheMedianOfEachCall) {
  const auto tape = [](double first, double second) { return Chain({{10, 0, 1, first}, {20, 0, 1, second}}).tape(); };
  const auto steady = StepTape::steady({tape(1, 9), tape(30, 2), tape(2, 1)});
  EXPECT_DOUBLE_EQ(steady.calls[0].seconds, 2);
  EXPECT_DOUBLE_EQ(steady.calls[1].seconds, 2);
  EXPECT_EQ(steady.live, tape(2, 1).live);
  const auto longer = Chain({{10, 0, 1, 7}, {20, 0, 1, 7}, {20, 0, 1, 7}}).tape();
  EXPECT_DOUBLE_EQ(StepTape::steady({longer, longer, tape(1, 2)}).calls[0].seconds, 1);
  EXPECT_THROW((void)StepTape::steady({}), Error);
}

}  // namespace
}  // namespace oxytorch::memory
