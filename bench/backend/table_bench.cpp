// What one call through the table costs the host: the floor under every use of a device. OXYTORCH_BENCH_BACKEND names
// the backend to measure, which is cpu otherwise.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "oxytorch/backend/device.h"
#include "oxytorch/backend/sim.h"

namespace {

using oxytorch::backend::Backend;
using oxytorch::backend::Buffer;
using oxytorch::backend::Device;
using oxytorch::backend::Event;
using oxytorch::backend::Queue;

const Backend& measured() {
  const char* name = std::getenv("OXYTORCH_BENCH_BACKEND");
  return oxytorch::backend::backend(name == nullptr ? "cpu" : name);
}

// The call alone: a copy of no bytes, which a backend answers after its checks.
void table_call(benchmark::State& state) {
  const oxy_backend& table = measured().table();
  for (auto _ : state) {
    benchmark::DoNotOptimize(table.copy_async(0, nullptr, nullptr, nullptr, 0, OXY_COPY_HOST_TO_DEVICE));
  }
}
BENCHMARK(table_call);

// The same through the C++ layer, status check included.
void queue_call(benchmark::State& state) {
  const Device device(measured());
  Queue queue(device);
  for (auto _ : state) queue.copy_to_device(nullptr, nullptr, 0);
}
BENCHMARK(queue_call);

void score(benchmark::State& state) {
  const oxy_backend& table = measured().table();
  const char* reason = nullptr;
  std::int32_t devices = 0;
  for (auto _ : state) benchmark::DoNotOptimize(table.score(&reason, &devices));
}
BENCHMARK(score);

void record_and_ask(benchmark::State& state) {
  const Device device(measured());
  Queue queue(device);
  Event event;
  for (auto _ : state) {
    queue.record(event);
    benchmark::DoNotOptimize(event.done());
  }
}
BENCHMARK(record_and_ask);

void alloc_free(benchmark::State& state) {
  const Device device(measured());
  for (auto _ : state) benchmark::DoNotOptimize(Buffer(device, static_cast<std::uint64_t>(state.range(0))).data());
}
BENCHMARK(alloc_free)->Arg(64)->Arg(1 << 16)->Arg(1 << 24);

void copy(benchmark::State& state) {
  const Device device(measured());
  const auto bytes = static_cast<std::uint64_t>(state.range(0));
  const Buffer from(device, bytes), to(device, bytes);
  Queue queue(device);
  queue.fill(from.data(), 1, bytes);
  for (auto _ : state) queue.copy(to.data(), from.data(), bytes, OXY_COPY_DEVICE_TO_DEVICE);
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(copy)->Arg(64)->Arg(1 << 12)->Arg(1 << 20)->Arg(1 << 26);

// Handing one fill to the simulator's worker; the worker's own time is not the host's.
void sim_enqueue(benchmark::State& state) {
  oxytorch::backend::configure_sim(oxytorch::backend::parse_sim_options("latency_us=0"));
  const Device device(oxytorch::backend::backend("sim"));
  const Buffer buffer(device, 64);
  Queue queue(device);
  std::int64_t turn = 0;
  for (auto _ : state) {
    queue.fill(buffer.data(), 1, 64);
    if (++turn % 1024 == 0) {
      state.PauseTiming();
      queue.synchronize();
      state.ResumeTiming();
    }
  }
  queue.synchronize();
}
BENCHMARK(sim_enqueue);

void list_backends(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(oxytorch::backend::available_backends());
}
BENCHMARK(list_backends);

}  // namespace

int main(int argc, char** argv) {
  try {
    static_cast<void>(Device(measured()));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
