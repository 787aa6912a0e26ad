#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "oxytorch/data/loader.h"
#include "record_test_files.h"

namespace oxytorch::data {
namespace {

std::shared_ptr<const Dataset> numbers(const TestFolder& folder, const std::string& name,
                                       const std::vector<std::int32_t>& values) {
  std::string bytes;
  for (const auto value : values) bytes += packed(value);
  return open_raw(folder.write(name, bytes), DType::I32, {});
}

std::int32_t number(const Dataset& dataset, std::int64_t index) {
  return elements_of<std::int32_t>(dataset.read(index)[0])[0];
}

TEST(Concatenate, SamplesFollowOneAnother) {
  const TestFolder folder;
  const auto first = numbers(folder, "a", {1, 2, 3}), none = numbers(folder, "b", {}),
             last = numbers(folder, "c", {4, 5});
  const auto all = concatenate({first, none, last});
  EXPECT_EQ(all->size(), 5);
  EXPECT_EQ(all->part_sizes(), (std::vector<std::int64_t>{3, 0, 2}));
  EXPECT_EQ(first->part_sizes(), (std::vector<std::int64_t>{3}));
  for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(number(*all, i), i + 1);
  EXPECT_EQ(contents_of(*all).size(), 5U);
  EXPECT_EQ(all->place(4), last->place(1));
  EXPECT_EQ(all->format(), first->format());
  expect_error(ErrorCode::OutOfRange, "sample 5 of a dataset of 5", [&] { (void)all->read(5); });
  expect_error(ErrorCode::OutOfRange, "sample -1", [&] { (void)all->read(-1); });
  expect_threads_agree(*all);
}

TEST(Concatenate, ItsFingerprintIsThatOfItsParts) {
  const TestFolder folder;
  const auto a = numbers(folder, "a", {1}), b = numbers(folder, "b", {2});
  EXPECT_EQ(concatenate({a, b})->fingerprint(), concatenate({a, b})->fingerprint());
  EXPECT_NE(concatenate({a, b})->fingerprint(), concatenate({b, a})->fingerprint());
  EXPECT_NE(concatenate({a, b})->fingerprint(), concatenate({a})->fingerprint());
}

TEST(Concatenate, RefusesWhatCannotBeInOneBatch) {
  const TestFolder folder;
  const auto a = numbers(folder, "a", {1});
  const auto pairs = open_raw(folder.write("b", packed(1, 2)), DType::I32, {2});
  expect_error(ErrorCode::InvalidArgument, "no datasets", [] { (void)concatenate({}); });
  expect_error(ErrorCode::InvalidArgument, "dataset 1 of those that are to be one is empty",
               [&] { (void)concatenate({a, nullptr}); });
  expect_error(ErrorCode::InvalidArgument, "dataset 1 has the fields", [&] { (void)concatenate({a, pairs}); });
  expect_error(ErrorCode::InvalidArgument, "int32[2]", [&] { (void)concatenate({a, pairs}); });
}

TEST(Concatenate, AMixtureIsLoadedAndResumed) {
  const TestFolder folder;
  std::vector<std::int32_t> low, high;
  for (std::int32_t i = 0; i < 50; ++i) low.push_back(i);
  for (std::int32_t i = 1000; i < 1020; ++i) high.push_back(i);
  const auto both = concatenate({numbers(folder, "a", low), numbers(folder, "b", high)});
  const LoaderOptions options{.batch_size = 10, .sampler = mixed(both->part_sizes(), {0.8, 0.2}, 100), .threads = 3};
  const auto taken = [](Loader& loader, int batches) {
    std::vector<std::vector<std::int32_t>> found;
    while (static_cast<int>(found.size()) < batches) {
      const auto batch = loader.next();
      if (!batch) continue;  // the next epoch
      found.push_back(elements_of<std::int32_t>(batch->columns[0].array));
    }
    return found;
  };
  Loader loader(both, options);
  const auto head = taken(loader, 13);
  const auto state = loader.state();
  const auto tail = taken(loader, 20);
  for (const auto& batch : tail) {
    const auto of_high = std::count_if(batch.begin(), batch.end(), [](auto value) { return value >= 1000; });
    EXPECT_EQ(of_high, 2);  // 20 % of any ten, where the share divides them
  }
  Loader again(both, options);
  again.load_state(state);
  EXPECT_EQ(taken(again, 20), tail);
}

}  // namespace
}  // namespace oxytorch::data
