/// `sim` as a table; what it does is described in oxytorch/backend/sim.h.
#pragma once

#include <cstdint>

#include "oxytorch/backend.h"

namespace oxytorch::backend {

namespace sim {
struct Work;
/// What every call asks first: the device is there (F2) and not lost (F4).
oxy_status check_alive(std::int32_t index);
/// Either the queue does the work later, or the calling thread does it now (Q4).
oxy_status submit(std::int32_t index, oxy_queue queue, Work work);
}  // namespace sim

const oxy_backend* sim_backend_table();
oxy_status sim_backend_configure(const char* settings);

}  // namespace oxytorch::backend
