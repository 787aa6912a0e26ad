/// Planted bugs. The conformance suite is tested by a library built with OXY_SIM_MUTANTS from the same sources, in
/// which `OXYTORCH_SIM_MUTANT=<name>` switches one bug on. In every other build `mutant(...)` is the constant false.
#pragma once

#if defined(OXY_SIM_MUTANTS)
#include <cstdlib>
#include <string_view>
#endif

namespace oxytorch::backend::sim {

#if defined(OXY_SIM_MUTANTS)
inline bool mutant(std::string_view name) {
  static const char* const chosen = std::getenv("OXYTORCH_SIM_MUTANT");
  return chosen != nullptr && name == chosen;
}
#else
constexpr bool mutant(const char*) { return false; }
#endif

}  // namespace oxytorch::backend::sim
