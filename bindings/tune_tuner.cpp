// The tuner, and the workload that Python code derives from. Called with the GIL held throughout.
#include "tune_tuner.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "oxytorch/config.h"
#include "oxytorch/config_use.h"
#include "oxytorch/trainer/report_lines.h"
#include "oxytorch/tune/asked.h"
#include "oxytorch/tune/setting_lines.h"
#include "oxytorch/tune/timing.h"
#include "oxytorch/tune/tuner.h"
#include "oxytorch/tune/watch.h"
#include "oxytorch/tune/window.h"
#include "oxytorch/tune/workload.h"
#include "tune_words.h"

namespace oxytorch::bindings {
namespace {

using namespace tune;

using Texts = std::map<std::string, std::string>;
using LineParts = std::tuple<std::string, std::string, std::string, std::string, std::optional<double>>;

LineParts parts(const SettingLine& line) { return {line.name, line.state, line.reason, line.cost, line.gain}; }

bool is_interrupt(const py::error_already_set& error) { return !error.matches(PyExc_Exception); }

/// A workload whose members are those of a Python object.
class PythonWorkload : public Workload {
 public:
  std::vector<Offer> offers() override { PYBIND11_OVERRIDE_PURE(std::vector<Offer>, Workload, offers); }
  std::string hindrance() override { PYBIND11_OVERRIDE(std::string, Workload, hindrance); }
  Applicability applies(const std::string& strategy) override {
    const auto answer = asked("applies")(strategy);
    if (answer.is(py::handle(Py_True))) return true;
    if (!py::isinstance<py::str>(answer) || py::len(answer) == 0) return "does not apply";
    return answer.cast<std::string>();
  }
  double expected_cost(const std::string& strategy) override {
    PYBIND11_OVERRIDE_PURE(double, Workload, expected_cost, strategy);
  }
  std::optional<double> likely_speedup(const std::string& strategy) override {
    PYBIND11_OVERRIDE(std::optional<double>, Workload, likely_speedup, strategy);
  }
  Names active() override { PYBIND11_OVERRIDE_PURE(Names, Workload, active); }
  void activate(const Names& strategies) override { PYBIND11_OVERRIDE_PURE(void, Workload, activate, strategies); }
  void restore() override { PYBIND11_OVERRIDE_PURE(void, Workload, restore); }
  void let_go() override { PYBIND11_OVERRIDE(void, Workload, let_go); }
  std::map<std::string, std::string> covered() override {
    using Covered = std::map<std::string, std::string>;
    PYBIND11_OVERRIDE_PURE(Covered, Workload, covered);
  }
  std::vector<std::size_t> shapes() override { PYBIND11_OVERRIDE_PURE(std::vector<std::size_t>, Workload, shapes); }
  StepTimes steps(std::size_t first, int count, bool updates, bool drawn) override {
    auto [seconds, taken] = asked("steps")(first, count, updates, drawn).cast<std::pair<double, std::vector<double>>>();
    return {seconds, std::move(taken)};
  }
  bool has_update() override { PYBIND11_OVERRIDE(bool, Workload, has_update); }
  double update() override { PYBIND11_OVERRIDE_PURE(double, Workload, update); }
  bool on_host() override { PYBIND11_OVERRIDE_PURE(bool, Workload, on_host); }
  double drawing(double step_seconds) override { PYBIND11_OVERRIDE(double, Workload, drawing, step_seconds); }
  void draw(bool on) override { PYBIND11_OVERRIDE(void, Workload, draw, on); }
  std::optional<std::int64_t> step_bytes() override {
    PYBIND11_OVERRIDE(std::optional<std::int64_t>, Workload, step_bytes);
  }
  std::optional<std::int64_t> step_resident() override {
    PYBIND11_OVERRIDE(std::optional<std::int64_t>, Workload, step_resident);
  }
  std::optional<std::int64_t> tuning_bytes() override {
    PYBIND11_OVERRIDE(std::optional<std::int64_t>, Workload, tuning_bytes);
  }
  Ruling verify(Kind kind, bool glance) override {
    const auto found = asked("verify")(kind, glance);
    return {found.attr("held").cast<bool>(), found.attr("reason").cast<std::string>(),
            found.attr("evidence").cast<std::map<std::string, double>>()};
  }
  std::optional<std::string> told(const std::exception& error) override {
    const auto* const python = dynamic_cast<const py::error_already_set*>(&error);
    if (python == nullptr) return Workload::told(error);
    if (is_interrupt(*python)) return std::nullopt;
    return asked("told")(python->value()).cast<std::string>();
  }
  void say(const std::string& what) override { PYBIND11_OVERRIDE(void, Workload, say, what); }
  double seconds() override { PYBIND11_OVERRIDE(double, Workload, seconds); }
  double processor_seconds() override { PYBIND11_OVERRIDE(double, Workload, processor_seconds); }
  double page_faults() override { PYBIND11_OVERRIDE(double, Workload, page_faults); }

