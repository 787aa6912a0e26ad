#include "oxytorch/tune/training_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_clone.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "oxytorch/clock.h"
#include "oxytorch/error.h"

namespace oxytorch::tune {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

/// The gradients that there are.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> found;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) found.push_back(parameter.grad());
  }
  return found;
}

/// Their numbers, to be written to; a row of a sparse one that comes twice is the one that it is.
std::vector<at::Tensor> values_of_gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> found;
  for (at::Tensor parameter : parameters) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) {
      parameter.mutable_grad() = gradient.coalesce();
      found.push_back(parameter.grad()._values().detach());
    } else {
      found.push_back(gradient);
    }
  }
  return found;
}

/// Scopes, left the last first.
struct Entered {
  Entered() = default;
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() {
    while (!scopes.empty()) scopes.pop_back();
  }
  std::vector<std::shared_ptr<void>> scopes;
};

template <class Value>
void set_entry(std::vector<std::pair<std::string, Value>>& table, const std::string& name, Value value) {
  std::erase_if(table, [&](const auto& entry) { return entry.first == name; });
  if (value) table.emplace_back(name, std::move(value));
}

}  // namespace

TrainingStep::TrainingStep(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                           double clip_norm)
    : model_(model),
      original_(optimizer),
      loss_(std::move(loss)),
      parameters_(parameters_of(optimizer)),
      device_(parameters_.empty() ? at::Device(at::kCPU) : parameters_.front().device()),
      clip_norm_(clip_norm),
      tail_(dynamic_cast<optim::TailOptimizer*>(&optimizer)) {
  OXY_CHECK(!parameters_.empty(), InvalidArgument, "the optimizer has no parameters. Pass model->parameters().");
  OXY_CHECK(clip_norm >= 0, InvalidArgument, "clip_norm is ", clip_norm, ", expected 0 (no clipping) or more.");
}

TrainingStep::~TrainingStep() = default;

torch::optim::Optimizer& TrainingStep::optimizer() const noexcept {
  return replacement_.optimizer ? *replacement_.optimizer : original_;
}

// -- forward and backward ---------------------------------------------------------------------------------------------

std::shared_ptr<void> TrainingStep::enter() const {
  auto entered = std::make_shared<Entered>();
  for (const auto& [name, enter] : scopes_) entered->scopes.push_back(enter());
  return entered;
}

template <class Function>
at::Tensor TrainingStep::under_scopes(const Function& compute) const {
  Entered entered;
  for (const auto& [name, enter] : scopes_) entered.scopes.push_back(enter());
  auto value = compute();
  OXY_CHECK(value.defined() && value.numel() == 1, InvalidArgument, "the loss ",
            value.defined() ? "is not a scalar" : "is undefined", ". Return one number, for example a mean.");
  return value;
}

at::Tensor TrainingStep::loss(const Batch& batch) const {
  OXY_CHECK(loss_, InvalidState, "there is no loss function. Pass one, or step with a closure.");
  if (inputs_.empty()) return under_scopes([&] { return loss_(batch); });
  Batch given = batch;
  for (const auto& [name, change] : inputs_) given = change(given);
  return under_scopes([&] { return loss_(given); });
}

/// Forward and backward of what `share` of a batch's rows gives; `last`: of the pieces of a batch.
template <class Function>
at::Tensor TrainingStep::differentiate(const Function& compute, double share, bool windowed, bool last) {
  const auto start = Clock::now();
  auto value = compute();
  const double forward = seconds_since(start);
  if (share != 1) value = value * share;
  auto scaled = windowed && accumulation > 1 ? value / static_cast<double>(accumulation) : value;
  if (windowed && scaler) scaled = scaler->scale(scaled);
  {
    std::optional<optim::AccumulateGuard> more_to_come;
    if (tail_ && (!last || (windowed && micro_ + 1 < accumulation))) more_to_come.emplace(*tail_);
    scaled.backward();
  }
  seconds_[0] += forward;
  seconds_[1] += seconds_since(start) - forward;
  return value.detach();
}

at::Tensor TrainingStep::differentiate_batch(const Batch& batch, bool windowed) {
  if (micro_batches_ == 1) return differentiate([&] { return loss(batch); }, 1, windowed, /*last=*/true);
  const auto pieces = split(batch, micro_batches_);
  at::Tensor total;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const double share = static_cast<double>(rows(pieces[i])) / static_cast<double>(rows(batch));
    const auto value = differentiate([&] { return loss(pieces[i]); }, share, windowed, i + 1 == pieces.size());
    total = total.defined() ? total + value : value;
  }
  return total;
}

at::Tensor TrainingStep::backward(const Batch& batch) {
  optimizer().zero_grad();
  return differentiate_batch(batch, /*windowed=*/false);
}

// -- the window -------------------------------------------------------------------------------------------------------

template <class Function>
at::Tensor TrainingStep::take_one(const Function& gradients) {
  const auto start = Clock::now();
  seconds_ = {};
  at::Tensor value;
  try {
    if (micro_ == 0 && keeps_gradients) optimizer().zero_grad();
    value = gradients();
    if (++micro_ >= accumulation) apply();
  } catch (...) {
    abandon();
    throw;
  }
  seconds_[2] = seconds_since(start) - seconds_[0] - seconds_[1];
  return value;
}

