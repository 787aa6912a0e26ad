#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <vector>

#include "ops/dispatch.h"
#include "ops/linear_cross_entropy_kernels.h"
#include "ops/tiles.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;

at::ScalarType type_of_sums(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// A sum over chunks of tokens. What comes alone stays as it is.
class ChunkSum {
 public:
  explicit ChunkSum(at::ScalarType type) : type_(type) {}
  void add_product(const Tensor& left, const Tensor& right) {
    if (total_.defined() && left.scalar_type() == type_) {
      total_.addmm_(left, right);
    } else {
      add(at::mm(left, right).to(type_of_gradient(left.scalar_type())));
    }
  }
  void add(const Tensor& more) {
    if (!total_.defined()) {
      total_ = more;
      return;
    }
    total_ = total_.to(type_);
    total_.add_(more);
  }
  [[nodiscard]] Tensor times(const Tensor& factor, at::ScalarType type) {
    return (factor.defined() ? total_.mul_(factor) : total_).to(type);
  }

 private:
  at::ScalarType type_;
  Tensor total_;
};

}  // namespace

std::int64_t tokens_at_a_time(const LinearCrossEntropy& call, std::array<bool, 3> wanted) {
  constexpr std::int64_t kFewest = 256;  // with fewer rows a product does not fill an accelerator
  const auto tokens = call.input.size(0), width = call.input.size(1), classes = call.weight.size(0);
  // So many that their logits take about what the input takes (Liger Kernel, arXiv:2410.10989, section 3.2).
  const auto few = std::max(kFewest, round_up(tokens * width / classes, kFewest));
  // For each class: a logit and its gradient of each token, and the sum of the weight's gradient where it is apart.
  const std::int64_t wide = c10::elementSize(type_of_sums(call.input));
  const std::int64_t for_token = wide + c10::elementSize(call.input.scalar_type());
  const bool is_apart = wanted[1] && type_of_gradient(call.weight.scalar_type()) != type_of_sums(call.input);
  return few * for_token + (is_apart ? width * wide : 0) < tokens * for_token ? few : tokens;
}

LossAndGradients linear_cross_entropy_by_torch(const LinearCrossEntropy& call, std::array<bool, 3> wanted) {
  const auto type = call.input.scalar_type(), sums = type_of_sums(call.input);
  const auto tokens = call.input.size(0), classes = call.weight.size(0);
  const double smoothing = call.label_smoothing;
  const Tensor weight = call.weight.to(type);
  const Tensor bias = call.bias.defined() ? call.bias.to(type) : call.bias;
  const Tensor hidden = call.target.eq(call.ignore_index).unsqueeze(1);
  const Tensor classes_of = call.target.unsqueeze(1).masked_fill(hidden, 0);
  // Gradients are divided by the number of tokens last: float16 could not hold those of logits afterwards.
  Tensor of_loss, of_gradients;
  if (call.mean) {
    const Tensor counted = hidden.logical_not().sum(sums);
    of_loss = counted.reciprocal();  // NaN for a mean of no tokens, as torch's
    of_gradients = counted.clamp_min(1).reciprocal();
  }

  std::vector<Tensor> of_inputs;
  ChunkSum of_weight(sums), of_bias(sums), losses(sums);
  const auto step = tokens_at_a_time(call, wanted);
  for (std::int64_t first = 0; first < tokens; first += step) {
    const auto count = std::min(step, tokens - first);
    const auto part = [&](const Tensor& all) { return all.narrow(0, first, count); };
    const Tensor input = part(call.input), wanted_class = part(classes_of);
    // In place from here on: shifted logits, their exponentials, probabilities, gradients.
    Tensor logits = at::linear(input, weight, if_defined(bias)).to(sums);
    logits.sub_(logits.amax(1, true));
    Tensor loss = logits.gather(1, wanted_class).mul_(smoothing - 1);
    if (smoothing > 0) loss.sub_(logits.mean(1, true), smoothing);
    logits.exp_();
    const Tensor exponentials = logits.sum(1, true);
    losses.add(loss.add_(exponentials.log()).masked_fill_(part(hidden), 0).sum());
    if (!(wanted[0] || wanted[1] || wanted[2])) continue;
    logits.div_(exponentials);
    if (smoothing > 0) logits.sub_(smoothing / static_cast<double>(classes));
    logits.scatter_(1, wanted_class, logits.gather(1, wanted_class).sub_(1 - smoothing));
    logits.masked_fill_(part(hidden), 0);
    if (wanted[2]) of_bias.add(logits.sum(0));
    const Tensor narrow = logits.to(type);
    logits.reset();
    if (wanted[0]) of_inputs.push_back(at::mm(narrow, weight).to(type_of_gradient(type)));
    if (wanted[1]) of_weight.add_product(narrow.t(), input);
  }
  LossAndGradients done{losses.times(of_loss, sums), {}, {}, {}};
  if (wanted[0]) {
    done.input = of_inputs.size() == 1 ? of_inputs.front() : at::cat(of_inputs);
    if (call.mean) done.input.mul_(of_gradients);
  }
  const auto type_of_weight = type_of_gradient(call.weight.scalar_type());
  if (wanted[1]) done.weight = of_weight.times(of_gradients, type_of_weight);
  if (wanted[2]) done.bias = of_bias.times(of_gradients, type_of_weight);
  return done;
}

}  // namespace oxytorch::ops
