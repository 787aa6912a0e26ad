#include "bindings.h"

#include "oxytorch/error.h"
#include "oxytorch/isa.h"
#include "oxytorch/version.h"
#include "tune.h"
#include "tune_operators.h"
#include "tune_tuner.h"
#include "tune_verdict.h"

namespace oxytorch::bindings {
namespace {

PyObject* exception_type(ErrorCode code) {
  switch (code) {
    case ErrorCode::InvalidArgument: return PyExc_ValueError;
    case ErrorCode::InvalidType: return PyExc_TypeError;
    case ErrorCode::OutOfRange: return PyExc_IndexError;
    case ErrorCode::NotFound: return PyExc_FileNotFoundError;
    case ErrorCode::OutOfMemory: return py::module_::import("torch").attr("OutOfMemoryError").ptr();
    case ErrorCode::NotSupported: return PyExc_NotImplementedError;
    case ErrorCode::InvalidState: return PyExc_RuntimeError;
    case ErrorCode::DeviceError: return PyExc_RuntimeError;
    case ErrorCode::Io: return PyExc_OSError;
    case ErrorCode::Internal: return PyExc_AssertionError;
  }
  return PyExc_RuntimeError;
}

}  // namespace

void set_python_error(const Error& error) { PyErr_SetString(exception_type(error.code()), error.what()); }

PYBIND11_MODULE(_C, m) {
  m.doc() = "Oxytorch's native engine; use the Python package around it.";
  m.attr("__version__") = OXYTORCH_VERSION;
  m.attr("torch_version") = TORCH_VERSION;
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Error& error) {
      set_python_error(error);
    }
  });
  // A bad OXYTORCH_ISA is told here, not in the middle of the first step.
  static_cast<void>(active_isa());
  const auto submodule = [&m](const char* name, const char* doc) { return m.def_submodule(name, doc); };
  auto base = submodule("base", "Configuration, units, machine facts, statistics.");
  bind_base(base);
  bind_base_log(base);
  auto backend = submodule("backend", "Device backends and their registry.");
  bind_backend(backend);
  auto environment = submodule("environment", "The registry of environment variables and its judge.");
  bind_environment(environment);
  auto machine = submodule("machine", "The host, the cluster and the hardware table.");
  bind_machine(machine);
  auto monitor = submodule("monitor", "Step and phase times, reports.");
  bind_monitor(monitor);
  auto data = submodule("data", "Datasets, stages and the loader.");
  bind_data(data);
  auto optim = submodule("optim", "The step tail.");
  bind_optim(optim);
  bind_optim_stability(optim);
  auto amp = submodule("amp", "Mixed precision.");
  bind_amp(amp);
  auto ops = submodule("ops", "Of training operators, what is no operator.");
  bind_ops(ops);
  auto trainer = submodule("trainer", "Host settings and the training step.");
  bind_trainer(trainer);
  auto tune = submodule("tune", "Paired test, search, certificate and guard.");
  bind_tune(tune);
  bind_tuner(tune);
  bind_verdict(tune);
  bind_tune_operators(tune);
  // After trainer, which declares HostSetting.
  auto accelerator = submodule("accelerator", "Settings of the accelerator.");
  bind_accelerator(accelerator);
  auto memory = submodule("memory", "The meter, checkpoints, and the pool of host memory.");
  bind_memory(memory);
  bind_memory_meter(memory);
  bind_memory_manager(memory);
}

}  // namespace oxytorch::bindings
