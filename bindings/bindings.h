/// What every file of bindings/ shares: torch's own pybind11 and the list of modules.
#pragma once

#include <torch/extension.h>

#include "oxytorch/error.h"

namespace oxytorch::bindings {

namespace py = pybind11;

/// Hands the messages to Python that were logged while this thread did not hold the GIL; see base_log.cpp. With the
/// GIL.
void deliver_log() noexcept;

/// Sets the Python error that stands for it: the one table of exception types.
void set_python_error(const Error& error);

struct GilReleased {
  struct Deliver {
    ~Deliver() { deliver_log(); }
  } afterwards;  // first, so that it ends last: the GIL is held again
  py::gil_scoped_release released;
};

/// Releases the GIL around a call that may take over 10 us.
using release_gil = py::call_guard<GilReleased>;

void bind_base(py::module_& m);
void bind_base_log(py::module_& m);
void bind_backend(py::module_& m);
void bind_environment(py::module_& m);
void bind_machine(py::module_& m);
void bind_monitor(py::module_& m);
void bind_ops(py::module_& m);
void bind_optim(py::module_& m);
void bind_optim_stability(py::module_& m);
void bind_amp(py::module_& m);
void bind_accelerator(py::module_& m);
void bind_memory(py::module_& m);
void bind_memory_manager(py::module_& m);
void bind_memory_meter(py::module_& m);
void bind_data(py::module_& m);
void bind_trainer(py::module_& m);

}  // namespace oxytorch::bindings
