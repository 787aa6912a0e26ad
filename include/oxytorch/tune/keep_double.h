/// KeepDouble: a model runs in float64 although it casts.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// While it lives, tensors of float64 stay so on this thread where a program casts them to a narrower floating-point
/// dtype: `logits.float()` before a loss is there for lower precisions, and would end a run in float64. Casts inside of
/// kernels (`sum(dtype=...)`) and copies into tensors of another dtype are as ever. Backward passes that begin on the
/// thread see it too. Convolutions of float64 on a CPU are taken some rows at a time, and the backward of
/// batch normalization some channels, which takes less memory; sums over rows are in another order.
class OXY_API KeepDouble {
 public:
  KeepDouble();

 private:
  c10::impl::IncludeDispatchKeyGuard mode_;
};

}  // namespace oxytorch::tune
