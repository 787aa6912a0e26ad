#include "oxytorch/optim/step_tail.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "optim/composite.h"
#include "optim/host_scalar.h"
#include "oxytorch/error.h"
#include "oxytorch/kernels/step_tail.h"

namespace oxytorch::optim {
namespace {

constexpr double kClipEpsilon = 1e-6;  // torch.nn.utils.clip_grad_norm_

// All tensors of a pass run in one region of torch's own intra-op pool.
kernels::Parallel intra_op_pool() {
  return {at::in_parallel_region() ? 1 : at::get_num_threads(),
          [](void*, int tasks, void (*task)(void*, int), void* context) {
            at::parallel_for(0, tasks, 1, [&](std::int64_t begin, std::int64_t end) {
              for (std::int64_t i = begin; i < end; ++i) task(context, static_cast<int>(i));
            });
          },
          nullptr};
}

std::optional<kernels::ElementType> element_type(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kFloat) return kernels::ElementType::F32;
  if (tensor.scalar_type() == at::kBFloat16) return kernels::ElementType::BF16;
  return std::nullopt;
}

bool same_layout(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.sizes() == like.sizes() &&
         tensor.strides() == like.strides() && !tensor.is_neg() && !tensor.is_conj();
}

// An empty tensor has no address; the kernels take null for "no gradient".
void* address(const at::Tensor& tensor) {
  static float nowhere = 0;
  return tensor.numel() == 0 ? &nowhere : tensor.mutable_data_ptr();
}

void check_number(double value, bool ok, const char* what, std::size_t group, const char* allowed) {
  OXY_CHECK(ok, InvalidArgument, "parameter group ", group, " has ", what, " = ", value, "; it must be ", allowed, ".");
}

void check_group(Algorithm algorithm, const GroupOptions& o, std::size_t group) {
  if (o.lr_tensor.defined()) {
    OXY_CHECK(o.lr_tensor.numel() == 1, InvalidArgument, "parameter group ", group, " has a learning-rate tensor of ",
              o.lr_tensor.numel(), " elements; it must have one.");
  } else {
    check_number(o.lr, o.lr >= 0 && std::isfinite(o.lr), "lr", group, "a finite number of at least 0");
  }
  check_number(o.weight_decay, o.weight_decay >= 0 && std::isfinite(o.weight_decay), "weight_decay", group,
               "a finite number of at least 0");
  if (algorithm == Algorithm::SGD) {
    check_number(o.momentum, o.momentum >= 0 && std::isfinite(o.momentum), "momentum", group,
                 "a finite number of at least 0");
    check_number(o.dampening, std::isfinite(o.dampening), "dampening", group, "finite");
  } else {
    check_number(o.beta1, o.beta1 >= 0 && o.beta1 < 1, "betas[0]", group, "in [0, 1)");
    check_number(o.beta2, o.beta2 >= 0 && o.beta2 < 1, "betas[1]", group, "in [0, 1)");
    check_number(o.eps, o.eps >= 0 && std::isfinite(o.eps), "eps", group, "a finite number of at least 0");
  }
}

struct Slot {
  at::Tensor param;
  std::string name;
  std::size_t group;
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
  ParamState state;
  bool first = true;  // SGD: the momentum buffer holds nothing yet
  bool native = false;
  std::size_t planned = 0;  // index into the plan, if native
  at::Tensor grad_copy;     // a gradient laid out like the parameter, when autograd's is not
};

}  // namespace

NonFinite parse_nonfinite(const std::string& text) {
  for (NonFinite policy : {NonFinite::Skip, NonFinite::Raise, NonFinite::Propagate}) {
    if (text == name(policy)) return policy;
  }
  detail::raise(ErrorCode::InvalidArgument, "unknown non-finite policy '", text,
                "'; use 'skip', 'raise' or 'propagate'.");
}

