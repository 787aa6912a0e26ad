#include "kernels/device/emulated_grid.h"

#include <cstring>
#include <memory>
#include <type_traits>

#include "kernels/device/tail_kernels.h"

namespace oxytorch::kernels::device {
namespace {

// The i-th of `count` in an order. Shuffled: steps by a prime that divides no count here, from anywhere.
std::uint32_t in_order(ThreadOrder order, std::uint32_t i, std::uint32_t count, std::uint32_t start) {
  switch (order) {
    case ThreadOrder::Backward: return count - 1 - i;
    case ThreadOrder::Shuffled: {
      constexpr std::uint64_t kStep = 2147483647;
      return static_cast<std::uint32_t>((start + i * kStep) % count);
    }
    default: return i;
  }
}

struct HostBlock {
  std::uint32_t index;
  ThreadOrder order;
  EmulatedMemory* memory;

  template <class Phase>
  void each(Phase&& phase) const {
    for (std::uint32_t i = 0; i < kThreads; ++i) phase(in_order(order, i, kThreads, index * 37 + 11));
  }
  template <class T>
  T* array(T* device_address, std::int64_t count) const {
    if (memory == nullptr || count <= 0) return device_address;
    return static_cast<T*>(memory->resolve(device_address, static_cast<std::uint64_t>(count) * sizeof(T)));
  }
};

template <class Kernel>
void launch(std::uint32_t blocks, const void* arguments, EmulatedMemory* memory, ThreadOrder order) {
  const auto& typed = *static_cast<const typename Kernel::Arguments*>(arguments);
  const auto shared = std::make_unique<typename Kernel::Shared>();
  for (std::uint32_t i = 0; i < blocks; ++i) {
    // Shared memory holds anything when a block begins.
    if constexpr (!std::is_empty_v<typename Kernel::Shared>) {
      std::memset(static_cast<void*>(shared.get()), 0xA5, sizeof(typename Kernel::Shared));
    }
    Kernel::run(HostBlock{in_order(order, i, blocks, 5), order, memory}, *shared, typed);
  }
}

}  // namespace

void emulated_launch(TailKernel kernel, std::uint32_t blocks, const void* arguments, EmulatedMemory* memory,
                     ThreadOrder order) {
  switch (kernel) {
#define OXY_EMULATED_LAUNCH(id, symbol, ...) \
  case TailKernel::id: return launch<__VA_ARGS__>(blocks, arguments, memory, order);
    OXY_TAIL_KERNELS(OXY_EMULATED_LAUNCH)
#undef OXY_EMULATED_LAUNCH
    case TailKernel::kCount: break;
  }
}

}  // namespace oxytorch::kernels::device
