#include "oxytorch/memory/meter.h"

#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/system.h"

namespace oxytorch::memory {
namespace {

using testing::HasSubstr;
namespace nn = torch::nn;

template <class Function>
ErrorCode refusal_of(const Function& function, const std::string& part) {
  try {
    function();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(part));
    return error.code();
  }
  ADD_FAILURE() << "nothing was refused";
  return ErrorCode::Internal;
}

TEST(MeterTest, ExactToTheByteOnAKnownSequence) {
  auto* const torchs = c10::GetCPUAllocator();
  {
    Meter meter;
    EXPECT_EQ(meter.live_bytes(), 0);
    auto a = at::empty({1000}, at::kFloat);  // 4,000
    auto b = at::empty({3}, at::kByte);      // 3
    EXPECT_EQ(meter.live_bytes(), 4003);
    a = at::Tensor();
    EXPECT_EQ(meter.live_bytes(), 3);
    const auto c = at::empty({100}, at::kDouble);  // 800
    const auto none = at::empty({0}, at::kFloat);
    const auto view = c.slice(0, 10, 20);
    EXPECT_EQ(meter.live_bytes(), 803);
    EXPECT_EQ(meter.peak_bytes(), 4003);
    EXPECT_EQ(meter.allocations(), 3);
    meter.reset_peak();
    EXPECT_EQ(meter.peak_bytes(), 803);
    b.resize_({5000});
    EXPECT_EQ(meter.live_bytes(), 5800);
    meter.stop();
    b = at::Tensor();
    EXPECT_EQ(meter.live_bytes(), 5800) << "figures stay once it is stopped";
  }
  EXPECT_EQ(c10::GetCPUAllocator(), torchs);
}

TEST(MeterTest, MetersNestAndSeeAllThreads) {
  Meter outer;
  auto a = at::empty({100}, at::kByte);
  {
    Meter inner;
    at::Tensor b;
    std::thread([&b] { b = at::empty({70}, at::kByte); }).join();
    EXPECT_EQ(inner.live_bytes(), 70);
    a = at::Tensor();
    EXPECT_EQ(inner.live_bytes(), -30) << "an older tensor went";
    EXPECT_EQ(inner.peak_bytes(), 70);
  }
  EXPECT_EQ(outer.live_bytes(), 0);
  EXPECT_EQ(outer.peak_bytes(), 170);
}

TEST(MeterTest, APauseTakesTheAllocatorOutOfPlaceForALoneMeter) {
  auto* const torchs = c10::GetCPUAllocator();
  Meter meter;
  auto before = at::empty({1000}, at::kByte);
  auto* const ours = c10::GetCPUAllocator();
  ASSERT_NE(ours, torchs);
  at::Tensor during;
  {
    const CountingPaused paused;
    EXPECT_EQ(c10::GetCPUAllocator(), torchs);
    during = at::empty({50}, at::kByte);
    EXPECT_EQ(meter.live_bytes(), 1000);
    before = at::Tensor();
    EXPECT_EQ(meter.live_bytes(), 0) << "what is counted goes";
    before = at::empty({10}, at::kByte);
  }
  EXPECT_EQ(c10::GetCPUAllocator(), ours);
  during = at::Tensor();
  const auto after = at::empty({7}, at::kByte);
  EXPECT_EQ(meter.live_bytes(), 7);
  EXPECT_EQ(meter.peak_bytes(), 1000);
  {
    const Meter other;
    const CountingPaused paused;
    const auto seen = at::empty({30}, at::kByte);
    EXPECT_EQ(other.live_bytes(), 30) << "another meter asks for it";
  }
  meter.stop();
  auto limit = set_limit(resident_bytes() + (256 << 20));
  {
    const CountingPaused paused;
    EXPECT_THROW(at::empty({512 << 20}, at::kByte), c10::OutOfMemoryError) << "a limit holds";
  }
  limit.revert();
}

TEST(MeterTest, CountsTensorsOfThePoolToo) {
  auto pool = use_host_pool(64 << 20);
  ASSERT_TRUE(pool.is_applied()) << pool.reason();
  {
    Meter meter;
    const auto pooled = at::empty({1 << 16}, at::kByte);
    const auto small = at::empty({100}, at::kByte);
    EXPECT_EQ(meter.live_bytes(), (1 << 16) + 100);
    pool.revert();
    const auto after = at::empty({1 << 16}, at::kByte);
    EXPECT_EQ(meter.live_bytes(), (2 << 16) + 100);
  }
  auto again = use_host_pool(64 << 20);
  EXPECT_TRUE(again.is_applied()) << again.reason();
  again.revert();
}

TEST(MeterTest, TensorsThatOutliveItAreNoTrouble) {
  std::vector<at::Tensor> alive;
  for (int i = 0; i < 50; ++i) {
    Meter meter;
    alive.push_back(at::full({1 << 14}, i, at::kFloat));
    if (i % 3 == 0) alive.erase(alive.begin());
    EXPECT_LE(meter.live_bytes(), 1 << 16);
  }
  alive.clear();
  Meter meter;
  EXPECT_EQ(meter.live_bytes(), 0);
}

TEST(MeterTest, PhasesHaveTheirPeaks) {
  Meter meter;
  at::Tensor kept;
  {
    const Phase forward(meter, "forward");
    kept = at::empty({1000}, at::kByte);
    at::empty({500}, at::kByte);
  }
  {
    const Phase backward(meter, "backward");
    kept = at::Tensor();
    const Phase inner(meter, "inner");
    at::empty({200}, at::kByte);
  }
  const auto phases = meter.phases();
  ASSERT_EQ(phases.size(), 3U);
  EXPECT_EQ(phases[0].name, "forward");
  EXPECT_EQ(phases[0].begin_bytes, 0);
  EXPECT_EQ(phases[0].peak_bytes, 1500);
  EXPECT_EQ(phases[0].end_bytes, 1000);
  EXPECT_EQ(phases[1].name, "inner");
  EXPECT_EQ(phases[1].peak_bytes, 200);
  EXPECT_EQ(phases[2].peak_bytes, 1000);
  EXPECT_EQ(phases[2].end_bytes, 0);
  EXPECT_THAT(meter.table(), HasSubstr("backward"));
}

TEST(MeterTest, ATimelineSaysWhichRegionMadeThePeak) {
  nn::Linear first(64, 64), second(64, 64);
  const auto input = at::ones({32, 64});
  Meter meter({.timeline = true});
  {
    const Phase phase(meter, "step");
    at::Tensor hidden, out;
    {
      const Region region("first");
      hidden = first->forward(input).relu();
    }
    {
      const Region region("second");
      out = second->forward(hidden);
    }
    out.sum().backward();
  }
  const auto timeline = meter.timeline();
  std::int64_t live = 0, peak = 0;
  for (const auto& event : timeline.events) {
    live += event.bytes;
    peak = std::max(peak, live);
    EXPECT_EQ(event.live_bytes, live);
  }
  EXPECT_EQ(live, meter.live_bytes());
  EXPECT_EQ(peak, meter.peak_bytes());
  const auto left = meter.live_parts();
  const auto in = [&](const std::string& region) {
    std::int64_t bytes = 0;
    for (const auto& part : left) bytes += part.region == region ? part.bytes : 0;
    return bytes;
  };
  // Gradients of weight and bias, made by backward nodes of each region.
  EXPECT_EQ(in("first"), (64 * 64 + 64) * 4);
  EXPECT_EQ(in("second"), (64 * 64 + 64) * 4);
  std::int64_t at_peak = 0;
  for (const auto& part : meter.peak_parts()) {
    at_peak += part.bytes;
    EXPECT_EQ(part.phase, "step");
  }
  EXPECT_EQ(at_peak, meter.peak_bytes());
  EXPECT_THAT(meter.table(), HasSubstr("second"));
}

TEST(MeterTest, WhatItCannotDoIsRefused) {
  Meter plain;
  EXPECT_EQ(refusal_of([&] { (void)plain.timeline(); }, "records no timeline"), ErrorCode::InvalidState);
  Meter recording({.timeline = true});
  EXPECT_EQ(refusal_of([] { Meter second({.timeline = true}); }, "another meter records"), ErrorCode::InvalidState);
  EXPECT_EQ(refusal_of([] { Meter sites({.sites = true}); }, "part of a timeline"), ErrorCode::InvalidArgument);
  plain.stop();
  EXPECT_EQ(refusal_of([&] { plain.reset_peak(); }, "is stopped"), ErrorCode::InvalidState);
  EXPECT_EQ(refusal_of([&] { Phase phase(plain, "late"); }, "is stopped"), ErrorCode::InvalidState);
  recording.stop();
  Meter now({.timeline = true});
}

TEST(MeterTest, LeaksAreWhatEveryStepLeaves) {
  std::vector<at::Tensor> kept;
  at::Tensor replaced;
  const auto step = [&](std::int64_t left) {
    const Region region("part");
    replaced = torch::zeros({1000});
    if (left > 0) kept.push_back(torch::zeros({left}));
  };
  EXPECT_TRUE(leaks([&] { step(0); }).empty());
  const auto found = leaks([&] { step(500); }, 4);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found.front().region, "part");
  EXPECT_EQ(found.front().bytes, 2000);
  EXPECT_EQ(found.front().blocks, 1);
  EXPECT_THROW((void)leaks([] {}, 2), Error);
}

