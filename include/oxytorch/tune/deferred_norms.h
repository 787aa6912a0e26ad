/// Batch normalization and what follows it as one, in a model that knows nothing of it.
#pragma once

#include <cstdint>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// While such an object lives and a Scope is open on a thread, a batch normalization in training of rows of channels
/// (images in channels_last, or a matrix; on the CPU; with a gradient) takes the mean and variance of its batch, and
/// returns a tensor that has no values yet. What follows, an addition, ReLU, max pooling by windows that lie side by
/// side, joins it, and oxytorch::ops::batch_norm computes them in one pass when anything else asks. Under torch.func
/// transforms, dispatch modes, torch.compile and inference mode every layer is left alone.
///
/// The values are of the weights at the time of the call. Asked for after the input, or what was added, was changed in
/// place, it throws Error(InvalidState). Direct access to the memory of a tensor that has none (data_ptr, numpy) throws
/// in torch's words.
///
/// The dispatcher is one for all threads: make and destroy such objects while no other thread trains. Tensors that were
/// made before stay good.
class OXY_API DeferredNorms {
 public:
  /// Error(NotSupported) where the results are further from fp64 than twice torch's own.
  DeferredNorms();
  ~DeferredNorms();
  DeferredNorms(const DeferredNorms&) = delete;
  DeferredNorms& operator=(const DeferredNorms&) = delete;

  /// Of one thread, until it ends. Scopes may lie in each other.
  class OXY_API Scope {
   public:
    Scope();
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  /// Layers of this process that were taken, so far.
  [[nodiscard]] static std::int64_t layers() noexcept;
  /// Additions, ReLUs and poolings that joined one.
  [[nodiscard]] static std::int64_t joined() noexcept;
};

}  // namespace oxytorch::tune
