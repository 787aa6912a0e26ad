/// Training operators that torch's own operators leave slow, as functions on tensors.
#pragma once

#include "oxytorch/ops/activation.h"
#include "oxytorch/ops/attention.h"
#include "oxytorch/ops/batch_norm.h"
#include "oxytorch/ops/embedding.h"
#include "oxytorch/ops/linear.h"
#include "oxytorch/ops/linear_cross_entropy.h"
#include "oxytorch/ops/packed_weights.h"
#include "oxytorch/ops/rotary.h"
#include "oxytorch/ops/row_norm.h"
