// The native core of oxytorch.tune: duel, search, certificate, guard. Enumerations are strings in Python.
#include "tune.h"

#include <pybind11/functional.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>

#include "oxytorch/error.h"
#include "oxytorch/load.h"
#include "oxytorch/spelling.h"
#include "oxytorch/tune/apart.h"
#include "oxytorch/tune/block.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/change.h"
#include "oxytorch/tune/duel.h"
#include "oxytorch/tune/guard.h"
#include "oxytorch/tune/reuse.h"
#include "oxytorch/tune/search.h"
#include "path.h"
#include "tune_words.h"

namespace oxytorch::bindings {
namespace {

using namespace tune;
using Names = std::vector<std::string>;

void bind_duel(py::module_& m) {
  py::class_<Interval>(m, "Interval",
                       "An estimate with the interval that holds the true value in `confidence` of cases.")
      .def(py::init<double, double, double, double>(), py::arg("low"), py::arg("mid"), py::arg("high"),
           py::arg("confidence") = 0.95)
      .def_readwrite("low", &Interval::low)
      .def_readwrite("mid", &Interval::mid)
      .def_readwrite("high", &Interval::high)
      .def_readwrite("confidence", &Interval::confidence);
  const DuelOptions defaults;
  py::class_<DuelOptions>(m, "DuelOptions", "How sure a duel must be, and how long it may take.")
      .def(py::init([](double threshold, double confidence, double false_accept, int least_pairs, int most_pairs,
                       double worth, double most_seconds, double budget_seconds, double repay_steps,
                       std::uint64_t seed) {
             return DuelOptions{threshold, confidence,   false_accept,   least_pairs, most_pairs,
                                worth,     most_seconds, budget_seconds, repay_steps, seed};
           }),
           py::kw_only(), py::arg("threshold") = defaults.threshold, py::arg("confidence") = defaults.confidence,
           py::arg("false_accept") = defaults.false_accept, py::arg("least_pairs") = defaults.least_pairs,
           py::arg("most_pairs") = defaults.most_pairs, py::arg("worth") = defaults.worth,
           py::arg("most_seconds") = defaults.most_seconds, py::arg("budget_seconds") = defaults.budget_seconds,
           py::arg("repay_steps") = defaults.repay_steps, py::arg("seed") = defaults.seed)
      .def_readwrite("threshold", &DuelOptions::threshold)
      .def_readwrite("confidence", &DuelOptions::confidence)
      .def_readwrite("false_accept", &DuelOptions::false_accept)
      .def_readwrite("least_pairs", &DuelOptions::least_pairs)
      .def_readwrite("most_pairs", &DuelOptions::most_pairs)
      .def_readwrite("worth", &DuelOptions::worth)
      .def_static("conclusion", &DuelOptions::conclusion, py::arg("seed"), "Of everything against nothing at the end.")
      .def_static("member", &DuelOptions::member, py::arg("seed"), "Of a remembered certificate without one of it.")
      .def_static("canary", &DuelOptions::canary, py::arg("seed"), "Of a remembered certificate.")
      .def_readwrite("most_seconds", &DuelOptions::most_seconds)
      .def_readwrite("budget_seconds", &DuelOptions::budget_seconds)
      .def_readwrite("repay_steps", &DuelOptions::repay_steps)
      .def_readwrite("seed", &DuelOptions::seed);
  m.attr("BASELINE_BLOCKS") = kBaselineBlocks;
  m.def("block_steps", &block_steps, py::arg("step_seconds"), "Steps that are measured in a row.");
  m.def("settle_steps", &settle_steps, py::arg("wanted"), py::arg("step_seconds"),
        "Of these steps after a switch, those that are needed.");
  py::class_<DuelResult>(m, "DuelResult", "What a duel has shown; speedup is incumbent over challenger.")
      .def(py::init<>())
      .def_readwrite("decision", &DuelResult::decision)
      .def_readwrite("speedup", &DuelResult::speedup)
      .def_readwrite("incumbent", &DuelResult::incumbent, "Median seconds a step.")
      .def_readwrite("challenger", &DuelResult::challenger, "Median seconds a step.")
      .def_readwrite("pairs", &DuelResult::pairs)
      .def_readwrite("p_value", &DuelResult::p_value)
      .def_readwrite("reason", &DuelResult::reason);
  py::class_<Duel>(m, "Duel", "A paired, randomised, sequential comparison of two ways to take the same step.")
      .def(py::init<DuelOptions>(), py::arg_v("options", DuelOptions{}, "DuelOptions()"))
      .def("next", &Duel::next, "The side to run now; None once it is decided.")
      .def("record", &Duel::record, py::arg("side"), py::arg("seconds"),
           "Seconds a step of the side that next() named.")
      .def("abandon", &Duel::abandon, py::arg("reason"), "End it as rejected.")
      .def("result", &Duel::result);
}

void bind_search(py::module_& m) {
  const StrategyFacts facts;
  py::class_<StrategyFacts>(m, "StrategyFacts", "What the search knows of a strategy.")
      .def(py::init([](std::string name, Kind kind, std::string group, Names required, Names interacts, Names part_of,
                       Names renewed_by, double expected_cost, double hopeful, double expected_speedup,
                       double update_speedup, bool update_proven) {
             return StrategyFacts{std::move(name),
                                  kind,
                                  std::move(group),
                                  std::move(required),
                                  std::move(interacts),
                                  std::move(part_of),
                                  std::move(renewed_by),
                                  expected_cost,
                                  hopeful,
                                  expected_speedup,
                                  update_speedup,
                                  update_proven};
           }),
           py::arg("name"), py::kw_only(), py::arg("kind") = facts.kind, py::arg("group") = facts.group,
           py::arg("requires") = facts.requires_, py::arg("interacts") = facts.interacts,
           py::arg("part_of") = facts.part_of, py::arg("renewed_by") = facts.renewed_by,
           py::arg("expected_cost") = facts.expected_cost, py::arg("hopeful") = facts.hopeful,
           py::arg("expected_speedup") = facts.expected_speedup, py::arg("update_speedup") = facts.update_speedup,
           py::arg("update_proven") = facts.update_proven)
      .def_readwrite("name", &StrategyFacts::name)
      .def_readwrite("kind", &StrategyFacts::kind)
      .def_readwrite("group", &StrategyFacts::group)
      .def_readwrite("requires", &StrategyFacts::requires_)
      .def_readwrite("interacts", &StrategyFacts::interacts)
      .def_readwrite("part_of", &StrategyFacts::part_of)
      .def_readwrite("renewed_by", &StrategyFacts::renewed_by)
      .def_readwrite("expected_cost", &StrategyFacts::expected_cost)
      .def_readwrite("hopeful", &StrategyFacts::hopeful)
      .def_readwrite("expected_speedup", &StrategyFacts::expected_speedup)
      .def_readwrite("update_speedup", &StrategyFacts::update_speedup)
      .def_readwrite("update_proven", &StrategyFacts::update_proven);
  const SearchOptions options;
  py::class_<SearchOptions>(m, "SearchOptions", "The run that a search is for, and what it may spend.")
      .def(py::init([](std::int64_t steps_planned, double step_seconds, double budget_seconds, double repay_steps,
                       double conclude_steps, double total_seconds, double used_seconds, double cost_share,
                       double optimizer_share, std::uint64_t seed, const DuelOptions& duel) {
             return SearchOptions{steps_planned, step_seconds, budget_seconds, repay_steps,     conclude_steps,
                                  total_seconds, used_seconds, cost_share,     optimizer_share, seed,
                                  duel};
           }),
           py::kw_only(), py::arg("steps_planned") = options.steps_planned,
           py::arg("step_seconds") = options.step_seconds, py::arg("budget_seconds") = options.budget_seconds,
           py::arg("repay_steps") = options.repay_steps, py::arg("conclude_steps") = options.conclude_steps,
           py::arg("total_seconds") = options.total_seconds, py::arg("used_seconds") = options.used_seconds,
           py::arg("cost_share") = options.cost_share, py::arg("optimizer_share") = options.optimizer_share,
           py::arg("seed") = options.seed, py::arg_v("duel", options.duel, "DuelOptions()"))
      .def_static("for_run", &SearchOptions::for_run, py::arg("steps_planned"), py::arg("step_seconds"),
                  py::arg("budget_seconds"), py::arg("seed"), "What every driver of a search uses.")
      .def_readwrite("steps_planned", &SearchOptions::steps_planned)
      .def_readwrite("step_seconds", &SearchOptions::step_seconds)
      .def_readwrite("budget_seconds", &SearchOptions::budget_seconds)
      .def_readwrite("repay_steps", &SearchOptions::repay_steps)
      .def_readwrite("conclude_steps", &SearchOptions::conclude_steps)
      .def_readwrite("total_seconds", &SearchOptions::total_seconds)
      .def_readwrite("used_seconds", &SearchOptions::used_seconds)
      .def_readwrite("cost_share", &SearchOptions::cost_share)
      .def_readwrite("optimizer_share", &SearchOptions::optimizer_share)
      .def_readwrite("seed", &SearchOptions::seed)
      .def_readwrite("duel", &SearchOptions::duel);
  py::class_<Trial>(m, "Trial", "Two combinations of strategies to compare.")
      .def_readonly("strategy", &Trial::strategy, "The one in question.")
      .def_readonly("removal", &Trial::removal, "Whether it is asked if the rest is faster without it.")
      .def_readonly("incumbent", &Trial::incumbent)
      .def_readonly("challenger", &Trial::challenger)
      .def_readonly("duel", &Trial::duel);
  py::class_<TrialOutcome>(m, "TrialOutcome", "What came of a trial.")
      .def(py::init([](const DuelResult& duel, double cost_seconds, double spent_seconds, bool disturbed, bool failed,
                       bool verified, std::string reason) {
             return TrialOutcome{duel, cost_seconds, spent_seconds, disturbed, failed, verified, std::move(reason)};
           }),
           py::arg_v("duel", DuelResult{}, "DuelResult()"), py::kw_only(), py::arg("cost_seconds") = 0.0,
           py::arg("spent_seconds") = 0.0, py::arg("disturbed") = false, py::arg("failed") = false,
           py::arg("verified") = true, py::arg("reason") = "")
      .def_readwrite("duel", &TrialOutcome::duel)
      .def_readwrite("cost_seconds", &TrialOutcome::cost_seconds)
      .def_readwrite("spent_seconds", &TrialOutcome::spent_seconds)
      .def_readwrite("disturbed", &TrialOutcome::disturbed)
      .def_readwrite("failed", &TrialOutcome::failed)
      .def_readwrite("verified", &TrialOutcome::verified)
      .def_readwrite("reason", &TrialOutcome::reason);
  py::class_<Search>(m, "Search", "Which combination of strategies to try next.")
      .def(py::init<std::vector<StrategyFacts>, SearchOptions>(), py::arg("strategies"),
           py::arg_v("options", SearchOptions{}, "SearchOptions()"))
      .def("ask", &Search::ask, "The next trial; None where there is none left.")
      .def("tell", &Search::tell, py::arg("outcome"))
      .def("skip", &Search::skip, py::arg("strategy"), py::arg("reason"))
      .def("expect", &Search::expect, py::arg("strategy"), py::arg("speedup"),
           "What it is likely to make of the step as it is now; ask() again.")
      .def("charge", &Search::charge, py::arg("seconds"))
      .def("conclusion", &Search::conclusion, "How everything is measured against nothing at the end.")
      .def("seconds_left", &Search::seconds_left, "For everything together.")
      .def("drop", &Search::drop, py::arg("strategy"), py::arg("standing"), py::arg("reason"),
           "Take out for good what turned out bad after it was accepted; ask() goes on.")
      .def("best", &Search::best, "Names in force, in the order of the strategies.")
      .def("entries", &Search::entries);
}

void bind_certificate(py::module_& m) {
  py::class_<CertificateEntry>(m, "CertificateEntry", "What became of one strategy. Containers are copied in and out.")
      .def(py::init<>())
      .def(py::init([](std::string strategy, Kind kind, Standing standing, std::string reason) {
             CertificateEntry entry;
             entry.strategy = std::move(strategy);
             entry.kind = kind;
             entry.standing = standing;
             entry.reason = std::move(reason);
             return entry;
           }),
           py::arg("strategy"), py::arg("kind"), py::arg("standing"), py::arg("reason"))
      .def_readwrite("strategy", &CertificateEntry::strategy)
      .def_readwrite("kind", &CertificateEntry::kind)
      .def_readwrite("standing", &CertificateEntry::standing)
      .def_readwrite("reason", &CertificateEntry::reason)
      .def_readwrite("cost", &CertificateEntry::cost)
      .def_readwrite("speedup", &CertificateEntry::speedup)
      .def_readwrite("pairs", &CertificateEntry::pairs)
      .def_readwrite("cost_seconds", &CertificateEntry::cost_seconds)
      .def_readwrite("break_even_steps", &CertificateEntry::break_even_steps)
      .def_readwrite("evidence", &CertificateEntry::evidence);
  py::class_<CertificateKey>(m, "CertificateKey", "What a certificate holds for.")
      .def(py::init([](std::string hardware, std::string torch, std::string model, std::string options) {
             return CertificateKey{std::move(hardware), std::move(torch), std::move(model), std::move(options)};
           }),
           py::kw_only(), py::arg("hardware") = "", py::arg("torch") = "", py::arg("model") = "",
           py::arg("options") = "")
      .def_readwrite("hardware", &CertificateKey::hardware)
      .def_readwrite("torch", &CertificateKey::torch)
      .def_readwrite("model", &CertificateKey::model)
      .def_readwrite("options", &CertificateKey::options)
      .def("digest", &CertificateKey::digest);
  py::class_<Certificate>(m, "Certificate",
                          "What was tried on a training step and what pays. Containers are copied in and out: assign "
                          "`entries` whole.")
      .def(py::init<>())
      .def(py::init<const Certificate&>(), py::arg("other"))
      .def_readwrite("key", &Certificate::key)
      .def_readwrite("level", &Certificate::level)
      .def_readwrite("created", &Certificate::created)
      .def_readwrite("steps_planned", &Certificate::steps_planned)
      .def_readwrite("step_seconds", &Certificate::step_seconds)
      .def_readwrite("step_spread", &Certificate::step_spread)
      .def_readwrite("step_faults", &Certificate::step_faults)
      .def_readwrite("disturbance", &Certificate::disturbance)
      .def_readwrite("baseline_seconds", &Certificate::baseline_seconds)
      .def_readwrite("tuned_seconds", &Certificate::tuned_seconds)
      .def_readwrite("speedup", &Certificate::speedup)
      .def_readwrite("tuning_seconds", &Certificate::tuning_seconds)
      .def_readwrite("compile_seconds", &Certificate::compile_seconds)
      .def_readwrite("entries", &Certificate::entries)
      .def_readwrite("verification", &Certificate::verification)
      .def_readwrite("events", &Certificate::events)
      .def("accepted", &Certificate::accepted)
      .def("relate", &Certificate::relate, py::arg("seconds"), py::arg("faults"),
           "Tell what a step takes after the trials with nothing active.")
      .def("repaid_after", &Certificate::repaid_after, py::arg("with_compiling") = true)
      .def("to_json", &Certificate::to_json)
      .def_static("from_json", &Certificate::from_json, py::arg("text"))
      .def(
          "save", [](const Certificate& self, const PathArgument& path) { self.save(path.text); }, py::arg("path"),
          release_gil())
      .def_static(
          "load", [](const PathArgument& path) { return Certificate::load(path.text); }, py::arg("path"), release_gil())
      .def("to_text", &Certificate::to_text)
      .def("to_html", &Certificate::to_html);
  py::class_<CertificateStore>(m, "CertificateStore", "Where certificates are remembered.")
      .def(py::init([](const PathArgument& folder) { return CertificateStore(folder.text); }), py::arg("folder") = "")
      .def("find", &CertificateStore::find, py::arg("key"), release_gil())
      .def("put", &CertificateStore::put, py::arg("certificate"), release_gil())
      .def("forget", &CertificateStore::forget, py::arg("key"), release_gil())
      .def("try_put", &CertificateStore::try_put, py::arg("certificate"), release_gil(),
           "As put(), but why it failed is returned; empty where it did not.")
      .def("try_forget", &CertificateStore::try_forget, py::arg("key"), release_gil(),
           "As forget(), but why it failed is returned; empty where it did not.")
      .def_property_readonly("folder", &CertificateStore::folder);
  py::class_<StepNow>(m, "StepNow", "The step as given, measured now.")
      .def(py::init([](double seconds, double spread, bool disturbed, std::string time) {
             return StepNow{seconds, spread, disturbed, std::move(time)};
           }),
           py::kw_only(), py::arg("seconds"), py::arg("spread"), py::arg("disturbed"), py::arg("time"));
  m.def("why_not_trusted", &why_not_trusted, py::arg("certificate"), py::arg("now"),
        "Why a remembered certificate is to be measured anew; empty where it may be trusted.");
  m.def("worth_another_look", &worth_another_look, py::arg("certificate"),
        "Where nothing is active by it, the strategy to try again; or empty.");
  m.def("most_heap_speedup", &most_heap_speedup, py::arg("faults"), py::arg("step_seconds"),
        "Most that a step can gain where freed memory is kept for the next one.");
  m.def("hardware_key", &hardware_key, py::arg("root") = "/", "The processor's part of CertificateKey.hardware.");
  m.def("allows", &allows, py::arg("level"), py::arg("kind"), "Whether a level allows a kind of change.");
}

/// Of one dtype; `add` takes dense vectors on the CPU.
class AnyChangeMeter {
 public:
  AnyChangeMeter(std::size_t count, bool wide, double element, std::size_t sample) {
    if (wide) {
      meter_.emplace<ChangeMeter<double>>(count, element, sample);
    } else {
      meter_.emplace<ChangeMeter<float>>(count, element, sample);
    }
  }

