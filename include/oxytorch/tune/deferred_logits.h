/// The last linear layer of a classifier and its loss as one, in a model and a loss function that know nothing of it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// While such an object lives and a Scope is open on a thread, a large linear layer in training (linear, addmm, matmul
/// with a transposed weight) returns a tensor that has sizes and a gradient, and no values yet. If what asks first is
/// cross_entropy with the indices of classes (by way of views, a cast to float32, chosen rows, or classes moved to
/// dimension 1), the loss comes from oxytorch::ops::linear_cross_entropy, which never holds all logits and leaves out
/// rows that do not count. If anything else asks, the values are computed as they would have been, and go to it.
///
/// "Large" is a weight of at least 256 classes, of float32, bfloat16 or float16 on a device that serves(). Whether a
/// layer of some size feeds a loss is learned as it runs: one whose values were asked for more often than not is left
/// alone. Under torch.func transforms, dispatch modes, torch.compile and inference mode every layer is left alone.
///
/// The values are of the weights at the time of the call: before_weights_change() computes those of all tensors that
/// live. Asked for after the weights, or the layer's input, were changed in place without it, it throws
/// Error(InvalidState). Direct access to the memory of a tensor that has none (data_ptr, numpy) throws in torch's
/// words.
///
/// The dispatcher is one for all threads: make and destroy such objects while no other thread trains. Tensors that were
/// made before stay good.
class OXY_API DeferredLogits {
 public:
  /// Error(NotSupported) where the loss is further from fp64 than twice torch's own on that kind of device, or is not
  /// served there. Layers on all devices that serves() names are deferred.
  explicit DeferredLogits(c10::Device device = c10::DeviceType::CPU);
  ~DeferredLogits();
  DeferredLogits(const DeferredLogits&) = delete;
  DeferredLogits& operator=(const DeferredLogits&) = delete;

  /// Whether layers on the device can be deferred: a CPU, CUDA, Gaudi (HPU) or privateuse1.
  [[nodiscard]] static bool serves(c10::Device device) noexcept;

  /// Of one thread, until it ends. Scopes may lie in each other.
  class OXY_API Scope {
   public:
    Scope();
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  /// Computes the values of deferred tensors that live: before an optimizer's step. A layer whose tensors are kept so
  /// long is left alone from then on, as it would cost a product more.
  static void before_weights_change();

  /// Losses of this process that were computed without logits, so far.
  [[nodiscard]] static std::int64_t losses() noexcept;
  /// Deferred tensors of this process whose values were computed after all.
  [[nodiscard]] static std::int64_t computed() noexcept;
};

}  // namespace oxytorch::tune
