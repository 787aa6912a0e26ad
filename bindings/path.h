/// An argument that is a str or an os.PathLike, as Python's own file functions take it.
#pragma once

#include <string>

#include "bindings.h"

namespace oxytorch::bindings {

struct PathArgument {
  std::string text;  ///< in the encoding of the file system
};

}  // namespace oxytorch::bindings

namespace pybind11::detail {

template <>
struct type_caster<oxytorch::bindings::PathArgument> {
  PYBIND11_TYPE_CASTER(oxytorch::bindings::PathArgument, const_name("str | os.PathLike[str]"));

  bool load(handle source, bool) {
    PyObject* bytes = nullptr;
    if (PyUnicode_FSConverter(source.ptr(), &bytes) == 0) {
      PyErr_Clear();
      return false;
    }
    const auto owned = reinterpret_steal<object>(bytes);
    value.text.assign(PyBytes_AS_STRING(bytes), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes)));
    return true;
  }
};

}  // namespace pybind11::detail
