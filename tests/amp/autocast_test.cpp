#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <thread>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/system.h"

namespace oxytorch::amp {
namespace {

at::ScalarType product_dtype() { return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(); }

TEST(AutocastTest, CastsInsideTheScopeOnly) {
  EXPECT_EQ(product_dtype(), at::kFloat);
  {
    Autocast guard(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product_dtype(), at::kBFloat16);
  }
  EXPECT_EQ(product_dtype(), at::kFloat);
}

TEST(AutocastTest, InnermostScopeRules) {
  Autocast outer(at::kCPU, at::kBFloat16);
  {
    Autocast off(at::kCPU, at::kBFloat16, false);
    EXPECT_EQ(product_dtype(), at::kFloat);
    {
      Autocast half(at::kCPU, at::kHalf);
      EXPECT_EQ(product_dtype(), at::kHalf);
    }
    EXPECT_EQ(product_dtype(), at::kFloat);
  }
  EXPECT_EQ(product_dtype(), at::kBFloat16);
}

TEST(AutocastTest, ComesBackAfterAnException) {
  const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
  try {
    Autocast guard(at::kCPU, at::kHalf, true, false);
    throw std::runtime_error("x");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), dtype);
}

TEST(AutocastTest, CacheIsClearedAtTheOutermostEndOnly) {
  auto weight = at::ones({2, 2}).requires_grad_();
  const auto uses = [&] { return weight.getIntrusivePtr().weak_use_count(); };
  const auto before = uses();
  {
    Autocast outer(at::kCPU, at::kBFloat16);
    {
      Autocast inner(at::kCPU, at::kBFloat16);
      at::mm(weight, weight);
    }
    EXPECT_GT(uses(), before) << "the inner scope emptied the cache of the outer one";
  }
  EXPECT_EQ(uses(), before);
}

TEST(AutocastTest, AnotherThreadSeesItThroughTheWrapperOnly) {
  Autocast guard(at::kCPU, at::kBFloat16);
  auto bare = at::kDouble, wrapped = at::kDouble, after = at::kDouble;
  auto function = with_autocast_state([&wrapped] { wrapped = product_dtype(); });
  std::thread([&] {
    bare = product_dtype();
    function();
    after = product_dtype();
  }).join();
  EXPECT_EQ(bare, at::kFloat);
  EXPECT_EQ(wrapped, at::kBFloat16);
  EXPECT_EQ(after, at::kFloat);
}

float product_with(const at::Tensor& weight) { return at::mm(weight, at::eye(2))[0][0].item<float>(); }

TEST(AutocastTest, WeightsWrittenBetweenTwoScopesAreCastAnew) {
  auto weight = at::ones({2, 2}).requires_grad_();
  for (const float value : {1.0F, 2.0F}) {
    {
      at::NoGradGuard no_grad;
      weight.fill_(value);
    }
    Autocast guard(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product_with(weight), value);
    Autocast inner(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product_with(weight), value);
  }
}

TEST(AutocastTest, WithoutTheCacheWeightsAreCastEachTime) {
  auto weight = at::ones({2, 2}).requires_grad_();
  Autocast guard(at::kCPU, at::kBFloat16, true, false);
  EXPECT_EQ(product_with(weight), 1.0F);
  {
    at::NoGradGuard no_grad;
    weight.fill_(2.0F);
  }
  EXPECT_EQ(product_with(weight), 2.0F);
}

// The cache belongs to the process: what a worker leaves in it would be found by the next one.
TEST(AutocastTest, AWorkerLeavesNoCastWeightsBehind) {
  auto weight = at::ones({2, 2}).requires_grad_();
  float seen = 0;
  const auto make = [&] {
    Autocast guard(at::kCPU, at::kBFloat16);
    return with_autocast_state([&] { seen = product_with(weight); });
  };
  auto function = make();
  for (const float value : {1.0F, 2.0F, 3.0F}) {
    {
      at::NoGradGuard no_grad;
      weight.fill_(value);
    }
    std::thread([&] { function(); }).join();
    EXPECT_EQ(seen, value);
  }
}

TEST(AutocastTest, AFailingWorkerLeavesNothingBehind) {
  auto function = [] {
    Autocast guard(at::kCPU, at::kBFloat16);
    return with_autocast_state([](int value) -> int {
      if (value < 0) throw std::runtime_error("x");
      return value + 1;
    });
  }();
  EXPECT_EQ(function(1), 2);
  EXPECT_THROW(function(-1), std::runtime_error);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::autocast::increment_nesting(), 1);
  EXPECT_EQ(at::autocast::decrement_nesting(), 0);
}

TEST(AutocastTest, DevicesAreIndependent) {
  Autocast cuda(at::kCUDA, at::kHalf);
  EXPECT_EQ(product_dtype(), at::kFloat);
  Autocast cpu(at::kCPU, at::kBFloat16);
  EXPECT_EQ(product_dtype(), at::kBFloat16);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCUDA), at::kHalf);
}

TEST(AutocastTest, OtherDtypesAreRefusedAndNothingIsLeft) {
  EXPECT_THROW(Autocast(at::kCPU, at::kDouble), Error);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(RecommendDtypeTest, FollowsTheHardware) {
  const auto advice = recommend_dtype(at::kCPU);
  EXPECT_EQ(advice.dtype, cpu_features().has_native_bf16() ? at::kBFloat16 : at::kFloat);
  EXPECT_FALSE(advice.reason.empty());
}

TEST(HardwareSupportTest, NamesWhatIsThereOrMissing) {
  CpuFeatures none, avx, amx;
  none.avx512f = none.f16c = true;
  avx.avx512_bf16 = avx.avx512_fp16 = true;
  amx.amx_bf16 = amx.amx_fp16 = true;
  const auto ask = [](at::ScalarType dtype, const CpuFeatures& cpu) {
    const auto support = hardware_support(at::kCPU, dtype, cpu);
    return std::to_string(support.native) + support.reason;
  };
  EXPECT_THAT(ask(at::kBFloat16, none), testing::MatchesRegex("0bfloat16: .*avx512_bf16.*amx_bf16.*slower.*"));
  EXPECT_THAT(ask(at::kHalf, none), testing::MatchesRegex("0float16: .*avx512_fp16.*amx_fp16.*slower.*"));
  EXPECT_THAT(ask(at::kBFloat16, avx), testing::MatchesRegex("1bfloat16: .*avx512_bf16.*"));
  EXPECT_THAT(ask(at::kBFloat16, amx), testing::MatchesRegex("1bfloat16: .*amx_bf16.*"));
  EXPECT_THAT(ask(at::kHalf, avx), testing::MatchesRegex("1float16: .*avx512_fp16.*"));
  EXPECT_THAT(ask(at::kHalf, amx), testing::MatchesRegex("1float16: .*amx_fp16.*"));
  EXPECT_TRUE(hardware_support(at::kCPU, at::kFloat, none).native);
  EXPECT_THROW(hardware_support(at::kCPU, at::kInt), Error);
  EXPECT_EQ(recommend_dtype(at::kCPU, none).dtype, at::kFloat);
  EXPECT_EQ(recommend_dtype(at::kCPU, avx).dtype, at::kBFloat16);
}

}  // namespace
}  // namespace oxytorch::amp
