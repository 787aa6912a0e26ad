#include "bindings.h"

namespace oxytorch::bindings {

void bind_optim(py::module_& m) {}

}  // namespace oxytorch::bindings
