#include "oxytorch/memory.h"

#include "bindings.h"

namespace oxytorch::bindings {

void bind_memory(py::module_& m) {
  py::class_<HostPoolStats>(m, "HostPoolStats", "Bytes and counts of the pool of host memory.")
      .def_readonly("live_bytes", &HostPoolStats::live_bytes)
      .def_readonly("peak_bytes", &HostPoolStats::peak_bytes)
      .def_readonly("retained_bytes", &HostPoolStats::retained_bytes)
      .def_readonly("limit_bytes", &HostPoolStats::limit_bytes)
      .def_readonly("hits", &HostPoolStats::hits)
      .def_readonly("misses", &HostPoolStats::misses)
      .def_readonly("returned_bytes", &HostPoolStats::returned_bytes);
  m.attr("pooled_bytes") = kPooledBytes;
  m.def("use_host_pool", &use_host_pool, py::arg("retain_limit") = std::nullopt, release_gil(),
        "Puts the pool under torch's CPU tensors.");
  m.def("keep_host_pool", &keep_host_pool, release_gil(),
        "Lets the pool keep its free pages while it is taken out, until reverted: for trials.");
  m.def("give_back_host_memory", &give_back_host_memory, release_gil(),
        "Gives free memory of the pool and of glibc's heap back to the kernel, whatever their settings.");
  m.def("host_pool_stats", &host_pool_stats, "Of the process's pool; zeros where it was never in use.");
  m.def("host_pool_huge_page_bytes", &host_pool_huge_page_bytes, release_gil(), "Bytes on huge pages now.");
}

}  // namespace oxytorch::bindings
