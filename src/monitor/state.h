/// What a PerformanceMonitor holds, and what it makes of it.
#pragma once

#include <string>
#include <vector>

#include "monitor/drain.h"
#include "monitor/names.h"
#include "monitor/recorder.h"

namespace oxytorch::monitor {

struct NamedCurve {
  std::string name;
  std::vector<CurvePoint> points;
};

/// Step time in seconds first, then the scalars that have points.
struct Curves {
  std::vector<CurvePoint> step_time;
  std::vector<NamedCurve> scalars;
};

struct PerformanceMonitor::State {
  explicit State(const MonitorOptions& options)
      : phase_names(options.max_phases),
        scalar_names(options.max_scalars),
        recorder(options, phase_names, scalar_names),
        drain(options, recorder, phase_names, scalar_names) {}

  void close() { drain.close(); }
  Summary summary();
  Curves curves();
  /// Immediate and late values of a scalar as one.
  ScalarTrack::Reading reading(std::uint32_t scalar);

  Names phase_names, scalar_names;
  Recorder recorder;
  Drain drain;
};

std::string table_text(const Summary& summary, TextStyle style);
Report build_report(std::string title, const Summary& summary, const Curves& curves);

}  // namespace oxytorch::monitor
