/// The machine and the cluster: what the host could be tuned to, which accelerators and links there are, and what the
/// makers publish of them. Torch-free.
#pragma once

#include "oxytorch/machine/hardware.h"
#include "oxytorch/machine/host_report.h"
#include "oxytorch/machine/topology.h"
