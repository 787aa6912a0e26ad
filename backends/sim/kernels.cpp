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
  oxy_status free(void* memory) override { return mutant("kernel_leaks") ? OXY_OK : device(index_).free(memory); }
  oxy_status launch(kernels::device::TailKernel kernel, std::uint32_t blocks, const void* arguments,
                    std::uint32_t bytes, oxy_queue queue) override {
    if (const oxy_status status = check_alive(index_); status != OXY_OK) return status;
    auto made = std::make_shared<Launch>(Launch{kernel, blocks, std::vector<std::uint64_t>((bytes + 7) / 8)});
    std::memcpy(made->arguments.data(), arguments, bytes);
    Work work;
    work.kind = Work::Kind::Launch;
    work.launch = std::move(made);
    void* lost = nullptr;
    if (mutant("kernel_allocates")) device(index_).alloc(OXY_MEMORY_DEVICE, 64, &lost);
    if (mutant("kernel_ignores_queue")) queue = nullptr;
    return submit(index_, queue, std::move(work));
  }

 private:
  std::int32_t index_;
};

#if defined(OXY_SIM_MUTANTS)
using kernels::device::TailKernel;

// Bugs in what a launch is asked to do.
void plant_before(Launch& launch, LaunchMemory& memory) {
  const bool applies = launch.kernel >= TailKernel::ApplyAdamPlain;
  auto& judge = *reinterpret_cast<kernels::device::JudgeArguments*>(launch.arguments.data());
  auto& apply = *reinterpret_cast<kernels::device::ApplyArguments*>(launch.arguments.data());
  if (launch.kernel == TailKernel::Judge) {
    if (mutant("kernel_no_unscale")) judge.round.grad_scale = nullptr;
    if (mutant("kernel_clip_epsilon")) judge.round.clip_norm *= 1 + 1e-7;
    if (mutant("kernel_found_inf_lost")) judge.round.found_inf = nullptr;
    if (mutant("kernel_skip_counts")) judge.results.skipped = nullptr;
  } else if (launch.kernel == TailKernel::SumGradients) {
    if (mutant("kernel_lost_sum")) --launch.blocks;
  } else if (launch.kernel == TailKernel::Collect) {
    if (mutant("kernel_no_statistics")) launch.blocks = 0;
  } else if (launch.kernel == TailKernel::Prepare || applies) {
    auto* const verdict = static_cast<oxy_tail_verdict*>(memory.resolve(apply.verdict, sizeof(oxy_tail_verdict)));
    if (mutant("kernel_skip_ignored")) verdict->skip = 0;
    if (mutant("kernel_no_ema")) apply.round.ema_decay = 1;
    if (mutant("kernel_no_agc")) apply.round.agc = 0;
    if (mutant("kernel_no_zero")) apply.round.flags &= ~std::uint32_t{OXY_TAIL_ZERO_GRAD};
    if (mutant("kernel_last_chunk") && applies) --launch.blocks;
    auto* const group = static_cast<oxy_tail_group*>(memory.resolve(apply.tables.groups, sizeof(oxy_tail_group)));
    if (mutant("kernel_host_lr")) group->lr_tensor = nullptr;
  }
}

// Bugs in what it leaves behind.
void plant_after(const Launch& launch, LaunchMemory& memory) {
  const auto& apply = *reinterpret_cast<const kernels::device::ApplyArguments*>(launch.arguments.data());
  const bool prepares = launch.kernel == TailKernel::Prepare;
  if (!prepares && launch.kernel < TailKernel::ApplyAdamPlain) return;
  for (std::uint32_t i = 0; i < apply.tables.tensor_count; ++i) {
    const auto& tensor = static_cast<kernels::device::TailRecord*>(
                             memory.resolve(apply.tables.records + i, sizeof(kernels::device::TailRecord)))
                             ->tensor;
    auto& c = *static_cast<kernels::device::TailCoefficients*>(
        memory.resolve(apply.tables.coefficients + i, sizeof(kernels::device::TailCoefficients)));
    if (prepares) {
      auto& step = *static_cast<float*>(memory.resolve(tensor.step, 4));
      if (mutant("kernel_step_kept")) step -= 1;
      if (mutant("kernel_step_twice")) step += 1;
      if (mutant("kernel_wrong_correction")) c.value.inv_sqrt_correction2 = 1;
      if (mutant("kernel_no_decay")) c.value.decay = c.value.weight_decay = 0;
    } else if (mutant("kernel_copy_cut") && tensor.copy != nullptr) {
      // As if the last bit were cut, not rounded.
      const auto count = static_cast<std::uint64_t>(tensor.numel);
      auto* const copy = static_cast<std::uint16_t*>(memory.resolve(tensor.copy, 2 * count));
      const auto* const weight = static_cast<const std::uint32_t*>(memory.resolve(tensor.param, 4 * count));
      for (std::uint64_t k = 0; k < count; ++k) copy[k] = static_cast<std::uint16_t>(weight[k] >> 16);
    }
  }
}
#else
void plant_before(Launch&, LaunchMemory&) {}
void plant_after(const Launch&, LaunchMemory&) {}
#endif

}  // namespace

Failure run_launch(std::int32_t device, Launch& launch) {
  SimDevice& self = sim::device(device);
  self.counters.launches.fetch_add(1, std::memory_order_relaxed);
  LaunchMemory memory(self);
  try {
    plant_before(launch, memory);
    kernels::device::emulated_launch(launch.kernel, launch.blocks, launch.arguments.data(), &memory);
    plant_after(launch, memory);
  } catch (const NotThere& range) {
    return gone(range.address);
  } catch (const std::bad_alloc&) {
    return {OXY_OUT_OF_MEMORY, "no host memory left for an emulated kernel"};
  }
  return {};
}

oxy_status create_sim_tail(std::int32_t device, const oxy_tail_tensor* tensors, std::uint32_t count, oxy_tail* tail) {
  if (tail != nullptr) *tail = nullptr;
  if (const oxy_status status = check_alive(device); status != OXY_OK) return status;
  return create_tail(std::make_unique<SimTailDevice>(device), tensors, count, tail);
}

}  // namespace oxytorch::backend::sim
