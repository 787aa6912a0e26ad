#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/system.h"

namespace oxytorch::amp {

Autocast::Autocast(at::DeviceType device, at::ScalarType dtype, bool enabled, bool cache)
    : device_(device),
      previous_dtype_(at::autocast::get_autocast_dtype(device)),
      previous_enabled_(at::autocast::is_autocast_enabled(device)),
      previous_cache_(at::autocast::is_autocast_cache_enabled()) {
  OXY_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf || !enabled, InvalidType, "autocast to ", at::toString(dtype),
            " is not supported. Use at::kBFloat16 or at::kHalf, or pass enabled = false.");
  if (enabled) at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_cache_enabled(cache);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(previous_cache_);
  at::autocast::set_autocast_enabled(device_, previous_enabled_);
  at::autocast::set_autocast_dtype(device_, previous_dtype_);
}

DtypeAdvice recommend_dtype(at::DeviceType device) {
  if (device == at::kCPU) {
    const auto& cpu = cpu_features();
    if (cpu.has_native_bf16()) {
      return {at::kBFloat16, std::string("bfloat16: this CPU multiplies it natively (") +
                                 (cpu.amx_bf16 ? "amx_bf16" : "avx512_bf16") + ")."};
    }
    return {at::kFloat,
            "float32: this CPU has neither avx512_bf16 nor AMX, where bfloat16 training is 2 to 3 times slower."};
  }
  if (device == at::kCUDA && !at::globalContext().hasCUDA()) {
    return {at::kFloat, "float32: no CUDA device is usable here."};
  }
  return {at::kBFloat16, "bfloat16: accelerators multiply it natively and it needs no loss scale."};
}

}  // namespace oxytorch::amp
