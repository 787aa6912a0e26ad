// Holds each operator against the kernel it is to replace, bit for bit where it promises torch's bits.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "ops/composed_attention.h"
#include "ops/gru.h"
#include "ops/linear_cpu.h"
#include "oxytorch/amp.h"
#include "oxytorch/ops/activation.h"
#include "oxytorch/system.h"
#include "tune/operators_entry.h"
#include "tune/proof.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

// Same bits, or both NaN.
bool same(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.strides() != b.strides() || a.scalar_type() != b.scalar_type()) return false;
  const auto bytes = static_cast<std::size_t>(a.numel()) * a.element_size();
  if (std::memcmp(a.const_data_ptr(), b.const_data_ptr(), bytes) == 0) return true;
  if (a.scalar_type() != at::kFloat) return false;
  const auto* x = a.const_data_ptr<float>();
  const auto* y = b.const_data_ptr<float>();
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    if (std::memcmp(x + i, y + i, sizeof(float)) != 0 && !(std::isnan(x[i]) && std::isnan(y[i]))) return false;
  }
  return true;
}
template <class... T, std::size_t... I>
bool same(const std::tuple<T...>& a, const std::tuple<T...>& b, std::index_sequence<I...>) {
  return (same(std::get<I>(a), std::get<I>(b)) && ...);
}
template <class... T>
bool same(const std::tuple<T...>& a, const std::tuple<T...>& b) {
  return same(a, b, std::index_sequence_for<T...>());
}

// torch's default generator draws the same each time, and goes on afterwards where it was.
class SeededDraws {
 public:
  SeededDraws() : generator_(at::detail::getDefaultCPUGenerator()), before_(generator_.get_state()) {
    generator_.set_current_seed(7);
  }
  ~SeededDraws() { generator_.set_state(before_); }
  SeededDraws(const SeededDraws&) = delete;
  SeededDraws& operator=(const SeededDraws&) = delete;

 private:
  at::Generator generator_;
  Tensor before_;
};

