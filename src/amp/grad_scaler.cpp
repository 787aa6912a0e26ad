#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/types.h>

#include <cmath>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/optim.h"

namespace oxytorch::amp {

GradScaler::GradScaler(GradScalerOptions options) : options_(std::move(options)) {
  const auto& o = options_;
  OXY_CHECK(o.growth_factor > 1, InvalidArgument, "growth_factor is ", o.growth_factor, ", expected above 1.");
  OXY_CHECK(o.backoff_factor < 1 && o.backoff_factor > 0, InvalidArgument, "backoff_factor is ", o.backoff_factor,
            ", expected between 0 and 1.");
  OXY_CHECK(o.growth_interval > 0, InvalidArgument, "growth_interval is ", o.growth_interval, ", expected at least 1.");
  OXY_CHECK(o.init_scale > 0 && std::isfinite(o.init_scale), InvalidArgument, "init_scale is ", o.init_scale,
            ", expected above 0 and finite.");
  OXY_CHECK(!o.min_scale || !o.max_scale || *o.min_scale <= *o.max_scale, InvalidArgument, "min_scale is ",
            *o.min_scale, " and max_scale ", *o.max_scale, ". Make min_scale the smaller one.");
  if (!o.enabled) return;
  scale_ = at::full({}, o.init_scale, at::TensorOptions(at::kFloat).device(o.device));
  growth_tracker_ = at::zeros({}, at::TensorOptions(at::kInt).device(o.device));
  clamp_scale();
}

GradScaler::PerOptimizer& GradScaler::entry(torch::optim::Optimizer& optimizer) {
  auto& entry = optimizers_[&optimizer];
  if (!entry.found_inf.defined()) entry.found_inf = at::zeros({}, scale_.options());
  return entry;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  return loss * (loss.device() == scale_.device() ? scale_ : scale_.to(loss.device(), /*non_blocking=*/true));
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
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
  for (auto& [optimizer, state] : optimizers_) state.stage = Stage::Ready;
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  OXY_CHECK(new_scale > 0 && std::isfinite(new_scale), InvalidArgument, "new scale is ", new_scale,
            ", expected above 0 and finite.");
  scale_.fill_(new_scale);
  for (auto& [optimizer, state] : optimizers_) state.stage = Stage::Ready;
}

void GradScaler::clamp_scale() {
  if (options_.min_scale) scale_.clamp_min_(*options_.min_scale);
  if (options_.max_scale) scale_.clamp_max_(*options_.max_scale);
}

at::Tensor GradScaler::found_inf(torch::optim::Optimizer& optimizer) const {
  const auto found = optimizers_.find(&optimizer);
  return found == optimizers_.end() ? at::Tensor() : found->second.found_inf;
}

double GradScaler::get_scale() const { return options_.enabled ? scale_.item<double>() : 1.0; }

std::map<std::string, double> GradScaler::state_dict() const {
  if (!options_.enabled) return {};
  return {{"scale", get_scale()},
          {"growth_factor", options_.growth_factor},
          {"backoff_factor", options_.backoff_factor},
          {"growth_interval", static_cast<double>(options_.growth_interval)},
          {"_growth_tracker", static_cast<double>(growth_tracker_.item<int>())}};
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
  scale_.fill_(scale);
  growth_tracker_.fill_(static_cast<int>(tracker));
  options_.growth_factor = growth;
  options_.backoff_factor = backoff;
  options_.growth_interval = static_cast<int64_t>(interval);
}

}  // namespace oxytorch::amp
