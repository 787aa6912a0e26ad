// What a monitored step costs the thread that steps.
#include <benchmark/benchmark.h>

#include "oxytorch/monitor.h"

namespace oxytorch::monitor {
namespace {

class Discard : public Sink {
 public:
  [[nodiscard]] std::string name() const override { return "discard"; }
  void write(const StepRecord& record) override { benchmark::DoNotOptimize(record.step); }
};

// range(0) phases, range(1) scalars, range(2): 1 with a sink, so that records go through the ring.
void monitored_step(benchmark::State& state) {
  MonitorOptions options;
  std::vector<std::shared_ptr<Sink>> sinks;
  if (state.range(2) != 0) sinks.push_back(std::make_shared<Discard>());
  PerformanceMonitor monitor(options, sinks);
  std::vector<PhaseId> phases;
  std::vector<ScalarId> scalars;
  for (int i = 0; i < state.range(0); ++i) phases.push_back(monitor.phase("phase" + std::to_string(i)));
  for (int i = 0; i < state.range(1); ++i) scalars.push_back(monitor.scalar("scalar" + std::to_string(i)));
  for (auto _ : state) {
    const Step step(monitor, 32);
    for (const PhaseId id : phases) const Phase phase(monitor, id);
    for (const ScalarId id : scalars) monitor.scalar(id, 1.0);
  }
}
BENCHMARK(monitored_step)->ArgNames({"phases", "scalars", "sink"})->Args({0, 0, 0})->Args({4, 1, 1})->Args({8, 16, 1});

void drained_record(benchmark::State& state) {
  MonitorOptions options;
  options.ring_records = 256;
  PerformanceMonitor monitor(options, {std::make_shared<JsonlSink>("/dev/null")});
  const PhaseId forward = monitor.phase("forward"), backward = monitor.phase("backward");
  const ScalarId loss = monitor.scalar("loss");
  for (auto _ : state) {
    state.PauseTiming();
    for (int i = 0; i < 256; ++i) {
      const Step step(monitor, 32);
      { const Phase phase(monitor, forward); }
      { const Phase phase(monitor, backward); }
      monitor.scalar(loss, 2.25 / (i + 1));
    }
    state.ResumeTiming();
    monitor.flush();
  }
  state.SetItemsProcessed(state.iterations() * 256);
}
BENCHMARK(drained_record);

}  // namespace
}  // namespace oxytorch::monitor
