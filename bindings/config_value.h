/// A configuration's value as Python writes it.
#pragma once

#include <optional>

#include "bindings.h"
#include "oxytorch/config.h"

namespace oxytorch::bindings {

/// None is the word "none"; numbers, flags and words as they are, also numpy's and tensors of one; empty for others.
/// By hand: pybind11's variant would take anything with a truth value for a flag.
std::optional<ConfigValue> to_config_value(py::handle object);

}  // namespace oxytorch::bindings
