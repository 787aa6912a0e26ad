/// The host's own memory as a device: always there, always the last resort.
#pragma once

#include "oxytorch/backend.h"

namespace oxytorch::backend {

const oxy_backend* cpu_backend_table();

}  // namespace oxytorch::backend
