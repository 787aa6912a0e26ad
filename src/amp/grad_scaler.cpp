#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/optim.h"

namespace oxytorch::amp {

namespace {

void check_scale(double scale, const char* what) {
  OXY_CHECK(scale > 0 && std::isfinite(scale), InvalidArgument, what, " is ", scale, ", expected above 0 and finite.");
}
void check_growth_factor(double factor) {
  OXY_CHECK(factor >= 1 && std::isfinite(factor), InvalidArgument, "growth_factor is ", factor,
            ", expected finite and at least 1, which stops growth.");
}
void check_backoff_factor(double factor) {
  OXY_CHECK(factor > 0 && factor <= 1, InvalidArgument, "backoff_factor is ", factor,
            ", expected above 0 and at most 1, which stops backoff.");
}
void check_growth_interval(int64_t interval) {
  OXY_CHECK(interval > 0, InvalidArgument, "growth_interval is ", interval, ", expected at least 1.");
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(std::move(options)) {
  auto& o = options_;
  OXY_CHECK(o.growth_factor > 1, InvalidArgument, "growth_factor is ", o.growth_factor, ", expected above 1.");
  OXY_CHECK(o.backoff_factor < 1 && o.backoff_factor > 0, InvalidArgument, "backoff_factor is ", o.backoff_factor,
            ", expected between 0 and 1.");
  check_growth_interval(o.growth_interval);
  check_scale(o.init_scale, "init_scale");
  OXY_CHECK(!o.min_scale || !o.max_scale || *o.min_scale <= *o.max_scale, InvalidArgument, "min_scale is ",
            *o.min_scale, " and max_scale ", *o.max_scale, ". Make min_scale the smaller one.");
  clamp_scale();
  if (o.enabled && o.device) place(*o.device);
}

void GradScaler::place(at::Device device) {
  scale_ = at::full({}, options_.init_scale, at::TensorOptions(at::kFloat).device(device));
  growth_tracker_ = at::full({}, init_growth_tracker_, at::TensorOptions(at::kInt).device(device));
}

void GradScaler::check_placed(const char* method) const {
  OXY_CHECK(scale_.defined(), InvalidState, method, "() was called before scale(). Scale the loss first.");
}

GradScaler::PerOptimizer& GradScaler::entry(torch::optim::Optimizer& optimizer) {
  auto& entry = optimizers_[&optimizer];
  if (!entry.found_inf.defined()) entry.found_inf = at::zeros({}, scale_.options());
  return entry;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  if (!scale_.defined()) place(loss.device());
  return loss * (loss.device() == scale_.device() ? scale_ : scale_.to(loss.device(), /*non_blocking=*/true));
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& losses) {
  std::vector<at::Tensor> scaled;
  for (const auto& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  check_placed("unscale_");
  auto& state = entry(optimizer);
  OXY_CHECK(state.stage == Stage::Ready, InvalidState,
            state.stage == Stage::Unscaled ? "unscale_() was already called for this optimizer"
                                           : "unscale_() was called after step()",
            " since the last update(). Call it once, between backward() and step().");
  unscale(optimizer, state);
  state.stage = Stage::Unscaled;
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer, PerOptimizer& state) {
  at::NoGradGuard no_grad;
  state.found_inf.zero_();
  const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  std::map<std::pair<at::Device, at::ScalarType>, std::vector<at::Tensor>, decltype([](const auto& a, const auto& b) {
             return std::make_tuple(a.first.type(), a.first.index(), a.second) <
                    std::make_tuple(b.first.type(), b.first.index(), b.second);
           })>
      gradients;
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) {
      auto& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      OXY_CHECK(gradient.scalar_type() != at::kHalf, InvalidType, "a gradient of shape ", gradient.sizes(),
                " is float16. Keep parameters in float32 and use Autocast.");
      auto dense = gradient.is_sparse() ? gradient._values() : gradient;
      gradients[{dense.device(), dense.scalar_type()}].push_back(std::move(dense));
    }
  }
  for (auto& [where, list] : gradients) {
    auto found = where.first == scale_.device() ? state.found_inf : at::zeros({}, scale_.options().device(where.first));
    at::_amp_foreach_non_finite_check_and_unscale_(list, found, inverse.to(where.first, /*non_blocking=*/true));
    if (!found.is_same(state.found_inf)) state.found_inf.add_(found.to(scale_.device(), /*non_blocking=*/true));
  }
}

void GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return;
  }
  check_placed("step");
  auto& state = entry(optimizer);
  OXY_CHECK(state.stage != Stage::Stepped, InvalidState,
            "step() was already called for this optimizer since the last update(). Call update() after each step.");
  if (auto* tail = dynamic_cast<optim::TailOptimizer*>(&optimizer)) {
    if (state.stage == Stage::Ready) state.found_inf.zero_();
    tail->set_grad_scale(state.stage == Stage::Unscaled ? at::Tensor() : scale_, state.found_inf);
    tail->step();
  } else {
    if (state.stage == Stage::Ready) unscale(optimizer, state);
    if (state.found_inf.item<float>() == 0) optimizer.step();
  }
  state.stage = Stage::Stepped;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  at::Tensor found;
  for (auto& [optimizer, state] : optimizers_) {
    if (state.stage == Stage::Ready) continue;
    found = found.defined() ? found + state.found_inf : state.found_inf;
  }
  OXY_CHECK(found.defined(), InvalidState, "update() was called before any step(). Call step(optimizer) first.");
  at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor, options_.backoff_factor,
                         options_.growth_interval);
  clamp_scale();
  abandon();
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  check_scale(new_scale, "new_scale");
  options_.init_scale = new_scale;
  if (scale_.defined()) scale_.fill_(new_scale);
  clamp_scale();
  abandon();
}

