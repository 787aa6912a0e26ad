// One case for each optimizer class: hyperparameters that all take part, and a reference that knows nothing of the
// tail.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/optim/optimizers.h"

namespace oxytorch::optim::testing {

using Tensors = std::vector<torch::Tensor>;
using StepFunction = std::function<void()>;

template <class OursType, class OptionsType, class TheirsType, class TheirOptionsType>
struct PeerCase {
  using Ours = OursType;
  using Options = OptionsType;
  using Theirs = TheirsType;
  using TheirOptions = TheirOptionsType;
  static constexpr bool kMatricesOnly = false;
};

struct AdamWCase : PeerCase<AdamW, AdamWOptions, torch::optim::AdamW, torch::optim::AdamWOptions> {
  template <class O>
  static O set(O o) {
    return o.lr(1e-2).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1).amsgrad(true);
  }
};
struct AdamCase : PeerCase<Adam, AdamOptions, torch::optim::Adam, torch::optim::AdamOptions> {
  template <class O>
  static O set(O o) {
    return o.lr(1e-2).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1).amsgrad(true);
  }
};
struct SGDCase : PeerCase<SGD, SGDOptions, torch::optim::SGD, torch::optim::SGDOptions> {
  template <class O>
  static O set(O o) {
    return o.lr(1e-2).momentum(0.9).nesterov(true).weight_decay(0.1);
  }
};
struct AdagradCase : PeerCase<Adagrad, AdagradOptions, torch::optim::Adagrad, torch::optim::AdagradOptions> {
  template <class O>
  static O set(O o) {
    return o.lr(1e-2).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.2).eps(1e-6);
  }
};
struct RMSpropCase : PeerCase<RMSprop, RMSpropOptions, torch::optim::RMSprop, torch::optim::RMSpropOptions> {
  template <class O>
  static O set(O o) {
    return o.lr(1e-2).alpha(0.9).eps(1e-3).weight_decay(0.1).momentum(0.8).centered(true);
  }
};

// Those that torch lacks in C++, composed of its operators.
struct LionCase {
  using Ours = Lion;
  using Options = LionOptions;
  static constexpr bool kMatricesOnly = false;
  static LionOptions set(LionOptions o) { return o.lr(1e-2).betas({0.8, 0.95}).weight_decay(0.1); }

  static StepFunction reference(const Tensors& params) {
    auto momenta = std::make_shared<Tensors>();
    for (const auto& p : params) momenta->push_back(torch::zeros_like(p));
    return [params, momenta] {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < params.size(); ++i) {
        const torch::Tensor &p = params[i], &g = p.grad(), m = (*momenta)[i];
        p.mul_(1 - 1e-2 * 0.1).sub_((m * 0.8 + g * 0.2).sign(), 1e-2);
        m.mul_(0.95).add_(g, 0.05);
      }
    };
  }
};

struct MuonCase {
  using Ours = Muon;
  using Options = MuonOptions;
  static constexpr bool kMatricesOnly = true;
  static MuonOptions set(MuonOptions o) { return o.lr(1e-2).weight_decay(0.1).momentum(0.9).nesterov(true); }

  static torch::Tensor orthogonal(const torch::Tensor& matrix) {
    torch::Tensor x = matrix.to(torch::kBFloat16);
    const bool tall = x.size(0) > x.size(1);
    if (tall) x = x.t();
    x = x / x.norm().clamp_min(1e-7);
    for (int i = 0; i < 5; ++i) {
      const auto gram = x.mm(x.t());
      x = torch::addmm(x, torch::addmm(gram, gram, gram, -4.7750, 2.0315), x, 3.4445);
    }
    return tall ? x.t() : x;
  }

  static StepFunction reference(const Tensors& params) {
    auto momenta = std::make_shared<Tensors>();
    for (const auto& p : params) momenta->push_back(torch::zeros_like(p));
    return [params, momenta] {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < params.size(); ++i) {
        const torch::Tensor &p = params[i], &g = p.grad(), m = (*momenta)[i];
        m.lerp_(g, 0.1);
        const double shape = std::sqrt(std::max(1.0, static_cast<double>(p.size(0)) / static_cast<double>(p.size(1))));
        p.mul_(1 - 1e-2 * 0.1).sub_(orthogonal(g.lerp(m, 0.9)).to(p.dtype()), 1e-2 * shape);
      }
    };
  }
};

template <class Case>
concept HasPeer = requires { typename Case::Theirs; };

template <class Case>
StepFunction make_reference(const Tensors& params) {
  if constexpr (HasPeer<Case>) {
    auto theirs = std::make_shared<typename Case::Theirs>(params, Case::set(typename Case::TheirOptions(0.5)));
    return [theirs] { theirs->step(); };
  } else {
    return Case::reference(params);
  }
}

