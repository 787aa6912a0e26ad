/// Modules for LibTorch made of the operators of this library: normalization of either kind, self-attention,
/// feed-forward layers, and transformers of them.
///
/// ```cpp
/// oxytorch::nn::Transformer body(oxytorch::nn::TransformerOptions::llama(256, 8, 4));  // width, heads, layers
/// auto hidden = body(embedded);                            // batch x tokens x width
/// auto packed = body->forward_packed(documents, offsets);  // tokens x width, of documents one after the other
/// ```
///
/// They are torch::nn modules: parameters have names, `to`, `clone`, `torch::save` and `torch::load` work. Derivatives,
/// dtypes and devices are those of oxytorch/ops.h, and of torch::nn::Linear, which starts as torch has it.
///
/// Threads. A forward keeps nothing in the module: several threads may run one.
#pragma once

#include "oxytorch/nn/transformer.h"
