#include "oxytorch/tune/keep_double.h"

#include <ATen/ops/_to_copy.h>
#include <torch/library.h>

#include <optional>

namespace oxytorch::tune {
namespace {

// A key above autograd that torch keeps free for such use; the other one of that kind is own_random.cpp's.
constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

at::Tensor to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                   std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
                   std::optional<at::MemoryFormat> memory_format) {
  const c10::impl::ExcludeDispatchKeyGuard once(kMode);
  if (self.scalar_type() == at::kDouble && dtype && at::isFloatingType(*dtype)) dtype = at::kDouble;
  return at::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, memory_format);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) { m.impl("_to_copy", &to_copy); }

}  // namespace

KeepDouble::KeepDouble() : mode_(kMode) {}

}  // namespace oxytorch::tune
