// Planted memory behaviour found to the sample, by few sizes.
#include "oxytorch/memory/batch_search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/memory/host_cap.h"
#include "oxytorch/system.h"

namespace oxytorch {
namespace {

using testing::HasSubstr;
using Peak = std::function<std::int64_t(std::int64_t)>;

constexpr std::uint64_t kLimit = 10'000;

/// Steps of `peak(size)` bytes, which run out above the limit; `seconds(size)` each.
BatchPlan found(
    const BatchSearchOptions& options, const Peak& peak,
    const std::function<double(std::int64_t)>& seconds = [](std::int64_t) { return 1.0; }) {
  BatchSearch search(options, kLimit, 100);
  while (const auto size = search.next()) {
    const auto bytes = static_cast<std::uint64_t>(peak(*size));
    if (bytes > kLimit) {
      search.ran_out("planted\nwith a second line");
    } else {
      search.ran(bytes, std::vector<double>{seconds(*size), 0.5 * seconds(*size), 2 * seconds(*size)});
    }
  }
  return search.plan(1000, 16);
}

TEST(BatchSearchTest, FindsTheLargestSizeThatFits) {
  const std::vector<Peak> behaviours{
      [](std::int64_t n) { return 100 + 7 * n; }, [](std::int64_t n) { return 100 + n * n / 10; },
      [](std::int64_t n) { return 100 + 500 * (n / 32); }, [](std::int64_t n) { return 100 + 40 * n; },
      [](std::int64_t n) { return n <= 700 ? 100 + n : 1'000'000; }};
  for (std::size_t i = 0; i < behaviours.size(); ++i) {
    SCOPED_TRACE(i);
    const auto plan = found({.resolution = 0}, behaviours[i]);
    std::int64_t truth = 0;
    for (std::int64_t n = 1; n < 20'000; ++n) truth = behaviours[i](n) <= 9'000 ? n : truth;
    EXPECT_EQ(plan.largest, truth);
    EXPECT_LE(plan.trials.size(), 25U);
    EXPECT_TRUE(std::is_sorted(plan.trials.begin(), plan.trials.end(),
                               [](const auto& a, const auto& b) { return a.size < b.size; }));
  }
  EXPECT_EQ(found({.start = 8, .multiple = 8, .resolution = 0}, behaviours[0]).largest, 8'900 / 7 / 8 * 8);
  EXPECT_EQ(found({.most = 1000, .resolution = 0}, [](std::int64_t) { return 100; }).largest, 1000);
  const auto close = found({.resolution = 0.05}, [](std::int64_t n) { return 100 + 3 * n; }).largest;
  EXPECT_GE(close, 0.95 * 2966);
  EXPECT_LE(close, 2966);
}

TEST(BatchSearchTest, TheCurveEndsWhereLargerBatchesDoNotPay) {
  const auto plan = found(
      {.curve = true}, [](std::int64_t n) { return 100 + n; },
      [](std::int64_t n) { return 0.010 + 0.001 * static_cast<double>(std::max<std::int64_t>(n, 32)); });
  EXPECT_LT(plan.largest, 4096);
  EXPECT_GE(plan.largest, 128);
  double most = 0, fastest = 0;
  for (const auto& trial : plan.trials) {
    most = std::max(most, trial.samples_per_second());
    if (trial.size == plan.fastest) fastest = trial.samples_per_second();
  }
  EXPECT_GE(fastest * 1.02, most);
}

TEST(BatchSearchTest, AFirstSizeThatDoesNotFitIsAnError) {
  for (const std::int64_t bytes : {9'500, 20'000}) {
    try {
      static_cast<void>(found({.start = 4}, [&](std::int64_t) { return bytes; }));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::OutOfMemory);
      EXPECT_THAT(error.what(), testing::ContainsRegex("a batch of 4 .*raise limit="));
      EXPECT_THAT(error.what(), testing::Not(HasSubstr("second line")));
    }
  }
  for (const BatchSearchOptions& options : std::vector<BatchSearchOptions>{{.headroom = 1},
                                                                           {.start = 3, .multiple = 2},
                                                                           {.start = 8, .most = 4},
                                                                           {.multiple = 0},
                                                                           {.resolution = -1}}) {
    EXPECT_THROW(BatchSearch(options, kLimit, 0), Error);
  }
}

TEST(BatchSearchTest, ABatchIsSplitExactlyAndTheTableSaysWhatConvergenceDoes) {
  BatchPlan plan;
  plan.largest = 32;
  plan.fastest = 64;
  plan.limit_bytes = 2000;
  plan.headroom = 0.1;
  plan.trials = {{.size = 64, .fits = true, .peak_bytes = 1000, .step_seconds = 0.5}};
  plan.samples = 1000;
  plan.current = 16;
  EXPECT_EQ(plan.split(128), std::pair(std::int64_t{32}, std::int64_t{4}));
  EXPECT_EQ(plan.split(100), std::pair(std::int64_t{25}, std::int64_t{4}));
  EXPECT_EQ(plan.split(37), std::pair(std::int64_t{1}, std::int64_t{37}));
  EXPECT_THROW(static_cast<void>(plan.split(0)), Error);
  for (const char* part :
       {"updates/epoch", "0.25 times as many updates", "nothing was changed here", "10% of it left"}) {
    EXPECT_THAT(plan.table(), HasSubstr(part));
  }
}

TEST(BatchSearchTest, WhatSaysThatThereWasNoMemoryIsKnown) {
  EXPECT_TRUE(says_out_of_memory("CUDA out of memory. Tried to allocate"));
  EXPECT_TRUE(says_out_of_memory("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"));
  EXPECT_TRUE(says_out_of_memory("std::bad_alloc"));
  EXPECT_FALSE(says_out_of_memory("a bug of the user's"));
  // As torch's, which limits of ours raise with a message of their own.
  struct OutOfMemoryError : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  EXPECT_TRUE(is_out_of_memory(OutOfMemoryError("a tensor of 8 MiB passes the memory limit of 313 MiB")));
  EXPECT_TRUE(is_out_of_memory(Error(ErrorCode::OutOfMemory, "no choice of blocks is within the budget")));
  EXPECT_TRUE(is_out_of_memory(std::bad_alloc()));
  EXPECT_FALSE(is_out_of_memory(Error(ErrorCode::InvalidArgument, "a budget of 0 bytes")));
}

TEST(HostCapTest, AllocationsBeyondItFailUntilItIsReverted) {
  const auto resident = read_memory().resident;
  if (!resident) GTEST_SKIP() << "the kernel does not tell what is in use";
  auto cap = cap_host_memory(*resident + (64U << 20));
  ASSERT_TRUE(cap.is_applied()) << cap.reason();
  EXPECT_THROW(std::vector<char>(std::size_t{512} << 20), std::bad_alloc);
  cap.revert();
  EXPECT_NO_THROW(std::vector<char>(std::size_t{512} << 20));
}

TEST(HostCapTest, TheMostOfAWhileIsResident) {
  const auto idle = most_resident([] {});
  if (!idle) GTEST_SKIP() << "the kernel does not begin the peak anew";
  const auto most = most_resident([] { std::vector<char>(std::size_t{256} << 20, 1); });
  EXPECT_GT(*most, *idle + (std::uint64_t{250} << 20));
  EXPECT_LT(*most, *idle + (std::uint64_t{300} << 20));
  EXPECT_LT(*most_resident([] {}), *idle + (std::uint64_t{40} << 20)) << "it begins anew";
  std::optional<std::uint64_t> inner;
  const auto outer = most_resident([&] {
    std::vector<char>(std::size_t{256} << 20, 1);
    inner = most_resident([] {});
  });
  EXPECT_LT(*inner, *idle + (std::uint64_t{40} << 20));
  EXPECT_GT(*outer, *idle + (std::uint64_t{250} << 20)) << "of all of it";
  EXPECT_THROW(static_cast<void>(most_resident([] { throw std::runtime_error("its own"); })), std::runtime_error);
}

}  // namespace
}  // namespace oxytorch
