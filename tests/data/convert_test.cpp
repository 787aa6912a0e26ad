#include "oxytorch/data/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "oxytorch/data/dataset.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

namespace fs = std::filesystem;

/// Samples of every kind; reading one may be made to fail.
class Mixed final : public Dataset {
 public:
  explicit Mixed(std::int64_t size) : size_(size) {
    schema_.fields = {{"text", Kind::Text, DType::U8, {}},
                      {"label", Kind::Array, DType::I64, {}},
                      {"box", Kind::Array, DType::F32, {2, 3}},
                      {"some", Kind::Array, DType::I32, {-1}},
                      {"raw", Kind::Bytes, DType::U8, {}}};
  }
  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return size_; }
  [[nodiscard]] Sample read(std::int64_t index) const override {
    OXY_CHECK(index != fails_at, Io, "sample ", index, " is damaged.");
    const std::array<float, 6> box{static_cast<float>(index), 1, 2, 3, 4, 5};
    const std::vector<std::int32_t> some(static_cast<std::size_t>(index % 300), static_cast<std::int32_t>(index));
    return {own("text " + std::to_string(index)), own(DType::I64, {}, std::as_bytes(std::span(&index, 1))),
            own(DType::F32, {2, 3}, std::as_bytes(std::span(box))),
            own(DType::I32, {index % 300}, std::as_bytes(std::span(some))), own(std::string_view("\0\xFF", 2))};
  }
  [[nodiscard]] std::string place(std::int64_t) const override { return "mixed"; }
  [[nodiscard]] std::string fingerprint() const override { return "mixed" + std::to_string(size_); }
  [[nodiscard]] std::string format() const override { return "mixed"; }
  std::int64_t fails_at = -1;

 private:
  std::int64_t size_;
  Schema schema_;
};

class ConvertTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("convert" + std::to_string(::getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  [[nodiscard]] std::string at(const std::string& name) const { return (folder_ / name).string(); }
  static std::string content(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static std::map<std::string, std::string> contents(const std::string& folder) {
    std::map<std::string, std::string> found;
    for (const auto& entry : fs::directory_iterator(folder)) found[entry.path().filename()] = content(entry.path());
    return found;
  }
  static void expect_equal_samples(const Dataset& one, const Dataset& other) {
    ASSERT_EQ(one.size(), other.size());
    for (std::int64_t i = 0; i < one.size(); ++i) {
      const auto a = one.read(i), b = other.read(i);
      for (std::size_t field = 0; field < a.size(); ++field) {
        const auto place = other.schema().find(one.schema().fields[field].name);
        ASSERT_GE(place, 0) << one.schema().fields[field].name;
        const auto& there = b[static_cast<std::size_t>(place)];
        ASSERT_EQ(a[field].data.text(), there.data.text()) << i << " " << one.schema().fields[field].name;
        ASSERT_EQ(a[field].shape, there.shape) << i << " " << one.schema().fields[field].name;
        ASSERT_EQ(a[field].dtype, there.dtype);
      }
    }
  }
  fs::path folder_;
};

TEST_F(ConvertTest, MdsHoldsTheSamples) {
  for (const bool compress : {false, true}) {
    const auto folder = at(compress ? "zstd" : "raw");
    const Mixed source(700);
    std::int64_t told = 0;
    const auto made =
        convert(source, (compress ? "file://" : "") + folder,
                {.shard_bytes = 50'000, .compress = compress, .progress = [&](std::int64_t n) { told = n; }});
    EXPECT_EQ(made.format, "mds");
    EXPECT_EQ(made.samples, 700);
    EXPECT_EQ(told, 700);
    const auto index = nlohmann::json::parse(content(fs::path(folder) / "index.json"));
    EXPECT_GT(index["shards"].size(), 3U);
    EXPECT_FALSE(fs::exists(fs::path(folder) / "convert.json"));
    expect_equal_samples(source, *open(folder));
  }
}

TEST_F(ConvertTest, IsTheSameForAnyThreadsAndAfterAnInterruption) {
  Mixed source(700);
  convert(source, at("whole"), {.shard_bytes = 50'000, .threads = 1});
  const auto expected = contents(at("whole"));
  convert(source, at("threads"), {.shard_bytes = 50'000, .threads = 5});
  EXPECT_EQ(contents(at("threads")), expected);
  for (const std::int64_t at_sample : {1, 100, 399, 699}) {
    const auto folder = at("broken" + std::to_string(at_sample));
    source.fails_at = at_sample;
    EXPECT_THROW(convert(source, folder, {.shard_bytes = 50'000}), Error);
    EXPECT_FALSE(fs::exists(fs::path(folder) / "index.json")) << "the index comes last";
    source.fails_at = -1;
    const auto made = convert(source, folder, {.shard_bytes = 50'000});
    EXPECT_EQ(contents(folder), expected) << at_sample;
    EXPECT_EQ(made.resumed > 0, at_sample > 300) << at_sample;
  }
}

TEST_F(ConvertTest, GoesOnWithTheSameAlone) {
  Mixed source(700), other(701);
  source.fails_at = 600;
  EXPECT_THROW(convert(source, at("one"), {.shard_bytes = 50'000}), Error);
  const auto problem = [&](const Dataset& dataset, const ConvertOptions& options) -> std::string {
    try {
      convert(dataset, at("one"), options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(problem(other, {.shard_bytes = 50'000}), HasSubstr("another dataset or other options"));
  const auto progress = fs::path(at("one")) / "convert.json";
  const auto whole = nlohmann::json::parse(content(progress));
  for (const char* damage : {R"("much")", "1e300", "-1", "null", "[]"}) {
    for (const char* place : {"/shards", "/shards/0", "/shards/0/samples", "/shards/0/raw_data/bytes"}) {
      auto changed = whole;
      changed[nlohmann::json::json_pointer(place)] = nlohmann::json::parse(damage);
      if (changed["shards"] == nlohmann::json::array()) continue;  // none were written
      std::ofstream(progress) << changed;
      EXPECT_THAT(problem(source, {.shard_bytes = 50'000}), HasSubstr("is damaged")) << place << ": " << damage;
    }
  }
  std::ofstream(progress) << whole;
  source.fails_at = -1;
  EXPECT_THAT(problem(source, {.shard_bytes = 60'000}), HasSubstr("another dataset or other options"));
  EXPECT_EQ(problem(source, {.shard_bytes = 50'000}), "");
  EXPECT_THAT(problem(source, {.shard_bytes = 50'000}), HasSubstr("holds an MDS dataset already"));
}

TEST_F(ConvertTest, RefusesWhatCannotBeMeant) {
  const Mixed source(3), empty(0);
  EXPECT_THROW(convert(empty, at("a")), Error);
  EXPECT_THROW(convert(source, at("a"), {.format = "tar"}), Error);
  EXPECT_THROW(convert(source, at("a"), {.shard_bytes = 0}), Error);
  EXPECT_THROW(convert(source, at("a"), {.quality = 0}), Error);
  EXPECT_THROW(convert(source, at("a"), {.threads = -1}), Error);
  EXPECT_THROW(convert(source, at("a"), {.format = "megatron"}), Error);
}

TEST_F(ConvertTest, MegatronHoldsDocuments) {
  fs::create_directories(folder_);
  {
    MegatronWriter writer(at("tokens"), DType::U16);
    for (std::uint16_t length = 0; length < 40; length += 3) {
      const std::vector<std::uint16_t> document(length, length);
      writer.add(std::as_bytes(std::span(document)));
    }
    EXPECT_GT(writer.finish(), 0);
    EXPECT_THROW(writer.add({}), Error);
  }
  const auto found = open(at("tokens.idx"));
  ASSERT_EQ(found->size(), 14);
  for (std::int64_t i = 0; i < found->size(); ++i) EXPECT_THAT(found->read(i)[0].shape, ElementsAre(3 * i));
  EXPECT_THROW(MegatronWriter(at("tokens"), DType::U16), Error) << "it exists";
  EXPECT_THROW(MegatronWriter(at("other"), DType::BF16), Error);
  { const MegatronWriter left(at("left"), DType::I32); }
  EXPECT_FALSE(fs::exists(at("left.bin"))) << "without finish() nothing stays";
}

TEST(EncodeJpeg, IsDecodedAgain) {
  Pixels pixels{40, 24, 3, std::make_shared<std::uint8_t[]>(40 * 24 * 3)};
  for (int i = 0; i < 40 * 24 * 3; ++i)
    pixels.data[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(60 + i / 40);
  const auto encoded = encode_jpeg(pixels, 95);
  const auto decoded = decode_image(std::as_bytes(std::span(encoded)));
  ASSERT_EQ(decoded.bytes(), pixels.bytes());
  double off = 0;
  for (std::size_t i = 0; i < pixels.bytes(); ++i) off += std::abs(decoded.data[i] - pixels.data[i]);
  EXPECT_LT(off / static_cast<double>(pixels.bytes()), 3);
  EXPECT_THROW(encode_jpeg(pixels, 101), Error);
  EXPECT_THROW(encode_jpeg(Pixels{}, 90), Error);
}

}  // namespace
}  // namespace oxytorch::data