const char* name(NonFinite policy) noexcept {
  switch (policy) {
    case NonFinite::Skip: return "skip";
    case NonFinite::Raise: return "raise";
    case NonFinite::Propagate: return "propagate";
  }
  return "unknown";
}

struct StepTail::Impl {
  Algorithm algorithm;
  TailOptions options;
  std::vector<GroupOptions> groups;
  std::vector<Slot> slots;
  TailStats stats;
  std::optional<kernels::StepTailPlan> plan;
  std::vector<kernels::TailGroup> native_groups;
  std::vector<CompositeParam> composite;  // those with a gradient in this step
  std::vector<std::size_t> composite_index;
  std::vector<std::size_t> planned_slots;
  std::vector<at::Tensor> displaced;  // the parameters' values while the averages stand in for them
  bool dirty = true;                  // the plan does not match the slots

  [[nodiscard]] const at::Device device() const { return slots.front().param.device(); }

  // ---- state

  [[nodiscard]] bool wants_momentum(const Slot& slot) const {
    return algorithm == Algorithm::SGD && groups[slot.group].momentum != 0;
  }

  [[nodiscard]] bool complete(const Slot& slot) const {
    const ParamState& state = slot.state;
    if (algorithm == Algorithm::SGD) {
      if (wants_momentum(slot) && !state.momentum_buffer.defined()) return false;
    } else {
      if (!state.exp_avg.defined()) return false;
      if (groups[slot.group].amsgrad && !state.max_exp_avg_sq.defined()) return false;
    }
    return options.ema_decay == 0 || state.ema.defined();
  }

  void create_state(Slot& slot) {
    const at::NoGradGuard no_grad;
    ParamState& state = slot.state;
    const auto zeros = [&] { return at::zeros_like(slot.param, {}, at::MemoryFormat::Preserve); };
    if (algorithm == Algorithm::SGD) {
      if (wants_momentum(slot) && !state.momentum_buffer.defined()) {
        state.momentum_buffer = zeros();
        slot.first = true;
      }
    } else {
      if (!state.exp_avg.defined()) {
        // torch keeps the counter in the default dtype if that is fp64, else in fp32.
        const bool wide = c10::typeMetaToScalarType(at::get_default_dtype()) == at::kDouble;
        state.step = at::zeros({}, at::TensorOptions(wide ? at::kDouble : at::kFloat).device(slot.param.device()));
        state.exp_avg = zeros();
        state.exp_avg_sq = zeros();
      }
      if (groups[slot.group].amsgrad && !state.max_exp_avg_sq.defined()) state.max_exp_avg_sq = zeros();
    }
    if (options.ema_decay != 0 && !state.ema.defined()) {
      const bool narrow = slot.type == at::kHalf || slot.type == at::kBFloat16;
      state.ema = at::empty_like(slot.param, slot.param.options().dtype(narrow ? at::kFloat : slot.type),
                                 at::MemoryFormat::Preserve);
      state.ema.copy_(slot.param);
    }
    dirty = true;
  }

  // ---- the native plan

  [[nodiscard]] bool can_be_native(const Slot& slot) const {
    const at::Tensor& p = slot.param;
    const auto type = p.is_cpu() ? element_type(p) : std::nullopt;
    if (options.force_composite || !type || !p.is_non_overlapping_and_dense() || p.is_neg() || p.is_conj()) {
      return false;
    }
    std::optional<kernels::ElementType> state_type;
    for (const at::Tensor* t :
         {&slot.state.exp_avg, &slot.state.exp_avg_sq, &slot.state.max_exp_avg_sq, &slot.state.momentum_buffer}) {
      if (!t->defined()) continue;
      const auto found = element_type(*t);
      if (!found || !same_layout(*t, p) || (state_type && *state_type != *found)) return false;
      state_type = found;
    }
    // The kernels have no fp32 parameter with a bf16 state.
    if (state_type == kernels::ElementType::BF16 && *type == kernels::ElementType::F32) return false;
    if (slot.state.step.defined() && (!slot.state.step.is_cpu() || slot.state.step.scalar_type() != at::kFloat)) {
      return false;
    }
    const at::Tensor& ema = slot.state.ema;
    return !ema.defined() || (same_layout(ema, p) && ema.scalar_type() == at::kFloat);
  }

