#include "tune/bench.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>

#include "oxytorch/clock.h"
#include "oxytorch/statistics.h"
#include "oxytorch/tune/block.h"

namespace oxytorch::tune {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void synchronize(at::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

std::string Bench::first_line(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torchs != nullptr ? torchs->what_without_backtrace() : error.what();
  return text.substr(0, std::min<std::size_t>(text.find('\n'), 200));
}

void Bench::rewind() {
  try {
    run_.bring({});
  } catch (...) {
    run_.bring({});  // the one that could not be taken back is out; the others follow
    escrow_.restore();
    throw;
  }
  escrow_.restore();
}

double Bench::baseline() {
  rewind();
  next_ = 0;
  warm_up();
  const auto median_of = [&](int steps) {
    std::vector<double> times;
    for (int i = 0; i < kBaselineBlocks; ++i) times.push_back(timed(steps));
    return median(times);
  };
  timing_updates_ = run_.device().is_cpu();  // elsewhere timing an update waits, and would lengthen the step
  updates_.clear();
  step_seconds_ = median_of(1);
  steps_ = block_steps(step_seconds_);
  if (steps_ > 1) step_seconds_ = median_of(steps_);
  timing_updates_ = true;
  if (updates_.empty()) step();
  timing_updates_ = false;
  optimizer_share_ = std::min(1.0, median(updates_) / step_seconds_);
  rewind();
  return step_seconds_;
}

std::pair<DuelResult, double> Bench::duel(const Names& incumbent, const Names& challenger, const DuelOptions& options) {
  DuelOptions measured = options;
  // The duel counts one step for each block; what it may take is for all steps, those between blocks too.
  const double taken = steps_ + settle(incumbent, challenger);
  measured.budget_seconds /= taken;
  measured.repay_steps /= taken;
  Duel duel(measured);
  guarded({}, [&] { escrow_.restore(); });
  guarded(incumbent, [&] { warm_up(); });
  const auto began = Clock::now();
  const int warm = guarded(challenger, [&] { return warm_up(); });
  const double warming = seconds_since(began);
  for (std::size_t half = 0;; ++half) {
    const auto side = duel.next();
    if (!side) break;
    // Both sides of a pair take the same batches.
    next_ = half / 2 * static_cast<std::size_t>(steps_);
    duel.record(*side, guarded(*side == Side::Challenger ? challenger : incumbent, [&] { return block(); }));
  }
  const auto result = duel.result();
  return {result, std::max(0.0, warming - warm * result.challenger)};
}

void Bench::plain_step() {
  guarded({}, [&] {
    escrow_.restore();
    next_ = 0;
    step();
  });
  escrow_.restore();
}

void Bench::bring(const Names& names) {
  fresh_ = settle(names, run_.in_force());
  run_.bring(names);
}

int Bench::settle(const Names& one, const Names& other) const {
  int steps = 0;
  const auto lacking = [&](const Names& some, const Names& all) {
    for (const auto& name : some) {
      if (std::find(all.begin(), all.end(), name) != all.end()) continue;
      steps = std::max(steps, find_strategy(name).traits.settle);
    }
  };
  lacking(one, other);
  lacking(other, one);
  return settle_steps(steps, step_seconds_);
}

double Bench::block() {
  const auto start = next_;
  for (int i = 0; i < fresh_; ++i) step();
  next_ = start;
  return timed(steps_);
}

int Bench::warm_up() {
  std::vector<std::vector<std::int64_t>> seen;
  int count = 0;
  for (std::size_t i = 0; i < run_.batches().size(); ++i) {
    auto shape = run_.batches()[i].input.sizes().vec();
    if (std::find(seen.begin(), seen.end(), shape) != seen.end()) continue;
    seen.push_back(std::move(shape));
    next_ = i;
    step();
    ++count;
  }
  for (; count <= fresh_; ++count) step();
  synchronize(run_.device());
  return count;
}

double Bench::timed(int steps) {
  synchronize(run_.device());
  const auto began = Clock::now();
  for (int i = 0; i < steps; ++i) step();
  synchronize(run_.device());
  return std::max(seconds_since(began) / steps, 1e-9);
}

std::pair<std::map<std::string, double>, std::string> Bench::updates(const Names& names, std::uint64_t seed) {
  std::map<std::string, double> found;
  std::string fastest;
  if (names.empty()) return {found, fastest};
  const auto seconds = [&] {
    update_seconds();
    std::vector<double> times;
    for (int i = 0; i < kBaselineBlocks; ++i) times.push_back(update_seconds());
    return median(times);
  };
  guarded({}, [&] { escrow_.restore(); });
  run_.backward(run_.batches().front());
  const double given = guarded({}, seconds);
  for (const auto& name : names) {
    try {
      found[name] = given / guarded({name}, seconds);
      if (fastest.empty() || found[name] > found[fastest]) fastest = name;
    } catch (const SideFailed&) {
    }
  }
  if (!fastest.empty() && !wins(fastest, seed)) fastest.clear();
  guarded({}, [&] { escrow_.restore(); });
  return {found, fastest};
}

bool Bench::wins(const std::string& name, std::uint64_t seed) {
  Duel duel(DuelOptions::canary(seed));
  const auto seconds = [&] {
    update_seconds();
    return update_seconds();
  };
  try {
    while (const auto side = duel.next()) {
      duel.record(*side, guarded(*side == Side::Challenger ? Names{name} : Names{}, seconds));
    }
  } catch (const SideFailed&) {
    return false;
  }
  return duel.result().decision == Decision::Accept;
}

double Bench::update_seconds() {
  synchronize(run_.device());
  const auto began = Clock::now();
  run_.update();
  synchronize(run_.device());
  return std::max(seconds_since(began), 1e-9);
}

void Bench::step() {
  const auto& batch = run_.batches()[next_++ % run_.batches().size()];
  const auto loss = run_.backward(batch);  // Run::step() in its two parts
  if (timing_updates_) {
    updates_.push_back(update_seconds());
  } else {
    run_.update();
  }
  if (run_.device().is_cpu()) loss_ = loss.item<double>();
}

}  // namespace oxytorch::tune
