#include "oxytorch/optim/step_tail.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "optim/algorithm.h"
#include "optim/composite.h"
#include "optim/formats.h"
#include "optim/host_scalar.h"
#include "oxytorch/error.h"
#include "oxytorch/kernels/codec.h"
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
  switch (tensor.scalar_type()) {
    case at::kFloat: return kernels::ElementType::F32;
    case at::kBFloat16: return kernels::ElementType::BF16;
    case at::kHalf: return kernels::ElementType::F16;
    case at::kChar:
    case at::kByte: return kernels::ElementType::Int8;
    default: return std::nullopt;
  }
}

bool is_16_bit(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

bool same_layout(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.sizes() == like.sizes() &&
         ((tensor.is_contiguous() && like.is_contiguous()) || tensor.strides() == like.strides()) && !tensor.is_neg() &&
         !tensor.is_conj();
}

// Undefined, or of this dtype and laid out as the parameter.
bool absent_or_like(const at::Tensor& tensor, at::ScalarType type, const at::Tensor& param) {
  return !tensor.defined() || (tensor.scalar_type() == type && same_layout(tensor, param));
}

// An empty tensor has no address; the kernels take null for "none".
void* address(const at::Tensor& tensor) {
  static float nowhere = 0;
  return tensor.numel() == 0 ? &nowhere : tensor.mutable_data_ptr();
}

template <class T>
T* address_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(address(tensor)) : nullptr;
}

// True where the first dimension is the outermost in memory, so that a row is one run of it.
bool rows_are_runs(const at::Tensor& p) {
  return p.dim() < 2 || p.numel() == 0 || p.size(0) == 1 || p.stride(0) * p.size(0) == p.numel();
}

// An element by which a gradient that was written without a new version is told from what it was: C++'s
// clip_grad_norm_ and clip_grad_value_ write through data(). It is the largest of up to 256, so that both show in it.
struct Witness {
  std::int64_t index = 0;
  std::uint32_t bits = 0;  // 0: none of them was other than zero
};

std::uint32_t bits_at(const void* elements, std::size_t width, std::int64_t index) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(elements) + static_cast<std::size_t>(index) * width, width);
  return bits;
}

// Of a gradient that the kernels can read.
Witness find_witness(const at::Tensor& grad) {
  constexpr std::int64_t kSamples = 256;
  const std::size_t width = grad.element_size();
  const std::uint32_t magnitude = width == 4 ? 0x7FFFFFFF : 0x7FFF;
  Witness found;
  const std::int64_t stride = (grad.numel() + kSamples - 1) / kSamples;
  for (std::int64_t i = 0; i < grad.numel(); i += stride) {
    const std::uint32_t bits = bits_at(grad.const_data_ptr(), width, i);
    if ((bits & magnitude) > (found.bits & magnitude)) found = {i, bits};
  }
  return found;
}

struct Slot {
  at::Tensor param;
  std::string name;
  std::size_t group;
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
  ParamState state;
  bool first = true;          // SGD: the momentum buffer holds nothing yet
  at::Tensor grad_copy;       // a gradient laid out like the parameter, when autograd's is not
  std::int64_t version = -1;  // of the parameter after our last write; -1: not known
  double known_sum = -1;      // sum of squares that grad_ready() took; negative: none
  const void* known_at = nullptr;
  std::int64_t known_version = -1;
  std::uint64_t complete_at = 0;  // the generation in which all state was found to be there
  Witness witness;
};

// The slots that one call works on, divided into those with native kernels and the others.
struct Work {
  std::vector<std::size_t> members;
  std::optional<kernels::StepTailPlan> plan;
  std::vector<std::size_t> planned;  // slots in the order of the plan
  std::vector<std::size_t> others;
  std::vector<CompositeParam> composite;  // of the others, those with a gradient in this step
  std::vector<std::size_t> composite_index;
  std::vector<double> known;  // for the plan's measure()
  std::uint64_t generation = 0;
};

}  // namespace

struct StepTail::Impl {
  Algorithm algorithm;
  TailOptions options;
  std::vector<GroupOptions> groups;
  std::vector<Slot> slots;
  TailStats stats;
  Work all;
  std::map<std::size_t, Work> alone;  // of single slots, for step_in_backward
  std::vector<kernels::TailGroup> native_groups;
  std::vector<at::Tensor> displaced;  // the parameters' values while the averages stand in for them
  at::Tensor reported_norms;          // of gradients that grad_ready() used up
  NormReducer reducer;
  std::uint64_t generation = 1;  // advanced whenever plans no longer match the slots

  [[nodiscard]] const at::Device device() const { return slots.front().param.device(); }

  // ---- state

  [[nodiscard]] bool counts_steps() const { return traits(algorithm).counts_steps || options.stochastic_rounding; }

  [[nodiscard]] bool wants(const Slot& slot, std::size_t moment) const {
    return wants_moment(algorithm, groups[slot.group], moment);
  }
  [[nodiscard]] bool wants_master(const Slot& slot) const {
    return options.master_weights == MasterFormat::Float32 && is_16_bit(slot.type);
  }
  [[nodiscard]] bool wants_residue(const Slot& slot) const {
    return options.master_weights == MasterFormat::Int8 && slot.type == at::kBFloat16;
  }
  [[nodiscard]] bool wants_copy(const Slot& slot) const {
    return options.copy_dtype && *options.copy_dtype != slot.type && at::isFloatingType(slot.type);
  }

