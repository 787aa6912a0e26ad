/// Scopes of C++ as context managers of Python.
#pragma once

#include <optional>

#include "bindings.h"

namespace oxytorch::bindings {

/// Opens a `Scope`, made without arguments, while Python is inside.
template <class Scope>
struct ScopeManager {
  std::optional<Scope> open;
};

template <class Scope>
py::class_<ScopeManager<Scope>> bind_scope(py::module_& m, const char* name, const char* doc) {
  using Manager = ScopeManager<Scope>;
  return py::class_<Manager>(m, name, doc)
      .def(py::init<>())
      .def("__enter__", [](Manager& self) { self.open.emplace(); })
      .def(
          "__exit__", [](Manager& self, const py::object&, const py::object&, const py::object&) { self.open.reset(); },
          py::arg("kind"), py::arg("error"), py::arg("trace"));
}

}  // namespace oxytorch::bindings
