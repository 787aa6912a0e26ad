#include "oxytorch/tune/training_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>

#include "optim/backward_hooks.h"
#include "optim/torch_versions.h"
#include "oxytorch/clock.h"
#include "oxytorch/error.h"
#include "oxytorch/tune/deferred_logits.h"
#include "oxytorch/tune/host.h"
#include "oxytorch/tune/window.h"
#include "tune/optimizer_state.h"

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

void check_each_once(const char* what, const std::vector<const void*>& all) {
  OXY_CHECK(!all.empty(), InvalidArgument, "there is no ", what, ". Give at least one.");
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto same = static_cast<std::size_t>(std::find(all.begin(), all.end(), all[i]) - all.begin());
    OXY_CHECK(same == i, InvalidArgument, what, '[', i, "] is the same object as ", what, '[', same,
              "]. Give each once.");
  }
}

std::string numbered(const std::string& what, std::size_t i, std::size_t count) {
  return count == 1 ? "the " + what : what + '[' + std::to_string(i) + ']';
}

/// A module that holds the models, which stay their owners'.
std::shared_ptr<torch::nn::Module> one_of(const Models& models) {
  std::vector<const void*> all;
  for (torch::nn::Module& model : models) all.push_back(&model);
  check_each_once("model", all);
  auto holder = std::make_shared<torch::nn::Module>("models");
  for (std::size_t i = 0; i < models.size(); ++i) {
    holder->register_module(numbered("model", i, models.size()),
                            std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &models[i].get()));
  }
  return holder;
}

std::vector<OptimizerSlot> slots_of_each(const Optimizers& optimizers) {
  std::vector<const void*> all;
  for (torch::optim::Optimizer& optimizer : optimizers) all.push_back(&optimizer);
  check_each_once("optimizer", all);
  std::vector<OptimizerSlot> slots;
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    slots.emplace_back(optimizers[i], numbered("optimizer", i, optimizers.size()));
  }
  return slots;
}

template <class Value>
void set_entry(std::vector<std::pair<std::string, Value>>& table, const std::string& name, Value value) {
  std::erase_if(table, [&](const auto& entry) { return entry.first == name; });
  if (value) table.emplace_back(name, std::move(value));
}

}  // namespace

// -- the optimizers ---------------------------------------------------------------------------------------------------

OptimizerSlot::OptimizerSlot(torch::optim::Optimizer& original, std::string name)
    : original_(original),
      name_(std::move(name)),
      parameters_(parameters_of(original)),
      tail_(dynamic_cast<optim::TailOptimizer*>(&original)) {
  OXY_CHECK(!parameters_.empty(), InvalidArgument, name_, " has no parameters. Pass model->parameters().");
}

torch::optim::Optimizer& OptimizerSlot::optimizer() const noexcept {
  return replacement_.optimizer ? *replacement_.optimizer : original_;
}

void OptimizerSlot::use(Replacement replacement) {
  replacement_ = std::move(replacement);
  tail_ = dynamic_cast<optim::TailOptimizer*>(&optimizer());
}

void OptimizerSlot::hand_back() {
  if (replacement_.optimizer) replacement_.hand_back();
}

/// Schedules and programs set learning rates on the user's optimizer.
void OptimizerSlot::carry_rates() {
  if (!replacement_.optimizer) return;
  auto& groups = replacement_.optimizer->param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    groups[g].options().set_lr(original_.param_groups()[g].options().get_lr());
  }
}

void OptimizerSlot::step_one(const at::Tensor& parameter) {
  if (replacement_.optimizer && tail_ != nullptr) {
    tail_->gradient_arrived(parameter);
    return;
  }
  const NarrowedOptimizer narrowed(original_, {parameter});
  optimizer().step();
}

// -- what it is of ----------------------------------------------------------------------------------------------------

TrainingStep::TrainingStep(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                           double clip_norm)
    : TrainingStep({model}, {optimizer}, loss ? std::vector{std::move(loss)} : std::vector<LossFunction>(), clip_norm) {
}

