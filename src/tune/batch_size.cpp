#include "oxytorch/tune/batch_size.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <optional>
#include <utility>
#include <vector>

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

/// Seconds of each timed step of a size under the cap; empty where there was no memory for them, with what said so.
std::optional<std::vector<double>> seconds_of(tune::Run& run, const std::function<Batch()>& make, int steps,
                                              std::uint64_t limit, std::string& why) {
  auto cap = cap_host_memory(limit);
  std::vector<double> seconds;
  try {
    const auto batch = make();
    for (int i = 0; i <= steps; ++i) {
      const auto began = std::chrono::steady_clock::now();
      run.step(batch);
      if (i > 0) seconds.push_back(std::max(seconds_since(began), 1e-9));
    }
  } catch (const std::exception& error) {
    cap.revert();
    why = error.what();
    if (dynamic_cast<const std::bad_alloc*>(&error) == nullptr && !says_out_of_memory(why)) throw;
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
  OXY_CHECK(run.device().is_cpu(), NotSupported, "the model is on ", run.device().str(),
            ", and only the host's memory is measured in C++ yet. oxytorch.memory.largest_batch of Python measures "
            "that of a device.");
  const auto memory = read_memory();
  const auto total = memory.resident.value_or(0) + memory.available.value_or(0);
  const auto limit = options.limit().empty() ? total : std::min(Size::parse(options.limit()).resolve(total), total);
  tune::Snapshot snapshot(run);
  const auto rewind = [&] {
    snapshot.restore();
    give_back_host_memory();
    reset_host_peak();
  };
  rewind();
  BatchSearch search({.start = options.start(),
                      .most = options.most(),
                      .multiple = curve ? 1 : options.multiple(),
                      .headroom = options.headroom(),
                      .resolution = options.resolution(),
                      .curve = curve},
                     limit, read_memory().peak_resident.value_or(0));
  while (const auto size = search.next()) {
    std::string why;
    std::optional<std::vector<double>> seconds;
    std::uint64_t peak = 0;
    try {
      seconds = seconds_of(run, [&] { return make_batch(*size); }, options.steps(), limit, why);
      peak = read_memory().peak_resident.value_or(0);
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
  OXY_CHECK(run.device().is_cpu(), NotSupported, "the model is on ", run.device().str(),
            ", and only the memory of CPU tensors is told yet.");
  const auto available =
      options.limit().empty()
          ? memory::available_bytes()
          : memory::available_bytes(Size::parse(options.limit()).resolve(read_memory().limit.value_or(0)));
  const BatchReplay replay(size, available, options.headroom());
  tune::Snapshot snapshot(run);
  const auto step = [&](std::int64_t samples) {
    const memory::Meter meter({.timeline = true});
    run.step(make_batch(samples));
    return meter.timeline();
  };
  std::vector<at::Tensor> gradients;
  for (const auto& p : run.parameters()) gradients.push_back(p.grad());
  try {
    const memory::Meter whole;
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
