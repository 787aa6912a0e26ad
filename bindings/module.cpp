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

PYBIND11_MODULE(_C, m) {
  m.doc() = "Oxytorch's native engine; use the Python package around it.";
  m.attr("__version__") = OXYTORCH_VERSION;
  m.attr("torch_version") = TORCH_VERSION;
  py::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Error& error) {
      PyErr_SetString(exception_type(error.code()), error.what());
    }
  });
  // A bad OXYTORCH_ISA is told here, not in the middle of the first step.
  static_cast<void>(active_isa());
  const auto room = [&m](const char* name, const char* doc) { return m.def_submodule(name, doc); };
  auto base = room("base", "Configuration, units, machine facts, statistics.");
  bind_base(base);
  auto backend = room("backend", "Device backends and their registry.");
  bind_backend(backend);
  auto environment = room("environment", "The registry of environment variables and its judge.");
  bind_environment(environment);
  auto machine = room("machine", "The host, the cluster and the hardware table.");
  bind_machine(machine);
  auto monitor = room("monitor", "Step and phase times, reports.");
  bind_monitor(monitor);
  auto optim = room("optim", "The step tail.");
  bind_optim(optim);
  bind_optim_stability(optim);
  auto amp = room("amp", "Mixed precision.");
  bind_amp(amp);
  auto trainer = room("trainer", "Host settings and the training step.");
  bind_trainer(trainer);
  auto tune = room("tune", "Duel, search, certificate and guard.");
  bind_tune(tune);
  bind_tuner(tune);
  bind_verdict(tune);
  bind_tune_operators(tune);
  // After trainer, which declares HostSetting.
  auto accelerator = room("accelerator", "Settings of the accelerator.");
  bind_accelerator(accelerator);
  auto memory = room("memory", "The pool of host memory.");
  bind_memory(memory);
}

}  // namespace oxytorch::bindings