std::string sizes_of(const Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

std::string pool_differs() {
  struct Case {
    std::vector<std::int64_t> sizes, kernel, stride, padding, dilation;
    bool ceil_mode;
  };
  const Case cases[] = {
      {{2, 3, 8, 66}, {2}, {2}, {0}, {1}, false},       {{1, 2, 7, 43}, {3}, {2}, {1}, {1}, true},
      {{3, 9, 41}, {3, 2}, {1, 1}, {1, 0}, {1}, false}, {{2, 1, 13, 71}, {2, 3}, {3, 2}, {0, 1}, {2, 3}, true},
      {{1, 1, 5, 5}, {5}, {5}, {2}, {1}, false},        {{2, 2, 4, 37}, {2}, {1}, {0}, {2}, false},
  };
  Values values;
  for (const auto& c : cases) {
    const Tensor input = values.odd(c.sizes);
    const Pair ours = max_pool(input, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode);
    if (!same(ours, originals().max_pool.call<Pair>(input, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode))) {
      return "max_pool2d_with_indices differs from torch's for input " + sizes_of(input);
    }
    const auto& [output, indices] = ours;
    const Tensor grad = values.odd(output.sizes());
    if (!same(max_pool_backward(grad, input, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode, indices),
              originals().max_pool_backward.call<Tensor>(grad, input, c.kernel, c.stride, c.padding, c.dilation,
                                                         c.ceil_mode, indices))) {
      return "max_pool2d_with_indices_backward differs from torch's for input " + sizes_of(input);
    }
  }
  return {};
}

std::string embedding_differs() {
  Values values;
  for (const auto& [rows, columns, count, padding] : {std::array<std::int64_t, 4>{5, 70, 400, 2}, {3000, 7, 900, -1}}) {
    const Tensor numbers = at::arange(count).mul_(7919).remainder_(rows).view({2, -1});
    const Tensor grad = values.odd({2, count / 2, columns});
    if (!same(embedding_backward(grad, numbers, rows, padding, false),
              originals().embedding_backward.call<Tensor>(grad, numbers, rows, padding, false))) {
      return "embedding_dense_backward differs from torch's for a table of " + std::to_string(rows) + " rows";
    }
  }
  return {};
}

// Of a table whose gradients of three batches are added up.
std::string embedding_sum_differs() {
  const at::AutoGradMode as_in_training(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  constexpr std::int64_t kRows = 40, kColumns = 19, kPadding = 3;
  Values values;
  const Tensor table = values.normal({kRows, kColumns}), numbers = at::arange(90).mul_(7919).remainder_(kRows);
  const Tensor grads[] = {values.odd({90, kColumns}), values.odd({90, kColumns}), values.odd({90, kColumns})};
  const auto added_up = [&](auto&& call) {
    const Tensor weight = table.clone().requires_grad_();
    for (const Tensor& grad : grads) call(weight, numbers, c10::SymInt(kPadding), false, false).backward(grad);
    return weight.grad();
  };
  const auto by_torch = [](const auto&... args) { return originals().embedding.call<Tensor>(args...); };
  if (!same(added_up(embedding), added_up(by_torch))) return "added gradients of an embedding differ from torch's";
  return {};
}

// Both passes of both kernels on one input.
struct NormCase {
  Tensor input, weight, bias, grad, mean, var;
  NormCase(Values& values, at::IntArrayRef sizes)
      : input(values.normal(sizes, 3, 1)),
        weight(values.normal({sizes[1]})),
        bias(values.normal({sizes[1]})),
        grad(values.normal(sizes)),
        mean(values.normal({sizes[1]})),
        var(values.normal({sizes[1]}).square_()) {}

  [[nodiscard]] bool forward_agrees() const {
    const Tensor means[] = {mean.clone(), mean.clone()};
    const Tensor vars[] = {var.clone(), var.clone()};
    const Triple ours = batch_norm(input, weight, bias, means[0], vars[0], true, 0.1, 1e-5);
    return same(ours, originals().batch_norm.call<Triple>(input, weight, bias, means[1], vars[1], true, 0.1, 1e-5)) &&
           same(means[0], means[1]) && same(vars[0], vars[1]);
  }
  [[nodiscard]] bool backward_agrees() const {
    const auto [output, save_mean, save_invstd] =
        originals().batch_norm.call<Triple>(input, weight, bias, MaybeTensor(), MaybeTensor(), true, 0.1, 1e-5);
    constexpr std::array<bool, 3> kAll{true, true, true};
    return same(batch_norm_backward(grad, input, weight, MaybeTensor(), MaybeTensor(), save_mean, save_invstd, true,
                                    1e-5, kAll),
                originals().batch_norm_backward.call<Triple>(grad, input, weight, MaybeTensor(), MaybeTensor(),
                                                             save_mean, save_invstd, true, 1e-5, kAll));
  }
};

std::string norm_differs() {
  Values values;
  kernels::BatchNormFusion& fusion = originals().fusion;
  // Enough channels and whole vectors that each choice shows.
  const NormCase first(values, {3, 64, 5, 7});
  const auto find = [&](unsigned choices, auto&& set, auto&& agrees) {
    for (unsigned choice = 0; choice < choices; ++choice) {
      set(choice);
      if (agrees()) return true;
    }
    return false;
  };
  if (!find(2, [&](unsigned choice) { fusion.affine = choice == 0; }, [&] { return first.forward_agrees(); })) {
    return "native_batch_norm differs from torch's, whether or not its multiply-add is fused";
  }
  const auto set_backward = [&](unsigned choice) {
    fusion.dot = (choice & 1U) != 0;
    fusion.dot_rest = (choice & 2U) == 0;
    fusion.gradient = (choice & 4U) == 0;
  };
  if (!find(8, set_backward, [&] { return first.backward_agrees(); })) {
    return "native_batch_norm_backward differs from torch's, whichever of its multiply-adds are fused";
  }
  const std::vector<std::vector<std::int64_t>> sizes = {{6, 13, 33}, {2, 3, 4, 4}, {5, 1, 3, 3}, {4, 9, 1, 1},
                                                        {17, 5},     {9, 8, 2, 8}, {1, 2, 3},    {4, 20, 2, 3, 11}};
  for (const auto& shape : sizes) {
    const NormCase next(values, shape);
    if (!next.forward_agrees() || !next.backward_agrees()) {
      return "batch normalization differs from torch's for input " + sizes_of(next.input);
    }
  }
  return {};
}

std::string bernoulli_differs() {
  at::Generator generators[] = {at::detail::createCPUGenerator(5), at::detail::createCPUGenerator(5)};
  for (const std::int64_t count : {1, 311, 2, 1000, 623, 1302}) {
    for (const double p : {0.9, 0.1 + 0x1p-40, 0.0, 1.0}) {
      const auto type = count == 1302    ? at::kBool
                        : count % 3 == 0 ? at::kHalf
                        : count % 2 == 0 ? at::kBFloat16
                                         : at::kFloat;
      Tensor masks[] = {at::empty({count}, type), at::empty({count}, type)};
      bernoulli(masks[0], p, generators[0]);
      originals().bernoulli.call<Tensor>(masks[1], p, std::optional(generators[1]));
      if (!same(masks[0], masks[1])) return "bernoulli_ draws otherwise than torch's, which may use another generator";
      if (!generators[0].get_state().equal(generators[1].get_state())) {
        return "bernoulli_ leaves the generator otherwise than torch's";
      }
      // An odd number of outputs used up.
      for (auto& generator : generators) at::check_generator<at::CPUGeneratorImpl>(generator)->random();
    }
  }
  return {};
}

std::string attention_differs() {
  struct Case {
    std::int64_t heads, key_heads, queries, keys, width;
    bool causal, masked;
  };
  const Case cases[] = {
      {2, 2, 70, 70, 16, true, false}, {2, 1, 5, 130, 24, false, true}, {1, 1, 65, 3, 40, false, false}};
  const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kHalf};
  Values values;
  for (const auto& c : cases) {
    for (const auto type : types) {
      const auto make = [&](std::int64_t heads, std::int64_t tokens) {
        return values.normal({2, heads, tokens, c.width}).to(type);
      };
      const Tensor query = make(c.heads, c.queries), key = make(c.key_heads, c.keys), value = make(c.key_heads, c.keys);
      const Tensor grad = make(c.heads, c.queries);
      const MaybeTensor mask = c.masked ? MaybeTensor(values.normal({c.queries, c.keys}).to(type)) : std::nullopt;
      constexpr std::optional<double> kScale;
      // Each kernel with its own output, and torch's in fp64.
      const auto all = [&](at::ScalarType in, auto&& forward, auto&& backward) {
        const auto wide = [in](const Tensor& t) { return t.to(in); };
        const MaybeTensor wide_mask = mask ? MaybeTensor(mask->to(in)) : std::nullopt;
        const Pair out = forward(wide(query), wide(key), wide(value), wide_mask);
        const Triple grads = backward(wide(grad), wide(query), wide(key), wide(value), out, wide_mask);
        return std::array{std::get<0>(out).to(at::kDouble), std::get<0>(grads).to(at::kDouble),
                          std::get<1>(grads).to(at::kDouble), std::get<2>(grads).to(at::kDouble)};
      };
      const auto torchs = [&](at::ScalarType in) {
        return all(
            in,
            [&](const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& m) {
              return originals().flash_attention.call<Pair>(q, k, v, 0.0, c.causal, m, kScale);
            },
            [&](const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Pair& out,
                const MaybeTensor& m) {
              return originals().flash_attention_backward.call<Triple>(g, q, k, v, std::get<0>(out), std::get<1>(out),
                                                                       0.0, c.causal, m, kScale);
            });
      };
      const auto exact = torchs(at::kDouble), theirs = torchs(type);
      const auto ours = all(
          type,
          [&](const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& m) {
            return flash_attention(q, k, v, 0, c.causal, m, kScale);
          },
          [&](const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Pair& out,
              const MaybeTensor& m) {
            return flash_attention_backward(g, q, k, v, std::get<0>(out), std::get<1>(out), 0, c.causal, m, kScale);
          });
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const double rounding = (type == at::kFloat ? 0x1p-24 : type == at::kHalf ? 0x1p-11 : 0x1p-8);
        if (is_near(ours[i], theirs[i], exact[i], rounding)) continue;
        return "flash attention is further from fp64 than torch's for query " + sizes_of(query);
      }
    }
  }
  return {};
}

