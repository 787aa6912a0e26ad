#include "optim/algorithm.h"

#include <algorithm>
#include <cmath>

#include "oxytorch/error.h"

namespace oxytorch::optim {
namespace {

using enum kernels::StateCode;

// Order of Algorithm.
constexpr AlgorithmTraits kTraits[] = {
    {"Adam", true, {{"exp_avg", Signed}, {"exp_avg_sq", Unsigned}, {"max_exp_avg_sq", Unsigned}}},
    {"SGD", false, {{"momentum_buffer", Signed}, {}, {}}},
    {"Lion", false, {{"exp_avg", Signed}, {}, {}}},
    {"Adagrad", true, {{}, {"sum", Unsigned}, {}}},
    {"RMSprop", true, {{"momentum_buffer", Signed}, {"square_avg", Unsigned}, {"grad_avg", Signed}}},
    {"Muon", false, {{"momentum_buffer", Signed}, {}, {}}},
};

struct GroupCheck {
  const GroupOptions& options;
  std::size_t group;

  void require(bool ok, const char* what, double value, const char* allowed) const {
    OXY_CHECK(ok, InvalidArgument, "parameter group ", group, " has ", what, " = ", value, "; it must be ", allowed,
              ".");
  }
  void at_least_0(const char* what, double value) const {
    require(value >= 0 && std::isfinite(value), what, value, "a finite number of at least 0");
  }
  void below_1(const char* what, double value) const { require(value >= 0 && value < 1, what, value, "in [0, 1)"); }
};

}  // namespace

const AlgorithmTraits& traits(Algorithm algorithm) noexcept { return kTraits[static_cast<std::size_t>(algorithm)]; }

std::array<const char*, 3> moment_names(Algorithm algorithm) noexcept {
  const AlgorithmTraits& t = traits(algorithm);
  return {t.moments[0].name, t.moments[1].name, t.moments[2].name};
}

bool wants_moment(Algorithm algorithm, const GroupOptions& o, std::size_t index) noexcept {
  switch (algorithm) {
    case Algorithm::Adam: return index < 2 || o.amsgrad;
    case Algorithm::SGD: return index == 0 && o.momentum != 0;
    case Algorithm::Lion:
    case Algorithm::Muon: return index == 0;
    case Algorithm::Adagrad: return index == 1;
    case Algorithm::RMSprop: return index == 1 || (index == 0 && o.momentum != 0) || (index == 2 && o.centered);
  }
  return false;
}

kernels::Rule rule_of(Algorithm algorithm, const GroupOptions& o) noexcept {
  switch (algorithm) {
    case Algorithm::Adam: return o.decoupled_weight_decay ? kernels::Rule::AdamW : kernels::Rule::Adam;
    case Algorithm::Lion: return kernels::Rule::Lion;
    case Algorithm::Adagrad: return kernels::Rule::Adagrad;
    case Algorithm::RMSprop: return kernels::Rule::RmsProp;
    default: return kernels::Rule::Sgd;
  }
}

void check_group(Algorithm algorithm, const GroupOptions& o, std::size_t group) {
  const GroupCheck check{o, group};
  if (o.lr_tensor.defined()) {
    OXY_CHECK(o.lr_tensor.numel() == 1, InvalidArgument, "parameter group ", group, " has a learning-rate tensor of ",
              o.lr_tensor.numel(), " elements; it must have one.");
  } else {
    check.at_least_0("lr", o.lr);
  }
  check.at_least_0("weight_decay", o.weight_decay);
  if (algorithm != Algorithm::SGD && algorithm != Algorithm::Lion) check.at_least_0("eps", o.eps);
  switch (algorithm) {
    case Algorithm::SGD:
      check.at_least_0("momentum", o.momentum);
      check.require(std::isfinite(o.dampening), "dampening", o.dampening, "finite");
      break;
    case Algorithm::Adam:
    case Algorithm::Lion:
      check.below_1("betas[0]", o.beta1);
      check.below_1("betas[1]", o.beta2);
      break;
    case Algorithm::Adagrad:
      check.at_least_0("lr_decay", o.lr_decay);
      check.at_least_0("initial_accumulator_value", o.initial_accumulator_value);
      break;
    case Algorithm::RMSprop:
      check.at_least_0("alpha", o.alpha);
      check.at_least_0("momentum", o.momentum);
      break;
    case Algorithm::Muon:
      check.at_least_0("momentum", o.momentum);
      check.require(o.ns_steps >= 0 && o.ns_steps < 100, "ns_steps", static_cast<double>(o.ns_steps), "in [0, 100)");
      break;
  }
}

void check_options(Algorithm algorithm, const TailOptions& o) {
  const auto limit = [](const char* what, double value) {
    OXY_CHECK(value >= 0 && std::isfinite(value), InvalidArgument, what, " is ", value,
              "; give a finite number above 0, or leave it out for no clipping.");
  };
  limit("clip_norm", o.clip_norm);
  limit("clip_value", o.clip_value);
  limit("agc", o.agc);
  OXY_CHECK((o.clip_norm > 0) + (o.clip_value > 0) + (o.agc > 0) <= 1, InvalidArgument,
            "more than one kind of clipping is set (clip_norm ", o.clip_norm, ", clip_value ", o.clip_value, ", agc ",
            o.agc, "); choose one.");
  OXY_CHECK(o.agc_eps > 0 && std::isfinite(o.agc_eps), InvalidArgument, "agc_eps is ", o.agc_eps,
            "; give a finite number above 0.");
  OXY_CHECK(o.ema_decay >= 0 && o.ema_decay < 1, InvalidArgument, "ema_decay is ", o.ema_decay,
            "; give a number in [0, 1), or leave it out for no moving average.");
  OXY_CHECK(!o.copy_dtype || *o.copy_dtype == at::kBFloat16 || *o.copy_dtype == at::kHalf, InvalidType,
            "copy_dtype is ", *o.copy_dtype, "; use bfloat16 or float16.");
  OXY_CHECK(!o.norm_in_backward || !o.step_in_backward, InvalidArgument,
            "norm_in_backward and step_in_backward exclude each other: the norm is known only when every gradient is "
            "there, and by then each parameter was updated. Choose one.");
  if (!o.step_in_backward) return;
  OXY_CHECK(o.clip_norm == 0, NotSupported, "step_in_backward cannot clip by global norm (clip_norm = ", o.clip_norm,
            "): parameters are updated before the last gradient is known. Use clip_value or agc, or norm_in_backward.");
  OXY_CHECK(o.nonfinite == NonFinite::Propagate, NotSupported,
            "step_in_backward cannot skip a whole step for inf or NaN (nonfinite = \"", name(o.nonfinite),
            "\"): parameters are updated before the last gradient is known. Say nonfinite=\"propagate\" to accept it.");
  OXY_CHECK(algorithm != Algorithm::Muon, NotSupported,
            "step_in_backward is not served for Muon, whose matrices are worked on together. Use it without.");
}

double muon_rate_factor(AdjustLr adjust, std::int64_t rows, std::int64_t columns) noexcept {
  const auto a = static_cast<double>(rows), b = static_cast<double>(columns);
  return adjust == AdjustLr::Original ? std::sqrt(std::max(1.0, a / b)) : 0.2 * std::sqrt(std::max(a, b));
}

bool GroupOptions::operator==(const GroupOptions& o) const {
  return lr == o.lr && lr_tensor.is_same(o.lr_tensor) && beta1 == o.beta1 && beta2 == o.beta2 && eps == o.eps &&
         weight_decay == o.weight_decay && momentum == o.momentum && dampening == o.dampening && alpha == o.alpha &&
         lr_decay == o.lr_decay && initial_accumulator_value == o.initial_accumulator_value &&
         ns_coefficients == o.ns_coefficients && ns_steps == o.ns_steps && adjust_lr == o.adjust_lr &&
         nesterov == o.nesterov && centered == o.centered && decoupled_weight_decay == o.decoupled_weight_decay &&
         amsgrad == o.amsgrad && maximize == o.maximize;
}

namespace {

// The enumerator of `names` (in the order of the enum) that `text` spells.
template <class Enum, std::size_t kCount>
Enum parse(const std::string& text, const char* what, const char* const (&names)[kCount]) {
  std::string known;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (text == names[i]) return static_cast<Enum>(i);
    known += std::string(i == 0 ? "'" : i + 1 == kCount ? " or '" : ", '") + names[i] + "'";
  }
  detail::raise(ErrorCode::InvalidArgument, "unknown ", what, " '", text, "'; use ", known, ".");
}

constexpr const char* kNonFinite[] = {"skip", "raise", "propagate"};
constexpr const char* kStateFormats[] = {"auto", "fp32", "bf16", "int8"};
constexpr const char* kMasterFormats[] = {"none", "fp32", "int8"};

}  // namespace

NonFinite parse_nonfinite(const std::string& text) { return parse<NonFinite>(text, "non-finite policy", kNonFinite); }
const char* name(NonFinite policy) noexcept { return kNonFinite[static_cast<std::size_t>(policy)]; }
StateFormat parse_state_format(const std::string& text) {
  return parse<StateFormat>(text, "state_dtype", kStateFormats);
}
const char* name(StateFormat format) noexcept { return kStateFormats[static_cast<std::size_t>(format)]; }
MasterFormat parse_master_format(const std::string& text) {
  return parse<MasterFormat>(text, "master_weights", kMasterFormats);
}
const char* name(MasterFormat format) noexcept { return kMasterFormats[static_cast<std::size_t>(format)]; }

}  // namespace oxytorch::optim
