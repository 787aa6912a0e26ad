// Operators of the fake device: those about memory and views by themselves, all others on the processor over the
// device's own memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/hash.h>

#include <cstring>
#include <utility>
#include <vector>

#include "device/fake.h"

namespace oxytorch::test {
namespace {

thread_local bool in_operator = false;

struct InOperator {
  InOperator() : outer(std::exchange(in_operator, true)) {}
  InOperator(const InOperator&) = delete;
  InOperator& operator=(const InOperator&) = delete;
  ~InOperator() { in_operator = outer; }
  bool outer;
};

void count_read() {
  if (!in_operator) counts().reads.fetch_add(1, std::memory_order_relaxed);
}

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kind().type; }

// ---- memory and views

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(kind().key), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory(), c10::DispatchKeySet(kind().key),
                                           c10::dtype_or_default(dtype));
}

std::size_t extent_bytes(const at::Tensor& t) {
  return t.numel() == 0 ? 0 : at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
}

const at::Tensor& resize_to(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  at::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const std::size_t needed = (static_cast<std::size_t>(self.storage_offset()) * self.itemsize()) + extent_bytes(self);
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

at::Tensor& set_storage_strided(at::Tensor& self, c10::Storage source, std::int64_t offset, at::IntArrayRef size,
                                at::IntArrayRef stride) {
  at::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const auto elements = static_cast<std::int64_t>(source.nbytes() / self.itemsize());
  return set_storage_strided(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_storage_strided(
      self, c10::Storage(c10::Storage::use_byte_size_t(), 0, memory().allocate(0), &memory(), /*resizable=*/true), 0,
      {0}, {});
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// ---- images: tensors of the processor over the device's memory

c10::intrusive_ptr<c10::StorageImpl> image_of(const c10::Storage& storage) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                               c10::DataPtr(played(storage), at::kCPU), c10::GetAllocator(at::kCPU),
                                               /*resizable=*/true);
}

at::Tensor image_of(const at::Tensor& t, const c10::Storage& storage) {
  at::Tensor image = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                              c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  c10::TensorImpl* const impl = image.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) impl->_set_conj(true);
  if (t.is_neg()) impl->_set_neg(true);
  return image;
}

// Not for tensors that outlive the operator: it does not own the memory.
at::Tensor image_of(const at::Tensor& t) { return image_of(t, c10::Storage(image_of(t.storage()))); }

at::Tensor on_device_of(const at::Tensor& result, c10::Device device) {
  const at::Tensor plain = result.resolve_conj().resolve_neg();
  const at::Tensor dense = plain.is_non_overlapping_and_dense() ? plain : plain.contiguous();
  at::Tensor made =
      empty_strided(dense.sizes(), dense.strides(), dense.scalar_type(), std::nullopt, device, std::nullopt);
  if (dense.nbytes() > 0) std::memcpy(played(made.storage()), dense.const_data_ptr(), dense.nbytes());
  return made;
}

// The operands of one operator and their images: one image per tensor and one storage per storage, so that the
// processor's own checks of overlap see what is there.
class Images {
 public:
  at::Tensor of(const at::Tensor& t, bool written) {
    for (Entry& known : entries_) {
      if (known.tensor.is_same(t)) {
        known.written |= written;
        return known.image;
      }
    }
    for (const Entry& known : entries_) {
      if (known.tensor.is_alias_of(t)) return add(t, image_of(t, known.image.storage()), written);
    }
    return add(t, image_of(t), written);
  }
  const at::Tensor* tensor_of(const at::Tensor& image) const {
    for (const Entry& known : entries_) {
      if (known.image.is_same(image)) return &known.tensor;
    }
    return nullptr;
  }
  // What an operator did to the shape of its outputs, done to the device's.
  void settle() {
    for (const Entry& e : entries_) {
      if (!e.written) continue;
      if (e.image.storage().nbytes() != e.tensor.storage().nbytes()) {
        resize_storage(e.tensor.storage(), e.image.storage().nbytes());
        std::memcpy(played(e.tensor.storage()), e.image.storage().data(), e.image.storage().nbytes());
      }
      if (e.image.sizes() != e.tensor.sizes() || e.image.strides() != e.tensor.strides()) {
        e.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(e.image.sizes(), e.image.strides(),
                                                              e.image.storage_offset());
      }
    }
  }

