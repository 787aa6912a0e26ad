#include "tune/bench.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/types.h>

#include <algorithm>
#include <tuple>

#include "oxytorch/statistics.h"
#include "oxytorch/tune/block.h"
#include "tune/sources.h"

namespace oxytorch::tune {
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
  fresh_ = 1;  // the first step makes the optimizer's state, the second finds the memory that the first freed
  warm_up();
  timing_updates_ = run_.device().is_cpu();  // elsewhere timing an update waits, and would lengthen the step
  updates_.clear();
  load_.begin();
  const double on_processor = thread_seconds_now();
  auto [times, faults] = blocks(1);
  const double processor_step = (thread_seconds_now() - on_processor) / kBaselineBlocks;
  fastest_ = *std::min_element(times.begin(), times.end());
  steps_ = block_steps(median(times));
  if (steps_ > 1) std::tie(times, faults) = blocks(steps_);
  disturbed_ = load_.end();
  step_seconds_ = median(times);
  const auto [least, most] = std::minmax_element(times.begin(), times.end());
  spread_ = (*most - *least) / step_seconds_;
  faults_ = faults;
  fastest_ = std::min(fastest_, *least);
  // A step that others hold up has used the processor no longer than ever.
  if (disturbed_ && run_.device().is_cpu()) fastest_ = std::min(fastest_, std::max(processor_step, 1e-9));
  timing_updates_ = true;
  if (updates_.empty()) step();
  timing_updates_ = false;
  optimizer_share_ = std::min(1.0, median(updates_) / step_seconds_);
  rewind();
  return step_seconds_;
}

std::pair<double, double> Bench::untouched() {
  rewind();
  next_ = 0;
  fresh_ = 1;
  warm_up();
  const auto [times, faults] = blocks(steps_);
  rewind();
  return {median(times), faults};
}

std::pair<std::vector<double>, double> Bench::blocks(int steps) {
  std::vector<double> times;
  const auto before = page_faults_now();
  for (int i = 0; i < kBaselineBlocks; ++i) times.push_back(timed(steps));
  return {times, static_cast<double>(page_faults_now() - before) / steps / kBaselineBlocks};
}

std::pair<DuelResult, double> Bench::duel(const Names& incumbent, const Names& challenger, const DuelOptions& options) {
  DuelOptions measured = options;
  // The duel counts one step for each block; what it may take is for all steps, those between blocks too.
  const double taken = steps_ + settle(incumbent, challenger);
  measured.budget_seconds /= taken;
  measured.most_seconds /= taken;
  measured.repay_steps /= taken;
  Duel duel(measured);
  guarded({}, [&] { escrow_.restore(); });
  guarded(incumbent, [&] { warm_up(); });
  const double began = seconds_now();
  const int warm = guarded(challenger, [&] { return warm_up(); });
  const double warming = seconds_now() - began;
  load_.begin();
  for (std::size_t half = 0;; ++half) {
    const auto side = duel.next();
    if (!side) break;
    // Both sides of a pair take the same batches.
    next_ = half / 2 * static_cast<std::size_t>(steps_);
    duel.record(*side, guarded(*side == Side::Challenger ? challenger : incumbent, [&] { return block(); }));
  }
  disturbed_ = load_.end();
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
  const double began = seconds_now();
  for (int i = 0; i < steps; ++i) step();
  synchronize(run_.device());
  return std::max((seconds_now() - began) / steps, 1e-9);
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
  const double began = seconds_now();
  run_.update();
  synchronize(run_.device());
  return std::max(seconds_now() - began, 1e-9);
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
