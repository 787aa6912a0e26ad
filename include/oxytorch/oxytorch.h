/// Every room at once. It reaches LibTorch: a program on Oxytorch::core includes the rooms that it needs.
#pragma once

#include "oxytorch/api.h"
#include "oxytorch/error.h"
#include "oxytorch/isa.h"
#include "oxytorch/version.h"
