#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/error.h"
#include "oxytorch/ops.h"

namespace oxytorch {
namespace {

using at::Tensor;

struct Rotated {
  explicit Rotated(at::ScalarType type) {
    torch::manual_seed(0);
    x = torch::randn({2, 3, 37, 24}).to(type).detach().requires_grad_();
    const Tensor angles = torch::randn({37, 12});
    cos = angles.cos();
    sin = angles.sin();
  }
  // By the formula, in fp64.
  [[nodiscard]] Tensor right(bool interleaved) const {
    const Tensor wide = x.to(at::kDouble);
    const Tensor a = interleaved ? wide.slice(3, 0, std::nullopt, 2) : wide.slice(3, 0, 12);
    const Tensor b = interleaved ? wide.slice(3, 1, std::nullopt, 2) : wide.slice(3, 12);
    const Tensor first = a * cos - b * sin, second = b * cos + a * sin;
    return interleaved ? at::stack({first, second}, -1).flatten(-2) : at::cat({first, second}, 3);
  }
  Tensor x, cos, sin;
};

TEST(RotaryTest, AgreesWithTheFormula) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const bool interleaved : {false, true}) {
      const Rotated in(type);
      const Tensor ours = ops::rotary(in.x, in.cos, in.sin, {.interleaved = interleaved});
      const Tensor right = in.right(interleaved);
      const double tolerance = type == at::kFloat      ? 1e-6
                               : type == at::kDouble   ? 1e-12
                               : type == at::kBFloat16 ? 0x1p-8
                                                       : 0x1p-11;
      EXPECT_EQ(ours.scalar_type(), type);
      EXPECT_TRUE(at::allclose(ours.to(at::kDouble), right, tolerance, tolerance)) << type << interleaved;
      const Tensor from = torch::randn(ours.sizes()).to(type);
      const Tensor grad = torch::autograd::grad({ours}, {in.x}, {from})[0];
      const Tensor right_grad = torch::autograd::grad({right}, {in.x}, {from.to(at::kDouble)})[0];
      EXPECT_TRUE(at::allclose(grad, right_grad, 2 * tolerance, 2 * tolerance)) << type << interleaved;
    }
  }
}

TEST(RotaryTest, CopiesWhatIsNotRotated) {
  const Rotated in(at::kBFloat16);
  const auto some = [](const Tensor& table) { return table.slice(1, 0, 5); };
  const Tensor ours = ops::rotary(in.x, some(in.cos), some(in.sin), {.rotary_dim = 10});
  EXPECT_TRUE(at::equal(ours.slice(3, 10), in.x.slice(3, 10)));
  EXPECT_TRUE(at::equal(ours.slice(3, 0, 10), ops::rotary(in.x.slice(3, 0, 10), some(in.cos), some(in.sin))));
  const auto twice = [&](const Tensor& table) { return at::cat({some(table), some(table)}, 1); };
  EXPECT_TRUE(at::equal(ours, ops::rotary(in.x, twice(in.cos), twice(in.sin), {.rotary_dim = 10})));
}

TEST(RotaryTest, RefusesInWords) {
  const Rotated in(at::kFloat);
  const auto refused = [&](const Tensor& cos, const Tensor& sin) -> std::string {
    try {
      static_cast<void>(ops::rotary(in.x, cos, sin));
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(refused(in.cos.slice(1, 0, 5), in.sin.slice(1, 0, 5)), testing::HasSubstr("cos has 5 angles for 24"));
  EXPECT_THAT(refused(in.cos.slice(0, 0, 9), in.sin.slice(0, 0, 9)), testing::HasSubstr("cos has 9 tokens and x 37"));
  EXPECT_THAT(refused(in.cos.clone().requires_grad_(), in.sin), testing::HasSubstr("no gradient for cos and sin"));
}

}  // namespace
}  // namespace oxytorch
