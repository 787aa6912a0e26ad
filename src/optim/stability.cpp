#include "oxytorch/optim/stability.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "generators/generators.h"
#include "optim/param_state.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"

namespace oxytorch::optim {
namespace {

constexpr std::array<const char*, 4> kPolicies = {"skip", "backoff", "rollback", "warn"};

void check(const StabilityOptions& o) {
  OXY_CHECK(o.backoff_factor > 0 && o.backoff_factor < 1, InvalidArgument, "backoff_factor is ", o.backoff_factor,
            "; give a number between 0 and 1.");
  for (const auto& [name, value] : {std::pair{"backoff_steps", o.backoff_steps}, std::pair{"every", o.every},
                                    std::pair{"keep", o.keep}, std::pair{"max_rollbacks", o.max_rollbacks}}) {
    OXY_CHECK(value >= 1, InvalidArgument, name, " is ", value, "; give at least 1.");
  }
}

// Into the memory that `kept` has, where it fits.
void keep(at::Tensor& kept, const at::Tensor& live) {
  if (!live.defined()) {
    kept = at::Tensor();
    return;
  }
  if (!kept.defined() || kept.sizes() != live.sizes() || kept.scalar_type() != live.scalar_type()) {
    kept = at::empty_like(live.detach());
  }
  kept.copy_(live);
}

struct Snapshot {
  std::int64_t step = 0;
  std::vector<at::Tensor> params;
  std::vector<ParamState> states;
  std::vector<at::Tensor> tensors;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  std::vector<at::Tensor> generator_states;
  std::vector<std::function<void()>> others;
};

std::string describe(const Spike& spike) {
  std::ostringstream text;
  text << "step " << spike.step;
  if (spike.loss) text << ": loss " << spike.loss_value << " (limit " << spike.loss_limit << ")";
  if (spike.grad_norm)
    text << ": gradient norm " << spike.grad_norm_value << " (limit " << spike.grad_norm_limit << ")";
  return text.str();
}

}  // namespace

StabilityPolicy parse_stability_policy(const std::string& text) {
  const auto* found = std::find(kPolicies.begin(), kPolicies.end(), text);
  OXY_CHECK(found != kPolicies.end(), InvalidArgument, "the policy is '", text,
            "'; use 'skip', 'backoff', 'rollback' or 'warn'.");
  return static_cast<StabilityPolicy>(found - kPolicies.begin());
}

const char* name(StabilityPolicy policy) noexcept { return kPolicies[static_cast<std::size_t>(policy)]; }

struct NumericalStabilityManager::Impl {
  TailOptimizer& optimizer;
  StabilityOptions options;
  at::Device device;
  SpikeDetector detector;
  std::vector<at::Tensor> tensors;
  std::vector<std::function<std::function<void()>()>> captures;
  std::vector<Snapshot> free, taken;  // taken: oldest first
  std::vector<StabilityEvent> events;
  std::set<std::int64_t> bad_steps;
  std::int64_t step = 0, attempts = 0, rollbacks = 0, furthest = 0;
  double rate = 1;
  bool rolled_back = false;

  Impl(TailOptimizer& given, const StabilityOptions& o)
      : optimizer(given), options(o), device(device_of(given)), detector(o.spikes, device), tensors(detector.state()) {
    check(o);
    const TailOptions& tail = given.tail().options();
    OXY_CHECK(o.policy == StabilityPolicy::Warn || !tail.step_in_backward, InvalidArgument,
              "the optimizer steps in backward, before loss and gradient norm are judged; use it without "
              "step_in_backward, or the policy 'warn'.");
    OXY_CHECK(o.policy == StabilityPolicy::Warn || tail.nonfinite != NonFinite::Propagate, InvalidArgument,
              "the optimizer takes steps with inf and NaN; give it nonfinite 'skip', or use the policy 'warn'.");
    if (o.policy == StabilityPolicy::Rollback) free.resize(static_cast<std::size_t>(o.keep));
  }

