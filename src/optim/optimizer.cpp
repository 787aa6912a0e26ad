#include "oxytorch/optim/optimizer.h"

#include <torch/optim/adamw.h>
#include <torch/optim/serialize.h>
#include <torch/optim/sgd.h>

#include <utility>

#include "optim/host_scalar.h"
#include "oxytorch/error.h"

namespace oxytorch::optim {

using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Names and order are those of torch/csrc/api/src/optim; an archive of either library loads into the other.
void AdamWOptions::serialize(OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(amsgrad);
}

void AdamWOptions::serialize(InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, amsgrad);
}

void SGDOptions::serialize(OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(dampening);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
}

void SGDOptions::serialize(InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, dampening);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
}

namespace {

// Keeps a field that the user changed from what the constructor gives; else takes the optimizer's default.
template <class Options, class Get, class Set>
void inherit_field(Options& options, const Options& defaults, Get get, Set set) {
  if (get(options) == get(Options())) set(options, get(defaults));
}

}  // namespace

#define OXY_INHERIT(field) \
  inherit_field(           \
      o, d, [](const auto& from) { return from.field(); }, [](auto& to, const auto& value) { to.field(value); })

void AdamW::inherit(torch::optim::OptimizerOptions& options, const torch::optim::OptimizerOptions& defaults) const {
  auto& o = static_cast<AdamWOptions&>(options);
  const auto& d = static_cast<const AdamWOptions&>(defaults);
  OXY_INHERIT(lr);
  OXY_INHERIT(betas);
  OXY_INHERIT(eps);
  OXY_INHERIT(weight_decay);
  OXY_INHERIT(amsgrad);
  OXY_INHERIT(maximize);
}

void SGD::inherit(torch::optim::OptimizerOptions& options, const torch::optim::OptimizerOptions& defaults) const {
  auto& o = static_cast<SGDOptions&>(options);
  const auto& d = static_cast<const SGDOptions&>(defaults);
  OXY_INHERIT(lr);
  OXY_INHERIT(momentum);
  OXY_INHERIT(dampening);
  OXY_INHERIT(weight_decay);
  OXY_INHERIT(nesterov);
  OXY_INHERIT(maximize);
}

#undef OXY_INHERIT

TailOptimizer::TailOptimizer(const std::vector<OptimizerParamGroup>& groups,
                             std::unique_ptr<torch::optim::OptimizerOptions> defaults, Algorithm algorithm,
                             const TailOptions& options)
    : Optimizer(groups, std::move(defaults)), algorithm_(algorithm), options_(options) {}

TailOptimizer::~TailOptimizer() = default;

void TailOptimizer::complete_groups(const std::vector<OptimizerParamGroup>& groups) {
  const std::size_t before = param_groups_.size() - groups.size();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (!groups[i].has_options()) continue;
    OptimizerParamGroup& added = param_groups_[before + i];
    added.set_options(groups[i].options().clone());
    inherit(added.options(), *defaults_);
  }
}

void TailOptimizer::add_param_group(const OptimizerParamGroup& group) {
  Optimizer::add_param_group(group);
  complete_groups({group});
}

// Groups may be added after construction, and group_options() is virtual: so the tail is built at first use.
void TailOptimizer::build() {
  std::unique_ptr<StepTail> built;
  std::size_t known = 0;
  if (tail_ != nullptr && tail_->group_count() == param_groups_.size()) {
    for (const OptimizerParamGroup& group : param_groups_) known += group.params().size();
    if (known == tail_->param_count()) return;
  }
  built = std::make_unique<StepTail>(algorithm_, options_);
  for (const OptimizerParamGroup& group : param_groups_) {
    built->add_group(group.params(), {}, group_options(group.options()));
  }
  if (tail_ != nullptr) {
    for (std::size_t i = 0, j = 0; i < tail_->param_count(); ++i) {
      // Groups are only ever appended to, so what is known comes in the same order.
      while (j < built->param_count() && !built->param(j).is_same(tail_->param(i))) ++j;
      if (j < built->param_count()) built->set_state(j, tail_->state(i));
    }
  }
  tail_ = std::move(built);
}

