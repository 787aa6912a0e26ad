#include <pybind11/functional.h>

#include "bindings.h"

#include "oxytorch/host.h"
#include "oxytorch/optim/nonfinite.h"
#include "oxytorch/trainer/early_stopping.h"
#include "oxytorch/trainer/step_graph.h"
#include "oxytorch/tune/host.h"

namespace oxytorch::bindings {
namespace {

// An object with torch.cuda.CUDAGraph's methods.
class PythonRecorder final : public GraphRecorder {
 public:
  explicit PythonRecorder(py::object graph) : graph_(std::move(graph)) {}
  void begin() override { graph_.attr("capture_begin")(); }
  void end() override { graph_.attr("capture_end")(); }
  void replay() override { graph_.attr("replay")(); }

 private:
  py::object graph_;
};

std::unique_ptr<StepGraph> make_step_graph(StepGraph::Step step, std::function<std::vector<at::Tensor>()> state,
                                           std::function<std::string()> settings, const py::object& recorder,
                                           int warmup, int max_recordings, bool verify) {
  StepGraphOptions options{warmup, max_recordings, verify, std::move(state), std::move(settings), {}};
  if (!recorder.is_none()) options.recorder = [recorder] { return std::make_unique<PythonRecorder>(recorder()); };
  return std::make_unique<StepGraph>(std::move(step), std::move(options));
}

}  // namespace

void bind_trainer(py::module_& m) {
  py::class_<EarlyStopping>(m, "EarlyStopping", "The rule of early stopping.")
      .def(py::init([](std::int64_t patience, double min_delta, bool minimize) {
             return EarlyStopping({.patience = patience, .min_delta = min_delta, .minimize = minimize});
           }),
           py::arg("patience"), py::arg("min_delta"), py::arg("minimize"))
      .def(
          "step", [](EarlyStopping& self, double metric) { return self.step(metric); }, py::arg("metric"))
      .def("state", &EarlyStopping::state)
      .def("load_state", &EarlyStopping::load_state, py::arg("state"))
      .def_property_readonly("improved", &EarlyStopping::improved)
      .def_property_readonly("best", &EarlyStopping::best)
      .def_property_readonly("best_evaluation", &EarlyStopping::best_evaluation)
      .def_property_readonly("bad_evaluations", &EarlyStopping::bad_evaluations);
  py::class_<NonFiniteGuard>(m, "NonFiniteGuard", "What is done with a step whose gradients hold inf or NaN.")
      .def(py::init([](const std::string& policy) { return NonFiniteGuard(optim::parse_nonfinite(policy)); }),
           py::arg("policy"))
      .def("admits", &NonFiniteGuard::admits, py::arg("gradients"), release_gil(),
           "Whether the step may be taken; RuntimeError under 'raise'.")
      .def_property_readonly("skipped", &NonFiniteGuard::skipped, "Steps that were not.");
  py::class_<StepGraph>(m, "StepGraph", "A training step recorded once and replayed.")
      .def(py::init(&make_step_graph), py::arg("step"), py::arg("state"), py::arg("settings"), py::arg("recorder"),
           py::arg("warmup"), py::arg("max_recordings"), py::arg("verify"))
      .def("__call__", &StepGraph::operator(), py::arg("inputs"))
      .def_property_readonly("replayed", &StepGraph::replayed)
      .def_property_readonly("reason", &StepGraph::reason)
      .def_property_readonly("replays", &StepGraph::replays)
      .def_property_readonly("recordings", &StepGraph::recordings);
  py::class_<HostSetting>(m, "HostSetting",
                          "A setting of the host process: what was done or why not, and the way back.")
      .def_property_readonly("name", &HostSetting::name)
      .def_property_readonly("is_applied", &HostSetting::is_applied, "True from a successful apply until revert().")
      .def_property_readonly("is_in_effect", &HostSetting::is_in_effect, "Applied here, or found so.")
      .def_property_readonly("reason", &HostSetting::reason, "What was done, or why nothing was.")
      .def_property_readonly("cost", &HostSetting::cost, "What it costs; empty where nothing was done.")
      .def("revert", &HostSetting::revert, release_gil(), "Takes the setting back.");
  m.def("tune_allocator", &tune_allocator, py::arg("retain_limit") = std::nullopt, release_gil(),
        "Makes glibc keep freed memory for the next step, up to retain_limit bytes.");
  m.def("map_large_blocks", &map_large_blocks, release_gil(),
        "Has large blocks go back to the kernel as they are freed; see oxytorch/host.h.");
  m.def("keep_heap", &keep_heap, py::arg("retain_limit") = std::nullopt, release_gil(),
        "Keeps glibc from trimming its heap between steps.");
  m.def("note_heap", &note_heap, release_gil(), "Notes glibc's thresholds as those to go back to.");
  m.def("heap_mmap_threshold", &heap_mmap_threshold, release_gil(),
        "Bytes from which a block has a mapping of its own; None where malloc is not glibc's to ask.");
  m.def("allocator_retained_bytes", &allocator_retained_bytes, release_gil(), "Bytes held free for reuse.");
  m.def("allocator_trims", &allocator_trims, "Times that free memory was given back.");
  m.def("page_faults", &page_faults, "Page faults of this process since it started.");
  m.def("flush_denormals", &flush_denormals, release_gil(), "Takes denormals as zero on every intra-op thread.");
  m.def("set_flush_denormals", &set_flush_denormals, py::arg("flush"), release_gil(),
        "torch.set_flush_denormal() of every intra-op thread, not of the calling thread alone.");
  m.def("use_deterministic_algorithms", &use_deterministic_algorithms, release_gil(),
        "Turns on torch's deterministic algorithms; the last revert() restores what was before.");
  m.def("pin_threads", &pin_threads, release_gil(), "Keeps each intra-op worker on a core of its own.");
  m.def("resolve_vector_math", &resolve_vector_math, release_gil(),
        "Has MKL choose its kernels of torch's vector functions from this thread; returns what it called, as "
        "'sqrt.float32'.");
  m.def("size_threads", &size_threads, py::arg("threads") = std::nullopt, release_gil(),
        "Sets the intra-op threads to the cores this process may use.");
  m.def("size_interop_threads", &size_interop_threads, py::arg("threads"), release_gil(),
        "Sets the threads that run operators beside each other; torch takes their number once in a process.");
  m.def(
      "flush_state",
      [] {
        FlushState state{};
        {
          py::gil_scoped_release release;
          state = flush_state();
        }
        return py::make_tuple(state.flushing, state.threads);
      },
      "(threads that flush denormals, threads).");
}

}  // namespace oxytorch::bindings
