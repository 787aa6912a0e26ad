/// Linear layer and cross entropy a few tokens at a time: on the CPU, and by torch's operators on any device.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace oxytorch::ops {

struct LinearCrossEntropy {
  const at::Tensor& input;   ///< tokens x width
  const at::Tensor& weight;  ///< classes x width, of the dtype of `input` or of float32
  const at::Tensor& target;  ///< tokens; each is a class or `ignore_index`
  const at::Tensor& bias;    ///< classes, of the dtype of `weight`; or undefined
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  bool mean = true;
};

/// float16 cannot hold gradients that the loss scale has not been applied to.
[[nodiscard]] inline at::ScalarType type_of_gradient(at::ScalarType type) {
  return type == at::kHalf ? at::kFloat : type;
}

/// The loss, and the gradients of input, weight and bias that are wanted, each of its type_of_gradient(); undefined
/// where not wanted.
struct LossAndGradients {
  at::Tensor loss, input, weight, bias;
};
LossAndGradients linear_cross_entropy_cpu(const LinearCrossEntropy& call, std::array<bool, 3> wanted);

/// The same where classes are so few that the logits of many tokens fit, and linear_cpu() takes the layer: with the
/// products of linear layers. `counted` tokens count, and no target is out of range.
LossAndGradients linear_cross_entropy_of_few(const LinearCrossEntropy& call, std::array<bool, 3> wanted,
                                             std::int64_t counted);
[[nodiscard]] bool has_few_classes(const LinearCrossEntropy& call);

/// The loss as a tensor, from the sum of the losses of the tokens that count.
at::Tensor reduced_loss(const LinearCrossEntropy& call, double sum, std::int64_t counted);

/// The same by torch's operators, on any device and of any floating dtype. It reads nothing on the host. The loss has
/// the dtype of the sums: float64 for float64, else float32. Bits are those of torch's operators on that device.
LossAndGradients linear_cross_entropy_by_torch(const LinearCrossEntropy& call, std::array<bool, 3> wanted);

/// Tokens whose logits linear_cross_entropy_by_torch() holds at a time.
[[nodiscard]] std::int64_t tokens_at_a_time(const LinearCrossEntropy& call, std::array<bool, 3> wanted);

}  // namespace oxytorch::ops
