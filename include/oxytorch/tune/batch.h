/// What a training step in C++ is given: a batch and the way to its loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>

namespace oxytorch {

/// What a supervised model learns from. A `torch::data::Example<>` is `{example.data, example.target}`.
struct Batch {
  at::Tensor input;
  at::Tensor target;
};

/// Computes the loss of a batch, a scalar tensor, under the autocast of the trainer or plan that calls it.
using LossFunction = std::function<at::Tensor(const Batch&)>;

/// The loss of `model(batch.input)` against `batch.target` by `criterion`; both are torch module holders, kept alive.
template <class Model, class Criterion>
[[nodiscard]] LossFunction supervised(Model model, Criterion criterion) {
  return [model = std::move(model), criterion = std::move(criterion)](const Batch& batch) mutable -> at::Tensor {
    return criterion(model->forward(batch.input), batch.target);
  };
}

}  // namespace oxytorch
