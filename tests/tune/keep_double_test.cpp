// Casts to narrower dtypes leave float64 as it is while they are to.
#include "oxytorch/tune/keep_double.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <thread>

#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/verify.h"

namespace oxytorch::tune {
namespace {

TEST(KeepDoubleTest, CastsToNarrowerDtypesAreCopies) {
  const auto wide = torch::randn(5, at::kDouble);
  {
    const KeepDouble kept;
    for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
      const auto cast = wide.to(type);
      EXPECT_EQ(cast.scalar_type(), at::kDouble);
      EXPECT_TRUE(cast.equal(wide));
    }
    EXPECT_FALSE(wide.to(at::kFloat).is_same(wide)) << "still a copy, which may be written to";
    EXPECT_EQ(wide.to(at::kLong).scalar_type(), at::kLong);
    EXPECT_EQ(torch::ones(2).to(at::kHalf).scalar_type(), at::kHalf) << "another dtype is cast as ever";
    EXPECT_EQ(torch::softmax(wide, 0, at::kFloat).scalar_type(), at::kDouble);
    at::ScalarType elsewhere{};
    std::thread([&] { elsewhere = wide.to(at::kFloat).scalar_type(); }).join();
    EXPECT_EQ(elsewhere, at::kFloat) << "another thread is none of its business";
  }
  EXPECT_EQ(wide.to(at::kFloat).scalar_type(), at::kFloat);
}

TEST(KeepDoubleTest, GradientsAreThoseOfFloat64) {
  const auto weight = torch::randn({4, 3}, at::kDouble).requires_grad_();
  const auto x = torch::randn({6, 3}, at::kDouble);
  const auto y = torch::randint(4, 6, at::kLong);
  const auto gradient = [&](bool cast) {
    auto out = x.mm(weight.t());
    if (cast) out = out.to(at::kFloat);
    const auto loss = torch::nn::functional::cross_entropy(out, y);
    EXPECT_EQ(loss.scalar_type(), at::kDouble);
    return torch::autograd::grad({loss}, {weight})[0];
  };
  const auto right = gradient(false);
  const KeepDouble kept;
  EXPECT_TRUE(gradient(true).equal(right));
}

/// The verifier's ruling on a strategy that does nothing, where the loss sees outputs through `narrow`.
Ruling ruling_through(const std::function<at::Tensor(const at::Tensor&)>& narrow) {
  torch::manual_seed(1);
  torch::nn::Linear model(6, 3);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  Run run(*model, optimizer,
          [model, narrow](const Batch& batch) mutable {
            return torch::nn::functional::cross_entropy(narrow(model->forward(batch.input)), batch.target);
          },
          {Batch(torch::randn({8, 6}), torch::randint(3, {8}))});
  Snapshot snapshot(run);
  return Verifier(run, snapshot).check(Kind::Tolerance);
}

TEST(KeepDoubleTest, TheVerifierJudgesAStepThatCastsInFloat64) {
  const auto found = ruling_through([](const at::Tensor& out) { return out.to(at::kFloat); });
  EXPECT_TRUE(found.held) << found.reason;
  EXPECT_GT(found.evidence.at("float64_steps"), 0);
}

TEST(KeepDoubleTest, TheVerifierSaysWhereAStepHasADtypeOfItsOwn) {
  const auto found = ruling_through([](const at::Tensor& out) { return torch::empty(out.sizes()).copy_(out); });
  EXPECT_TRUE(found.held) << found.reason;
  EXPECT_NE(found.reason.find("does not run in float64 (the step computes in a dtype of its own"), std::string::npos)
      << found.reason;
}

}  // namespace
}  // namespace oxytorch::tune