void GradScaler::update(const at::Tensor& new_scale) {
  if (!options_.enabled) return;
  check_placed("update");
  OXY_CHECK(new_scale.defined() && new_scale.numel() == 1 && new_scale.is_floating_point(), InvalidArgument,
            "new_scale must be a tensor of one floating-point number.");
  at::NoGradGuard no_grad;
  scale_.copy_(new_scale.reshape({}), /*non_blocking=*/true);
  clamp_scale();
  abandon();
}

void GradScaler::abandon() {
  for (auto& [optimizer, state] : optimizers_) state.stage = Stage::Ready;
}

void GradScaler::set_growth_factor(double factor) {
  check_growth_factor(factor);
  options_.growth_factor = factor;
}

void GradScaler::set_backoff_factor(double factor) {
  check_backoff_factor(factor);
  options_.backoff_factor = factor;
}

void GradScaler::set_growth_interval(int64_t interval) {
  check_growth_interval(interval);
  options_.growth_interval = interval;
}

void GradScaler::clamp_scale() {
  auto& o = options_;
  if (o.min_scale) o.init_scale = std::max(o.init_scale, *o.min_scale);
  if (o.max_scale) o.init_scale = std::min(o.init_scale, *o.max_scale);
  if (!scale_.defined()) return;
  if (o.min_scale) scale_.clamp_min_(*o.min_scale);
  if (o.max_scale) scale_.clamp_max_(*o.max_scale);
}

at::Tensor GradScaler::found_inf(torch::optim::Optimizer& optimizer) const {
  const auto found = optimizers_.find(&optimizer);
  return found == optimizers_.end() ? at::Tensor() : found->second.found_inf;
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1.0;
  return scale_.defined() ? scale_.item<double>() : static_cast<double>(static_cast<float>(options_.init_scale));
}

std::map<std::string, double> GradScaler::state_dict() const {
  if (!options_.enabled) return {};
  return {{"scale", get_scale()},
          {"growth_factor", options_.growth_factor},
          {"backoff_factor", options_.backoff_factor},
          {"growth_interval", static_cast<double>(options_.growth_interval)},
          {"_growth_tracker",
           static_cast<double>(growth_tracker_.defined() ? growth_tracker_.item<int>() : init_growth_tracker_)}};
}

void GradScaler::load_state_dict(const std::map<std::string, double>& state) {
  if (!options_.enabled) return;
  const auto value = [&state](const char* key) {
    const auto found = state.find(key);
    OXY_CHECK(found != state.end(), InvalidArgument, "GradScaler state has no '", key,
              "'. Pass what state_dict() of an enabled scaler returned.");
    return found->second;
  };
  const double scale = value("scale"), tracker = value("_growth_tracker"), growth = value("growth_factor");
  const double backoff = value("backoff_factor"), interval = value("growth_interval");
  // torch lets a scale shrink to 0.
  OXY_CHECK(scale >= 0 && std::isfinite(scale), InvalidArgument, "scale is ", scale,
            ", expected finite and at least 0.");
  check_growth_factor(growth);
  check_backoff_factor(backoff);
  check_growth_interval(static_cast<int64_t>(interval));
  options_.init_scale = scale;
  init_growth_tracker_ = static_cast<int64_t>(tracker);
  options_.growth_factor = growth;
  options_.backoff_factor = backoff;
  options_.growth_interval = static_cast<int64_t>(interval);
  if (scale_.defined()) {
    scale_.fill_(scale);
    growth_tracker_.fill_(init_growth_tracker_);
  }
  clamp_scale();
}

}  // namespace oxytorch::amp
