#include "bindings.h"

namespace oxytorch::bindings {

void bind_trainer(py::module_& m) {}

}  // namespace oxytorch::bindings