at::Tensor TrainingStep::take(const Batch& batch) {
  return take_one([&] { return differentiate_batch(batch, /*windowed=*/true); });
}

at::Tensor TrainingStep::take(const Closure& closure) {
  return take_one([&] { return differentiate([&] { return under_scopes(closure); }, 1, true, /*last=*/true); });
}

bool TrainingStep::flush() {
  if (micro_ == 0) return false;
  try {
    apply();
  } catch (...) {
    abandon();
    throw;
  }
  return true;
}

void TrainingStep::abandon() {
  for (auto& parameter : parameters_) parameter.mutable_grad().reset();
  micro_ = 0;
  if (scaler) scaler->abandon();
}

void TrainingStep::apply() {
  const at::NoGradGuard no_grad;
  // Under a scale, what is not finite is skipped by the scaler's own rule.
  const bool looks = !scaler && guard.policy() != optim::NonFinite::Propagate;
  if (!looks || guard.admits(gradients_of(parameters_))) {
    step_optimizer();
    if (!average.empty()) at::_foreach_lerp_(average, parameters_, 1 - ema_decay_);
  }
  if (!keeps_gradients) {
    for (auto& parameter : parameters_) parameter.mutable_grad().reset();
  }
  micro_ = 0;
  ++taken_;
  if (schedule) schedule->step();
}

void TrainingStep::step_optimizer() {
  // The losses were divided by the whole window; an unfinished one has had a share of it.
  const double share = static_cast<double>(micro_) / static_cast<double>(accumulation);
  struct Divisor {
    optim::TailOptimizer* tail;
    ~Divisor() {
      if (tail) tail->set_grad_divisor(1);
    }
  } divisor{share != 1 && !clips() ? tail_ : nullptr};
  if (divisor.tail) {
    divisor.tail->set_grad_divisor(share);
  } else if (share != 1) {
    const auto found = gradients_of(parameters_);
    if (!found.empty()) at::_foreach_mul_(found, 1 / share);
  }
  if (!scaler) {
    update();
    return;
  }
  if (clips()) {
    const auto found = values_of_gradients(parameters_);
    scaler->unscale_(optimizer());
    clip(found);
  }
  carry_rates();
  scaler->step(optimizer());
  scaler->update();
}

void TrainingStep::keep_average(double decay) {
  const at::NoGradGuard no_grad;
  ema_decay_ = decay;
  average = at::_foreach_clone(parameters_);
}

// -- the update -------------------------------------------------------------------------------------------------------

bool TrainingStep::clips() const noexcept { return clip_value > 0 || (clip_norm_ > 0 && !replacement_.clips); }

void TrainingStep::clip(const std::vector<at::Tensor>& gradients) const {
  if (gradients.empty()) return;
  const at::NoGradGuard no_grad;
  if (clip_value > 0) {
    at::_foreach_clamp_min_(gradients, -clip_value);
    at::_foreach_clamp_max_(gradients, clip_value);
  }
  // torch's clip_grad_norm_ reads the norm on the host, and leaves sparse gradients as they are.
  if (clip_norm_ > 0 && !replacement_.clips) {
    const auto norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients)));
    at::_foreach_mul_(gradients, (clip_norm_ / (norm + 1e-6)).clamp_max(1.0));
  }
}

/// Schedules and programs set learning rates on the user's optimizer.
void TrainingStep::carry_rates() {
  if (!replacement_.optimizer) return;
  auto& groups = replacement_.optimizer->param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    groups[g].options().set_lr(original_.param_groups()[g].options().get_lr());
  }
}

void TrainingStep::update() {
  if (clips()) clip(values_of_gradients(parameters_));
  carry_rates();
  optimizer().step();
}

at::Tensor TrainingStep::step(const Batch& batch) {
  auto value = backward(batch);
  update();
  return value;
}

// -- where it may be changed ------------------------------------------------------------------------------------------

void TrainingStep::scope(const std::string& name, Scope enter) { set_entry(scopes_, name, std::move(enter)); }
void TrainingStep::inputs(const std::string& name, Transform change) { set_entry(inputs_, name, std::move(change)); }

void TrainingStep::set_micro_batches(int pieces) {
  OXY_CHECK(pieces >= 1, InvalidArgument, "micro_batches is ", pieces, ", expected at least 1.");
  micro_batches_ = pieces;
}

void TrainingStep::use(Replacement replacement) {
  replacement_ = std::move(replacement);
  tail_ = dynamic_cast<optim::TailOptimizer*>(&optimizer());
}

void TrainingStep::replace_optimizer(MakeReplacement make) {
  hand_back();
  Replacement made;
  if (make) made = make(original_);
  make_ = std::move(make);
  use(std::move(made));
}

void TrainingStep::hand_back() {
  if (replacement_.optimizer) replacement_.hand_back();
}

void TrainingStep::renew_replacement() {
  if (make_) use(make_(original_));
}

}  // namespace oxytorch::tune
