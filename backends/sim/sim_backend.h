/// `sim` as a table; what it does is described in oxytorch/backend/sim.h.
#pragma once

#include "oxytorch/backend.h"

namespace oxytorch::backend {

const oxy_backend* sim_backend_table();
oxy_status sim_backend_configure(const char* settings);

}  // namespace oxytorch::backend
