/// The search behind tune(), by any clock.
#pragma once

#include <functional>

#include "oxytorch/data/tune.h"

namespace oxytorch::data {

/// `seconds`: since some moment.
OXY_API LoaderTuning tune_by(TensorLoader& loader, const TuneOptions& options, const std::function<double()>& seconds);

}  // namespace oxytorch::data