TrainingStep::TrainingStep(const Models& models, const Optimizers& optimizers, std::vector<LossFunction> losses,
                           double clip_norm)
    : holder_(models.size() == 1 ? nullptr : one_of(models)),
      model_(holder_ ? holder_.get() : &models.front().get()),
      models_(models),
      slots_(slots_of_each(optimizers)),
      losses_(std::move(losses)),
      device_(slots_.front().parameters().front().device()),
      clip_norm_(clip_norm) {
  resolve_vector_math();  // steps are compared to the bit, the first one too
  OXY_CHECK(clip_norm >= 0, InvalidArgument, "clip_norm is ", clip_norm, ", expected 0 (no clipping) or more.");
  OXY_CHECK(losses_.size() <= 1 || losses_.size() == slots_.size(), InvalidArgument, "there are ", losses_.size(),
            " losses and ", slots_.size(),
            " optimizers. Give one loss for each, in the order in which they step, or one that all of them step by.");
  for (std::size_t i = 0; i < losses_.size(); ++i) {
    OXY_CHECK(losses_[i], InvalidArgument, numbered("loss", i, losses_.size()), " is empty. Give a function.");
  }
  for (const auto& slot : slots_) {
    parameters_.insert(parameters_.end(), slot.parameters().begin(), slot.parameters().end());
  }
}

TrainingStep::~TrainingStep() = default;

std::pair<std::size_t, std::size_t> TrainingStep::slots_of(std::size_t part) const noexcept {
  return parts() == 1 ? std::pair(std::size_t{0}, slots_.size()) : std::pair(part, part + 1);
}

std::vector<at::Tensor> TrainingStep::parameters(std::size_t part) const {
  return parts() == 1 ? parameters_ : slots_[part].parameters();
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

at::Tensor TrainingStep::loss(const Batch& batch, std::size_t part) const {
  OXY_CHECK(!losses_.empty(), InvalidState, "there is no loss function. Pass one, or step with a closure.");
  OXY_CHECK(part < parts(), InvalidArgument, "there is no loss[", part, "]: there are ", parts(), '.');
  if (inputs_.empty()) return under_scopes([&] { return losses_[part](batch); });
  Batch given = batch;
  for (const auto& [name, change] : inputs_) given = change(given);
  return under_scopes([&] { return losses_[part](given); });
}

at::Tensor TrainingStep::losses(const Batch& batch) const {
  auto sum = loss(batch);
  for (std::size_t part = 1; part < parts(); ++part) sum = sum + loss(batch, part);
  return sum;
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
    std::vector<std::unique_ptr<optim::AccumulateGuard>> more_to_come;
    const bool more = !last || (windowed && micro_ + 1 < accumulation);
    for (const auto& slot : slots_) {
      if (more && slot.tail()) more_to_come.push_back(std::make_unique<optim::AccumulateGuard>(*slot.tail()));
    }
    struct Completing {
      bool& is_on;
      ~Completing() { is_on = false; }
    } completing{completes_gradients_};
    completes_gradients_ = !more;
    if (updates_in_backward_ && !more) DeferredLogits::before_weights_change();
    scaled.backward();
  }
  seconds_[0] += forward;
  seconds_[1] += seconds_since(start) - forward;
  return value.detach();
}

/// Of a whole batch, which is a `share` of those that are averaged, and the `last` of them or not.
at::Tensor TrainingStep::differentiate_batch(const Batch& batch, bool windowed, std::size_t part, double share,
                                             bool last) {
  if (micro_batches_ == 1) return differentiate([&] { return loss(batch, part); }, share, windowed, last);
  const auto pieces = split(batch, micro_batches_);
  at::Tensor total;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const double of_batch = static_cast<double>(rows(pieces[i])) / static_cast<double>(rows(batch));
    const auto value = differentiate([&] { return loss(pieces[i], part); }, share * of_batch, windowed,
                                     last && i + 1 == pieces.size());
    total = total.defined() ? total + value : value;
  }
  return total;
}

void TrainingStep::zero_grad(std::size_t part) {
  const auto [begin, end] = slots_of(part);
  for (auto i = begin; i < end; ++i) slots_[i].optimizer().zero_grad();
}

