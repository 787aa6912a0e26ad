/// Times forward and backward with a setting on and off, and leaves no trace of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <utility>
#include <vector>

namespace oxytorch::calibrate {

/// Gradients, buffers and the CPU generator as they were; put back at the end.
class Escrow {
 public:
  Escrow(const torch::nn::Module& model, std::vector<at::Tensor> parameters);
  ~Escrow();
  Escrow(const Escrow&) = delete;
  Escrow& operator=(const Escrow&) = delete;
  /// Undoes one trial.
  void rewind();

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> gradients_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  at::Tensor generator_;
};

struct Trial {
  double without = 0;  ///< least seconds
  double with = 0;
  double drift = 0;  ///< relative change of the first loss
  int rounds = 0;
  [[nodiscard]] double ratio() const { return with / without; }
};

/// Seconds and loss of one forward and backward.
std::pair<double, double> once(Escrow& escrow, const std::function<at::Tensor()>& loss);

/// Runs pairs with `flip(false)` and `flip(true)`; leaves it switched off, also when an exception passes.
Trial compare(Escrow& escrow, const std::function<at::Tensor()>& loss, const std::function<void(bool)>& flip);

}  // namespace oxytorch::calibrate
