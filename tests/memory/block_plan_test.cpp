#include "oxytorch/memory/block_plan.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "memory/relaxation.h"
#include "oxytorch/error.h"
#include "oxytorch/memory/budget_search.h"

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

/// A timeline written out by hand. An event of bytes below 0 gives back.
struct Recorder {
  explicit Recorder(std::vector<std::string> names) { timeline.names = std::move(names); }
  void event(std::uint64_t at, std::int64_t bytes, int region, bool in_backward) {
    live += bytes;
    timeline.events.push_back({0, at, bytes, live, -1, region, -1, in_backward});
  }
  void mark(int region, bool begins, std::vector<std::uint64_t> addresses) {
    timeline.marks.push_back(
        {static_cast<std::int64_t>(timeline.events.size()), 0, region, begins, false, std::move(addresses)});
  }
  Timeline timeline;
  std::int64_t live = 0;
};

using Choice = std::vector<BlockAction>;
constexpr auto kKeep = BlockAction::Keep, kSelective = BlockAction::Selective, kFull = BlockAction::Full;

/// Every choice of `count` blocks, of `ways` ways each.
std::vector<Choice> all_choices(std::size_t count, std::size_t ways) {
  std::vector<Choice> found{Choice{}};
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<Choice> longer;
    for (const auto& each : found) {
      for (std::size_t way = 0; way < ways; ++way) {
        longer.push_back(each);
        longer.back().push_back(ways == 2 && way == 1 ? kFull : static_cast<BlockAction>(way));
      }
    }
    found = std::move(longer);
  }
  return found;
}