at::Tensor TrainingStep::backward(const Batch& batch, const std::function<void(std::size_t part)>& then) {
  at::Tensor total;
  for (std::size_t part = 0; part < parts(); ++part) {
    zero_grad(part);
    const auto value = differentiate_batch(batch, /*windowed=*/false, part);
    total = total.defined() ? total + value : value;
    if (then) then(part);
  }
  return total;
}

at::Tensor TrainingStep::step_of_window(const Batch& batch, const std::function<void(std::size_t part)>& then) {
  const auto batches = batches_of_trial(accumulation);
  if (batches == 1 || parts() > 1) return backward(batch, then);
  zero_grad(0);
  at::Tensor total;
  for (auto left = batches; left > 0; --left) {
    const auto value = differentiate_batch(batch, /*windowed=*/false, 0, 1 / static_cast<double>(batches), left == 1);
    total = total.defined() ? total + value : value;
  }
  then(0);
  return total;
}

// -- the window -------------------------------------------------------------------------------------------------------

/// Times what takes a batch, and drops the window where that throws.
template <class Function>
at::Tensor TrainingStep::timed(const Function& take) {
  const auto start = Clock::now();
  seconds_ = {};
  at::Tensor value;
  try {
    value = take();
  } catch (...) {
    abandon();
    throw;
  }
  seconds_[2] = seconds_since(start) - seconds_[0] - seconds_[1];
  return value;
}

template <class Function>
at::Tensor TrainingStep::take_one(const Function& gradients) {
  return timed([&] {
    if (micro_ == 0 && keeps_gradients) zero_grad(0);
    update_begun_ = false;
    auto value = gradients();
    if (++micro_ >= accumulation) apply();
    return value;
  });
}

at::Tensor TrainingStep::take(const Batch& batch) {
  if (parts() == 1) return take_one([&] { return differentiate_batch(batch, /*windowed=*/true, 0); });
  return timed([&] {
    update_begun_ = true;  // by the first part, before the second one's forward
    auto value = step(batch);
    ++taken_;
    return value;
  });
}

at::Tensor TrainingStep::take(const Closure& closure) {
  OXY_CHECK(parts() == 1, InvalidArgument, "a closure returns one loss, and there are ", parts(),
            ". Step with a batch.");
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

void TrainingStep::drop_gradients() {
  for (auto& parameter : parameters_) parameter.mutable_grad().reset();
}

void TrainingStep::abandon() {
  drop_gradients();
  micro_ = 0;
  if (scaler) scaler->abandon();
}

void TrainingStep::apply() {
  const at::NoGradGuard no_grad;
  update_begun_ = true;
  // Under a scale, what is not finite is skipped by the scaler's own rule.
  const bool looks = !scaler && guard.policy() != optim::NonFinite::Propagate;
  if (!looks || guard.admits(gradients_of(parameters_))) {
    step_optimizer();
    if (!average.empty()) at::_foreach_lerp_(average, parameters_, 1 - ema_decay_);
  }
  if (!keeps_gradients) drop_gradients();
  micro_ = 0;
  ++taken_;
  if (schedule) schedule->step();
}

void TrainingStep::step_optimizer() {
  // The losses were divided by the whole window; an unfinished one has had a share of it.
  const double share = static_cast<double>(micro_) / static_cast<double>(accumulation);
  struct Divisors {
    std::vector<optim::TailOptimizer*> tails;
    ~Divisors() {
      for (auto* tail : tails) tail->set_grad_divisor(1);
    }
  } divisors;
  for (const auto& slot : slots_) {
    if (share == 1) break;
    if (slot.tail() && !clips(slot)) {
      divisors.tails.push_back(slot.tail());
      slot.tail()->set_grad_divisor(share);
    } else if (const auto found = gradients_of(slot.parameters()); !found.empty()) {
      at::_foreach_mul_(found, 1 / share);
    }
  }
  if (!scaler) {
    update();
    return;
  }
  DeferredLogits::before_weights_change();
  for (auto& slot : slots_) {
    if (clips(slot)) {
      const auto found = values_of_gradients(slot.parameters());
      scaler->unscale_(slot.optimizer());
      clip(slot, found);
    }
    slot.carry_rates();
    scaler->step(slot.optimizer());
  }
  scaler->update();
}

void TrainingStep::keep_average(double decay) {
  const at::NoGradGuard no_grad;
  ema_decay_ = decay;
  average = foreach_clone(parameters_);
}

// -- the update -------------------------------------------------------------------------------------------------------

bool TrainingStep::clips(const OptimizerSlot& slot) const noexcept {
  return clip_value > 0 || (clip_norm_ > 0 && !slot.replacement_.clips);
}

void TrainingStep::clip(const OptimizerSlot& slot, const std::vector<at::Tensor>& gradients) const {
  if (gradients.empty()) return;
  const at::NoGradGuard no_grad;
  if (clip_value > 0) {
    at::_foreach_clamp_min_(gradients, -clip_value);
    at::_foreach_clamp_max_(gradients, clip_value);
  }
  // torch's clip_grad_norm_ reads the norm on the host, and leaves sparse gradients as they are.
  if (clip_norm_ > 0 && !slot.replacement_.clips) {
    const auto norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients)));
    at::_foreach_mul_(gradients, (clip_norm_ / (norm + 1e-6)).clamp_max(1.0));
  }
}