  static at::Device device_of(TailOptimizer& optimizer) {
    OXY_CHECK(optimizer.tail().param_count() > 0, InvalidArgument, "the optimizer has no parameters.");
    return optimizer.tail().param(0).device();
  }

  StepTail& tail() {
    optimizer.build();
    return *optimizer.tail_;
  }

  void take_step(const std::function<void()>& take) {
    if (options.policy != StabilityPolicy::Warn) {
      optimizer.set_skip(detector.loss_flag());
      optimizer.set_norm_limit(detector.norm_limit());
    }
    std::vector<double> rates;
    if (rate != 1) {
      for (auto& group : optimizer.param_groups()) {
        rates.push_back(group.options().get_lr());
        group.options().set_lr(rates.back() * rate);
      }
    }
    const auto restore = [&] {
      for (std::size_t i = 0; i < rates.size(); ++i) optimizer.param_groups()[i].options().set_lr(rates[i]);
    };
    try {
      take ? take() : void(optimizer.step());
    } catch (...) {
      restore();
      throw;
    }
    restore();
  }

  // What the host knows of spikes by now; off the CPU up to the step before, on every process the same.
  std::vector<Spike> record(bool scaled) {
    const at::Tensor& norm = optimizer.tail_stats().grad_norm;
    if (device.is_cpu()) {
      detector.record(step, norm, scaled);
      return detector.arrived(false);
    }
    const bool reacts = options.policy == StabilityPolicy::Backoff || options.policy == StabilityPolicy::Rollback;
    std::vector<Spike> spikes = detector.arrived(reacts);
    detector.record(step, norm, scaled);
    return spikes;
  }

  void note(const std::vector<Spike>& spikes, const std::string& action) {
    for (const Spike& spike : spikes) {
      events.push_back({spike, action});
      log(LogLevel::Warn, "stability: " + describe(spike) + ", " + action, "optim");
    }
  }

  [[nodiscard]] const char* usual_action() const {
    switch (options.policy) {
      case StabilityPolicy::Warn: return "noted";
      case StabilityPolicy::Backoff: return "skipped, learning rate reduced";
      default: return "skipped";
    }
  }

  void react(const std::vector<Spike>& spikes) {
    if (options.policy == StabilityPolicy::Backoff) {
      rate += (1 - options.backoff_factor) / static_cast<double>(options.backoff_steps);
      rate = spikes.empty() ? std::min(1.0, rate) : options.backoff_factor;
    }
    if (options.policy != StabilityPolicy::Rollback) return note(spikes, usual_action());
    if (!spikes.empty()) return roll_back(spikes);
    if (taken.empty() || step % options.every == 0) save();
  }

  void roll_back(const std::vector<Spike>& spikes) {
    for (const Spike& spike : spikes) bad_steps.insert(spike.step);
    const auto before = std::count_if(taken.begin(), taken.end(),
                                      [&](const Snapshot& snapshot) { return snapshot.step < spikes[0].step; });
    if (before == 0) return note(spikes, "skipped, no snapshot before it");
    ++attempts;
    furthest = std::max(furthest, step);
    if (attempts > options.max_rollbacks) {
      note(spikes, "gave up");
      detail::raise(ErrorCode::InvalidState, options.max_rollbacks, " rollbacks did not get training past step ",
                    furthest, ": ", describe(spikes[0]), ". Look at the data around it, or lower the learning rate.");
    }
    const auto target = static_cast<std::size_t>(std::max<std::int64_t>(0, before - attempts));
    while (taken.size() > target + 1) {
      free.push_back(std::move(taken.back()));
      taken.pop_back();
    }
    note(spikes, "rolled back to step " + std::to_string(taken.back().step));
    note(detector.drain(), "undone by the rollback");
    restore(taken.back());
    step = taken.back().step;
    ++rollbacks;
    rolled_back = true;
  }

