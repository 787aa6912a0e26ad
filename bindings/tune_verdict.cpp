// Measures and verdicts of the verifier: the languages take the steps, and these judge what they showed.
#include "tune_verdict.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/tune/apart.h"
#include "oxytorch/tune/keep_double.h"
#include "oxytorch/tune/kinks.h"
#include "oxytorch/tune/measure.h"
#include "oxytorch/tune/verdict.h"
#include "tune_words.h"

namespace oxytorch::bindings {
namespace {

using namespace tune;
using MaybeTensor = std::optional<at::Tensor>;
using Gradients = std::vector<MaybeTensor>;

/// None is undefined.
std::vector<at::Tensor> tensors_of(const Gradients& all) {
  std::vector<at::Tensor> tensors;
  for (const auto& t : all) tensors.push_back(t.value_or(at::Tensor()));
  return tensors;
}

Gradients gradients_of(const std::vector<at::Tensor>& all) {
  Gradients gradients;
  for (const auto& t : all) gradients.push_back(t.defined() ? MaybeTensor(t) : std::nullopt);
  return gradients;
}

const Allowance& allowance_of(const std::string& name) {
  if (name == "reduced") return kReduced;
  if (name == "unknown") return kUnknown;
  OXY_CHECK(name == "float32", InvalidArgument, "the allowance is ", in_quotes(name),
            ", expected 'float32', 'reduced' or 'unknown'.");
  return kFloat32;
}

void bind_values(py::module_& m) {
  py::class_<ValueErrors>(m, "ValueErrors", "How far one step was from what it should be.")
      .def(py::init<>())
      .def_readonly("loss", &ValueErrors::loss)
      .def_readonly("loss_size", &ValueErrors::loss_size)
      .def_readonly("slope", &ValueErrors::slope)
      .def_readonly("whole", &ValueErrors::whole)
      .def_readonly("wrong", &ValueErrors::wrong, "What is missing, of another shape or not finite.")
      .def_property_readonly("worst", &ValueErrors::worst, "Largest error of a gradient, relative.");
  py::class_<ValueMeter>(m, "ValueMeter",
                         "Measures loss, gradients and buffers of one step, one tensor after the other.")
      .def(py::init<double, double>(), py::arg("loss"), py::arg("right"))
      .def(
          "gradient",
          [](ValueMeter& meter, const std::string& name, const MaybeTensor& given, double factor,
             const MaybeTensor& right) {
            meter.gradient(name, given.value_or(at::Tensor()), factor, right.value_or(at::Tensor()));
          },
          release_gil(), py::arg("name"), py::arg("given"), py::arg("factor"), py::arg("right"))
      .def(
          "buffer",
          [](ValueMeter& meter, const std::string& name, const MaybeTensor& given, const at::Tensor& right,
             const MaybeTensor& before) {
            meter.buffer(name, given.value_or(at::Tensor()), right, before.value_or(at::Tensor()));
          },
          release_gil(), py::arg("name"), py::arg("given"), py::arg("right"), py::arg("before"))
      .def("stepped", &ValueMeter::stepped, py::arg("given"), py::arg("right"),
           "Whether the optimizer is stepped on one side alone.")
      .def("found", &ValueMeter::found);
  py::class_<Excess>(m, "Excess", "Something beyond what is allowed.")
      .def_readonly("words", &Excess::words)
      .def_readonly("relative", &Excess::relative, "The error against the size of what it should be.");
  m.def(
      "values_beyond",
      [](const ValueErrors& found, const ValueErrors& usual, const std::string& allowance) {
        return values_beyond(found, usual, allowance_of(allowance));
      },
      py::arg("found"), py::arg("usual"), py::arg("allowance"),
      "What is further off than the yardstick's own error and the allowance ('float32', 'reduced' or 'unknown') "
      "explain.");
  py::class_<Kinks>(m, "Kinks", "Tells a rounding across a kink from a fault of gradients; see oxytorch/tune/kinks.h.")
      .def(py::init([](const Gradients& given, const Gradients& right) {
             return Kinks(tensors_of(given), tensors_of(right));
           }),
           py::arg("given"), py::arg("right"))
      .def(
          "add",
          [](Kinks& kinks, const Gradients& given, const Gradients& right) {
            kinks.add(tensors_of(given), tensors_of(right));
          },
          release_gil(), py::arg("given"), py::arg("right"), "Those of both at a state apart.")
      .def(
          "unexplained", [](const Kinks& kinks) { return gradients_of(kinks.unexplained()); }, release_gil(),
          "The given gradients less what of their error is a rounding across a kink.");
  py::class_<KnownKinks>(m, "KnownKinks",
                         "What the kinks of some steps say of a candidate's others; see oxytorch/tune/kinks.h.")
      .def(py::init<>())
      .def("learn", &KnownKinks::learn, release_gil(), py::arg("kinks"), "Of one more step.")
      .def("speak", &KnownKinks::speak, "Whether enough steps are known to speak for another.")
      .def(
          "unexplained",
          [](const KnownKinks& known, const Gradients& given, const Gradients& right) {
            return gradients_of(known.unexplained(tensors_of(given), tensors_of(right)));
          },
          release_gil(), py::arg("given"), py::arg("right"),
          "The given gradients, with those of the reference in the place of those whose error is no larger.");
  struct KeptDouble {
    std::optional<KeepDouble> kept;
  };
  py::class_<KeptDouble>(m, "KeepDouble",
                         "Inside, tensors of float64 stay so where they are cast; see oxytorch/tune/keep_double.h.")
      .def(py::init<>())
      .def("__enter__", [](KeptDouble& self) { self.kept.emplace(); })
      .def(
          "__exit__",
          [](KeptDouble& self, const py::object&, const py::object&, const py::object&) { self.kept.reset(); },
          py::arg("kind"), py::arg("error"), py::arg("trace"));
  py::class_<Nudge>(m, "Nudge", "The way to a state apart; see oxytorch/tune/kinks.h.")
      .def(py::init<const std::vector<at::Tensor>&, bool, int, int>(), py::arg("parameters"),
           py::arg("reduced_precision"), py::arg("step"), py::arg("state"))
      .def("moved", &Nudge::moved, release_gil(), py::arg("parameter"), "The next parameter, moved.");
  m.attr("kink_states") = kKinkStates;
}

void bind_updates(py::module_& m) {
  py::class_<NamedChange>(m, "NamedChange", "The change of a parameter or of its optimizer state in one step.")
      .def(
          py::init([](std::string name, double error, double size, double unit, double slope, double worst,
                      double upwards, double outwards, double bias_error, double ratio, std::int64_t count,
                      bool state) {
            return NamedChange{
                std::move(name), {error, size, unit, slope, worst, upwards, outwards, bias_error, ratio}, count, state};
          }),
          py::arg("name"), py::arg("error"), py::arg("size"), py::arg("unit"), py::arg("slope"), py::arg("worst"),
          py::arg("upwards"), py::arg("outwards"), py::arg("bias_error"), py::arg("ratio"), py::arg("count"),
          py::arg("state"));
  m.def(
      "update_faults",
      [](const std::vector<NamedChange>& found, const std::vector<NamedChange>& base,
         const std::map<std::string, double>& clipping, bool loose_state) {
        auto faults = update_faults(found, base, clipping, loose_state);
        return std::pair(std::move(faults.words), faults.worst);
      },
      py::arg("found"), py::arg("base"), py::arg("clipping"), py::arg("loose_state"),
      "What of one step's update is further off than it may be, and the largest error over what is allowed.");
  m.def(
      "clip_factor", [](const Gradients& gradients, double norm) { return clip_factor(tensors_of(gradients), norm); },
      release_gil(), py::arg("gradients"), py::arg("norm"),
      "By what gradients are multiplied where they are clipped by norm; 1 where they are not above it.");
  m.def(
      "norm_error", [](const Gradients& gradients, double norm) { return norm_error(tensors_of(gradients), norm); },
      release_gil(), py::arg("gradients"), py::arg("norm"),
      "How far torch's own norm of gradients is from that in float64, relative.");
  m.def(
      "gradients_apart",
      [](const Gradients& with, const Gradients& without) {
        const auto apart = gradients_apart(tensors_of(with), tensors_of(without));
        return std::pair(apart.gradient, apart.factor);
      },
      py::arg("with_changes"), py::arg("without"),
      "How far gradients are from those without changes: of the worst tensor, and of a factor common to all.");
}

}  // namespace

void bind_verdict(py::module_& m) {
  bind_values(m);
  bind_updates(m);
  m.def(
      "draws_fault",
      [](std::vector<double> losses, std::vector<double> spreads, std::vector<double> usual_losses,
         std::vector<double> usual_spreads) {
        return draws_fault({std::move(losses), std::move(spreads)},
                           {std::move(usual_losses), std::move(usual_spreads)});
      },
      py::arg("losses"), py::arg("spreads"), py::arg("usual_losses"), py::arg("usual_spreads"),
      "What is wrong with random numbers that were drawn, against the step as given; empty where nothing.");
  m.def("generators_fault", &generators_fault, py::arg("start"), py::arg("found"), py::arg("usual"),
        "Whether generators stand still where they move as given, or the reverse; empty where neither.");
  m.def("quotient_allowance", &quotient_allowance, py::arg("kind"), py::arg("usual"),
        "How far a gradient may be from a difference quotient of the loss, relative.");
  m.def(
      "band_of",
      [](const std::vector<double>& ends, std::optional<double> reduced) {
        const auto band = band_of(ends, reduced);
        return std::pair(band.low, band.high);
      },
      py::arg("ends"), py::arg("reduced") = std::nullopt,
      "Between which losses seeds end, of those that were seen; and near where a lower precision of torch's own ends.");
  m.def("in_any_band", &in_any_band, py::arg("end"), py::arg("usual"), py::arg("first"),
        "So near to the end as given that no seeds need to be run.");
  m.def(
      "draw_steps",
      [](int count, int dense, std::uint64_t drawn_by) {
        auto steps = draw_steps(count, dense, drawn_by);
        return std::pair(std::move(steps.compared), std::move(steps.wide));
      },
      py::arg("count"), py::arg("dense"), py::arg("drawn_by"), "Steps that are compared, and those in float64.");
}

}  // namespace oxytorch::bindings