void TrainingStep::update(std::size_t part) {
  DeferredLogits::before_weights_change();  // what the program still holds of them
  const auto [begin, end] = slots_of(part);
  for (auto i = begin; i < end; ++i) {
    auto& slot = slots_[i];
    if (clips(slot)) clip(slot, values_of_gradients(slot.parameters()));
    slot.carry_rates();
    slot.optimizer().step();
  }
}

void TrainingStep::update() {
  for (std::size_t part = 0; part < parts(); ++part) update(part);
}

at::Tensor TrainingStep::step(const Batch& batch) {
  return backward(batch, [this](std::size_t part) { update(part); });
}

// -- where it may be changed ------------------------------------------------------------------------------------------

void TrainingStep::scope(const std::string& name, Scope enter) { set_entry(scopes_, name, std::move(enter)); }
void TrainingStep::inputs(const std::string& name, Transform change) { set_entry(inputs_, name, std::move(change)); }

void TrainingStep::set_micro_batches(int pieces) {
  OXY_CHECK(pieces >= 1, InvalidArgument, "micro_batches is ", pieces, ", expected at least 1.");
  micro_batches_ = pieces;
}

void TrainingStep::replace_optimizer(MakeReplacement make) {
  hand_back();
  replace(make);
  make_ = std::move(make);
}

void TrainingStep::replace(const MakeReplacement& make) {
  std::vector<Replacement> made(slots_.size());
  for (std::size_t i = 0; make && i < slots_.size(); ++i) made[i] = make(slots_[i].original());
  for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].use(std::move(made[i]));
}

void TrainingStep::hand_back() {
  for (auto& slot : slots_) slot.hand_back();
}

void TrainingStep::renew_replacement() { replace(make_); }

void TrainingStep::set_updates_in_backward(bool value) {
  updates_in_backward_ = value;
  if (make_) {  // a tail is made for the one or the other
    hand_back();
    renew_replacement();
  }
  hooks_.reset();
  if (!value) return;
  hooks_ = std::make_unique<optim::BackwardHooks>([this](const at::Tensor& parameter) { update_arrived(parameter); });
  for (const auto& parameter : parameters_) {
    if (parameter.requires_grad()) hooks_->watch(parameter);
  }
}

void TrainingStep::update_arrived(const at::Tensor& parameter) {
  if (!completes_gradients_) return;
  const std::scoped_lock lock(arrival_);
  const at::NoGradGuard no_grad;
  update_begun_ = true;
  for (auto& slot : slots_) {
    const auto& own = slot.parameters();
    if (std::none_of(own.begin(), own.end(), [&](const auto& p) { return p.is_same(parameter); })) continue;
    slot.carry_rates();
    slot.step_one(parameter);
  }
  parameter.mutable_grad().reset();
}

}  // namespace oxytorch::tune