  [[nodiscard]] bool complete(const Slot& slot) const {
    const ParamState& state = slot.state;
    for (std::size_t k = 0; k < kMoments; ++k) {
      if (wants(slot, k) && !state.moments[k].defined()) return false;
    }
    return (!counts_steps() || state.step.defined()) && (!wants_master(slot) || state.master.defined()) &&
           (!wants_residue(slot) || state.residue.defined()) && (!wants_copy(slot) || state.copy.defined()) &&
           (options.ema_decay == 0 || state.ema.defined());
  }

  // The dtype of a moment; kChar stands for both kinds of 8-bit code.
  [[nodiscard]] at::ScalarType moment_type(const Slot& slot) const {
    switch (options.state_dtype) {
      case StateFormat::Float32: return at::kFloat;
      case StateFormat::BFloat16: return at::kBFloat16;
      case StateFormat::Int8: return at::kChar;
      case StateFormat::Auto: break;
    }
    return wants_master(slot) || wants_residue(slot) ? at::kFloat : slot.type;
  }

  [[nodiscard]] at::Tensor empty_like_param(const Slot& slot, at::ScalarType type) const {
    return at::empty_like(slot.param, slot.param.options().dtype(type), at::MemoryFormat::Preserve);
  }

  // Stores `values` as moment `k` in the dtype that the options ask for.
  void keep_moment(Slot& slot, std::size_t k, const at::Tensor& values) const {
    const kernels::StateCode code = traits(algorithm).moments[k].code;
    const at::ScalarType type = moment_type(slot);
    if (type == at::kChar) {
      const bool is_signed = code == kernels::StateCode::Signed;
      const at::Tensor like = empty_like_param(slot, is_signed ? at::kChar : at::kByte);
      std::tie(slot.state.moments[k], slot.state.scales[k]) = encode_int8(values, code, like, std::nullopt);
      return;
    }
    slot.state.scales[k] = at::Tensor();
    slot.state.moments[k] = same_layout(values, slot.param) && values.scalar_type() == type
                                ? values
                                : empty_like_param(slot, type).copy_(values);
  }

  void create_state(Slot& slot) {
    const at::NoGradGuard no_grad;
    ParamState& state = slot.state;
    if (counts_steps() && !state.step.defined()) {
      // torch keeps the counter in the default dtype if that is fp64, else in fp32.
      const bool wide = c10::typeMetaToScalarType(at::get_default_dtype()) == at::kDouble;
      state.step = at::zeros({}, at::TensorOptions(wide ? at::kDouble : at::kFloat).device(slot.param.device()));
    }
    if (wants_master(slot) && !state.master.defined())
      state.master = empty_like_param(slot, at::kFloat).copy_(slot.param);
    if (wants_residue(slot) && !state.residue.defined()) state.residue = empty_like_param(slot, at::kChar).zero_();
    for (std::size_t k = 0; k < kMoments; ++k) {
      if (!wants(slot, k) || state.moments[k].defined()) continue;
      const double start = algorithm == Algorithm::Adagrad ? groups[slot.group].initial_accumulator_value : 0.0;
      // 8 bits cannot hold a complex number's parts; such parameters are refused when they are added.
      const at::ScalarType type = moment_type(slot) == at::kChar ? at::kFloat : moment_type(slot);
      keep_moment(slot, k, empty_like_param(slot, type).fill_(start));
      if (k == 0) slot.first = true;
    }
    if (wants_copy(slot) && !state.copy.defined()) {
      state.copy = empty_like_param(slot, *options.copy_dtype).copy_(slot.param);
    }
    if (options.ema_decay != 0 && !state.ema.defined()) {
      state.ema = empty_like_param(slot, compute_type(slot.type)).copy_(slot.param);
    }
    ++generation;
  }

  [[nodiscard]] static bool has_masters(const Slot& slot) {
    return slot.state.master.defined() || slot.state.residue.defined();
  }

  // The master weights of elements that somebody wrote since our last step follow what was written.
  void follow_outside_writes(Slot& slot) const {
    const std::int64_t version = slot.param.is_inference() ? 0 : slot.param._version();
    const std::int64_t last = std::exchange(slot.version, version);
    if (version == last) return;
    const at::NoGradGuard no_grad;
    if (slot.state.master.defined()) {
      const at::Tensor& master = slot.state.master;
      master.copy_(at::where(master.to(slot.type).eq(slot.param), master, slot.param));
    } else if (last != -1) {
      slot.state.residue.zero_();
    }
  }

  void note_own_write(Slot& slot) const {
    if (has_masters(slot) && !slot.param.is_inference()) slot.version = slot.param._version();
  }

  // ---- the native plan

  [[nodiscard]] bool can_be_native(const Slot& slot) const {
    const at::Tensor& p = slot.param;
    const ParamState& s = slot.state;
    if (options.force_composite || algorithm == Algorithm::Muon || !p.is_cpu() || !element_type(p) ||
        !p.is_non_overlapping_and_dense() || p.is_neg() || p.is_conj() || (options.agc > 0 && !rows_are_runs(p))) {
      return false;
    }
    std::optional<kernels::ElementType> state_type;
    for (std::size_t k = 0; k < kMoments; ++k) {
      if (!s.moments[k].defined()) continue;
      const auto found = element_type(s.moments[k]);
      if (!found || !same_layout(s.moments[k], p) || (state_type && *state_type != *found)) return false;
      if (s.scales[k].defined() && !s.scales[k].is_contiguous()) return false;
      state_type = found;
    }
    if (s.step.defined() && (!s.step.is_cpu() || s.step.scalar_type() != at::kFloat)) return false;
    return absent_or_like(s.ema, at::kFloat, p) && absent_or_like(s.master, at::kFloat, p) &&
           absent_or_like(s.residue, at::kChar, p) && (!s.copy.defined() || same_layout(s.copy, p));
  }

