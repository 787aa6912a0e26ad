#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
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

TEST(AutocastTest, OtherDtypesAreRefusedAndNothingIsLeft) {
  EXPECT_THROW(Autocast(at::kCPU, at::kDouble), Error);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(RecommendDtypeTest, FollowsTheHardware) {
  const auto advice = recommend_dtype(at::kCPU);
  EXPECT_EQ(advice.dtype, cpu_features().has_native_bf16() ? at::kBFloat16 : at::kFloat);
  EXPECT_FALSE(advice.reason.empty());
}

}  // namespace
}  // namespace oxytorch::amp
