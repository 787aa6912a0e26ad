#include "record_test_files.h"

namespace oxytorch::data {
namespace {

/// An index as Megatron-LM's IndexedDatasetBuilder writes it.
std::string megatron_index(const std::vector<std::int32_t>& lengths, const std::vector<std::int64_t>& borders,
                           std::uint8_t code, std::int64_t size) {
  auto bytes = std::string("MMIDIDX\0\0", 9) +
               packed(std::uint64_t{1}, code, std::uint64_t{lengths.size()}, std::uint64_t{borders.size()});
  for (const auto length : lengths) bytes += packed(length);
  std::int64_t pointer = 0;
  for (const auto length : lengths) {
    bytes += packed(pointer);
    pointer += length * size;
  }
  for (const auto border : borders) bytes += packed(border);
  return bytes;
}

// Three documents of sequences of 2 and 1, of none, and of 3 tokens.
const std::string kIndex = megatron_index({2, 1, 3}, {0, 2, 2, 3}, 8, 2);
const std::string kTokens = packed_as<std::uint16_t>(10, 11, 12, 13, 14, 65535);

TEST(MegatronTest, DocumentsAreSamples) {
  const TestFolder folder;
  const auto index = folder.write("text.idx", kIndex), bin = folder.write("text.bin", kTokens);
  for (const auto& location : {index, bin, folder.path("text")}) {
    const auto dataset = open(location);
    EXPECT_EQ(dataset->format(), "megatron");
    ASSERT_EQ(dataset->size(), 3);
    EXPECT_EQ(dataset->schema(), (Schema{{{"tokens", Kind::Array, DType::U16, {-1}}}}));
    EXPECT_EQ(elements_of<std::uint16_t>(dataset->read(0)[0]), (std::vector<std::uint16_t>{10, 11, 12}));
    EXPECT_EQ(dataset->read(1)[0].shape, (std::vector<std::int64_t>{0}));
    EXPECT_EQ(elements_of<std::uint16_t>(dataset->read(2)[0]), (std::vector<std::uint16_t>{13, 14, 65535}));
    EXPECT_EQ(dataset->place(2), bin + ", document 2");
    expect_error(ErrorCode::OutOfRange, "3 samples", [&] { (void)dataset->read(3); });
  }
  expect_threads_agree(*open(index));
}

TEST(MegatronTest, EveryDType) {
  const TestFolder folder;
  const std::vector<DType> dtypes = {DType::U8,  DType::I8,  DType::I16, DType::I32,
                                     DType::I64, DType::F64, DType::F32, DType::U16};
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    const auto size = size_of(dtypes[i]);
    const auto index = folder.write(
        "x.idx", megatron_index({2}, {0, 1}, static_cast<std::uint8_t>(i + 1), static_cast<std::int64_t>(size)));
    (void)folder.write("x.bin", std::string(2 * size, 'x'));
    const auto sample = open(index)->read(0);
    EXPECT_EQ(sample[0].dtype, dtypes[i]);
    EXPECT_EQ(sample[0].data.bytes.size(), 2 * size);
  }
}

TEST(MegatronTest, EmptySetsAndModes) {
  const TestFolder folder;
  (void)folder.write("none.bin", "");
  EXPECT_EQ(open(folder.write("none.idx", megatron_index({}, {0}, 4, 4)))->size(), 0);
  EXPECT_EQ(open(folder.write("none.idx", megatron_index({}, {}, 4, 4)))->size(), 0);
  (void)folder.write("modes.bin", kTokens);
  EXPECT_EQ(open(folder.write("modes.idx", kIndex + std::string("\0\1\0", 3)))->size(), 3);
}

TEST(MegatronTest, WhatIsRefused) {
  const TestFolder folder;
  const auto index = folder.path("x.idx");
  expect_error(ErrorCode::NotFound, "x.bin does not exist", [&] { (void)open(folder.write("x.idx", kIndex)); });
  (void)folder.write("x.bin", kTokens);
  const auto refuse = [&](ErrorCode code, const std::string& part, std::size_t at, const std::string& bytes) {
    auto changed = kIndex;
    changed.replace(at, bytes.size(), bytes);
    expect_error(code, part, [&] { contents_of(*open(folder.write("x.idx", changed))); });
  };
  refuse(ErrorCode::NotSupported, "version 2", 9, packed(std::uint64_t{2}));
  refuse(ErrorCode::NotSupported, "dtype code 0", 17, packed(std::uint8_t{0}));
  refuse(ErrorCode::NotSupported, "dtype code 9", 17, packed(std::uint8_t{9}));
  refuse(ErrorCode::Io, "its header says", 18, packed(~std::uint64_t{0}));
  refuse(ErrorCode::Io, "its header says", 26, packed(~std::uint64_t{0}));
  refuse(ErrorCode::Io, "its header says", 18, packed(std::uint64_t{2}));
  refuse(ErrorCode::Io, "sequence 0 of document 0 has -1 tokens", 34, packed(std::int32_t{-1}));
  refuse(ErrorCode::Io, "at offset -2", 34 + 12, packed(std::int64_t{-2}));
  refuse(ErrorCode::Io, "sequence 1 of document 0", 34 + 12 + 8, packed(std::int64_t{6}));
  refuse(ErrorCode::Io, "has sequences 3 to 2", 34 + 36, packed_as<std::int64_t>(0, 3, 2));
  refuse(ErrorCode::Io, "there are 3", 34 + 36 + 24, packed(std::int64_t{4}));
  refuse(ErrorCode::Io, "has 2147483647 tokens", 34 + 8, packed(std::int32_t{2147483647}));
  EXPECT_EQ(open(folder.write("x.idx", kIndex))->size(), 3);
  expect_error(ErrorCode::InvalidArgument, "is no dataset",
               [&] { (void)open(folder.write("x.idx", "another index")); });
}

TEST(MegatronTest, DamageIsFound) {
  const TestFolder folder;
  const auto index = folder.write("x.idx", kIndex), bin = folder.write("x.bin", kTokens);
  expect_truncations_safe(bin, kTokens, open);
  expect_truncations_safe(index, kIndex, open);
  expect_mutations_safe(index, kIndex, open, 4000);
  expect_mutations_safe(index, kIndex, [](const std::string& path) { return token_windows(open(path), 2); });
}

}  // namespace
}  // namespace oxytorch::data
