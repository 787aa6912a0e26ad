/// Optimizers: the step tail, AdamW and SGD.
#pragma once

#include "oxytorch/optim/optimizer.h"
#include "oxytorch/optim/step_tail.h"
