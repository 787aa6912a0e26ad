// NativeOperators and native steps for Python.
#include "tune_operators.h"

#include <pybind11/stl.h>

#include "oxytorch/tune/deferred_gates.h"
#include "oxytorch/tune/deferred_logits.h"
#include "oxytorch/tune/deferred_norms.h"
#include "oxytorch/tune/deferred_scores.h"
#include "oxytorch/tune/deferred_sums.h"
#include "oxytorch/tune/native_step.h"
#include "oxytorch/tune/operators.h"
#include "oxytorch/tune/own_random.h"
#include "scope.h"

namespace oxytorch::bindings {

using tune::DeferredGates;
using tune::DeferredLogits;
using tune::DeferredNorms;
using tune::DeferredScores;
using tune::DeferredSums;
using tune::NativeOperators;
using tune::OperatorReport;
using tune::OwnRandom;

namespace {

using tune::StepTensors;

// The Python front end counts steps in tensors.
void advance(const std::vector<at::Tensor>& steps) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& step : steps) step.add_(1);
}

void adam_step(const tune::AdamStep& options, const StepTensors& tensors, const std::vector<at::Tensor>& steps) {
  std::vector<double> counts;
  counts.reserve(steps.size());
  for (const at::Tensor& step : steps) counts.push_back(step.item<double>() + 1);
  tune::adam_step(options, tensors, counts);
  advance(steps);
}

}  // namespace

