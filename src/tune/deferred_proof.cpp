// Holds what takes the place of layers that are left to what follows them against torch's own operators.
#include <ATen/autocast_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oxytorch/ops/activation.h"
#include "oxytorch/ops/batch_norm.h"
#include "oxytorch/ops/linear_cross_entropy.h"
#include "oxytorch/ops/row_norm.h"
#include "oxytorch/tune/deferred_scores.h"
#include "tune/operators_entry.h"
#include "tune/proof.h"

namespace oxytorch::tune {

namespace {
using at::Tensor;
}  // namespace

std::string cross_entropy_differs(at::Device device) {
  const at::AutoGradMode as_in_training(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  constexpr std::int64_t kRows = 37, kWidth = 40, kClasses = 300;
  Values values;
  const Tensor rows = values.normal({kRows, kWidth}), weight = values.normal({kClasses, kWidth}, 0.2);
  const Tensor bias = values.normal({kClasses}, 0.1);
  Tensor target = values.normal({kRows}, 1000).abs_().remainder_(kClasses).to(at::kLong);
  target.slice(0, 0, kRows, 3).fill_(-100);
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const std::vector<Tensor> given{rows.to(type), weight.to(type), bias.to(type)};
    const auto results = [&](at::ScalarType in, at::Device where, auto&& loss_of) {
      std::vector<Tensor> inputs;
      for (const Tensor& one : given) inputs.push_back(one.to(where, in).detach().requires_grad_());
      const Tensor loss = loss_of(inputs, target.to(where));
      auto found = torch::autograd::grad({loss}, inputs);
      found.push_back(loss.detach());
      for (Tensor& one : found) one = one.cpu().to(at::kDouble);
      return found;
    };
    const auto by_torch = [](const std::vector<Tensor>& in, const Tensor& classes) {
      return at::cross_entropy_loss(at::native::linear(in[0], in[1], in[2]), classes);
    };
    const auto exact = results(at::kDouble, at::kCPU, by_torch);  // not every device has float64
    const auto theirs = results(type, device, by_torch);
    const auto ours = results(type, device, [](const std::vector<Tensor>& in, const Tensor& classes) {
      return ops::linear_cross_entropy(in[0], in[1], classes, {.bias = in[2]});
    });
    if (!are_near(ours, theirs, exact, type)) {
      return std::string("linear_cross_entropy is further from fp64 than torch's own in ") + at::toString(type) +
             " on " + device.str();
    }
  }
  return {};
}

std::string batch_norm_followed_differs() {
  const at::AutoGradMode as_in_training(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Values values;
  const auto image = [&](at::ScalarType type, double offset) {
    return values.normal({5, 18, 6, 4}, 2, offset).to(type).contiguous(at::MemoryFormat::ChannelsLast);
  };
  const Tensor weight = values.normal({18}, 0.3, 1), bias = values.normal({18});
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const bool pools : {false, true}) {
      const std::vector<Tensor> given{image(type, 1), weight, bias, image(type, 0)};
      const Tensor grad = pools ? values.normal({5, 18, 3, 2}) : values.normal({5, 18, 6, 4});
      const auto results = [&](bool exact, auto&& result_of) {
        std::vector<Tensor> inputs;
        for (const Tensor& one : given) {
          inputs.push_back((exact ? one.to(at::kDouble) : one).detach().requires_grad_());
        }
        if (pools) inputs.pop_back();
        const Tensor result = result_of(inputs);
        auto found = torch::autograd::grad({result}, inputs, {grad.to(result.scalar_type())});
        found.push_back(result.detach());
        for (Tensor& one : found) one = one.to(at::kDouble);
        return found;
      };
      const auto by_torch = [&](const std::vector<Tensor>& in) {
        const Tensor value = at::batch_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, false);
        const Tensor positive = at::relu(pools ? value : value + in[3]);
        return pools ? at::max_pool2d(positive, {2, 2}, {2, 2}) : positive;
      };
      const auto exact = results(true, by_torch), theirs = results(false, by_torch);
      const auto ours = results(false, [&](const std::vector<Tensor>& in) {
        ops::BatchNormOptions options{.weight = in[1], .bias = in[2], .relu = true};
        if (pools) {
          options.pool = {2, 2};
        } else {
          options.added = in[3];
        }
        return ops::batch_norm(in[0], options);
      });
      if (!are_near(ours, theirs, exact, type)) {
        return std::string("batch_norm is further from fp64 than torch's own operators in ") + at::toString(type);
      }
    }
  }
  return {};
}

