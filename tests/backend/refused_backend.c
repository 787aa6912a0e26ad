/* A backend that breaks the contract in one way, chosen when it is compiled. */
#include "oxytorch/backend.h"

#ifndef FAULT_no_entry

static int32_t score(const char** reason, int32_t* devices) {
  *reason = "never asked";
  *devices = 0;
  return 0;
}
static oxy_status properties(int32_t device, oxy_device_properties* p) { return (void)device, (void)p, OXY_INTERNAL; }
static oxy_status info(int32_t device, oxy_memory_info* i) { return (void)device, (void)i, OXY_INTERNAL; }
static oxy_status alloc(int32_t device, oxy_memory kind, uint64_t bytes, void** memory) {
  return (void)device, (void)kind, (void)bytes, (void)memory, OXY_INTERNAL;
}
static oxy_status release(int32_t device, void* memory) { return (void)device, (void)memory, OXY_INTERNAL; }
static oxy_status copy(int32_t device, oxy_queue queue, void* to, const void* from, uint64_t bytes, oxy_copy kind) {
  return (void)device, (void)queue, (void)to, (void)from, (void)bytes, (void)kind, OXY_INTERNAL;
}
static oxy_status fill(int32_t device, oxy_queue queue, void* to, uint8_t value, uint64_t bytes) {
  return (void)device, (void)queue, (void)to, (void)value, (void)bytes, OXY_INTERNAL;
}
static oxy_status synchronize(int32_t device, oxy_queue queue) { return (void)device, (void)queue, OXY_INTERNAL; }
static const char* last_error(void) { return ""; }

static oxy_backend table;

OXY_BACKEND_EXPORT const oxy_backend* oxy_backend_entry(uint32_t host_api_version) {
  table.size = sizeof(table);
  table.api_version = host_api_version;
  table.name = "refused";
  table.description = "Breaks the contract.";
  table.score = score;
  table.device_properties = properties;
  table.memory_info = info;
  table.alloc = alloc;
  table.free = release;
  table.copy_async = copy;
  table.fill_async = fill;
  table.last_error = last_error;
  (void)synchronize;
#if defined(FAULT_null_table)
  return NULL;
#elif defined(FAULT_old_version)
  table.api_version = 0;
#elif defined(FAULT_small_table)
  table.size = OXY_BACKEND_SIZE_V1 - 8;
#elif defined(FAULT_empty_slot)
  table.fill_async = NULL;
#elif defined(FAULT_half_queues)
  table.synchronize = synchronize;
#elif defined(FAULT_bad_name)
  table.name = "No Name";
#elif defined(FAULT_taken_name)
  table.name = "cpu";
#else
#error "which fault?"
#endif
  return &table;
}

#else
int oxytorch_test_no_entry(void) { return 0; }
#endif
