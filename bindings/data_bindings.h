/// What the files of the data pipeline's bindings share.
#pragma once

#include <string>

#include "bindings.h"
#include "oxytorch/data.h"

namespace oxytorch::bindings {

/// By numpy's name. Errors: ValueError for a name that is none.
data::DType dtype_named(const std::string& text);

void bind_data_convert(py::module_& m);

}  // namespace oxytorch::bindings