 private:
  struct Entry {
    at::Tensor tensor, image;
    bool written;
  };
  at::Tensor add(const at::Tensor& t, at::Tensor image, bool written) {
    return entries_.emplace_back(t, std::move(image), written).image;
  }
  std::vector<Entry> entries_;
};

// ---- copies

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.is_cpu()) count_read();
  const c10::Device device = (to.is_cpu() ? from : to).device();
  const bool across = !to.is_cpu() && !from.is_cpu() && from.device() != to.device();
  const bool later = non_blocking && kind().has("asynchronous");
  if (!later && kind().has("asynchronous")) catch_up_with_stream(device.index());
  if (across || !same_bytes(from, to)) {
    if (later) catch_up_with_stream(device.index());
    (to.is_cpu() ? to : image_of(to)).copy_(from.is_cpu() ? from : image_of(from));
    return to;
  }
  if (to.nbytes() == 0) return to;
  const oxy_copy kind = to.is_cpu()     ? OXY_COPY_DEVICE_TO_HOST
                        : from.is_cpu() ? OXY_COPY_HOST_TO_DEVICE
                                        : OXY_COPY_DEVICE_TO_DEVICE;
  const backend::Device& by = backend_of(device);
  backend::detail::check(by.table(),
                         by.table().copy_async(by.index(), later ? current_queue(device.index()) : nullptr,
                                               to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), kind),
                         "copy_async");
  if (later) {
    hold(device.index(), from);
    hold(device.index(), to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_to(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  count_read();
  if (kind().has("asynchronous")) catch_up_with_stream(self.device().index());
  return image_of(self).item();
}

void record_stream(at::Tensor&, c10::Stream) {}

// ---- every other operator

// Operators whose index or length operands, and results of that kind, are the processor's.
bool takes_host_operands(const std::string& name) {
  return name == "aten::index_put_" || name == "aten::index" || name == "aten::_index_put_impl_" ||
         name == "aten::_unsafe_index" || name == "aten::_pack_padded_sequence";
}

bool is_generator(const c10::Argument& argument) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  const c10::Type& type = optional == nullptr ? *argument.type() : *optional->getElementType();
  return type.kind() == c10::TypeKind::GeneratorType;
}

struct Operands {
  const c10::FunctionSchema& schema;
  Images images{};
  std::optional<c10::Device> device{};
  std::size_t program = 0;
  const at::Tensor* host = nullptr;  // an operand that a card would refuse

  at::Tensor take(const at::Tensor& t, bool written) {
    if (!t.defined()) return t;
    if (!on_device(t)) {
      if (written || t.dim() > 0) host = &t;
      return t;
    }
    TORCH_CHECK(!device || *device == t.device(), schema.name(),
                ": expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                t.device());
    device = t.device();
    program = c10::hash_combine(program, static_cast<std::size_t>(t.scalar_type()));
    for (const std::int64_t size : t.sizes()) program = c10::hash_combine(program, static_cast<std::size_t>(size));
    return images.of(t, written);
  }

  void take(c10::IValue& value, const c10::Argument& argument) {
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = take(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(take(t, written));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        list.push_back(t ? std::optional(take(*t, written)) : std::nullopt);
      }
      value = std::move(list);
    }
  }
};

at::Tensor given_back(const at::Tensor& result, const Operands& operands, c10::Device device) {
  if (!result.defined()) return result;
  const at::Tensor* operand = operands.images.tensor_of(result);
  return operand != nullptr ? *operand : on_device_of(result, device);
}

// torch asks devices that it does not know for convolutions of their own.
c10::OperatorHandle played_by(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::string& name = op.schema().name();
  if (name == "aten::convolution_overrideable") return dispatcher.findSchemaOrThrow("aten::convolution", "");
  if (name != "aten::convolution_backward_overrideable") return op;
  const std::size_t first = stack->size() - op.schema().arguments().size();
  const at::Tensor weight = (*stack)[first + 2].toTensor();
  const bool transposed = (*stack)[first + 6].toBool();
  const std::int64_t channels = transposed ? weight.size(1) * (*stack)[first + 8].toInt() : weight.size(0);
  stack->insert(stack->begin() + static_cast<std::ptrdiff_t>(first) + 3,
                c10::IValue(c10::List<std::int64_t>({channels})));
  return dispatcher.findSchemaOrThrow("aten::convolution_backward", "");
}

// Draws from the device's generator where an operator has no argument for one.
class DeviceDraws {
 public:
  explicit DeviceDraws(c10::DeviceIndex index)
      : device_(processor_generator({}, index)), processor_(at::detail::getDefaultCPUGenerator()) {
    swap();
  }
  DeviceDraws(const DeviceDraws&) = delete;
  DeviceDraws& operator=(const DeviceDraws&) = delete;
  ~DeviceDraws() { swap(); }

 private:
  void swap() {
    const at::Tensor held = processor_.get_state();
    processor_.set_state(device_.get_state());
    device_.set_state(held);
  }
  at::Generator device_, processor_;
};

void count(const c10::FunctionSchema& schema, std::size_t program) {
  program = c10::hash_combine(program, std::hash<const void*>()(&schema));
  Counts& all = counts();
  const std::lock_guard lock(all.mutex);
  all.programs.insert(program);
  if (!all.unsupported.empty() && all.unsupported.contains(schema.name())) ++all.fallbacks[schema.name()];
}

void play(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t first = stack->size() - schema.arguments().size();
  Operands operands{schema};
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    operands.take(value, schema.arguments()[i]);
    if (value.isDevice() && value.toDevice().type() == kind().type) {
      if (!operands.device) operands.device = value.toDevice();
      value = c10::Device(at::kCPU);
    }
  }
  const bool mixed = takes_host_operands(schema.name());
  const c10::Device device = c10::device_or_default(operands.device.value_or(c10::Device(kind().type, -1)));
  const c10::DeviceGuard guard(device);
  const c10::Device here = c10::impl::VirtualGuardImpl(kind().type).getDevice();
  TORCH_CHECK(operands.host == nullptr || mixed, schema.name(),
              ": expected all tensors to be on the same device, but found at least two devices, ", here, " and cpu");
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (is_generator(schema.arguments()[i])) {
      value = processor_generator(value.isNone() ? at::Generator() : value.toGenerator(), here.index());
    }
  }
  count(schema, operands.program);
  if (kind().has("asynchronous")) catch_up_with_stream(here.index());
  {
    const InOperator inside;
    std::optional<DeviceDraws> draws;
    if (schema.name() == "aten::native_dropout") draws.emplace(here.index());
    const c10::OperatorHandle played = played_by(op, stack);
    played.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  operands.images.settle();

  const std::size_t results = stack->size() - schema.returns().size();
  for (std::size_t i = 0; i < schema.returns().size(); ++i) {
    c10::IValue& value = (*stack)[results + i];
    const c10::AliasInfo* alias = schema.returns()[i].alias_info();
    TORCH_CHECK(alias == nullptr || alias->isWrite(), schema.name(), " makes a view, and the fake device has none");
    if (value.isTensor()) {
      if (!(mixed && i > 0)) value = given_back(value.toTensor(), operands, here);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(given_back(t, operands, here));
      value = std::move(list);
    } else if (schema.name() != "aten::_fused_sdp_choice") {
      count_read();
    }
  }
}

}  // namespace

void register_operators(std::vector<torch::Library>& libraries) {
  libraries.emplace_back(torch::Library::IMPL, "_", kind().key, __FILE__, __LINE__)
      .fallback(torch::CppFunction::makeFromBoxedFunction<&play>());
  torch::Library& m = libraries.emplace_back(torch::Library::IMPL, "aten", kind().key, __FILE__, __LINE__);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_to);
  m.impl("set_.source_Storage_storage_offset", set_storage_strided);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  for (const char* name : {"convolution_overrideable", "convolution_backward_overrideable"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&play>());
  }
  // The copy reads and writes lazily conjugated and negated tensors itself; torch's fallback would make a copy for it.
  for (const c10::DispatchKey lazy : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    libraries.emplace_back(torch::Library::IMPL, "aten", lazy, __FILE__, __LINE__)
        .impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
}

}  // namespace oxytorch::test
