#include "tune/run_workload.h"

#include <c10/util/Exception.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "memory/device_bytes.h"
#include "oxytorch/memory/host_cap.h"
#include "oxytorch/memory/meter.h"

namespace oxytorch::tune {

namespace {

/// Processes that train together, as torchrun and its like tell each of them.
std::int64_t processes() {
  const char* const text = std::getenv("WORLD_SIZE");
  return text == nullptr ? 1 : std::strtoll(text, nullptr, 10);
}

}  // namespace

std::vector<Offer> offers_of(const std::vector<RegisteredStrategy>& strategies) {
  std::vector<Offer> found;
  for (const auto& strategy : strategies) found.push_back({strategy.name, strategy.kind, strategy.traits});
  return found;
}

std::vector<Offer> RunWorkload::offers() {
  auto found = offers_of(strategies_);
  for (auto& offer : found) {
    std::erase_if(offer.traits.requires_, [&](const auto& name) {  // is met in any case
      return std::find(run_.required.begin(), run_.required.end(), name) != run_.required.end();
    });
    if (const auto why = refused_.find(offer.name); why != refused_.end()) {
      offer.refused = why->second;
    } else if (offer.traits.needs_loop && !run_.owns_loop) {
      offer.refused = "it changes how a batch is stepped with: loop 'plan' and Plan::step() allow it";
    }
  }
  return found;
}

std::string RunWorkload::hindrance() {
  if (const auto count = processes(); count > 1) {
    return "WORLD_SIZE is " + std::to_string(count) + ": one of several processes, which would decide differently";
  }
  return std::isfinite(loss_) ? "" : "the loss of the step as given is not finite: nothing can be verified by it";
}

std::map<std::string, std::string> RunWorkload::covered() {
  return {{"restored",
           "model, optimizer and random generators proven by hash to be what they were; what only the loss function "
           "captures is not covered"}};
}

std::vector<std::size_t> RunWorkload::shapes() {
  std::vector<std::vector<std::vector<std::int64_t>>> seen;
  std::vector<std::size_t> first;
  for (std::size_t i = 0; i < run_.batches().size(); ++i) {
    auto found = tune::shapes(run_.batches()[i]);
    if (std::find(seen.begin(), seen.end(), found) != seen.end()) continue;
    seen.push_back(std::move(found));
    first.push_back(i);
  }
  return first;
}

StepTimes RunWorkload::steps(std::size_t first, int count, bool updates, bool /*drawn*/) {
  StepTimes found;
  const memory::CountingPaused paused;
  memory::synchronize(run_.device());
  const double began = seconds();
  at::Tensor loss;
  for (int i = 0; i < count; ++i) {
    const auto& batch = run_.batches()[(first + static_cast<std::size_t>(i)) % run_.batches().size()];
    double updating = 0;
    loss = run_.step_of_window(batch, [&](std::size_t part) {
      if (updates) {
        updating += update(part);
      } else {
        run_.update(part);
      }
    });
    if (updates) found.updates.push_back(updating);
  }
  memory::synchronize(run_.device());
  found.seconds = seconds() - began;
  loss_ = loss.item<double>();
  return found;
}

double RunWorkload::update(std::size_t part) {
  memory::synchronize(run_.device());
  const double began = seconds();
  run_.update(part);
  memory::synchronize(run_.device());
  return seconds() - began;
}

double RunWorkload::update() {
  const memory::CountingPaused paused;
  double sum = 0;
  for (std::size_t part = 0; part < run_.parts(); ++part) sum += update(part);
  return sum;
}

Ruling RunWorkload::verify(Kind kind, bool glance) {
  auto& verifier = glance ? glance_ : verifier_;
  if (!verifier) {
    VerifierOptions options{.seed = seed_};
    if (glance) options.steps = options.trajectory = 1;
    verifier.emplace(run_, snapshot_, options);
  }
  return verifier->check(kind);
}

PeakBytes::PeakBytes(const Run& run) {
  if (!memory::can_count(run.device())) return;
  held_ = run.held_bytes(run.batches().front());
  meter_.emplace(memory::MeterOptions{.device = run.device()});
}

std::optional<std::int64_t> PeakBytes::so_far() const {
  return meter_ ? std::optional(held_ + meter_->peak_bytes()) : std::nullopt;
}

std::optional<std::int64_t> RunWorkload::step_bytes() {
  const auto device = run_.device();
  if (!memory::can_count(device)) return std::nullopt;
  const auto& batch = run_.batches().front();
  const memory::Meter whole({.device = device});
  const auto before = run_.held_bytes(batch);
  const auto update = [this](std::size_t part) { run_.update(part); };
  run_.step_of_window(batch, update);  // makes gradients and the optimizer's state
  const auto made = whole.live_bytes();
  const memory::Meter meter({.device = device});
  run_.step_of_window(batch, update);
  return before + made + meter.peak_bytes();
}

std::optional<std::int64_t> RunWorkload::step_resident() {
  if (!run_.device().is_cpu()) return std::nullopt;
  const auto step = [this] {
    run_.step_of_window(run_.batches().front(), [this](std::size_t part) { run_.update(part); });
  };
  step();  // makes gradients and the optimizer's state
  return most_resident([&] {
    step();
    step();
  });
}

std::optional<std::string> RunWorkload::told(const std::exception& error) {
  const auto* const torchs = dynamic_cast<const c10::Error*>(&error);
  if (torchs == nullptr) return Workload::told(error);
  return Workload::told(std::runtime_error(torchs->what_without_backtrace()));
}

}  // namespace oxytorch::tune
