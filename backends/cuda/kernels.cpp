#include "backends/cuda/kernels.h"

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/cuda/driver.h"
#include "backends/cuda/gpu.h"
#include "backends/cuda/handles.h"
#include "backends/cuda/queue.h"
#include "backends/device_tail.h"

// What nvcc made of step_tail.cu, for every architecture.
asm(R"(
  .section .rodata
  .balign 16
  .local oxy_cuda_image
oxy_cuda_image:
  .incbin ")" OXY_CUDA_IMAGE R"("
  .byte 0
  .previous
)");
extern "C" const unsigned char oxy_cuda_image[] __attribute__((visibility("hidden")));

namespace oxytorch::backend::cuda {
namespace {

using kernels::device::TailKernel;

constexpr auto kKernelCount = static_cast<std::size_t>(TailKernel::kCount);

// The functions of one device, loaded when the first tail is made there: a launch must not load anything (K1).
class Loaded {
 public:
  oxy_status load(Gpu& gpu) {
    const std::lock_guard lock(mutex_);
    if (ready_) return OXY_OK;
    const Driver& cu = driver();
    if (module_ == nullptr) {
      const oxy_status status = gpu.settle("cuModuleLoadData", cu.cuModuleLoadData(&module_, oxy_cuda_image));
      if (status != OXY_OK) return status;
    }
    for (std::size_t i = 0; i < kKernelCount; ++i) {
      const Result result = cu.cuModuleGetFunction(&functions_[i], module_, kernels::device::kTailKernelSymbols[i]);
      if (const oxy_status status = gpu.settle("cuModuleGetFunction", result); status != OXY_OK) return status;
    }
    ready_ = true;
    return OXY_OK;
  }
  [[nodiscard]] Function function(TailKernel kernel) const { return functions_[static_cast<std::size_t>(kernel)]; }

 private:
  std::mutex mutex_;
  bool ready_ = false;
  Module module_ = nullptr;
  std::array<Function, kKernelCount> functions_{};
};

Loaded& loaded(int index) {
  static auto* const all = new std::vector<Loaded>(static_cast<std::size_t>(installation().devices));
  return (*all)[static_cast<std::size_t>(index)];
}

class CudaTailDevice final : public TailDevice {
 public:
  CudaTailDevice(Gpu& gpu, const Loaded& functions) : gpu_(gpu), functions_(functions) {}

  oxy_status allocate(std::uint64_t bytes, void** memory) override {
    *memory = nullptr;
    const oxy_status status = check_alive(gpu_.index());
    return status != OXY_OK ? status : gpu_.alloc(OXY_MEMORY_DEVICE, bytes, memory);
  }

  oxy_status free(void* memory) override { return gpu_.free(memory); }

  oxy_status launch(TailKernel kernel, std::uint32_t blocks, const void* arguments, std::uint32_t /*bytes*/,
                    oxy_queue queue) override {
    if (const oxy_status status = check_alive(gpu_.index()); status != OXY_OK) return status;
    if (const oxy_status status = check_owner(gpu_.index(), queue); status != OXY_OK) return status;
    const Current current(gpu_);
    const Function function = functions_.function(kernel);
    // The driver copies the arguments before it returns.
    void* parameters[] = {const_cast<void*>(arguments)};
    if (queue != nullptr) return queue_of(queue).launch(function, blocks, kernels::device::kThreads, parameters);
    gpu_.tally.launches.fetch_add(1, std::memory_order_relaxed);
    return gpu_.blocking("cuLaunchKernel", [&](Stream stream) {
      return driver().cuLaunchKernel(function, blocks, 1, 1, kernels::device::kThreads, 1, 1, 0, stream, parameters,
                                     nullptr);
    });
  }

 private:
  Gpu& gpu_;
  const Loaded& functions_;
};

oxy_status tail_create(std::int32_t index, const oxy_tail_tensor* tensors, std::uint32_t count, oxy_tail* tail) {
  if (tail == nullptr) return fail(OXY_INVALID_ARGUMENT, "tail_create needs somewhere to write the tail, got NULL");
  *tail = nullptr;
  if (const oxy_status status = check_open(index); status != OXY_OK) return status;
  return guarded([&]() -> oxy_status {
    Gpu& self = gpu(index);
    const Current current(self);
    Loaded& functions = loaded(index);
    if (const oxy_status status = functions.load(self); status != OXY_OK) return status;
    return create_tail(std::make_unique<CudaTailDevice>(self, functions), tensors, count, tail);
  });
}

}  // namespace

const oxy_kernels kKernelTable = tail_kernels(tail_create);

}  // namespace oxytorch::backend::cuda