TEST(LimitTest, ATensorThatPassesItRaisesAndTakesNothing) {
  auto setting = set_limit(resident_bytes() + (std::uint64_t{256} << 20));
  ASSERT_TRUE(setting.is_applied()) << setting.reason();
  EXPECT_TRUE(limit());
  Meter meter;
  std::vector<at::Tensor> held;
  bool raised = false;
  try {
    for (int i = 0; i < 64; ++i) held.push_back(at::ones({8 << 20}, at::kByte));
  } catch (const c10::OutOfMemoryError& error) {
    raised = true;
    EXPECT_THAT(error.what(), HasSubstr("passes the memory limit"));
  }
  EXPECT_TRUE(raised);
  EXPECT_GT(held.size(), 20U);
  EXPECT_LT(held.size(), 36U);
  EXPECT_EQ(meter.live_bytes(), static_cast<std::int64_t>(held.size()) << 23);
  held.clear();
  EXPECT_NO_THROW(at::ones({200 << 20}, at::kByte)) << "what was freed can be had again";
  setting.revert();
  EXPECT_FALSE(limit());
  EXPECT_NO_THROW(at::empty({512 << 20}, at::kByte));
}

TEST(LimitTest, OutOfMemoryInBackwardLeavesNothingBehind) {
  nn::Sequential net(nn::Linear(256, 256), nn::ReLU(), nn::Linear(256, 256), nn::ReLU(), nn::Linear(256, 256));
  const auto input = at::ones({4096, 256});
  net->forward(input).sum().backward();
  Meter meter;
  int raised = 0;
  for (int megabytes = 1; megabytes < 60; megabytes += 3) {
    const auto before = meter.live_bytes();
    give_back_host_memory();
    auto setting = set_limit(resident_bytes() + (static_cast<std::uint64_t>(megabytes) << 20));
    try {
      net->forward(input).sum().backward();
    } catch (const c10::OutOfMemoryError&) {
      ++raised;
    }
    setting.revert();
    EXPECT_EQ(meter.live_bytes(), before) << megabytes;
  }
  EXPECT_GT(raised, 3);
}

TEST(LimitTest, WhatCannotBeIsRefused) {
  EXPECT_EQ(refusal_of([] { (void)set_limit(0); }, "is below what this process has"), ErrorCode::InvalidArgument);
}

TEST(LimitTest, OfSeveralTheLowestHolds) {
  constexpr std::uint64_t kTerabyte = std::uint64_t{1} << 40;
  auto first = set_limit(2 * kTerabyte), second = set_limit(kTerabyte), third = set_limit(3 * kTerabyte);
  EXPECT_EQ(limit(), kTerabyte);
  second.revert();
  EXPECT_EQ(limit(), 2 * kTerabyte);
  first.revert();
  EXPECT_EQ(limit(), 3 * kTerabyte);
  third.revert();
  EXPECT_FALSE(limit());
}

}  // namespace
}  // namespace oxytorch::memory