/// The tape of a chain that was recorded under selective_checkpoint() too, where each block kept a part and took time.
StepTape selective_tape(std::mt19937& random, std::size_t length) {
  std::vector<Chain::Part> plain, under;
  for (std::size_t i = 0; i < length; ++i) {
    plain.push_back({static_cast<std::int64_t>(random() % 1000), static_cast<std::int64_t>(random() % 300),
                     static_cast<std::int64_t>(1 + random() % 100), static_cast<double>(1 + random() % 50)});
    under.push_back(plain.back());
    under.back().kept = plain.back().kept * static_cast<std::int64_t>(random() % 110) / 100;
  }
  auto tape = Chain(plain).tape();
  Chain chain(under);
  for (std::size_t i = 0; i < length; ++i) {
    chain.timeline.overhead_ns.emplace_back(static_cast<int>(i), std::int64_t{1'000'000'000} * (random() % 20));
  }
  tape.add(kSelective, chain.tape());
  return tape;
}

TEST(BlockPlanTest, ATapeHasWhatBlocksKeepAndWhatTheyCost) {
  const Chain chain({{100, 30, 10, 1}, {200, 0, 20, 2}});
  const auto tape = chain.tape();
  ASSERT_EQ(tape.calls.size(), 2U);
  EXPECT_EQ(tape.calls[0].saved_bytes, 100) << "its output is the next one's input";
  EXPECT_EQ(tape.calls[1].saved_bytes, 200);
  EXPECT_EQ(tape.calls[0].forward_peak, 130);
  EXPECT_EQ(tape.calls[1].forward_peak, 220);
  EXPECT_DOUBLE_EQ(tape.calls[1].seconds, 2);
  EXPECT_EQ(tape.calls[0].backward_peak, 8);
  EXPECT_EQ(tape.calls[1].backward_end, tape.calls[0].backward_begin);
  EXPECT_FALSE(tape.has(kSelective));
  EXPECT_EQ(tape.peak({kKeep, kKeep}), 338);
  EXPECT_EQ(tape.peak({kFull, kKeep}), 238) << "the first block keeps 10, and both run backward with 8 more";
  EXPECT_DOUBLE_EQ(tape.seconds({kFull, kFull}), 3);
}

TEST(BlockPlanTest, ATapeHasWhatBlocksKeepWithoutCheapOperators) {
  auto tape = Chain({{100, 30, 10, 1}, {200, 0, 20, 2}}).tape();
  Chain under({{60, 30, 10, 1}, {50, 0, 20, 2}});
  under.timeline.overhead_ns = {{0, 500'000'000}, {1, 250'000'000}};
  tape.add(kSelective, under.tape());
  EXPECT_EQ(tape.calls[0].under[static_cast<std::size_t>(kSelective)]->saved_bytes, 60);
  EXPECT_EQ(tape.peak({kSelective, kKeep}), 298);
  EXPECT_EQ(tape.peak({kSelective, kSelective}), 290) << "forward of the second has 200 still, beside 60, 10 and 20";
  EXPECT_DOUBLE_EQ(tape.seconds({kSelective, kSelective}), 0.75);
  EXPECT_DOUBLE_EQ(tape.seconds({kSelective, kFull}), 2.5);
  auto other = Chain({{100, 30, 10, 1}}).tape();
  other.add(kSelective, under.tape());
  EXPECT_FALSE(other.has(kSelective)) << "of other calls";
}

TEST(BlockPlanTest, AnInputThatIsGivenBackIsHeldBySelectiveOnesOnlyWhereTheyHoldIt) {
  // x is made outside, goes into block a, and is given back before backward, unless a holds it.
  const auto recorded = [](bool holds) {
    Recorder record({"a", "b"});
    record.event(1, 40, -1, false);
    record.mark(0, true, {1});
    record.event(2, 100, 0, false);
    record.mark(0, false, {});
    if (!holds) record.event(1, -40, -1, false);
    record.event(9, 500, -1, false);
    record.event(9, -500, -1, false);
    record.event(3, 8, 0, true);
    record.event(2, -100, -1, false);
    if (holds) record.event(1, -40, -1, false);
    record.event(3, -8, -1, false);
    return StepTape::of(record.timeline, {"a", "b"});
  };
  auto tape = recorded(false);
  ASSERT_EQ(tape.calls.at(0).held.size(), 1U);
  EXPECT_EQ(tape.peak({kKeep, kKeep}), 600);
  EXPECT_EQ(tape.peak({kFull, kKeep}), 540) << "a second forward needs x";
  auto free = tape;
  tape.add(kSelective, recorded(true));
  EXPECT_EQ(tape.peak({kSelective, kKeep}), 640);
  free.add(kSelective, recorded(false));
  EXPECT_EQ(free.peak({kSelective, kKeep}), 600);
}

/// What no choice within the budget is below, as prices of the spans tell it.
double bound_of(const StepTape& tape, std::int64_t budget, double reached) {
  Relaxation relaxation(tape.seconds(), tape.spans(), budget);
  for (int round = 0; round < 200; ++round) (void)relaxation.next(reached);
  return relaxation.bound();
}

void expect_no_faster_choice(const StepTape& tape, const std::vector<Choice>& choices) {
  const auto plain = tape.peak(choices.front());
  std::vector<std::pair<std::int64_t, double>> costs;
  for (const auto& choice : choices) costs.emplace_back(tape.peak(choice), tape.seconds(choice));
  const auto lowest = std::min_element(costs.begin(), costs.end())->first;
  EXPECT_LE(lowest_peak(tape).peak_bytes, lowest + lowest / 2000 + 1);
  double least_before = 0;
  for (int percent = 100; percent >= 0; percent -= 20) {
    const auto budget = lowest + (plain - lowest) * percent / 100;
    std::optional<double> least;
    for (const auto& [peak, seconds] : costs) {
      if (peak <= budget) least = std::min(least.value_or(1e9), seconds);
    }
    const auto plan = plan_blocks(tape, budget);
    EXPECT_TRUE(plan.is_optimal);
    EXPECT_LE(plan.peak_bytes, budget);
    EXPECT_EQ(plan.peak_bytes, tape.peak(plan.choice));
    EXPECT_DOUBLE_EQ(plan.seconds, *least);
    EXPECT_LE(bound_of(tape, budget, *least), *least * (1 + 1e-9));
    EXPECT_GE(plan.seconds, least_before) << "less memory never takes less time";
    least_before = plan.seconds;
  }
}

TEST(BlockPlanTest, NoChoiceIsFasterByExhaustion) {
  std::mt19937 random(1);
  for (int turn = 0; turn < 150; ++turn) {
    const std::size_t length = 1 + random() % 9;
    const auto tape = random_chain(random, length).tape();
    expect_no_faster_choice(tape, all_choices(length, 2));
  }
  for (int turn = 0; turn < 100; ++turn) {
    const std::size_t length = 1 + random() % 6;
    const auto tape = selective_tape(random, length);
    expect_no_faster_choice(tape, all_choices(length, 3));
  }
}

TEST(BlockPlanTest, NoChoiceAmongAllActionsIsFasterByExhaustion) {
  std::mt19937 random(2);
  for (int turn = 0; turn < 60; ++turn) {
    const std::size_t length = 1 + random() % 4;
    auto tape = random_chain(random, length).tape();
    std::vector<std::size_t> ways{0, 2};
    for (const auto action : kRecordedActions) {
      if (random() % 4 == 0) continue;
      ways.push_back(static_cast<std::size_t>(action));
      std::vector<Chain::Part> under;
      for (const auto& call : tape.calls) {
        const auto kept = call.saved_bytes * static_cast<std::int64_t>(random() % 110) / 100;
        under.push_back(
            {kept, static_cast<std::int64_t>(random() % 300), static_cast<std::int64_t>(1 + random() % 100), 1});
      }
      Chain chain(under);
      for (std::size_t i = 0; i < length; ++i) {
        chain.timeline.overhead_ns.emplace_back(static_cast<int>(i), std::int64_t{1'000'000'000} * (random() % 30));
      }
      tape.add(action, chain.tape());
    }
    std::vector<Choice> choices{Choice{}};
    const auto seconds = tape.seconds();
    for (std::size_t block = 0; block < length; ++block) {
      std::vector<Choice> longer;
      for (const auto& each : choices) {
        for (const auto way : ways) {
          if (!std::isfinite(seconds[block][way])) continue;  // it saves nothing
          longer.push_back(each);
          longer.back().push_back(static_cast<BlockAction>(way));
        }
      }
      choices = std::move(longer);
    }
    expect_no_faster_choice(tape, choices);
  }
}

TEST(BlockPlanTest, AnInputThatIsPackedAwayIsReleased) {
  // x is made outside and kept for block a alone: packed, it is given back when forward is done with it.
  const auto recorded = [](bool is_packed) {
    Recorder record({"a"});
    record.event(1, 40, -1, false);
    record.mark(0, true, {1});
    record.event(2, is_packed ? 10 : 100, 0, false);
    record.mark(0, false, {});
    if (is_packed) record.event(1, -40, -1, false);
    record.event(9, 500, -1, false);
    record.event(9, -500, -1, false);
    record.event(3, is_packed ? 148 : 8, 0, true);
    record.event(2, is_packed ? -10 : -100, -1, false);
    if (!is_packed) record.event(1, -40, -1, false);
    record.event(3, is_packed ? -148 : -8, -1, false);
    return StepTape::of(record.timeline, {"a"});
  };
  auto tape = recorded(false);
  EXPECT_EQ(tape.peak({kKeep}), 640);
  tape.add(BlockAction::File, recorded(true));
  EXPECT_EQ(tape.peak({BlockAction::File}), 510);
  EXPECT_EQ(tape.peak({kFull}), 540) << "it goes into the second forward";
}

TEST(BlockPlanTest, AnOutputThatItsBlockKeepsTooIsGoneWhereBothPackIt) {
  // b takes a's output, of 50, and both keep it. Backward of a takes 500 beside.
  const auto recorded = [](bool is_packed) {
    Recorder record({"a", "b"});
    record.mark(0, true, {});
    record.event(1, 50, 0, false);
    record.mark(0, false, {1});
    record.mark(1, true, {1});
    record.event(2, 100, 1, false);
    record.mark(1, false, {});
    if (is_packed) {
      record.event(1, -50, -1, false);
      record.event(2, -100, -1, false);
    }
    record.event(3, is_packed ? 158 : 8, 1, true);
    if (!is_packed) record.event(2, -100, -1, false);
    record.event(3, is_packed ? -158 : -8, -1, false);
    record.event(4, is_packed ? 550 : 500, 0, true);
    record.event(4, is_packed ? -550 : -500, -1, false);
    if (!is_packed) record.event(1, -50, -1, false);
    return StepTape::of(record.timeline, {"a", "b"});
  };
  auto tape = recorded(false);
  EXPECT_EQ(tape.peak({kKeep, kKeep}), 550);
  tape.add(BlockAction::File, recorded(true));
  EXPECT_EQ(tape.peak({BlockAction::File, BlockAction::File}), 550);
  EXPECT_EQ(tape.calls[0].kept_outputs.size(), 1U);
  EXPECT_EQ(tape.calls[1].under[static_cast<std::size_t>(BlockAction::File)]->released_bytes, 50);
}

TEST(BlockPlanTest, NamesOfActions) {
  for (std::size_t i = 0; i < kBlockActions; ++i) {
    EXPECT_EQ(parse_block_action(name(static_cast<BlockAction>(i))), static_cast<BlockAction>(i));
  }
  try {
    (void)parse_block_action("pack");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("'pack', expected 'keep', 'selective'"));
  }
  const auto choice = BlockChoice(BlockAction::File, {"a", "b"}).add(kFull, "c").add(kKeep, "d");
  EXPECT_EQ(choice.action_of("b"), BlockAction::File);
  EXPECT_EQ(choice.action_of("c"), kFull);
  EXPECT_EQ(choice.action_of("d"), kKeep);
  EXPECT_TRUE(BlockChoice(kKeep, {"a"}).empty());
}

TEST(BlockPlanTest, ABudgetUnderTheLowestPeakIsRefusedWithIt) {
  const Chain chain({{100, 30, 10, 1}, {200, 0, 20, 2}});
  const auto tape = chain.tape();
  try {
    (void)plan_blocks(tape, 10);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::OutOfMemory);
    EXPECT_THAT(error.what(), HasSubstr(std::to_string(lowest_peak(tape).peak_bytes) + " B"));
  }
}

TEST(BlockPlanTest, ASearchCorrectsItselfByWhatIsMeasured) {
  const std::vector<Chain::Part> parts(8, {1000, 200, 50, 0.01});
  const auto tape = Chain(parts).tape();
  const auto plain = tape.peak(Choice(8));
  BudgetSearch search(tape, /*base=*/500, 500 + plain, 500 + plain / 2);
  EXPECT_EQ(search.floor(), 500 + lowest_peak(tape).peak_bytes);
  const auto first = search.next().value();
  EXPECT_LE(search.predicted_peak(), search.budget());
  search.measured(search.budget() + 900);
  const auto second = search.next().value();
  EXPECT_GT(second[kFull].size(), first[kFull].size());
  search.measured(search.budget() - 1);
  EXPECT_FALSE(search.next());
  EXPECT_EQ(search.choice(), second);
  EXPECT_THAT(search.summary(), HasSubstr(std::to_string(second[kFull].size()) + " of 8 blocks are run again"));
  search.timed(0.1, 0.125);
  EXPECT_THAT(search.table(), HasSubstr("A step takes 125 ms instead of 100 ms. A step leaves the same bits."));
  const auto curve = search.curve(9);
  ASSERT_GT(curve.size(), 3U);
  EXPECT_EQ(curve.front(), (std::pair<std::int64_t, double>{500 + plain, 0}));
  for (std::size_t i = 1; i < curve.size(); ++i) {
    EXPECT_LT(curve[i].first, curve[i - 1].first);
    EXPECT_GT(curve[i].second, curve[i - 1].second);
  }

  const auto report = search.report();
  const auto& blocks = report.blocks();
  ASSERT_EQ(blocks.size(), 3U);
  EXPECT_THAT(search.table(), HasSubstr(std::get<monitor::Paragraph>(blocks[0]).text));
  const auto& series = std::get<monitor::LineChart>(blocks[1]).series;
  ASSERT_EQ(series.size(), 2U) << "what can be had, and what is had";
  ASSERT_EQ(series[0].x.size(), curve.size());
  EXPECT_DOUBLE_EQ(series[0].x.back() * (1 << 20), static_cast<double>(curve.back().first));
  EXPECT_DOUBLE_EQ(series[0].y.back(), 1e3 * curve.back().second);
  EXPECT_DOUBLE_EQ(series[1].x[0] * (1 << 20), static_cast<double>(search.measured_peak()));
  EXPECT_NEAR(series[1].y[1], 25, 1e-9);
  EXPECT_EQ(std::get<monitor::Table>(blocks[2]).rows.size(), 8U);
}

TEST(BlockPlanTest, ASearchThatCannotEndWellIsRefused) {
  const auto tape = Chain({{100, 30, 10, 1}, {200, 0, 20, 2}}).tape();
  EXPECT_FALSE(BudgetSearch(tape, 0, 338, 338).next()) << "nothing is to be done";
  EXPECT_THROW((void)BudgetSearch(tape, 0, 338, 0), Error);
  EXPECT_THROW((void)BudgetSearch({}, 0, 338, 10), Error);
  BudgetSearch low(tape, 0, 338, 20);
  EXPECT_EQ(low.next().value()[kFull].size(), 1U) << "the lowest choice is measured before it is refused";
  low.measured(21);
  EXPECT_EQ(low.floor(), 21);
  EXPECT_THROW((void)low.next(), Error);
  // The lowest choice is the one that was just measured: its figure is said, not what was told of it.
  BudgetSearch told(tape, 0, 338, lowest_peak(tape).peak_bytes);
  ASSERT_TRUE(told.next());
  told.measured(500);
  try {
    while (told.next()) told.measured(500);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("the lowest peak of tensors that was reached is 500 B"));
  }
  BudgetSearch worse(tape, 0, 338, 300);
  const auto never = [&] {
    for (int i = 0; i < 9; ++i) {
      if (!worse.next()) return;
      worse.measured(301);
    }
  };
  EXPECT_THROW(never(), Error) << "each plan peaks over the budget";
}

TEST(BlockPlanTest, ASearchSaysWhatIsMadeAgainInPartAndWhyNot) {
  auto tape = Chain(std::vector<Chain::Part>(8, {1000, 0, 50, 0.01})).tape();
  auto under = Chain(std::vector<Chain::Part>(8, {400, 0, 50, 0.01}));
  for (int i = 0; i < 8; ++i) under.timeline.overhead_ns.emplace_back(i, 1'000'000);
  tape.add(kSelective, under.tape());
  const auto plain = tape.peak(Choice(8));
  BudgetSearch search(tape, 0, plain, plain * 7 / 10);
  const auto choice = search.next().value();
  EXPECT_TRUE(choice[kFull].empty()) << "ten times as slow for not twice as much";
  EXPECT_GE(choice[kSelective].size(), 4U);
  search.measured(search.predicted_peak());
  EXPECT_THAT(search.summary(), HasSubstr("results of cheap operators of " + std::to_string(choice[kSelective].size()) +
                                          " of 8 blocks are made again: a step takes"));
  EXPECT_THAT(search.table(), HasSubstr("selective\n"));
  search.without(kSelective, "no such luck.");
  EXPECT_THAT(search.summary(), HasSubstr("Results of cheap operators are kept"));
  EXPECT_THAT(search.table(), HasSubstr("failed: no such luck."));
}

TEST(BlockPlanTest, TheLeastPeakIsWhatTimeAllows) {
  const auto tape = Chain(std::vector<Chain::Part>(8, {1000, 0, 50, 0.01})).tape();
  const auto plain = tape.peak(Choice(8));
  const auto searched = [&](double slowdown) { return BudgetSearch::least(tape, 100, 100 + plain, 0.1, slowdown); };
  auto search = searched(1.35);  // three of eight: 0.03 s of 0.1
  EXPECT_TRUE(search.is_bound_by_time());
  EXPECT_EQ(search.next().value()[kFull].size(), 3U);
  search.measured(search.predicted_peak() + 1);
  search.timed(0.1, 0.14);  // which is more than was told
  EXPECT_EQ(search.next().value()[kFull].size(), 2U);
  search.measured(search.predicted_peak());
  search.timed(0.1, 0.13);
  EXPECT_FALSE(search.next());
  EXPECT_EQ(search.choice()[kFull].size(), 2U);
  EXPECT_EQ(search.budget(), search.measured_peak());
  EXPECT_LT(search.measured_peak(), search.plain_peak());
  EXPECT_THAT(search.summary(), HasSubstr("That is the least where a step may take 1.35 times as long."));
  EXPECT_THAT(search.table(), HasSubstr("the least where a step may take 1.35 times as long;"));
  auto none = searched(1.001);
  EXPECT_FALSE(none.next()) << "no block is run again in so little time";
  EXPECT_TRUE(none.choice().empty());
  EXPECT_EQ(none.measured_peak(), none.plain_peak());
  auto never = searched(1.2);
  int choices = 0;
  for (; never.next(); ++choices) {
    never.measured(never.predicted_peak());
    never.timed(0.1, 0.5);
  }
  EXPECT_GE(choices, 1);
  EXPECT_TRUE(never.choice().empty()) << "each took too long";
  EXPECT_THROW((void)searched(0.9), Error);
}

TEST(BlockPlanTest, TwoHundredBlocksOfAKind) {
  const std::vector<Chain::Part> parts(200, {1'000'000, 200'000, 50'000, 0.01});
  const auto tape = Chain(parts).tape();
  const auto plain = tape.peak(Choice(200));
  const auto plan = plan_blocks(tape, plain / 2);
  const auto count = std::count(plan.choice.begin(), plan.choice.end(), kFull);
  // 1 MB each has to go, from the start of the chain so that what is run again finds the rest gone.
  EXPECT_NEAR(static_cast<double>(count), 106, 1);
  EXPECT_LE(plan.peak_bytes, plain / 2);
}

TEST(BlockPlanTest, UnevenBlocksBeyondExhaustionAreImproved) {
  std::mt19937 random(3);
  const auto tape = selective_tape(random, 200);
  const Choice everything(200);
  const auto plain = tape.peak(everything), least = lowest_peak(tape).peak_bytes;
  double before = 0;
  for (int percent = 90; percent >= 30; percent -= 30) {
    const auto budget = least + (plain - least) * percent / 100;
    const auto plan = plan_blocks(tape, budget);
    EXPECT_LE(tape.peak(plan.choice), budget);
    EXPECT_LE(plan.seconds, 1.03 * bound_of(tape, budget, plan.seconds));
    EXPECT_GE(plan.seconds, before * 0.99);
    before = plan.seconds;
    // No single block can be kept that is not, or in a cheaper way.
    const auto seconds = tape.seconds();
    for (std::size_t block = 0; block < plan.choice.size(); ++block) {
      for (const auto other : {kKeep, kSelective, kFull}) {
        auto cheaper = plan.choice;
        cheaper[block] = other;
        if (tape.seconds(cheaper) < plan.seconds - 1e-6) {
          EXPECT_GT(tape.peak(cheaper), budget) << block;
        }
      }
    }
  }
}

TEST(BlockPlanTest, BackwardComesToTheLastCallOfABlockFirst) {
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
  EXPECT_EQ(tape.peak({kKeep, kKeep}), 308);
  EXPECT_EQ(tape.peak({kFull, kKeep}), 208);
}

TEST(BlockPlanTest, RegionsThatAreNoBlocksAndCallsWithoutBackwardAreLeftOut) {
  Chain chain({{100, 30, 10, 1}, {200, 0, 20, 2}});
  EXPECT_EQ(StepTape::of(chain.timeline, {"block1", "elsewhere"}).calls.size(), 1U);
  EXPECT_TRUE(StepTape::of(chain.timeline, {}).calls.empty());
  EXPECT_TRUE(StepTape::of({}, {"block0"}).calls.empty());
  EXPECT_EQ(StepTape::of({}, {"block0"}).peak({kKeep}), 0);
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

TEST(BudgetSearchTest, WhereNoStepFitsTheLastBlocksAreKeptAsFarAsTheyFit) {
  std::vector<std::string> names;
  for (int i = 0; i < 20; ++i) names.push_back("block" + std::to_string(i));
  for (const std::int64_t fits : {0, 1, 7, 19}) {
    auto search = BudgetSearch::unrecorded(names, 100 + 10 * fits);
    int steps = 0;
    while (const auto choice = search.next()) {
      const auto kept = static_cast<std::int64_t>(names.size() - (*choice)[BlockAction::Full].size());
      ++steps;
      if (kept > fits + 2) {
        search.ran_out("out of memory");
      } else {
        search.measured(100 + 10 * kept);
      }
    }
    EXPECT_LE(steps, 6) << "halves what is not known";
    EXPECT_EQ(search.choice()[BlockAction::Full], std::vector(names.begin(), names.end() - fits));
    EXPECT_EQ(search.measured_peak(), 100 + 10 * fits);
    EXPECT_EQ(search.floor(), 100);
    EXPECT_EQ(search.same_bits(), std::nullopt);
    EXPECT_THAT(search.summary(), HasSubstr("of the budget of"));
    EXPECT_THAT(search.summary(), HasSubstr("and does not fit without"));
    EXPECT_THAT(search.table(), HasSubstr("block0"));
    EXPECT_TRUE(search.curve(9).empty());
    EXPECT_THAT(search.report().to_html(), HasSubstr("none was recorded"));
  }
  auto much = BudgetSearch::unrecorded(names, 90);
  (void)much.next();
  much.measured(100);
  EXPECT_THAT([&] { (void)much.next(); },
              testing::ThrowsMessage<Error>(HasSubstr("with every block run again it takes 100 B")));
  auto never = BudgetSearch::unrecorded(names, 90);
  (void)never.next();
  never.ran_out("no memory for 7 bytes");
  EXPECT_THAT([&] { (void)never.next(); }, testing::ThrowsMessage<Error>(HasSubstr("no memory for 7 bytes")));
  EXPECT_THROW((void)BudgetSearch::unrecorded({}, 90), Error);
  EXPECT_THROW((void)BudgetSearch::unrecorded(names, 0), Error);
}

}  // namespace
}  // namespace oxytorch::memory