std::string composed_attention_differs() {
  struct Case {
    std::int64_t heads, key_heads, queries, keys, width;
    bool causal;
    char mask;  // 'b'ool, 'a'dded, or none
    double dropout;
  };
  const Case cases[] = {{2, 2, 70, 70, 16, true, '-', 0.1},
                        {2, 1, 5, 130, 24, false, 'b', 0.5},
                        {2, 2, 33, 65, 8, false, 'a', 0.1 + 0x1p-40},
                        {1, 1, 65, 3, 40, false, '-', 0.9}};
  const at::AutoGradMode as_in_training(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Values values;
  for (const auto& c : cases) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const auto make = [&](std::int64_t heads, std::int64_t tokens) {
        return values.normal({2, heads, tokens, c.width}).to(type);
      };
      const std::array given{make(c.heads, c.queries), make(c.key_heads, c.keys), make(c.key_heads, c.keys)};
      const Tensor grad = make(c.heads, c.queries);
      MaybeTensor mask;
      if (c.mask != '-') mask = values.normal({2, 1, c.queries, c.keys});
      if (c.mask == 'b') mask = mask->gt(-1);
      const auto of = [&](at::ScalarType in) {
        ops::ComposedAttention all{given[0].to(in), given[1].to(in), given[2].to(in), mask, c.dropout, c.causal};
        for (Tensor* one : {&all.query, &all.key, &all.value}) *one = one->detach().requires_grad_();
        if (c.mask == 'a') all.mask = mask->to(type).to(in);
        all.shares_keys = true;
        return all;
      };
      const auto results = [&](const ops::ComposedAttention& all, const Tensor& output) {
        auto found = torch::autograd::grad({output}, {all.query, all.key, all.value}, {grad.to(output.scalar_type())});
        found.push_back(output.detach());
        for (Tensor& one : found) one = one.to(at::kDouble);
        return found;
      };
      const auto torchs = [&](at::ScalarType in) {
        const auto all = of(in);
        const SeededDraws seeded;
        return results(all, originals().attention.call<Tensor>(all.query, all.key, all.value, all.mask, all.dropout,
                                                               all.is_causal, all.scale, all.shares_keys));
      };
      const auto by_us = [&] {
        const auto all = of(type);
        const SeededDraws seeded;
        return results(all,
                       ops::composed_attention(all, ops::drawn_weights({2, c.heads, c.queries, c.keys}, c.dropout)));
      };
      if (!ops::composed_attention_takes(of(type)))
        return "attention with dropout does not take query " + sizes_of(given[0]);
      const auto exact = torchs(at::kDouble), theirs = torchs(type), ours = by_us();
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const double rounding = (type == at::kFloat ? 0x1p-24 : type == at::kHalf ? 0x1p-11 : 0x1p-8);
        // Where torch draws by MKL, float64 draws another mask: then only this tells one mask from another.
        const bool is_same_mask =
            (ours[i] - theirs[i]).norm().item<double>() <= 32 * rounding * theirs[i].norm().item<double>();
        if (is_same_mask && is_near(ours[i], theirs[i], exact[i], rounding)) continue;
        return "attention with dropout is further from fp64 than torch's for query " + sizes_of(given[0]);
      }
    }
  }
  return {};
}

