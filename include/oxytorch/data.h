/// Data pipeline: datasets in the formats people have, and a loader that makes batches with threads.
#pragma once

#include "oxytorch/data/batch_sizer.h"
#include "oxytorch/data/cache.h"
#include "oxytorch/data/convert.h"
#include "oxytorch/data/dataset.h"
#include "oxytorch/data/image.h"
#include "oxytorch/data/loader.h"
#include "oxytorch/data/mix.h"
#include "oxytorch/data/order.h"
#include "oxytorch/data/stage.h"
#include "oxytorch/data/stream.h"
#include "oxytorch/data/value.h"