torch::Tensor TailOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  build();
  sync_lr();
  for (std::size_t i = 0; i < param_groups_.size(); ++i) {
    GroupOptions now = group_options(param_groups_[i].options());
    if (uses_lr_tensors_) now.lr_tensor = lr_tensors_[i];
    tail_->set_group_options(i, now);
  }
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

void TailOptimizer::adopt_dtypes(const std::unordered_map<const c10::TensorImpl*, at::Tensor>& values) {
  const std::unique_ptr<StepTail> old = std::move(tail_);
  build();
  for (std::size_t i = 0; i < tail_->param_count(); ++i) {
    ParamState state = old != nullptr ? old->state(i) : ParamState();
    const auto value = values.find(tail_->param(i).unsafeGetTensorImpl());
    if (value != values.end() && !state.master.defined()) state.master = value->second;
    tail_->set_state(i, std::move(state));
  }
}

const StepTail& TailOptimizer::tail() const {
  const_cast<TailOptimizer*>(this)->build();
  return *tail_;
}

const TailStats& TailOptimizer::tail_stats() const { return tail().stats(); }

std::vector<at::Tensor> TailOptimizer::ema_parameters() const {
  OXY_CHECK(options_.ema_decay != 0, InvalidState, "this optimizer keeps no moving average; set ema_decay.");
  std::vector<at::Tensor> averages;
  for (std::size_t i = 0; i < tail().param_count(); ++i) averages.push_back(tail().state(i).ema);
  return averages;
}

void TailOptimizer::apply_ema() {
  build();
  tail_->apply_ema();
}

void TailOptimizer::restore_parameters() {
  if (tail_ != nullptr) tail_->restore_parameters();
}

void TailOptimizer::publish_state(
    const std::function<std::unique_ptr<torch::optim::OptimizerParamState>(const ParamState&)>& make) {
  build();
  state_.clear();
  for (std::size_t i = 0; i < tail_->param_count(); ++i) {
    if (auto made = make(tail_->state(i))) state_[tail_->param(i).unsafeGetTensorImpl()] = std::move(made);
  }
}

void TailOptimizer::adopt_state(const std::function<ParamState(const torch::optim::OptimizerParamState&)>& make) {
  build();
  for (std::size_t i = 0; i < tail_->param_count(); ++i) {
    const auto found = state_.find(tail_->param(i).unsafeGetTensorImpl());
    if (found == state_.end()) continue;
    ParamState state = make(*found->second);
    state.ema = tail_->state(i).ema;
    tail_->set_state(i, std::move(state));
  }
}

AdamW::AdamW(const std::vector<OptimizerParamGroup>& groups, AdamWOptions defaults)
    : TailOptimizer(groups, std::make_unique<AdamWOptions>(defaults), Algorithm::Adam, defaults.tail()) {
  // Checked here, so that a bad value is reported where it is written; StepTail checks the rest.
  StepTail(Algorithm::Adam, defaults.tail()).add_group({}, {}, AdamW::group_options(defaults));
  complete_groups(groups);
}

