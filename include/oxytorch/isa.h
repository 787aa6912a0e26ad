/// Instruction sets that the wide kernels are built for, and the one in use.
///
/// Kernels give the same bits on every set; the choice is about time only. `OXYTORCH_ISA=scalar|avx2|avx512`
/// lowers the choice for a process, and `ScopedIsa` for a scope (tests run each set in one process).
#pragma once

#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch {

enum class Isa { Scalar = 0, Avx2 = 1, Avx512 = 2 };

/// "scalar", "avx2" or "avx512".
OXY_API const char* name(Isa isa) noexcept;

/// The set named by `text`; Error(InvalidArgument) for another text.
OXY_API Isa parse_isa(const std::string& text);

/// The sets this processor and its operating system can run, narrowest first; never empty.
OXY_API const std::vector<Isa>& supported_isas();

/// The set that kernels use now: the widest supported one, `OXYTORCH_ISA`, or the innermost ScopedIsa.
/// Throws Error(NotSupported) where OXYTORCH_ISA names a set that this processor lacks.
OXY_API Isa active_isa();

/// Chooses a set for this process until the end of the scope. Not for use from several threads at once.
class OXY_API ScopedIsa {
 public:
  explicit ScopedIsa(Isa isa);
  ~ScopedIsa();
  ScopedIsa(const ScopedIsa&) = delete;
  ScopedIsa& operator=(const ScopedIsa&) = delete;

 private:
  int previous_;
};

}  // namespace oxytorch
