/// What `torch.optim.Optimizer.state` showed when it was last read.
#pragma once

#include <cstddef>
#include <cstdint>
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
    versions_.clear();
    objects_.clear();
    held_.clear();
    places_.clear();
    if (!PyDict_Check(state.ptr())) return;
    PyObject *param = nullptr, *entries = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &param, &entries) != 0;) {
      places_[param] = params_.size();
      hold(param);
      params_.push_back({param, objects_.size(), 0});
      if (PyDict_Check(entries)) {
        PyObject *name = nullptr, *value = nullptr;
        for (Py_ssize_t entry = 0; PyDict_Next(entries, &entry, &name, &value) != 0;) {
          if (!THPVariable_Check(value)) continue;
          objects_.push_back(hold(name));
          objects_.push_back(hold(value));
        }
      }
      params_.back().end = objects_.size();
    }
    note_versions(state.ptr());
  }

  [[nodiscard]] bool is(const py::object& state) {
    if (untouched(state.ptr())) return true;
    if (!compare(state)) return false;
    note_versions(state.ptr());
    return true;
  }

  /// The same of one parameter alone.
  [[nodiscard]] bool is(const py::object& state, const py::object& param) const {
    if (!PyDict_Check(state.ptr())) return false;
    PyObject* const entries = PyDict_GetItemWithError(state.ptr(), param.ptr());
    if (entries == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    const auto found = places_.find(param.ptr());
    if (found == places_.end()) return entries == nullptr;
    return entries != nullptr && is(params_[found->second], entries);
  }

 private:
  struct Param {
    PyObject* param;
    std::size_t begin, end;  // of its names and tensors, in turn, in objects_
  };

  // A dict's version is unique among all dicts of the process and changes with every change of the dict.
  struct Version {
    PyObject* dict;
    std::uint64_t version;
  };

#if PY_VERSION_HEX < 0x030C0000
  static std::uint64_t version(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag; }

  // As long as the outer dict, which is first, was not changed, it holds the others.
  [[nodiscard]] bool untouched(PyObject* state) const {
    if (versions_.empty() || versions_.front().dict != state) return false;
    for (const Version& seen : versions_) {
      if (version(seen.dict) != seen.version) return false;
    }
    return true;
  }

  void note_versions(PyObject* state) {
    versions_.clear();
    if (!PyDict_Check(state)) return;
    versions_.push_back({state, version(state)});
    PyObject *param = nullptr, *entries = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(state, &at, &param, &entries) != 0;) {
      if (PyDict_Check(entries)) {
        versions_.push_back({entries, version(entries)});
      } else {
        return versions_.clear();
      }
    }
  }
#else  // dicts show no version
  [[nodiscard]] static bool untouched(PyObject*) { return false; }
  void note_versions(PyObject*) {}
#endif

  [[nodiscard]] bool compare(const py::object& state) const {
    if (!PyDict_Check(state.ptr()) || PyDict_GET_SIZE(state.ptr()) != static_cast<Py_ssize_t>(params_.size())) {
      return false;
    }
    PyObject *param = nullptr, *entries = nullptr;
    auto shown = params_.begin();
    for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &param, &entries) != 0; ++shown) {
      if (shown->param != param || !is(*shown, entries)) return false;
    }
    return true;
  }

  PyObject* hold(PyObject* object) {
    held_.push_back(py::reinterpret_borrow<py::object>(object));
    return object;
  }

  // Tensors alone count; values of other kinds are the user's.
  [[nodiscard]] bool is(const Param& shown, PyObject* entries) const {
    if (!PyDict_Check(entries)) return false;
    PyObject *name = nullptr, *value = nullptr;
    std::size_t next = shown.begin;
    for (Py_ssize_t at = 0; PyDict_Next(entries, &at, &name, &value) != 0;) {
      if (next < shown.end && objects_[next] == name && objects_[next + 1] == value) {
        next += 2;
      } else if (THPVariable_Check(value)) {
        return false;
      }
    }
    return next == shown.end;
  }

  std::vector<Param> params_;                          // in the dict's order
  std::vector<Version> versions_;                      // of the dict and of those in it
  std::vector<PyObject*> objects_;                     // side by side, since each step reads them
  std::vector<py::object> held_;                       // all of them, so that no address is used again
  std::unordered_map<PyObject*, std::size_t> places_;  // of each parameter in params_
};

}  // namespace oxytorch::bindings
