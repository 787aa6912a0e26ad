/// The text behind `last_error` (clause F1) for backends in this tree: one buffer per thread, no allocation.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "oxytorch/backend.h"

namespace oxytorch::backend {

inline constexpr int kLastErrorBytes = 512;
inline thread_local char last_error_text[kLastErrorBytes] = "";

/// Leaves the sentence for the calling thread and gives `status` back.
__attribute__((format(printf, 2, 3), cold)) inline oxy_status fail(oxy_status status, const char* format, ...) {
  std::va_list parts;
  va_start(parts, format);
  std::vsnprintf(last_error_text, kLastErrorBytes, format, parts);
  va_end(parts);
  return status;
}

}  // namespace oxytorch::backend
