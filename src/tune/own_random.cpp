#include "oxytorch/tune/own_random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>

#include "tune/thread_key.h"

namespace oxytorch::tune {
namespace {

thread_local at::Generator* own = nullptr;

std::optional<std::size_t> generator_argument(const c10::FunctionSchema& schema) {
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& type = schema.arguments()[i].type();
    if (const auto optional = type->cast<c10::OptionalType>();
        optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType) {
      return i;
    }
  }
  return std::nullopt;
}

/// Whether an argument says that the numbers are to lie on another device.
bool elsewhere(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && !value.toTensor().is_cpu();
  return value.isDevice() && !value.toDevice().is_cpu();
}

void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(count);
  auto& generator = *(first + static_cast<std::ptrdiff_t>(*generator_argument(op.schema())));
  if (own != nullptr && generator.isNone() && std::none_of(first, stack->end(), elsewhere)) generator = *own;
  op.redispatchBoxed(behind_thread_key(keys), stack);
}

/// Registered once and never taken back: a thread without the key does not meet it.
void register_once() {
  static const bool done = [] {
    register_thread_key();
    auto* const aten = new torch::Library(torch::Library::IMPL, "aten", kThreadKey, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (!op || name.getNamespace() != "aten" || !generator_argument(op->schema())) continue;
      const std::string text = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      aten->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&draw>());
    }
    return true;
  }();
  static_cast<void>(done);
}

at::Generator copy_of_default() {
  auto shared = at::detail::getDefaultCPUGenerator();  // a handle
  const std::lock_guard<std::mutex> lock(shared.mutex());
  return shared.clone();
}

}  // namespace

void register_thread_key() {
  static const bool done = [] {
    auto* const all = new torch::Library(torch::Library::IMPL, "_", kThreadKey, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFallthrough());
    return true;
  }();
  static_cast<void>(done);
}

struct OwnRandom::Impl {
  at::Generator start = copy_of_default();
  at::Generator now = start.clone();
  std::optional<c10::impl::IncludeDispatchKeyGuard> guard;
};

OwnRandom::OwnRandom() : impl_(std::make_unique<Impl>()) {
  register_once();
  own = &impl_->now;
  impl_->guard.emplace(kThreadKey);
}

OwnRandom::~OwnRandom() { close(); }

void OwnRandom::close() noexcept {
  if (!impl_->guard) return;
  impl_->guard.reset();
  own = nullptr;
}

void OwnRandom::rewind() { impl_->now = impl_->start.clone(); }

}  // namespace oxytorch::tune