std::string lstm_differs() {
  struct Case {
    std::int64_t steps, batch, features, hidden;
    bool reverse, has_biases;
  };
  const Case cases[] = {{7, 5, 20, 24, false, true}, {1, 3, 8, 16, true, true}, {9, 17, 33, 30, true, false}};
  Values values;
  // Elsewhere oneDNN refuses, and a model's LSTM fails in torch.
  const auto& cpu = cpu_features();
  const bool has_lstm_of_bf16 = cpu.avx512bw && cpu.avx512dq && cpu.avx512vl;
  for (const auto& c : cases) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      if (type == at::kBFloat16 && !has_lstm_of_bf16) continue;
      const auto make = [&](at::IntArrayRef sizes, double scale) { return (values.normal(sizes) * scale).to(type); };
      const double scale = 1 / std::sqrt(static_cast<double>(c.hidden));
      const Tensor input = make({c.steps, c.batch, c.features}, 1), hidden = make({c.batch, c.hidden}, 0.5);
      const Tensor cell = make({c.batch, c.hidden}, 0.5), grad = make({c.steps, c.batch, c.hidden}, 1);
      const Tensor grad_hidden = make({c.batch, c.hidden}, 1), grad_cell = make({c.batch, c.hidden}, 1);
      const Tensor weights[] = {make({4 * c.hidden, c.features}, scale), make({4 * c.hidden, c.hidden}, scale),
                                make({4 * c.hidden}, scale), make({4 * c.hidden}, scale)};
      const auto all = [&](auto&& forward, auto&& backward) {
        const auto [output, last, last_cell, workspace] =
            forward(input, weights[0], weights[1], weights[2], weights[3], hidden, cell, c.reverse, at::IntArrayRef(),
                    std::int64_t{2}, c.hidden, std::int64_t{1}, c.has_biases, false, false, true);
        const Seven grads =
            backward(input, weights[0], weights[1], weights[2], weights[3], hidden, cell, output, last, last_cell,
                     MaybeTensor(grad), MaybeTensor(grad_hidden), MaybeTensor(grad_cell), c.reverse, std::int64_t{2},
                     c.hidden, std::int64_t{1}, c.has_biases, true, false, at::IntArrayRef(), false, workspace);
        std::vector<Tensor> found{output, last, last_cell};
        std::apply([&found](const auto&... one) { (found.push_back(one), ...); }, grads);
        if (!c.has_biases) found.erase(found.begin() + 6, found.begin() + 8);  // gradients of what is not there
        for (Tensor& one : found) one = one.to(at::kDouble);
        return found;
      };
      const auto ours = all([](const auto&... args) { return lstm(args...); },
                            [](const auto&... args) { return lstm_backward(args...); });
      const auto theirs = all([](const auto&... args) { return originals().lstm.call<Quad>(args...); },
                              [](const auto&... args) { return originals().lstm_backward.call<Seven>(args...); });
      // oneDNN has no float64; sums of this length round to some units of the dtype.
      const double rounding = type == at::kFloat ? 0x1p-18 : 0x1p-5;
      for (std::size_t i = 0; i < ours.size(); ++i) {
        if ((ours[i] - theirs[i]).norm().item<double>() <= rounding * theirs[i].norm().item<double>()) continue;
        return "the LSTM's result " + std::to_string(i) + " differs from torch's for input " + sizes_of(input);
      }
    }
  }
  return {};
}

