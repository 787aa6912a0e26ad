/// A step tail on the emulated grid over host memory, for tests.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "backends/tail/device_tail.h"
#include "kernels/device/emulated_grid.h"

namespace oxytorch::kernels {

/// Device memory is host memory; every launch is done when it returns.
class EmulatedDevice final : public backend::TailDevice {
 public:
  explicit EmulatedDevice(device::ThreadOrder order) : order_(order) {}
  oxy_status allocate(std::uint64_t bytes, void** memory) override {
    *memory = std::aligned_alloc(64, bytes);
    return OXY_OK;
  }
  oxy_status free(void* memory) override {
    std::free(memory);
    return OXY_OK;
  }
  oxy_status launch(device::TailKernel kernel, std::uint32_t blocks, const void* arguments, std::uint32_t,
                    oxy_queue) override {
    device::emulated_launch(kernel, blocks, arguments, nullptr, order_);
    return OXY_OK;
  }

 private:
  device::ThreadOrder order_;
};

}  // namespace oxytorch::kernels