  void build_plan() {
    std::vector<kernels::TailTensor> tensors;
    planned_slots.clear();
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Slot& slot = slots[i];
      slot.native = can_be_native(slot);
      if (!slot.native) continue;
      slot.planned = tensors.size();
      planned_slots.push_back(i);
      kernels::TailTensor t;
      t.numel = slot.param.numel();
      t.group = static_cast<std::uint32_t>(slot.group);
      t.type = *element_type(slot.param);
      t.grad_type = t.type;
      const bool sgd = algorithm == Algorithm::SGD;
      const at::Tensor& state0 = sgd ? slot.state.momentum_buffer : slot.state.exp_avg;
      t.state_type = state0.defined() ? *element_type(state0) : t.type;
      if (state0.defined() && (!sgd || wants_momentum(slot))) t.state[0].data = address(state0);
      if (!sgd && slot.state.exp_avg.defined()) {
        t.state[1].data = address(slot.state.exp_avg_sq);
        t.step = slot.state.step.mutable_data_ptr<float>();
        if (groups[slot.group].amsgrad) t.state[2].data = address(slot.state.max_exp_avg_sq);
      }
      if (slot.state.ema.defined()) t.ema = static_cast<float*>(address(slot.state.ema));
      t.first = slot.first;
      tensors.push_back(t);
    }
    plan.emplace(tensors);
    native_groups.resize(groups.size());
    composite.reserve(slots.size());
    composite_index.reserve(slots.size());
    if (!stats.grad_norm.defined()) create_stats();
    dirty = false;
  }

  void create_stats() {
    const at::TensorOptions options32 = at::TensorOptions(at::kFloat).device(device());
    const auto n = static_cast<std::int64_t>(slots.size());
    stats.grad_norm = at::zeros({}, options32);
    stats.found_inf = at::zeros({}, options32);
    stats.skipped = at::zeros({}, options32.dtype(at::kLong));
    stats.grad_norms = at::zeros({n}, options32);
    if (options.collect_stats) {
      stats.param_norms = at::zeros({n}, options32);
      stats.update_norms = at::zeros({n}, options32);
    }
  }

  // ---- one step

  void check_param(const Slot& slot, const at::Tensor& grad) const {
    const at::Tensor& p = slot.param;
    OXY_CHECK(p.sizes() == at::IntArrayRef(slot.sizes), InvalidState, "parameter ", slot.name, " had shape ",
              at::IntArrayRef(slot.sizes), " when the optimizer was built and now has ", p.sizes(),
              "; build a new optimizer after changing a parameter's shape.");
    OXY_CHECK(p.scalar_type() == slot.type, InvalidState, "parameter ", slot.name, " was of dtype ", slot.type,
              " when the optimizer was built and is now ", p.scalar_type(),
              "; convert the model first and build the optimizer after.");
    OXY_CHECK(p.device() == device(), InvalidState, "parameter ", slot.name, " was on ", device(),
              " when the optimizer was built and is now on ", p.device(),
              "; move the model first and build the optimizer after.");
    OXY_CHECK(grad.layout() == at::kStrided, NotSupported, "parameter ", slot.name, " has a sparse gradient (layout ",
              grad.layout(), "); use torch.optim.SparseAdam, or sparse=False in the embedding.");
    OXY_CHECK(grad.sizes() == p.sizes(), InvalidState, "parameter ", slot.name, " has shape ", p.sizes(),
              " but its gradient ", grad.sizes(), "; clear the gradients after changing a parameter.");
    const std::int64_t end = p.numel() == 0 ? 0 : p.storage_offset() + p.numel();
    OXY_CHECK(p.storage().nbytes() >= static_cast<std::size_t>(end) * p.element_size() || !p.is_contiguous(),
              InvalidState, "the memory of parameter ", slot.name, " was freed: its storage holds ",
              p.storage().nbytes(), " bytes; restore it before the step.");
  }

  // Collects the gradients; nothing is changed that a failure would leave half done.
  bool gather() {
    bool created = false;
    for (Slot& slot : slots) {
      const at::Tensor& grad = slot.param.grad();
      if (!grad.defined()) continue;
      check_param(slot, grad);
      if (!complete(slot)) {
        create_state(slot);
        created = true;
      }
    }
    if (dirty) build_plan();
    composite.clear();
    composite_index.clear();
    const std::span<kernels::TailTensor> planned = plan->tensors();
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Slot& slot = slots[i];
      const at::Tensor& grad = slot.param.grad();
      if (!slot.native) {
        if (grad.defined()) {
          composite.push_back({slot.param, grad, &slot.state, &groups[slot.group], slot.first});
          composite_index.push_back(i);
        }
        continue;
      }
      kernels::TailTensor& t = planned[slot.planned];
      if (!grad.defined()) {
        t.grad = nullptr;
        continue;
      }
      t.param = address(slot.param);
      if (slot.param.strides() == grad.strides() && grad.scalar_type() == slot.type && !grad.is_neg()) {
        t.grad = address(grad);
      } else {
        const at::NoGradGuard no_grad;
        if (!slot.grad_copy.defined() || slot.grad_copy.strides() != slot.param.strides()) {
          slot.grad_copy = at::empty_like(slot.param, {}, at::MemoryFormat::Preserve);
        }
        slot.grad_copy.copy_(grad);
        t.grad = address(slot.grad_copy);
      }
    }
    return created;
  }

  void fill_native_groups() {
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const GroupOptions& o = groups[i];
      kernels::TailGroup& g = native_groups[i];
      g.rule = algorithm == Algorithm::SGD ? kernels::Rule::Sgd
               : o.decoupled_weight_decay  ? kernels::Rule::AdamW
                                           : kernels::Rule::Adam;
      g.lr = o.lr_tensor.defined() ? host_scalar(o.lr_tensor, "a learning-rate tensor") : o.lr;
      OXY_CHECK(!std::isnan(g.lr), InvalidArgument, "parameter group ", i,
                " has a learning-rate tensor that holds NaN; set it to a number.");
      g.beta1 = o.beta1;
      g.beta2 = o.beta2;
      g.eps = o.eps;
      g.weight_decay = o.weight_decay;
      g.momentum = o.momentum;
      g.dampening = o.dampening;
      g.nesterov = o.nesterov;
      g.maximize = o.maximize;
    }
  }

  // Gradients that the kernels zeroed through a copy, or that no kernel touched.
  void zero_copied_grads() {
    if (!options.zero_grads) return;
    const at::NoGradGuard no_grad;
    for (Slot& slot : slots) {
      if (slot.native && slot.grad_copy.defined() && slot.param.grad().defined()) slot.param.mutable_grad().zero_();
    }
  }

  [[noreturn]] void raise_nonfinite() const {
    const float* norms = stats.grad_norms.is_cpu() ? stats.grad_norms.const_data_ptr<float>() : nullptr;
    std::string names;
    int count = 0;
    for (std::size_t i = 0; norms != nullptr && i < slots.size(); ++i) {
      if (std::isfinite(norms[i])) continue;
      if (++count <= 5) names += (names.empty() ? "" : ", ") + slots[i].name;
    }
    if (count > 5) names += " and " + std::to_string(count - 5) + " more";
    detail::raise(ErrorCode::InvalidState, "inf or NaN in the gradient of ", names.empty() ? "a parameter" : names,
                  "; nothing was changed. Look at the loss and inputs of this step, or use nonfinite=\"skip\".");
  }

  // CPU: memory of the device is memory of the host, so verdict and coefficient are plain numbers.
  void step_on_host(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
    const double scale = grad_scale.defined() ? host_scalar(grad_scale, "grad_scale") : 1.0;
    const bool scaled = grad_scale.defined() || found_inf.defined();
    const bool measured =
        scaled || options.clip_norm > 0 || options.nonfinite != NonFinite::Propagate || options.collect_stats;
    fill_native_groups();
    const kernels::Parallel pool = intra_op_pool();
    double sum = 0;
    if (measured) sum = measure(pool, scale);
    const bool finite = std::isfinite(sum) && std::isfinite(1.0 / scale);
    const bool told = found_inf.defined() && host_scalar(found_inf, "found_inf") != 0;
    const double norm = std::sqrt(sum) / scale;
    *stats.grad_norm.mutable_data_ptr<float>() = static_cast<float>(norm);
    if (!finite && !scaled && options.nonfinite == NonFinite::Raise) raise_nonfinite();
    const bool skip = told || (!finite && (scaled || options.nonfinite != NonFinite::Propagate));
    *stats.found_inf.mutable_data_ptr<float>() = skip ? 1.0F : 0.0F;
    if (skip) {
      if (found_inf.defined()) set_host_scalar(found_inf, 1.0);
      *stats.skipped.mutable_data_ptr<std::int64_t>() += 1;
      if (options.zero_grads) {
        plan->zero_gradients(pool);
        const at::NoGradGuard no_grad;
        for (CompositeParam& p : composite) p.grad.zero_();
      }
      zero_copied_grads();
      return;
    }
    // Written so that a NaN norm, where it is let through, reaches every gradient as in torch.
    double clip = options.clip_norm > 0 ? options.clip_norm / (norm + kClipEpsilon) : 1.0;
    if (clip > 1.0) clip = 1.0;
    kernels::TailSettings settings;
    settings.grad_multiplier = clip / scale;
    settings.ema_decay = options.ema_decay;
    settings.zero_grad = options.zero_grads;
    settings.collect = options.collect_stats;
    plan->apply(native_groups, settings, pool);
    finish_native();
    if (!composite.empty()) {
      const at::NoGradGuard no_grad;
      at::Tensor param_norms, update_norms;
      if (options.collect_stats) {
        param_norms = at::zeros({static_cast<std::int64_t>(composite.size())}, at::kFloat);
        update_norms = at::zeros_like(param_norms);
      }
      composite_update(algorithm, options, composite, at::scalar_tensor(settings.grad_multiplier, at::kDouble), {},
                       param_norms, update_norms);
      finish_composite(param_norms, update_norms);
    }
    zero_copied_grads();
  }

  double measure(const kernels::Parallel& pool, double scale) {
    double sum = plan->measure(pool);
    float* norms = stats.grad_norms.mutable_data_ptr<float>();
    const auto sums = plan->grad_sum_squares();
    for (std::size_t i = 0; i < planned_slots.size(); ++i) {
      norms[planned_slots[i]] = static_cast<float>(std::sqrt(sums[i]) / scale);
    }
    if (!composite.empty()) {
      const at::NoGradGuard no_grad;
      const at::Tensor wide = composite_grad_norms(composite).contiguous();
      const double* values = wide.const_data_ptr<double>();
      for (std::size_t i = 0; i < composite.size(); ++i) {
        sum += values[i] * values[i];
        norms[composite_index[i]] = static_cast<float>(values[i] / scale);
      }
    }
    return sum;
  }

  void finish_native() {
    const std::span<const kernels::TailTensor> planned = plan->tensors();
    for (std::size_t i = 0; i < planned_slots.size(); ++i) {
      if (planned[i].grad == nullptr) continue;
      Slot& slot = slots[planned_slots[i]];
      slot.first = false;
      // Autograd must see that a tensor it may have saved was written.
      if (!slot.param.is_inference()) slot.param.unsafeGetTensorImpl()->bump_version();
    }
    if (options.collect_stats) {
      float* param_norms = stats.param_norms.mutable_data_ptr<float>();
      float* update_norms = stats.update_norms.mutable_data_ptr<float>();
      for (std::size_t i = 0; i < planned_slots.size(); ++i) {
        param_norms[planned_slots[i]] = static_cast<float>(std::sqrt(plan->param_sum_squares()[i]));
        update_norms[planned_slots[i]] = static_cast<float>(std::sqrt(plan->update_sum_squares()[i]));
      }
    }
  }

  void finish_composite(const at::Tensor& param_norms, const at::Tensor& update_norms) {
    for (std::size_t i = 0; i < composite.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const auto to = static_cast<std::int64_t>(composite_index[i]);
      slots[composite_index[i]].first = false;
      if (param_norms.defined()) {
        stats.param_norms[to].copy_(param_norms[at]);
        stats.update_norms[to].copy_(update_norms[at]);
      }
    }
  }

  // Any other device: every value stays there.
  void step_on_device(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
    if (composite.empty()) return;
    const at::NoGradGuard no_grad;
    const bool scaled = grad_scale.defined() || found_inf.defined();
    const at::Tensor norms = composite_grad_norms(composite);
    const at::Tensor sum = norms.square().sum();
    const at::Tensor inverse =
        grad_scale.defined() ? grad_scale.to(sum.scalar_type()).reshape({}).reciprocal() : at::ones({}, sum.options());
    const at::Tensor norm = sum.sqrt().mul(inverse);
    const at::Tensor bad = sum.mul(inverse).isfinite().logical_not().to(at::kFloat);
    stats.grad_norm.copy_(norm);
    record_grad_norms(norms.mul(inverse));
    if (!scaled && options.nonfinite == NonFinite::Raise && bad.item<float>() != 0) raise_nonfinite();
    at::Tensor skip;
    if (scaled || options.nonfinite != NonFinite::Propagate) {
      skip = bad;
      if (found_inf.defined()) {
        found_inf.copy_(at::maximum(found_inf, bad.reshape_as(found_inf)));
        skip = found_inf.reshape({});
      }
      stats.found_inf.copy_(skip);
      stats.skipped.add_(skip.ne(0));
    }
    at::Tensor multiplier = inverse;
    if (options.clip_norm > 0) {
      multiplier = norm.add(kClipEpsilon).reciprocal().mul(options.clip_norm).clamp_max(1.0).mul(inverse);
    }
    at::Tensor param_norms, update_norms;
    if (options.collect_stats) {
      param_norms = at::zeros({static_cast<std::int64_t>(composite.size())}, stats.grad_norms.options());
      update_norms = at::zeros_like(param_norms);
    }
    composite_update(algorithm, options, composite, multiplier, skip, param_norms, update_norms);
    finish_composite(param_norms, update_norms);
  }

  void record_grad_norms(const at::Tensor& norms) {
    if (composite.size() == slots.size()) {
      stats.grad_norms.copy_(norms);
      return;
    }
    for (std::size_t i = 0; i < composite.size(); ++i) {
      stats.grad_norms[static_cast<std::int64_t>(composite_index[i])].copy_(norms[static_cast<std::int64_t>(i)]);
    }
  }
};