std::string activation_differs(bool is_gelu) {
  Values values;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const std::string_view form : {"none", "tanh"}) {
      const Tensor input = values.normal({7, 333}, 3).to(type), grad = values.normal({7, 333}).to(type);
      const auto& all = originals();
      const std::array ours{is_gelu ? tune::gelu(input, form) : tune::silu(input),
                            is_gelu ? tune::gelu_backward(grad, input, form) : tune::silu_backward(grad, input)};
      const std::array theirs{
          is_gelu ? all.gelu.call<Tensor>(input, form) : all.silu.call<Tensor>(input),
          is_gelu ? all.gelu_backward.call<Tensor>(grad, input, form) : all.silu_backward.call<Tensor>(grad, input)};
      const Tensor wide = input.to(at::kDouble), slope = grad.to(at::kDouble);
      const std::array exact{
          is_gelu ? all.gelu.call<Tensor>(wide, form) : all.silu.call<Tensor>(wide),
          is_gelu ? all.gelu_backward.call<Tensor>(slope, wide, form) : all.silu_backward.call<Tensor>(slope, wide)};
      for (std::size_t i = 0; i < ours.size(); ++i) {
        const double rounding = type == at::kFloat ? 0x1p-24 : 0x1p-8;
        if (is_near(ours[i].to(at::kDouble), theirs[i].to(at::kDouble), exact[i], rounding)) continue;
        return std::string(is_gelu ? "GELU" : "SiLU") + " is further from fp64 than torch's in " + at::toString(type);
      }
    }
  }
  return {};
}

