/// Attention that a model writes out as two matrix products with a softmax between them, computed as one.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// While a Scope is open on a thread, a product of two batches of matrices whose right ones are transposed gives scores
/// that have no values yet: matmul, bmm, baddbmm or einsum of 3 or 4 dimensions, of float32, bfloat16 or float16, with
/// a gradient. Numbers they are multiplied with or divided by, a soft cap (c * tanh(scores / c)), masks that are added
/// or filled in by minus infinity or a number of at most -9000, softmax over the keys, dropout and changes of the dtype
/// leave them so. The product of the weights and the values then is one call of this library's attention on a CPU,
/// which holds no scores; a mask that requires a gradient gets it. Dropout draws from torch's generator what it would
/// draw there. On CUDA and privateuse1 it is torch's scaled_dot_product_attention, where neither dropout nor a cap is
/// in between.
///
/// Anything else that asks gets the values that torch's operators give. So does, on a CPU, a softmax whose query sees
/// nothing: it is NaN where minus infinity hides all keys, and weighs them where a finite number does. What is read of
/// the weights when attention was computed, such as their mean over heads, is computed then. Under torch.func
/// transforms, dispatch modes, torch.compile, hooks for saved tensors and inference mode all is left alone.
///
/// Asked for after what they are made of was changed in place, they throw Error(InvalidState). Direct access to the
/// memory of a tensor that has none (data_ptr, numpy) throws in torch's words.
class OXY_API DeferredScores {
 public:
  /// Error(NotSupported) where the results are further from fp64 than twice torch's own.
  DeferredScores();

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

  /// Whether attention on that device is taken.
  [[nodiscard]] static bool serves(at::Device device) noexcept;
  /// Scores of this process that were taken, so far.
  [[nodiscard]] static std::int64_t scores() noexcept;
  /// Attention that was computed as one.
  [[nodiscard]] static std::int64_t joined() noexcept;
};

}  // namespace oxytorch::tune
