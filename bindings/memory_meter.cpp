// The meter and checkpoints. A meter waits for threads that are inside its record, which may wait for the GIL: it
// begins and ends without it.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "oxytorch/memory.h"

namespace oxytorch::bindings {
namespace {

using Tensors = std::vector<at::Tensor>;

using namespace memory;

/// A phase or a region, which Python ends by a call.
template <class Scope>
class Ended {
 public:
  template <class... Args>
  explicit Ended(Args&&... args) : scope_(std::in_place, std::forward<Args>(args)...) {}
  void end() { scope_.reset(); }
  Scope& scope() { return *scope_; }

 private:
  std::optional<Scope> scope_;
};

/// As a context manager; it begins as it is made.
template <class Pause>
void bind_pause(py::module_& m, const char* name, const char* text) {
  py::class_<Ended<Pause>>(m, name, text)
      .def(py::init<>())
      .def("__enter__", [](Ended<Pause>&) {})
      .def(
          "__exit__", [](Ended<Pause>& pause, const py::object&, const py::object&, const py::object&) { pause.end(); },
          py::arg("kind"), py::arg("error"), py::arg("trace"));
}

std::shared_ptr<Meter> new_meter(c10::Device device, bool timeline, bool sites) {
  return {new Meter({device, timeline, sites}), [](Meter* meter) {
            const py::gil_scoped_release released;
            delete meter;
          }};
}

/// A Python function that C++ keeps, and calls and lets go on any thread.
class Kept {
 public:
  explicit Kept(py::function function)
      : function_(new py::function(std::move(function)), [](py::function* each) {
          const py::gil_scoped_acquire acquired;
          delete each;
        }) {}
  void operator()(const std::vector<at::Tensor>& tensors) const {
    const py::gil_scoped_acquire acquired;
    try {
      (*function_)(tensors);
    } catch (py::error_already_set& error) {
      // As torch throws it, so that backward() raises what the function raised.
      error.restore();
      python_error thrown;
      thrown.persist();
      throw thrown;
    }
  }

