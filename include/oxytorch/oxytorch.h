/// Every room at once. It reaches LibTorch: a program on Oxytorch::core includes the rooms that it needs.
#pragma once

#include "oxytorch/api.h"
#include "oxytorch/backend.h"
#include "oxytorch/clock.h"
#include "oxytorch/config.h"
#include "oxytorch/error.h"
#include "oxytorch/isa.h"
#include "oxytorch/logging.h"
#include "oxytorch/monitor.h"
#include "oxytorch/optim.h"
#include "oxytorch/random.h"
#include "oxytorch/spelling.h"
#include "oxytorch/statistics.h"
#include "oxytorch/system.h"
#include "oxytorch/units.h"
#include "oxytorch/version.h"
