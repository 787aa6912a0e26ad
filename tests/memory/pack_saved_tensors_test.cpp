#include "oxytorch/memory/pack_saved_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/memory.h"

namespace oxytorch::memory {
namespace {

using at::Tensor;
using testing::HasSubstr;

constexpr SavedFormat kFormats[] = {SavedFormat::Lossless, SavedFormat::BFloat16, SavedFormat::Int8, SavedFormat::File};

/// Gradients of a small network with masks and indices, packed or not.
std::vector<Tensor> gradients(PackSavedTensors* packed) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(64, 128), torch::nn::GELU(), torch::nn::Dropout(0.2),
                              torch::nn::Linear(128, 64));
  const Tensor x = torch::randn({300, 64}).requires_grad_();
  Tensor loss;
  {
    std::optional<PackSavedTensors::Scope> scope;
    if (packed != nullptr) scope.emplace(*packed);
    loss = torch::max_pool1d(model->forward(x), 2).square().sum();
  }
  loss.backward();
  std::vector<Tensor> found{x.grad()};
  for (const auto& parameter : model->parameters()) found.push_back(parameter.grad());
  return found;
}

TEST(PackSavedTensorsTest, GradientsAreTorchsOrNearThem) {
  const auto expected = gradients(nullptr);
  for (const auto format : kFormats) {
    PackSavedTensors packed(format);
    const auto got = gradients(&packed);
    const bool is_exact = format == SavedFormat::Lossless || format == SavedFormat::File;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double error = ((got[i] - expected[i]).norm() / expected[i].norm()).item<double>();
      EXPECT_LE(error, is_exact ? 0 : 0.03) << name(format) << i;
    }
    const auto report = packed.report();
    EXPECT_GT(report.tensors, 0) << name(format);
    EXPECT_LT(report.packed_bytes, report.bytes) << name(format);
    EXPECT_EQ(report.relative_error > 0, !is_exact) << name(format);
    EXPECT_THAT(report.text(), HasSubstr("saved tensors of"));
  }
}

TEST(PackSavedTensorsTest, LessIsKept) {
  const auto kept = [](PackSavedTensors* packed) {
    const Tensor x = torch::randn({100, 1000}).requires_grad_();
    const Meter meter;
    std::optional<PackSavedTensors::Scope> scope;
    if (packed != nullptr) scope.emplace(*packed);
    const auto loss = x.sin().exp().tanh().sum();
    return meter.live_bytes();
  };
  const auto all = kept(nullptr);
  PackSavedTensors narrow(SavedFormat::BFloat16), spilled(SavedFormat::File);
  EXPECT_NEAR(static_cast<double>(kept(&narrow)), 0.5 * static_cast<double>(all), 0.05 * static_cast<double>(all));
  EXPECT_LT(kept(&spilled), all / 50);
}

TEST(PackSavedTensorsTest, InsideACheckpointNothingIsPacked) {
  const Tensor x = torch::randn({100, 1000}).requires_grad_();
  PackSavedTensors packed(SavedFormat::Int8);
  Tensor loss;
  {
    const PackSavedTensors::Scope scope(packed);
    loss = checkpoint([](const Tensor& t) { return t.sin().exp().tanh().sum(); }, x);
  }
  EXPECT_EQ(packed.report().tensors, 0);
  const Tensor expected = torch::autograd::grad({x.sin().exp().tanh().sum()}, {x})[0];
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), expected));
}

TEST(PackSavedTensorsTest, RefusesInWords) {
  EXPECT_EQ(parse_saved_format("int8"), SavedFormat::Int8);
  try {
    static_cast<void>(parse_saved_format("fp8"));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("'lossless', 'bf16', 'int8' or 'file'"));
  }
  try {
    const PackSavedTensors packed(SavedFormat::File, "/there is none");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Io);
    EXPECT_THAT(error.what(), HasSubstr("Name a folder that can be written to"));
  }
}

}  // namespace
}  // namespace oxytorch::memory
