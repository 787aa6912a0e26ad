/// Measures and verdicts of the verifier.
#pragma once

#include "bindings.h"

namespace oxytorch::bindings {

void bind_verdict(py::module_& m);

}  // namespace oxytorch::bindings