  [[nodiscard]] kernels::TailTensor tail_tensor(std::size_t index) const {
    const Slot& slot = slots[index];
    const ParamState& s = slot.state;
    kernels::TailTensor t;
    t.numel = slot.param.numel();
    t.rows = slot.param.dim() < 2 || t.numel == 0 ? 1 : slot.param.size(0);
    t.group = static_cast<std::uint32_t>(slot.group);
    t.stream = static_cast<std::uint32_t>(index);
    t.type = t.grad_type = t.state_type = *element_type(slot.param);
    t.master = address_or_null<float>(s.master);
    t.residue = address_or_null<std::int8_t>(s.residue);
    t.ema = address_or_null<float>(s.ema);
    t.copy = address_or_null<void>(s.copy);
    if (s.copy.defined()) t.copy_type = *element_type(s.copy);
    if (s.step.defined()) t.step = s.step.mutable_data_ptr<float>();
    for (std::size_t k = 0; k < kMoments; ++k) {
      if (!wants(slot, k) || !s.moments[k].defined()) continue;
      t.state_type = *element_type(s.moments[k]);
      t.state[k] = {address(s.moments[k]), address_or_null<std::uint16_t>(s.scales[k])};
    }
    t.first = slot.first;
    return t;
  }

  void build_plan(Work& work) {
    std::vector<kernels::TailTensor> tensors;
    work.planned.clear();
    work.others.clear();
    for (std::size_t i : work.members) {
      if (can_be_native(slots[i])) {
        work.planned.push_back(i);
        tensors.push_back(tail_tensor(i));
      } else {
        work.others.push_back(i);
      }
    }
    work.plan.emplace(tensors);
    work.known.assign(tensors.size(), -1);
    work.composite.reserve(work.others.size());
    work.composite_index.reserve(work.others.size());
    native_groups.resize(groups.size());
    if (!stats.grad_norm.defined()) create_stats();
    work.generation = generation;
  }

  void create_stats() {
    const at::TensorOptions options32 = at::TensorOptions(at::kFloat).device(device());
    const auto n = static_cast<std::int64_t>(slots.size());
    stats.grad_norm = at::zeros({}, options32);
    stats.found_inf = at::zeros({}, options32);
    stats.applied = at::zeros({}, options32);
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

  // A gradient that the kernels can read where it is.
  [[nodiscard]] static bool readable(const Slot& slot, const at::Tensor& grad) {
    const auto type = element_type(grad);
    return type && *type != kernels::ElementType::Int8 && same_layout(grad, slot.param);
  }

  // Collects the gradients; nothing is changed that a failure would leave half done.
  bool gather(Work& work) {
    bool created = false;
    for (std::size_t i : work.members) {
      Slot& slot = slots[i];
      const at::Tensor& grad = slot.param.grad();
      if (!grad.defined()) continue;
      check_param(slot, grad);
      if (slot.complete_at != generation) {
        if (!complete(slot)) {
          create_state(slot);
          created = true;
        }
        slot.complete_at = generation;
      }
      if (has_masters(slot)) follow_outside_writes(slot);
    }
    if (work.generation != generation) build_plan(work);
    const std::span<kernels::TailTensor> planned = work.plan->tensors();
    for (std::size_t at = 0; at < work.planned.size(); ++at) {
      Slot& slot = slots[work.planned[at]];
      kernels::TailTensor& t = planned[at];
      const at::Tensor& grad = slot.param.grad();
      work.known[at] = take_known(slot, grad);
      if (!grad.defined()) {
        t.grad = nullptr;
        continue;
      }
      t.param = address(slot.param);
      t.first = slot.first;
      const at::Tensor* source = &grad;
      if (!readable(slot, grad)) {
        const at::NoGradGuard no_grad;
        if (!slot.grad_copy.defined() || slot.grad_copy.strides() != slot.param.strides()) {
          slot.grad_copy = at::empty_like(slot.param, {}, at::MemoryFormat::Preserve);
        }
        slot.grad_copy.copy_(grad);
        source = &slot.grad_copy;
      }
      t.grad = address(*source);
      t.grad_type = *element_type(*source);
    }
    work.composite.clear();
    work.composite_index.clear();
    for (std::size_t i : work.others) {
      Slot& slot = slots[i];
      const at::Tensor& grad = slot.param.grad();
      if (!grad.defined()) continue;
      work.composite.push_back(
          {slot.param, grad, &slot.state, &groups[slot.group], static_cast<std::uint32_t>(i), slot.first});
      work.composite_index.push_back(i);
    }
    return created;
  }

  // What grad_ready() measured, if that is still the gradient; forgotten once taken.
  static double take_known(Slot& slot, const at::Tensor& grad) {
    const double sum = std::exchange(slot.known_sum, -1);
    if (sum < 0 || !grad.defined() || grad.const_data_ptr() != slot.known_at ||
        (!grad.is_inference() && grad._version() != slot.known_version) ||
        (sum != 0 && bits_at(slot.known_at, grad.element_size(), slot.witness.index) != slot.witness.bits)) {
      return -1;
    }
    return sum;
  }

  void fill_native_groups() {
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const GroupOptions& o = groups[i];
      kernels::TailGroup& g = native_groups[i];
      g.rule = rule_of(algorithm, o);
      g.lr = o.lr_tensor.defined() ? host_scalar(o.lr_tensor, "a learning-rate tensor") : o.lr;
      OXY_CHECK(!std::isnan(g.lr), InvalidArgument, "parameter group ", i,
                " has a learning-rate tensor that holds NaN; set it to a number.");
      g.beta1 = o.beta1;
      g.beta2 = algorithm == Algorithm::RMSprop ? o.alpha : o.beta2;
      g.eps = o.eps;
      g.weight_decay = o.weight_decay;
      g.momentum = o.momentum;
      g.dampening = o.dampening;
      g.lr_decay = o.lr_decay;
      g.nesterov = o.nesterov;
      g.maximize = o.maximize;
    }
  }

