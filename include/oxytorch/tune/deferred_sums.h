/// Dropout, the addition of a residual and the layer or RMS normalization of the sum as one, in a model that knows
/// nothing of it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// While a Scope is open on a thread, dropout in training, and the addition of two tensors of one size (dense, of
/// float32, bfloat16 or float16, on the CPU, with a gradient), give a tensor that has no values yet. An addition joins
/// dropout, and a layer or RMS normalization over the last dimension of either computes it and itself in one pass, by
/// oxytorch::ops::add_layer_norm and add_rms_norm. Anything else that asks gets the values that torch's operators give.
/// Layer and RMS normalization of other tensors takes this library's kernel too.
///
/// Under autocast to 16 bits a float32 norm waits in turn: a linear layer takes it in 16 bits, in which the kernel then
/// writes it, with the bits of a cast. Norms of a width that are mostly asked for as they are wait no longer.
///
/// So does RMS normalization that a model writes out over rows of contiguous tensors, as LLaMA, Gemma and T5 of Hugging
/// Face do: x * rsqrt(mean(x^2) + eps), or x over the root, in float32, rounded to x's dtype or not, times a weight.
/// Squares, and 16-bit tensors that become float32, have no values yet either. On CUDA and privateuse1 these norms
/// alone are taken, and computed by torch's rms_norm, a single kernel on CUDA, which keeps less for backward. Under
/// torch.func transforms, dispatch modes, torch.compile, hooks for saved tensors and inference mode all is left alone.
///
/// Asked for after what was added was changed in place, it throws Error(InvalidState). Direct access to the memory of a
/// tensor that has none (data_ptr, numpy) throws in torch's words.
class OXY_API DeferredSums {
 public:
  /// Error(NotSupported) where the results are further from fp64 than twice torch's own.
  DeferredSums();

  /// Of one thread, until it ends. Scopes may lie in each other.
  class OXY_API Scope {
   public:
    Scope();
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    bool is_first_;
  };

  /// Whether norms on that device are taken.
  [[nodiscard]] static bool serves(at::Device device) noexcept;
  /// Dropouts and additions of this process that were taken, so far.
  [[nodiscard]] static std::int64_t sums() noexcept;
  /// Normalizations that one was computed with.
  [[nodiscard]] static std::int64_t joined() noexcept;
  /// Normalizations that were written in the 16 bits in which a linear layer takes them.
  [[nodiscard]] static std::int64_t narrowed() noexcept;
  /// RMS normalizations that a model wrote out and that were computed as one.
  [[nodiscard]] static std::int64_t written() noexcept;
};

}  // namespace oxytorch::tune
