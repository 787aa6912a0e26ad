#include "bindings.h"

namespace oxytorch::bindings {

void bind_backend(py::module_& m) {}

}  // namespace oxytorch::bindings