std::string gru_differs() {
  struct Case {
    std::int64_t steps, batch, features, hidden, layers;
    bool bidirectional, has_biases, batch_first;
  };
  const Case cases[] = {{7, 5, 20, 24, 1, false, true, false},
                        {1, 3, 8, 16, 1, false, false, true},
                        {9, 17, 33, 30, 2, true, true, true}};
  const at::AutoGradMode as_in_training(true);
  Values values;
  for (const auto& c : cases) {
    const std::int64_t directions = c.bidirectional ? 2 : 1;
    const double scale = 1 / std::sqrt(static_cast<double>(c.hidden));
    std::vector<Tensor> given{
        c.batch_first ? values.normal({c.batch, c.steps, c.features}) : values.normal({c.steps, c.batch, c.features}),
        values.normal({c.layers * directions, c.batch, c.hidden}, 0.5)};
    for (std::int64_t i = 0; i < c.layers * directions; ++i) {
      given.push_back(values.normal({3 * c.hidden, i < directions ? c.features : directions * c.hidden}, scale));
      given.push_back(values.normal({3 * c.hidden, c.hidden}, scale));
      for (int bias = 0; bias < 2 && c.has_biases; ++bias) given.push_back(values.normal({3 * c.hidden}, scale));
    }
    const Tensor grad_last = values.normal(given[1].sizes());
    const Tensor grad = values.normal({given[0].size(0), given[0].size(1), directions * c.hidden});
    const auto results = [&](at::ScalarType in, auto&& call) {
      std::vector<Tensor> inputs;
      for (const Tensor& one : given) inputs.push_back(one.to(in).detach().requires_grad_());
      const Pair made = call(inputs[0], inputs[1], at::TensorList(inputs).slice(2), c.has_biases, c.layers, 0.0, true,
                             c.bidirectional, c.batch_first);
      const auto& [output, last] = made;
      auto found = torch::autograd::grad({output, last}, inputs, {grad.to(in), grad_last.to(in)});
      found.insert(found.end(), {output.detach(), last.detach()});
      for (Tensor& one : found) one = one.to(at::kDouble);
      return found;
    };
    const auto by_torch = [](const auto&... args) { return originals().gru.call<Pair>(args...); };
    bool takes = true;
    const auto by_kernel = [&takes](const auto&... args) {
      takes = takes && ops::gru_takes({args...});
      return tune::gru(args...);
    };
    const auto results_of = [&](at::ScalarType in, bool casts, auto&& call) {
      const amp::Autocast as_said(at::kCPU, at::kBFloat16, casts, /*cache=*/false);
      return results(in, call);
    };
    const auto exact = results_of(at::kDouble, false, by_torch);
    for (const auto& [type, casts] : {std::pair(at::kFloat, false), {at::kBFloat16, false}, {at::kFloat, true}}) {
      const auto theirs = results_of(type, casts, by_torch), ours = results_of(type, casts, by_kernel);
      if (!takes) return "the GRU is not served here; install it outside of torch's dispatch modes and transforms";
      const double rounding = type == at::kFloat && !casts ? 0x1p-20 : 0x1p-7;
      for (std::size_t i = 0; i < exact.size(); ++i) {
        if (is_near(ours[i], theirs[i], exact[i], rounding)) continue;
        return "the GRU's result " + std::to_string(i) + " is further from fp64 than torch's in " + at::toString(type) +
               (casts ? " under autocast" : "") + " for input " + sizes_of(given[0]);
      }
    }
  }
  return {};
}

std::string linear_differs() {
  struct Case {
    std::int64_t rows, features, outputs;
    bool biased;
  };
  const Case cases[] = {{70, 50, 33, true}, {1, 16, 200, false}, {300, 130, 7, true}, {600, 300, 144, false}};
  constexpr std::array<bool, 3> kAll{true, true, true};
  Values values;
  for (const auto& c : cases) {
    const Tensor input = values.normal({c.rows, c.features}).to(at::kBFloat16);
    const Tensor weight = values.normal({c.outputs, c.features}, 0.1);
    const Tensor bias = c.biased ? values.normal({c.outputs}) : Tensor();
    const Tensor grad = values.normal({c.rows, c.outputs}).to(at::kBFloat16);
    if (!ops::linear_cpu_takes(input, weight, bias)) return "this processor multiplies no bfloat16";
    // Torch's, as autocast computes it; in fp64 with operands as given.
    const auto torchs = [&](at::ScalarType type) {
      const auto in = [type](const Tensor& t) { return t.defined() ? t.to(type) : t; };
      Tensor output = in(input).mm(in(weight).t());
      if (bias.defined()) output = output + in(bias);
      return std::array{output, in(grad).mm(in(weight)), in(grad).t().mm(in(input)), in(grad).sum(0)};
    };
    const auto made = ops::linear_cpu_backward(grad, input, weight, kAll);
    const std::array ours{ops::linear_cpu(input, weight, bias), made.input, made.weight, made.bias};
    const auto theirs = torchs(at::kBFloat16), exact = torchs(at::kDouble);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (is_near(ours[i].to(at::kDouble), theirs[i].to(at::kDouble), exact[i], 0x1p-8)) continue;
      return "a linear layer is further from fp64 than torch's for an input " + sizes_of(input);
    }
  }
  return {};
}

