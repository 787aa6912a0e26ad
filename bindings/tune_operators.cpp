// NativeOperators for Python.
#include "tune_operators.h"

#include <pybind11/stl.h>

#include "oxytorch/tune/operators.h"

namespace oxytorch::bindings {

using tune::NativeOperators;
using tune::OperatorReport;

void bind_tune_operators(py::module_& m) {
  py::class_<OperatorReport>(m, "OperatorReport", "What became of one native operator.")
      .def_readonly("name", &OperatorReport::name)
      .def_readonly("installed", &OperatorReport::installed)
      .def_readonly("reason", &OperatorReport::reason);
  py::class_<NativeOperators>(m, "NativeOperators", "Faster CPU operators with the bits of torch's own.")
      .def(py::init<>())
      .def_static("names", &NativeOperators::names)
      .def("install", &NativeOperators::install, py::arg("names") = std::vector<std::string>(), release_gil())
      .def("uninstall", &NativeOperators::uninstall, release_gil())
      .def("installed", &NativeOperators::installed);
}

}  // namespace oxytorch::bindings