std::string row_norm_differs() {
  const at::AutoGradMode as_in_training(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Values values;
  const Tensor weight = values.normal({75}, 0.3, 1), bias = values.normal({75});
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const bool is_centered : {false, true}) {
      // As under autocast, a residual stays in float32.
      const std::vector<Tensor> given{values.normal({9, 13, 75}).to(type), values.normal({9, 13, 75}, 2, 1), weight,
                                      bias};
      const Tensor grad = values.normal({9, 13, 75}), grad_sum = values.normal({9, 13, 75});
      const auto results = [&](bool exact, auto&& results_of) {
        std::vector<Tensor> inputs;
        for (const Tensor& one : given) {
          inputs.push_back((exact ? one.to(at::kDouble) : one).detach().requires_grad_());
        }
        if (!is_centered) inputs.pop_back();
        const auto [normed, sum] = results_of(inputs);
        auto found = torch::autograd::grad({normed, sum}, inputs,
                                           {grad.to(normed.scalar_type()), grad_sum.to(sum.scalar_type())});
        found.insert(found.end(), {normed.detach(), sum.detach()});
        for (Tensor& one : found) one = one.to(at::kDouble);
        return found;
      };
      const auto by_torch = [&](const std::vector<Tensor>& in) {
        const Tensor sum = in[0] + in[1];
        const Tensor normed =
            is_centered ? at::layer_norm(sum, {75}, in[2], in[3]) : at::rms_norm(sum, {75}, in[2], 1e-5);
        return std::pair(normed, sum);
      };
      const auto exact = results(true, by_torch), theirs = results(false, by_torch);
      const auto ours = results(false, [&](const std::vector<Tensor>& in) {
        const ops::RowNormOptions options{
            .weight = in[2], .bias = is_centered ? MaybeTensor(in[3]) : std::nullopt, .eps = 1e-5};
        return is_centered ? ops::add_layer_norm(in[0], in[1], options) : ops::add_rms_norm(in[0], in[1], options);
      });
      if (!are_near(ours, theirs, exact, type)) {
        return std::string("the norm of a sum is further from fp64 than torch's own operators in ") +
               at::toString(type);
      }
    }
  }
  return {};
}

std::string written_attention_differs() {
  const at::AutoGradMode as_in_training(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Values values;
  const Tensor hidden = values.normal({70, 70}).triu_(1).ne(0);
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const bool is_causal : {false, true}) {
      const auto make = [&] { return values.normal({2, 3, 70, 24}).to(type); };
      const std::vector<Tensor> given{make(), make(), make(), values.normal({1, 3, 70, 70}).to(type)};
      const Tensor grad = make();
      const auto results = [&](at::ScalarType in) {
        std::vector<Tensor> inputs;
        for (const Tensor& one : given) inputs.push_back(one.to(in).detach().requires_grad_());
        Tensor scores = at::matmul(inputs[0], inputs[1].transpose(2, 3)) / 5.0;
        scores = is_causal ? scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()) : scores + inputs[3];
        const Tensor output = at::matmul(at::softmax(scores, -1), inputs[2]);
        if (is_causal) inputs.pop_back();
        auto found = torch::autograd::grad({output}, inputs, {grad.to(in)});
        found.push_back(output.detach());
        for (Tensor& one : found) one = one.to(at::kDouble);
        return found;
      };
      const auto exact = results(at::kDouble), theirs = results(type);
      const auto before = DeferredScores::joined();
      const DeferredScores::Scope scope;
      const auto ours = results(type);
      if (DeferredScores::joined() == before) return "attention that is written out is not found";
      if (!are_near(ours, theirs, exact, type)) {
        return std::string("attention that is written out is further from fp64 than torch's own operators in ") +
               at::toString(type);
      }
    }
  }
  return {};
}

std::string gate_differs() {
  const at::AutoGradMode as_in_training(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Values values;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const std::string_view form : {"", "none", "tanh"}) {  // of GELU; none: SiLU
      const std::array given{values.normal({7, 333}, 3).to(type), values.normal({7, 333}).to(type)};
      const Tensor grad = values.normal({7, 333}).to(type);
      const auto results = [&](at::ScalarType in, auto&& product_of) {
        const Tensor gate = given[0].to(in).detach().requires_grad_(), up = given[1].to(in).detach().requires_grad_();
        const Tensor product = product_of(gate, up);
        auto found = torch::autograd::grad({product}, {gate, up}, {grad.to(in)});
        found.push_back(product.detach());
        for (Tensor& one : found) one = one.to(at::kDouble);
        return found;
      };
      const auto by_torch = [&](const Tensor& gate, const Tensor& up) {
        return (form.empty() ? at::silu(gate) : at::gelu(gate, form)) * up;
      };
      const auto exact = results(at::kDouble, by_torch), theirs = results(type, by_torch);
      const auto ours = results(type, [&](const Tensor& gate, const Tensor& up) {
        return form.empty() ? ops::swiglu(gate, up) : ops::geglu(gate, up, form);
      });
      if (!are_near(ours, theirs, exact, type)) {
        return std::string(form.empty() ? "swiglu" : "geglu") + " is further from fp64 than torch's own operators in " +
               at::toString(type);
      }
    }
  }
  return {};
}

}  // namespace oxytorch::tune
