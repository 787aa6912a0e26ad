/// A step tail on the emulated grid over host memory, for tests.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "backends/device_tail.h"
#include "backends/last_error.h"
#include "kernels/device/emulated_grid.h"

namespace oxytorch::kernels {

/// Device memory is host memory; every launch is done when it returns.
class EmulatedDevice final : public backend::TailDevice {
 public:
  /// What a device was asked for.
  struct Log {
    int allocations = 0;
    int live = 0;
    std::vector<device::TailKernel> launches;
    int fail_in = -1;  // the launch or allocation so many from now fails; negative: none
  };

  explicit EmulatedDevice(device::ThreadOrder order, Log* log = nullptr)
      : order_(order), log_(log == nullptr ? &own_ : log) {}
  oxy_status allocate(std::uint64_t bytes, void** memory) override {
    if (fails()) return backend::fail(OXY_OUT_OF_MEMORY, "no memory, as asked");
    ++log_->allocations;
    ++log_->live;
    *memory = std::aligned_alloc(64, bytes);
    std::memset(*memory, 0xA5, bytes);
    return OXY_OK;
  }
  oxy_status free(void* memory) override {
    --log_->live;
    std::free(memory);
    return OXY_OK;
  }
  oxy_status launch(device::TailKernel kernel, std::uint32_t blocks, const void* arguments, std::uint32_t,
                    oxy_queue) override {
    if (fails()) return backend::fail(OXY_DEVICE_ERROR, "a launch failed, as asked");
    log_->launches.push_back(kernel);
    device::emulated_launch(kernel, blocks, arguments, nullptr, order_);
    return OXY_OK;
  }

 private:
  bool fails() { return log_->fail_in >= 0 && log_->fail_in-- == 0; }

  device::ThreadOrder order_;
  Log own_;
  Log* log_;
};

}  // namespace oxytorch::kernels