  // Gradients that the kernels zeroed through a copy, or that no kernel touched.
  void zero_copied_grads(const Work& work) {
    if (!options.zero_grads) return;
    const at::NoGradGuard no_grad;
    for (std::size_t i : work.planned) {
      Slot& slot = slots[i];
      if (slot.grad_copy.defined() && slot.param.grad().defined() && !readable(slot, slot.param.grad())) {
        slot.param.mutable_grad().zero_();
      }
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
  void step_on_host(Work& work, const StepInputs& in) {
    const bool scaled = in.grad_scale.defined() || in.found_inf.defined();
    const double scale = (in.grad_scale.defined() ? host_scalar(in.grad_scale, "grad_scale") : 1.0) * in.grad_divisor;
    const bool measured = scaled || options.clip_norm > 0 || options.nonfinite != NonFinite::Propagate ||
                          options.collect_stats || in.norm_limit.defined();
    fill_native_groups();
    const kernels::Parallel pool = intra_op_pool();
    double sum = 0;
    if (measured) sum = measure(work, pool, scale);
    const bool finite = std::isfinite(sum) && std::isfinite(1.0 / scale);
    const bool told = in.found_inf.defined() && host_scalar(in.found_inf, "found_inf") != 0;
    const double norm = std::sqrt(sum) / scale;
    *stats.grad_norm.mutable_data_ptr<float>() = static_cast<float>(norm);
    if (!finite && !scaled && options.nonfinite == NonFinite::Raise) raise_nonfinite();
    const bool bad = told || (!finite && (scaled || options.nonfinite != NonFinite::Propagate));
    const bool skip = bad || (in.skip.defined() && host_scalar(in.skip, "skip") != 0) ||
                      (in.norm_limit.defined() && norm > host_scalar(in.norm_limit, "norm_limit"));
    *stats.found_inf.mutable_data_ptr<float>() = bad ? 1.0F : 0.0F;
    *stats.applied.mutable_data_ptr<float>() = skip ? 0.0F : 1.0F;
    if (bad && in.found_inf.defined()) set_host_scalar(in.found_inf, 1.0);
    if (skip) {
      *stats.skipped.mutable_data_ptr<std::int64_t>() += 1;
      if (options.zero_grads) {
        work.plan->zero_gradients(pool);
        const at::NoGradGuard no_grad;
        for (CompositeParam& p : work.composite) p.grad.zero_();
      }
      zero_copied_grads(work);
      return;
    }
    // Written so that a NaN norm, where it is let through, reaches every gradient as in torch.
    double clip = options.clip_norm > 0 ? options.clip_norm / (norm + kClipEpsilon) : 1.0;
    if (clip > 1.0) clip = 1.0;
    kernels::TailSettings settings = base_settings();
    settings.grad_multiplier = clip / scale;
    work.plan->apply(native_groups, settings, pool);
    finish_native(work);
    if (!work.composite.empty()) {
      const at::NoGradGuard no_grad;
      CompositeStep step{algorithm, options, at::scalar_tensor(settings.grad_multiplier, at::kDouble), {}, {}, {}};
      run_composite(work, step);
    }
    reduce_statistics(work);
    zero_copied_grads(work);
  }

  [[nodiscard]] kernels::TailSettings base_settings() const {
    kernels::TailSettings s;
    s.clip_value = options.clip_value;
    s.agc = options.agc;
    s.agc_eps = options.agc_eps;
    s.ema_decay = options.ema_decay;
    s.zero_grad = options.zero_grads;
    s.collect = options.collect_stats;
    s.stochastic = options.stochastic_rounding;
    s.seed = options.seed;
    return s;
  }

  double measure(Work& work, const kernels::Parallel& pool, double scale) {
    double sum = work.plan->measure(
        pool, options.norm_in_backward ? std::span<const double>(work.known) : std::span<const double>());
    float* norms = stats.grad_norms.mutable_data_ptr<float>();
    const auto sums = work.plan->grad_sum_squares();
    for (std::size_t i = 0; i < work.planned.size(); ++i) {
      norms[work.planned[i]] = static_cast<float>(std::sqrt(sums[i]) / scale);
    }
    at::Tensor wide;
    if (!work.composite.empty()) {
      const at::NoGradGuard no_grad;
      wide = composite_grad_norms(work.composite).contiguous();
      const double* values = wide.const_data_ptr<double>();
      for (std::size_t i = 0; i < work.composite.size(); ++i) {
        sum += values[i] * values[i];
        norms[work.composite_index[i]] = static_cast<float>(values[i] / scale);
      }
    }
    if (!reducer) return sum;
    const at::Tensor own = at::zeros({static_cast<std::int64_t>(slots.size())}, at::kDouble);
    double* of_slots = own.mutable_data_ptr<double>();
    for (std::size_t i = 0; i < work.planned.size(); ++i) of_slots[work.planned[i]] = sums[i];
    for (std::size_t i = 0; i < work.composite.size(); ++i) {
      const double value = wide.const_data_ptr<double>()[i];
      of_slots[work.composite_index[i]] = value * value;
    }
    const at::Tensor everywhere = reduced(own);
    sum = 0;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const double value = everywhere.const_data_ptr<double>()[i];
      sum += value;
      norms[i] = static_cast<float>(std::sqrt(value) / scale);
    }
    return sum;
  }

  [[nodiscard]] at::Tensor reduced(const at::Tensor& sums) const {
    const at::Tensor result = reducer(sums);
    OXY_CHECK(result.defined() && result.sizes() == sums.sizes() && result.device() == sums.device(), InvalidArgument,
              "the norm reducer returned a tensor of shape ", result.defined() ? result.sizes() : at::IntArrayRef(),
              "; it must return one of shape ", sums.sizes(), " on ", sums.device(), ".");
    return result.to(sums.scalar_type()).contiguous();
  }

  void finish_native(Work& work) {
    const std::span<const kernels::TailTensor> planned = work.plan->tensors();
    for (std::size_t i = 0; i < work.planned.size(); ++i) {
      if (planned[i].grad == nullptr) continue;
      Slot& slot = slots[work.planned[i]];
      slot.first = false;
      // Autograd must see that a tensor it may have saved was written.
      if (!slot.param.is_inference()) slot.param.unsafeGetTensorImpl()->bump_version();
      note_own_write(slot);
    }
    if (!options.collect_stats) return;
    float* param_norms = stats.param_norms.mutable_data_ptr<float>();
    float* update_norms = stats.update_norms.mutable_data_ptr<float>();
    for (std::size_t i = 0; i < work.planned.size(); ++i) {
      param_norms[work.planned[i]] = static_cast<float>(std::sqrt(work.plan->param_sum_squares()[i]));
      update_norms[work.planned[i]] = static_cast<float>(std::sqrt(work.plan->update_sum_squares()[i]));
    }
  }

  // Norms of parameters and updates over all shards, from those that this step took of its own.
  void reduce_statistics(const Work& work) {
    if (!reducer || !options.collect_stats) return;
    const at::NoGradGuard no_grad;
    std::vector<std::int64_t> stepped;
    for (std::size_t i : work.members) {
      if (slots[i].param.grad().defined()) stepped.push_back(static_cast<std::int64_t>(i));
    }
    const at::Tensor where = at::tensor(stepped, at::kLong).to(device());
    for (at::Tensor* norms : {&stats.param_norms, &stats.update_norms}) {
      at::Tensor sums = at::zeros(norms->sizes(), norms->options().dtype(wide_type(slots.front().param)));
      sums.index_copy_(0, where, norms->index_select(0, where).to(sums.scalar_type()).square());
      norms->index_copy_(0, where, reduced(sums).sqrt().to(at::kFloat).index_select(0, where));
    }
  }

  void run_composite(Work& work, CompositeStep& step) {
    if (options.collect_stats) {
      step.param_norms =
          at::zeros({static_cast<std::int64_t>(work.composite.size())}, at::TensorOptions(at::kFloat).device(device()));
      step.update_norms = at::zeros_like(step.param_norms);
    }
    composite_update(step, work.composite);
    for (std::size_t i = 0; i < work.composite.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const auto to = static_cast<std::int64_t>(work.composite_index[i]);
      Slot& slot = slots[work.composite_index[i]];
      slot.first = false;
      note_own_write(slot);
      if (step.param_norms.defined()) {
        stats.param_norms[to].copy_(step.param_norms[at]);
        stats.update_norms[to].copy_(step.update_norms[at]);
      }
    }
  }

  // Any other device: every value stays there.
  void step_on_device(Work& work, const StepInputs& in) {
    if (work.composite.empty() && !reducer) return;
    const at::NoGradGuard no_grad;
    const bool scaled = in.grad_scale.defined() || in.found_inf.defined();
    const at::Tensor norms = work.composite.empty()
                                 ? at::empty({0}, at::TensorOptions(wide_type(slots.front().param)).device(device()))
                                 : composite_grad_norms(work.composite);
    at::Tensor inverse = in.grad_scale.defined() ? in.grad_scale.to(norms.scalar_type()).reshape({}).reciprocal()
                                                 : at::ones({}, norms.options());
    if (in.grad_divisor != 1) inverse = inverse.div(in.grad_divisor);
    const at::Tensor sum = record_norms(work, norms.square(), inverse);
    const at::Tensor norm = sum.sqrt().mul(inverse);
    at::Tensor bad = sum.mul(inverse).isfinite().logical_not().to(at::kFloat);
    stats.grad_norm.copy_(norm);
    if (!scaled && options.nonfinite == NonFinite::Raise && bad.item<float>() != 0) raise_nonfinite();
    at::Tensor skip;
    if (scaled || options.nonfinite != NonFinite::Propagate) {
      skip = bad;
      if (in.found_inf.defined()) {
        in.found_inf.copy_(at::maximum(in.found_inf, bad.reshape_as(in.found_inf)));
        skip = in.found_inf.reshape({});
      }
      stats.found_inf.copy_(skip);
    }
    const auto also = [&skip](const at::Tensor& reason) {
      const at::Tensor more = reason.to(at::kFloat).reshape({});
      skip = skip.defined() ? at::maximum(skip, more) : more;
    };
    if (in.skip.defined()) also(in.skip.ne(0));
    if (in.norm_limit.defined()) also(norm.gt(in.norm_limit.reshape({})));
    if (skip.defined()) {
      stats.skipped.add_(skip.ne(0));
      stats.applied.copy_(skip.eq(0));
    } else {
      stats.applied.fill_(1);
    }
    at::Tensor multiplier = inverse;
    if (options.clip_norm > 0) {
      multiplier = norm.add(kClipEpsilon).reciprocal().mul(options.clip_norm).clamp_max(1.0).mul(inverse);
    }
    CompositeStep step{algorithm, options, multiplier, skip, {}, {}};
    if (!work.composite.empty()) run_composite(work, step);
    reduce_statistics(work);
  }

  // Writes the norm of each gradient and returns the sum of squares of all, over all shards.
  at::Tensor record_norms(Work& work, const at::Tensor& squares, const at::Tensor& inverse) {
    at::Tensor of_slots = squares;
    if (work.composite.size() != slots.size()) {
      std::vector<std::int64_t> positions(work.composite_index.begin(), work.composite_index.end());
      const at::Tensor where = at::tensor(positions, at::kLong).to(squares.device());
      of_slots = at::zeros({static_cast<std::int64_t>(slots.size())}, squares.options());
      of_slots.index_copy_(0, where, squares);
    }
    if (reducer) of_slots = reduced(of_slots);
    const at::Tensor norms = of_slots.sqrt().mul(inverse);
    stats.grad_norms.copy_(norms);
    return of_slots.sum();
  }

  // A step of one parameter; with step_in_backward norms come one at a time and are shown together by step().
  bool run_alone(std::size_t index, const StepInputs& inputs) {
    Work& work = alone[index];
    if (work.members.empty()) work.members = {index};
    const bool created = run(work, inputs);
    if (options.collect_stats) keep_reported_norm(index);
    return created;
  }

  void keep_reported_norm(std::size_t index) {
    const at::NoGradGuard no_grad;
    const auto at = static_cast<std::int64_t>(index);
    if (!reported_norms.defined() || reported_norms.numel() != stats.grad_norms.numel()) {
      reported_norms = at::zeros_like(stats.grad_norms);
    }
    reported_norms[at].copy_(stats.grad_norms[at]);
  }

  // ---- state from outside

  void check_formats(const at::Tensor& p, const std::string& label) const {
    OXY_CHECK(algorithm != Algorithm::Muon || !p.is_complex(), NotSupported,
              "Muon does not support complex parameters, and ", label, " is of dtype ", p.scalar_type(),
              ". Give it to AdamW.");
    OXY_CHECK(algorithm != Algorithm::Muon || p.dim() == 2, InvalidArgument, "parameter ", label, " has shape ",
              p.sizes(), "; Muon updates matrices. Give other parameters to AdamW.");
    OXY_CHECK(!p.is_complex() || options.state_dtype == StateFormat::Auto, NotSupported, "parameter ", label,
              " is complex (", p.scalar_type(), "); its state cannot be kept as ", name(options.state_dtype),
              ". Leave state_dtype out for its optimizer.");
    OXY_CHECK(!p.is_complex() || !options.stochastic_rounding, NotSupported, "parameter ", label, " is complex (",
              p.scalar_type(), "), which stochastic rounding does not serve. Use an optimizer of its own.");
    OXY_CHECK(options.master_weights != MasterFormat::Int8 || p.scalar_type() != at::kHalf, NotSupported, "parameter ",
              label,
              " is float16; 8-bit residues (master_weights=\"int8\") extend bfloat16. Use bfloat16 or "
              "master_weights=\"fp32\".");
  }

  void check_state(const Slot& slot, const at::Tensor& t, const char* what) const {
    if (!t.defined()) return;
    OXY_CHECK(t.sizes() == slot.param.sizes(), InvalidArgument, "state '", what, "' of parameter ", slot.name,
              " has shape ", t.sizes(), "; the parameter has ", slot.param.sizes(), ".");
    OXY_CHECK(t.device() == slot.param.device(), InvalidArgument, "state '", what, "' of parameter ", slot.name,
              " is on ", t.device(), "; the parameter is on ", slot.param.device(), ".");
  }

  void check_moment(const Slot& slot, const ParamState& state, std::size_t k) const {
    const at::Tensor& t = state.moments[k];
    const Moment& moment = traits(algorithm).moments[k];
    if (!t.defined()) return;
    check_state(slot, t, moment.name);
    const bool is_signed = moment.code == kernels::StateCode::Signed;
    if (!state.scales[k].defined()) {
      OXY_CHECK(at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type()), InvalidType, "state '",
                moment.name, "' of parameter ", slot.name, " is of dtype ", t.scalar_type(),
                "; it must be floating point, or int8 with its scales.");
      return;
    }
    OXY_CHECK(t.scalar_type() == (is_signed ? at::kChar : at::kByte), InvalidType, "state '", moment.name,
              "' of parameter ", slot.name, " has scales but dtype ", t.scalar_type(), "; it must be ",
              is_signed ? "int8." : "uint8.");
    const std::int64_t groups = kernels::state_groups(t.numel());
    OXY_CHECK(state.scales[k].dim() == 1 && state.scales[k].numel() == groups &&
                  state.scales[k].scalar_type() == at::kBFloat16,
              InvalidArgument, "the scales of state '", moment.name, "' of parameter ", slot.name, " have shape ",
              state.scales[k].sizes(), " and dtype ", state.scales[k].scalar_type(), "; they must be bfloat16 [",
              groups, "].");
  }

