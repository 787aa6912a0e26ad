/// Optimizers with the fused step tail for C++ programs: drop-in `torch::optim::Optimizer`s.
///
/// ```cpp
/// using namespace oxytorch::optim;
/// AdamW opt(model->parameters(), AdamWOptions(1e-3).clip_norm(1.0).ema_decay(0.999));
/// loss.backward();
/// opt.step();
/// opt.zero_grad();
/// ```
///
/// Hyperparameters have torch's names and defaults. Errors: Error(InvalidArgument or NotSupported) from the
/// constructor, naming hyperparameter, value and range, or the parameter that cannot be served.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/optim/optimizer.h"

namespace oxytorch::optim {

/// torch::optim::AdamWOptions with `maximize` and the tail's options.
struct OXY_API AdamWOptions : public TailArguments<AdamWOptions> {
  using betas_t = std::tuple<double, double>;
  AdamWOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(bool, maximize) = false;
};

/// torch::optim::AdamOptions with `maximize` and the tail's options.
struct OXY_API AdamOptions : public TailArguments<AdamOptions> {
  using betas_t = std::tuple<double, double>;
  AdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(bool, maximize) = false;
};

/// torch::optim::SGDOptions with `maximize` and the tail's options.
struct OXY_API SGDOptions : public TailArguments<SGDOptions> {
  SGDOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, momentum) = 0;
  TORCH_ARG(double, dampening) = 0;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, nesterov) = false;
  TORCH_ARG(bool, maximize) = false;
};

/// Options of Lion. A learning rate a third to a tenth of AdamW's and a decay three to ten times its are usual.
struct OXY_API LionOptions : public TailArguments<LionOptions> {
  using betas_t = std::tuple<double, double>;
  LionOptions(double lr = 1e-4) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, maximize) = false;
};

/// torch::optim::AdagradOptions with `maximize` and the tail's options.
struct OXY_API AdagradOptions : public TailArguments<AdagradOptions> {
  AdagradOptions(double lr = 1e-2) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, lr_decay) = 0;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, initial_accumulator_value) = 0;
  TORCH_ARG(double, eps) = 1e-10;
  TORCH_ARG(bool, maximize) = false;
};

/// torch::optim::RMSpropOptions with `maximize` and the tail's options.
struct OXY_API RMSpropOptions : public TailArguments<RMSpropOptions> {
  RMSpropOptions(double lr = 1e-2) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, alpha) = 0.99;
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, momentum) = 0;
  TORCH_ARG(bool, centered) = false;
  TORCH_ARG(bool, maximize) = false;
};

/// Options of Muon, named and defaulted as Python's torch.optim.Muon.
struct OXY_API MuonOptions : public TailArguments<MuonOptions> {
  using coefficients_t = std::array<double, 3>;
  MuonOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  TORCH_ARG(coefficients_t, ns_coefficients) = { 3.4445, -4.7750, 2.0315 };
  TORCH_ARG(double, eps) = 1e-7;
  TORCH_ARG(std::int64_t, ns_steps) = 5;
  TORCH_ARG(AdjustLr, adjust_lr_fn) = AdjustLr::Original;
};

extern template class TailArguments<AdamWOptions>;
extern template class TailArguments<AdamOptions>;
extern template class TailArguments<SGDOptions>;
extern template class TailArguments<LionOptions>;
extern template class TailArguments<AdagradOptions>;
extern template class TailArguments<RMSpropOptions>;
extern template class TailArguments<MuonOptions>;

/// The constructors of all optimizers here.
template <class Options>
class OXY_API TailOptimizerOf : public TailOptimizer {
 public:
  explicit TailOptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults = {})
      : TailOptimizer(groups, std::make_unique<Options>(defaults)) {}
  explicit TailOptimizerOf(std::vector<torch::Tensor> params, const Options& defaults = {})
      : TailOptimizerOf({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}
};

/// AdamW, Loshchilov and Hutter 2019; equal to torch.optim.AdamW within the tail's error bound.
class OXY_API AdamW : public TailOptimizerOf<AdamWOptions> {
 public:
  using TailOptimizerOf::TailOptimizerOf;
};

/// Adam, Kingma and Ba 2015, with the weight decay through the gradient, as torch.optim.Adam.
class OXY_API Adam : public TailOptimizerOf<AdamOptions> {
 public:
  using TailOptimizerOf::TailOptimizerOf;
};

/// Stochastic gradient descent with momentum, as torch.optim.SGD.
class OXY_API SGD : public TailOptimizerOf<SGDOptions> {
 public:
  using TailOptimizerOf::TailOptimizerOf;
};

/// Lion, Chen et al. 2023, arXiv 2302.06675.
class OXY_API Lion : public TailOptimizerOf<LionOptions> {
 public:
  using TailOptimizerOf::TailOptimizerOf;
};

/// Adagrad, Duchi et al. 2011, as torch.optim.Adagrad.
class OXY_API Adagrad : public TailOptimizerOf<AdagradOptions> {
 public:
  using TailOptimizerOf::TailOptimizerOf;
};

/// RMSprop, Hinton 2012, as torch.optim.RMSprop.
class OXY_API RMSprop : public TailOptimizerOf<RMSpropOptions> {
 public:
  using TailOptimizerOf::TailOptimizerOf;
};

/// Muon, Jordan 2024, as torch.optim.Muon: for matrices alone, by LibTorch's operators.
class OXY_API Muon : public TailOptimizerOf<MuonOptions> {
 public:
  using TailOptimizerOf::TailOptimizerOf;
};

/// The optimizer here that carries on where `optimizer` stands: groups, hyperparameters and state are taken over. State
/// tensors are shared, so `optimizer` must not step any more; a schedule must be built on the new one.
///
/// Serves exactly torch::optim::AdamW, Adam, SGD, Adagrad and RMSprop; Error(InvalidType) names any other class.
OXY_API std::unique_ptr<TailOptimizer> replace(const torch::optim::Optimizer& optimizer, const TailOptions& tail = {});

/// The way back: `optimizer`, which replace() made `from` of, gets the state that `from` has now and can step on from
/// it. State tensors are shared where they are in torch's format; 8-bit state is decoded. Hyperparameters stay as they
/// are in `optimizer`. Error(InvalidType) as replace(), Error(InvalidArgument) for other parameters.
OXY_API void hand_back(const TailOptimizer& from, torch::optim::Optimizer& optimizer);

}  // namespace oxytorch::optim
