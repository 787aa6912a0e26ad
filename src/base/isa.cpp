#include "oxytorch/isa.h"

#include <atomic>
#include <cstdlib>
#include <optional>

#include "oxytorch/error.h"

namespace oxytorch {
namespace {

constexpr int kUnset = -1;
std::atomic<int> override_isa{kUnset};

bool supports(Isa isa) {
  for (Isa candidate : supported_isas()) {
    if (candidate == isa) return true;
  }
  return false;
}

Isa require(Isa isa, const char* asked_by) {
  OXY_CHECK(supports(isa), NotSupported, asked_by, " asks for instruction set '", name(isa),
            "', which this processor lacks; the widest it has is '", name(supported_isas().back()), "'.");
  return isa;
}

std::optional<Isa> named(const std::string& text) {
  for (Isa isa : {Isa::Scalar, Isa::Avx2, Isa::Avx512}) {
    if (text == name(isa)) return isa;
  }
  return std::nullopt;
}

Isa default_isa() {
  if (const char* text = std::getenv("OXYTORCH_ISA"); text != nullptr && *text != '\0') {
    const auto found = named(text);
    OXY_CHECK(found, InvalidArgument, "the environment variable OXYTORCH_ISA is '", text,
              "', which is no instruction set; set it to 'scalar', 'avx2' or 'avx512', or unset it.");
    return require(*found, "OXYTORCH_ISA");
  }
  return supported_isas().back();
}

}  // namespace

const char* name(Isa isa) noexcept {
  switch (isa) {
    case Isa::Scalar: return "scalar";
    case Isa::Avx2: return "avx2";
    case Isa::Avx512: return "avx512";
  }
  return "unknown";
}

Isa parse_isa(const std::string& text) {
  if (const auto found = named(text)) return *found;
  detail::raise(ErrorCode::InvalidArgument, "unknown instruction set '", text, "'; use 'scalar', 'avx2' or 'avx512'.");
}

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> sets = [] {
    std::vector<Isa> found{Isa::Scalar};
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2) found.push_back(Isa::Avx2);
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512cd")) {
      found.push_back(Isa::Avx512);
    }
    return found;
  }();
  return sets;
}

Isa active_isa() {
  const int chosen = override_isa.load(std::memory_order_relaxed);
  if (chosen != kUnset) return static_cast<Isa>(chosen);
  static const Isa fallback = default_isa();
  return fallback;
}

ScopedIsa::ScopedIsa(Isa isa) : previous_(override_isa.load()) {
  override_isa.store(static_cast<int>(require(isa, "ScopedIsa")));
}

ScopedIsa::~ScopedIsa() { override_isa.store(previous_); }

}  // namespace oxytorch