  // Takes over a state, converted where it is kept in another format; all is checked before anything is changed.
  void adopt(Slot& slot, ParamState state) {
    const AlgorithmTraits& t = traits(algorithm);
    for (std::size_t k = 0; k < kMoments; ++k) {
      OXY_CHECK(t.moments[k].name != nullptr || !state.moments[k].defined(), InvalidArgument, "the state of parameter ",
                slot.name, " has a moment ", k, " that ", t.name, " does not keep; it is of another optimizer.");
      check_moment(slot, state, k);
    }
    check_state(slot, state.ema, "ema");
    check_state(slot, state.master, "master");
    check_state(slot, state.residue, "residue");
    if (algorithm == Algorithm::Adam) {
      const bool first = state.moments[0].defined(), second = state.moments[1].defined();
      OXY_CHECK(first == second, InvalidArgument, "the state of parameter ", slot.name, " has ",
                first ? "exp_avg but lacks exp_avg_sq" : "exp_avg_sq but lacks exp_avg", "; give the whole state.");
    }
    const bool has_moment = std::any_of(state.moments.begin(), state.moments.end(),
                                        [](const at::Tensor& moment) { return moment.defined(); });
    OXY_CHECK(!t.counts_steps || !has_moment || state.step.defined(), InvalidArgument, "the state of parameter ",
              slot.name, " lacks 'step'; give the whole state.");
    if (state.step.defined()) {
      OXY_CHECK(state.step.numel() == 1, InvalidArgument, "state 'step' of parameter ", slot.name, " has ",
                state.step.numel(), " elements; it must have one.");
      if (state.step.device() != slot.param.device()) state.step = state.step.to(slot.param.device());
    }
    const at::NoGradGuard no_grad;
    slot.first = !state.moments[0].defined();
    slot.version = -1;
    std::swap(slot.state, state);
    for (std::size_t k = 0; k < kMoments; ++k) convert_moment(slot, k);
    if (!wants_master(slot)) slot.state.master = at::Tensor();
    if (!wants_residue(slot)) slot.state.residue = at::Tensor();
    if (slot.state.master.defined() && !absent_or_like(slot.state.master, at::kFloat, slot.param)) {
      slot.state.master = empty_like_param(slot, at::kFloat).copy_(slot.state.master);
    }
  }

