#include <ATen/autocast_mode.h>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"

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

// The cache belongs to the process and the nesting to the thread: without a level of its own a worker would leave cast
// weights behind for whoever comes next.
detail::CacheScope::CacheScope() { at::autocast::increment_nesting(); }
detail::CacheScope::~CacheScope() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace oxytorch::amp
