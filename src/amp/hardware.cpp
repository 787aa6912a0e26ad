#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"

namespace oxytorch::amp {
namespace {

HardwareSupport cpu_support(at::ScalarType dtype, const CpuFeatures& cpu) {
  if (dtype == at::kBFloat16) {
    if (!cpu.has_native_bf16()) {
      return {false,
              "bfloat16: this CPU has neither avx512_bf16 nor amx_bf16, and bfloat16 training is 2 to 3 times slower "
              "than float32 on it."};
    }
    return {true, std::string("bfloat16: this CPU multiplies it natively (") +
                      (cpu.amx_bf16 ? "amx_bf16" : "avx512_bf16") + ")."};
  }
  if (!cpu.has_native_fp16()) {
    return {false,
            "float16: this CPU has neither avx512_fp16 nor amx_fp16, and float16 training is slower than float32 on "
            "it."};
  }
  return {true, std::string("float16: this CPU multiplies it natively (") +
                    (cpu.amx_fp16 ? "amx_fp16" : "avx512_fp16") + ")."};
}

}  // namespace

HardwareSupport hardware_support(at::DeviceType device, at::ScalarType dtype, const CpuFeatures& cpu) {
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  OXY_CHECK(narrow || dtype == at::kFloat || dtype == at::kDouble, InvalidType, "the dtype is ", at::toString(dtype),
            ". Ask about float16, bfloat16, float32 or float64.");
  const std::string type = dtype == at::kBFloat16 ? "bfloat16" : dtype == at::kHalf ? "float16" : at::toString(dtype);
  if (device == at::kCUDA && !at::globalContext().hasCUDA()) return {false, type + ": no CUDA device is usable here."};
  if (device == at::kCPU && narrow) return cpu_support(dtype, cpu);
  // torch's name for "compute capability 8.0 and up" where no CUDA headers are at hand.
  if (device == at::kCUDA && dtype == at::kBFloat16 &&
      !at::detail::getCUDAHooks().supportsBFloat16ConvolutionWithCuDNNv8()) {
    return {false, "bfloat16: this CUDA device is below compute capability 8.0 and has no bfloat16 units."};
  }
  return {true, type + ": " + c10::DeviceTypeName(device, /*lower_case=*/true) + " multiplies it natively."};
}

DtypeAdvice recommend_dtype(at::DeviceType device, const CpuFeatures& cpu) {
  const auto bf16 = hardware_support(device, at::kBFloat16, cpu);
  if (bf16.native) return {at::kBFloat16, bf16.reason};
  if (device == at::kCUDA) {
    const auto fp16 = hardware_support(device, at::kHalf, cpu);
    if (fp16.native) return {at::kHalf, fp16.reason};
    return {at::kFloat, "float32: no CUDA device is usable here."};
  }
  return {at::kFloat,
          "float32: this CPU has neither avx512_bf16 nor amx_bf16, where bfloat16 training is 2 to 3 times slower."};
}

}  // namespace oxytorch::amp
