// Uses the core alone; the preprocessor says that torch is not to be had.
#include <cstdio>

#include "oxytorch/error.h"
#include "oxytorch/isa.h"
#include "oxytorch/version.h"

#if __has_include(<torch/torch.h>) || __has_include(<ATen/ATen.h>) || __has_include(<c10/macros/Macros.h>)
#error "torch is on the include path of a program that asked for Oxytorch::core"
#endif

int main() {
  try {
    oxytorch::parse_isa("abacus");
  } catch (const oxytorch::Error& error) {
    std::printf("oxytorch %s, %s: %s\n", OXYTORCH_VERSION, oxytorch::name(oxytorch::active_isa()), error.what());
    return error.code() == oxytorch::ErrorCode::InvalidArgument ? 0 : 1;
  }
  return 1;
}
