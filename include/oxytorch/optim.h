/// Optimizers: the step tail, the classes built on it, learning-rate schedules, numerical stability.
#pragma once

#include "oxytorch/optim/nan_origin.h"
#include "oxytorch/optim/nonfinite.h"
#include "oxytorch/optim/optimizer.h"
#include "oxytorch/optim/optimizers.h"
#include "oxytorch/optim/schedule.h"
#include "oxytorch/optim/stability.h"
#include "oxytorch/optim/step_tail.h"
