// Casts to narrower dtypes leave float64 as it is while they are to.
#include "oxytorch/tune/keep_double.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "oxytorch/memory/meter.h"
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

TEST(KeepDoubleTest, ConvolutionsTakeSomeRowsAtATime) {
  torch::manual_seed(2);
  namespace nn = torch::nn::functional;
  const auto wide = torch::TensorOptions(at::kDouble).requires_grad(true);
  const auto x = torch::randn({32, 8, 64, 64}, wide), line = torch::randn({40, 64, 512}, wide),
             cube = torch::randn({5, 4, 24, 24, 24}, wide);
  const auto w = torch::randn({16, 4, 5, 3}, wide), v = torch::randn({16, 64, 7}, wide),
             u = torch::randn({4, 4, 3, 3, 3}, wide), back = torch::randn({8, 4, 3, 3}, wide),
             b = torch::randn(16, wide);
  const std::vector<std::function<at::Tensor()>> all = {
      [&] { return at::conv2d(x, w, b, {2, 1}, {2, 1}, {1, 2}, 2); },
      [&] { return at::conv1d(line, v, b, 3, "valid"); },
      [&] { return at::conv3d(cube, u, {}, 1, "same"); },
      [&] { return at::conv_transpose2d(x, back); },
      [&] {
        return at::conv2d(x.contiguous(at::MemoryFormat::ChannelsLast), w, b, at::IntArrayRef{1, 1},
                          at::IntArrayRef{0, 0}, at::IntArrayRef{1, 1}, 2);
      },
      [&] { return at::conv2d(x[0], w, b, at::IntArrayRef{1, 1}, at::IntArrayRef{0, 0}, at::IntArrayRef{1, 1}, 2); },
      [&] {
        return at::conv2d(x.slice(0, 0, 0), w, b, at::IntArrayRef{1, 1}, at::IntArrayRef{0, 0}, at::IntArrayRef{1, 1},
                          2);
      },
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto run = [&] {
      const memory::Meter meter;
      const auto out = all[i]();
      const auto found =
          torch::autograd::grad({out.sin().sum()}, {x, line, cube, w, v, u, back, b}, {}, {}, false, true);
      return std::tuple(out.detach(), found, meter.peak_bytes());
    };
    const auto [right, gradients, plain] = run();
    const KeepDouble kept;
    const auto [out, found, less] = run();
    ASSERT_TRUE(at::allclose(out, right, 1e-12, 1e-12)) << i;
    for (std::size_t j = 0; j < found.size(); ++j) {
      ASSERT_EQ(found[j].defined(), gradients[j].defined()) << i << ", " << j;
      EXPECT_TRUE(!found[j].defined() || at::allclose(found[j], gradients[j], 1e-10, 1e-10)) << i << ", " << j;
    }
    if (i < 3) EXPECT_LT(less, 9 * plain / 10) << i;
  }
}

TEST(KeepDoubleTest, BatchNormalizationTakesSomeChannelsAtATimeInBackward) {
  torch::manual_seed(3);
  const auto wide = torch::TensorOptions(at::kDouble);
  const auto image = torch::randn({32, 10, 128, 64}, wide), line = torch::randn({4096, 301}, wide);
  const auto last = image.contiguous(at::MemoryFormat::ChannelsLast);
  const auto run = [&](const at::Tensor& given, bool affine, bool train, bool frozen) {
    const auto x = given.detach().requires_grad_(!frozen);
    const auto channels = x.size(1);
    const auto weight = torch::linspace(0.5, 2, channels, wide).requires_grad_();
    const auto bias = torch::zeros(channels, wide).requires_grad_();
    const auto mean = torch::full({channels}, 0.1, wide), variance = torch::full({channels}, 1.5, wide);
    const auto out = at::batch_norm(x, affine ? weight : at::Tensor(), affine ? bias : at::Tensor(), mean, variance,
                                    train, 0.1, 1e-5, false);
    const auto loss = (out * given.sin()).sum();
    std::vector<at::Tensor> inputs{weight, bias};
    if (!frozen) inputs.push_back(x);
    return torch::autograd::grad({loss}, inputs, {}, {}, false, true);
  };
  for (const auto& given : {image, last, line}) {
    for (const auto& [affine, train, frozen] : {std::tuple(true, true, false), std::tuple(false, true, false),
                                                std::tuple(true, false, false), std::tuple(true, true, true)}) {
      const auto right = run(given, affine, train, frozen);
      const KeepDouble kept;
      const auto found = run(given, affine, train, frozen);
      for (std::size_t j = 0; j < found.size(); ++j) {
        ASSERT_EQ(found[j].defined(), right[j].defined()) << j;
        if (!found[j].defined()) continue;
        EXPECT_TRUE(at::allclose(found[j], right[j], 1e-10, 1e-12)) << j;
        EXPECT_EQ(found[j].strides(), right[j].strides()) << j;
      }
    }
  }
  const auto peak = [&, of_channels = torch::ones(10, wide)] {
    const memory::Meter meter;
    const auto made = at::native_batch_norm_backward(image, image, {}, {}, {}, of_channels, of_channels, true, 1e-5,
                                                     {true, true, true});
    return meter.peak_bytes();
  };
  const auto plain = peak();
  const KeepDouble kept;
  EXPECT_LT(peak(), 3 * plain / 4);
}

TEST(KeepDoubleTest, AConvolutionThatTorchRefusesIsRefused) {
  const auto x = torch::randn({2, 3, 8, 8}, at::kDouble), w = torch::randn({4, 3, 3, 3}, at::kDouble);
  const KeepDouble kept;
  EXPECT_THROW(at::conv2d(x, w, {}, 0), c10::Error);
  EXPECT_THROW(at::convolution(x, w, {}, {}, {0}, {1}, false, {0}, 1), c10::Error);
  EXPECT_THROW(at::conv2d(x, w.slice(1, 0, 0)), c10::Error);
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
