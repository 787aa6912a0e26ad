/// What `torch.optim.Optimizer.state` showed when it was last read.
#pragma once

#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"

namespace oxytorch::bindings {

/// Tells whether a dict `{parameter: {name: tensor}}` still holds the very tensors that it held: entries may be
/// assigned, popped or cleared by any operation of a dict, and the dicts themselves exchanged. Compares pointers along
/// the dicts, without hashing and without a call into Python.
class ShownState {
 public:
  void remember(const py::object& state) {
    params_.clear();
    places_.clear();
    if (!PyDict_Check(state.ptr())) return;
    PyObject *param = nullptr, *entries = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &param, &entries) != 0;) {
      places_[param] = params_.size();
      Param shown{hold(param), {}};
      each(entries, [&shown](PyObject* object) {
        shown.objects.push_back(hold(object));
        return true;
      });
      params_.push_back(std::move(shown));
    }
  }

  [[nodiscard]] bool is(const py::object& state) const {
    if (!PyDict_Check(state.ptr()) || PyDict_GET_SIZE(state.ptr()) != static_cast<Py_ssize_t>(params_.size())) {
      return false;
    }
    PyObject *param = nullptr, *entries = nullptr;
    auto shown = params_.begin();
    for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &param, &entries) != 0; ++shown) {
      if (shown->param.ptr() != param || !shown->is(entries)) return false;
    }
    return true;
  }

  /// The same of one parameter alone.
  [[nodiscard]] bool is(const py::object& state, const py::object& param) const {
    if (!PyDict_Check(state.ptr())) return false;
    PyObject* const entries = PyDict_GetItemWithError(state.ptr(), param.ptr());
    if (entries == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    const auto found = places_.find(param.ptr());
    if (found == places_.end()) return entries == nullptr;
    return entries != nullptr && params_[found->second].is(entries);
  }

 private:
  static py::object hold(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

  // Calls visit(object) for names and tensors in turn until it returns false; values of other kinds are the user's.
  template <class Visit>
  static bool each(PyObject* entries, Visit visit) {
    if (!PyDict_Check(entries)) return visit(entries);
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(entries, &at, &name, &value) != 0;) {
      if (THPVariable_Check(value) && (!visit(name) || !visit(value))) return false;
    }
    return true;
  }

  struct Param {
    py::object param;
    std::vector<py::object> objects;

    [[nodiscard]] bool is(PyObject* entries) const {
      std::size_t next = 0;
      return each(entries,
                  [&](PyObject* object) { return next < objects.size() && objects[next++].ptr() == object; }) &&
             next == objects.size();
    }
  };

  std::vector<Param> params_;                          // in the dict's order
  std::unordered_map<PyObject*, std::size_t> places_;  // of each parameter in it
};

}  // namespace oxytorch::bindings
