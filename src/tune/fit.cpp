#include "oxytorch/tune/fit.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/clock.h"
#include "oxytorch/error.h"
#include "oxytorch/memory/meter.h"
#include "oxytorch/system.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/units.h"
#include "tune/fit_run.h"
#include "tune/optimizer_state.h"

namespace oxytorch {
namespace {

constexpr std::size_t kPairs = 3;       // of steps with and without a plan, for the time it costs
constexpr std::size_t kRecordings = 3;  // of the step, for the time that each block takes

/// Bytes of the tensors that a step begins with, each memory once. Gradients are made anew.
std::int64_t bytes_before(const tune::Run& run, const Batch& batch) {
  std::set<const void*> seen;
  std::int64_t bytes = 0;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() && seen.insert(tensor.storage().unsafeGetStorageImpl()).second)
      bytes += static_cast<std::int64_t>(tensor.storage().nbytes());
  };
  for (const auto& parameter : run.model().parameters()) add(parameter);
  for (const auto& buffer : run.model().buffers()) add(buffer);
  for (const auto& parameter : run.parameters()) add(parameter);
  for (const auto& tensor : batch.tensors()) add(tensor);
  for (const auto& slot : run.slots()) {
    for (auto* const optimizer : {&slot.original(), &slot.optimizer()}) {  // seldom two
      tune::each_state_tensor(*optimizer, [&](const at::Tensor& /*parameter*/, at::Tensor& value) { add(value); });
    }
  }
  return bytes;
}

/// Of all blocks that the step calls, in order.
std::vector<std::string> blocks_of(const memory::Timeline& timeline) {
  std::vector<std::string> found;
  for (const auto& mark : timeline.marks) {
    const auto& name = timeline.names[static_cast<std::size_t>(mark.region)];
    if (mark.begins && std::find(found.begin(), found.end(), name) == found.end()) found.push_back(name);
  }
  return found;
}

/// A whole step. Where batches are accumulated, one with the gradients of an earlier batch.
void take_step(tune::Run& run, const Batch& batch) {
  if (run.accumulation == 1) {
    run.step(batch);
    return;
  }
  run.zero_grad(0);
  for (int i = 0; i < 2; ++i) run.loss(batch).backward();
  run.update();
}

double median(std::array<double, kPairs> values) {
  std::sort(values.begin(), values.end());
  return values[kPairs / 2];
}

}  // namespace

MemoryPlan::MemoryPlan(memory::BudgetSearch search) : search_(std::move(search)) {
  if (!search_.recomputed().empty()) active_ = std::make_unique<memory::RunAgain>(search_.recomputed());
}

MemoryPlan fit(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, const Batch& batch,
               std::string_view budget, double clip_norm) {
  const auto limit = Size::parse(budget).resolve(read_memory().limit.value_or(0));
  tune::Run run(model, optimizer, std::move(loss), {batch}, clip_norm);
  auto plan = tune::fit_run(run, static_cast<std::int64_t>(limit));
  OXY_CHECK(plan, InvalidArgument, tune::kNoBlocks);
  return *std::move(plan);
}

std::optional<MemoryPlan> tune::fit_run(tune::Run& run, std::optional<std::int64_t> budget) {
  const auto& batch = run.batches().front();
  OXY_CHECK(run.device().is_cpu(), NotSupported, "the model is on ", run.device().str(),
            ", and only the memory of CPU tensors is planned yet.");
  const memory::LimitPaused paused;
  const auto before = bytes_before(run, batch);
  if (!budget) budget = before + memory::available_bytes();
  tune::Snapshot snapshot(run);
  struct Restored {
    tune::Snapshot& snapshot;
    ~Restored() { snapshot.restore(); }
  } const restored{snapshot};
  const memory::Meter whole;
  take_step(run, batch);  // makes gradients and the optimizer's state
  const auto base = before + whole.live_bytes();
  double seconds = 0;
  const auto measured = [&](const std::vector<std::string>& again) {
    const memory::RunAgain active(again);
    const auto began = std::chrono::steady_clock::now();
    const auto at_begin = before + whole.live_bytes();
    const memory::Meter meter;
    take_step(run, batch);
    seconds = seconds_since(began);
    return at_begin + meter.peak_bytes();
  };
  std::vector<memory::Timeline> timelines;
  for (std::size_t i = 0; i < kRecordings; ++i) {
    const memory::Meter meter({.timeline = true});
    take_step(run, batch);
    timelines.push_back(meter.timeline());
  }
  const auto blocks = blocks_of(timelines.back());
  if (blocks.empty()) return std::nullopt;
  std::vector<memory::StepTape> tapes;
  for (const auto& timeline : timelines) tapes.push_back(memory::StepTape::of(timeline, blocks));
  memory::BudgetSearch search(memory::StepTape::steady(std::move(tapes)), base, measured({}), *budget);
  while (const auto again = search.next()) {
    measured(*again);  // what the first step under it takes once
    search.measured(measured(*again));
  }
  if (!search.recomputed().empty()) {
    std::array<double, kPairs> plain{}, planned{};
    for (std::size_t i = 0; i < kPairs; ++i) {
      measured(search.recomputed());
      planned[i] = seconds;
      measured({});
      plain[i] = seconds;
    }
    search.timed(median(plain), median(planned));
    const auto left = [&](const std::vector<std::string>& again) {
      snapshot.restore();
      measured(again);
      return snapshot.digest();
    };
    const auto kept = left({});
    search.compared(left({}) == kept ? std::optional<bool>(left(search.recomputed()) == kept) : std::nullopt);
  }
  return MemoryPlan(std::move(search));
}

}  // namespace oxytorch
