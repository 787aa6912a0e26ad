#include "bindings.h"

namespace oxytorch::bindings {

void bind_base(py::module_& m) {}

}  // namespace oxytorch::bindings
