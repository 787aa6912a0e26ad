/// The module of the tuner.
#pragma once

#include "bindings.h"

namespace oxytorch::bindings {

void bind_tune(py::module_& m);

}  // namespace oxytorch::bindings
