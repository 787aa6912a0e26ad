/// Faster CPU operators, put behind torch's dispatcher and taken back.
///
/// | name | operators | served |
/// |---|---|---|
/// | max_pool2d | max_pool2d_with_indices, its backward | fp32, contiguous |
/// | batch_norm | native_batch_norm, its backward | fp32, contiguous, images of more than one element, in training |
/// | bernoulli | bernoulli_ (dropout's mask) | fp32, bf16, fp16, bool, dense, by the Mersenne Twister |
/// | embedding | embedding_dense_backward | fp32, gradients not scaled by frequency |
/// | embedding_sum | embedding | the same of a parameter: what backward adds to its gradient, it adds to rows alone |
/// | flash_attention | _scaled_dot_product_flash_attention_for_cpu, its backward | fp32, bf16, fp16 |
/// | composed_attention | scaled_dot_product_attention: dropout, or a mask that has a gradient | fp32, bf16, fp16 |
/// | convolution | convolution_backward: the gradient of the weight | bf16 images in channels_last memory |
/// | lstm | mkldnn_rnn_layer, its backward | fp32, bf16, LSTM |
/// | gru | gru of a sequence that is not packed | fp32, bf16, and fp32 under autocast to bf16 |
/// | linear | linear, addmm and matmul of a weight under autocast, with the relu that follows | bf16 products of fp32
/// weights | | gelu | gelu by tanh, gelu_backward of both forms | fp32, bf16, fp16, dense | | silu | silu, silu_,
/// silu_backward | fp32, bf16, fp16, dense |
///
/// What is not served goes to the kernel that was there before, as do arguments that it refuses. So does everything on
/// other devices, under torch.func transforms and in what torch.compile generates itself; of gru and composed_attention
/// also what runs in inference mode, since torch takes them apart at autograd.
///
/// Bits. max_pool2d, batch_norm, bernoulli, embedding and embedding_sum give torch's. Before such an operator is
/// installed it meets the kernel that it replaces on a set of odd shapes; one that differs in a bit is refused with a
/// reason. Where a compiler was free to fuse a multiply-add of torch's kernel, this finds out which it did. Only the
/// payload of a computed NaN may differ. flash_attention (oxytorch/ops/attention.h) rounds otherwise and is refused
/// where it is further from fp64 than twice torch's own error, and so are convolution, linear, gelu, silu
/// (oxytorch/ops), gru, and composed_attention, which drops the weights that torch would and keeps a byte of each,
/// where torch keeps twelve; lstm, where it differs from torch's by more than sums of its length round. The backward of
/// lstm stays when it is taken out: it serves graphs that were recorded with it, and hands on all others.
///
/// linear joins ReLU once it has followed a layer of as many outputs: such a layer gives, in training, a tensor without
/// values, which ReLU computes with its own. Anything else that asks gets the layer's values; after its weight or input
/// was changed in place, Error(InvalidState).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// What became of one name.
struct OperatorReport {
  std::string name;
  bool installed = false;
  std::string reason;  ///< why not; empty where it is installed
};

/// Operators that this object put into the process; they leave with it. The dispatcher is one for all threads: install
/// and uninstall while no other thread trains. Graphs recorded before either stay good.
class OXY_API NativeOperators {
 public:
  NativeOperators() = default;
  ~NativeOperators();
  NativeOperators(const NativeOperators&) = delete;
  NativeOperators& operator=(const NativeOperators&) = delete;

  /// The operators with torch's bits.
  static const std::vector<std::string>& exact_names();

  /// Every name that install() takes.
  static const std::vector<std::string>& names();

  /// Whether gradients of embeddings alone are worth a trial: tables of `embedding_elements` hold at least half of all
  /// `parameter_elements`, or an eighth where a step `accumulates` the gradients of several batches.
  [[nodiscard]] static bool is_worth_a_trial(std::int64_t embedding_elements, std::int64_t parameter_elements,
                                             bool accumulates) noexcept;

  /// Whether the gradient of a convolution's weight of these sizes is computed here where its image is of bfloat16 in
  /// channels_last memory.
  [[nodiscard]] static bool serves_convolution(const std::vector<std::int64_t>& weight) noexcept;

  /// Proves and installs `names`; those with torch's bits where it is empty. One that is installed already, here or by
  /// another object, is refused. Error(InvalidArgument) for an unknown name, and then none is installed.
  std::vector<OperatorReport> install(const std::vector<std::string>& names = {});

  /// Gives torch's kernels back.
  void uninstall() noexcept;

  /// Calls that this process has handed to torch's kernels so far, of what is not served and while kernels are proven.
  [[nodiscard]] static std::int64_t handed_on() noexcept;

  /// Calls of composed_attention that were served so far.
  [[nodiscard]] static std::int64_t composed_attentions() noexcept;

  /// Calls of relu that were computed with their linear layer so far.
  [[nodiscard]] static std::int64_t joined_relus() noexcept;

  /// Names that are installed by this object.
  [[nodiscard]] const std::vector<std::string>& installed() const noexcept { return installed_; }

 private:
  std::vector<std::string> installed_;
};

}  // namespace oxytorch::tune
