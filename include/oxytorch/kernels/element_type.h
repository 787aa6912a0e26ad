/// Element types of the arrays that kernels take.
#pragma once

#include <cstdint>

namespace oxytorch::kernels {

/// Int8 is for the state of an optimizer alone: see StateCode in codec.h.
enum class ElementType : std::uint8_t { F32, BF16, F16, Int8 };

}  // namespace oxytorch::kernels
