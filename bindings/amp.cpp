#include "bindings.h"

namespace oxytorch::bindings {

void bind_amp(py::module_& m) {}

}  // namespace oxytorch::bindings