 private:
  py::function asked(const char* name) const {
    auto found = py::get_override(static_cast<const Workload*>(this), name);
    if (!found) throw py::type_error(std::string("a workload needs a method ") + name + "().");
    return found;
  }
};

/// A run whose members are those of a Python object.
class PythonWatched : public Watched {
 public:
  void activate(const Names& strategies) override { PYBIND11_OVERRIDE_PURE(void, Watched, activate, strategies); }
  BothWays compare(const Names& first) override {
    const auto answer = py::get_override(static_cast<const Watched*>(this), "compare")(first);
    const auto [with, without, gradient, factor, seconds] =
        answer.cast<std::tuple<double, double, double, double, double>>();
    return {with, without, {gradient, factor}, seconds};
  }
  bool has_budget() override { PYBIND11_OVERRIDE(bool, Watched, has_budget); }
  std::optional<std::string> told(const std::exception& error) override {
    const auto* const python = dynamic_cast<const py::error_already_set*>(&error);
    if (python == nullptr) return Watched::told(error);
    if (is_interrupt(*python)) return std::nullopt;
    const py::str name = py::type::of(python->value()).attr("__name__");
    return name.cast<std::string>() + ": " + py::str(python->value()).cast<std::string>();
  }
};

void bind_watch(py::module_& m) {
  py::class_<Watched, PythonWatched>(m, "Watched",
                                     "The run that a watch is over: activate(names), compare(first), has_budget().")
      .def(py::init<>());
  py::class_<Watch>(m, "Watch", "Keeps a guard over a certified run, and takes its strategies back at its word.")
      .def(py::init([](Watched& run, Certificate& certificate, const CertificateStore* store, Names names, Names always,
                       Kind kind, std::uint64_t drawn_by, bool only_when_doubted) {
             return Watch(run, certificate, store,
                          {std::move(names), std::move(always), kind, drawn_by, only_when_doubted});
           }),
           py::arg("run"), py::arg("certificate"), py::arg("store").none(true), py::kw_only(), py::arg("names"),
           py::arg("always"), py::arg("kind"), py::arg("drawn_by"), py::arg("only_when_doubted"),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>())
      .def("before", &Watch::before, "Whether the watch goes on, with what is wanted for the next step active.")
      .def("after", &Watch::after, py::arg("seconds"))
      .def("doubt", &Watch::doubt)
      .def_property_readonly("over", &Watch::over)
      .def_property_readonly("checks", &Watch::checks, "Whether each step is to be timed to its end.")
      .def_property_readonly("step", &Watch::step)
      .def_property_readonly("reason", &Watch::reason, "What the last check showed.");
}

}  // namespace

void bind_tuner(py::module_& m) {
  py::class_<Offer>(m, "Offer", "A strategy that a workload has.")
      .def(py::init([](std::string name, Kind kind, std::string group, Names required, Names interacts, Names part_of,
                       Names renewed_by, int settle, std::string cost, double max_speedup, double expected_speedup,
                       bool feeds, std::string refused) {
             return Offer{std::move(name),
                          kind,
                          {std::move(group), std::move(required), std::move(interacts), std::move(part_of),
                           std::move(renewed_by), settle, std::move(cost), max_speedup, expected_speedup, feeds,
                           /*needs_loop=*/false},  // Python's workload refuses them itself
                          std::move(refused)};
           }),
           py::arg("name"), py::kw_only(), py::arg("kind"), py::arg("group"), py::arg("requires"), py::arg("interacts"),
           py::arg("part_of"), py::arg("renewed_by"), py::arg("settle"), py::arg("cost"), py::arg("max_speedup"),
           py::arg("expected_speedup"), py::arg("feeds"), py::arg("refused") = "");
  py::class_<Workload, PythonWorkload>(m, "Workload",
                                       "What a tuner must be given: a training step that it can take, time, change, "
                                       "put back and verify. See oxytorch/tune/workload.h.")
      .def(py::init<>());
  py::class_<Requirement>(m, "Requirement", "A setting of the caller's that wants a strategy active.")
      .def_readonly("setting", &Requirement::setting)
      .def_readonly("strategies", &Requirement::strategies, "Any one of these satisfies it; the first that applies.");
  m.def(
      "asked_of",
      [](const PerformanceConfig& config, const std::vector<Offer>& offers, const Names& excluded, bool by_trainer) {
        auto asked = asked_of(config, offers, excluded, by_trainer ? AskedBy::Trainer : AskedBy::Loop);
        return std::tuple(std::move(asked.skipped), std::move(asked.required), std::move(asked.refused));
      },
      py::arg("config"), py::arg("offers"), py::arg("excluded"), py::kw_only(), py::arg("by_trainer"),
      "Why strategies are not tried, by name; what is to be active whatever it gains; why settings are ruled out.");
  m.def(
      "activate",
      [](const PerformanceConfig& config, const std::vector<Offer>& offers, Texts skipped,
         std::vector<Requirement> required, Texts refused, const std::function<bool(const std::string&)>& is_active,
         const std::function<std::string(const std::string&)>& put) {
        Asked asked{std::move(skipped), std::move(required), std::move(refused)};
        activate(asked, config, offers, is_active, put);
        return std::pair(std::move(asked.skipped), std::move(asked.refused));
      },
      py::arg("config"), py::arg("offers"), py::arg("skipped"), py::arg("required"), py::arg("refused"),
      py::arg("is_active"), py::arg("put"),
      "Makes active what a trainer's settings require, by put(), which says why it cannot; skipped and refused then.");
  py::class_<SettingLines>(m, "SettingLines", "What the lines of a trainer's report are made of.")
      .def(py::init([](const PerformanceConfig& config, const Certificate& certificate, std::vector<Offer> offers,
                       Texts refused, Names active, Names required, std::string untried, std::string slow) {
             return SettingLines{config,
                                 certificate,
                                 std::move(offers),
                                 std::move(refused),
                                 std::move(active),
                                 std::move(required),
                                 std::move(untried),
                                 std::move(slow)};
           }),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::kw_only(), py::arg("config"), py::arg("certificate"),
           py::arg("offers"), py::arg("refused"), py::arg("active"), py::arg("required"), py::arg("untried"),
           py::arg("slow") = "")
      .def(
          "of", [](const SettingLines& self, const std::string& setting) { return parts(self.of(setting)); },
          py::arg("setting"), "Name, state, reason, cost and gain of a setting that strategies bring about.")
      .def(
          "active_as",
          [](const SettingLines& self, const std::string& name, const Names& strategies) {
            return parts(self.active_as(name, strategies));
          },
          py::arg("name"), py::arg("strategies"), "The same of what is active, whatever it is called.")
      .def(
          "beside_settings",
          [](const SettingLines& self) {
            std::vector<LineParts> found;
            for (const auto& line : self.beside_settings()) found.push_back(parts(line));
            return found;
          },
          "The same of each that is active and belongs to no setting.")
      .def(
          "of_optimizer",
          [](const SettingLines& self, bool is_own, bool replaces, std::string state, Names active) {
            std::vector<LineParts> found;
            for (const auto& line : lines_of_optimizer(self, {.is_own = is_own,
                                                              .replaces = replaces,
                                                              .shares_state = true,
                                                              .state = std::move(state),
                                                              .active = std::move(active)})) {
              found.push_back(parts(line));
            }
            return found;
          },
          py::kw_only(), py::arg("is_own"), py::arg("replaces"), py::arg("state"), py::arg("active"),
          "The same of step_tail and optimizer_state. See oxytorch/trainer/report_lines.h.");
  m.def("closures_unplanned", &closures_unplanned,
        "Why gradient_checkpointing can have no effect on steps that are closures.");
  m.def("fitted_anew", &fitted_anew, py::arg("step"),
        "What its line begins with once a step has run out of memory and was fitted anew.");
  m.def("may_fit_again", &may_fit_again, py::arg("checkpointing"), py::arg("fits"),
        "Whether a step that ran out of memory is fitted again, after `fits` times.");
  m.def("tighter_budget", &tighter_budget, py::arg("peak"),
        "Bytes to fit a step to which ran out of memory although its plan had been measured to peak at `peak`.");
  m.def(
      "hindrance",
      [](bool calibrate, bool is_closure, bool is_iterator, bool has_hooks, bool is_distributed, bool has_lazy) {
        return hindrance({.calibrate = calibrate,
                          .is_closure = is_closure,
                          .is_iterator = is_iterator,
                          .has_hooks = has_hooks,
                          .is_distributed = is_distributed,
                          .has_lazy = has_lazy});
      },
      py::kw_only(), py::arg("calibrate"), py::arg("is_closure"), py::arg("is_iterator"), py::arg("has_hooks"),
      py::arg("is_distributed"), py::arg("has_lazy"),
      "Why nothing may be tried on a trainer's first batch; empty where nothing speaks against it.");
  const TunerOptions options;
  py::class_<TunerOptions>(m, "TunerOptions", "What a tuner is asked for.")
      .def(py::init([](std::string level, std::int64_t steps_planned, double tune_seconds, std::uint64_t seed,
                       Names exclude, std::vector<Requirement> required,
                       const std::optional<PerformanceConfig>& config) {
             TunerOptions made{std::move(level),   steps_planned,      tune_seconds, seed,
                               std::move(exclude), std::move(required)};
             if (config) set_goal(*config, made);
             return made;
           }),
           py::kw_only(), py::arg("level") = options.level, py::arg("steps_planned") = options.steps_planned,
           py::arg("tune_seconds") = options.tune_seconds, py::arg("seed") = options.seed, py::arg("exclude") = Names(),
           py::arg("required") = std::vector<Requirement>(), py::arg("config") = py::none(),
           "`config`: of which goal, max_slowdown and max_growth count.")
      .def_readonly("seed", &TunerOptions::seed)
      .def_readonly("max_slowdown", &TunerOptions::max_slowdown)
      .def_readonly("max_growth", &TunerOptions::max_growth)
      .def_readonly("steps_planned", &TunerOptions::steps_planned);
  m.def("slowdown_left", &slowdown_left, py::arg("certificate"), py::arg("max_slowdown"),
        "How many times as long as now a step may take, where it may take max_slowdown times as long as given.");
  m.def("acts_on_update", &acts_on_update, py::arg("group"),
        "Whether strategies of a group change the optimizer's update alone.");
  m.def(
      "has_budget",
      [](const PerformanceConfig& config, std::optional<bool> recomputes) {
        TunerOptions asked;
        set_goal(config, asked);
        return has_budget(asked.goal, checkpointing_of(config), recomputes);
      },
      py::arg("config"), py::arg("recomputes"),
      "Whether steps are held to a budget of memory; recomputes: whether blocks are run again, None where not "
      "planned.");
  m.def("batches_of_trial", &batches_of_trial, py::arg("accumulation"),
        "Batches of a step that is tried, where a step of the run is of `accumulation`.");
  m.def("planned_steps", &planned_steps, py::arg("config"), py::arg("otherwise") = 0,
        "Length of the run, as far as the configuration says it; else `otherwise`, where that is above 0.");
  m.def(
      "decided_by",
      [](const PerformanceConfig& config, const Names& strategies, std::int64_t steps_planned, bool by_trainer) {
        return decided_by(config, strategies, steps_planned, by_trainer ? AskedBy::Trainer : AskedBy::Loop);
      },
      py::arg("config"), py::arg("strategies"), py::arg("steps_planned"), py::kw_only(), py::arg("by_trainer") = false,
      "What decides which strategies are kept, for a certificate's key.");
  m.def("tuning_of_trainer", &tuning_of_trainer, py::arg("config"), py::arg("length"), py::arg("offers"),
        "What a trainer asks of a tuner at its first batch. See oxytorch/tune/asked.h.");
  py::class_<Tuner>(m, "Tuner", "Finds what makes a workload's step faster, proves it, and says so in a certificate.")
      .def(py::init<Workload&, CertificateKey, TunerOptions>(), py::arg("workload"), py::arg("key"), py::arg("options"),
           py::keep_alive<1, 2>())
      .def(
          "tune",
          [](Tuner& self, const std::optional<CertificateStore>& store) {
            return self.tune(store ? &*store : nullptr);
          },
          py::arg("store"),
          "The certificate, remembered or measured; nothing is active at the end and the state is restored.")
      .def("activate", &Tuner::activate, py::arg("certificate"),
           "Make active what it accepted; what cannot be is noted in it.")
      .def("activate_required", &Tuner::activate_required, py::arg("certificate"),
           "Make active what settings ask for, and note it; the names that are.")
      .def("seconds", &Tuner::seconds, "Since it was made.");
  py::register_exception<SideFailed>(m, "SideFailed");
  py::class_<Timing>(m, "Timing", "Whole steps of a workload timed under two combinations of strategies.")
      .def(py::init([](Workload& workload) { return Timing(workload, workload.offers()); }), py::arg("workload"),
           py::keep_alive<1, 2>())
      .def(
          "baseline", [](Timing& timing) { timing.baseline(); }, "Time a step as given, before anything is tried.")
      .def("compare", &Timing::compare, py::arg("incumbent"), py::arg("challenger"), py::arg("options"),
           "The result, and the seconds that turning the challenger on took once.")
      .def("recover", &Timing::recover, "Revert everything and restore the state.");
  bind_watch(m);
}

}  // namespace oxytorch::bindings
