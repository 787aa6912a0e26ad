#include "oxytorch/tune/fit.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory/device_bytes.h"
#include "oxytorch/clock.h"
#include "oxytorch/error.h"
#include "oxytorch/memory/batch_search.h"
#include "oxytorch/memory/meter.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "tune/fit_run.h"
#include "tune/step_start.h"

namespace oxytorch {
namespace {

constexpr std::size_t kPairs = 3;       // of steps with and without a plan, for the time it costs
constexpr std::size_t kRecordings = 3;  // of the step, for the time that each block takes

/// Of all blocks that the step calls, in order.
std::vector<std::string> blocks_of(const memory::Timeline& timeline) {
  std::vector<std::string> found;
  for (const auto& mark : timeline.marks) {
    const auto& name = timeline.names[static_cast<std::size_t>(mark.region)];
    if (mark.begins && std::find(found.begin(), found.end(), name) == found.end()) found.push_back(name);
  }
  return found;
}

void take_step(tune::Run& run, const Batch& batch, bool can_repeat) {
  std::optional<tune::StepStart> start;
  if (can_repeat) start.emplace(run);
  run.step_of_window(batch, [&run](std::size_t part) { run.update(part); });
}

double median(std::array<double, kPairs> values) {
  std::sort(values.begin(), values.end());
  return values[kPairs / 2];
}

/// What fit_run() does where a step with everything kept does not fit in memory.
std::optional<MemoryPlan> fit_unrecorded(tune::Run& run, const tune::FitTarget& target, tune::Snapshot& snapshot,
                                         const std::function<std::int64_t(const memory::BlockChoice&)>& measured,
                                         std::int64_t budget) {
  // The more blocks are run again, the further a step comes, and the more of them it names.
  std::vector<std::string> blocks;
  for (bool is_more = true; is_more;) {
    const memory::PlannedBlocks active({memory::BlockAction::Full, blocks});
    const memory::Meter meter({.device = run.device(), .timeline = true});
    try {
      take_step(run, run.batches().front(), target.can_repeat);
    } catch (const std::exception& error) {
      if (!is_out_of_memory(error)) throw;
    }
    auto called = blocks_of(meter.timeline());
    is_more = called.size() > blocks.size();
    if (is_more) blocks = std::move(called);
    snapshot.restore();
  }
  if (blocks.empty()) return std::nullopt;
  auto search = memory::BudgetSearch::unrecorded(std::move(blocks), budget);
  while (const auto choice = search.next()) {
    try {
      measured(*choice);  // makes gradients and the optimizer's state
      search.measured(measured(*choice));
    } catch (const std::exception& error) {
      if (!is_out_of_memory(error)) throw;
      search.ran_out(error.what());
    }
    snapshot.restore();
  }
  return MemoryPlan(std::move(search));
}

}  // namespace

MemoryPlan::MemoryPlan(memory::BudgetSearch search) : search_(std::move(search)) {
  if (!search_.choice().empty()) active_ = std::make_unique<memory::PlannedBlocks>(search_.choice());
}

MemoryPlan fit(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, const Batch& batch,
               std::string_view budget, const FitOptions& options) {
  tune::FitTarget target{.formats = options.formats};
  if (budget == "least") {
    OXY_CHECK(options.max_slowdown >= 1, InvalidArgument, "max_slowdown is ", options.max_slowdown,
              ", expected at least 1: times as long as a step with everything kept.");
    target.max_slowdown = options.max_slowdown;
  }
  tune::Run run(model, optimizer, std::move(loss), {batch}, options.clip_norm);
  if (budget != "least") target.budget = memory::budget_bytes(budget, run.device());
  auto plan = tune::fit_run(run, target);
  OXY_CHECK(plan, InvalidArgument, tune::kNoBlocks);
  return *std::move(plan);
}

std::optional<MemoryPlan> tune::fit_run(tune::Run& run, const FitTarget& target) {
  const auto& batch = run.batches().front();
  const auto device = run.device();
  const memory::LimitPaused paused;
  const auto before = run.held_bytes(batch);
  const bool is_least = target.max_slowdown > 0;
  auto budget = target.budget.value_or(0);
  if (!target.budget && !is_least) budget = before + memory::available_bytes(device);
  if (target.most) budget = std::min(budget, *target.most);
  tune::Snapshot snapshot(run);
  struct Restored {
    tune::Snapshot& snapshot;
    ~Restored() { snapshot.restore(); }
  } const restored{snapshot};
  const memory::Meter whole({.device = device});
  double seconds = 0, relative_error = 0;
  const auto measured = [&](const memory::BlockChoice& choice) {
    const memory::PlannedBlocks active(choice);
    memory::synchronize(device);
    const auto began = std::chrono::steady_clock::now();
    const auto at_begin = before + whole.live_bytes();
    const memory::Meter meter({.device = device});
    take_step(run, batch, target.can_repeat);
    memory::synchronize(device);
    seconds = seconds_since(began);
    relative_error = active.relative_error();
    return at_begin + meter.peak_bytes();
  };
  std::vector<std::string> blocks;
  const auto recorded = [&](const memory::BlockChoice& choice) {
    const memory::PlannedBlocks active(choice);
    std::vector<memory::StepTape> tapes;
    for (std::size_t i = 0; i < kRecordings; ++i) {
      const memory::Meter meter({.device = device, .timeline = true});
      take_step(run, batch, target.can_repeat);
      const auto timeline = meter.timeline();
      if (blocks.empty()) blocks = blocks_of(timeline);
      tapes.push_back(memory::StepTape::of(timeline, blocks));
    }
    return memory::StepTape::steady(std::move(tapes));
  };
  std::optional<memory::StepTape> plain;
  std::int64_t base = 0, plain_peak = 0;
  try {
    take_step(run, batch, target.can_repeat);  // makes gradients and the optimizer's state
    base = before + whole.live_bytes();
    plain = recorded({});
    if (blocks.empty()) return std::nullopt;
    plain_peak = measured({});
  } catch (const std::exception& error) {
    if (is_least || !is_out_of_memory(error)) throw;
    plain.reset();
  }
  if (!plain) {
    snapshot.restore();
    return fit_unrecorded(run, target, snapshot, measured, budget);
  }
  auto& tape = *plain;
  std::vector<std::pair<memory::BlockAction, std::string>> failed;
  for (const auto action : memory::kRecordedActions) {
    const auto format = memory::format_of(action);
    if (format && std::find(target.formats.begin(), target.formats.end(), *format) == target.formats.end()) continue;
    try {
      tape.add(action, recorded({action, blocks}));
    } catch (const std::exception& error) {
      // The same step went well without it. The report says why it is left out.
      failed.emplace_back(action, error.what());
      snapshot.restore();
      take_step(run, batch, target.can_repeat);
    }
  }
  if (is_least) measured({});  // for the time of a plain step
  auto search = is_least ? memory::BudgetSearch::least(std::move(tape), base, plain_peak, seconds, target.max_slowdown)
                         : memory::BudgetSearch(std::move(tape), base, plain_peak, budget);
  for (const auto& [action, error] : failed) search.without(action, error);
  const auto time = [&](const memory::BlockChoice& choice) {
    std::array<double, kPairs> plain{}, planned{};
    for (std::size_t i = 0; i < kPairs; ++i) {
      measured(choice);
      planned[i] = seconds;
      measured({});
      plain[i] = seconds;
    }
    search.timed(median(plain), median(planned));
  };
  while (const auto choice = search.next()) {
    measured(*choice);  // what the first step under it takes once
    search.measured(measured(*choice));
    search.rounded(relative_error);
    if (search.is_bound_by_time()) time(*choice);
  }
  if (!search.choice().empty()) {
    if (!search.is_bound_by_time()) time(search.choice());
    const auto left = [&](const memory::BlockChoice& choice) {
      snapshot.restore();
      measured(choice);
      return snapshot.digest();
    };
    const auto kept = left({});
    search.compared(left({}) == kept ? std::optional<bool>(left(search.choice()) == kept) : std::nullopt);
  }
  return MemoryPlan(std::move(search));
}

}  // namespace oxytorch
