#include "oxytorch/tune/timing.h"

#include <algorithm>
#include <cmath>

#include "monitor/format.h"
#include "oxytorch/logging.h"
#include "oxytorch/statistics.h"
#include "oxytorch/tune/block.h"
#include "oxytorch/tune/certificate.h"
#include "tune/names.h"

namespace oxytorch::tune {
namespace {

constexpr double kLeastFetch = 0.01;  // of a step, for drawing its batch to be measured with it
constexpr int kFeedSteps = 6;         // in a row: one batch may be waited for while the next is ready
constexpr double kLeast = 1e-9;

/// Steps draw from the run's data inside.
class Drawing {
 public:
  Drawing(Workload& workload, bool wanted, bool& drawn) : workload_(workload), drawn_(drawn) {
    if (wanted) workload_.draw(true);
    drawn_ = wanted;
  }
  ~Drawing() {
    if (!std::exchange(drawn_, false)) return;
    try {
      workload_.draw(false);
    } catch (const std::exception& error) {
      log(LogLevel::Warn, std::string("accelerate: drawing batches did not end: ") + error.what(), "tune");
    }
  }
  Drawing(const Drawing&) = delete;
  Drawing& operator=(const Drawing&) = delete;

 private:
  Workload& workload_;
  bool& drawn_;
};

}  // namespace

Timing::Timing(Workload& workload, const std::vector<Offer>& offers) : workload_(workload) {
  for (const auto& offer : offers) traits_[offer.name] = offer.traits;
}

void Timing::rewind() {
  try {
    workload_.activate({});
  } catch (...) {
    workload_.restore();
    throw;
  }
  workload_.restore();
}

void Timing::recover() {
  try {
    rewind();
  } catch (const std::exception& error) {
    if (!workload_.told(error)) throw;
    rewind();  // the one that could not be reverted is out; the first failure is the one that is told
  }
  workload_.let_go();
}

bool Timing::baseline(const std::function<bool(double)>& is_short) {
  rewind();
  next_ = 0;
  fresh_ = 1;  // the first step makes the optimizer's state, the second finds the memory that the first freed
  warm_up();
  if (is_short && !is_short(last_)) {
    step_seconds_ = fastest_ = last_;
    rewind();
    return false;
  }
  std::vector<double> updates;
  auto* const on_host = workload_.on_host() ? &updates : nullptr;
  load_.begin();
  const double on_processor = workload_.processor_seconds();
  auto times = blocks(1, on_host);
  const double processor_step = (workload_.processor_seconds() - on_processor) / kBaselineBlocks;
  fastest_ = *std::min_element(times.begin(), times.end());
  steps_ = block_steps(median(times), workload_.on_host());
  if (steps_ > 1) times = blocks(steps_, on_host);
  disturbed_ = load_.end();
  step_seconds_ = median(times);
  const auto [least, most] = std::minmax_element(times.begin(), times.end());
  spread_ = (*most - *least) / step_seconds_;
  fastest_ = std::min(fastest_, *least);
  // A step that others hold up has used the processor no longer than ever.
  if (disturbed_ && on_host != nullptr) fastest_ = std::min(fastest_, std::max(processor_step, kLeast));
  if (updates.empty()) timed(1, &updates);
  optimizer_share_ = updates.empty() ? 0 : std::min(1.0, median(updates) / step_seconds_);
  if (const double fetching = workload_.drawing(step_seconds_); fetching > 0) {
    fetch_share_ = fetching / (fetching + step_seconds_);
    drawing_ = fetch_share_ >= kLeastFetch;
    if (drawing_) {
      optimizer_share_ *= step_seconds_ / (step_seconds_ + fetching);
      step_seconds_ += fetching;
      fastest_ += fetching;
    }
  }
  rewind();
  return true;
}

std::pair<double, double> Timing::untouched() {
  rewind();
  next_ = 0;
  fresh_ = 1;
  std::vector<double> times;
  const double before = faults_;
  {
    const Drawing drawing(workload_, drawing_, drawn_);
    warm_up();
    times = blocks(steps_);
  }
  rewind();
  return {median(times), std::exchange(faults_, before)};
}

std::vector<double> Timing::blocks(int steps, std::vector<double>* updates) {
  std::vector<double> times;
  const double before = workload_.page_faults();
  for (int i = 0; i < kBaselineBlocks; ++i) times.push_back(timed(steps, updates));
  faults_ = (workload_.page_faults() - before) / steps / kBaselineBlocks;
  return times;
}

std::pair<PairedTestResult, double> Timing::compare(const Names& incumbent, const Names& challenger,
                                                    PairedTestOptions options) {
  const int usual = steps_;
  for (const auto& [name, traits] : traits_) {
    if (traits.feeds && holds(incumbent, name) != holds(challenger, name)) steps_ = std::max(usual, kFeedSteps);
  }
  struct Usual {
    int& steps;
    int value;
    ~Usual() { steps = value; }
  } const back{steps_, usual};
  const Drawing drawing(workload_, drawing_, drawn_);
  guarded({}, [&] { workload_.restore(); });
  guarded(incumbent, [&] { warm_up(); });
  const double incumbent_seconds = last_;
  const double began = workload_.seconds();
  const int warm = guarded(challenger, [&] { return warm_up(); });
  const double warming = workload_.seconds() - began;
  if (!workload_.on_host()) {  // the host's part of a short step is a larger one
    steps_ = std::max(steps_, block_steps(std::min(incumbent_seconds, last_), false));
  }
  // The paired test counts one step for each block; what it may take is for all steps, those between blocks too.
  const double taken = steps_ + settle(incumbent, challenger);
  options.budget_seconds /= taken;
  options.most_seconds /= taken;
  options.repay_steps /= taken;
  PairedTest paired_test(options);
  load_.begin();
  const bool differ = keeps_heap(incumbent) != keeps_heap(challenger);
  std::vector<double> faults, unseen;  // of the challenger's steps; of those that keep nothing
  for (std::size_t half = 0;; ++half) {
    const auto side = paired_test.next();
    if (!side) break;
    // Both sides of a pair take the same batches.
    next_ = half / 2 * static_cast<std::size_t>(steps_);
    const bool is_challenger = *side == Side::Challenger;
    const Names& names = is_challenger ? challenger : incumbent;
    double seen = 0;
    double seconds = guarded(names, [&] { return block(seen); });
    if (differ && !keeps_heap(names)) {
      unseen.push_back(std::max(0.0, faults_ - seen));
      seconds += least_fault_seconds(unseen.back(), seconds);
    }
    paired_test.record(*side, seconds);
    if (is_challenger) faults.push_back(seen);
  }
  disturbed_ = load_.end();
  challenger_faults_ = faults.empty() ? 0 : median(faults);
  auto result = paired_test.result();
  if (const double missed = unseen.empty() ? 0 : median(unseen); least_fault_seconds(missed, step_seconds_) > 0) {
    result.reason += " " + monitor::format_count(std::round(missed)) +
                     " page faults of a step as given, which did not come up here, are counted in.";
  }
  return {result, std::max(0.0, warming - warm * result.challenger)};
}

std::string Timing::blame(const SideFailed& failure) {
  guarded({}, [&] { workload_.restore(); });
  try {
    timed(1);  // of the batch at which the failed block began
  } catch (...) {
    workload_.restore();
    throw;
  }
  workload_.restore();
  return failure.what();
}

void Timing::switch_to(const Names& names) {
  fresh_ = settle(names, workload_.active());
  workload_.activate(names);
}

int Timing::settle(const Names& one, const Names& other) const {
  int steps = 0;
  for (const auto& [name, traits] : traits_) {
    if (holds(one, name) != holds(other, name)) steps = std::max(steps, traits.settle);
  }
  return settle_steps(steps, step_seconds_);
}

bool Timing::keeps_heap(const Names& names) const {
  return std::any_of(traits_.begin(), traits_.end(), [&](const auto& one) {
    const auto& [name, traits] = one;
    // What it interacts with is a pool, which keeps it too.
    return traits.group == "host_memory" && (holds(names, name) || holds_any(names, traits.interacts));
  });
}

double Timing::block(double& faults) {
  const auto start = next_;
  if (fresh_ > 0) timed(fresh_);
  next_ = start;
  const double before = workload_.page_faults();
  const double seconds = timed(steps_);
  faults = (workload_.page_faults() - before) / steps_;
  return seconds;
}

int Timing::warm_up() {
  int count = 0;
  for (const auto first : workload_.shapes()) {
    last_ = std::max(workload_.steps(first, 1, /*updates=*/false, /*drawn=*/false).seconds, kLeast);
    next_ = first + 1;
    ++count;
  }
  if (count <= fresh_) timed(fresh_ + 1 - count);
  return std::max(count, fresh_ + 1);
}

double Timing::timed(int steps, std::vector<double>* updates) {
  const auto times = workload_.steps(next_, steps, updates != nullptr, drawn_);
  next_ += static_cast<std::size_t>(steps);
  if (updates != nullptr) updates->insert(updates->end(), times.updates.begin(), times.updates.end());
  return last_ = std::max(times.seconds / steps, kLeast);
}

std::pair<std::map<std::string, double>, std::string> Timing::updates(const Names& names, std::uint64_t seed) {
  std::map<std::string, double> found;
  std::string fastest;
  if (names.empty() || !workload_.has_update()) return {found, fastest};
  guarded({}, [&] { workload_.restore(); });
  next_ = 0;
  timed(1);  // leaves gradients
  const auto seconds = [&] { return update_seconds(kBaselineBlocks); };
  const double given = guarded({}, seconds);
  for (const auto& name : names) {
    try {
      found[name] = given / guarded({name}, seconds);
      if (fastest.empty() || found[name] > found[fastest]) fastest = name;
    } catch (const SideFailed&) {
    }
  }
  if (!fastest.empty() && !wins(fastest, seed)) fastest.clear();
  guarded({}, [&] { workload_.restore(); });
  return {found, fastest};
}

bool Timing::wins(const std::string& name, std::uint64_t seed) {
  PairedTest paired_test(PairedTestOptions::canary(seed));
  try {
    while (const auto side = paired_test.next()) {
      const auto names = *side == Side::Challenger ? Names{name} : Names{};
      paired_test.record(*side, guarded(names, [&] { return update_seconds(1); }));
    }
  } catch (const SideFailed&) {
    return false;
  }
  return paired_test.result().decision == Decision::Accept;
}

double Timing::update_seconds(int count) {
  workload_.update();
  std::vector<double> times;
  for (int i = 0; i < count; ++i) times.push_back(std::max(workload_.update(), kLeast));
  return median(times);
}

}  // namespace oxytorch::tune
