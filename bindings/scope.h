/// Scopes of C++ as context managers of Python.
#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "bindings.h"

namespace oxytorch::bindings {

/// Opens a `Scope`, made of `Arguments`, while Python is inside.
template <class Scope, class... Arguments>
struct ScopeManager {
  explicit ScopeManager(Arguments... arguments) : arguments(std::move(arguments)...) {}
  std::tuple<Arguments...> arguments;
  std::optional<Scope> open;
};

template <class Scope, class... Arguments, class... Names>
py::class_<ScopeManager<Scope, Arguments...>> bind_scope(py::module_& m, const char* name, const char* doc,
                                                         const Names&... names) {
  using Manager = ScopeManager<Scope, Arguments...>;
  return py::class_<Manager>(m, name, doc)
      .def(py::init<Arguments...>(), names...)
      .def("__enter__",
           [](Manager& self) {
             std::apply([&](const Arguments&... arguments) { self.open.emplace(arguments...); }, self.arguments);
           })
      .def(
          "__exit__", [](Manager& self, const py::object&, const py::object&, const py::object&) { self.open.reset(); },
          py::arg("kind"), py::arg("error"), py::arg("trace"));
}

}  // namespace oxytorch::bindings