  void convert_moment(Slot& slot, std::size_t k) const {
    const at::Tensor stored = slot.state.moments[k];
    if (!stored.defined()) return;
    const bool coded = slot.state.scales[k].defined();
    // Auto takes floating-point state as it comes, as torch does.
    if (coded ? options.state_dtype == StateFormat::Int8
              : options.state_dtype == StateFormat::Auto || stored.scalar_type() == moment_type(slot)) {
      return;
    }
    keep_moment(slot, k, coded ? decode_int8(stored, slot.state.scales[k], traits(algorithm).moments[k].code) : stored);
  }

  bool run(Work& work, const StepInputs& inputs) {
    const bool created = gather(work);
    if (device().is_cpu()) {
      step_on_host(work, inputs);
    } else {
      step_on_device(work, inputs);
    }
    return created;
  }
};

StepTail::StepTail(Algorithm algorithm, TailOptions options) : impl_(std::make_unique<Impl>()) {
  check_options(algorithm, options);
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
    impl_->check_formats(p, label);
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
  impl_->all.members.resize(impl_->slots.size());
  std::iota(impl_->all.members.begin(), impl_->all.members.end(), std::size_t{0});
  ++impl_->generation;
}

void StepTail::set_group_options(std::size_t group, const GroupOptions& options) {
  OXY_CHECK(group < impl_->groups.size(), OutOfRange, "there is no parameter group ", group, "; there are ",
            impl_->groups.size(), ".");
  check_group(impl_->algorithm, options, group);
  GroupOptions& current = impl_->groups[group];
  // Which state takes part is written in the plan.
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (wants_moment(impl_->algorithm, current, k) != wants_moment(impl_->algorithm, options, k)) ++impl_->generation;
  }
  current = options;
}

