// "crate": an outsider's device. A crate of memory behind a small driver, synchronous, so it leaves the queue group of
// the table NULL and every call is done when it returns. docs/backend.md walks through this file.
#include <oxytorch/backend.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace {

constexpr uint64_t kCrateBytes = uint64_t{64} << 20;
constexpr uint32_t kAlignment = 128;

// --- errors: one sentence per thread (F1) ---

thread_local char error_text[256] = "";

oxy_status fail(oxy_status status, const char* format, ...) {
  va_list parts;
  va_start(parts, format);
  vsnprintf(error_text, sizeof(error_text), format, parts);
  va_end(parts);
  return status;
}

const char* last_error() { return error_text; }

// --- the device: what is allocated, by address (M4, M5) ---

struct Crate {
  std::mutex mutex;
  std::map<void*, uint64_t> blocks;
  uint64_t allocated = 0;
};

Crate& crate() {
  static Crate* const only = new Crate();  // lives as long as the process
  return *only;
}

oxy_status check(int32_t device) {
  return device == 0 ? OXY_OK : fail(OXY_INVALID_ARGUMENT, "there is no crate %d, only crate 0", device);
}

// CRATE_MISSING=1 plays the machine without a crate.
int32_t score(const char** reason, int32_t* devices) {
  const bool missing = std::getenv("CRATE_MISSING") != nullptr;
  *devices = missing ? 0 : 1;
  *reason = missing ? "no crate is plugged in (CRATE_MISSING is set)" : "one crate of 64 MiB is plugged in";
  return missing ? 0 : 5;
}

oxy_status device_properties(int32_t device, oxy_device_properties* properties) {
  if (oxy_status status = check(device)) return status;
  if (properties == nullptr || properties->size < sizeof(*properties)) {
    return fail(OXY_INVALID_ARGUMENT, "properties is NULL or smaller than version 1");
  }
  properties->flags = OXY_DEVICE_CHECKS_POINTERS | OXY_DEVICE_SIMULATED;
  properties->name = "Crate of memory";
  properties->architecture = "";
  properties->torch_device = nullptr;
  properties->memory_bytes = kCrateBytes;
  properties->link_bytes_per_s = 0;
  properties->compute_units = 0;
  properties->alignment = kAlignment;
  return OXY_OK;
}

oxy_status memory_info(int32_t device, oxy_memory_info* info) {
  if (oxy_status status = check(device)) return status;
  if (info == nullptr || info->size < sizeof(*info)) {
    return fail(OXY_INVALID_ARGUMENT, "info is NULL or smaller than version 1");
  }
  const std::lock_guard<std::mutex> lock(crate().mutex);
  info->total_bytes = kCrateBytes;
  info->allocated_bytes = crate().allocated;
  info->free_bytes = kCrateBytes - crate().allocated;
  return OXY_OK;
}

// --- memory ---

oxy_status alloc(int32_t device, oxy_memory kind, uint64_t bytes, void** memory) {
  if (memory == nullptr) return fail(OXY_INVALID_ARGUMENT, "alloc has nowhere to write the pointer");
  *memory = nullptr;
  if (oxy_status status = check(device)) return status;
  if (kind == OXY_MEMORY_HOST) return fail(OXY_NOT_SUPPORTED, "a crate has no host memory of its own");
  if (kind != OXY_MEMORY_DEVICE) return fail(OXY_INVALID_ARGUMENT, "there is no kind of memory %d", kind);
  if (bytes == 0) return OXY_OK;
  const std::lock_guard<std::mutex> lock(crate().mutex);
  const uint64_t left = kCrateBytes - crate().allocated;
  void* block = bytes > left ? nullptr : ::operator new(bytes, std::align_val_t{kAlignment}, std::nothrow);
  if (block == nullptr) return fail(OXY_OUT_OF_MEMORY, "the crate has %llu bytes left", (unsigned long long)left);
  crate().blocks[block] = bytes;
  crate().allocated += bytes;
  *memory = block;
  return OXY_OK;
}

oxy_status free_memory(int32_t device, void* memory) {
  if (oxy_status status = check(device)) return status;
  if (memory == nullptr) return OXY_OK;
  const std::lock_guard<std::mutex> lock(crate().mutex);
  const auto found = crate().blocks.find(memory);
  if (found == crate().blocks.end()) return fail(OXY_INVALID_ARGUMENT, "%p is not in the crate", memory);
  crate().allocated -= found->second;
  crate().blocks.erase(found);
  ::operator delete(memory, std::align_val_t{kAlignment});
  return OXY_OK;
}

// --- work: done when the call returns (Q4) ---

oxy_status copy_async(int32_t device, oxy_queue, void* to, const void* from, uint64_t bytes, oxy_copy kind) {
  if (oxy_status status = check(device)) return status;
  if (kind < OXY_COPY_HOST_TO_DEVICE || kind > OXY_COPY_DEVICE_TO_DEVICE) {
    return fail(OXY_INVALID_ARGUMENT, "there is no kind of copy %d", kind);
  }
  if (bytes == 0) return OXY_OK;
  if (to == nullptr || from == nullptr) return fail(OXY_INVALID_ARGUMENT, "copy from %p to %p", from, to);
  std::memcpy(to, from, bytes);
  return OXY_OK;
}

oxy_status fill_async(int32_t device, oxy_queue, void* to, uint8_t value, uint64_t bytes) {
  if (oxy_status status = check(device)) return status;
  if (bytes != 0 && to == nullptr) return fail(OXY_INVALID_ARGUMENT, "fill of %p", to);
  if (bytes != 0) std::memset(to, value, bytes);
  return OXY_OK;
}

}  // namespace

OXY_BACKEND_EXPORT const oxy_backend* oxy_backend_entry(uint32_t host_api_version) {
  static const oxy_backend table = [] {
    oxy_backend t{};  // what is not set stays NULL: counters, kernels, the queue group
    t.size = sizeof(t), t.api_version = OXY_BACKEND_API_VERSION;
    t.name = "crate", t.description = "A crate of memory, as an outsider would bring it.";
    t.score = score, t.device_properties = device_properties, t.memory_info = memory_info;
    t.alloc = alloc, t.free = free_memory, t.copy_async = copy_async, t.fill_async = fill_async;
    t.last_error = last_error;
    return t;
  }();
  return host_api_version == OXY_BACKEND_API_VERSION ? &table : nullptr;
}
