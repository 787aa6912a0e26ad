/// Optimizers: the step tail, AdamW and SGD, learning-rate schedules.
#pragma once

#include "oxytorch/optim/optimizer.h"
#include "oxytorch/optim/schedule.h"
#include "oxytorch/optim/step_tail.h"