StepTail::StepTail(Algorithm algorithm, TailOptions options) : impl_(std::make_unique<Impl>()) {
  OXY_CHECK(options.clip_norm >= 0 && std::isfinite(options.clip_norm), InvalidArgument, "clip_norm is ",
            options.clip_norm, "; give a finite number above 0, or leave it out for no clipping.");
  OXY_CHECK(options.ema_decay >= 0 && options.ema_decay < 1, InvalidArgument, "ema_decay is ", options.ema_decay,
            "; give a number in [0, 1), or leave it out for no moving average.");
  impl_->algorithm = algorithm;
  impl_->options = options;
}

StepTail::~StepTail() = default;

void StepTail::add_group(std::vector<at::Tensor> params, std::vector<std::string> names, const GroupOptions& options) {
  const std::size_t group = impl_->groups.size();
  check_group(impl_->algorithm, options, group);
  OXY_CHECK(names.empty() || names.size() == params.size(), InvalidArgument, "parameter group ", group, " has ",
            params.size(), " parameters but ", names.size(), " names; give one for each, or none.");
  std::vector<Slot> added;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& p = params[i];
    std::string label = names.empty() ? std::to_string(i) + " of group " + std::to_string(group) : names[i];
    OXY_CHECK(p.defined(), InvalidArgument, "parameter ", label, " is undefined; give a tensor.");
    OXY_CHECK(p.layout() == at::kStrided, NotSupported, "parameter ", label, " is sparse (layout ", p.layout(),
              "); only dense parameters can be optimized here.");
    OXY_CHECK(!p.key_set().has(c10::DispatchKey::Python), NotSupported, "parameter ", label,
              " is a tensor subclass with its own dispatch (such as DTensor or FakeTensor); use torch.optim for it.");
    const auto is_same = [&p](const Slot& slot) { return slot.param.is_same(p); };
    OXY_CHECK(std::none_of(added.begin(), added.end(), is_same) &&
                  std::none_of(impl_->slots.begin(), impl_->slots.end(), is_same),
              InvalidArgument, "parameter ", label, " was given twice; an optimizer updates each parameter once.");
    const at::Device first = !impl_->slots.empty() ? impl_->device() : params.front().device();
    OXY_CHECK(p.device() == first, NotSupported, "parameter ", label, " is on ", p.device(), " but the first one on ",
              first, "; give each device an optimizer of its own.");
    Slot slot;
    slot.param = p;
    slot.name = std::move(label);
    slot.group = group;
    slot.sizes = p.sizes().vec();
    slot.type = p.scalar_type();
    added.push_back(std::move(slot));
  }
  impl_->groups.push_back(options);
  for (Slot& slot : added) impl_->slots.push_back(std::move(slot));
  impl_->stats = {};
  impl_->dirty = true;
}

