#include "backends/cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace oxytorch::backend::cuda {
namespace {

std::atomic<bool> in_forked_child{false};

struct Symbol {
  const char* name;
  void** address;
};

__attribute__((format(printf, 2, 3))) void refuse(Installation& found, const char* format, ...) {
  static char text[512];
  std::va_list parts;
  va_start(parts, format);
  std::vsnprintf(text, sizeof(text), format, parts);
  va_end(parts);
  found.reason = text;
  found.devices = 0;
}

void look(Installation& found) {
  const char* path = std::getenv("OXYTORCH_CUDA_DRIVER");
  if (path == nullptr || *path == '\0') path = "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* why = dlerror();
    return refuse(found, "there is no CUDA driver here: %s", why == nullptr ? path : why);
  }
  Driver& driver = found.driver;
  const auto resolve = [library](const char* name) { return dlsym(library, name); };
  // The version first: an old driver is told by its number, not by what it lacks.
  driver.cuDriverGetVersion = reinterpret_cast<decltype(driver.cuDriverGetVersion)>(resolve("cuDriverGetVersion"));
  if (driver.cuDriverGetVersion == nullptr) return refuse(found, "%s has no cuDriverGetVersion", path);
  if (const Result result = driver.cuDriverGetVersion(&found.version); result != kSuccess) {
    return refuse(found, "cuDriverGetVersion of %s failed with status %d", path, result);
  }
  if (found.version < kLeastVersion) {
    return refuse(found, "the CUDA driver is too old: it speaks CUDA %d.%d, at least %d.%d is needed",
                  found.version / 1000, found.version % 1000 / 10, kLeastVersion / 1000, kLeastVersion % 1000 / 10);
  }
#define OXY_CUDA_SYMBOL(name, parameters) {#name, reinterpret_cast<void**>(&driver.name)},
  const Symbol symbols[] = {OXY_CUDA_FUNCTIONS(OXY_CUDA_SYMBOL)};
#undef OXY_CUDA_SYMBOL
  for (const Symbol& symbol : symbols) {
    *symbol.address = resolve(symbol.name);
    if (*symbol.address == nullptr) {
      return refuse(found, "the CUDA driver %s (CUDA %d.%d) has no %s", path, found.version / 1000,
                    found.version % 1000 / 10, symbol.name);
    }
  }
  const auto failed = [&](const char* call, Result result) {
    const char* name = nullptr;
    const char* text = nullptr;
    driver.cuGetErrorName(result, &name);
    driver.cuGetErrorString(result, &text);
    refuse(found, "%s failed: %s (%d), %s%s", call, name == nullptr ? "unknown status" : name, result,
           text == nullptr ? "no text" : text,
           result == kNotInitialized ? "; a process forked from one that used CUDA cannot use it" : "");
  };
  if (const Result result = driver.cuInit(0); result != kSuccess) return failed("cuInit", result);
  pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); });
  if (const Result result = driver.cuDeviceGetCount(&found.devices); result != kSuccess) {
    return failed("cuDeviceGetCount", result);
  }
  if (found.devices <= 0) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return refuse(found, "the CUDA driver sees no device%s%s",
                  visible == nullptr ? "" : " with CUDA_VISIBLE_DEVICES=", visible == nullptr ? "" : visible);
  }
  static char text[96];
  std::snprintf(text, sizeof(text), "the CUDA driver (CUDA %d.%d) sees %d device%s", found.version / 1000,
                found.version % 1000 / 10, found.devices, found.devices == 1 ? "" : "s");
  found.reason = text;
}

}  // namespace

bool forked() { return in_forked_child.load(std::memory_order_relaxed); }

const Installation& installation() {
  static const Installation* const found = [] {
    auto* made = new Installation();
    look(*made);
    return made;
  }();
  return *found;
}

}  // namespace oxytorch::backend::cuda
