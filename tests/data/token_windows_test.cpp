#include <limits>
#include <numeric>

#include "oxytorch/isa.h"
#include "record_test_files.h"

namespace oxytorch::data {
namespace {

/// Samples of a field, and of its length where `lengths` are given; as readers of other formats are.
class Samples final : public Dataset {
 public:
  Samples(std::vector<Value> values, Field field) : values_(std::move(values)), schema_{{std::move(field)}} {}
  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return static_cast<std::int64_t>(values_.size()); }
  [[nodiscard]] Sample read(std::int64_t index) const override { return {values_[static_cast<std::size_t>(index)]}; }
  [[nodiscard]] std::string place(std::int64_t index) const override { return "sample " + std::to_string(index); }
  [[nodiscard]] std::string fingerprint() const override { return "0123456789abcdef"; }
  [[nodiscard]] std::string format() const override { return "test"; }

 private:
  std::vector<Value> values_;
  Schema schema_;
};

template <class T>
Value row(DType dtype, const std::vector<T>& tokens) {
  return own(dtype, {static_cast<std::int64_t>(tokens.size())}, std::as_bytes(std::span(tokens)));
}

std::vector<std::int64_t> window(const Dataset& windows, std::int64_t index) {
  return elements_of<std::int64_t>(windows.read(index)[0]);
}

using Tokens = std::vector<std::int64_t>;

TEST(TokenWindowsTest, WindowsOverlapByOne) {
  const TestFolder folder;
  const auto raw =
      open_raw(folder.write("x.bin", packed_as<std::uint16_t>(0, 1, 2, 3, 4, 5, 65535, 7)), DType::U16, {});
  const auto windows = token_windows(raw, 3);
  EXPECT_EQ(windows->schema(), (Schema{{{"tokens", Kind::Array, DType::I64, {4}}}}));
  ASSERT_EQ(windows->size(), 2);
  EXPECT_EQ(window(*windows, 0), (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(window(*windows, 1), (Tokens{3, 4, 5, 65535}));
  EXPECT_EQ(windows->place(1), folder.path("x.bin") + ", offset 6 (tokens 3 to 6)");
  EXPECT_NE(windows->fingerprint(), raw->fingerprint());
  EXPECT_NE(windows->fingerprint(), token_windows(raw, 2)->fingerprint());
  EXPECT_EQ(windows->fingerprint().size(), 16U);
  expect_error(ErrorCode::OutOfRange, "2 windows", [&] { (void)windows->read(2); });
  expect_threads_agree(*windows);
}

TEST(TokenWindowsTest, TheLastWindowNeedsAllItsTokens) {
  const TestFolder folder;
  for (int tokens = 0; tokens < 12; ++tokens) {
    const auto raw = open_raw(folder.write("x.bin", std::string(static_cast<std::size_t>(tokens), 'a')), DType::U8, {});
    for (std::int64_t length = 1; length < 13; ++length) {
      const auto windows = token_windows(raw, length);
      std::int64_t expected = 0;
      while ((expected + 1) * length + 1 <= tokens) ++expected;
      ASSERT_EQ(windows->size(), expected) << tokens << " " << length;
      if (expected == 0) continue;
      EXPECT_EQ(window(*windows, expected - 1), Tokens(static_cast<std::size_t>(length) + 1, 'a'));
    }
  }
}

template <class T>
void expect_widened(DType dtype) {
  const TestFolder folder;
  std::string bytes;
  Tokens expected;
  for (int i = 0; i < 2053; ++i) {
    const auto token = static_cast<T>(i % 3 == 0   ? std::numeric_limits<T>::min() + static_cast<T>(i % 100)
                                      : i % 3 == 1 ? std::numeric_limits<T>::max() / 2 - static_cast<T>(i % 100)
                                                   : static_cast<T>(i));
    bytes += packed(token);
    expected.push_back(static_cast<std::int64_t>(token));
  }
  const auto raw = open_raw(folder.write("x.bin", bytes), dtype, {});
  for (const auto isa : supported_isas()) {
    const ScopedIsa scope(isa);
    for (const std::int64_t length : {2052, 1000, 33, 1}) {  // odd offsets, vectors and what is left of them
      const auto windows = token_windows(raw, length);
      for (std::int64_t k = 0; k < windows->size(); ++k) {
        const auto first = expected.begin() + k * length;
        ASSERT_EQ(window(*windows, k), Tokens(first, first + length + 1)) << name(dtype) << " " << name(isa);
      }
    }
  }
}

TEST(TokenWindowsTest, EveryIntegerAndInstructionSet) {
  expect_widened<std::uint8_t>(DType::U8);
  expect_widened<std::int8_t>(DType::I8);
  expect_widened<std::uint16_t>(DType::U16);
  expect_widened<std::int16_t>(DType::I16);
  expect_widened<std::uint32_t>(DType::U32);
  expect_widened<std::int32_t>(DType::I32);
  expect_widened<std::uint64_t>(DType::U64);
  expect_widened<std::int64_t>(DType::I64);
}

TEST(TokenWindowsTest, TokensThatInt64DoesNotHold) {
  const TestFolder folder;
  const auto path = folder.write("x.bin", packed_as<std::uint64_t>(1, 2, std::uint64_t{1} << 63, 4));
  const auto windows = token_windows(open_raw(path, DType::U64, {}), 1);
  EXPECT_EQ(window(*windows, 0), (Tokens{1, 2}));
  expect_error(ErrorCode::Io, "2^63", [&] { (void)windows->read(1); });
}

TEST(TokenWindowsTest, AcrossRowsAndFiles) {
  const TestFolder folder;
  (void)folder.write("x-0.bin", "abcd");
  (void)folder.write("x-1.bin", "");
  (void)folder.write("x-2.bin", "efghij");
  const auto windows = token_windows(open_raw(folder.path("x-{0..2}.bin"), DType::U8, {2}), 3);
  ASSERT_EQ(windows->size(), 3);
  EXPECT_EQ(window(*windows, 0), (Tokens{'a', 'b', 'c', 'd'}));
  EXPECT_EQ(window(*windows, 1), (Tokens{'d', 'e', 'f', 'g'}));
  EXPECT_EQ(window(*windows, 2), (Tokens{'g', 'h', 'i', 'j'}));
  EXPECT_EQ(windows->place(1).substr(0, folder.path().size() + 19), folder.path("x-0.bin, offset 3 "));
  contents_of(*windows);
}

/// Megatron's files with sequences in the order that is given.
std::string write_megatron(const TestFolder& folder, const std::vector<std::int64_t>& pointers,
                           const std::vector<std::int32_t>& lengths) {
  auto bytes = std::string("MMIDIDX\0\0", 9) + packed(std::uint64_t{1}, std::uint8_t{1}, std::uint64_t{lengths.size()},
                                                      std::uint64_t{lengths.size() + 1});
  for (const auto length : lengths) bytes += packed(length);
  for (const auto pointer : pointers) bytes += packed(pointer);
  for (std::size_t i = 0; i <= lengths.size(); ++i) bytes += packed(static_cast<std::int64_t>(i));
  (void)folder.write("x.bin", "abcdefg");
  return folder.write("x.idx", bytes);
}

TEST(TokenWindowsTest, MegatronInAnyOrder) {
  const TestFolder folder;
  const auto ordered = token_windows(open(write_megatron(folder, {0, 3, 3}, {3, 0, 4})), 2);
  ASSERT_EQ(ordered->size(), 3);
  EXPECT_EQ(window(*ordered, 1), (Tokens{'c', 'd', 'e'}));
  EXPECT_EQ(ordered->place(1), folder.path("x.bin, offset 2 (tokens 2 to 4)"));
  const auto turned = token_windows(open(write_megatron(folder, {4, 0, 0}, {3, 0, 4})), 2);
  ASSERT_EQ(turned->size(), 3);
  EXPECT_EQ(window(*turned, 0), (Tokens{'e', 'f', 'g'}));
  EXPECT_EQ(window(*turned, 1), (Tokens{'g', 'a', 'b'}));
  EXPECT_EQ(turned->place(1), folder.path("x.bin, document 0 (tokens 2 to 4)"));
  contents_of(*turned);
}

TEST(TokenWindowsTest, AnyDatasetOfIntegers) {
  const std::vector<std::vector<std::int32_t>> documents = {{}, {1, 2, 3}, {}, {4}, {5, 6, 7, 8, -9}, {}};
  std::vector<Value> values;
  for (const auto& document : documents) values.push_back(row(DType::I32, document));
  const auto windows =
      token_windows(std::make_shared<Samples>(values, Field{"input_ids", Kind::Array, DType::I32, {-1}}), 2);
  ASSERT_EQ(windows->size(), 4);
  EXPECT_EQ(window(*windows, 1), (Tokens{3, 4, 5}));
  EXPECT_EQ(window(*windows, 3), (Tokens{7, 8, -9}));
  EXPECT_EQ(windows->place(1), "sample 1 (tokens 2 to 4)");
  expect_threads_agree(*windows);

  std::vector<Value> fixed;
  for (std::int16_t i = 0; i < 4; ++i)
    fixed.push_back(row<std::int16_t>(DType::I16, {i, static_cast<std::int16_t>(-i)}));
  const auto pairs = token_windows(std::make_shared<Samples>(fixed, Field{"x", Kind::Array, DType::I16, {2}}), 4);
  ASSERT_EQ(pairs->size(), 1);
  EXPECT_TRUE(pairs->reads_into());
  expect_error(ErrorCode::NotSupported, "read by themselves",
               [&] { Samples(fixed, Field{"x", Kind::Array, DType::I16, {2}}).read_into(0, {}); });
  EXPECT_EQ(window(*pairs, 0), (Tokens{0, 0, 1, -1, 2}));
}

TEST(TokenWindowsTest, WhatIsRefused) {
  const TestFolder folder;
  const auto path = folder.write("x.bin", "abcdefgh");
  const auto bytes = open_raw(path, DType::U8, {});
  const auto refuse = [](const std::string& part, const std::shared_ptr<const Dataset>& dataset, std::int64_t length) {
    expect_error(ErrorCode::InvalidArgument, part, [&] { (void)token_windows(dataset, length); });
  };
  refuse("no dataset", nullptr, 2);
  refuse("length of token windows is 0", bytes, 0);
  refuse("length of token windows is", bytes, std::numeric_limits<std::int64_t>::max());
  refuse("no row of integers", open_raw(path, DType::F32, {}), 1);
  refuse("no row of integers", open_raw(path, DType::Bool, {}), 1);
  refuse("2 dimensions", open_raw(path, DType::U8, {2, 2}), 1);
  refuse("no row of integers",
         std::make_shared<Samples>(std::vector<Value>{}, Field{"text", Kind::Text, DType::U8, {}}), 1);
  const auto lying = std::make_shared<Samples>(std::vector<Value>{row<std::int16_t>(DType::I16, {1})},
                                               Field{"tokens", Kind::Array, DType::I32, {-1}});
  expect_error(ErrorCode::Io, "is int16", [&] { (void)token_windows(lying, 1); });
}

}  // namespace
}  // namespace oxytorch::data