std::size_t StepTail::group_count() const noexcept { return impl_->groups.size(); }
std::size_t StepTail::param_count() const noexcept { return impl_->slots.size(); }
const at::Tensor& StepTail::param(std::size_t index) const { return impl_->slots.at(index).param; }
const std::string& StepTail::param_name(std::size_t index) const { return impl_->slots.at(index).name; }
const ParamState& StepTail::state(std::size_t index) const { return impl_->slots.at(index).state; }

ParamState StepTail::decoded_state(std::size_t index) const {
  ParamState state = impl_->slots.at(index).state;
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (!state.scales[k].defined()) continue;
    state.moments[k] = decode_int8(state.moments[k], state.scales[k], traits(impl_->algorithm).moments[k].code);
    state.scales[k] = at::Tensor();
  }
  return state;
}

void StepTail::set_state(std::size_t index, ParamState state) {
  OXY_CHECK(index < impl_->slots.size(), OutOfRange, "there is no parameter ", index, "; there are ",
            impl_->slots.size(), ".");
  impl_->adopt(impl_->slots[index], std::move(state));
  ++impl_->generation;
}

namespace {

void check_divisor(const StepInputs& inputs) {
  OXY_CHECK(inputs.grad_divisor > 0 && std::isfinite(inputs.grad_divisor), InvalidArgument, "grad_divisor is ",
            inputs.grad_divisor, "; give the number of micro-batches, a finite number above 0.");
}

}  // namespace

