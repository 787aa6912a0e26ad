#include "ops/bernoulli_cpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>

#include <cstring>
#include <mutex>

#include "optim/dense.h"
#include "oxytorch/kernels/operators.h"

namespace oxytorch::ops {

bool bernoulli_cpu(at::Tensor& self, double p, const std::optional<at::Generator>& generator) {
  at::Generator source =
      generator.has_value() && generator->defined() ? *generator : at::detail::getDefaultCPUGenerator();
  const auto element =
      self.scalar_type() == at::kBool ? std::optional(kernels::ElementType::Int8) : optim::element_type(self);
  const bool dense = self.is_contiguous() || self.is_contiguous(at::MemoryFormat::ChannelsLast);
  auto* twister = dynamic_cast<at::CPUGeneratorImpl*>(source.unsafeGetGeneratorImpl());
  if (!self.device().is_cpu() || !element || self.scalar_type() == at::kChar || !dense || self.numel() == 0 ||
      !(p >= 0 && p <= 1) || twister == nullptr) {
    return false;
  }
  const std::lock_guard lock(twister->mutex_);
  auto engine = twister->engine();
  at::mt19937_data_pod state = engine.data();
  kernels::MersenneTwister words;
  static_assert(sizeof words.word == sizeof state.state_);
  std::memcpy(words.word, state.state_.data(), sizeof words.word);
  // torch counts what is left, one too many; a fresh seed has nothing.
  words.next = state.left_ == 1 ? kernels::MersenneTwister::kWords : static_cast<int>(state.next_);
  kernels::bernoulli(words, p, self.numel(), *element, self.mutable_data_ptr());
  std::memcpy(state.state_.data(), words.word, sizeof words.word);
  state.next_ = static_cast<std::uint32_t>(words.next);
  state.left_ = kernels::MersenneTwister::kWords + 1 - words.next;
  engine.set_data(state);
  twister->set_engine(engine);
  return true;
}

bool bernoulli_cpu_is_torchs() {
  static const bool found = [] {
    constexpr std::uint64_t kSeed = 5;
    at::Tensor ours = at::empty({1302}, at::kBool);
    const at::Tensor theirs = at::empty_like(ours).bernoulli_(0.9, at::detail::createCPUGenerator(kSeed));
    return bernoulli_cpu(ours, 0.9, at::detail::createCPUGenerator(kSeed)) && at::equal(ours, theirs);
  }();
  return found;
}

}  // namespace oxytorch::ops