  void add(const std::optional<at::Tensor>& before, const at::Tensor& after, const at::Tensor& wanted) {
    for (const at::Tensor& t : {before.value_or(after), after, wanted}) {
      OXY_CHECK(t.is_cpu() && t.dim() == 1 && t.is_contiguous(), InvalidArgument,
                "a change is measured of dense vectors on the CPU.");
    }
    std::visit(
        [&]<class T>(ChangeMeter<T>& meter) {
          const auto span = []<class U>(const at::Tensor& t, U*) {
            return std::span<const U>(t.const_data_ptr<U>(), static_cast<std::size_t>(t.numel()));
          };
          T* const of_run = nullptr;
          meter.add(before ? span(*before, of_run) : std::span<const T>(), span(after, of_run),
                    span(wanted, static_cast<double*>(nullptr)));
        },
        meter_);
  }

  bool stands_out() const {
    return std::visit([](const auto& meter) { return meter.stands_out(); }, meter_);
  }

  Change found() const {
    return std::visit([](const auto& meter) { return meter.found(); }, meter_);
  }

 private:
  std::variant<ChangeMeter<float>, ChangeMeter<double>> meter_{std::in_place_type<ChangeMeter<float>>, 1, 0.0, 1};
};

void bind_change(py::module_& m) {
  py::class_<AnyChangeMeter>(m, "ChangeMeter", "Measures a vector's change that comes in slices, in order.")
      .def(py::init<std::size_t, bool, double, std::size_t>(), py::arg("count"), py::arg("wide"), py::arg("element"),
           py::arg("sample"))
      .def("add", &AnyChangeMeter::add, release_gil(), py::arg("before"), py::arg("after"), py::arg("wanted"))
      .def_property_readonly("stands_out", &AnyChangeMeter::stands_out,
                             "Whether the slices are to be given once more: known after the last of them.")
      .def(
          "found",
          [](const AnyChangeMeter& meter) {
            const Change found = meter.found();
            return std::tuple(found.error, found.size, found.unit, found.slope, found.worst,
                              std::pair(found.upwards, found.outwards), found.bias_error, found.ratio);
          },
          "Error, size, unit, slope, worst, (upwards, outwards), bias_error, ratio; see oxytorch.tune.update.Change.");
}

void bind_load(py::module_& m) {
  py::class_<LoadSample>(m, "LoadSample", "Counters of who uses the processor, in seconds.")
      .def(py::init([](double wall, double own, std::optional<double> busy, std::optional<double> stolen,
                       std::optional<double> waited, std::optional<double> throttled,
                       int cores) { return LoadSample{wall, own, busy, stolen, waited, throttled, cores}; }),
           py::kw_only(), py::arg("wall"), py::arg("own"), py::arg("busy") = std::nullopt,
           py::arg("stolen") = std::nullopt, py::arg("waited") = std::nullopt, py::arg("throttled") = std::nullopt,
           py::arg("cores") = 1)
      .def_readonly("wall", &LoadSample::wall)
      .def_readonly("own", &LoadSample::own)
      .def_readonly("busy", &LoadSample::busy)
      .def_readonly("stolen", &LoadSample::stolen)
      .def_readonly("waited", &LoadSample::waited)
      .def_readonly("throttled", &LoadSample::throttled)
      .def_readonly("cores", &LoadSample::cores);
  py::class_<LoadWatch>(m, "LoadWatch", "Says of stretches of time whether other programs disturbed them.")
      .def(py::init<>())
      .def("begin", &LoadWatch::begin)
      .def("end", &LoadWatch::end, "Whether the stretch since begin() was disturbed.")
      .def_property_readonly("disturbed", &LoadWatch::disturbed, "Whether what was measured is not to be trusted.")
      .def_property_readonly("share", &LoadWatch::share, "Of the seconds watched, the disturbed ones.")
      .def_property_readonly("evidence", &LoadWatch::evidence);
  m.def("read_load", &read_load, py::arg("root") = "/");
  m.def("set_load_source", &set_load_source, py::arg("source"), "Where LoadWatch has its samples from; None: here.");
}

void bind_guard(py::module_& m) {
  m.def(
      "gradients_apart",
      [](const std::vector<std::optional<at::Tensor>>& with, const std::vector<std::optional<at::Tensor>>& without) {
        const auto plain = [](const std::vector<std::optional<at::Tensor>>& all) {
          std::vector<at::Tensor> tensors;
          for (const auto& t : all) tensors.push_back(t.value_or(at::Tensor()));
          return tensors;
        };
        const auto apart = gradients_apart(plain(with), plain(without));
        return std::pair(apart.gradient, apart.factor);
      },
      py::arg("with_changes"), py::arg("without"),
      "How far gradients are from those without changes: of the worst tensor, and of a factor common to all.");
  const GuardOptions options;
  py::class_<GuardOptions>(m, "GuardOptions", "When a guard looks, and what it takes changes back for.")
      .def(py::init([](std::int64_t first_check, std::int64_t check_every, int pairs, std::int64_t compare_every,
                       double loss_tolerance, double gradient_tolerance, double factor_tolerance, double threshold,
                       std::uint64_t seed) {
             return GuardOptions{first_check,        check_every,      pairs,     compare_every, loss_tolerance,
                                 gradient_tolerance, factor_tolerance, threshold, seed};
           }),
           py::kw_only(), py::arg("first_check") = options.first_check, py::arg("check_every") = options.check_every,
           py::arg("pairs") = options.pairs, py::arg("compare_every") = options.compare_every,
           py::arg("loss_tolerance") = options.loss_tolerance,
           py::arg("gradient_tolerance") = options.gradient_tolerance,
           py::arg("factor_tolerance") = options.factor_tolerance, py::arg("threshold") = options.threshold,
           py::arg("seed") = options.seed)
      .def_readwrite("first_check", &GuardOptions::first_check)
      .def_readwrite("check_every", &GuardOptions::check_every)
      .def_readwrite("pairs", &GuardOptions::pairs)
      .def_readwrite("compare_every", &GuardOptions::compare_every)
      .def_readwrite("loss_tolerance", &GuardOptions::loss_tolerance)
      .def_readwrite("gradient_tolerance", &GuardOptions::gradient_tolerance)
      .def_readwrite("factor_tolerance", &GuardOptions::factor_tolerance)
      .def_readwrite("threshold", &GuardOptions::threshold)
      .def("allow", &GuardOptions::allow, py::arg("kind"))
      .def_readwrite("seed", &GuardOptions::seed);
  py::class_<Guard>(m, "Guard", "Says at each step boundary how to take the next step of a certified run.")
      .def(py::init<GuardOptions>(), py::arg_v("options", GuardOptions{}, "GuardOptions()"))
      .def("before", &Guard::before)
      .def("after", &Guard::after, py::arg("seconds"))
      .def(
          "compared",
          [](Guard& guard, double with, double without, double gradient, double factor) {
            guard.compared(with, without, {gradient, factor});
          },
          py::arg("loss_with"), py::arg("loss_without"), py::arg("gradient") = 0.0, py::arg("factor") = 0.0)
      .def("suspicious", &Guard::suspicious)
      .def_property_readonly("reason", &Guard::reason)
      .def_property_readonly("step", &Guard::step);
}

}  // namespace

void bind_tune(py::module_& m) {
  bind_duel(m);
  bind_certificate(m);
  bind_search(m);
  bind_change(m);
  bind_guard(m);
  bind_load(m);
}

}  // namespace oxytorch::bindings
