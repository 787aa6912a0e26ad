// Autocast of the fake device: the lists of operators that torch keeps for every device. A unit of its own, since each
// operator makes a template.
#include <ATen/autocast_mode.h>

#include "device/fake.h"

namespace oxytorch::test {
namespace {

template <c10::DeviceType kDevice>
void register_casts(torch::Library& m) {
#define LOWER(...) KERNEL(kDevice, __VA_ARGS__, lower_precision_fp)
#define WIDER(...) KERNEL(kDevice, __VA_ARGS__, fp32)
#define PROMOTED(...) KERNEL(kDevice, __VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(WIDER)
  AT_FORALL_PROMOTE(PROMOTED)
#undef LOWER
#undef WIDER
#undef PROMOTED
}

}  // namespace

void register_autocast(std::vector<torch::Library>& libraries) {
  libraries.emplace_back(torch::Library::IMPL, "_", kind().autocast, __FILE__, __LINE__)
      .fallback(torch::CppFunction::makeFallthrough());
  torch::Library& m = libraries.emplace_back(torch::Library::IMPL, "aten", kind().autocast, __FILE__, __LINE__);
  if (kind().type == c10::DeviceType::HPU) {
    register_casts<c10::DeviceType::HPU>(m);
  } else {
    register_casts<c10::DeviceType::PrivateUse1>(m);
  }
}

}  // namespace oxytorch::test
