// Google Benchmark of the step tail's passes on raw memory, by layout, instruction set, tensor count and size.
#include <benchmark/benchmark.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "oxytorch/isa.h"
#include "oxytorch/kernels/codec.h"
#include "oxytorch/kernels/step_tail.h"

namespace {

using namespace oxytorch;
using namespace oxytorch::kernels;

// Threads that wait for work, as those of a framework do.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    task_ = nullptr;
    start();
    for (std::thread& worker : workers_) worker.join();
  }
  Parallel parallel() { return {static_cast<int>(workers_.size()) + 1, run, this}; }

 private:
  static void run(void* pool, int tasks, void (*task)(void*, int), void* context) {
    auto& self = *static_cast<Pool*>(pool);
    self.task_ = task;
    self.context_ = context;
    self.tasks_ = tasks;
    self.left_.store(static_cast<int>(self.workers_.size()));
    self.start();
    task(context, 0);
    while (self.left_.load() != 0) {
    }
  }
  void start() {
    round_.fetch_add(1);
    round_.notify_all();
  }
  void work(int index) {
    for (int seen = 0;;) {
      round_.wait(seen);
      seen = round_.load();
      if (task_ == nullptr) return;
      if (index < tasks_) task_(context_, index);
      left_.fetch_sub(1);
    }
  }
  std::vector<std::thread> workers_;
  std::atomic<int> round_{0};
  std::atomic<int> left_{0};
  void (*task_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int tasks_ = 0;
};

enum Layout { Fp32, Fp32Ema, Fp32Statistics, Int8State, Int8Stochastic, SevenByte, SevenByteStochastic, kLayouts };
constexpr const char* kNames[] = {"fp32",   "fp32+ema",         "fp32+ema+statistics", "int8 state", "int8 stochastic",
                                  "7-byte", "7-byte stochastic"};

struct Workload {
  Workload(Layout layout, std::int64_t count, std::int64_t numel) : step(static_cast<std::size_t>(count), 1.0F) {
    group.weight_decay = 0.01;
    settings.grad_multiplier = 0.5;
    settings.ema_decay = 0.999;
    settings.collect = layout == Fp32Statistics;
    settings.stochastic = layout == Int8Stochastic || layout == SevenByteStochastic;
    const bool narrow = layout >= Int8State;
    const bool seven = layout >= SevenByte;
    const auto n = static_cast<std::size_t>(numel);
    // Nonzero and not denormal: what the arithmetic meets in training.
    std::vector<float> values(n);
    for (std::size_t i = 0; i < n; ++i) values[i] = 1e-3F * static_cast<float>(1 + i * 2654435761U % 1000);
    std::vector<TailTensor> tensors;
    for (std::int64_t i = 0; i < count; ++i) {
      TailTensor t;
      t.numel = numel;
      t.stream = static_cast<std::uint32_t>(i);
      t.step = &step[static_cast<std::size_t>(i)];
      if (seven) {
        t.type = t.grad_type = ElementType::BF16;
        t.param = array(2 * n);
        t.low_bits = static_cast<std::int8_t*>(array(n));
        split_weights(values, static_cast<std::uint16_t*>(t.param), t.low_bits);
        t.grad = array(2 * n);
        std::copy_n(static_cast<std::uint16_t*>(t.param), n, static_cast<std::uint16_t*>(t.grad));
      } else {
        t.param = copy(values);
        t.grad = copy(values);
      }
      for (int k = 0; k < 2; ++k) {
        if (narrow) {
          t.state_type = ElementType::Int8;
          t.state[k] = {array(n), static_cast<std::uint16_t*>(array(2 * (n / 32 + 1)))};
          encode_state(k == 0 ? StateCode::Signed : StateCode::Unsigned, values, t.state[k].data, t.state[k].scale);
        } else {
          t.state[k].data = copy(values);
        }
      }
      if (layout == Fp32Ema || layout == Fp32Statistics) t.ema = copy(values);
      tensors.push_back(t);
      bytes += step_bytes(t, settings, true);
      measured_bytes += numel * (seven ? 2 : 4);
    }
    plan = std::make_unique<StepTailPlan>(tensors);
  }
  // malloc'ed, as torch's are.
  void* array(std::size_t size) {
    memory.emplace_back(new unsigned char[size]);
    return memory.back().get();
  }
  float* copy(const std::vector<float>& values) {
    auto* const to = static_cast<float*>(array(4 * values.size()));
    std::copy(values.begin(), values.end(), to);
    return to;
  }
  TailGroup group;
  TailSettings settings;
  std::vector<std::unique_ptr<unsigned char[]>> memory;
  std::vector<float> step;
  std::unique_ptr<StepTailPlan> plan;
  std::int64_t bytes = 0;
  std::int64_t measured_bytes = 0;
};

bool lacks(benchmark::State& state, Isa isa) {
  if (isa <= supported_isas().back()) return false;
  state.SkipWithError("this processor lacks the instruction set");
  return true;
}

void BM_AdamWStep(benchmark::State& state) {
  const auto layout = static_cast<Layout>(state.range(0));
  const auto isa = static_cast<Isa>(state.range(1));
  if (lacks(state, isa)) return;
  const ScopedIsa scope(isa);
  Workload work(layout, state.range(2), state.range(3));
  Pool pool(static_cast<int>(state.range(4)));
  for (auto _ : state) {
    benchmark::DoNotOptimize(work.plan->measure(pool.parallel()));
    work.plan->apply({&work.group, 1}, work.settings, pool.parallel());
  }
  state.SetBytesProcessed(state.iterations() * work.bytes);
  state.SetLabel(std::string(kNames[layout]) + ", " + name(isa));
}
BENCHMARK(BM_AdamWStep)
    ->ArgNames({"layout", "isa", "tensors", "elements", "threads"})
    ->ArgsProduct({benchmark::CreateDenseRange(0, kLayouts - 1, 1), {2}, {16}, {1 << 22}, {1, 2}})
    ->ArgsProduct({{Fp32Ema, Int8State, SevenByte}, {1}, {16}, {1 << 22}, {2}})
    ->ArgsProduct({{Fp32Ema}, {0, 1, 2}, {200}, {64, 1000}, {1}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

void BM_Measure(benchmark::State& state) {
  Workload work(static_cast<Layout>(state.range(0)), 16, 1 << 22);
  Pool pool(2);
  for (auto _ : state) benchmark::DoNotOptimize(work.plan->measure(pool.parallel()));
  state.SetBytesProcessed(state.iterations() * work.measured_bytes);
  state.SetLabel(kNames[state.range(0)]);
}
BENCHMARK(BM_Measure)->ArgName("layout")->Arg(Fp32)->Arg(SevenByte)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
