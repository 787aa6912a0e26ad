#include "record_test_files.h"

namespace oxytorch::data {
namespace {

std::string safetensors(const std::string& header, const std::string& data) {
  return packed(std::uint64_t{header.size()}) + header + data;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape, int begin, int end) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":[)" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

const std::string kPair = safetensors(R"({"__metadata__":{"format":"pt"},)" + entry("x", "I16", "[2,3]", 2, 14) + "," +
                                          entry("label", "U8", "[2]", 0, 2) + "}",
                                      "\x07\x08" + packed_as<std::int16_t>(1, 2, 3, 4, 5, -6));

TEST(SafetensorsTest, RowsAreSamples) {
  const TestFolder folder;
  const auto dataset = open(folder.write("x.safetensors", kPair));
  EXPECT_EQ(dataset->format(), "safetensors");
  ASSERT_EQ(dataset->size(), 2);
  EXPECT_EQ(dataset->schema(), (Schema{{{"label", Kind::Array, DType::U8, {}}, {"x", Kind::Array, DType::I16, {3}}}}));
  const auto sample = dataset->read(1);
  EXPECT_EQ(elements_of<std::uint8_t>(sample[0]), std::vector<std::uint8_t>{8});
  EXPECT_EQ(elements_of<std::int16_t>(sample[1]), (std::vector<std::int16_t>{4, 5, -6}));
  expect_threads_agree(*dataset);
}

TEST(SafetensorsTest, FoundByContentAtAnyAlignment) {
  const TestFolder folder;
  const auto header = "{" + entry("x", "F32", "[2]", 0, 8) + "}";
  for (std::size_t spaces = 0; spaces < 8; ++spaces) {
    const auto file = safetensors(header + std::string(spaces, ' '), packed(1.5F, -2.5F));
    const auto dataset = open(folder.write("model", file));
    ASSERT_EQ(dataset->size(), 2);
    EXPECT_EQ(elements_of<float>(dataset->read(1)[0]), std::vector<float>{-2.5F});
  }
}

TEST(SafetensorsTest, EveryDType) {
  const TestFolder folder;
  const std::vector<std::pair<std::string, DType>> dtypes = {
      {"F64", DType::F64}, {"F32", DType::F32}, {"F16", DType::F16},  {"BF16", DType::BF16}, {"I64", DType::I64},
      {"I32", DType::I32}, {"I16", DType::I16}, {"I8", DType::I8},    {"U64", DType::U64},   {"U32", DType::U32},
      {"U16", DType::U16}, {"U8", DType::U8},   {"BOOL", DType::Bool}};
  for (const auto& [word, dtype] : dtypes) {
    const auto size = size_of(dtype);
    const auto file =
        safetensors("{" + entry("x", word, "[1]", 0, static_cast<int>(size)) + "}", std::string(size, '\1'));
    EXPECT_EQ(open(folder.write("x.safetensors", file))->read(0)[0].dtype, dtype) << word;
  }
}

TEST(SafetensorsTest, WithoutTensorsOrRows) {
  const TestFolder folder;
  EXPECT_EQ(open(folder.write("x.safetensors", safetensors("{}", "")))->size(), 0);
  EXPECT_EQ(open(folder.write("x.safetensors", safetensors("{" + entry("x", "U8", "[0,4]", 0, 0) + "}", "")))->size(),
            0);
}

TEST(SafetensorsTest, WhatIsRefused) {
  const TestFolder folder;
  const auto refuse = [&](ErrorCode code, const std::string& part, const std::string& entries,
                          const std::string& data) {
    const auto path = folder.write("x.safetensors", safetensors("{" + entries + "}", data));
    expect_error(code, part, [&] { (void)open(path); });
  };
  refuse(ErrorCode::NotSupported, "dtype F8_E4M3", entry("x", "F8_E4M3", "[1]", 0, 1), "a");
  refuse(ErrorCode::InvalidArgument, "'a' and 'b' have 1 and 2 rows",
         entry("a", "U8", "[1]", 0, 1) + "," + entry("b", "U8", "[2]", 1, 3), "abc");
  refuse(ErrorCode::InvalidArgument, "'x' has no dimensions", entry("x", "U8", "[]", 0, 1), "a");
  refuse(ErrorCode::Io, "begins at data offset 1, and the one before it ends at 2",
         entry("a", "U8", "[2]", 0, 2) + "," + entry("b", "U8", "[2]", 1, 3), "abc");
  refuse(ErrorCode::Io, "begins at data offset 1", entry("a", "U8", "[2]", 1, 3), "abc");
  refuse(ErrorCode::Io, "have 2 bytes, and 3 follow", entry("a", "U8", "[2]", 0, 2), "abc");
  refuse(ErrorCode::Io, "truncated", entry("a", "U8", "[4]", 0, 4), "abc");
  refuse(ErrorCode::Io, "as many bytes", entry("a", "U16", "[2]", 0, 2), "ab");
  refuse(ErrorCode::Io, "as many bytes", entry("a", "U8", "[1]", 1, 0), "a");
  refuse(ErrorCode::Io, "as many bytes", entry("a", "F64", "[9223372036854775807,9223372036854775807]", 0, 1), "a");
  refuse(ErrorCode::Io, "as many bytes", entry("a", "U8", "[18446744073709551615]", 0, 1), "a");
  refuse(ErrorCode::Io, "shape of whole numbers", entry("a", "U8", "[-1]", 0, 1), "a");
  refuse(ErrorCode::Io, "shape of whole numbers", entry("a", "U8", "[1.0]", 0, 1), "a");
  refuse(ErrorCode::Io, "a dtype", R"("a":{})", "");
  refuse(ErrorCode::Io, "a dtype", R"("a":3)", "");
  refuse(ErrorCode::Io, "two data_offsets", R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0]})", "a");
  refuse(ErrorCode::Io, "no JSON object", "nonsense", "");
  const auto lying = folder.write("x.safetensors", packed(std::uint64_t{1} << 62) + "{}");
  expect_error(ErrorCode::Io, "says that its header has 4611686018427387904", [&] { (void)open(lying); });
  const auto empty = folder.write("x.safetensors", "");
  expect_error(ErrorCode::Io, "it has 0 bytes", [&] { (void)open(empty); });
}

TEST(SafetensorsTest, DamageIsFound) {
  const TestFolder folder;
  const auto path = folder.write("x.safetensors", kPair);
  expect_truncations_safe(path, kPair, open);
  expect_mutations_safe(path, kPair, open, 4000);
}

}  // namespace
}  // namespace oxytorch::data