bool StepTail::step(const StepInputs& inputs) {
  Impl& impl = *impl_;
  if (impl.slots.empty()) return false;
  OXY_CHECK(impl.displaced.empty(), InvalidState,
            "a step was asked for while the moving averages stand in for the parameters; leave ema_weights() first.");
  const auto check = [&](const at::Tensor& t, const char* what) {
    OXY_CHECK(!t.defined() || (t.numel() == 1 && t.device() == impl.device()), InvalidArgument, what,
              " must be a one-element tensor on ", impl.device(), "; it has ", t.numel(), " elements on ", t.device(),
              ".");
  };
  check(inputs.grad_scale, "grad_scale");
  check(inputs.found_inf, "found_inf");
  check(inputs.skip, "skip");
  check(inputs.norm_limit, "norm_limit");
  check_divisor(inputs);
  if (!impl.options.step_in_backward) return impl.run(impl.all, inputs);
  OXY_CHECK(!inputs.grad_scale.defined() && !inputs.found_inf.defined() && !inputs.skip.defined() &&
                !inputs.norm_limit.defined(),
            NotSupported,
            "step_in_backward cannot serve a loss scale or a condition on the whole step: the parameters were updated "
            "as their gradients arrived. Use an optimizer without it.");
  // What no hook reported is updated now.
  bool created = false;
  for (std::size_t i = 0; i < impl.slots.size(); ++i) {
    if (impl.slots[i].param.grad().defined()) created = impl.run_alone(i, inputs) || created;
  }
  if (impl.options.collect_stats && impl.reported_norms.defined()) {
    const at::NoGradGuard no_grad;
    impl.stats.grad_norm.copy_(impl.reported_norms.norm());
    impl.stats.grad_norms.copy_(impl.reported_norms);
    impl.reported_norms.zero_();
  }
  return created;
}

bool StepTail::grad_ready(std::size_t index, double grad_divisor) {
  Impl& impl = *impl_;
  OXY_CHECK(index < impl.slots.size(), OutOfRange, "there is no parameter ", index, "; there are ", impl.slots.size(),
            ".");
  Slot& slot = impl.slots[index];
  const at::Tensor& grad = slot.param.grad();
  if (!grad.defined()) return false;
  if (impl.options.norm_in_backward) {
    slot.known_sum = -1;
    if (!slot.param.is_cpu() || !Impl::readable(slot, grad)) return false;
    slot.known_sum = kernels::sum_squares(address(grad), *element_type(grad), grad.numel(), intra_op_pool());
    slot.known_at = grad.const_data_ptr();
    slot.known_version = grad.is_inference() ? -1 : grad._version();
    slot.witness = find_witness(grad);
    if (slot.known_sum != 0 && slot.witness.bits == 0) slot.known_sum = -1;
    return false;
  }
  OXY_CHECK(impl.options.step_in_backward, InvalidState,
            "grad_ready() was called on a tail without norm_in_backward or step_in_backward; set one of them.");
  OXY_CHECK(impl.displaced.empty(), InvalidState,
            "a step was asked for while the moving averages stand in for the parameters; leave ema_weights() first.");
  StepInputs inputs;
  inputs.grad_divisor = grad_divisor;
  check_divisor(inputs);
  const bool created = impl.run_alone(index, inputs);
  slot.param.mutable_grad().reset();
  return created;
}

void StepTail::set_norm_reducer(NormReducer reducer) {
  OXY_CHECK(!impl_->options.norm_in_backward && !impl_->options.step_in_backward, NotSupported,
            "a norm over shards needs all gradients at once; use the optimizer without norm_in_backward and "
            "step_in_backward.");
  impl_->reducer = std::move(reducer);
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
    if (!slot.state.ema.defined()) continue;
    slot.param.copy_(slot.state.ema);
    impl_->note_own_write(slot);
  }
}

void StepTail::restore_parameters() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < impl_->displaced.size(); ++i) {
    if (!impl_->displaced[i].defined()) continue;
    impl_->slots[i].param.copy_(impl_->displaced[i]);
    impl_->note_own_write(impl_->slots[i]);
  }
  impl_->displaced.clear();
}

bool StepTail::native() const noexcept {
  return impl_->all.generation == impl_->generation && impl_->all.others.empty();
}

std::int64_t StepTail::bytes_per_step() const noexcept {
  if (!impl_->all.plan) return 0;
  const TailOptions& o = impl_->options;
  const bool measured =
      !o.norm_in_backward && (o.clip_norm > 0 || o.nonfinite != NonFinite::Propagate || o.collect_stats);
  const kernels::TailSettings settings = impl_->base_settings();
  std::int64_t bytes = 0;
  for (const kernels::TailTensor& t : impl_->all.plan->tensors()) bytes += kernels::step_bytes(t, settings, measured);
  return bytes;
}

}  // namespace oxytorch::optim
