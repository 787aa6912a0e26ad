/// The nine cards of the fake driver, as the tests of one process share them.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "backends/cuda/driver.h"
#include "oxytorch/backend/device.h"

struct CUgraph_st;

namespace oxytorch::test {

using backend::Backend;

/// A test that breaks a card takes one that no other test uses.
enum Card {
  kFirst,
  kSecond,
  kLostByKernel,
  kLostByDriver,
  kLostToNvml,
  kFull,
  kCardOfFork,
  kWithCounters,
  kLostByAddress
};

inline void* fake(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  return handle == nullptr ? nullptr : dlsym(handle, name);
}
template <class Function>
Function driver_function(const char* name) {
  return reinterpret_cast<Function>(fake(OXY_FAKE_DRIVER, name));
}
inline unsigned long long count(const char* what) {
  return driver_function<unsigned long long (*)(const char*)>("fake_cuda_count")(what);
}

inline const Backend& cuda() {
  static const Backend& loaded = [&]() -> const Backend& {
    setenv("OXYTORCH_CUDA_DRIVER", OXY_FAKE_DRIVER, 1);
    setenv("OXYTORCH_NVML", OXY_FAKE_NVML_LIBRARY, 0);
    // Ordinals and NVML's own order differ: the first card that the process sees is the machine's second.
    setenv("CUDA_VISIBLE_DEVICES", "1,0,2,3,4,5,6,7,8", 1);
    setenv("OXY_FAKE_CUDA", "devices=9,memory=67108864", 1);
    const Backend& backend = backend::Registry::instance().load(OXY_CUDA);
    // As torch has done before anyone makes a stream; and the fake has read its scene.
    EXPECT_EQ(backend.info().score, 90) << backend.info().reason;
    return backend;
  }();
  return loaded;
}

inline int plan(const char* text) {
  cuda();
  return driver_function<int (*)(const char*)>("fake_cuda_configure")(text);
}

/// A stream that someone else made, as torch does.
class Native {
 public:
  explicit Native(int ordinal) {
    using Retain = int (*)(CUctx_st**, int);
    using Push = int (*)(CUctx_st*);
    using Create = int (*)(CUstream_st**, unsigned, int);
    CUctx_st* context = nullptr;
    driver_function<Retain>("cuDevicePrimaryCtxRetain")(&context, ordinal);
    driver_function<Push>("cuCtxPushCurrent_v2")(context);
    driver_function<Create>("cuStreamCreateWithPriority")(&stream, 1, 0);
  }
  ~Native() {
    CUctx_st* context = nullptr;
    driver_function<int (*)(CUstream_st*)>("cuStreamDestroy_v2")(stream);
    driver_function<int (*)(CUctx_st**)>("cuCtxPopCurrent_v2")(&context);
  }
  CUstream_st* stream = nullptr;
};

inline oxy_status wrap(int ordinal, CUstream_st* stream, oxy_queue& queue) {
  oxy_queue_options options{};
  options.size = sizeof(options);
  options.flags = OXY_QUEUE_WRAP_NATIVE;
  options.native_handle = stream;
  return cuda().table().queue_create(ordinal, &options, &queue);
}

}  // namespace oxytorch::test
