#include "ops/gru.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <vector>

#include "ops/dispatch.h"
#include "ops/gru_cpu.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

struct GruNode : torch::autograd::Node {
  std::string name() const override { return "OxytorchGruBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    variable_list made(6);
    if (!grads[0].defined() && !grads[1].defined()) return made;
    std::array<bool, 6> wanted{};
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    const Tensor in = input.unpack(), by_input = weight_input.unpack(), by_hidden = weight_hidden.unpack();
    variable_list found;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      const auto gradients =
          gru_cpu_backward({in, by_input, by_hidden, kept.unpack(), reverse}, grads[0], grads[1], wanted);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        made[i] = gradients[i];
        if (made[i].defined()) found.push_back(made[i]);
      }
    }
    differentiable_once("GRU", found, grads[0], grads[1], in, by_input, by_hidden);
    return made;
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto* saved : {&input, &weight_input, &weight_hidden, &kept}) saved->reset_data();
  }

  // Not the output, which a program may change in place, as it may torch's.
  SavedVariable input, weight_input, weight_hidden, kept;
  bool reverse = false;
};

struct OfLayer {
  Tensor output, last;
};

OfLayer of_layer(const GruLayer& layer) {
  decltype(new_node<GruNode>()) node;
  const auto& [input, weight_input, weight_hidden, bias_input, bias_hidden, hidden, reverse, narrow] = layer;
  if (torch::autograd::compute_requires_grad(input, hidden, weight_input, weight_hidden, bias_input, bias_hidden)) {
    node = new_node<GruNode>();
    node->set_next_edges(
        torch::autograd::collect_next_edges(input, hidden, weight_input, weight_hidden, bias_input, bias_hidden));
    node->input = {input, false};
    node->weight_input = {weight_input, false};
    node->weight_hidden = {weight_hidden, false};
    node->reverse = reverse;
  }
  GruResults results;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = gru_cpu(layer, node != nullptr);
  }
  if (node) {
    torch::autograd::set_history({results.output, results.last}, node);
    node->kept = {results.kept, false};
  }
  return {results.output, results.last};
}

}  // namespace

bool gru_takes(const Gru& gru) {
  if (is_transformed() || !is_ordinary(gru.input) || !is_ordinary(gru.hidden)) return false;
  if (gru.input.dim() != 3 || gru.hidden.dim() != 3 || gru.num_layers < 1) return false;
  const bool casts = at::autocast::is_autocast_enabled(at::kCPU);
  if (casts && at::autocast::get_autocast_dtype(at::kCPU) != at::kBFloat16) return false;
  const auto is_typed = [&](const Tensor& tensor) {
    const auto type = tensor.scalar_type();
    return casts ? type == at::kFloat || type == at::kBFloat16 : type == gru.input.scalar_type();
  };
  if (gru.input.scalar_type() != at::kFloat && gru.input.scalar_type() != at::kBFloat16) return false;
  const std::int64_t directions = gru.bidirectional ? 2 : 1, hidden = gru.hidden.size(2);
  const std::int64_t batch = gru.input.size(gru.batch_first ? 0 : 1), layers = gru.num_layers * directions;
  const std::size_t each = gru.has_biases ? 4 : 2;
  if (gru.hidden.sizes() != at::IntArrayRef({layers, batch, hidden}) || !is_typed(gru.hidden)) return false;
  if (gru.params.size() != static_cast<std::size_t>(layers) * each) return false;
  for (std::size_t i = 0; i < gru.params.size(); ++i) {
    const Tensor& param = gru.params[i];
    if (!is_ordinary(param) || !is_typed(param)) return false;
    const bool is_first = i < each * static_cast<std::size_t>(directions);
    const std::int64_t features = is_first ? gru.input.size(2) : directions * hidden;
    const std::size_t kind = i % each;
    const bool fits = kind > 1 ? param.sizes() == at::IntArrayRef({3 * hidden})
                               : param.sizes() == at::IntArrayRef({3 * hidden, kind == 0 ? features : hidden});
    if (!fits) return false;
  }
  return true;
}

std::tuple<Tensor, Tensor> gru(const Gru& gru) {
  const bool narrow = at::autocast::is_autocast_enabled(at::kCPU) || gru.input.scalar_type() == at::kBFloat16;
  const auto states = gru.hidden.unbind(0);
  Tensor value = gru.batch_first ? gru.input.transpose(0, 1) : gru.input;
  const Tensor none;
  std::vector<Tensor> lasts;
  std::size_t at = 0;
  for (std::int64_t layer = 0; layer < gru.num_layers; ++layer) {
    std::vector<Tensor> outputs;
    for (const bool reverse : {false, true}) {
      if (reverse && !gru.bidirectional) continue;
      const bool biased = gru.has_biases;
      const auto made = of_layer({.input = value,
                                  .weight_input = gru.params[at],
                                  .weight_hidden = gru.params[at + 1],
                                  .bias_input = biased ? gru.params[at + 2] : none,
                                  .bias_hidden = biased ? gru.params[at + 3] : none,
                                  .hidden = states[lasts.size()],
                                  .reverse = reverse,
                                  .narrow = narrow});
      at += biased ? 4 : 2;
      outputs.push_back(made.output);
      lasts.push_back(made.last);
    }
    value = gru.bidirectional ? at::cat(outputs, 2) : outputs[0];
    // The draws of torch's.
    if (gru.dropout != 0 && gru.train && layer + 1 < gru.num_layers) value = at::dropout(value, gru.dropout, true);
  }
  if (gru.batch_first) value.transpose_(0, 1);
  return {value, at::stack(lasts, 0)};
}

}  // namespace oxytorch::ops
