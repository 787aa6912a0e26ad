/// Step and phase times of a training loop.
///
///     monitor::PerformanceMonitor mon;
///     const auto forward = mon.phase("forward");
///     for (...) {
///       monitor::Step step(mon, batch_size);
///       monitor::Phase phase(mon, forward);
///     }
///     std::cout << mon.table();
///
/// Threads: one thread steps (begin_step to end_step, phases, scalars); any other may intern names, flush and read
/// summaries at the same time. Cost: nothing between begin_step and end_step allocates, locks or makes a system call;
/// the memory is taken at construction, and running statistics keep it constant however long the run.
///
/// Times are the host's. On a device that runs behind the host they are the time to launch, not to compute.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/monitor/report.h"
#include "oxytorch/monitor/sink.h"

namespace oxytorch::monitor {

/// An interned name: an index, valid for the monitor that made it.
enum class PhaseId : std::uint32_t {};
enum class ScalarId : std::uint32_t {};

struct MonitorOptions {
  std::size_t ring_records = 1024;  ///< finished steps kept for the sinks between drains; the oldest give way
  std::size_t max_phases = 32;      ///< distinct phase names
  std::size_t max_scalars = 64;     ///< distinct scalar names
  std::size_t curve_points = 512;   ///< points kept of each curve; a longer run merges neighbours
  /// Longest time between two drains by a background thread, which starts with the first sink; 0: no thread, the
  /// user flushes. The thread drains earlier when the ring fills faster.
  double drain_seconds = 0;
};

/// A distribution of seconds. Quantiles come from a logarithmic histogram and are within 1.6 % of the value.
struct Distribution {
  std::uint64_t count = 0;
  double sum = 0, min = 0, max = 0, mean = 0;
  double p10 = 0, median = 0, p90 = 0;
};

struct PhaseSummary {
  std::string name;
  int depth = 0;              ///< 0 directly under the step, as first entered
  std::uint64_t entries = 0;  ///< over all steps
  double share = 0;           ///< of all step time, nested phases included
  double self_share = 0;      ///< of all step time, without nested phases
  Distribution time;          ///< per step that entered it, seconds, nested phases included
};

struct ScalarSummary {
  std::string name;
  std::uint64_t count = 0;
  std::uint64_t non_finite = 0;  ///< of `count`; min, max and mean leave them out
  double last = 0, min = 0, max = 0, mean = 0;
};

struct Summary {
  std::uint64_t steps = 0;
  std::uint64_t cancelled = 0;       ///< steps left by an exception: not timed
  std::uint64_t dropped = 0;         ///< records that no sink received because the ring was full
  std::uint64_t phases_outside = 0;  ///< phases entered outside any step: not timed
  std::int64_t samples = 0;
  double samples_per_second = 0;     ///< samples over the time inside steps
  double between_seconds = 0;        ///< time between one step's end and the next one's start
  Distribution step;                 ///< step durations, seconds
  double other_share = 0;            ///< of step time, in no phase
  std::vector<PhaseSummary> phases;  ///< in order of first entry, children after their parents
  std::vector<ScalarSummary> scalars;
  std::vector<std::string> failed_sinks;  ///< "name: why" of sinks that threw
};

/// A scalar that was measured on a device and read after its step.
struct LateScalar {
  std::uint64_t step = 0;
  ScalarId id{};
  double value = 0;
};

class OXY_API PerformanceMonitor {
 public:
  /// Throws Error(InvalidArgument) for a zero capacity or a negative or non-finite interval.
  explicit PerformanceMonitor(const MonitorOptions& options = {}, std::vector<std::shared_ptr<Sink>> sinks = {});
  /// Closes; an error that nobody fetched through flush() or close() is logged.
  ~PerformanceMonitor();
  PerformanceMonitor(const PerformanceMonitor&) = delete;
  PerformanceMonitor& operator=(const PerformanceMonitor&) = delete;

  /// The id of a name, made on first use (which allocates; intern before the loop). Any thread.
  /// Throws Error(InvalidArgument) for an empty name and Error(OutOfRange) beyond max_phases or max_scalars.
  PhaseId phase(std::string_view name);
  ScalarId scalar(std::string_view name);

  // The step path: one thread at a time.

  /// Starts a step of `samples` samples. Throws Error(InvalidState) inside a step, Error(InvalidArgument) below 0.
  void begin_step(std::int64_t samples = 0);
  /// Ends it and records it. Throws Error(InvalidState) outside a step or while a phase is open.
  void end_step();
  /// Ends it, open phases included, without recording it. Nothing outside a step.
  void cancel_step() noexcept;
  /// Sets the samples of the step in progress, for those who learn the number inside it.
  void set_samples(std::int64_t samples);
  /// Phases nest. Outside a step a phase is not timed, only counted in Summary::phases_outside.
  /// Throws Error(OutOfRange) for an id of another monitor, Error(InvalidState) beyond 64 levels or from another
  /// thread than the step's.
  void begin_phase(PhaseId id);
  /// Throws Error(InvalidState) unless `id` is the phase entered last.
  void end_phase(PhaseId id);
  /// As end_phase while an exception leaves the scope: does nothing where end_phase would throw.
  void leave_phase(PhaseId id) noexcept;
  /// Records a value for the step in progress (the last call wins) or, outside a step, for the latest one.
  void scalar(ScalarId id, double value);
  /// The step in progress, or else the latest; 0 before the first, which is number 1.
  [[nodiscard]] std::uint64_t current_step() const noexcept;
  [[nodiscard]] bool in_step() const noexcept;
  /// The number that the next step gets, for resumed runs. Throws Error(InvalidState) inside a step.
  void set_next_step(std::uint64_t step);

  // Any thread. These lock and allocate.

  void add_sink(std::shared_ptr<Sink> sink);
  /// `source` is called at the start of each drain, on the draining thread, and appends the values it can now read.
  void set_late_source(std::function<void(std::vector<LateScalar>&)> source);
  /// Hands everything finished to the sinks. Throws what a sink threw, once.
  void flush();
  /// Flushes, closes the sinks and stops the background thread. Later steps still count in the summary. Idempotent.
  void close();
  /// Statistics since construction; finished steps only.
  [[nodiscard]] Summary summary();
  /// The summary as text.
  [[nodiscard]] std::string table(TextStyle style = TextStyle::Auto);
  /// Summary, step-time curve, phase shares and the scalars' curves.
  [[nodiscard]] Report report(std::string title = "Training performance");

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A step for the length of a scope. A scope left by an exception cancels the step.
class Step {
 public:
  explicit Step(PerformanceMonitor& monitor, std::int64_t samples = 0)
      : monitor_(monitor), exceptions_(std::uncaught_exceptions()) {
    monitor_.begin_step(samples);
  }
  ~Step() noexcept(false) {
    if (std::uncaught_exceptions() > exceptions_) {
      monitor_.cancel_step();
    } else {
      monitor_.end_step();
    }
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

 private:
  PerformanceMonitor& monitor_;
  int exceptions_;
};

/// A phase for the length of a scope.
class Phase {
 public:
  Phase(PerformanceMonitor& monitor, PhaseId id) : monitor_(monitor), id_(id), exceptions_(std::uncaught_exceptions()) {
    monitor_.begin_phase(id_);
  }
  ~Phase() noexcept(false) {
    if (std::uncaught_exceptions() > exceptions_) {
      monitor_.leave_phase(id_);
    } else {
      monitor_.end_phase(id_);
    }
  }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  PerformanceMonitor& monitor_;
  PhaseId id_;
  int exceptions_;
};

}  // namespace oxytorch::monitor
