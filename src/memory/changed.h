/// Which tensors a function changes in place, and what they held before.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <unordered_set>
#include <vector>

namespace oxytorch::memory {

/// Memory that operators on this thread wrote to, as it was before the first of them.
class Changed {
 public:
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;  ///< by which it was written first
    at::Tensor before;                                                          ///< its bytes
  };

  /// While it lives, operators of this thread are noted in `into`; in the end what has gone by then is left out.
  class Recording {
   public:
    explicit Recording(Changed& into);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    Changed& into_;
    Changed* previous_;
    at::RecordFunctionGuard enabled_{true};
    at::CallbackHandle handle_;
  };

  void written(const at::Tensor& tensor);
  void made(const at::Tensor& tensor);
  [[nodiscard]] const std::vector<Memory>& memory() const { return memory_; }

 private:
  std::vector<Memory> memory_;
  std::unordered_set<const c10::StorageImpl*> known_;  // made while recording, or noted
};

/// Puts what of `changed` is alive to what it was before, and in the end back to what it is now, bytes and version
/// counters.
class AsBefore {
 public:
  explicit AsBefore(const Changed& changed);
  ~AsBefore();
  AsBefore(const AsBefore&) = delete;
  AsBefore& operator=(const AsBefore&) = delete;

 private:
  struct Bytes {
    at::Tensor live, now;
  };
  struct Version {
    at::Tensor tensor;
    std::int64_t version;
  };
  std::vector<Bytes> bytes_;
  std::vector<Version> versions_;
};

}  // namespace oxytorch::memory
