// Test-only: hands fault=copy:N, fault=alloc:N and fault=lost:N on to the fake driver. Nothing is faked in the backend.
#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "oxytorch/backend.h"

OXY_BACKEND_EXPORT oxy_status oxy_backend_configure(const char* settings) {
  std::string text = settings == nullptr ? "" : settings;
  if (!text.empty()) {
    const auto colon = text.find(':');
    if (!text.starts_with("fault=") || colon == std::string::npos) return OXY_NOT_SUPPORTED;
    text[colon] = '=';
    text = text.substr(6);
  }
  const char* path = std::getenv("OXYTORCH_CUDA_DRIVER");
  void* driver = path == nullptr ? nullptr : dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return OXY_NOT_SUPPORTED;
  const auto configure = reinterpret_cast<int (*)(const char*)>(dlsym(driver, "fake_cuda_configure"));
  return configure != nullptr && configure(text.c_str()) == 0 ? OXY_OK : OXY_NOT_SUPPORTED;
}
