/// The native operators, a part of the tuner's module.
#pragma once

#include "bindings.h"

namespace oxytorch::bindings {

void bind_tune_operators(py::module_& m);

}  // namespace oxytorch::bindings
