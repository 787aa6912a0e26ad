#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "device/remove_folder.h"
#include "oxytorch/data/tensors.h"
#include "oxytorch/error.h"
#include "oxytorch/trainer.h"

namespace oxytorch::data {
namespace {

/// A file of `rows` samples of 4 floats: 0, 1, 2, ...
class TensorLoaderTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(testing::TempDir()) / ("tensors" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
    std::ofstream file(folder_ / "x.bin", std::ios::binary);
    for (int i = 0; i < kRows * 4; ++i) {
      const auto value = static_cast<float>(i);
      file.write(reinterpret_cast<const char*>(&value), 4);
    }
  }
  void TearDown() override { remove_folder(folder_); }
  [[nodiscard]] std::shared_ptr<const Dataset> open_rows() const {
    return open_raw((folder_ / "x.bin").string(), DType::F32, {4});
  }

  static constexpr int kRows = 22;
  std::filesystem::path folder_;
};

TEST_F(TensorLoaderTest, IsARangeOfAnEpoch) {
  TensorLoader loader(open_rows(), {.batch_size = 5});
  std::vector<at::Tensor> parts;
  for (auto& batch : loader) parts.push_back(batch.at("array"));
  ASSERT_EQ(parts.size(), 5U);
  EXPECT_TRUE(at::cat(parts).flatten().equal(at::arange(kRows * 4, at::kFloat)));
  EXPECT_EQ(loader.epoch(), 1);
  for (auto& batch : loader) {
    EXPECT_EQ(batch.size(), 1U);
    break;
  }
  EXPECT_EQ(loader.epoch(), 1);
  int count = 0;
  for ([[maybe_unused]] auto& batch : loader) ++count;
  EXPECT_EQ(count, 5) << "a loop that ended early is followed by the next epoch";
  EXPECT_EQ(loader.epoch(), 3);
}

TEST_F(TensorLoaderTest, TensorsOutliveLoaderAndDataset) {
  at::Tensor kept;
  {
    TensorLoader loader(open_rows(), {.batch_size = 2});
    kept = (*loader.begin()).at("array");
  }
  EXPECT_TRUE(kept.flatten().equal(at::arange(8, at::kFloat)));
}

TEST_F(TensorLoaderTest, ATrainerTakesIt) {
  torch::nn::Linear model(4, 1);
  torch::optim::SGD optimizer(model->parameters(), 1e-4);
  const auto loss =
      loss_on<Tensors>([&](const Tensors& batch) { return model->forward(batch.at("array") / 100).square().mean(); });
  Trainer trainer(*model, optimizer, loss, "basic");
  TensorLoader loader(open_rows(), {.batch_size = 5, .shuffle = true});
  const auto result = trainer.fit(loader, 2);
  EXPECT_EQ(result.steps, 10);
}

/// Trains a line on rows, and notes the first element of each batch.
struct Line {
  torch::nn::Linear model{4, 1};
  torch::optim::SGD optimizer{model->parameters(), torch::optim::SGDOptions(1e-4)};
  std::vector<float> seen;
  Trainer trainer{*model,
                  optimizer,
                  [this](const oxytorch::Batch& batch) {
                    const auto& x = batch.as<Tensors>().at("array");
                    seen.push_back(x[0][0].item<float>());
                    return model->forward(x / 100).square().mean();
                  },
                  "basic",
                  {.calibrate = false}};

  Line() {
    const at::NoGradGuard no_grad;
    for (auto& p : model->parameters()) p.fill_(0.5);
  }
};

TEST_F(TensorLoaderTest, AFitThatIsBrokenOffGoesOnWhereItWas) {
  const LoaderOptions options{.batch_size = 5, .shuffle = true, .seed = 3};
  Line whole;
  TensorLoader batches(open_rows(), options);
  whole.trainer.fit(batches, /*epochs=*/3);
  ASSERT_EQ(whole.seen.size(), 15U);
  EXPECT_NE(std::vector(whole.seen.begin(), whole.seen.begin() + 5),
            std::vector(whole.seen.begin() + 5, whole.seen.begin() + 10))
      << "each epoch has an order of its own";

  for (const int stop : {1, 3, 5, 7, 10}) {
    Line first;
    TensorLoader before(open_rows(), options);
    const auto broken = first.trainer.fit(before, /*epochs=*/3, /*max_steps=*/stop);
    EXPECT_EQ(broken.stop_reason, "max_steps");
    std::stringstream file;
    {
      torch::serialize::OutputArchive archive;
      first.trainer.save(archive);
      archive.save_to(file);
    }
    Line second;
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    second.trainer.load(archive);
    auto others = options;  // the stream does not depend on them
    others.threads = 1;
    others.prefetch = 7;
    TensorLoader after(open_rows(), others);
    second.trainer.fit(after, /*epochs=*/3);
    auto seen = first.seen;
    seen.insert(seen.end(), second.seen.begin(), second.seen.end());
    EXPECT_EQ(seen, whole.seen) << "broken off after " << stop;
    EXPECT_TRUE(second.model->weight.equal(whole.model->weight)) << "broken off after " << stop;
    EXPECT_EQ(second.trainer.epoch(), 3);
    EXPECT_EQ(second.trainer.global_step(), 15);
  }
  EXPECT_THAT(whole.trainer.report(), testing::HasSubstr("data "));
}

TEST_F(TensorLoaderTest, ASecondFitGoesOnToo) {
  const LoaderOptions options{.batch_size = 5, .shuffle = true};
  Line whole;
  Line parts;
  TensorLoader batches(open_rows(), options);
  TensorLoader same(open_rows(), options);
  whole.trainer.fit(batches, /*epochs=*/2);
  for (const int stop : {2, 6, 10}) parts.trainer.fit(same, /*epochs=*/2, stop);
  EXPECT_EQ(parts.seen, whole.seen);
}

TEST(Tensors, ComeFromValuesAndGoBack) {
  for (const auto type : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
                          at::kDouble, at::kBool}) {
    const auto tensor = at::arange(12).to(type).view({3, 4});
    const auto value = to_value(tensor.t());
    EXPECT_EQ(value.shape, (std::vector<std::int64_t>{4, 3}));
    EXPECT_TRUE(to_tensor(value).equal(tensor.t()));
  }
  EXPECT_TRUE(to_tensor(to_value(at::scalar_tensor(3))).equal(at::scalar_tensor(3)));
  EXPECT_EQ(to_tensor(to_value(at::empty({0, 3}))).sizes(), (std::vector<std::int64_t>{0, 3}));
  EXPECT_THROW(to_value(at::zeros({2}, at::kComplexFloat)), Error);
}

TEST(Tensors, OfUnalignedBytesAreCopied) {
  const std::vector<std::byte> bytes{std::byte{9}, std::byte{1}, std::byte{0}, std::byte{0}, std::byte{0}};
  const auto owner = std::make_shared<std::vector<std::byte>>(bytes);
  const Value value{DType::I32, {1}, {std::span(*owner).subspan(1), owner}};
  EXPECT_EQ(to_tensor(value).item<int>(), 1);
}

}  // namespace
}  // namespace oxytorch::data
