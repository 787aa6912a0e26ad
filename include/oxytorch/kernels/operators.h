/// Operators of training on raw host memory, with the bits of torch's own CPU kernels: max pooling, batch
/// normalization in training, Bernoulli draws of the Mersenne Twister, and the steps of Adam and SGD.
///
/// Torch-free: pointers in, pointers out. `oxytorch::tune::NativeOperators` puts them behind torch's dispatcher,
/// `oxytorch::tune::adam_step` and `sgd_step` take them over the tensors of a whole step.
///
/// Numbers. Each function does the roundings that torch's kernel does, in its order, for any instruction set and any
/// split of the work. Where a compiler was free to fuse a multiply-add of that kernel, a flag says which it did.
/// Of a result that is NaN, and was computed, the payload may differ.
///
/// Threads. A function works on the range it is given and keeps no state: disjoint ranges may run at once.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"
#include "oxytorch/kernels/element_type.h"

namespace oxytorch::kernels {

/// Windows of a two-dimensional pooling; pairs are (height, width). A plane is one image of one channel, row by row.
struct PoolShape {
  std::int64_t input[2];   ///< input[0] * input[1] < 2^31
  std::int64_t output[2];  ///< every window begins before the end of the input
  std::int64_t kernel[2];  ///< >= 1, as stride and dilation
  std::int64_t stride[2];
  std::int64_t padding[2];
  std::int64_t dilation[2];
};

/// Maximum of each window and its index within the plane, of `planes` contiguous planes. Of equal elements the first
/// wins, of NaNs the last. A window that dilation leaves without an element gives -inf.
OXY_API void max_pool2d(const PoolShape& shape, std::int64_t planes, const float* input, float* output,
                        std::int64_t* indices);

/// Gradient of max_pool2d: each output's gradient added to the input at its index, outputs in order. Of `shape` the
/// sizes bound the indices; the windows are a hint where to find them. False where an index is outside its plane:
/// `grad_input` is then unspecified.
[[nodiscard]] OXY_API bool max_pool2d_backward(const PoolShape& shape, std::int64_t planes, const float* grad_output,
                                               const std::int64_t* indices, float* grad_input);

/// Where torch's kernels of batch normalization fuse a multiply-add: a matter of the compiler that built them.
struct BatchNormFusion {
  bool affine = true;    ///< input * alpha + beta, and beta = bias - mean * alpha
  bool dot = false;      ///< sum of (input - mean) * grad over whole vectors
  bool dot_rest = true;  ///< and over the elements of a plane after its last whole vector
  bool gradient = true;  ///< grad - mean of grad - (input - mean) * k
};

/// Batch normalization in training of `batch` x `channels` x `plane` contiguous fp32 elements; all sizes >= 1.
struct BatchNorm {
  std::int64_t batch = 0;
  std::int64_t channels = 0;
  std::int64_t plane = 0;
  const float* input = nullptr;
  const float* weight = nullptr;  ///< null: 1
  BatchNormFusion fusion;
};

/// Forward pass of channels [begin, end). Arrays other than `output` hold `channels` elements.
struct BatchNormForward : BatchNorm {
  const float* bias = nullptr;    ///< null: 0
  float* running_mean = nullptr;  ///< null: not kept, as running_var
  float* running_var = nullptr;
  float* save_mean = nullptr;
  float* save_invstd = nullptr;
  float* output = nullptr;
  double momentum = 0.1;
  double eps = 1e-5;
};
OXY_API void batch_norm_forward(const BatchNormForward& args, std::int64_t begin, std::int64_t end);

/// Backward pass of channels [begin, end).
struct BatchNormBackward : BatchNorm {
  const float* grad_output = nullptr;
  const float* save_mean = nullptr;
  const float* save_invstd = nullptr;
  float* grad_input = nullptr;  ///< null: not wanted, as the others
  float* grad_weight = nullptr;
  float* grad_bias = nullptr;
};
OXY_API void batch_norm_backward(const BatchNormBackward& args, std::int64_t begin, std::int64_t end);

/// State of the Mersenne Twister MT19937 (Matsumoto and Nishimura 1998): `next` of its words are used up.
struct MersenneTwister {
  static constexpr int kWords = 624;
  std::uint32_t word[kWords];
  int next = kWords;
};

/// `count` draws in F32, BF16, F16 or Int8, as of bool: 1 where the low 53 bits of two outputs, as a fraction of 2^53,
/// are less than `p`, else 0.
OXY_API void bernoulli(MersenneTwister& generator, double p, std::int64_t count, ElementType element, void* to);

/// A step of Adam or AdamW as torch's loop over tensors takes it; numbers are rounded to fp32 as that loop does.
struct AdamLoop {
  bool fused = true;       ///< whether torch's kernels fuse multiply-adds: a matter of the compiler that built them
  bool lerp = true;        ///< exp_avg.lerp_(grad, 1 - beta1); false: exp_avg.mul_(beta1).add_(grad, 1 - beta1)
  bool maximize = false;   ///< the gradient is negated first
  float decay = 1;         ///< the parameter is multiplied by it: 1 - lr * weight_decay
  float weight_decay = 0;  ///< times the parameter, is added to the gradient; 0: is not
  float beta1 = 0;
  float beta1_rest = 0;  ///< 1 - beta1
  float beta2 = 0;
  float beta2_rest = 0;  ///< 1 - beta2
  float correction = 1;  ///< root of 1 - beta2^t
  float eps = 0;
  float rate = 0;  ///< -lr / (1 - beta1^t)
};
/// Running averages of `count` elements. `max_exp_avg_sq` is null without amsgrad.
OXY_API void adam_averages(const AdamLoop& loop, std::int64_t count, const float* param, const float* grad,
                           float* exp_avg, float* exp_avg_sq, float* max_exp_avg_sq);
/// Then the parameters. `root` holds the square roots of exp_avg_sq, or of max_exp_avg_sq: the caller takes them, as
/// torch's may come from a library that rounds otherwise.
OXY_API void adam_parameters(const AdamLoop& loop, std::int64_t count, const float* exp_avg, const float* root,
                             float* param);

/// A step of SGD as torch's loop over tensors takes it.
struct SgdLoop {
  bool fused = true;
  bool maximize = false;
  bool nesterov = false;
  float weight_decay = 0;  ///< 0: none
  float momentum = 0;
  float dampening_rest = 1;  ///< 1 - dampening
  float rate = 0;            ///< -lr
};
/// `momentum_buffer` is null without momentum.
OXY_API void sgd_step(const SgdLoop& loop, std::int64_t count, const float* grad, float* momentum_buffer, float* param);

}  // namespace oxytorch::kernels
