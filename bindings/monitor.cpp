#include "oxytorch/monitor.h"

#include <pybind11/functional.h>

#include "monitor_step.h"
#include "path.h"

namespace oxytorch::bindings {

namespace {

using monitor::Distribution;
using monitor::PhaseSummary;
using monitor::ScalarSummary;
using monitor::Sink;
using monitor::StepRecord;
using monitor::Summary;

// A Python function of a list of dicts.
using Callback = py::typing::Callable<py::object(py::typing::List<py::typing::Dict<py::str, py::object>>)>;

// Hands each batch of records to a Python function as dicts, as JsonlSink writes them.
class CallbackSink : public Sink {
 public:
  explicit CallbackSink(py::function function) : function_(std::move(function)) {}
  ~CallbackSink() override {
    const py::gil_scoped_acquire gil;
    records_.release().dec_ref();
    function_.release().dec_ref();
  }
  [[nodiscard]] std::string name() const override { return "callback"; }
  void write(const StepRecord& record) override {
    const py::gil_scoped_acquire gil;
    py::dict entry, scalars;
    entry["step"] = record.step;
    if (record.dropped_before > 0) entry["dropped_before"] = record.dropped_before;
    if (record.timed) {
      py::dict phases, parents;
      for (const auto& phase : record.phases) {
        phases[py::str(std::string(phase.name))] = static_cast<double>(phase.total_ns) * 1e-9;
        if (phase.parent >= 0) {
          parents[py::str(std::string(phase.name))] =
              std::string(record.phases[static_cast<std::size_t>(phase.parent)].name);
        }
      }
      entry["time"] = record.unix_seconds;
      entry["duration"] = static_cast<double>(record.duration_ns) * 1e-9;
      entry["gap"] = static_cast<double>(record.gap_ns) * 1e-9;
      entry["samples"] = record.samples;
      entry["phases"] = phases;
      if (!parents.empty()) entry["parents"] = parents;
    }
    for (const auto& scalar : record.scalars) scalars[py::str(std::string(scalar.name))] = scalar.value;
    entry["scalars"] = scalars;
    records_.append(entry);
  }
  void flush() override {
    const py::gil_scoped_acquire gil;
    py::list batch = std::move(records_);
    records_ = py::list();
    if (!batch.empty()) function_(batch);
  }

