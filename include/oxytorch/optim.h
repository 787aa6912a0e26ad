/// Optimizers: the step tail, AdamW and SGD, learning-rate schedules, numerical stability.
#pragma once

#include "oxytorch/optim/optimizer.h"
#include "oxytorch/optim/schedule.h"
#include "oxytorch/optim/stability.h"
#include "oxytorch/optim/step_tail.h"
