#include "memory/recipe.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "oxytorch/error.h"

namespace oxytorch::memory {
namespace {

/// Operators run as kernels alone: nothing is recorded or cast.
struct KernelsAlone {
  c10::AutoGradMode grad{false};
  c10::impl::ExcludeDispatchKeyGuard keys{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                          c10::autocast_dispatch_keyset};
};

c10::Storage copied(const c10::Storage& storage) {
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  const auto from = at::empty({0}, options).set_(storage, 0, {bytes}, {1});
  return from.clone().storage();
}

constexpr std::size_t kBits = 8;  // elements to a byte

template <class Element>
bool pack_bits(const void* data, std::size_t count, std::uint8_t* bits, Element& value) {
  const auto* elements = static_cast<const Element*>(data);
  const auto* const end = elements + count;
  const auto* const first = std::find_if(elements, end, [](Element each) { return each != 0; });
  const Element set = first == end ? Element{0} : *first;
  constexpr std::size_t kScanned = 4096;  // before a look at whether it goes on
  for (std::size_t from = 0; from < count; from += kScanned) {
    Element third = 0;  // bits of an element that is neither
    for (std::size_t i = from; i < std::min(count, from + kScanned); ++i) {
      const Element all = elements[i] != 0 ? static_cast<Element>(~Element{0}) : Element{0};
      third = static_cast<Element>(third | ((elements[i] ^ set) & all));
    }
    if (third != 0) return false;
  }
  const auto byte_of = [](const Element* from, std::size_t length) {
    std::uint64_t bytes = 0;  // one for each element
    for (std::size_t k = 0; k < length; ++k) bytes |= static_cast<std::uint64_t>(from[k] != 0) << (kBits * k);
    constexpr std::uint64_t kGather = 0x0102040810204080;  // bit k of the highest byte is that of byte k
    return static_cast<std::uint8_t>(bytes * kGather >> 56U);
  };
  const auto whole = count / kBits;
  for (std::size_t i = 0; i < whole; ++i) bits[i] = byte_of(elements + i * kBits, kBits);
  if (count % kBits != 0) bits[whole] = byte_of(elements + whole * kBits, count % kBits);
  value = set;
  return true;
}

template <class Element>
void unpack_bits(const std::uint8_t* bits, std::size_t count, Element value, void* data) {
  auto* elements = static_cast<Element*>(data);
  const auto whole = count / kBits;
  const auto put = [&](std::size_t i, std::size_t length) {
    for (std::size_t k = 0; k < length; ++k) {
      elements[i * kBits + k] = static_cast<Element>(value & (Element{0} - static_cast<Element>(bits[i] >> k & 1U)));
    }
  };
  for (std::size_t i = 0; i < whole; ++i) put(i, kBits);
  if (count % kBits != 0) put(whole, count % kBits);
}

}  // namespace

bool is_dense(const at::Tensor& tensor) {
  static const auto others = c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize, c10::DispatchKey::Conjugate,
       c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor, c10::DispatchKey::NestedTensor});
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() &&
         !tensor.is_inference() && !tensor.key_set().has_any(others) && !tensor.is_meta() &&
         tensor.storage().nbytes() > 0 && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

View::View(std::shared_ptr<Content> content, const at::Tensor& tensor)
    : content(std::move(content)),
      sizes(tensor.sizes().begin(), tensor.sizes().end()),
      strides(tensor.strides().begin(), tensor.strides().end()),
      offset(tensor.storage_offset()),
      dtype(tensor.dtype()),
      keys(tensor.key_set()) {}

at::Tensor View::over(const c10::Storage& storage) const {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), keys, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

