// What Python reads of the native tuner: certificates, options of paired tests, measures. Enumerations are strings.
#include "tune.h"

#include <pybind11/functional.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>

#include "base/spelling.h"
#include "oxytorch/error.h"
#include "oxytorch/load.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/change.h"
#include "oxytorch/tune/paired_test.h"
#include "path.h"
#include "tune_words.h"

namespace oxytorch::bindings {
namespace {

using namespace tune;
using Names = std::vector<std::string>;

void bind_paired_test(py::module_& m) {
  py::class_<Interval>(m, "Interval",
                       "An estimate with the interval that holds the true value in `confidence` of cases.")
      .def(py::init<double, double, double, double>(), py::arg("low"), py::arg("mid"), py::arg("high"),
           py::arg("confidence") = 0.95)
      .def_readwrite("low", &Interval::low)
      .def_readwrite("mid", &Interval::mid)
      .def_readwrite("high", &Interval::high)
      .def_readwrite("confidence", &Interval::confidence);
  const PairedTestOptions defaults;
  py::class_<PairedTestOptions>(m, "PairedTestOptions", "How sure a paired test must be, and how long it may take.")
      .def(py::init([](double threshold, double confidence, double false_accept, int least_pairs, int most_pairs,
                       int patience, double worth, double most_seconds, double budget_seconds, double repay_steps,
                       std::uint64_t seed) {
             return PairedTestOptions{.threshold = threshold,
                                      .confidence = confidence,
                                      .false_accept = false_accept,
                                      .least_pairs = least_pairs,
                                      .most_pairs = most_pairs,
                                      .patience = patience,
                                      .worth = worth,
                                      .most_seconds = most_seconds,
                                      .budget_seconds = budget_seconds,
                                      .repay_steps = repay_steps,
                                      .seed = seed};
           }),
           py::kw_only(), py::arg("threshold") = defaults.threshold, py::arg("confidence") = defaults.confidence,
           py::arg("false_accept") = defaults.false_accept, py::arg("least_pairs") = defaults.least_pairs,
           py::arg("most_pairs") = defaults.most_pairs, py::arg("patience") = defaults.patience,
           py::arg("worth") = defaults.worth, py::arg("most_seconds") = defaults.most_seconds,
           py::arg("budget_seconds") = defaults.budget_seconds, py::arg("repay_steps") = defaults.repay_steps,
           py::arg("seed") = defaults.seed)
      .def_readwrite("threshold", &PairedTestOptions::threshold)
      .def_readwrite("confidence", &PairedTestOptions::confidence)
      .def_readwrite("false_accept", &PairedTestOptions::false_accept)
      .def_readwrite("least_pairs", &PairedTestOptions::least_pairs)
      .def_readwrite("most_pairs", &PairedTestOptions::most_pairs)
      .def_readwrite("patience", &PairedTestOptions::patience)
      .def_readwrite("worth", &PairedTestOptions::worth)
      .def_static("conclusion", &PairedTestOptions::conclusion, py::arg("seed"),
                  "Of everything against nothing at the end.")
      .def_static("member", &PairedTestOptions::member, py::arg("seed"),
                  "Of a remembered certificate without one of it.")
      .def_static("canary", &PairedTestOptions::canary, py::arg("seed"), "Of a remembered certificate.")
      .def_readwrite("most_seconds", &PairedTestOptions::most_seconds)
      .def_readwrite("budget_seconds", &PairedTestOptions::budget_seconds)
      .def_readwrite("repay_steps", &PairedTestOptions::repay_steps)
      .def_readwrite("seed", &PairedTestOptions::seed);
  py::class_<PairedTestResult>(m, "PairedTestResult",
                               "What a paired test has shown; speedup is incumbent over challenger.")
      .def(py::init<>())
      .def_readwrite("decision", &PairedTestResult::decision)
      .def_readwrite("speedup", &PairedTestResult::speedup)
      .def_readwrite("incumbent", &PairedTestResult::incumbent, "Median seconds a step.")
      .def_readwrite("challenger", &PairedTestResult::challenger, "Median seconds a step.")
      .def_readwrite("pairs", &PairedTestResult::pairs)
      .def_readwrite("p_value", &PairedTestResult::p_value)
      .def_readwrite("reason", &PairedTestResult::reason);
}

void bind_certificate(py::module_& m) {
  py::class_<CertificateEntry>(m, "CertificateEntry", "What became of one strategy. Containers are copied in and out.")
      .def(py::init<>())
      .def(py::init([](std::string strategy, Kind kind, Status status, std::string reason) {
             CertificateEntry entry;
             entry.strategy = std::move(strategy);
             entry.kind = kind;
             entry.status = status;
             entry.reason = std::move(reason);
             return entry;
           }),
           py::arg("strategy"), py::arg("kind"), py::arg("status"), py::arg("reason"))
      .def_readwrite("strategy", &CertificateEntry::strategy)
      .def_readwrite("kind", &CertificateEntry::kind)
      .def_readwrite("status", &CertificateEntry::status)
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
      .def_readwrite("given_peak_bytes", &Certificate::given_peak_bytes)
      .def_readwrite("tuned_peak_bytes", &Certificate::tuned_peak_bytes)
      .def_readwrite("tuning_peak_bytes", &Certificate::tuning_peak_bytes)
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
  m.def("read_load", &read_load, py::arg("root") = "/");
  m.def("set_load_source", &set_load_source, py::arg("source"), "Where LoadWatch has its samples from; None: here.");
}

}  // namespace

void bind_tune(py::module_& m) {
  bind_paired_test(m);
  bind_certificate(m);
  bind_change(m);
  bind_load(m);
}

}  // namespace oxytorch::bindings