void StepTail::set_group_options(std::size_t group, const GroupOptions& options) {
  OXY_CHECK(group < impl_->groups.size(), OutOfRange, "there is no parameter group ", group, "; there are ",
            impl_->groups.size(), ".");
  check_group(impl_->algorithm, options, group);
  GroupOptions& current = impl_->groups[group];
  // Which state takes part is written in the plan.
  if (current.amsgrad != options.amsgrad || (current.momentum != 0) != (options.momentum != 0)) impl_->dirty = true;
  current = options;
}

std::size_t StepTail::group_count() const noexcept { return impl_->groups.size(); }
std::size_t StepTail::param_count() const noexcept { return impl_->slots.size(); }
const at::Tensor& StepTail::param(std::size_t index) const { return impl_->slots.at(index).param; }
const std::string& StepTail::param_name(std::size_t index) const { return impl_->slots.at(index).name; }
const ParamState& StepTail::state(std::size_t index) const { return impl_->slots.at(index).state; }

void StepTail::set_state(std::size_t index, ParamState state) {
  OXY_CHECK(index < impl_->slots.size(), OutOfRange, "there is no parameter ", index, "; there are ",
            impl_->slots.size(), ".");
  Slot& slot = impl_->slots[index];
  const auto check = [&](const at::Tensor& t, const char* what) {
    if (!t.defined()) return;
    OXY_CHECK(t.sizes() == slot.param.sizes(), InvalidArgument, "state '", what, "' of parameter ", slot.name,
              " has shape ", t.sizes(), "; the parameter has ", slot.param.sizes(), ".");
    OXY_CHECK(at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type()), InvalidType, "state '", what,
              "' of parameter ", slot.name, " is of dtype ", t.scalar_type(), "; it must be floating point.");
    OXY_CHECK(t.device() == slot.param.device(), InvalidArgument, "state '", what, "' of parameter ", slot.name,
              " is on ", t.device(), "; the parameter is on ", slot.param.device(), ".");
  };
  check(state.exp_avg, "exp_avg");
  check(state.exp_avg_sq, "exp_avg_sq");
  check(state.max_exp_avg_sq, "max_exp_avg_sq");
  check(state.momentum_buffer, "momentum_buffer");
  check(state.ema, "ema");
  if (state.exp_avg.defined()) {
    OXY_CHECK(state.exp_avg_sq.defined() && state.step.defined(), InvalidArgument, "the state of parameter ", slot.name,
              " has exp_avg but lacks ", state.step.defined() ? "exp_avg_sq" : "step", "; give the whole state.");
    OXY_CHECK(state.step.numel() == 1, InvalidArgument, "state 'step' of parameter ", slot.name, " has ",
              state.step.numel(), " elements; it must have one.");
    if (state.step.device() != slot.param.device()) state.step = state.step.to(slot.param.device());
  }
  slot.first = !state.momentum_buffer.defined();
  slot.state = std::move(state);
  impl_->dirty = true;
}