 private:
  py::function function_;
  py::list records_;
};

std::shared_ptr<Sink> make_console(double every) {
  return std::make_shared<monitor::ConsoleSink>(every, [](std::string_view line) {
    const py::gil_scoped_acquire gil;
    py::print(py::str(line.data(), line.size()), py::arg("end") = "", py::arg("flush") = true);
  });
}

void bind_summary(py::module_& m) {
  py::class_<Distribution>(m, "Distribution", "A distribution of seconds; quantiles are within 1.6 % of the value.")
      .def_readonly("count", &Distribution::count)
      .def_readonly("sum", &Distribution::sum)
      .def_readonly("min", &Distribution::min)
      .def_readonly("max", &Distribution::max)
      .def_readonly("mean", &Distribution::mean)
      .def_readonly("p10", &Distribution::p10)
      .def_readonly("median", &Distribution::median)
      .def_readonly("p90", &Distribution::p90);
  py::class_<PhaseSummary>(m, "PhaseSummary", "What is known of a phase; shares are of all step time, 0 to 1.")
      .def_readonly("name", &PhaseSummary::name)
      .def_readonly("depth", &PhaseSummary::depth, "0 directly under the step.")
      .def_readonly("entries", &PhaseSummary::entries, "Entries over all steps.")
      .def_readonly("share", &PhaseSummary::share, "With nested phases.")
      .def_readonly("self_share", &PhaseSummary::self_share, "Without nested phases.")
      .def_readonly("time", &PhaseSummary::time, "Seconds per step that entered it, with nested phases.");
  py::class_<ScalarSummary>(m, "ScalarSummary",
                            "What is known of a scalar; min, max and mean are of its finite values.")
      .def_readonly("name", &ScalarSummary::name)
      .def_readonly("count", &ScalarSummary::count)
      .def_readonly("non_finite", &ScalarSummary::non_finite)
      .def_readonly("last", &ScalarSummary::last)
      .def_readonly("min", &ScalarSummary::min)
      .def_readonly("max", &ScalarSummary::max)
      .def_readonly("mean", &ScalarSummary::mean);
  py::class_<Summary>(m, "Summary", "Statistics of all finished steps.")
      .def_readonly("steps", &Summary::steps)
      .def_readonly("cancelled", &Summary::cancelled, "Steps left by an exception: not timed.")
      .def_readonly("dropped", &Summary::dropped, "Records that no sink received because the ring was full.")
      .def_readonly("phases_outside", &Summary::phases_outside, "Phases entered outside any step: not timed.")
      .def_readonly("samples", &Summary::samples)
      .def_readonly("samples_per_second", &Summary::samples_per_second, "Samples over the time inside steps.")
      .def_readonly("between_seconds", &Summary::between_seconds, "Time between steps.")
      .def_readonly("step", &Summary::step, "Step durations, seconds.")
      .def_readonly("other_share", &Summary::other_share, "Share of step time in no phase.")
      .def_readonly("phases", &Summary::phases, "In order of first entry, children after their parents.")
      .def_readonly("scalars", &Summary::scalars)
      .def_readonly("failed_sinks", &Summary::failed_sinks, "\"name: why\" of sinks that failed.");
}

}  // namespace

void bind_monitor(py::module_& m) {
  py::class_<Sink, std::shared_ptr<Sink>>(m, "Sink", "Where finished steps go.");
  py::class_<monitor::JsonlSink, Sink, std::shared_ptr<monitor::JsonlSink>>(
      m, "Jsonl",
      "Appends one JSON object per step to a file: step, time, duration, gap, samples, phases, scalars; seconds. "
      "Raises "
      "OSError, which names the path, if it cannot be written.")
      .def(py::init([](const PathArgument& path) { return std::make_shared<monitor::JsonlSink>(path.text); }),
           py::arg("path"));
  m.def("Console", &make_console, py::arg("every") = 5.0,
        "A sink that prints a line at most every so many seconds of training; 0: at each flush.");
  py::class_<CallbackSink, Sink, std::shared_ptr<CallbackSink>>(
      m, "Callback", "Calls a function with each batch of steps, a list of dicts, on the thread that drains.")
      .def(py::init([](Callback function) { return std::make_shared<CallbackSink>(std::move(function)); }),
           py::arg("function"));
  bind_report(m);
  bind_summary(m);
  add_step_types(m);

  py::class_<BoundMonitor, std::shared_ptr<BoundMonitor>>(m, "PerformanceMonitor",
                                                          "The native side of oxytorch.PerformanceMonitor.")
      .def(py::init([](std::vector<std::shared_ptr<Sink>> sinks, std::size_t ring_records, std::size_t max_phases,
                       std::size_t max_scalars, std::size_t curve_points, double drain_seconds) {
             const monitor::MonitorOptions options{ring_records, max_phases, max_scalars, curve_points, drain_seconds};
             const py::gil_scoped_release release;
             return std::make_shared<BoundMonitor>(options, std::move(sinks));
           }),
           py::kw_only(), py::arg("sinks"), py::arg("ring_records"), py::arg("max_phases"), py::arg("max_scalars"),
           py::arg("curve_points"), py::arg("drain_seconds"))
      .def("step", &make_step)
      .def("phase", &make_phase, py::arg("name"))
      .def("scalar", &make_scalar, py::arg("name"))
      .def(
          "set_samples", [](BoundMonitor& self, std::int64_t samples) { self.monitor->set_samples(samples); },
          py::arg("samples"))
      .def(
          "set_next_step", [](BoundMonitor& self, std::uint64_t step) { self.monitor->set_next_step(step); },
          py::arg("step"))
      .def_property_readonly("current_step", [](const BoundMonitor& self) { return self.monitor->current_step(); })
      .def_property_readonly("lost_tensors", [](const BoundMonitor& self) { return self.pending->lost(); })
      .def(
          "add_sink", [](BoundMonitor& self, std::shared_ptr<Sink> sink) { self.monitor->add_sink(std::move(sink)); },
          py::arg("sink"), release_gil())
      .def(
          "flush", [](BoundMonitor& self) { self.monitor->flush(); }, release_gil())
      .def(
          "close", [](BoundMonitor& self) { self.monitor->close(); }, release_gil())
      .def(
          "summary", [](BoundMonitor& self) { return self.monitor->summary(); }, release_gil())
      .def(
          "table",
          [](BoundMonitor& self, std::optional<bool> unicode) { return self.monitor->table(text_style(unicode)); },
          py::arg("unicode"), release_gil())
      .def(
          "report", [](BoundMonitor& self, std::string title) { return self.monitor->report(std::move(title)); },
          py::arg("title"), release_gil());
}

}  // namespace oxytorch::bindings
