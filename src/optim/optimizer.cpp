#include "oxytorch/optim/optimizer.h"

#include <c10/util/Type.h>
#include <torch/types.h>

#include <typeinfo>
#include <utility>

#include "optim/archive.h"
#include "optim/backward_hooks.h"
#include "oxytorch/error.h"

namespace oxytorch::optim {

using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

TailOptimizerOptions::~TailOptimizerOptions() = default;

TailOptimizer::TailOptimizer(const std::vector<OptimizerParamGroup>& groups,
                             std::unique_ptr<TailOptimizerOptions> defaults)
    : Optimizer(groups, std::move(defaults)), options_(static_cast<const TailOptimizerOptions&>(*defaults_).tail()) {
  // All is checked here, so that a bad value is reported where it is written.
  const auto& own = static_cast<const TailOptimizerOptions&>(*defaults_);
  own.validate();
  StepTail(own.algorithm(), options_).add_group({}, {}, own.group());
  for (std::size_t i = 0; i < groups.size(); ++i) complete_group(i, groups[i]);
  static_cast<void>(make_tail());
  watch_gradients();
}

TailOptimizer::~TailOptimizer() = default;

const TailOptimizerOptions& TailOptimizer::options_of(const OptimizerParamGroup& group) const {
  const torch::optim::OptimizerOptions &given = group.options(), &own = *defaults_;
  OXY_CHECK(typeid(given) == typeid(own), InvalidType, "a parameter group has options of class ",
            c10::demangle(typeid(given).name()), "; this optimizer takes ", c10::demangle(typeid(own).name()), ".");
  return static_cast<const TailOptimizerOptions&>(given);
}

// torch gave the group the optimizer's options, not knowing those it came with.
void TailOptimizer::complete_group(std::size_t index, const OptimizerParamGroup& given) {
  if (!given.has_options()) return;
  static_cast<void>(options_of(given));
  OptimizerParamGroup& added = param_groups_[index];
  added.set_options(given.options().clone());
  auto& options = static_cast<TailOptimizerOptions&>(added.options());
  options.inherit(static_cast<const TailOptimizerOptions&>(*defaults_));
  options.validate();
}

void TailOptimizer::add_param_group(const OptimizerParamGroup& group) {
  Optimizer::add_param_group(group);
  try {
    complete_group(param_groups_.size() - 1, group);
    static_cast<void>(make_tail());
  } catch (...) {
    param_groups_.pop_back();
    throw;
  }
  watch_gradients();
}

std::unique_ptr<StepTail> TailOptimizer::make_tail() const {
  auto made = std::make_unique<StepTail>(static_cast<const TailOptimizerOptions&>(*defaults_).algorithm(), options_);
  for (const OptimizerParamGroup& group : param_groups_) made->add_group(group.params(), {}, options_of(group).group());
  return made;
}

bool TailOptimizer::matches() const {
  if (tail_ == nullptr || tail_->group_count() != param_groups_.size()) return false;
  std::size_t index = 0;
  for (const OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      if (index == order_.size() || order_[index++] != param.unsafeGetTensorImpl()) return false;
    }
  }
  return index == order_.size();
}

void TailOptimizer::build() {
  if (!matches()) rebuild({});
}

void TailOptimizer::rebuild(const std::unordered_map<const c10::TensorImpl*, at::Tensor>& masters) {
  OXY_CHECK(!averages_shown_, InvalidState,
            "parameters were added, removed or converted while the moving averages stand in for them; call "
            "restore_parameters() first.");
  std::unique_ptr<StepTail> built = make_tail();
  for (std::size_t i = 0; i < built->param_count(); ++i) {
    const c10::TensorImpl* const param = built->param(i).unsafeGetTensorImpl();
    const auto known = places_.find(param);
    const auto master = masters.find(param);
    ParamState state;
    if (known != places_.end()) {
      state = tail_->state(known->second.index);
      // That its gradients are sparse is to be known of it further on.
      const at::Tensor momentum = tail_->decoded_state(known->second.index).moments[0];
      if (momentum.defined() && momentum.is_sparse()) {
        state.moments[0] = momentum;
        state.scales[0] = at::Tensor();
      }
    }
    if (master != masters.end() && !state.master.defined()) state.master = master->second;
    built->set_state(i, std::move(state));
  }
  adopt_tail(std::move(built));
}

void TailOptimizer::adopt_tail(std::unique_ptr<StepTail> tail) {
  tail_ = std::move(tail);
  places_.clear();
  order_.clear();
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    for (const at::Tensor& param : param_groups_[g].params()) {
      places_[param.unsafeGetTensorImpl()] = {order_.size(), g};
      order_.push_back(param.unsafeGetTensorImpl());
    }
  }
  watch_gradients();
}

void TailOptimizer::watch_gradients() {
  if (!options_.norm_in_backward && !options_.step_in_backward) return;
  if (hooks_ == nullptr) {
    hooks_ = std::make_unique<BackwardHooks>([this](const at::Tensor& param) {
      if (!accumulating_) gradient_arrived(param);
    });
  }
  for (const OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& param : group.params()) hooks_->watch(param);
  }
}

