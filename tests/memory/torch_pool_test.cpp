#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>
#include <vector>

#include "oxytorch/memory.h"

namespace oxytorch {
namespace {

bool pooled(const at::Tensor& tensor) {
  return tensor.storage().data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
}

/// A small convolutional network after `steps` steps of SGD: its weights, and the losses on the way.
std::vector<at::Tensor> train(int steps) {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 16, 3).padding(1)), torch::nn::ReLU(),
                            torch::nn::MaxPool2d(2), torch::nn::Flatten(), torch::nn::Linear(16 * 16 * 16, 10));
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto x = torch::randn({32, 3, 32, 32});
  const auto y = torch::randint(10, {32});
  std::vector<at::Tensor> trace;
  for (int i = 0; i < steps; ++i) {
    sgd.zero_grad();
    auto loss = torch::nn::functional::cross_entropy(net->forward(x), y);
    loss.backward();
    sgd.step();
    trace.push_back(loss.detach());
  }
  for (const auto& parameter : net->parameters()) trace.push_back(parameter.detach().clone());
  return trace;
}

TEST(TorchPoolTest, TrainingKeepsEveryBit) {
  const auto plain = train(5);
  auto setting = use_host_pool();
  ASSERT_TRUE(setting.is_applied()) << setting.reason();
  const auto with_pool = train(5);
  EXPECT_GT(host_pool_stats().hits, 0U);
  setting.revert();
  ASSERT_EQ(plain.size(), with_pool.size());
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], with_pool[i])) << i;
}

TEST(TorchPoolTest, GoesInAndOutManyTimesWithTensorsAlive) {
  auto* const torchs = c10::GetCPUAllocator();
  std::vector<at::Tensor> alive;
  for (int i = 0; i < 50; ++i) {
    auto setting = use_host_pool(64 << 20);
    ASSERT_TRUE(setting.is_applied()) << setting.reason();
    const auto again = use_host_pool();
    EXPECT_FALSE(again.is_applied()) << "a second call has nothing to do";
    EXPECT_TRUE(again.is_in_effect());
    alive.push_back(at::full({1 << 16}, i, at::kFloat));
    EXPECT_TRUE(pooled(alive.back()));
    alive.push_back(at::full({4}, i, at::kFloat));
    setting.revert();
    EXPECT_EQ(c10::GetCPUAllocator(), torchs);
    alive.push_back(at::full({1 << 16}, i, at::kFloat));
  }
  for (size_t i = 0; i < alive.size(); ++i) EXPECT_TRUE(alive[i].eq(static_cast<float>(i / 3)).all().item<bool>());
  EXPECT_GT(host_pool_stats().live_bytes, 50U << 18);
  std::thread([&] { alive.clear(); }).join();
  EXPECT_EQ(host_pool_stats().live_bytes, 0U);
  EXPECT_LE(host_pool_stats().retained_bytes, 4 * HostPool::kHugePage) << "what is freed after revert() goes back";
}

TEST(TorchPoolTest, TensorsResizeAfterThePoolIsOut) {
  auto setting = use_host_pool();
  ASSERT_TRUE(setting.is_applied()) << setting.reason();
  auto large = at::ones({1 << 16});
  auto small = at::ones({4});
  setting.revert();
  large.resize_({1 << 18});
  small.resize_({1 << 18});
  EXPECT_TRUE(large.slice(0, 0, 1 << 16).eq(1).all().item<bool>());
  EXPECT_TRUE(small.slice(0, 0, 4).eq(1).all().item<bool>());
}

TEST(TorchPoolTest, KeepsTheAllocatorsContract) {
  auto setting = use_host_pool();
  ASSERT_TRUE(setting.is_applied()) << setting.reason();
  auto* allocator = c10::GetCPUAllocator();
  for (const size_t bytes : {size_t{0}, size_t{1}, kPooledBytes - 1, kPooledBytes, size_t{3} << 20}) {
    const auto data = allocator->allocate(bytes);
    EXPECT_EQ(data.get_deleter(), allocator->raw_deleter());
    EXPECT_EQ(data.get(), data.get_context());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data.get()) % 64, 0U);
    EXPECT_TRUE(allocator->is_simple_data_ptr(data));
    void* raw = allocator->raw_allocate(bytes);
    allocator->raw_deallocate(raw);
    if (bytes == 0) continue;
    std::memset(data.get(), 5, bytes);
    const auto copy = allocator->clone(data.get(), bytes);
    EXPECT_EQ(std::memcmp(copy.get(), data.get(), bytes), 0);
  }
  setting.revert();
}

TEST(TorchPoolTest, HeapAndPoolHoldNoFreeMemoryInTurn) {
  constexpr int64_t kFloats = 1 << 14;  // small enough for the heap, whose holes are kept
  constexpr uint64_t kBytes = uint64_t{1000} * kFloats * sizeof(float);
  const auto leave_holes = [] {
    std::vector<at::Tensor> tensors, between;
    for (int i = 0; i < 1000; ++i) {
      tensors.push_back(at::ones({kFloats}));
      between.push_back(at::ones({16}));
    }
    return between;
  };
  const auto before = memory::resident_bytes();
  const auto holes = leave_holes();
  auto setting = use_host_pool();
  ASSERT_TRUE(setting.is_applied()) << setting.reason();
  EXPECT_LT(memory::resident_bytes(), before + kBytes / 4) << "the heap's holes";
  const auto within = leave_holes();
  setting.revert();
  EXPECT_LE(host_pool_stats().retained_bytes, HostPool::kHugePage);
  EXPECT_LT(memory::resident_bytes(), before + kBytes / 4) << "the pool's free pages";
}

TEST(TorchPoolTest, MemoryOfOthersIsLeftToThem) {
  auto setting = use_host_pool();
  ASSERT_TRUE(setting.is_applied()) << setting.reason();
  std::vector<float> mine(1 << 16, 2);
  bool freed = false;
  {
    auto view = at::from_blob(mine.data(), {1 << 16}, [&freed](void*) { freed = true; });
    EXPECT_EQ(view.add(1).sum().item<float>(), 3 * (1 << 16));
  }
  EXPECT_TRUE(freed);
  setting.revert();
}

/// An allocator that is not torch's own.
struct Foreign final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return c10::GetDefaultCPUAllocator()->allocate(bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

TEST(TorchPoolTest, AnotherAllocatorIsLeftInPlace) {
  static Foreign foreign;
  c10::SetCPUAllocator(&foreign, 0);
  const auto setting = use_host_pool();
  EXPECT_FALSE(setting.is_applied());
  EXPECT_NE(setting.reason().find("another allocator"), std::string::npos) << setting.reason();
  EXPECT_EQ(c10::GetCPUAllocator(), &foreign);
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 0);
}

}  // namespace
}  // namespace oxytorch
