#include "oxytorch/backend.h"
#include "oxytorch/backend_kernels.h"

_Static_assert(__STDC_VERSION__ == 201112L, "compiled as C11");
_Static_assert(sizeof(oxy_status) == 4 && sizeof(oxy_memory) == 4 && sizeof(oxy_copy) == 4, "fixed widths");
_Static_assert(offsetof(oxy_backend, size) == 0 && offsetof(oxy_backend, api_version) == 4, "the header is in front");
_Static_assert((sizeof(oxy_backend) - offsetof(oxy_backend, score)) / sizeof(void*) <= 15, "at most 15 slots");

/* Version 1 as released: these numbers never change. */
_Static_assert(sizeof(void*) != 8 || OXY_BACKEND_SIZE_V1 == 152, "oxy_backend of version 1");
_Static_assert(sizeof(void*) != 8 || sizeof(oxy_device_properties) == 56, "oxy_device_properties of version 1");
_Static_assert(sizeof(oxy_memory_info) == 32, "oxy_memory_info of version 1");
_Static_assert(sizeof(void*) != 8 || sizeof(oxy_counter) == 24, "oxy_counter of version 1");
_Static_assert(sizeof(void*) != 8 || sizeof(oxy_queue_options) == 24, "oxy_queue_options of version 1");
_Static_assert(sizeof(oxy_kernels) == 8 + 6 * sizeof(void*), "oxy_kernels with the step tail");

int oxytorch_header_c11(void) { return OXY_OK; }
