#include "bindings.h"

namespace oxytorch::bindings {

void bind_monitor(py::module_& m) {}

}  // namespace oxytorch::bindings