std::optional<TwoValues> TwoValues::pack(const c10::Storage& storage, std::size_t element_bytes) {
  if (!storage.device().is_cpu() || storage.nbytes() % element_bytes != 0) return std::nullopt;
  const auto count = storage.nbytes() / element_bytes;
  TwoValues packed;
  packed.bytes_ = storage.nbytes();
  packed.element_bytes_ = element_bytes;
  packed.bits_ = at::empty({static_cast<std::int64_t>((count + 7) / 8)}, at::kByte);
  auto* const bits = packed.bits_.mutable_data_ptr<std::uint8_t>();
  const auto of = [&](auto value) {
    const bool has_two = pack_bits(storage.data(), count, bits, value);
    packed.value_ = value;
    return has_two;
  };
  const bool has_two = element_bytes == 1   ? of(std::uint8_t{0})
                       : element_bytes == 2 ? of(std::uint16_t{0})
                       : element_bytes == 4 ? of(std::uint32_t{0})
                       : element_bytes == 8 ? of(std::uint64_t{0})
                                            : false;
  return has_two ? std::optional(std::move(packed)) : std::nullopt;
}

c10::Storage TwoValues::unpack() const {
  const auto all = at::empty({static_cast<std::int64_t>(bytes_)}, at::kByte);
  const auto* const bits = bits_.const_data_ptr<std::uint8_t>();
  const auto count = bytes_ / element_bytes_;
  auto* const data = all.mutable_data_ptr();
  if (element_bytes_ == 1) unpack_bits(bits, count, static_cast<std::uint8_t>(value_), data);
  if (element_bytes_ == 2) unpack_bits(bits, count, static_cast<std::uint16_t>(value_), data);
  if (element_bytes_ == 4) unpack_bits(bits, count, static_cast<std::uint32_t>(value_), data);
  if (element_bytes_ == 8) unpack_bits(bits, count, value_, data);
  return all.storage();
}

Content::Content(const at::Tensor& tensor)
    : storage(tensor.storage().getWeakStorageImpl()),
      version_counter(tensor.unsafeGetTensorImpl()->version_counter()),
      version(static_cast<std::uint32_t>(tensor._version())),
      bytes(tensor.storage().nbytes()),
      element_bytes(tensor.element_size()) {}

c10::Storage Content::get() {
  if (const auto held = kept.lock()) {
    OXY_CHECK(is_unchanged(), InvalidState, "a tensor of ", bytes,
              " bytes that backward needs, or makes others again from, was changed in place after forward (its version "
              "is ",
              version_counter.current_version(), ", ", version,
              " was saved). Make that operation one that is not in place, or run backward before it.");
    if (!held->packed) return held->storage;
  }
  if (made_again) return made_again;
  const auto held = kept.lock();
  auto found = held ? held->packed->unpack() : make();
  if (savers > 0) made_again = found;
  return found;
}

c10::Storage Content::make() const {
  OXY_CHECK(recipe != nullptr, Internal, "a tensor of ", bytes, " bytes was dropped that cannot be made again");
  const auto tensor_of = [this](const View& view, bool is_written) {
    auto from = view.content->get();
    // What others will read as well is not written to.
    const bool is_shared = !view.content->kept.expired() || view.content->made_again;
    return view.over(is_written && is_shared ? copied(from) : from);
  };
  torch::jit::Stack stack;
  stack.reserve(recipe->arguments.size());
  for (std::size_t i = 0; i < recipe->arguments.size(); ++i) {
    const auto& argument = recipe->arguments[i];
    if (const auto* value = std::get_if<c10::IValue>(&argument)) {
      stack.push_back(*value);
    } else if (const auto* view = std::get_if<View>(&argument)) {
      stack.emplace_back(tensor_of(*view, recipe->is_inplace && i == 0));
    } else {
      c10::List<at::Tensor> tensors;
      for (const auto& each : std::get<std::vector<View>>(argument)) tensors.push_back(tensor_of(each, false));
      stack.emplace_back(std::move(tensors));
    }
  }
  const KernelsAlone alone;
  recipe->handle.callBoxed(&stack);
  auto found = stack.at(result).toTensor().storage();
  OXY_CHECK(found.nbytes() == bytes, InvalidState, recipe->handle.operator_name().name, " made ", found.nbytes(),
            " bytes when it was run again, and ", bytes, " before. Keep this block's results.");
  return found;
}

}  // namespace oxytorch::memory
