// Where torch's C++ interface differs between the versions that are supported, 2.9 to 2.15. Found out from the headers at
// hand, not from version numbers, so that a newer torch needs no line here. (backends/hpu/torch_device.cpp, which is loaded
// without this library, asks in the same way.)
#pragma once

#include <c10/core/Stream.h>
#include <torch/version.h>

#if __has_include(<ATen/accelerator/Graph.h>)  // from 2.13
#include <ATen/accelerator/Graph.h>
#define OXYTORCH_TORCH_GRAPHS 1
#else
#define OXYTORCH_TORCH_GRAPHS 0
#endif

#include "oxytorch/error.h"

namespace oxytorch {

// The vendor's stream behind torch's. Error(NotSupported) before torch 2.10, whose guards do not tell.
template <typename Guard>
void* native_stream(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  } else {
    OXY_CHECK(false, NotSupported, "this torch does not tell the stream of ", stream.device().str(),
              "; torch 2.10 does.");
  }
}

}  // namespace oxytorch
