/// GELU or SiLU and the product with it as one (SwiGLU, GEGLU), in a model that knows nothing of it.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// While a Scope is open on a thread, GELU and SiLU (of float32, bfloat16 or float16, on the CPU, with a gradient) give
/// a tensor that has no values yet. A product of it and a tensor of the same size and dtype computes both in one pass,
/// by oxytorch::ops::swiglu and geglu, and backward keeps what the activation was of instead of its values. Anything
/// else that asks gets the values that torch's operator gives. Under torch.func transforms, dispatch modes,
/// torch.compile, hooks for saved tensors and inference mode all is left alone.
///
/// Asked for after what it is of was changed in place, it throws Error(InvalidState). Direct access to the memory of a
/// tensor that has none (data_ptr, numpy) throws in torch's words.
class OXY_API DeferredGates {
 public:
  /// Error(NotSupported) where the results are further from fp64 than twice torch's own.
  DeferredGates();

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

  /// Activations of this process that were taken, so far.
  [[nodiscard]] static std::int64_t activations() noexcept;
  /// Products that one was computed with.
  [[nodiscard]] static std::int64_t joined() noexcept;
};

}  // namespace oxytorch::tune
