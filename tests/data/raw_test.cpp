#include <limits>

#include "record_test_files.h"

namespace oxytorch::data {
namespace {

TEST(RawTest, SamplesFollowOneAnother) {
  const TestFolder folder;
  const auto path = folder.write("x.bin", packed_as<std::uint16_t>(1, 2, 3, 4, 5, 6));
  const auto dataset = open_raw(path, DType::U16, {3});
  EXPECT_EQ(dataset->format(), "raw");
  ASSERT_EQ(dataset->size(), 2);
  EXPECT_EQ(dataset->schema(), (Schema{{{"array", Kind::Array, DType::U16, {3}}}}));
  EXPECT_EQ(elements_of<std::uint16_t>(dataset->read(1)[0]), (std::vector<std::uint16_t>{4, 5, 6}));
  EXPECT_EQ(dataset->place(1), path + ", offset 6");
  EXPECT_EQ(open_raw(path, DType::U16, {})->size(), 6);
  EXPECT_EQ(open_raw(folder.write("empty.bin", ""), DType::F32, {2, 2})->size(), 0);
  expect_threads_agree(*dataset);
}

TEST(RawTest, ARangeOfFiles) {
  const TestFolder folder;
  (void)folder.write("x-0.bin", "ab");
  (void)folder.write("x-1.bin", "");
  (void)folder.write("x-2.bin", "c");
  const auto dataset = open_raw(folder.path("x-{0..2}.bin"), DType::U8, {});
  ASSERT_EQ(dataset->size(), 3);
  EXPECT_EQ(dataset->read(2)[0].data.text(), "c");
}

TEST(RawTest, WhatIsRefused) {
  const TestFolder folder;
  const auto path = folder.write("x.bin", "abcde");
  expect_error(ErrorCode::InvalidArgument, "no multiple", [&] { (void)open_raw(path, DType::U16, {}); });
  expect_error(ErrorCode::InvalidArgument, "positive", [&] { (void)open_raw(path, DType::U8, {0}); });
  expect_error(ErrorCode::InvalidArgument, "positive", [&] { (void)open_raw(path, DType::U8, {-1}); });
  const auto huge = std::numeric_limits<std::int64_t>::max();
  expect_error(ErrorCode::InvalidArgument, "2^64", [&] { (void)open_raw(path, DType::F64, {huge, huge}); });
  expect_error(ErrorCode::NotFound, "nothing.bin", [&] { (void)open_raw(folder.path("nothing.bin"), DType::U8, {}); });
}

}  // namespace
}  // namespace oxytorch::data