void bind_tune_operators(py::module_& m) {
  m.def("native_step_differs", &tune::native_step_differs, release_gil(),
        "Why the native steps do not have the bits of this torch's; empty where they do.");
  m.def(
      "adam_step",
      [](std::vector<at::Tensor> params, std::vector<at::Tensor> grads, std::vector<at::Tensor> exp_avgs,
         std::vector<at::Tensor> exp_avg_sqs, std::vector<at::Tensor> max_exp_avg_sqs,
         const std::vector<at::Tensor>& steps, double lr, double beta1, double beta2, double eps, double weight_decay,
         bool decoupled_weight_decay, bool maximize) {
        adam_step({.lr = lr,
                   .beta1 = beta1,
                   .beta2 = beta2,
                   .eps = eps,
                   .weight_decay = weight_decay,
                   .decoupled_weight_decay = decoupled_weight_decay,
                   .maximize = maximize},
                  {.params = std::move(params),
                   .grads = std::move(grads),
                   .exp_avgs = std::move(exp_avgs),
                   .exp_avg_sqs = std::move(exp_avg_sqs),
                   .max_exp_avg_sqs = std::move(max_exp_avg_sqs)},
                  steps);
      },
      py::arg("params"), py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("max_exp_avg_sqs"),
      py::arg("steps"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
      py::arg("weight_decay"), py::arg("decoupled_weight_decay"), py::arg("maximize"), release_gil(),
      "A step of torch.optim.Adam or AdamW with the bits of its loop over CPU tensors; `steps` go up by one.");
  m.def(
      "sgd_step",
      [](std::vector<at::Tensor> params, std::vector<at::Tensor> grads, std::vector<at::Tensor> momentum_buffers,
         double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize) {
        tune::sgd_step(
            {.lr = lr,
             .momentum = momentum,
             .dampening = dampening,
             .weight_decay = weight_decay,
             .nesterov = nesterov,
             .maximize = maximize},
            {.params = std::move(params), .grads = std::move(grads), .momentum_buffers = std::move(momentum_buffers)});
      },
      py::arg("params"), py::arg("grads"), py::arg("momentum_buffers"), py::kw_only(), py::arg("lr"),
      py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov"), py::arg("maximize"),
      release_gil(), "A step of torch.optim.SGD with the bits of its loop over CPU tensors.");
  py::class_<OperatorReport>(m, "OperatorReport", "What became of one native operator.")
      .def_readonly("name", &OperatorReport::name)
      .def_readonly("installed", &OperatorReport::installed)
      .def_readonly("reason", &OperatorReport::reason);
  py::class_<NativeOperators>(m, "NativeOperators", "Faster CPU operators behind torch's dispatcher.")
      .def(py::init<>())
      .def_static("exact_names", &NativeOperators::exact_names, "Operators with torch's bits.")
      .def_static("names", &NativeOperators::names)
      .def_static("serves_convolution", &NativeOperators::serves_convolution, py::arg("weight"),
                  "Whether the gradient of a convolution's weight of these sizes may be computed here.")
      .def_static("is_worth_a_trial", &NativeOperators::is_worth_a_trial, py::arg("embedding_elements"),
                  py::arg("parameter_elements"), py::arg("accumulates"),
                  "Whether gradients of embeddings alone are worth a trial.")
      .def_static("composed_attentions", &NativeOperators::composed_attentions,
                  "Calls of composed_attention that were served so far.")
      .def_static("joined_relus", &NativeOperators::joined_relus,
                  "Calls of relu that were computed with their linear layer so far.")
      .def_static("handed_on", &NativeOperators::handed_on, "Calls that went to torch's kernels so far.")
      .def("install", &NativeOperators::install, py::arg("names") = std::vector<std::string>(), release_gil())
      .def("uninstall", &NativeOperators::uninstall, release_gil())
      .def("installed", &NativeOperators::installed);
  bind_scope<DeferredLogits::Scope>(m, "LogitsScope", "Defers on this thread while it is entered.");
  py::class_<DeferredLogits>(m, "DeferredLogits", "Logits that are computed when something but their loss asks.")
      .def(py::init<at::Device>(), py::arg("device") = at::Device(at::kCPU), release_gil())
      .def_static("serves", &DeferredLogits::serves, py::arg("device"), "Whether layers on the device can be deferred.")
      .def_static("before_weights_change", &DeferredLogits::before_weights_change, release_gil(),
                  "Compute the values of deferred tensors that live.")
      .def_static("losses", &DeferredLogits::losses, "Losses computed without logits, so far.")
      .def_static("computed", &DeferredLogits::computed, "Deferred tensors whose values were computed after all.")
      .def(
          "scope", [](const DeferredLogits&) { return std::make_unique<ScopeManager<DeferredLogits::Scope>>(); },
          "Defer on this thread: a context manager.");
  bind_scope<DeferredNorms::Scope>(m, "NormsScope", "Defers on this thread while it is entered.");
  py::class_<DeferredNorms>(m, "DeferredNorms", "Batch normalization that waits for what follows it.")
      .def(py::init<>(), release_gil())
      .def_static("layers", &DeferredNorms::layers, "Layers that were taken, so far.")
      .def_static("joined", &DeferredNorms::joined, "Additions, ReLUs and poolings that joined one, so far.")
      .def(
          "scope", [](const DeferredNorms&) { return std::make_unique<ScopeManager<DeferredNorms::Scope>>(); },
          "Defer on this thread: a context manager.");
  bind_scope<DeferredSums::Scope>(m, "SumsScope", "Defers on this thread while it is entered.");
  py::class_<DeferredSums>(m, "DeferredSums", "Sums and dropout that wait for the normalization that follows them.")
      .def(py::init<>(), release_gil())
      .def_static("sums", &DeferredSums::sums, "Dropouts and additions that were taken, so far.")
      .def_static("joined", &DeferredSums::joined, "Normalizations that one was computed with, so far.")
      .def_static("serves", &DeferredSums::serves, py::arg("device"), "Whether norms on that device are taken.")
      .def_static("narrowed", &DeferredSums::narrowed,
                  "Normalizations that were written in the 16 bits in which a layer takes them, so far.")
      .def_static("written", &DeferredSums::written,
                  "RMS normalizations that a model wrote out and that were computed as one, so far.")
      .def(
          "scope", [](const DeferredSums&) { return std::make_unique<ScopeManager<DeferredSums::Scope>>(); },
          "Defer on this thread: a context manager.");
  bind_scope<DeferredScores::Scope>(m, "ScoresScope", "Defers on this thread while it is entered.");
  py::class_<DeferredScores>(m, "DeferredScores", "Scores of attention that wait for the product that ends it.")
      .def(py::init<>(), release_gil())
      .def_static("serves", &DeferredScores::serves, py::arg("device"), "Whether attention on that device is taken.")
      .def_static("scores", &DeferredScores::scores, "Products of queries and keys that were taken, so far.")
      .def_static("joined", &DeferredScores::joined, "Attention that was computed as one, so far.")
      .def(
          "scope", [](const DeferredScores&) { return std::make_unique<ScopeManager<DeferredScores::Scope>>(); },
          "Defer on this thread: a context manager.");
  bind_scope<DeferredGates::Scope>(m, "GatesScope", "Defers on this thread while it is entered.");
  py::class_<DeferredGates>(m, "DeferredGates", "Activations that wait for the product that follows them.")
      .def(py::init<>(), release_gil())
      .def_static("activations", &DeferredGates::activations, "Activations that were taken, so far.")
      .def_static("joined", &DeferredGates::joined, "Products that one was computed with, so far.")
      .def(
          "scope", [](const DeferredGates&) { return std::make_unique<ScopeManager<DeferredGates::Scope>>(); },
          "Defer on this thread: a context manager.");
  py::class_<OwnRandom>(m, "OwnRandom", "Random numbers of this thread alone, from where the default generator stands.")
      .def(py::init<>())
      .def("rewind", &OwnRandom::rewind, "Let the same numbers come once more.")
      .def("close", &OwnRandom::close, "Draw from the default generator again.");
}

}  // namespace oxytorch::bindings