AdamW::AdamW(std::vector<torch::Tensor> params, AdamWOptions defaults)
    : AdamW({OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

GroupOptions AdamW::group_options(const torch::optim::OptimizerOptions& options) const {
  const auto& o = static_cast<const AdamWOptions&>(options);
  GroupOptions g;
  g.lr = o.lr();
  std::tie(g.beta1, g.beta2) = o.betas();
  g.eps = o.eps();
  g.weight_decay = o.weight_decay();
  g.decoupled_weight_decay = true;
  g.amsgrad = o.amsgrad();
  g.maximize = o.maximize();
  return g;
}

void AdamW::save(OutputArchive& archive) const {
  const_cast<AdamW*>(this)->publish_state(
      [](const ParamState& s) -> std::unique_ptr<torch::optim::OptimizerParamState> {
        if (!s.moments[0].defined()) return nullptr;
        auto made = std::make_unique<torch::optim::AdamWParamState>();
        made->step(static_cast<std::int64_t>(s.step.item<double>()));
        made->exp_avg(s.moments[0]);
        made->exp_avg_sq(s.moments[1]);
        made->max_exp_avg_sq(s.moments[2]);
        return made;
      });
  torch::optim::serialize<torch::optim::AdamWParamState, AdamWOptions>(archive, *this);
}

void AdamW::load(InputArchive& archive) {
  // torch writes whole options over ours; what its archive does not know stays as it was.
  std::vector<AdamWOptions> kept;
  for (const auto& group : param_groups_) kept.push_back(static_cast<const AdamWOptions&>(group.options()));
  torch::optim::serialize<torch::optim::AdamWParamState, AdamWOptions>(archive, *this);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    auto& loaded = static_cast<AdamWOptions&>(param_groups_[i].options());
    kept[i].lr(loaded.lr()).betas(loaded.betas()).eps(loaded.eps());
    kept[i].weight_decay(loaded.weight_decay()).amsgrad(loaded.amsgrad());
    loaded = kept[i];
  }
  adopt_state([](const torch::optim::OptimizerParamState& saved) {
    const auto& s = static_cast<const torch::optim::AdamWParamState&>(saved);
    ParamState state;
    state.step = torch::full({}, static_cast<double>(s.step()), at::kFloat);
    state.moments = {s.exp_avg(), s.exp_avg_sq(), s.max_exp_avg_sq()};
    return state;
  });
}

SGD::SGD(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults)
    : TailOptimizer(groups, std::make_unique<SGDOptions>(defaults), Algorithm::SGD, defaults.tail()) {
  OXY_CHECK(!defaults.nesterov() || (defaults.momentum() > 0 && defaults.dampening() == 0), InvalidArgument,
            "nesterov needs a momentum above 0 and no dampening; momentum is ", defaults.momentum(), " and dampening ",
            defaults.dampening(), ".");
  StepTail(Algorithm::SGD, defaults.tail()).add_group({}, {}, SGD::group_options(defaults));
  complete_groups(groups);
}

SGD::SGD(std::vector<torch::Tensor> params, SGDOptions defaults)
    : SGD({OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

GroupOptions SGD::group_options(const torch::optim::OptimizerOptions& options) const {
  const auto& o = static_cast<const SGDOptions&>(options);
  GroupOptions g;
  g.lr = o.lr();
  g.momentum = o.momentum();
  g.dampening = o.dampening();
  g.weight_decay = o.weight_decay();
  g.nesterov = o.nesterov();
  g.maximize = o.maximize();
  return g;
}

void SGD::save(OutputArchive& archive) const {
  const_cast<SGD*>(this)->publish_state([](const ParamState& s) -> std::unique_ptr<torch::optim::OptimizerParamState> {
    if (!s.moments[0].defined()) return nullptr;
    auto made = std::make_unique<torch::optim::SGDParamState>();
    made->momentum_buffer(s.moments[0]);
    return made;
  });
  torch::optim::serialize<torch::optim::SGDParamState, SGDOptions>(archive, *this);
}

void SGD::load(InputArchive& archive) {
  std::vector<SGDOptions> kept;
  for (const auto& group : param_groups_) kept.push_back(static_cast<const SGDOptions&>(group.options()));
  torch::optim::serialize<torch::optim::SGDParamState, SGDOptions>(archive, *this);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    auto& loaded = static_cast<SGDOptions&>(param_groups_[i].options());
    kept[i].lr(loaded.lr()).momentum(loaded.momentum()).dampening(loaded.dampening());
    kept[i].weight_decay(loaded.weight_decay()).nesterov(loaded.nesterov());
    loaded = kept[i];
  }
  adopt_state([](const torch::optim::OptimizerParamState& saved) {
    ParamState state;
    state.moments[0] = static_cast<const torch::optim::SGDParamState&>(saved).momentum_buffer();
    return state;
  });
}

}  // namespace oxytorch::optim
