// Holds driver.h against the toolkit's own cuda.h: nothing here is ever called.
#include <cuda.h>

#include <type_traits>

#include "backends/cuda/driver.h"

namespace oxytorch::backend::cuda {
namespace {

// Alike for the machine: enumerations of cuda.h are plain integers here.
template <class Ours, class Theirs>
struct Same
    : std::bool_constant<sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
                         std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>> {};
template <class Ours, class Theirs>
struct Same<Ours*, Theirs*> : std::bool_constant<std::is_same_v<Ours, Theirs> || std::is_enum_v<Theirs>> {};
template <class Ours, class Theirs>
struct Same<Ours**, Theirs**> : std::is_same<Ours, Theirs> {};

template <class OurResult, class... Ours, class TheirResult, class... Theirs>
constexpr bool agree(OurResult (*)(Ours...), TheirResult (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
    return false;
  } else {
    return Same<OurResult, TheirResult>::value && (Same<Ours, Theirs>::value && ...);
  }
}

#define OXY_CUDA_AGREES(name, parameters) \
  static_assert(agree(static_cast<decltype(Driver::name)>(nullptr), static_cast<decltype(&::name)>(nullptr)), #name);
OXY_CUDA_FUNCTIONS(OXY_CUDA_AGREES)

#define OXY_CUDA_EQUAL(name, theirs, value) static_assert((name) == static_cast<int>(theirs), #theirs);
OXY_CUDA_CONSTANTS(OXY_CUDA_EQUAL)

}  // namespace
}  // namespace oxytorch::backend::cuda
