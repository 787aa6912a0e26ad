#include "tune/attention.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <atomic>
#include <string_view>

namespace oxytorch::tune {
namespace {

std::atomic<bool> flash_seen{false};

}  // namespace

bool uses_flash(const std::function<at::Tensor()>& forward) {
  flash_seen = false;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        if (std::string_view(call.name()).find("flash_attention") != std::string_view::npos) flash_seen = true;
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  try {
    const at::NoGradGuard no_grad;
    forward();
  } catch (...) {
    at::removeCallback(handle);
    throw;
  }
  at::removeCallback(handle);
  return flash_seen;
}

MathAttention::MathAttention(bool reduced)
    : flash_before_(at::globalContext().userEnabledFlashSDP()),
      reduced_before_(at::globalContext().allowFP16BF16ReductionMathSDP()) {
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setAllowFP16BF16ReductionMathSDP(reduced);
}

MathAttention::~MathAttention() {
  at::globalContext().setSDPUseFlash(flash_before_);
  at::globalContext().setAllowFP16BF16ReductionMathSDP(reduced_before_);
}

}  // namespace oxytorch::tune
