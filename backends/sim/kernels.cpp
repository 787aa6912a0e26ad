#include "backends/sim/kernels.h"

#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "backends/last_error.h"
#include "backends/sim/mutants.h"
#include "backends/sim/sim_backend.h"
#include "kernels/device/emulated_grid.h"

namespace oxytorch::backend::sim {
namespace {

struct NotThere {
  const void* address;
};

// The blocks that a launch has touched; they live until it is done, whoever frees them meanwhile.
class LaunchMemory final : public kernels::device::EmulatedMemory {
 public:
  explicit LaunchMemory(SimDevice& device) : device_(device) {}

  void* resolve(const void* address, std::uint64_t bytes) override {
    const auto start = reinterpret_cast<std::uint64_t>(address);
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const Block& block = *blocks_[i];
      if (start < block.address || start - block.address > block.bytes ||
          bytes > block.bytes - (start - block.address)) {
        continue;
      }
      // What is asked for again and again comes to stand in front.
      if (i > 0) std::swap(blocks_[i], blocks_[i / 2]);
      return block.storage.get() + (start - block.address);
    }
    Range range = device_.find(address, bytes);
    if (range.data == nullptr) throw NotThere{address};
    blocks_.push_back(std::move(range.block));
    return range.data;
  }

 private:
  SimDevice& device_;
  std::vector<std::shared_ptr<Block>> blocks_;
};

class SimTailDevice final : public TailDevice {
 public:
  explicit SimTailDevice(std::int32_t index) : index_(index) {}

  oxy_status allocate(std::uint64_t bytes, void** memory) override {
    return device(index_).alloc(OXY_MEMORY_DEVICE, bytes, memory);
  }
  oxy_status free(void* memory) override { return device(index_).free(memory); }
  oxy_status launch(kernels::device::TailKernel kernel, std::uint32_t blocks, const void* arguments,
                    std::uint32_t bytes, oxy_queue queue) override {
    if (const oxy_status status = check_alive(index_); status != OXY_OK) return status;
    auto made = std::make_shared<Launch>(Launch{kernel, blocks, std::vector<std::uint64_t>((bytes + 7) / 8)});
    std::memcpy(made->arguments.data(), arguments, bytes);
    Work work;
    work.kind = Work::Kind::Launch;
    work.launch = std::move(made);
    return submit(index_, queue, std::move(work));
  }

 private:
  std::int32_t index_;
};

}  // namespace

Failure run_launch(std::int32_t device_index, const Launch& launch) {
  SimDevice& self = device(device_index);
  self.counters.launches.fetch_add(1, std::memory_order_relaxed);
  LaunchMemory memory(self);
  try {
    kernels::device::emulated_launch(launch.kernel, launch.blocks, launch.arguments.data(), &memory);
  } catch (const NotThere& range) {
    return gone(range.address);
  } catch (const std::bad_alloc&) {
    return {OXY_OUT_OF_MEMORY, "no host memory left for an emulated kernel"};
  }
  return {};
}

oxy_status create_sim_tail(std::int32_t index, const oxy_tail_tensor* tensors, std::uint32_t count, oxy_tail* tail) {
  if (tail != nullptr) *tail = nullptr;
  if (const oxy_status status = check_alive(index); status != OXY_OK) return status;
  return create_tail(std::make_unique<SimTailDevice>(index), tensors, count, tail);
}

}  // namespace oxytorch::backend::sim
