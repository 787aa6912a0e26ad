#include "oxytorch/monitor/performance_monitor.h"

#include <cmath>

#include "monitor/state.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"

namespace oxytorch::monitor {

PerformanceMonitor::PerformanceMonitor(const MonitorOptions& options, std::vector<std::shared_ptr<Sink>> sinks) {
  OXY_CHECK(
      options.ring_records >= 1 && options.max_phases >= 1 && options.max_scalars >= 1 && options.curve_points >= 2,
      InvalidArgument, "a monitor needs ring_records, max_phases and max_scalars of at least 1 and curve_points of ",
      "at least 2; got ", options.ring_records, ", ", options.max_phases, ", ", options.max_scalars, " and ",
      options.curve_points, ".");
  OXY_CHECK(std::isfinite(options.drain_seconds) && options.drain_seconds >= 0, InvalidArgument, "drain_seconds is ",
            options.drain_seconds, "; use 0 for no background thread or a positive number.");
  state_ = std::make_unique<State>(options);
  for (auto& sink : sinks) add_sink(std::move(sink));
}

PerformanceMonitor::~PerformanceMonitor() {
  try {
    state_->close();
  } catch (const std::exception& error) {
    log(LogLevel::Error, std::string("the monitor could not deliver its last records: ") + error.what(), "monitor");
  }
}

PhaseId PerformanceMonitor::phase(std::string_view name) {
  return PhaseId{state_->phase_names.intern(name, "phase", "max_phases")};
}

ScalarId PerformanceMonitor::scalar(std::string_view name) {
  return ScalarId{state_->scalar_names.intern(name, "scalar", "max_scalars")};
}

void PerformanceMonitor::begin_step(std::int64_t samples) { state_->recorder.begin_step(samples); }
void PerformanceMonitor::end_step() { state_->recorder.end_step(); }
void PerformanceMonitor::cancel_step() noexcept { state_->recorder.cancel_step(); }
void PerformanceMonitor::set_samples(std::int64_t samples) { state_->recorder.set_samples(samples); }
void PerformanceMonitor::begin_phase(PhaseId id) { state_->recorder.begin_phase(static_cast<std::uint32_t>(id)); }
void PerformanceMonitor::end_phase(PhaseId id) { state_->recorder.end_phase(static_cast<std::uint32_t>(id)); }
void PerformanceMonitor::leave_phase(PhaseId id) noexcept {
  state_->recorder.leave_phase(static_cast<std::uint32_t>(id));
}
void PerformanceMonitor::scalar(ScalarId id, double value) {
  state_->recorder.scalar(static_cast<std::uint32_t>(id), value);
}
std::uint64_t PerformanceMonitor::current_step() const noexcept { return state_->recorder.current_step(); }
bool PerformanceMonitor::in_step() const noexcept { return state_->recorder.in_step(); }
void PerformanceMonitor::set_next_step(std::uint64_t step) { state_->recorder.set_next_step(step); }

void PerformanceMonitor::add_sink(std::shared_ptr<Sink> sink) { state_->drain.add_sink(std::move(sink)); }
void PerformanceMonitor::set_late_source(std::function<void(std::vector<LateScalar>&)> source) {
  state_->drain.set_late_source(std::move(source));
}
void PerformanceMonitor::flush() { state_->drain.flush(); }
void PerformanceMonitor::close() { state_->close(); }

Summary PerformanceMonitor::summary() {
  state_->drain.collect();
  return state_->summary();
}

std::string PerformanceMonitor::table(TextStyle style) { return table_text(summary(), style); }

Report PerformanceMonitor::report(std::string title) {
  const Summary summary = this->summary();
  return build_report(std::move(title), summary, state_->curves());
}

}  // namespace oxytorch::monitor
