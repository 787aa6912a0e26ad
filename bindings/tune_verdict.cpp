// Measures and verdicts of the verifier: the languages take the steps, and these judge what they showed.
#include "tune_verdict.h"

#include <pybind11/functional.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/tune/apart.h"
#include "oxytorch/tune/keep_double.h"
#include "oxytorch/tune/kinks.h"
#include "oxytorch/tune/measure.h"
#include "oxytorch/tune/step_judge.h"
#include "oxytorch/tune/verdict.h"
#include "scope.h"
#include "tune_words.h"

namespace oxytorch::bindings {
namespace {

using namespace tune;
using MaybeTensor = std::optional<at::Tensor>;
using MaybeTensors = std::vector<MaybeTensor>;

/// None is undefined.
std::vector<at::Tensor> tensors_of(const MaybeTensors& all) {
  std::vector<at::Tensor> tensors;
  for (const auto& t : all) tensors.push_back(t.value_or(at::Tensor()));
  return tensors;
}

MaybeTensors gradients_of(const std::vector<at::Tensor>& all) {
  MaybeTensors gradients;
  for (const auto& t : all) gradients.push_back(t.defined() ? MaybeTensor(t) : std::nullopt);
  return gradients;
}

/// A step whose members are those of a Python object.
class PythonComparedStep : public ComparedStep {
 public:
  Gradients gradients() override { return taken("gradients"); }
  Gradients take_as_given() override { return taken("take_as_given"); }
  Gradients take_in_float64() override { return taken("take_in_float64"); }
  ValueErrors errors() override { PYBIND11_OVERRIDE_PURE(ValueErrors, ComparedStep, errors); }
  ValueErrors errors_with(const Gradients& gradients) override {
    const py::gil_scoped_acquire gil;
    return asked("errors_with")(gradients_of(gradients)).cast<ValueErrors>();
  }
  ValueErrors yardstick_errors() override { PYBIND11_OVERRIDE_PURE(ValueErrors, ComparedStep, yardstick_errors); }
  std::pair<Gradients, Gradients> take_apart(int state) override {
    const py::gil_scoped_acquire gil;
    const auto [mine, reference] = asked("take_apart")(state).cast<std::pair<MaybeTensors, MaybeTensors>>();
    return {tensors_of(mine), tensors_of(reference)};
  }

 private:
  Gradients taken(const char* name) const {
    const py::gil_scoped_acquire gil;
    return tensors_of(asked(name)().cast<MaybeTensors>());
  }
  py::function asked(const char* name) const {
    auto found = py::get_override(static_cast<const ComparedStep*>(this), name);
    if (!found) throw py::type_error(std::string("a compared step needs a method ") + name + "().");
    return found;
  }
};

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
  py::class_<ComparedStep, PythonComparedStep>(
      m, "ComparedStep", "A step of a candidate that the judge has taken again; see oxytorch/tune/step_judge.h.")
      .def(py::init<>());
  py::class_<StepJudge>(m, "StepJudge",
                        "Judges loss, gradients and buffers of a candidate's steps; see oxytorch/tune/step_judge.h.")
      .def(py::init<ValueErrors, bool, bool, bool>(), py::arg("usual"), py::kw_only(), py::arg("reduced_precision"),
           py::arg("has_float64"), py::arg("short_look"))
      .def("fault", &StepJudge::fault, release_gil(), py::arg("step"), py::arg("wide"),
           "What is wrong with a step; empty where nothing is.")
      .def(
          "evidence",
          [](const StepJudge& judge) {
            std::map<std::string, double> evidence;
            judge.add_to(evidence);
            return evidence;
          },
          "Figures of the steps so far.");
  bind_scope<KeepDouble>(m, "KeepDouble",
                         "Inside, tensors of float64 stay so where they are cast; see oxytorch/tune/keep_double.h.");
  py::class_<Nudge>(m, "Nudge", "The way to a state apart; see oxytorch/tune/kinks.h.")
      .def(py::init<const std::vector<at::Tensor>&, bool, int, int>(), py::arg("parameters"),
           py::arg("reduced_precision"), py::arg("step"), py::arg("state"))
      .def("moved", &Nudge::moved, release_gil(), py::arg("parameter"), "The next parameter, moved.");
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
      "clip_factor",
      [](const MaybeTensors& gradients, double norm) { return clip_factor(tensors_of(gradients), norm); },
      release_gil(), py::arg("gradients"), py::arg("norm"),
      "By what gradients are multiplied where they are clipped by norm; 1 where they are not above it.");
  m.def(
      "norm_error", [](const MaybeTensors& gradients, double norm) { return norm_error(tensors_of(gradients), norm); },
      release_gil(), py::arg("gradients"), py::arg("norm"),
      "How far torch's own norm of gradients is from that in float64, relative.");
  m.def(
      "gradients_apart",
      [](const MaybeTensors& with, const MaybeTensors& without) {
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
      "end_fault",
      [](int steps, double end, double usual, double first, std::function<std::vector<double>()> as_given,
         std::optional<std::function<double()>> reduced) {
        std::map<std::string, double> evidence;
        auto words =
            end_fault({steps, end, usual, first, std::move(as_given), std::move(reduced).value_or(nullptr)}, evidence);
        return std::pair(std::move(words), std::move(evidence));
      },
      py::arg("steps"), py::arg("end"), py::arg("usual"), py::arg("first"), py::arg("as_given"), py::arg("reduced"),
      "Why a run may not end there, empty where it may, and figures; other runs are taken only where they decide.");
  m.def("losses_fault", &losses_fault, release_gil(), py::arg("losses"), py::arg("as_given"),
        "What the losses of steps show by themselves, beside those as given; empty where nothing.");
  m.def(
      "draw_steps",
      [](int count, int dense, std::uint64_t drawn_by) {
        auto steps = draw_steps(count, dense, drawn_by);
        return std::pair(std::move(steps.compared), std::move(steps.wide));
      },
      py::arg("count"), py::arg("dense"), py::arg("drawn_by"), "Steps that are compared, and those in float64.");
}

}  // namespace oxytorch::bindings
