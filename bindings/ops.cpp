#include "oxytorch/ops.h"

#include "bindings.h"
#include "scope.h"

namespace oxytorch::bindings {

void bind_ops(py::module_& m) {
  using ops::PackedWeights;
  bind_scope<PackedWeights>(m, "PackedWeights", "Keeps the packed weights of linear layers while it is entered.")
      .def_static("clear", &PackedWeights::clear, release_gil(), "Forgets all that is kept.")
      .def_static("bytes", &PackedWeights::bytes, release_gil(), "What is kept in this process.");
}

}  // namespace oxytorch::bindings
