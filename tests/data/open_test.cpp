#include "record_test_files.h"

namespace oxytorch::data {
namespace {

TEST(OpenTest, WhatIsMissing) {
  const TestFolder folder;
  expect_error(ErrorCode::InvalidArgument, "is empty", [] { (void)open(""); });
  expect_error(ErrorCode::NotFound, "nothing does not exist", [&] { (void)open(folder.path("nothing")); });
  expect_error(ErrorCode::NotFound, "x-0.npy does not exist", [&] { (void)open(folder.path("x-{0..2}.npy")); });
  (void)folder.write("x-0.npy", std::string("\x93NUMPY\x01\0", 8) + packed(std::uint16_t{57}) +
                                    "{'descr': '|u1', 'fortran_order': False, 'shape': (1,)}  a");
  EXPECT_EQ(open(folder.path("x-{0..0}.npy"))->size(), 1);
  expect_error(ErrorCode::NotFound, "x-1.npy does not exist", [&] { (void)open(folder.path("x-{0..2}.npy")); });
  (void)folder.write("y.idx", "no index");
  expect_error(ErrorCode::NotFound, "y does not exist", [&] { (void)open(folder.path("y")); });
}

TEST(OpenTest, WhatIsNoDataset) {
  const TestFolder folder;
  const auto refuse = [](const std::string& location) {
    expect_error(ErrorCode::InvalidArgument, location + " is no dataset that is known", [&] { (void)open(location); });
  };
  std::filesystem::create_directories(folder.path("none"));
  refuse(folder.path("none"));
  refuse(folder.write("empty", ""));
  refuse(folder.write("one", "x"));
  refuse(folder.write("text", "Some text\nof two lines.\n"));
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::string noise;
    for (unsigned i = 0, length = random() % 200; i < length; ++i) noise += static_cast<char>(random());
    const auto path = folder.write("noise", noise);
    try {
      (void)open(path);
    } catch (const Error& error) {
      ASSERT_NE(error.code(), ErrorCode::Internal) << error.what();
    }
  }
}

TEST(OpenTest, FormatsAreFoundByContent) {
  const TestFolder folder;
  const auto format = [&](const std::string& content) { return open(folder.write("x", content))->format(); };
  EXPECT_EQ(format(std::string("\x93NUMPY\x01\0", 8) + packed(std::uint16_t{57}) +
                   "{'descr': '|u1', 'fortran_order': False, 'shape': (1,)}  a"),
            "npy");
  const std::string header = R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  EXPECT_EQ(format(packed(std::uint64_t{header.size()}) + header + "a"), "safetensors");
  EXPECT_EQ(format("{\"a\": 1}\n"), "jsonl");
  // A record of no bytes, with its checksums.
  EXPECT_EQ(format(std::string("\0\0\0\0\0\0\0\0\x29\x03\x98\x07\xd8\xea\x82\xa2", 16)), "tfrecord");
}

}  // namespace
}  // namespace oxytorch::data
