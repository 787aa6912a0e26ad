#include "optim/slot.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "optim/composite.h"
#include "optim/dense.h"
#include "optim/formats.h"
#include "oxytorch/error.h"
#include "oxytorch/kernels/codec.h"

namespace oxytorch::optim {
namespace {

bool is_16_bit(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

bool wants_master(const Recipe& recipe, const Slot& slot) {
  return recipe.options.master_weights == MasterFormat::Float32 && is_16_bit(slot.type);
}

bool wants_low_bits(const Recipe& recipe, const Slot& slot) {
  return recipe.options.master_weights == MasterFormat::Int8 && slot.type == at::kBFloat16;
}

bool wants_copy(const Recipe& recipe, const Slot& slot) {
  return recipe.options.copy_dtype && *recipe.options.copy_dtype != slot.type && at::isFloatingType(slot.type);
}

// The dtype of a moment; kChar stands for both kinds of 8-bit code.
at::ScalarType moment_type(const Recipe& recipe, const Slot& slot) {
  switch (recipe.options.state_dtype) {
    case StateFormat::Float32: return at::kFloat;
    case StateFormat::BFloat16: return at::kBFloat16;
    case StateFormat::Int8: return at::kChar;
    case StateFormat::Auto: break;
  }
  return wants_master(recipe, slot) || wants_low_bits(recipe, slot) ? at::kFloat : slot.type;
}

at::Tensor empty_like_param(const Slot& slot, at::ScalarType type) {
  return at::empty_like(slot.param, slot.param.options().dtype(type), at::MemoryFormat::Preserve);
}

// Stores `values` as moment `k` in the dtype that the options ask for.
void keep_moment(const Recipe& recipe, Slot& slot, std::size_t k, const at::Tensor& values) {
  const kernels::StateCode code = traits(recipe.algorithm).moments[k].code;
  const at::ScalarType type = moment_type(recipe, slot);
  if (type == at::kChar) {
    const at::Tensor like = empty_like_param(slot, at::kChar);  // its layout alone counts
    std::tie(slot.state.moments[k], slot.state.scales[k]) = encode_int8(values, code, like, std::nullopt);
    slot.code_strides[k] = like.strides().vec();
    return;
  }
  slot.state.scales[k] = at::Tensor();
  slot.state.moments[k] = same_layout(values, slot.param) && values.scalar_type() == type
                              ? values
                              : empty_like_param(slot, type).copy_(values);
}

void convert_moment(const Recipe& recipe, Slot& slot, std::size_t k) {
  const at::Tensor stored = slot.state.moments[k];
  if (!stored.defined()) return;
  const bool coded = slot.state.scales[k].defined();
  // Auto takes floating-point state as it comes, as torch does.
  if (coded ? recipe.options.state_dtype == StateFormat::Int8
            : recipe.options.state_dtype == StateFormat::Auto || stored.scalar_type() == moment_type(recipe, slot)) {
    return;
  }
  keep_moment(recipe, slot, k,
              coded ? decode_int8(stored, slot.state.scales[k], traits(recipe.algorithm).moments[k].code) : stored);
}

// The bytes that a tensor's elements reach up to.
std::size_t bytes_needed(const at::Tensor& t) {
  std::int64_t last = t.storage_offset();
  for (std::int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return t.numel() == 0 ? 0 : static_cast<std::size_t>(last + 1) * t.element_size();
}

void check_memory(const Slot& slot, const at::Tensor& t, const char* what) {
  OXY_CHECK(t.layout() == at::kStrided, InvalidState, "state '", what, "' of parameter ", slot.name, " is of layout ",
            t.layout(), "; it must be dense.");
  OXY_CHECK(t.storage().nbytes() >= bytes_needed(t), InvalidState, "the memory of state '", what, "' of parameter ",
            slot.name, " was freed: its storage holds ", t.storage().nbytes(), " bytes of ", bytes_needed(t),
            "; restore it before the step.");
}

void check_floating(const Slot& slot, const at::Tensor& t, const char* what, const char* or_else = "") {
  const bool is_complex = slot.param.is_complex();
  OXY_CHECK(!t.defined() || (is_complex ? t.is_complex() : at::isFloatingType(t.scalar_type())), InvalidType, "state '",
            what, "' of parameter ", slot.name, " is of dtype ", t.scalar_type(), "; it must be ",
            is_complex ? "complex" : "floating point", or_else, ".");
}

void check_state(const Slot& slot, const at::Tensor& t, const char* what) {
  if (!t.defined()) return;
  check_memory(slot, t, what);
  OXY_CHECK(t.sizes() == slot.param.sizes(), InvalidArgument, "state '", what, "' of parameter ", slot.name,
            " has shape ", t.sizes(), "; the parameter has ", slot.param.sizes(), ".");
  OXY_CHECK(t.device() == slot.param.device(), InvalidArgument, "state '", what, "' of parameter ", slot.name,
            " is on ", t.device(), "; the parameter is on ", slot.param.device(), ".");
}

// Codes and low bits are read in the order of memory.
void check_dense(const Slot& slot, const at::Tensor& t, const std::string& what) {
  OXY_CHECK(t.is_non_overlapping_and_dense(), InvalidArgument, "state '", what, "' of parameter ", slot.name,
            " is a view with strides ", t.strides(),
            " that leave gaps or overlap; give it without gaps, as by "
            "contiguous().");
}

void check_moment(const Recipe& recipe, const Slot& slot, const ParamState& state, std::size_t k) {
  const at::Tensor& t = state.moments[k];
  const Moment& moment = traits(recipe.algorithm).moments[k];
  if (!t.defined()) return;
  check_state(slot, t, moment.name);
  const bool is_signed = moment.code == kernels::StateCode::Signed;
  if (!state.scales[k].defined()) return check_floating(slot, t, moment.name, ", or int8 with its scales");
  OXY_CHECK(t.scalar_type() == (is_signed ? at::kChar : at::kByte), InvalidType, "state '", moment.name,
            "' of parameter ", slot.name, " has scales but dtype ", t.scalar_type(), "; it must be ",
            is_signed ? "int8." : "uint8.");
  check_dense(slot, t, moment.name);
  const at::Tensor& scales = state.scales[k];
  const std::int64_t groups = kernels::state_groups(t.numel());
  OXY_CHECK(scales.dim() == 1 && scales.numel() == groups && scales.scalar_type() == at::kBFloat16 &&
                scales.device() == slot.param.device(),
            InvalidArgument, "the scales of state '", moment.name, "' of parameter ", slot.name, " have shape ",
            scales.sizes(), " and dtype ", scales.scalar_type(), " on ", scales.device(), "; they must be bfloat16 [",
            groups, "] on ", slot.param.device(), ".");
  check_memory(slot, scales, moment.name);
}

// All of a state, before anything is done with it.
void check_entries(const Recipe& recipe, const Slot& slot, const ParamState& state) {
  const AlgorithmTraits& t = traits(recipe.algorithm);
  for (std::size_t k = 0; k < kMoments; ++k) {
    OXY_CHECK(t.moments[k].name != nullptr || !state.moments[k].defined(), InvalidArgument, "the state of parameter ",
              slot.name, " has a moment ", k, " that ", t.name, " does not keep; it is of another optimizer.");
    check_moment(recipe, slot, state, k);
  }
  check_state(slot, state.ema, "ema");
  check_floating(slot, state.ema, "ema");
  check_state(slot, state.master, "master");
  check_floating(slot, state.master, "master");
  check_state(slot, state.low_bits, "low_bits");
  check_state(slot, state.copy, "copy");
  if (state.low_bits.defined()) {
    OXY_CHECK(state.low_bits.scalar_type() == at::kChar, InvalidType, "state 'low_bits' of parameter ", slot.name,
              " is of dtype ", state.low_bits.scalar_type(), "; it must be int8.");
    check_dense(slot, state.low_bits, "low_bits");
  }
  OXY_CHECK(
      !state.copy.defined() || !recipe.options.copy_dtype || state.copy.scalar_type() == *recipe.options.copy_dtype,
      InvalidType, "the copy of parameter ", slot.name, " is of dtype ", state.copy.scalar_type(),
      "; the optimizer keeps it as ", *recipe.options.copy_dtype, ".");
  if (recipe.algorithm == Algorithm::Adam) {
    const bool first = state.moments[0].defined(), second = state.moments[1].defined();
    OXY_CHECK(first == second, InvalidArgument, "the state of parameter ", slot.name, " has ",
              first ? "exp_avg but lacks exp_avg_sq" : "exp_avg_sq but lacks exp_avg", "; give the whole state.");
  }
  const bool has_moment = std::any_of(state.moments.begin(), state.moments.end(),
                                      [](const at::Tensor& moment) { return moment.defined(); });
  OXY_CHECK(!t.counts_steps || !has_moment || state.step.defined(), InvalidArgument, "the state of parameter ",
            slot.name, " lacks 'step'; give the whole state.");
  if (!state.step.defined()) return;
  check_memory(slot, state.step, "step");
  OXY_CHECK(state.step.numel() == 1, InvalidArgument, "state 'step' of parameter ", slot.name, " has ",
            state.step.numel(), " elements; it must have one.");
  OXY_CHECK(!state.step.is_complex(), InvalidType, "state 'step' of parameter ", slot.name, " is of dtype ",
            state.step.scalar_type(), "; it must be a real number.");
}

// Gives a tensor other memory. It stays the same object, which a state_dict or the user may hold.
void exchange(const at::Tensor& tensor, const at::Tensor& with) { tensor.set_data(with); }

void lay_out(const Slot& slot, const at::Tensor& tensor) {
  if (!tensor.defined() || same_layout(tensor, slot.param)) return;
  exchange(tensor, empty_like_param(slot, tensor.scalar_type()).copy_(tensor));
}

// A coded moment as its scales, which follow the order in memory, were written for.
at::Tensor codes_in_order(const Slot& slot, std::size_t k) {
  const at::Tensor& codes = slot.state.moments[k];
  const std::vector<std::int64_t>& strides = slot.code_strides[k];
  if (codes.strides() == at::IntArrayRef(strides)) return codes;
  return at::empty_strided(codes.sizes(), strides, codes.options()).copy_(codes);
}

// Brings codes that somebody laid out anew back to the order of their scales.
void keep_order(const Slot& slot, std::size_t k) {
  const at::Tensor ordered = codes_in_order(slot, k);
  if (!ordered.is_same(slot.state.moments[k])) exchange(slot.state.moments[k], ordered);
}

// False where the order is not known, or the codes are no longer whole.
bool can_be_ordered(const Slot& slot, std::size_t k) {
  const at::Tensor& codes = slot.state.moments[k];
  return slot.state.scales[k].defined() && codes.defined() && codes.layout() == at::kStrided &&
         slot.code_strides[k].size() == static_cast<std::size_t>(codes.dim()) && codes.sizes() == slot.param.sizes() &&
         codes.storage().nbytes() >= bytes_needed(codes);
}

void lay_out_codes(const Recipe& recipe, Slot& slot, std::size_t k) {
  const at::Tensor &codes = slot.state.moments[k], &scales = slot.state.scales[k];
  const at::Tensor ordered = codes_in_order(slot, k);
  if (same_layout(ordered, slot.param)) {
    if (!ordered.is_same(codes)) exchange(codes, ordered);
    if (!scales.is_contiguous()) exchange(scales, scales.contiguous());
    return;
  }
  const at::Tensor like = empty_like_param(slot, codes.scalar_type());
  const auto [made, scaled] =
      encode_int8(decoded_moment(recipe, slot, k), traits(recipe.algorithm).moments[k].code, like, std::nullopt);
  exchange(codes, made);
  exchange(scales, scaled);
  slot.code_strides[k] = like.strides().vec();
}

}  // namespace

void TensorSignature::remember(const at::Tensor& param, const at::Tensor& grad) {
  if (!grad.defined()) return forget();
  grad_keys_ = grad.key_set();
  grad_type_ = grad.dtype();
  numel_ = static_cast<std::size_t>(param.numel());
  grad_bytes_ = numel_ == 0 ? 0 : grad.element_size();
  device_ = param.device();
  shape_ = param.unsafeGetTensorImpl()->sizes_and_strides();
}

bool wants(const Recipe& recipe, const Slot& slot, std::size_t moment) {
  return wants_moment(recipe.algorithm, recipe.groups[slot.group], moment);
}

bool complete(const Recipe& recipe, const Slot& slot) {
  const ParamState& state = slot.state;
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (wants(recipe, slot, k) && !state.moments[k].defined()) return false;
  }
  return (!recipe.counts_steps() || state.step.defined()) && (!wants_master(recipe, slot) || state.master.defined()) &&
         (!wants_low_bits(recipe, slot) || state.low_bits.defined()) &&
         (!wants_copy(recipe, slot) || state.copy.defined()) && (recipe.options.ema_decay == 0 || state.ema.defined());
}

void create_state(const Recipe& recipe, Slot& slot) {
  const at::NoGradGuard no_grad;
  ParamState& state = slot.state;
  if (recipe.counts_steps() && !state.step.defined()) {
    // torch keeps the counter in the default dtype if that is fp64, else in fp32.
    const bool wide = c10::typeMetaToScalarType(at::get_default_dtype()) == at::kDouble;
    state.step = at::zeros({}, at::TensorOptions(wide ? at::kDouble : at::kFloat).device(slot.param.device()));
  }
  if (wants_master(recipe, slot) && !state.master.defined())
    state.master = empty_like_param(slot, at::kFloat).copy_(slot.param);
  if (wants_low_bits(recipe, slot) && !state.low_bits.defined())
    state.low_bits = empty_like_param(slot, at::kChar).zero_();
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (!wants(recipe, slot, k) || state.moments[k].defined()) continue;
    const double start =
        recipe.algorithm == Algorithm::Adagrad ? recipe.groups[slot.group].initial_accumulator_value : 0.0;
    // 8 bits cannot hold a complex number's parts; such parameters are refused when they are added.
    const at::ScalarType type = moment_type(recipe, slot) == at::kChar ? at::kFloat : moment_type(recipe, slot);
    at::Tensor made = empty_like_param(slot, type);
    (made.is_complex() ? at::view_as_real(made) : made).fill_(start);
    keep_moment(recipe, slot, k, made);
    if (k == 0) slot.first = true;
  }
  if (wants_copy(recipe, slot) && !state.copy.defined()) {
    state.copy = empty_like_param(slot, *recipe.options.copy_dtype).copy_(slot.param);
  }
  if (recipe.options.ema_decay != 0 && !state.ema.defined()) {
    state.ema = empty_like_param(slot, compute_type(slot.type)).copy_(slot.param);
  }
}

void adopt_state(const Recipe& recipe, Slot& slot, ParamState state) {
  const bool sparse = state.moments[0].defined() && state.moments[0].is_sparse();
  for (at::Tensor& moment : state.moments) {
    if (moment.defined() && moment.is_sparse()) moment = moment.detach().to_dense();
  }
  check_entries(recipe, slot, state);
  if (state.step.defined() && state.step.device() != slot.param.device()) {
    state.step = state.step.to(slot.param.device());
  }
  const at::NoGradGuard no_grad;
  slot.first = !state.moments[0].defined();
  slot.sparse = sparse || (slot.sparse && !slot.first);
  slot.version = -1;
  std::swap(slot.state, state);
  for (std::size_t k = 0; k < kMoments; ++k) {
    // Codes that the slot holds already may have been laid out anew; their scales were not.
    const bool held = slot.state.scales[k].defined() && state.scales[k].defined() &&
                      slot.state.moments[k].is_same(state.moments[k]) && can_be_ordered(slot, k);
    if (held) {
      keep_order(slot, k);
    } else if (slot.state.scales[k].defined()) {
      slot.code_strides[k] = slot.state.moments[k].strides().vec();
    }
    convert_moment(recipe, slot, k);
  }
  if (!wants_master(recipe, slot)) slot.state.master = at::Tensor();
  if (!wants_low_bits(recipe, slot)) slot.state.low_bits = at::Tensor();
  if (slot.state.master.defined() && slot.state.master.scalar_type() != at::kFloat) {
    slot.state.master = empty_like_param(slot, at::kFloat).copy_(slot.state.master);
  }
  conform_state(recipe, slot);
}

void conform_state(const Recipe& recipe, Slot& slot) {
  check_entries(recipe, slot, slot.state);
  const at::NoGradGuard no_grad;
  ParamState& state = slot.state;
  // State of a parameter that is a view with gaps has an order of its own, which the operators do not mind.
  const bool dense = slot.param.is_non_overlapping_and_dense();
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (state.scales[k].defined()) {
      dense ? lay_out_codes(recipe, slot, k) : keep_order(slot, k);
    } else if (dense) {
      lay_out(slot, state.moments[k]);
    }
  }
  if (!dense) return;
  for (const at::Tensor* entry : {&state.master, &state.low_bits, &state.ema, &state.copy}) lay_out(slot, *entry);
}

