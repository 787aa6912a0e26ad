/// Where what was found out is kept for the next process.
#pragma once

#include <string>

#include "oxytorch/api.h"

namespace oxytorch {

/// $OXYTORCH_CACHE, or $XDG_CACHE_HOME/oxytorch, or ~/.cache/oxytorch; "" where OXYTORCH_CACHE is "off", or there is no
/// home. The folder may not be there yet.
OXY_API std::string cache_folder();
/// Whether OXYTORCH_CACHE is "off": nothing is to be kept.
OXY_API bool cache_is_off();

}  // namespace oxytorch