 private:
  std::shared_ptr<py::function> function_;
};

py::object checkpoint(const py::function& first, const std::vector<at::Tensor>& inputs, py::function again) {
  Recomputation recomputation(inputs, Kept(std::move(again)));
  py::object result;
  recomputation.run([&] { result = first(); });
  return result;
}

std::tuple<std::vector<int>, std::int64_t, double, bool> parts_of(const BlockPlan& plan) {
  std::vector<int> choice;
  for (const auto each : plan.choice) choice.push_back(static_cast<int>(each));
  return {std::move(choice), plan.peak_bytes, plan.seconds, plan.is_optimal};
}

py::object selectively(const py::function& function) {
  SelectiveCheckpoint selective;
  auto result = function();
  selective.end();
  return result;
}

void bind_figures(py::module_& m) {
  py::class_<PhaseUse>(m, "PhaseUse", "A part of a step, as a meter saw it. Bytes are those of tensors.")
      .def_readonly("name", &PhaseUse::name)
      .def_readonly("begin_bytes", &PhaseUse::begin_bytes, "Live when it began.")
      .def_readonly("peak_bytes", &PhaseUse::peak_bytes, "The most that was live in it.")
      .def_readonly("end_bytes", &PhaseUse::end_bytes, "Live when it ended.")
      .def_readonly("seconds", &PhaseUse::seconds)
      .def("__repr__", [](const PhaseUse& use) {
        return "PhaseUse(" + use.name + ", peak_bytes=" + std::to_string(use.peak_bytes) + ")";
      });
  py::class_<PeakPart>(m, "PeakPart", "Tensors of one origin that were live at one moment.")
      .def_readonly("phase", &PeakPart::phase, "Empty where there was none, as the two below.")
      .def_readonly("region", &PeakPart::region, "Of the model: the name of a module, or of a Region.")
      .def_readonly("site", &PeakPart::site, "\"file:line function\", the innermost call first, one a line.")
      .def_readonly("bytes", &PeakPart::bytes)
      .def_readonly("blocks", &PeakPart::blocks, "How many tensors' memory that is.")
      .def("__repr__", [](const PeakPart& part) {
        return "PeakPart(" + part.phase + ", " + part.region + ", bytes=" + std::to_string(part.bytes) +
               ", blocks=" + std::to_string(part.blocks) + ")";
      });
  py::class_<BlockEvent>(m, "BlockEvent", "Memory that a tensor took or gave back.")
      .def_readonly("time_ns", &BlockEvent::time_ns, "Since the meter began.")
      .def_readonly("address", &BlockEvent::address, "Until it is given back, that of no other.")
      .def_readonly("bytes", &BlockEvent::bytes, "Below zero where it was given back.")
      .def_readonly("live_bytes", &BlockEvent::live_bytes, "After it.")
      .def_readonly("phase", &BlockEvent::phase, "Index into Timeline.names; -1 for none, as the two below.")
      .def_readonly("region", &BlockEvent::region, "Index into Timeline.names.")
      .def_readonly("site", &BlockEvent::site, "Index into Timeline.sites.")
      .def_readonly("in_backward", &BlockEvent::in_backward, "Taken by a node of the graph.");
  py::class_<Timeline>(m, "Timeline", "What a meter recorded.")
      .def_readonly("events", &Timeline::events, "In order.")
      .def_readonly("names", &Timeline::names, "Of phases and regions.")
      .def_readonly("sites", &Timeline::sites, "\"file:line function\", the innermost call first, one a line.");
}

void bind_batch_forecast(py::module_& m) {
  py::class_<BatchForecast>(m, "BatchForecast",
                            "What a training step with a batch will take. Converts to bool: whether that fits.")
      .def_readonly("size", &BatchForecast::size, "Samples of the batch that was asked about.")
      .def_readonly("bytes", &BatchForecast::bytes,
                    "The most that tensors of the step will take beyond those that are alive now.")
      .def_readonly("available", &BatchForecast::available, "Bytes that tensors may still take.")
      .def_readonly("headroom", &BatchForecast::headroom, "Share of `available` that is to stay free.")
      .def_readonly("measured", &BatchForecast::measured, "The sizes of batch that were run.")
      .def_readonly("is_regular", &BatchForecast::is_regular,
                    "Whether steps of both sizes took and gave back memory in the same order: only then is `bytes` a "
                    "replay of the step.")
      .def_property_readonly("fits", &BatchForecast::fits, "Whether the step leaves the headroom free.")
      .def("__bool__", &BatchForecast::fits)
      .def("__str__", &BatchForecast::text);
  py::class_<BatchReplay>(m, "BatchReplay", "A recorded step at another size; see oxytorch/memory/batch_forecast.h.")
      .def(py::init<std::int64_t, std::int64_t, double>(), py::arg("size"), py::arg("available"), py::arg("headroom"))
      .def_property_readonly("sizes", &BatchReplay::sizes, "The sizes of batch to record a step with.")
      .def("forecast", &BatchReplay::forecast, py::arg("kept"), py::arg("smaller"), py::arg("larger"));
}

void bind_block_plan(py::module_& m) {
  py::class_<StepTape>(m, "StepTape", "A step as it was recorded; see oxytorch/memory/step_tape.h.")
      .def_static("of", &StepTape::of, py::arg("timeline"), py::arg("blocks"), release_gil())
      .def_static("steady", &StepTape::steady, py::arg("recordings"), release_gil())
      .def(
          "add",
          [](StepTape& tape, const std::string& action, const StepTape& recording) {
            tape.add(parse_block_action(action), recording);
          },
          py::arg("action"), py::arg("recording"),
          "Take over what calls take under an action, from a recording with every block under it.")
      .def(
          "spans",
          [](const StepTape& tape) {
            using Lowered = std::pair<std::size_t, Span::Bytes>;
            using Condition = std::pair<std::size_t, std::array<bool, kBlockActions>>;
            std::vector<std::tuple<std::int64_t, std::vector<Lowered>, std::optional<Condition>>> found;
            for (const auto& span : tape.spans()) {
              std::optional<Condition> only_with;
              if (span.only_with) only_with.emplace(span.only_with->block, span.only_with->counts);
              found.emplace_back(span.live, span.lowered, only_with);
            }
            return found;
          },
          "Of each part of the step: the most that is live, (block, bytes that lowers by action), and (block, by "
          "action whether it counts) or None.")
      .def("seconds", py::overload_cast<>(&StepTape::seconds, py::const_),
           "That each block adds, by action; infinite where that is not known, or saves nothing.")
      .def(
          "plan", [](const StepTape& tape, std::int64_t budget) { return parts_of(plan_blocks(tape, budget)); },
          py::arg("budget"), release_gil(),
          "(The action for each block, peak, seconds added, whether no choice is faster). See "
          "plan_blocks() in oxytorch/memory/block_plan.h.")
      .def(
          "lowest", [](const StepTape& tape) { return parts_of(lowest_peak(tape)); }, release_gil(),
          "The same for the lowest peak.")
      .def_readonly("names", &StepTape::names, "Of blocks.");
  py::class_<BlockChoice>(m, "BlockChoice", "Names of blocks by what is done with them.")
      .def(py::init([](const std::string& action, std::vector<std::string> names) {
             return BlockChoice(parse_block_action(action), std::move(names));
           }),
           py::arg("action"), py::arg("names"), "One action for all of them.")
      .def(
          "names",
          [](const BlockChoice& choice, const std::string& action) { return choice[parse_block_action(action)]; },
          py::arg("action"));
  m.def(
      "block_actions",
      [] {
        std::vector<std::string> words;
        for (std::size_t i = 0; i < kBlockActions; ++i) words.emplace_back(name(static_cast<BlockAction>(i)));
        return words;
      },
      "What may be done with a block, in the order of StepTape.seconds().");
  py::class_<BudgetSearch>(m, "BudgetSearch", "Finds what to do with blocks; see oxytorch/memory/budget_search.h.")
      .def(py::init<StepTape, std::int64_t, std::int64_t, std::int64_t>(), py::arg("tape"), py::arg("base"),
           py::arg("plain_peak"), py::arg("budget"), release_gil())
      .def_static("least", &BudgetSearch::least, py::arg("tape"), py::arg("base"), py::arg("plain_peak"),
                  py::arg("plain_seconds"), py::arg("max_slowdown"), release_gil(), "By time in place of a budget.")
      .def_static("unrecorded", &BudgetSearch::unrecorded, py::arg("names"), py::arg("budget"),
                  "Where no step with everything kept fits.")
      .def_property_readonly("is_unrecorded", &BudgetSearch::is_unrecorded)
      .def_property_readonly("is_bound_by_time", &BudgetSearch::is_bound_by_time)
      .def("next", &BudgetSearch::next, release_gil(), "What is to be done with blocks next; None: it is over.")
      .def("measured", &BudgetSearch::measured, py::arg("peak"))
      .def("ran_out", &BudgetSearch::ran_out, py::arg("error"))
      .def("timed", &BudgetSearch::timed, py::arg("plain_seconds"), py::arg("seconds"))
      .def("compared", &BudgetSearch::compared, py::arg("same"))
      .def(
          "without",
          [](BudgetSearch& search, const std::string& action, const std::string& error) {
            search.without(parse_block_action(action), error);
          },
          py::arg("action"), py::arg("error"))
      .def("rounded", &BudgetSearch::rounded, py::arg("relative_error"))
      .def_property_readonly("choice", &BudgetSearch::choice)
      .def_property_readonly("budget", &BudgetSearch::budget)
      .def_property_readonly("plain_peak", &BudgetSearch::plain_peak)
      .def_property_readonly("predicted_peak", &BudgetSearch::predicted_peak)
      .def_property_readonly("measured_peak", &BudgetSearch::measured_peak)
      .def_property_readonly("floor", &BudgetSearch::floor)
      .def_property_readonly("plain_seconds", &BudgetSearch::plain_seconds)
      .def_property_readonly("seconds", &BudgetSearch::seconds)
      .def_property_readonly("is_optimal", &BudgetSearch::is_optimal)
      .def_property_readonly("same_bits", &BudgetSearch::same_bits)
      .def("curve", &BudgetSearch::curve, py::arg("points"), release_gil())
      .def("table", &BudgetSearch::table)
      .def("report", &BudgetSearch::report, release_gil(), "The same as a document, with the curve as a plot.")
      .def("summary", &BudgetSearch::summary)
      .def("cost", &BudgetSearch::cost);
}

}  // namespace

void bind_memory_meter(py::module_& m) {
  bind_figures(m);
  bind_batch_forecast(m);
  bind_block_plan(m);
  py::class_<Ended<Region>>(m, "OpenRegion", "A region of a model that runs on this thread, until end().")
      .def(py::init<const std::string&, Tensors>(), py::arg("name"), py::arg("inputs") = Tensors())
      .def(
          "end",
          [](Ended<Region>& region, const Tensors& outputs) {
            region.scope().outputs(outputs);
            region.end();
          },
          py::arg("outputs") = Tensors());
  py::class_<Meter, std::shared_ptr<Meter>>(m, "Meter", "Counts what tensors take; see oxytorch/memory/meter.h.")
      .def(py::init(&new_meter), py::kw_only(), py::arg("device"), py::arg("timeline") = false,
           py::arg("sites") = false)
      .def("stop", &Meter::stop, release_gil())
      .def("live_bytes", &Meter::live_bytes)
      .def("peak_bytes", &Meter::peak_bytes)
      .def("reset_peak", &Meter::reset_peak)
      .def("allocations", &Meter::allocations)
      .def("phases", &Meter::phases)
      .def("timeline", &Meter::timeline, release_gil())
      .def("peak_parts", &Meter::peak_parts, release_gil())
      .def("live_parts", &Meter::live_parts, release_gil())
      .def("table", &Meter::table, py::arg("most_parts") = 12, release_gil());
  py::class_<Ended<Phase>>(m, "OpenPhase", "A phase of a step, until end().")
      .def(py::init<Meter&, const std::string&>(), py::arg("meter"), py::arg("name"), py::keep_alive<1, 2>())
      .def("end", &Ended<Phase>::end);
  // Without the GIL but in the step: other threads need it to say by which call they take memory.
  m.def(
      "leaks",
      [](const py::function& step, int steps, c10::Device device) {
        const auto take = [&] {
          const py::gil_scoped_acquire acquired;
          step();
        };
        return leaks(take, steps, /*sites=*/true, device);
      },
      py::arg("step"), py::arg("steps"), py::arg("device"), release_gil(), "What each step leaves behind.");
  m.def("can_count", &can_count, py::arg("device"), "Whether bytes of a device's tensors can be counted.");
  m.def("timeline_refusal", &timeline_refusal, py::arg("device"), "Why no timeline can be recorded; empty: it can.");
  m.def("resident_bytes", &resident_bytes, "Bytes of this process that are in memory now.");
  m.def("set_limit", &set_limit, py::arg("bytes"), release_gil(), "A limit on the memory of this process.");
  m.def("limit", &limit, "The limit that is set, if any.");
  bind_pause<LimitPaused>(m, "LimitPaused", "No limit holds back a tensor inside of `with`.");
  bind_pause<CountingPaused>(m, "CountingPaused", "No tensor is counted for a lone meter inside of `with`.");
  m.def(
      "available_bytes",
      [](c10::Device device, std::optional<std::uint64_t> limit) {
        return limit ? available_bytes(*limit, device) : available_bytes(device);
      },
      py::arg("device"), py::arg("limit") = std::nullopt, release_gil(),
      "Bytes that tensors of a device may still take.");
  m.def("budget_bytes", &budget_bytes, py::arg("text"), py::arg("device"), "Bytes of a budget as a user writes it.");
  m.def("records_gradients", &records_gradients, "Whether anything is recorded for backward on this thread.");
  m.def("checkpoint", &checkpoint, py::arg("first"), py::arg("inputs"), py::arg("again"),
        "Return first(), of which backward runs again(inputs) for what it needs.");
  m.def("selective_checkpoint", &selectively, py::arg("function"),
        "Return function(), of which backward runs cheap operators again.");
}

}  // namespace oxytorch::bindings
