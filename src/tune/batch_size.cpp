#include "oxytorch/tune/batch_size.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "memory/device_bytes.h"
#include "oxytorch/clock.h"
#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/memory/host_cap.h"
#include "oxytorch/system.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/units.h"

namespace oxytorch {
namespace {

/// What batches share: resident memory of this process, or what torch's allocator has taken from a device.
class Shared {
 public:
  explicit Shared(c10::Device device) : device_(device) {
    if (!device.is_cpu()) peak_.emplace(device, memory::DevicePeak::Of::Allocator);
  }
  /// That this process can get.
  [[nodiscard]] std::uint64_t total() const {
    if (peak_) {
      const auto found = memory::memory_of(device_);
      return found.available + found.taken;
    }
    const auto found = read_memory();
    return found.resident.value_or(0) + found.available.value_or(0);
  }
  /// Gives back what is only kept, and begins the peak anew.
  void begin() {
    if (!peak_) {
      give_back_host_memory();
      return reset_host_peak();
    }
    memory::statistics_of(device_)->emptyCache();
    peak_->reset();
  }
  [[nodiscard]] std::uint64_t peak() const {
    return peak_ ? static_cast<std::uint64_t>(peak_->peak()) : read_memory().peak_resident.value_or(0);
  }
  /// Refuses what is past the limit, where that can be: a device refuses past its own memory.
  [[nodiscard]] HostSetting cap(std::uint64_t limit) const {
    return peak_ ? HostSetting::unchanged("memory", "the device's own") : cap_host_memory(limit);
  }
  void synchronize() const { memory::synchronize(device_); }

 private:
  c10::Device device_;
  std::optional<memory::DevicePeak> peak_;
};

/// Seconds of each timed step of a size under the cap; empty where there was no memory for them, with what said so.
std::optional<std::vector<double>> seconds_of(tune::Run& run, const std::function<Batch()>& make, int steps,
                                              const Shared& shared, std::uint64_t limit, std::string& why) {
  auto cap = shared.cap(limit);
  std::vector<double> seconds;
  try {
    const auto batch = make();
    for (int i = 0; i <= steps; ++i) {
      const auto began = std::chrono::steady_clock::now();
      run.step(batch);
      shared.synchronize();
      if (i > 0) seconds.push_back(std::max(seconds_since(began), 1e-9));
    }
  } catch (const std::exception& error) {
    cap.revert();
    why = error.what();
    if (!is_out_of_memory(error)) throw;
    return std::nullopt;
  } catch (...) {
    cap.revert();
    throw;
  }
  cap.revert();
  return seconds;
}

void check(const std::function<Batch(std::int64_t)>& make_batch) {
  OXY_CHECK(make_batch, InvalidArgument, "make_batch is empty. Give a function that makes a batch of so many samples.");
}

BatchPlan searched(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                   const std::function<Batch(std::int64_t)>& make_batch, const BatchSizeOptions& options, bool curve) {
  check(make_batch);
  OXY_CHECK(options.steps() >= 1, InvalidArgument, "steps is ", options.steps(), ", expected at least 1.");
  tune::Run run(model, optimizer, std::move(loss), {Batch()}, options.clip_norm());
  Shared shared(run.device());
  const auto total = shared.total();
  const auto limit = options.limit().empty() ? total : std::min(Size::parse(options.limit()).resolve(total), total);
  tune::Snapshot snapshot(run);
  const auto rewind = [&] {
    snapshot.restore();
    shared.begin();
  };
  rewind();
  BatchSearch search({.start = options.start(),
                      .most = options.most(),
                      .multiple = curve ? 1 : options.multiple(),
                      .headroom = options.headroom(),
                      .resolution = options.resolution(),
                      .curve = curve},
                     limit, shared.peak());
  while (const auto size = search.next()) {
    std::string why;
    std::optional<std::vector<double>> seconds;
    std::uint64_t peak = 0;
    try {
      seconds = seconds_of(run, [&] { return make_batch(*size); }, options.steps(), shared, limit, why);
      peak = shared.peak();
    } catch (...) {
      rewind();
      throw;
    }
    rewind();
    if (seconds) {
      search.ran(peak, *seconds);
    } else {
      search.ran_out(why);
    }
  }
  snapshot.prove();
  return search.plan(options.samples(), options.current());
}

}  // namespace

BatchPlan largest_batch(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                        const std::function<Batch(std::int64_t)>& make_batch, const BatchSizeOptions& options) {
  return searched(model, optimizer, std::move(loss), make_batch, options, /*curve=*/false);
}

BatchPlan batch_curve(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                      const std::function<Batch(std::int64_t)>& make_batch, const BatchSizeOptions& options) {
  return searched(model, optimizer, std::move(loss), make_batch, options, /*curve=*/true);
}

BatchForecast will_it_fit(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                          const std::function<Batch(std::int64_t)>& make_batch, std::int64_t size,
                          const BatchForecastOptions& options) {
  check(make_batch);
  tune::Run run(model, optimizer, std::move(loss), {Batch()}, options.clip_norm());
  const auto device = run.device();
  const auto available =
      options.limit().empty()
          ? memory::available_bytes(device)
          : memory::available_bytes(static_cast<std::uint64_t>(memory::budget_bytes(options.limit(), device)), device);
  const BatchReplay replay(size, available, options.headroom());
  tune::Snapshot snapshot(run);
  const auto step = [&](std::int64_t samples) {
    const memory::Meter meter({.device = device, .timeline = true});
    run.step(make_batch(samples));
    return meter.timeline();
  };
  std::vector<at::Tensor> gradients;
  for (const auto& p : run.parameters()) gradients.push_back(p.grad());
  try {
    const memory::Meter whole({.device = device});
    run.step(make_batch(replay.sizes().first));  // makes gradients and the optimizer's state
    auto kept = whole.live_bytes();
    for (std::size_t i = 0; i < gradients.size(); ++i) {  // those that the step replaced are alive for us alone
      if (gradients[i].defined() && !gradients[i].is_same(run.parameters()[i].grad())) {
        kept -= static_cast<std::int64_t>(gradients[i].nbytes());
      }
    }
    const auto smaller = step(replay.sizes().first);
    auto found = replay.forecast(kept, smaller, step(replay.sizes().second));
    snapshot.restore();
    return found;
  } catch (...) {
    snapshot.restore();
    throw;
  }
}

}  // namespace oxytorch
