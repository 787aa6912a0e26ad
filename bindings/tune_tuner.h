/// The tuner and its workload.
#pragma once

#include "bindings.h"

namespace oxytorch::bindings {

void bind_tuner(py::module_& m);

}  // namespace oxytorch::bindings
