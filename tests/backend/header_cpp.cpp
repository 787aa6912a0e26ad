#include "oxytorch/backend.h"

#include <type_traits>

static_assert(__cplusplus == 202002L);
static_assert(std::is_trivial_v<oxy_backend> && std::is_standard_layout_v<oxy_backend>);
static_assert(std::is_trivial_v<oxy_device_properties> && std::is_standard_layout_v<oxy_device_properties>);
static_assert(offsetof(oxy_backend, last_error) + sizeof(void*) == OXY_BACKEND_SIZE_V1);

int oxytorch_header_cpp() { return OXY_OK; }