void TailOptimizer::gradient_arrived(const at::Tensor& param) {
  const std::scoped_lock lock(arrival_);
  build();
  const auto found = places_.find(param.unsafeGetTensorImpl());
  if (found == places_.end()) return;
  const Place place = found->second;
  if (options_.step_in_backward) {
    sync_lr();
    tail_->set_group_options(place.group, group_now(place.group));
  }
  tail_->grad_ready(place.index, inputs_.grad_divisor);
}

GroupOptions TailOptimizer::group_now(std::size_t index) const {
  GroupOptions now = options_of(param_groups_[index]).group();
  if (uses_lr_tensors_) now.lr_tensor = lr_tensors_[index];
  return now;
}

torch::Tensor TailOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  build();
  sync_lr();
  for (std::size_t i = 0; i < param_groups_.size(); ++i) tail_->set_group_options(i, group_now(i));
  // Taken first, so that a step that throws leaves nothing of it behind.
  StepInputs next;
  next.grad_divisor = inputs_.grad_divisor;
  tail_->step(std::exchange(inputs_, next));
  return loss;
}

void TailOptimizer::set_grad_scale(at::Tensor scale, at::Tensor found_inf) {
  inputs_.grad_scale = std::move(scale);
  inputs_.found_inf = std::move(found_inf);
}

void TailOptimizer::set_skip(at::Tensor skip) { inputs_.skip = std::move(skip); }
void TailOptimizer::set_norm_limit(at::Tensor norm_limit) { inputs_.norm_limit = std::move(norm_limit); }
void TailOptimizer::set_grad_divisor(double divisor) { inputs_.grad_divisor = divisor; }

void TailOptimizer::use_lr_tensors() {
  uses_lr_tensors_ = true;
  sync_lr();
}

void TailOptimizer::sync_lr() {
  if (!uses_lr_tensors_) return;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < param_groups_.size(); ++i) {
    const double rate = param_groups_[i].options().get_lr();
    if (i == lr_tensors_.size()) {
      const auto& params = param_groups_[i].params();
      const at::Device device = params.empty() ? at::Device(at::kCPU) : params.front().device();
      lr_tensors_.push_back(torch::full({}, rate, at::TensorOptions(at::kFloat).device(device)));
      written_lr_.push_back(rate);
    } else if (written_lr_[i] != rate) {
      lr_tensors_[i].fill_(rate);
      written_lr_[i] = rate;
    }
  }
}

const StepTail& TailOptimizer::tail() const {
  const_cast<TailOptimizer*>(this)->build();
  return *tail_;
}

const TailStats& TailOptimizer::tail_stats() const {
  static const TailStats kNone;
  return tail_ == nullptr ? kNone : tail_->stats();
}

namespace {

std::vector<at::Tensor> kept(const StepTail& tail, at::Tensor ParamState::*entry) {
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < tail.param_count(); ++i) result.push_back(tail.state(i).*entry);
  return result;
}

}  // namespace

std::vector<at::Tensor> TailOptimizer::ema_parameters() const { return kept(tail(), &ParamState::ema); }
std::vector<at::Tensor> TailOptimizer::copies() const { return kept(tail(), &ParamState::copy); }

void TailOptimizer::apply_ema() {
  build();
  tail_->apply_ema();
  averages_shown_ = true;
}

void TailOptimizer::restore_parameters() {
  if (tail_ != nullptr) tail_->restore_parameters();
  averages_shown_ = false;
}

void TailOptimizer::set_state(std::size_t index, ParamState state) {
  build();
  tail_->set_state(index, std::move(state));
}

void TailOptimizer::save(OutputArchive& archive) const {
  for (const OptimizerParamGroup& group : param_groups_) static_cast<void>(options_of(group));
  write_archive(archive, param_groups_, tail());
}

void TailOptimizer::load(InputArchive& archive) {
  build();
  OXY_CHECK(
      !averages_shown_, InvalidState,
      "load() was called while the moving averages stand in for the parameters; call restore_parameters() first.");
  ArchivedOptimizer read = read_archive(archive, param_groups_);
  auto loaded = std::make_unique<StepTail>(static_cast<const TailOptimizerOptions&>(*defaults_).algorithm(), options_);
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    loaded->add_group(param_groups_[g].params(), {}, read.options[g]->group());
  }
  for (std::size_t i = 0; i < read.states.size(); ++i) {
    ParamState& state = read.states[i];
    const bool had_master = state.master.defined(), had_low_bits = state.low_bits.defined();
    OXY_CHECK(!state.ema.defined() || options_.ema_decay != 0, InvalidArgument,
              "the archive has a moving average of parameter ", i,
              ", and this optimizer keeps none; give it an ema_decay.");
    if (!state.ema.defined()) state.ema = tail_->state(i).ema;
    // A copy is the weights' and written anew by each step.
    if (state.copy.defined() && state.copy.scalar_type() != options_.copy_dtype) state.copy = at::Tensor();
    loaded->set_state(i, std::move(state));
    OXY_CHECK(
        (!had_master || loaded->state(i).master.defined()) && (!had_low_bits || loaded->state(i).low_bits.defined()),
        InvalidArgument, "the archive has ", had_master ? "fp32" : "int8", " master weights of parameter ", i,
        ", and this optimizer keeps ", name(options_.master_weights), "; give it the same master_weights.");
  }
  for (std::size_t g = 0; g < param_groups_.size(); ++g) param_groups_[g].set_options(std::move(read.options[g]));
  adopt_tail(std::move(loaded));
}

}  // namespace oxytorch::optim
