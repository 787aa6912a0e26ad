// Google Benchmark of the step tail's two passes on raw memory, by instruction set, tensor count and size.
#include <benchmark/benchmark.h>

#include <vector>

#include "oxytorch/isa.h"
#include "oxytorch/kernels/step_tail.h"

namespace {

using namespace oxytorch;
using namespace oxytorch::kernels;

struct Workload {
  Workload(std::int64_t count, std::int64_t numel)
      : data(static_cast<std::size_t>(5 * count * numel)), step(static_cast<std::size_t>(count), 1.0F) {
    // Nonzero and not denormal: what the arithmetic meets in training.
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = 1e-3F * static_cast<float>(1 + i * 2654435761U % 1000);
    std::vector<TailTensor> tensors;
    float* at = data.data();
    for (std::int64_t i = 0; i < count; ++i) {
      TailTensor t;
      for (void** pointer : {&t.param, &t.grad, &t.state[0].data, &t.state[1].data}) {
        *pointer = at;
        at += numel;
      }
      t.ema = at;
      at += numel;
      t.step = &step[static_cast<std::size_t>(i)];
      t.numel = numel;
      tensors.push_back(t);
      bytes += step_bytes(t, {}, true);
    }
    plan.emplace_back(tensors);
  }
  std::vector<float> data;
  std::vector<float> step;
  std::vector<StepTailPlan> plan;
  std::int64_t bytes = 0;
};

void BM_AdamWStep(benchmark::State& state) {
  const auto isa = static_cast<Isa>(state.range(0));
  if (isa > supported_isas().back()) {
    state.SkipWithError("this processor lacks the instruction set");
    return;
  }
  const ScopedIsa scope(isa);
  Workload work(state.range(1), state.range(2));
  TailGroup group;
  group.weight_decay = 0.01;
  TailSettings settings;
  settings.grad_multiplier = 0.5;
  settings.ema_decay = 0.999;
  for (auto _ : state) {
    benchmark::DoNotOptimize(work.plan[0].measure({}));
    work.plan[0].apply({&group, 1}, settings, {});
  }
  state.SetBytesProcessed(state.iterations() * work.bytes);
  state.SetLabel(name(isa));
}
BENCHMARK(BM_AdamWStep)
    ->ArgNames({"isa", "tensors", "elements"})
    ->ArgsProduct({{1, 2}, {200}, {64, 1000}})
    ->ArgsProduct({{1, 2}, {4}, {1 << 22}})
    ->Args({0, 200, 64})
    ->UseRealTime();

}  // namespace
