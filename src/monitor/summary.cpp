#include <algorithm>

#include "monitor/state.h"

namespace oxytorch::monitor {
namespace {

// Children after their parents, both in order of first entry.
void append_children(std::vector<PhaseSummary>& ordered, const std::vector<PhaseSummary>& found,
                     const std::vector<std::int32_t>& parents, std::int32_t parent, int depth) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (parents[i] != parent || found[i].time.count == 0) continue;
    ordered.push_back(found[i]);
    ordered.back().depth = depth;
    append_children(ordered, found, parents, static_cast<std::int32_t>(i), depth + 1);
  }
}

}  // namespace

ScalarTrack::Reading PerformanceMonitor::State::reading(std::uint32_t scalar) {
  ScalarTrack::Reading now = recorder.scalar_tracks[scalar].read();
  ScalarTrack::Reading late = drain.late_reading(scalar);
  if (late.count == 0) return now;
  if (now.count == 0) return late;
  const bool any_now = now.count > now.non_finite, any_late = late.count > late.non_finite;
  if (any_late) {
    now.min = any_now ? std::min(now.min, late.min) : late.min;
    now.max = any_now ? std::max(now.max, late.max) : late.max;
  }
  if (late.last_step >= now.last_step) now.last = late.last;
  now.last_step = std::max(now.last_step, late.last_step);
  now.count += late.count;
  now.non_finite += late.non_finite;
  now.sum += late.sum;
  now.curve.insert(now.curve.end(), late.curve.begin(), late.curve.end());
  std::stable_sort(now.curve.begin(), now.curve.end(),
                   [](const CurvePoint& a, const CurvePoint& b) { return a.x < b.x; });
  return now;
}

Summary PerformanceMonitor::State::summary() {
  Summary summary;
  std::vector<std::uint64_t> counts;
  std::int64_t between = 0, unattributed = 0;
  recorder.version.consistent([&] {
    summary.step = recorder.steps.read(counts);
    summary.samples = recorder.samples.get();
    between = recorder.between_ns.get();
    unattributed = recorder.unattributed_ns.get();
  });
  summary.steps = summary.step.count;
  summary.cancelled = recorder.cancelled.get();
  summary.phases_outside = recorder.phases_outside.get();
  summary.dropped = drain.dropped();
  summary.failed_sinks = drain.failed_sinks();
  summary.between_seconds = static_cast<double>(between) * 1e-9;
  const double total = summary.step.sum;
  if (total > 0) {
    summary.samples_per_second = static_cast<double>(summary.samples) / total;
    summary.other_share = static_cast<double>(unattributed) * 1e-9 / total;
  }

  const std::uint32_t phases = phase_names.count();
  std::vector<PhaseSummary> found(phases);
  std::vector<std::int32_t> parents(phases);
  for (std::uint32_t id = 0; id < phases; ++id) {
    const PhaseTrack& track = recorder.phase_tracks[id];
    PhaseSummary& phase = found[id];
    std::int64_t self = 0;
    recorder.version.consistent([&] {
      phase.time = track.total.read(counts);
      phase.entries = track.entries.get();
      self = track.self_ns.get();
      parents[id] = track.parent.get();
    });
    phase.name = phase_names[id];
    if (total > 0) {
      phase.share = phase.time.sum / total;
      phase.self_share = static_cast<double>(self) * 1e-9 / total;
    }
  }
  append_children(summary.phases, found, parents, -1, 0);

  for (std::uint32_t id = 0; id < scalar_names.count(); ++id) {
    const ScalarTrack::Reading reading = this->reading(id);
    if (reading.count == 0) continue;
    const std::uint64_t finite = reading.count - reading.non_finite;
    ScalarSummary scalar{
        std::string(scalar_names[id]), reading.count, reading.non_finite, reading.last, reading.min, reading.max, 0};
    if (finite > 0) scalar.mean = reading.sum / static_cast<double>(finite);
    summary.scalars.push_back(std::move(scalar));
  }
  return summary;
}

Curves PerformanceMonitor::State::curves() {
  Curves curves;
  recorder.version.consistent([&] { recorder.step_curve.read(curves.step_time); });
  for (std::uint32_t id = 0; id < scalar_names.count(); ++id) {
    NamedCurve curve{std::string(scalar_names[id]), reading(id).curve};
    if (!curve.points.empty()) curves.scalars.push_back(std::move(curve));
  }
  return curves;
}

}  // namespace oxytorch::monitor
