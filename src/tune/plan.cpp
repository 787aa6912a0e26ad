#include "tune/plan.h"

#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "oxytorch/logging.h"
#include "oxytorch/system.h"
#include "oxytorch/tune/apart.h"
#include "oxytorch/tune/asked.h"
#include "oxytorch/tune/host.h"
#include "oxytorch/tune/own_random.h"
#include "oxytorch/tune/snapshot.h"
#include "tune/run_workload.h"
#include "tune/sources.h"

namespace oxytorch {
namespace {

/// One batch's loss and gradients, with or without.
struct Seen {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

}  // namespace

std::optional<std::uint64_t> retain_limit_of(const PerformanceConfig& config) {
  if (config.is_auto("allocator_retain_limit")) return std::nullopt;
  return config.size("allocator_retain_limit").resolve(read_memory().limit.value_or(0));
}

NamedSettings::NamedSettings(const PerformanceConfig& config) : NamedSettings() {
  const auto named = [&](const char* key, const char* word) {
    return tune::is_named(config, key) && config.get(key) == ConfigValue(std::string(word));
  };
  if (config.flag("deterministic")) add(use_deterministic_algorithms());
  const auto threads = config.integer("threads");
  if (threads && tune::is_named(config, "threads")) add(size_threads(static_cast<int>(*threads)));
  if (named("flush_denormals", "on")) add(flush_denormals());
  if (named("allocator", "retain")) add(tune_allocator(retain_limit_of(config)));
}

void NamedSettings::add(HostSetting setting) {
  if (!setting.is_in_effect()) {
    log(LogLevel::Warn, "accelerate: " + setting.name() + " was asked for and is left out: " + setting.reason());
  }
  settings_.push_back(std::move(setting));
}

void NamedSettings::revert() {
  for (auto setting = settings_.rbegin(); setting != settings_.rend(); ++setting) setting->revert();
}

Plan::Impl::Impl(std::unique_ptr<tune::Run> r, tune::Certificate c, std::optional<tune::CertificateStore> s,
                 tune::Kind widest, std::uint64_t seed, NamedSettings n)
    : named(std::move(n)), run(std::move(r)), certificate(std::move(c)), store(std::move(s)) {
  auto names = run->in_force();
  std::erase_if(names, [&](const auto& name) {
    return std::find(run->required.begin(), run->required.end(), name) != run->required.end();
  });
  if (names.empty()) return;
  // What is active cannot know which steps are compared.
  const auto drawn_by = seed ^ tune::fresh_bits();
  const tune::WatchOptions options{.names = std::move(names), .kind = widest, .drawn_by = drawn_by};
  watch.emplace(*this, certificate, store ? &*store : nullptr, options);
}

void Plan::Impl::revert() {
  watch.reset();
  run->required.clear();
  run->bring({});
  named.revert();
}

at::Tensor Plan::Impl::step(const Batch& given) {
  // What is compared is a window of batches, which begins and ends with all of its strategies or none.
  if (run->waiting() == 0) {
    batch = &given;
    watched = watch && watch->before();
    window_seconds = 0;
  }
  if (!watched || !watch) return run->take(given);
  const bool waited = watch->checks() || run->device().is_cpu();
  if (waited) tune::synchronize(run->device());
  const double began = tune::seconds_now();
  auto loss = run->take(given);
  if (waited) tune::synchronize(run->device());
  window_seconds += tune::seconds_now() - began;
  if (run->waiting() == 0) watch->after(window_seconds);
  if (waited && !std::isfinite(loss.item<double>())) watch->doubt();
  return loss;
}

void Plan::Impl::update() {
  run->update();
  if (!watch) return;
  if (watch->checks() || run->device().is_cpu()) tune::synchronize(run->device());
  if (updated) watch->after(tune::seconds_now() - *updated);
  batch = &run->batches()[updates++ % run->batches().size()];  // the loop keeps its own to itself
  updated.reset();
  if (watch->before()) updated = tune::seconds_now();
}

tune::BothWays Plan::Impl::compare() {
  // On the CPU other threads may draw from torch's generator meanwhile: the check draws from one of its own.
  const bool on_cpu = run->device().is_cpu();
  const bool pieces = run->micro_batches() > 1;  // which draw masks for other rows
  std::optional<tune::OwnRandom> random;
  if (on_cpu) random.emplace();
  const auto seen = [&] {
    tune::Snapshot snapshot(*run, /*generators=*/!on_cpu);
    try {
      Seen found;
      if (pieces) {
        const at::NoGradGuard no_grad;
        found.loss = run->loss(*batch).item<double>();
      } else {
        found.loss = run->backward(*batch).item<double>();
        for (const auto& p : run->parameters()) {
          found.gradients.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
        }
      }
      snapshot.restore();
      return found;
    } catch (...) {
      snapshot.restore();
      throw;
    }
  };
  const auto with = seen();  // as it stands: what is active goes on, and is not put on anew for this
  run->bring({});
  if (random) random->rewind();
  const auto without = seen();
  return {with.loss, without.loss, tune::gradients_apart(with.gradients, without.gradients)};
}

Plan::Plan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;

at::Tensor Plan::step(const Batch& batch) { return impl_->step(batch); }
at::Tensor Plan::loss(const Batch& batch) { return impl_->run->loss(batch); }
std::shared_ptr<void> Plan::scope() const { return impl_->run->enter(); }
void Plan::update() { impl_->update(); }
std::vector<std::string> Plan::accepted() const {
  const bool active = impl_->watch && !impl_->watch->over();
  return active ? impl_->certificate.accepted() : impl_->run->required;
}
const tune::Certificate& Plan::certificate() const noexcept { return impl_->certificate; }
std::string Plan::report() const { return impl_->certificate.to_text(); }
torch::optim::Optimizer& Plan::optimizer() const noexcept { return impl_->run->optimizer(); }
void Plan::hand_back() { impl_->run->hand_back(); }

Interval Plan::speedup() const {
  const auto& found = impl_->certificate.speedup;
  return found && !accepted().empty() ? *found : Interval{1, 1, 1, 1};
}

void Plan::revert() { impl_->revert(); }

}  // namespace oxytorch
