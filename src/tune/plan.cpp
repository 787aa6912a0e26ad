#include "tune/plan.h"

#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "oxytorch/logging.h"
#include "oxytorch/tune/apart.h"
#include "oxytorch/tune/escrow.h"
#include "oxytorch/tune/own_random.h"
#include "tune/bench.h"
#include "tune/sources.h"

namespace oxytorch {
namespace {

constexpr int kCheckSteps = 100;  // a check is over by then

/// One batch's loss and gradients, with and without.
struct Seen {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

}  // namespace

Plan::Impl::Impl(std::unique_ptr<tune::Run> r, tune::Certificate c, std::optional<tune::CertificateStore> s,
                 tune::Kind widest, std::uint64_t seed)
    : run(std::move(r)), certificate(std::move(c)), store(std::move(s)), names(run->in_force()) {
  if (names.empty()) return;
  tune::GuardOptions options;
  options.allow(widest);
  // What is in force cannot know which steps are compared.
  options.seed = seed ^ tune::fresh_bits();
  guard.emplace(options);
}

void Plan::Impl::revert() {
  guard.reset();
  names.clear();
  run->bring({});
}

at::Tensor Plan::Impl::step(const Batch& batch) {
  if (!guard) return run->step(batch);
  decide(batch);
  if (!guard) return run->step(batch);
  const bool waited = waits > 0 || run->device().is_cpu();
  if (waited) tune::synchronize(run->device());
  const double began = tune::seconds_now();
  auto loss = run->step(batch);
  if (waited) tune::synchronize(run->device());
  guard->after(std::max(tune::seconds_now() - began, 1e-9));
  if (waited && !std::isfinite(loss.item<double>())) guard->suspicious();
  waits = std::max(0, waits - 1);
  return loss;
}

void Plan::Impl::decide(const Batch& batch) {
  try {
    auto action = guard->before();
    while (action == tune::Action::CompareLosses) {
      waits = kCheckSteps;
      compare(batch);
      action = guard->before();
    }
    if (action == tune::Action::RollBack) return roll_back(guard->reason());
    run->bring(action == tune::Action::RunWithout ? std::vector<std::string>{} : names);
  } catch (const std::exception& error) {
    roll_back(std::string("they could not be switched: ") + error.what());
  }
}

void Plan::Impl::compare(const Batch& batch) {
  // On the CPU other threads may draw from torch's generator meanwhile: the check draws from one of its own.
  const bool on_cpu = run->device().is_cpu();
  const bool pieces = run->micro_batches() > 1;  // which draw masks for other rows
  std::optional<tune::OwnRandom> random;
  if (on_cpu) random.emplace();
  const auto seen = [&] {
    tune::Escrow escrow(*run, /*generators=*/!on_cpu);
    try {
      Seen found;
      if (pieces) {
        const at::NoGradGuard no_grad;
        found.loss = run->loss(batch).item<double>();
      } else {
        found.loss = run->backward(batch).item<double>();
        for (const auto& p : run->parameters()) {
          found.gradients.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
        }
      }
      escrow.restore();
      return found;
    } catch (...) {
      escrow.restore();
      throw;
    }
  };
  const auto with = seen();  // as it stands: what is in force goes on, and is not put on anew for this
  run->bring({});
  if (random) random->rewind();
  const auto without = seen();
  guard->compared(with.loss, without.loss, tune::gradients_apart(with.gradients, without.gradients));
}

void Plan::Impl::roll_back(const std::string& reason) {
  const auto step = guard->step();
  const std::string event = "step " + std::to_string(step) + ": rolled back: " + reason;
  guard.reset();
  for (auto& entry : certificate.entries) {
    if (std::find(names.begin(), names.end(), entry.strategy) == names.end()) continue;
    entry.standing = tune::Standing::RolledBack;
    entry.reason = reason;
  }
  certificate.events.push_back(event);
  names.clear();
  log(LogLevel::Warn, "accelerate: " + event);
  run->bring({});
  // The stored one does not hold any more: the next run is to measure anew.
  if (const auto why = store ? store->try_forget(certificate.key) : ""; !why.empty()) {
    certificate.events.push_back("step " + std::to_string(step) + ": the stored plan could not be deleted: " + why);
    log(LogLevel::Warn, "accelerate: " + certificate.events.back());
  }
}

Plan::Plan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;

at::Tensor Plan::step(const Batch& batch) { return impl_->step(batch); }
std::vector<std::string> Plan::accepted() const { return impl_->names; }
const tune::Certificate& Plan::certificate() const noexcept { return impl_->certificate; }
std::string Plan::report() const { return impl_->certificate.to_text(); }
torch::optim::Optimizer& Plan::optimizer() const noexcept { return impl_->run->optimizer(); }
void Plan::hand_back() { impl_->run->hand_back(); }

Interval Plan::speedup() const {
  const auto& found = impl_->certificate.speedup;
  return found && !impl_->names.empty() ? *found : Interval{1, 1, 1, 1};
}

void Plan::revert() { impl_->revert(); }

}  // namespace oxytorch