bool StepTail::step(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  if (impl_->slots.empty()) return false;
  OXY_CHECK(impl_->displaced.empty(), InvalidState,
            "a step was asked for while the moving averages stand in for the parameters; leave ema_weights() first.");
  const bool created = impl_->gather();
  const auto check = [&](const at::Tensor& t, const char* what) {
    OXY_CHECK(!t.defined() || (t.numel() == 1 && t.device() == impl_->device()), InvalidArgument, what,
              " must be a one-element tensor on ", impl_->device(), "; it has ", t.numel(), " elements on ", t.device(),
              ".");
  };
  check(grad_scale, "grad_scale");
  check(found_inf, "found_inf");
  if (impl_->device().is_cpu()) {
    impl_->step_on_host(grad_scale, found_inf);
  } else {
    impl_->step_on_device(grad_scale, found_inf);
  }
  return created;
}

const TailStats& StepTail::stats() const noexcept {
  if (!impl_->stats.grad_norm.defined() && !impl_->slots.empty()) impl_->create_stats();
  return impl_->stats;
}

const TailOptions& StepTail::options() const noexcept { return impl_->options; }

void StepTail::apply_ema() {
  OXY_CHECK(impl_->options.ema_decay != 0, InvalidState, "this optimizer keeps no moving average; set ema_decay.");
  OXY_CHECK(impl_->displaced.empty(), InvalidState, "the moving averages already stand in for the parameters.");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> kept;
  for (const Slot& slot : impl_->slots) {
    kept.push_back(slot.state.ema.defined() ? slot.param.detach().clone() : at::Tensor());
  }
  impl_->displaced = std::move(kept);
  for (Slot& slot : impl_->slots) {
    if (slot.state.ema.defined()) slot.param.copy_(slot.state.ema);
  }
}

void StepTail::restore_parameters() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < impl_->displaced.size(); ++i) {
    if (impl_->displaced[i].defined()) impl_->slots[i].param.copy_(impl_->displaced[i]);
  }
  impl_->displaced.clear();
}

bool StepTail::native() const noexcept {
  return !impl_->dirty && std::all_of(impl_->slots.begin(), impl_->slots.end(), [](const Slot& s) { return s.native; });
}

std::int64_t StepTail::bytes_per_step() const noexcept {
  if (!impl_->plan) return 0;
  const TailOptions& o = impl_->options;
  const bool measured = o.clip_norm > 0 || o.nonfinite != NonFinite::Propagate || o.collect_stats;
  kernels::TailSettings settings;
  settings.zero_grad = o.zero_grads;
  std::int64_t bytes = 0;
  for (const kernels::TailTensor& t : impl_->plan->tensors()) {
    bytes += kernels::step_bytes(t, settings, measured);
  }
  return bytes;
}

}  // namespace oxytorch::optim
