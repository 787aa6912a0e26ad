#include "bindings.h"

#include "oxytorch/host.h"
#include "oxytorch/trainer/host.h"

namespace oxytorch::bindings {

void bind_trainer(py::module_& m) {
  py::class_<HostSetting>(m, "HostSetting",
                          "A setting of the host process: what was done or why not, and the way back.")
      .def_property_readonly("name", &HostSetting::name)
      .def_property_readonly("is_applied", &HostSetting::is_applied, "True from a successful apply until revert().")
      .def_property_readonly("reason", &HostSetting::reason, "What was done, or why nothing was.")
      .def_property_readonly("cost", &HostSetting::cost, "What it costs; empty where nothing was done.")
      .def("revert", &HostSetting::revert, release_gil(), "Takes the setting back.");
  m.def("tune_allocator", &tune_allocator, py::arg("retain_limit") = std::nullopt, release_gil(),
        "Makes glibc keep freed memory for the next step, up to retain_limit bytes.");
  m.def("allocator_retained_bytes", &allocator_retained_bytes, release_gil(), "Bytes held free for reuse.");
  m.def("allocator_trims", &allocator_trims, "Times that free memory was given back.");
  m.def("page_faults", &page_faults, "Page faults of this process since it started.");
  m.def("flush_denormals", &flush_denormals, release_gil(), "Takes denormals as zero on every intra-op thread.");
  m.def("size_threads", &size_threads, py::arg("threads") = std::nullopt, release_gil(),
        "Sets the intra-op threads to the cores this process may use.");
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
