#include "fake_kernels.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "kernels/device/emulated_grid.h"
#include "kernels/device/tail_kernels.h"

namespace {

using namespace oxytorch::kernels::device;

constexpr std::size_t kArgumentBytes[] = {
#define FAKE_BYTES(id, symbol, ...) sizeof(typename oxytorch::kernels::device::__VA_ARGS__::Arguments),
    OXY_TAIL_KERNELS(FAKE_BYTES)
#undef FAKE_BYTES
};

struct Fault {};

class CheckedMemory final : public EmulatedMemory {
 public:
  explicit CheckedMemory(FakeMemoryCheck check) : check_(check) {}
  void* resolve(const void* address, std::uint64_t bytes) override {
    if (!check_(reinterpret_cast<std::uint64_t>(address), bytes)) throw Fault();
    return const_cast<void*>(address);
  }

 private:
  FakeMemoryCheck check_;
};

}  // namespace

int fake_kernel(const char* name) {
  for (std::size_t i = 0; i < std::size(kTailKernelSymbols); ++i) {
    if (std::string_view(name) == kTailKernelSymbols[i]) return static_cast<int>(i);
  }
  return -1;
}

std::function<bool()> fake_launch(int kernel, unsigned blocks, unsigned threads, void** parameters,
                                  FakeMemoryCheck check) {
  const auto* bytes = static_cast<const std::byte*>(parameters[0]);
  const auto arguments =
      std::make_shared<std::vector<std::max_align_t>>(kArgumentBytes[kernel] / sizeof(std::max_align_t) + 1);
  std::memcpy(arguments->data(), bytes, kArgumentBytes[kernel]);
  return [=] {
    CheckedMemory memory(check);
    try {
      // Threads of a card have no order, so none may matter.
      if (threads == kThreads) {
        emulated_launch(static_cast<TailKernel>(kernel), blocks, arguments->data(), &memory, ThreadOrder::Shuffled);
      }
      return threads == kThreads;
    } catch (const Fault&) {
      return false;
    }
  };
}
