#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <span>
#include <sstream>
#include <thread>
#include <vector>

#include "device/remove_folder.h"
#include "device/torch_device.h"
#include "oxytorch/data/loader_settings.h"
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

/// The bytes of the next batch on the host; undefined at the end of an epoch.
at::Tensor drawn(TensorLoader& loader) {
  const auto batch = loader.next();
  if (!batch) return {};
  EXPECT_TRUE(batch->batch.columns[0].array.data.bytes.empty());
  EXPECT_EQ(batch->batch.columns[0].name, "array");
  return batch->tensors[0].cpu();
}

/// Draws until the next batch is on its way, which hangs on the loader's threads; whether it came to that.
bool draw_until_copying(TensorLoader& loader) {
  for (int i = 0; i < 200; ++i) {
    if (!drawn(loader).defined()) continue;
    if (loader.is_copying()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST_F(TensorLoaderTest, ADeviceGetsTheBatchesOfTheHost) {
  const at::Device device = test::test_device();
  const LoaderOptions options{.batch_size = 5, .shuffle = true, .seed = 2};
  TensorLoader here(open_rows(), options);
  TensorLoader there(open_rows(), options, device);
  EXPECT_EQ(there.device(), device);
  EXPECT_EQ(there.is_pinned(), !device.is_cpu());
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(there.state(), here.state()) << "a batch that is copied ahead was not given out yet, at draw " << i;
    ASSERT_EQ(there.epoch(), here.epoch());
    ASSERT_TRUE(there.wait(60) && here.wait(60));
    // A copy is counted when a later draw finds that it is done.
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
    const auto mine = there.next();
    const auto theirs = here.next();
    ASSERT_EQ(mine.has_value(), theirs.has_value());
    if (!mine) continue;
    ASSERT_EQ(mine->tensors[0].device(), device);
    ASSERT_TRUE(mine->tensors[0].cpu().equal(theirs->tensors[0]));
    ASSERT_EQ(mine->batch.samples, theirs->batch.samples);
  }
  const auto stats = there.stats();
  EXPECT_EQ(stats.batches, here.stats().batches + (there.is_copying() ? 1 : 0));
  EXPECT_EQ(here.stats().copied_bytes, 0);
  EXPECT_EQ(stats.copied_bytes > 0, !device.is_cpu());
  EXPECT_EQ(stats.copied_bytes % (4 * 4), 0);
  EXPECT_LE(stats.copied_bytes, stats.samples * 4 * 4);
  EXPECT_EQ(stats.copy_seconds > 0, !device.is_cpu());
}

TEST_F(TensorLoaderTest, ABatchThatIsCopiedAheadIsNotLost) {
  const at::Device device = test::test_device();
  if (device.is_cpu()) GTEST_SKIP() << "nothing is copied";
  const LoaderOptions options{.batch_size = 2, .shuffle = true, .seed = 2, .prefetch = 4};
  TensorLoader loader(open_rows(), options, device);

  ASSERT_TRUE(draw_until_copying(loader));
  const std::string state = loader.state();
  const at::Tensor next = drawn(loader);
  loader.load_state(state);
  EXPECT_FALSE(loader.is_copying());
  EXPECT_TRUE(drawn(loader).equal(next));
  TensorLoader other(open_rows(), options);
  other.load_state(state);
  EXPECT_TRUE(drawn(other).equal(next));

  ASSERT_TRUE(draw_until_copying(loader));
  other.load_state(loader.state());
  loader.set_device({});
  EXPECT_FALSE(loader.is_pinned());
  const auto on_host = loader.next();
  ASSERT_TRUE(on_host && on_host->tensors[0].is_cpu());
  EXPECT_TRUE(on_host->tensors[0].equal(drawn(other)));

  loader.set_device(device);
  ASSERT_TRUE(draw_until_copying(loader));
  const auto epoch = loader.epoch();
  loader.set_epoch(epoch);
  other.set_epoch(epoch + 1);
  other.set_epoch(epoch);
  EXPECT_TRUE(drawn(loader).equal(drawn(other))) << "an epoch begun anew begins with its first batch";
}

TEST_F(TensorLoaderTest, WhatAnAheadBatchThrowsComesInItsPlace) {
  // Rows whose third batch cannot be made.
  class Failing final : public Stage {
   public:
    [[nodiscard]] std::string name() const override { return "failing"; }
    void apply(Item& item, PhiloxStream& /*random*/) const override {
      OXY_CHECK(item.index < 8 || item.index >= 12, InvalidArgument, "row ", item.index, " is bad.");
    }
  };
  TensorLoader loader(open_rows(), {.batch_size = 4, .stages = {std::make_shared<Failing>()}, .prefetch = 4},
                      test::test_device());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_TRUE(drawn(loader).defined());
  EXPECT_TRUE(drawn(loader).defined());
  EXPECT_THROW(static_cast<void>(loader.next()), Error);
  EXPECT_EQ(drawn(loader)[0][0].item<float>(), 12 * 4);
}

TEST_F(TensorLoaderTest, ItGoesToTheDeviceOfTheModelForAsLongAsAsked) {
  const at::Device device = test::test_device();
  TensorLoader loader(open_rows(), {.batch_size = 2});
  {
    const LoaderSettings settings(loader, PerformanceConfig("basic"), device);
    EXPECT_EQ(loader.device().has_value(), !device.is_cpu());
    EXPECT_EQ(settings.lines().size(), device.is_cpu() ? 0U : 1U);
    EXPECT_EQ(loader.next()->tensors[0].device(), device);
  }
  EXPECT_FALSE(loader.device());
}

TEST(TensorLoaderOfAStream, DrawsNothingTwiceWhereItsDeviceChanges) {
  class Once final : public Stream {
   public:
    Once() { schema_.fields = {{"number", Kind::Array, DType::I64, {}}}; }
    [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
    [[nodiscard]] std::string fingerprint() const override { return "00000000000000aa"; }
    void begin(std::int64_t /*epoch*/) override { ++begun; }
    std::optional<Sample> next() override {
      if (at_ == 12) return std::nullopt;
      const std::int64_t number = at_++;
      return Sample{own(DType::I64, {}, std::as_bytes(std::span(&number, 1)))};
    }
    int begun = 0;

   private:
    Schema schema_;
    std::int64_t at_ = 0;
  };
  const auto stream = std::make_shared<Once>();
  TensorLoader loader(stream, {.batch_size = 1, .prefetch = 4}, test::test_device());
  for (std::int64_t i = 0; i < 12; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const auto batch = loader.next();
    ASSERT_TRUE(batch);
    EXPECT_EQ(batch->tensors[0].device(), i % 2 == 0 ? test::test_device() : at::Device(at::kCPU));
    EXPECT_EQ(batch->tensors[0].item<std::int64_t>(), i);
    loader.set_device(i % 2 == 0 ? at::Device(at::kCPU) : test::test_device());
  }
  EXPECT_EQ(stream->begun, 1);
}

TEST_F(TensorLoaderTest, AChangeInTheMiddleOfAnEpochLosesNoBatch) {
  const LoaderOptions options{.batch_size = 2, .shuffle = true, .seed = 2, .threads = 1, .prefetch = 4};
  TensorLoader whole(open_rows(), options);
  TensorLoader loader(open_rows(), options, test::test_device());
  for (int i = 0; i < 30; ++i) {
    const auto wanted = drawn(whole);
    const auto found = drawn(loader);
    ASSERT_EQ(found.defined(), wanted.defined()) << i;
    ASSERT_TRUE(!wanted.defined() || found.equal(wanted)) << i;
    auto changed = loader.asked();
    changed.threads = 1 + i % 3;
    changed.prefetch = 1 + i % 5;
    changed.batch_size = 7;  // not to be changed
    loader.change(changed);
    ASSERT_EQ(loader.options().threads, 1 + i % 3);
    ASSERT_EQ(loader.options().batch_size, 2);
  }
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