void order_codes(const Slot& slot) {
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < kMoments; ++k) {
    if (can_be_ordered(slot, k)) keep_order(slot, k);
  }
}

at::Tensor decoded_moment(const Recipe& recipe, const Slot& slot, std::size_t k) {
  return decode_int8(codes_in_order(slot, k), slot.state.scales[k].contiguous(),
                     traits(recipe.algorithm).moments[k].code);
}

void note_sparse(const Recipe& recipe, Slot& slot, const at::Tensor& grad) {
  slot.sparse = grad.is_sparse() && (slot.first || slot.sparse || recipe.groups[slot.group].nesterov);
}

void follow_outside_writes(Slot& slot) {
  const std::int64_t version = slot.param.is_inference() ? 0 : slot.param._version();
  const std::int64_t last = std::exchange(slot.version, version);
  const void* const here = address(slot.param);
  const bool moved = std::exchange(slot.place, here) != here;
  if (version == last && !moved) return;
  const at::NoGradGuard no_grad;
  if (slot.state.master.defined()) {
    const at::Tensor& master = slot.state.master;
    master.copy_(at::where(master.to(slot.type).eq(slot.param), master, slot.param));
  } else if (last != -1 && version != last) {
    slot.state.low_bits.zero_();
  }
}

void note_own_write(Slot& slot) {
  if (!has_masters(slot)) return;
  if (!slot.param.is_inference()) slot.version = slot.param._version();
  slot.place = address(slot.param);
}