using AllCases = ::testing::Types<AdamWCase, AdamCase, SGDCase, LionCase, AdagradCase, RMSpropCase, MuonCase>;
using PeerCases = ::testing::Types<AdamWCase, AdamCase, SGDCase, AdagradCase, RMSpropCase>;
using NativeCases = ::testing::Types<AdamWCase, AdamCase, SGDCase, LionCase, AdagradCase, RMSpropCase>;

template <class Case>
Tensors make_params(torch::Dtype dtype = torch::kFloat) {
  using Shapes = std::vector<std::vector<std::int64_t>>;
  torch::manual_seed(0);
  Tensors params;
  for (const auto& shape : Case::kMatricesOnly ? Shapes{{33, 5}, {8, 40}, {33, 5}, {1, 7}}
                                               : Shapes{{7}, {33, 5}, {}, {0, 2}, {5000}, {4, 3, 3, 3}}) {
    params.push_back(torch::randn(shape, torch::kFloat).to(dtype).requires_grad_());
  }
  return params;
}

inline void set_grads(Tensors& params, int seed, double scale = 1) {
  torch::manual_seed(100 + seed);
  for (auto& p : params) p.mutable_grad() = (torch::randn(p.sizes(), torch::kFloat) * scale).to(p.dtype());
}

// The parameters, all of the state, averages and copies.
inline Tensors everything(const Tensors& params, const TailOptimizer& optimizer) {
  Tensors all;
  const auto add = [&all](const torch::Tensor& t) { all.push_back(t.defined() ? t.detach().clone() : t); };
  for (const auto& p : params) add(p);
  for (std::size_t i = 0; i < optimizer.tail().param_count(); ++i) {
    const ParamState& s = optimizer.tail().state(i);
    for (const auto& t : {s.step, s.master, s.low_bits, s.ema, s.copy}) add(t);
    for (std::size_t k = 0; k < s.moments.size(); ++k) {
      add(s.moments[k]);
      add(s.scales[k]);
    }
  }
  return all;
}

inline bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.sizes() != b.sizes() || a.dtype() != b.dtype()) return false;
  const torch::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

inline void expect_same_bits(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << "tensor " << i;
}

inline void expect_close(const Tensors& a, const Tensors& b, double relative = 1e-5, double absolute = 1e-6) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto x = a[i].detach().to(torch::kDouble), y = b[i].detach().to(torch::kDouble);
    EXPECT_TRUE(torch::allclose(x, y, relative, absolute))
        << "tensor " << i << ", off by " << (x.numel() == 0 ? 0.0 : (x - y).abs().max().item<double>());
  }
}

// An optimizer of the case, its parameters of `dtype`, and all that belongs to it.
template <class Case>
struct Trial {
  Tensors params;
  typename Case::Ours optimizer;

  template <class Change>
  Trial(torch::Dtype dtype, Change change)
      : params(make_params<Case>(dtype)), optimizer(params, change(Case::set(typename Case::Options()))) {}

  void step(int seed) {
    set_grads(params, seed);
    optimizer.step();
  }
  void steps(int from, int to) {
    for (int i = from; i < to; ++i) step(i);
  }
  [[nodiscard]] Tensors everything() const { return testing::everything(params, optimizer); }
};

inline constexpr auto kPlain = [](auto options) { return options; };

// Each for every optimizer: 8-bit state with low bits, stochastic rounding, masters, adaptive clipping.
struct Format {
  const char* name;
  torch::Dtype dtype;
  TailOptions tail;
};

inline std::vector<Format> formats() {
  const TailOptions seven{.state_dtype = StateFormat::Int8, .master_weights = MasterFormat::Int8};
  const TailOptions rounded{
      .clip_value = 0.3, .ema_decay = 0.9, .state_dtype = StateFormat::Int8, .stochastic_rounding = true, .seed = 7};
  const TailOptions masters{.clip_norm = 0.5,
                            .state_dtype = StateFormat::BFloat16,
                            .master_weights = MasterFormat::Float32,
                            .copy_dtype = at::kHalf};
  const TailOptions adaptive{.agc = 0.01, .ema_decay = 0.9, .copy_dtype = at::kBFloat16, .collect_stats = true};
  return {{"7 bytes", torch::kBFloat16, seven},
          {"rounded", torch::kBFloat16, rounded},
          {"masters", torch::kHalf, masters},
          {"adaptive", torch::kFloat, adaptive}};
}

template <class Source, class Target>
void through_archive(const Source& source, Target& target) {
  std::stringstream stream;
  torch::save(source, stream);
  torch::load(target, stream);
}

// What an Error of `work` says; "no error" if there is none.
template <class Work>
std::string message_of(Work work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace oxytorch::optim::testing