  void save() {
    const at::NoGradGuard no_grad;
    std::vector<Snapshot>& place = free.empty() ? taken : free;
    Snapshot snapshot = std::move(place.front());
    place.erase(place.begin());
    const StepTail& from = tail();
    snapshot.params.resize(from.param_count());
    snapshot.states.resize(from.param_count());
    for (std::size_t i = 0; i < from.param_count(); ++i) {
      keep(snapshot.params[i], from.param(i));
      const auto live = fields(from.state(i));
      const auto kept = fields(snapshot.states[i]);
      for (std::size_t k = 0; k < live.size(); ++k) keep(*kept[k], *live[k]);
    }
    snapshot.tensors.resize(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) keep(snapshot.tensors[i], tensors[i]);
    snapshot.options.clear();
    for (const auto& group : optimizer.param_groups()) snapshot.options.push_back(group.options().clone());
    snapshot.generator_states = generators::states(device);
    snapshot.others.clear();
    for (const auto& capture : captures) snapshot.others.push_back(capture());
    snapshot.step = step;
    taken.push_back(std::move(snapshot));
    if (step > furthest) attempts = 0;
  }

  void restore(const Snapshot& snapshot) {
    const at::NoGradGuard no_grad;
    StepTail& to = tail();
    for (std::size_t i = 0; i < snapshot.params.size(); ++i) {
      at::Tensor(to.param(i)).copy_(snapshot.params[i]);
      ParamState state = to.state(i);
      const auto live = fields(state);
      const auto kept = fields(snapshot.states[i]);
      for (std::size_t k = 0; k < live.size(); ++k) {
        const bool both = live[k]->defined() && kept[k]->defined();
        if (both && live[k]->strides() == kept[k]->strides()) {
          live[k]->copy_(*kept[k]);
        } else if (live[k]->defined() || kept[k]->defined()) {
          // Made since then, or dropped, or laid out anew: scales follow the memory order of their codes.
          *live[k] = kept[k]->defined() ? kept[k]->clone() : at::Tensor();
        }
      }
      // Also where every tensor was written in place: masters and low bits belong to the weights that came back.
      to.set_state(i, std::move(state));
    }
    for (std::size_t i = 0; i < snapshot.tensors.size(); ++i) at::Tensor(tensors[i]).copy_(snapshot.tensors[i]);
    for (std::size_t i = 0; i < snapshot.options.size(); ++i) {
      optimizer.param_groups()[i].set_options(snapshot.options[i]->clone());
    }
    generators::set_states(device, snapshot.generator_states);
    for (const auto& other : snapshot.others) other();
  }
};

NumericalStabilityManager::NumericalStabilityManager(TailOptimizer& optimizer, const StabilityOptions& options)
    : impl_(std::make_unique<Impl>(optimizer, options)) {}
NumericalStabilityManager::~NumericalStabilityManager() = default;

void NumericalStabilityManager::step(const at::Tensor& loss, const std::function<void()>& take, bool scaled) {
  Impl& s = *impl_;
  s.rolled_back = false;
  s.detector.judge(loss);
  ++s.step;
  s.take_step(take);
  s.react(s.record(scaled));
}

void NumericalStabilityManager::restore_also(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) impl_->tensors.push_back(tensor.detach());
}

void NumericalStabilityManager::restore_also(std::function<std::function<void()>()> capture) {
  impl_->captures.push_back(std::move(capture));
}

bool NumericalStabilityManager::rolled_back() const noexcept { return impl_->rolled_back; }
std::int64_t NumericalStabilityManager::rollbacks() const noexcept { return impl_->rollbacks; }

bool NumericalStabilityManager::skip_batch() {
  const bool bad = impl_->bad_steps.contains(impl_->step + 1);
  if (bad) ++impl_->step;
  return bad;
}

const std::vector<StabilityEvent>& NumericalStabilityManager::events() {
  impl_->note(impl_->detector.drain(), impl_->usual_action());
  return impl_->events;
}

}  // namespace oxytorch::optim