void check_formats(const Recipe& recipe, const at::Tensor& p, const std::string& label) {
  OXY_CHECK(recipe.algorithm != Algorithm::Muon || !p.is_complex(), NotSupported,
            "Muon does not support complex parameters, and ", label, " is of dtype ", p.scalar_type(),
            ". Give it to AdamW.");
  OXY_CHECK(recipe.algorithm != Algorithm::Muon || p.dim() == 2, InvalidArgument, "parameter ", label, " has shape ",
            p.sizes(), "; Muon updates matrices. Give other parameters to AdamW.");
  OXY_CHECK(!p.is_complex() || recipe.options.state_dtype == StateFormat::Auto, NotSupported, "parameter ", label,
            " is complex (", p.scalar_type(), "); its state cannot be kept as ", name(recipe.options.state_dtype),
            ". Leave state_dtype out for its optimizer.");
  OXY_CHECK(!p.is_complex() || !recipe.options.stochastic_rounding, NotSupported, "parameter ", label, " is complex (",
            p.scalar_type(), "), which stochastic rounding does not serve. Use an optimizer of its own.");
  OXY_CHECK(recipe.options.master_weights != MasterFormat::Int8 || p.scalar_type() != at::kHalf, NotSupported,
            "parameter ", label,
            " is float16; 8 low bits (master_weights=\"int8\") extend bfloat16. Use bfloat16 or "
            "master_weights=\"fp32\".");
}