std::string convolution_differs() {
  struct Case {
    std::int64_t batch, inputs, outputs;
    std::array<std::int64_t, 2> image, kernel, stride, padding;
  };
  const Case cases[] = {{32, 64, 33, {5, 7}, {3, 3}, {1, 1}, {1, 1}},
                        {25, 70, 80, {9, 8}, {3, 2}, {2, 3}, {1, 0}},
                        {48, 64, 32, {4, 3}, {1, 1}, {2, 1}, {0, 2}}};
  Values values;
  for (const auto& c : cases) {
    const auto output = [&](std::size_t axis) {
      return (c.image[axis] + 2 * c.padding[axis] - c.kernel[axis]) / c.stride[axis] + 1;
    };
    const auto made = [&](at::IntArrayRef sizes) {
      return values.normal(sizes).to(at::kBFloat16).contiguous(at::MemoryFormat::ChannelsLast);
    };
    const Tensor input = made({c.batch, c.inputs, c.image[0], c.image[1]});
    const Tensor grad = made({c.batch, c.outputs, output(0), output(1)});
    const Tensor weight = made({c.outputs, c.inputs, c.kernel[0], c.kernel[1]});
    const auto gradients = [&](auto&& call, at::ScalarType type) {
      const std::int64_t biases[] = {c.outputs}, apart[] = {1, 1}, added[] = {0, 0};
      const Triple all = call(grad.to(type), input.to(type), weight.to(type), at::OptionalIntArrayRef(biases),
                              at::IntArrayRef(c.stride), at::IntArrayRef(c.padding), at::IntArrayRef(apart), false,
                              at::IntArrayRef(added), std::int64_t{1}, std::array<bool, 3>{false, true, true});
      return std::array{std::get<1>(all), std::get<2>(all)};
    };
    const auto by_torch = [](const auto&... args) { return originals().convolution_backward.call<Triple>(args...); };
    const auto handed_on = originals().convolution_backward.calls();
    const auto ours = gradients([](const auto&... args) { return tune::convolution_backward(args...); }, at::kBFloat16);
    if (originals().convolution_backward.calls() > handed_on) return "this processor multiplies no bfloat16";
    const auto theirs = gradients(by_torch, at::kBFloat16), exact = gradients(by_torch, at::kDouble);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (is_near(ours[i].to(at::kDouble), theirs[i].to(at::kDouble), exact[i], 0x1p-8)) continue;
      return "the gradient of a convolution's weight is further from fp64 than torch's for an image " + sizes_of(input);
    }
    if (ours[0].strides() != theirs[0].strides())
      return "the gradient of a convolution's weight lies otherwise in torch";
  }
  return {};
}

}  // namespace

std::string differs_from_original(const std::string& name) {
  if (name == "gru") return gru_differs();  // with autograd's
  if (name == "embedding_sum") return embedding_sum_differs();
  if (name == "composed_attention") return composed_attention_differs();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::AutoGradMode as_in_training(true);  // kernels keep what backward needs
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (name == "max_pool2d") return pool_differs();
  if (name == "embedding") return embedding_differs();
  if (name == "batch_norm") return norm_differs();
  if (name == "flash_attention") return attention_differs();
  if (name == "convolution") return convolution_differs();
  if (name == "lstm") return lstm_differs();
  if (name == "linear") return linear_differs();
  if (name == "gelu" || name == "silu") return activation_differs(name == "gelu");
  return bernoulli_differs();
}

}  // namespace oxytorch::tune
