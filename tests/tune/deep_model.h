/// A model of six residual blocks that keep much more than they hand on, for budgets of memory.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "oxytorch/memory/block.h"

namespace oxytorch {

/// Batch normalisation and dropout make it depend on state. Called as blocks of a plan, "deep.layer0" and so on, or
/// not.
struct DeepImpl : torch::nn::Module {
  explicit DeepImpl(std::int64_t width = 128, bool blocks = true) : blocks(blocks) {
    namespace nn = torch::nn;
    for (int i = 0; i < 6; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       nn::Sequential(nn::Linear(32, width), nn::BatchNorm1d(width), nn::GELU(),
                                                      nn::Dropout(0.1), nn::Linear(width, 32))));
    }
    head = register_module("head", nn::Linear(32, 5));
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      auto run = [layer = layers[i]](const at::Tensor& in) mutable { return in + layer->forward(in); };
      x = blocks ? memory::block("deep.layer" + std::to_string(i), run, x) : run(x);
    }
    return head->forward(x);
  }
  bool blocks;
  std::vector<torch::nn::Sequential> layers;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Deep);

}  // namespace oxytorch
