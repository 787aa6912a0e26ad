/// One parameter of a tail with its state: which tensors it keeps, in which formats, and how they are made, taken over
/// and checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "optim/algorithm.h"
#include "optim/dense.h"
#include "optim/known_sum.h"
#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

/// What all parameters of a tail are kept and updated by.
struct Recipe {
  Algorithm algorithm;
  TailOptions options;
  std::vector<GroupOptions> groups;

  [[nodiscard]] bool counts_steps() const { return traits(algorithm).counts_steps || options.stochastic_rounding; }
};

/// The same sizes and strides.
inline bool same_shape(const c10::impl::SizesAndStrides& a, const c10::impl::SizesAndStrides& b) {
  const std::size_t dim = a.size();
  if (b.size() != dim) return false;
  const std::int64_t *sizes = a.sizes_data(), *other_sizes = b.sizes_data();
  const std::int64_t *strides = a.strides_data(), *other_strides = b.strides_data();
  for (std::size_t d = 0; d < dim; ++d) {
    if (sizes[d] != other_sizes[d] || strides[d] != other_strides[d]) return false;
  }
  return true;
}

/// same_strides() of tensors that were plain ones when their keys were last looked at, and have the same keys now.
inline bool laid_out_alike(c10::TensorImpl& tensor, c10::TensorImpl& like) {
  return same_shape(tensor.sizes_and_strides(), like.sizes_and_strides()) || same_strides(tensor, like);
}

/// Whether a device is one of those that its tensors' keys tell apart.
inline bool keys_tell(c10::Device device) { return device.is_cpu(); }

/// What a parameter's shape and a gradient that the kernels can read looked like when they were last checked: as long
/// as they still do, so is what was found then.
class TensorSignature {
 public:
  /// With `grad` undefined there is none that the kernels can read: nothing is like it.
  void remember(const at::Tensor& param, const at::Tensor& grad);
  void forget() noexcept { grad_keys_ = {}; }

  /// The gradient's elements; null where it, or the parameter, is not as remembered.
  [[nodiscard]] void* elements(c10::TensorImpl& param, c10::TensorImpl& grad) const {
    if (grad.key_set() != grad_keys_ || grad.dtype() != grad_type_ ||
        !(keys_tell(device_) || grad.device() == device_) || !same_shape(param.sizes_and_strides(), shape_)) {
      return nullptr;
    }
    c10::StorageImpl& storage = *grad.unsafe_storage().unsafeGetStorageImpl();
    const auto offset = static_cast<std::size_t>(grad.storage_offset());
    if ((offset + numel_) * grad_bytes_ > storage.nbytes() || !laid_out_alike(grad, param)) return nullptr;
    return numel_ == 0 ? address(grad) : static_cast<char*>(storage.mutable_data()) + offset * grad_bytes_;
  }

 private:
  c10::DispatchKeySet grad_keys_;
  caffe2::TypeMeta grad_type_;
  c10::Device device_ = at::kCPU;
  std::size_t numel_ = 0, grad_bytes_ = 0;  // an element's
  c10::impl::SizesAndStrides shape_;
};

/// A tensor that a plan holds the address of, as it was when the plan was made. A tensor's memory, strides, sizes,
/// dtype and device can all be exchanged while it stays the same object (`t.data = ...`, `set_()`, `resize_()`), so
/// that each step compares them. Nothing of torch is called for it: the fields lie in the tensor and in its storage.
struct PlannedTensor {
  c10::TensorImpl* tensor;
  const c10::StorageImpl* storage;  // looked at only while it is the tensor's
  const void* base;                 // of the storage
  c10::DeleterFnPtr deleter;        // of the storage; another one where it became copy-on-write
  std::int64_t offset;
  std::int64_t numel;
  std::size_t end;  // bytes of the storage that the elements reach up to
  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
  c10::Device device;
  bool like_param;  // laid out as the parameter; else a run of `numel` elements

  PlannedTensor(const at::Tensor& planned, bool is_like_param)
      : tensor(planned.unsafeGetTensorImpl()),
        storage(tensor->unsafe_storage().unsafeGetStorageImpl()),
        base(storage->data()),
        deleter(storage->data_ptr().get_deleter()),
        offset(planned.storage_offset()),
        numel(planned.numel()),
        end(numel == 0 ? 0 : static_cast<std::size_t>(offset + numel) * planned.element_size()),
        keys(planned.key_set()),
        type(planned.dtype()),
        device(planned.device()),
        like_param(is_like_param) {}

