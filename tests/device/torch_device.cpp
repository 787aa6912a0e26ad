#include "device/torch_device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/backend/device.h"

namespace oxytorch::test {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKey kKey = c10::DispatchKey::PrivateUse1;

std::atomic<std::int64_t> reads{0};
thread_local bool in_fallback = false;
thread_local c10::DeviceIndex current = 0;

const std::string& device_name() {
  static const std::string name = [] {
    const char* chosen = std::getenv("OXYTORCH_TORCH_DEVICE");
    return std::string(chosen == nullptr || *chosen == '\0' ? "sim" : chosen);
  }();
  return name;
}

const std::vector<backend::Device>& devices() {
  static const std::vector<backend::Device> all = [] {
    const backend::Backend& source = backend::backend(device_name());
    std::vector<backend::Device> found;
    for (std::size_t i = 0; i < source.info().devices.size(); ++i) found.emplace_back(source, static_cast<int>(i));
    return found;
  }();
  return all;
}

const backend::Device& owner(const at::Tensor& tensor) {
  return devices().at(static_cast<std::size_t>(tensor.device().index()));
}

// Done when it returns: the queue is NULL.
void copy_bytes(const backend::Device& device, void* to, const void* from, std::uint64_t bytes, oxy_copy kind) {
  backend::detail::check(device.table(), device.table().copy_async(device.index(), nullptr, to, from, bytes, kind),
                         "copy_async");
}

// ---- what torch asks of a device

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const auto index = current;
    auto* buffer = new backend::Buffer(devices().at(static_cast<std::size_t>(index)), bytes);
    return {buffer->data(), buffer, [](void* held) { delete static_cast<backend::Buffer*>(held); },
            c10::Device(kType, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    copy_bytes(devices().at(static_cast<std::size_t>(current)), to, from, bytes, OXY_COPY_DEVICE_TO_DEVICE);
  }
};

Memory& memory() {
  static auto* const instance = new Memory();
  return *instance;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, std::exchange(current, device.index() < 0 ? current : device.index())};
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  // Every call is done when it returns: one stream, and events with nothing to wait for.
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices().size()); }
};

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  const Guard guard;
  const c10::Device before = guard.exchangeDevice(storage.device());
  c10::DataPtr fresh = memory().allocate(bytes);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) memory().copy_data(fresh.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  guard.setDevice(before);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !devices().empty(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  // Random numbers are drawn on CPU copies.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

// ---- operators that cannot run on copies

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory(), c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(dtype));
}

std::uint64_t extent_bytes(const at::Tensor& t) {
  return t.numel() == 0 ? 0 : at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
}

// A CPU tensor laid out as `t`, which lies on the device, and the bytes between.
at::Tensor mirror(const at::Tensor& t, bool filled) {
  const std::uint64_t bytes = extent_bytes(t);
  const at::Tensor flat = at::empty({static_cast<std::int64_t>(bytes / t.itemsize())}, t.options().device(at::kCPU));
  if (filled) copy_bytes(owner(t), flat.mutable_data_ptr(), t.const_data_ptr(), bytes, OXY_COPY_DEVICE_TO_HOST);
  at::Tensor view = flat.as_strided(t.sizes(), t.strides());
  if (t.is_conj()) view = view.conj();
  return t.is_neg() ? at::_neg_view(view) : view;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const at::Tensor source = from.is_cpu() ? from : mirror(from, true);
  if (to.is_cpu()) {
    if (!in_fallback) reads.fetch_add(1, std::memory_order_relaxed);
    to.copy_(source);
    return to;
  }
  const at::Tensor image = mirror(to, !to.is_non_overlapping_and_dense());
  image.copy_(source);
  copy_bytes(owner(to), to.mutable_data_ptr(), image.const_data_ptr(), extent_bytes(to), OXY_COPY_HOST_TO_DEVICE);
  return to;
}

const at::Tensor& resize_to(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  at::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const std::size_t needed = (static_cast<std::size_t>(self.storage_offset()) * self.itemsize()) + extent_bytes(self);
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_to(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
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

at::Scalar local_scalar(const at::Tensor& self) {
  reads.fetch_add(1, std::memory_order_relaxed);
  return mirror(self, true).item();
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// A card would refuse CPU operands beside its own; so does this, where the copies would hide it.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool host = false;
  const auto look = [&host](const at::Tensor& t) { host = host || (t.defined() && t.is_cpu() && t.dim() > 0); };
  const std::size_t arguments = op.schema().arguments().size();
  for (const c10::IValue& value : torch::jit::last(*stack, arguments)) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) look(t);
    }
  }
  const std::string& name = op.schema().name();
  TORCH_CHECK(!host || name == "aten::index_put_" || name == "aten::index" || name == "aten::_index_put_impl_", name,
              ": expected all tensors on one device, but found at least two, ", device_name(), " and cpu");
  const bool outer = std::exchange(in_fallback, true);
  try {
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  } catch (...) {
    in_fallback = outer;
    throw;
  }
  in_fallback = outer;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_to);
  m.impl("set_.source_Storage_storage_offset", set_storage_strided);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}

// The copy reads and writes lazily conjugated and negated tensors itself; torch's fallback would make a copy for it.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY(oxytorch_device, m) {
  m.def("host_reads() -> int", [] { return host_reads(); });
  m.def("device_count() -> int", [] { return static_cast<std::int64_t>(devices().size()); });
  m.def("allocated_bytes() -> int", [] {
    std::int64_t bytes = 0;
    for (const backend::Device& device : devices()) {
      bytes += static_cast<std::int64_t>(device.memory_info().allocated_bytes);
    }
    return bytes;
  });
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

[[maybe_unused]] const bool registered = [] {
  c10::register_privateuse1_backend(device_name());
  c10::SetAllocator(kType, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

c10::Device torch_device() { return {kType, 0}; }

std::int64_t host_reads() { return reads.load(std::memory_order_relaxed); }

}  // namespace oxytorch::test
