#include "oxytorch/data/value.h"

#include <gtest/gtest.h>

namespace oxytorch::data {
namespace {

TEST(ValueTest, SizesAndNames) {
  const std::vector<std::tuple<DType, std::size_t, const char*>> all = {
      {DType::U8, 1, "uint8"},    {DType::I8, 1, "int8"},       {DType::U16, 2, "uint16"},  {DType::I16, 2, "int16"},
      {DType::U32, 4, "uint32"},  {DType::I32, 4, "int32"},     {DType::U64, 8, "uint64"},  {DType::I64, 8, "int64"},
      {DType::F16, 2, "float16"}, {DType::BF16, 2, "bfloat16"}, {DType::F32, 4, "float32"}, {DType::F64, 8, "float64"},
      {DType::Bool, 1, "bool"}};
  for (const auto& [dtype, size, word] : all) {
    EXPECT_EQ(size_of(dtype), size) << word;
    EXPECT_STREQ(name(dtype), word);
  }
}

TEST(ValueTest, OwnCopies) {
  std::vector<std::int16_t> numbers = {1, 2, 3, 4, 5, 6};
  const auto value = own(DType::I16, {2, 3}, std::as_bytes(std::span(numbers)));
  numbers.assign(6, 0);
  EXPECT_EQ(value.elements(), 6);
  ASSERT_EQ(value.data.bytes.size(), 12U);
  EXPECT_EQ(value.data.bytes[2], std::byte{2});
  EXPECT_TRUE(value.data.owner);
  EXPECT_EQ((Value{DType::U8, {}, {}}.elements()), 1);
  EXPECT_EQ((Value{DType::U8, {3, 0}, {}}.elements()), 0);
}

TEST(ValueTest, OwnText) {
  const auto value = own(std::string("na\xc3\xafve"));
  EXPECT_EQ(value.dtype, DType::U8);
  EXPECT_EQ(value.shape, (std::vector<std::int64_t>{6}));
  EXPECT_EQ(value.data.text(), "na\xc3\xafve");
  EXPECT_EQ(own("").data.text(), "");
}

TEST(ValueTest, FindsFields) {
  const Schema schema{{{"a", Kind::Text, DType::U8, {}}, {"b", Kind::Array, DType::F32, {-1}}}};
  EXPECT_EQ(schema.find("a"), 0);
  EXPECT_EQ(schema.find("b"), 1);
  EXPECT_EQ(schema.find("c"), -1);
  EXPECT_EQ(Schema{}.find("a"), -1);
}

}  // namespace
}  // namespace oxytorch::data