bool changes_rows_alone(const Recipe& recipe, const Slot& slot, const at::Tensor& grad) {
  const TailOptions& o = recipe.options;
  const GroupOptions& g = recipe.groups[slot.group];
  const ParamState& s = slot.state;
  return recipe.algorithm == Algorithm::SGD && g.momentum == 0 && g.weight_decay == 0 && grad.sparse_dim() == 1 &&
         !slot.param.is_complex() && o.agc == 0 && !o.collect_stats && !o.zero_grads && !o.stochastic_rounding &&
         !s.master.defined() && !s.low_bits.defined() && !s.ema.defined() && !s.copy.defined();
}

void check_param(const Recipe& recipe, const Slot& slot, const at::Tensor& grad) {
  const at::Tensor& p = slot.param;
  OXY_CHECK(p.sizes() == at::IntArrayRef(slot.sizes), InvalidState, "parameter ", slot.name, " had shape ",
            at::IntArrayRef(slot.sizes), " when the optimizer was built and now has ", p.sizes(),
            "; build a new optimizer after changing a parameter's shape.");
  OXY_CHECK(p.scalar_type() == slot.type, InvalidState, "parameter ", slot.name, " was of dtype ", slot.type,
            " when the optimizer was built and is now ", p.scalar_type(),
            "; convert the model first and build the optimizer after.");
  OXY_CHECK(p.device() == slot.device, InvalidState, "parameter ", slot.name, " was on ", slot.device,
            " when the optimizer was built and is now on ", p.device(),
            "; move the model first and build the optimizer after.");
  // As in torch.optim. Where a zero gradient moves averages or weights, a row left out would be another algorithm's.
  const bool takes_sparse = recipe.algorithm == Algorithm::SGD || recipe.algorithm == Algorithm::Adagrad;
  OXY_CHECK(grad.layout() == at::kStrided || (grad.layout() == at::kSparse && takes_sparse), NotSupported, "parameter ",
            slot.name, " has a sparse gradient (layout ", grad.layout(),
            "); use torch.optim.SparseAdam, or sparse=False in the embedding.");
  OXY_CHECK(grad.sizes() == p.sizes(), InvalidState, "parameter ", slot.name, " has shape ", p.sizes(),
            " but its gradient ", grad.sizes(), "; clear the gradients after changing a parameter.");
  OXY_CHECK(p.storage().nbytes() >= bytes_needed(p), InvalidState, "the memory of parameter ", slot.name,
            " was freed: its storage holds ", p.storage().nbytes(), " bytes of ", bytes_needed(p),
            "; restore it before the step.");
  if (grad.layout() != at::kStrided) return;
  OXY_CHECK(grad.storage().nbytes() >= bytes_needed(grad), InvalidState, "the memory of the gradient of parameter ",
            slot.name, " was freed: its storage holds ", grad.storage().nbytes(), " bytes of ", bytes_needed(grad),
            "; clear the gradient or compute it anew.");
}

}  // namespace oxytorch::optim