  /// False where the plan may no longer describe the tensor.
  [[nodiscard]] bool unchanged(c10::TensorImpl& param) const {
    if (tensor->unsafe_storage().unsafeGetStorageImpl() != storage) return false;
    const at::DataPtr& memory = storage->data_ptr();
    return memory.get() == base && memory.get_deleter() == deleter && storage->nbytes() >= end &&
           tensor->storage_offset() == offset && tensor->key_set() == keys && tensor->dtype() == type &&
           (keys_tell(device) || tensor->device() == device) &&
           (like_param ? tensor == &param || laid_out_alike(*tensor, param)
                       : tensor->numel() == numel && tensor->is_contiguous());
  }

  /// The memory that the elements lie in; empty for none.
  [[nodiscard]] std::pair<std::uintptr_t, std::uintptr_t> range() const {
    const auto start = reinterpret_cast<std::uintptr_t>(base);
    return {start + (numel == 0 ? 0 : static_cast<std::size_t>(offset) * type.itemsize()), start + end};
  }
};

struct Slot {
  // What each step looks at comes first.
  at::Tensor param;
  TensorSignature signature = {};
  std::size_t group;
  bool first = true;          // SGD: the momentum buffer holds nothing yet
  bool sparse = false;        // SGD: torch would keep the momentum sparse
  bool complete = false;      // has all its state
  bool watched = false;       // has masters, which follow what others write
  bool waits = false;         // step_in_backward: for step(), with those that its gradient shares memory with
  KnownSum known = {};        // from grad_ready()
  at::Tensor grad_copy = {};  // a gradient laid out like the parameter, when autograd's is not
  std::string name;
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
  at::Device device;
  ParamState state = {};
  std::int64_t version = -1;    // of the parameter after our last write; -1: not known
  const void* place = nullptr;  // where the parameter was then
  // Strides of 8-bit moments when their scales were written: these follow the codes' order in memory.
  std::array<std::vector<std::int64_t>, kMoments> code_strides = {};
};

bool wants(const Recipe& recipe, const Slot& slot, std::size_t moment);

/// True where the slot has all the state that the recipe wants.
bool complete(const Recipe& recipe, const Slot& slot);
/// Makes what is missing.
void create_state(const Recipe& recipe, Slot& slot);
/// Takes over a state, converted where it is kept in another format; all is checked before anything is changed.
void adopt_state(const Recipe& recipe, Slot& slot, ParamState state);
/// Checks the state that the slot holds, whatever became of its tensors, and lays it out as the parameter: element by
/// element, in the same tensor objects. Throws Error naming parameter and entry before anything is changed.
void conform_state(const Recipe& recipe, Slot& slot);
/// Brings 8-bit codes that somebody laid out anew back to the order of their scales, in the same tensor objects: who
/// is shown or copies them has nothing but their strides to tell the order by.
void order_codes(const Slot& slot);
/// The values of an 8-bit moment, fp32.
at::Tensor decoded_moment(const Recipe& recipe, const Slot& slot, std::size_t moment);

inline bool has_masters(const Slot& slot) { return slot.state.master.defined() || slot.state.low_bits.defined(); }
/// The master weights of elements that somebody wrote since our last step follow what was written.
void follow_outside_writes(Slot& slot);
void note_own_write(Slot& slot);

/// To be told of each gradient. torch's momentum is sparse where the first gradient was, and takes no dense one then;
/// Nesterov's step takes no sparse gradient beside a dense momentum.
void note_sparse(const Recipe& recipe, Slot& slot, const at::Tensor& grad);

/// A parameter that these formats cannot serve.
void check_formats(const Recipe& recipe, const at::Tensor& param, const std::string& label);
/// Parameter and gradient as they must be for a step.
void check_param(const Recipe& recipe, const Slot& slot, const at::Tensor& grad);

/// True where a sparse gradient's step changes the rows that it names and nothing else: it is taken in those alone.
/// Elsewhere a sparse gradient is made dense.
bool changes_rows_alone(const Recipe& recipe, const Slot& slot, const at::Tensor& grad);

}  // namespace oxytorch::optim
