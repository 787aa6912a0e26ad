/// The steps of torch's Adam, AdamW and SGD on the CPU, with the bits of its loop over tensors, in one pass over each.
///
/// torch's loop makes one pass a term: eight over the parameters and averages of Adam. Here each block of elements goes
/// through all terms while it is in cache, blocks by all intra-op threads, each term rounded as torch rounds it.
///
/// Bits. Whether torch's kernels fuse multiply-adds is found out by holding this against torch's own operators on odd
/// sizes; where neither way agrees, native_step_differs() says so. Square roots are torch's own operator, which may be
/// a library's that rounds otherwise than IEEE 754. Only the payload of a computed NaN may differ.
///
/// Served are fp32 tensors of equal sizes and strides, dense and not overlapping; others go through torch's operators,
/// in its order, here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// Which of torch's two front ends is followed: the same formulas, terms in another order.
enum class FrontEnd : std::uint8_t { Python, Cpp };

/// Options of Adam and AdamW, named as torch's.
struct AdamStep {
  FrontEnd front_end = FrontEnd::Python;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled_weight_decay = false;  ///< AdamW
  bool maximize = false;
};

/// Options of SGD.
struct SgdStep {
  FrontEnd front_end = FrontEnd::Python;
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
};

/// Tensors of a step, by parameter; all of one length, or empty where that is said.
struct StepTensors {
  std::vector<at::Tensor> params = {};
  std::vector<at::Tensor> grads = {};             ///< dense
  std::vector<at::Tensor> exp_avgs = {};          ///< Adam
  std::vector<at::Tensor> exp_avg_sqs = {};       ///< Adam
  std::vector<at::Tensor> max_exp_avg_sqs = {};   ///< Adam; empty without amsgrad
  std::vector<at::Tensor> momentum_buffers = {};  ///< SGD; empty without momentum
};

/// One step of CPU tensors. `steps` counts each parameter's steps, this one included. Error(InvalidArgument) where the
/// lists differ in length, before anything is changed; Error(NotSupported) where native_step_differs() says why.
/// Autograd does not record it, versions of what it writes go up.
OXY_API void adam_step(const AdamStep& options, const StepTensors& tensors, const std::vector<double>& steps);
OXY_API void sgd_step(const SgdStep& options, const StepTensors& tensors);

/// Why this process's torch is not followed to the bit; empty where it is. Found out once.
OXY_API const std::string& native_step_differs();

}  // namespace oxytorch::tune
