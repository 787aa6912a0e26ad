#include "oxytorch/tune/keep_double.h"

#include <ATen/ops/_to_copy.h>
#include <torch/library.h>

#include <optional>

#include "tune/above_autograd.h"

namespace oxytorch::tune {
namespace {

at::Tensor to_copy(const at::Tensor& given, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                   std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
                   std::optional<at::MemoryFormat> memory_format) {
  const c10::impl::ExcludeDispatchKeyGuard once(kAboveAutograd);
  const at::Tensor self = values_of(given);
  if (self.scalar_type() == at::kDouble && dtype && at::isFloatingType(*dtype)) dtype = at::kDouble;
  return at::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, memory_format);
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) { m.impl("_to_copy", &to_copy); }

}  // namespace

KeepDouble::KeepDouble() : mode_(kAboveAutograd) {}

}  // namespace oxytorch::tune
