#include <gtest/gtest.h>
#include <zstd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "data/formats.h"
#include "shard_files.h"

namespace oxytorch::data {
namespace {

using namespace shard_files;

std::string mds_zstd(const std::string& content) {
  std::string packed(ZSTD_compressBound(content.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), content.data(), content.size(), 3));
  return packed;
}

struct MdsShardText {
  std::string columns = R"("column_names":["n","s"],"column_encodings":["int32","str"],"column_sizes":[4,null])";
  std::string compression = "null";
  std::string zip = "null";
  std::size_t samples = 0, bytes = 0;
  std::string name = "shard.00000.mds";

  [[nodiscard]] std::string json() const {
    return R"({"version":2,"format":"mds","hashes":[],"size_limit":null,"compression":)" + compression + "," + columns +
           R"(,"samples":)" + std::to_string(samples) + R"(,"raw_data":{"basename":")" + name + R"(","bytes":)" +
           std::to_string(bytes) + R"(,"hashes":{}},"zip_data":)" + zip + "}";
  }
};

std::string mds_index(const std::vector<MdsShardText>& shards) {
  std::string text;
  for (const auto& shard : shards) text += (text.empty() ? "" : ",") + shard.json();
  return R"({"version":2,"shards":[)" + text + "]}";
}

std::string number_and_text(std::int32_t number, const std::string& text) {
  return raw(static_cast<std::uint32_t>(text.size())) + raw(number) + text;
}

/// A shard of `count` samples, and what the index says of it.
MdsShardText write_mds_shard(const TestFolder& folder, int first, int count, const std::string& name) {
  std::vector<std::string> items;
  for (int i = first; i < first + count; ++i) items.push_back(number_and_text(i, "text " + std::to_string(i)));
  const auto content = counted_shard(items);
  folder.write(name, content);
  MdsShardText shard;
  shard.samples = static_cast<std::size_t>(count);
  shard.bytes = content.size();
  shard.name = name;
  return shard;
}

/// The same, compressed and with its hash.
MdsShardText write_mds_zip(const TestFolder& folder, int first, int count, const std::string& name) {
  auto shard = write_mds_shard(folder, first, count, name);
  const auto packed = mds_zstd(content_of(folder / name));
  std::filesystem::remove(folder / name);
  folder.write(name + ".zstd", packed);
  char hash[17];
  std::snprintf(hash, sizeof(hash), "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(packed.data(), packed.size())));
  shard.compression = R"("zstd:3")";
  shard.zip = R"({"basename":")" + name + R"(.zstd","bytes":)" + std::to_string(packed.size()) +
              R"(,"hashes":{"xxh3_64":")" + hash + R"("}})";
  return shard;
}

void expect_mds_samples(const Dataset& dataset, int count) {
  ASSERT_EQ(dataset.size(), count);
  for (int i = 0; i < count; ++i) {
    const auto sample = dataset.read(i);
    EXPECT_EQ(number_of<std::int32_t>(sample[0]), i);
    EXPECT_TRUE(sample[0].shape.empty());
    EXPECT_EQ(text_of(sample[1]), "text " + std::to_string(i));
  }
}

TEST(Mds, ReadsShardsPlainAndCompressed) {
  const TestFolder folder;
  folder.write("index.json",
               mds_index({write_mds_shard(folder, 0, 5, "a.mds"), write_mds_shard(folder, 5, 1, "sub/b.mds"),
                          write_mds_zip(folder, 6, 40, "c.mds"), write_mds_zip(folder, 46, 4, "d.mds")}));
  const auto dataset = open_mds(folder.path());
  ASSERT_TRUE(dataset);
  EXPECT_EQ(dataset->format(), "mds");
  EXPECT_EQ(dataset->schema().fields[0], (Field{"n", Kind::Array, DType::I32, {}}));
  EXPECT_EQ(dataset->schema().fields[1], (Field{"s", Kind::Text, DType::U8, {-1}}));
  expect_mds_samples(*dataset, 50);
  EXPECT_SAYS(dataset->place(1), "a.mds, sample 1, offset " + std::to_string(4 * 7 + 4 + 4 + 6));
  EXPECT_SAYS(dataset->place(7), "c.mds.zstd, sample 1");
  EXPECT_THROW((void)dataset->read(50), Error);
  EXPECT_THROW((void)dataset->read(-1), Error);
  read_by_threads(*dataset);
}

TEST(Mds, MoreCompressedShardsThanAreKept) {
  const TestFolder folder;
  std::vector<MdsShardText> shards;
  const int count = 3 * static_cast<int>(std::thread::hardware_concurrency()) + 5;
  for (int i = 0; i < count; ++i) shards.push_back(write_mds_zip(folder, 2 * i, 2, "s" + std::to_string(i)));
  folder.write("index.json", mds_index(shards));
  const auto dataset = open_mds(folder.path());
  const auto first = dataset->read(0);
  expect_mds_samples(*dataset, 2 * count);
  EXPECT_EQ(text_of(first[1]), "text 0") << "a sample keeps its shard";
  read_by_threads(*dataset);
}

TEST(Mds, ADecompressedShardBesideIsTaken) {
  const TestFolder folder;
  auto shard = write_mds_zip(folder, 0, 3, "a.mds");
  write_mds_shard(folder, 0, 3, "a.mds");
  folder.write("a.mds.zstd", "no longer needed");
  folder.write("index.json", mds_index({shard}));
  expect_mds_samples(*open_mds(folder.path()), 3);
}

TEST(Mds, TheIndexMayBeEmptyOrAnothers) {
  const TestFolder folder;
  EXPECT_FALSE(open_mds(folder.path()));
  folder.write("index.json", mds_index({}));
  EXPECT_EQ(open_mds(folder.path())->size(), 0);
  folder.write("index.json", mds_index({write_mds_shard(folder, 0, 0, "a.mds")}));
  EXPECT_EQ(open_mds(folder.path())->size(), 0);
  folder.write("index.json", R"({"chunks":[],"config":{}})");
  EXPECT_FALSE(open_mds(folder.path()));
  folder.write("index.json", "[1]");
  EXPECT_FALSE(open_mds(folder.path()));
  EXPECT_FALSE(open_mds(folder / "index.json"));
}

/// One sample of one column.
std::string mds_of_one(const TestFolder& folder, const std::string& encoding, const std::string& size,
                       const std::string& value) {
  const auto content = counted_shard({(size == "null" ? raw(static_cast<std::uint32_t>(value.size())) : "") + value});
  MdsShardText shard;
  shard.columns = R"("column_names":["x"],"column_encodings":[")" + encoding + R"("],"column_sizes":[)" + size + "]";
  shard.samples = 1;
  shard.bytes = content.size();
  folder.write(shard.name, content);
  folder.write("index.json", mds_index({shard}));
  return folder.path();
}

TEST(Mds, EachEncoding) {
  const TestFolder folder;
  const auto check = [&](const std::string& encoding, const std::string& size, const std::string& value,
                         const Field& field) {
    const auto dataset = open_mds(mds_of_one(folder, encoding, size, value));
    EXPECT_EQ(dataset->schema().fields[0], field) << encoding;
    EXPECT_EQ(text_of(dataset->read(0)[0]), value) << encoding;
    EXPECT_EQ(dataset->read(0)[0].dtype, field.dtype) << encoding;
  };
  const auto scalar = [&](const std::string& encoding, DType dtype) {
    check(encoding, std::to_string(size_of(dtype)), std::string(size_of(dtype), 'v'), {"x", Kind::Array, dtype, {}});
  };
  scalar("int", DType::I64);
  scalar("uint8", DType::U8);
  scalar("int8", DType::I8);
  scalar("uint16", DType::U16);
  scalar("int16", DType::I16);
  scalar("uint32", DType::U32);
  scalar("int32", DType::I32);
  scalar("uint64", DType::U64);
  scalar("int64", DType::I64);
  scalar("float16", DType::F16);
  scalar("float32", DType::F32);
  scalar("float64", DType::F64);
  for (const char* text : {"str", "json", "str_int", "str_float", "str_decimal"})
    check(text, "null", "ab", {"x", Kind::Text, DType::U8, {-1}});
  for (const char* image : {"jpeg", "png"}) check(image, "null", "ab", {"x", Kind::Image, DType::U8, {-1}});
  check("bytes", "null", "", {"x", Kind::Bytes, DType::U8, {-1}});
  check("ndarray:int16:2,3", "12", "twelve bytes", {"x", Kind::Array, DType::I16, {2, 3}});
}

TEST(Mds, ArraysThatCarryDtypeAndShape) {
  const TestFolder folder;
  const auto check = [&](const std::string& encoding, const std::string& head, DType dtype,
                         const std::vector<std::int64_t>& shape) {
    const std::string elements = "elements";
    const auto dataset = open_mds(mds_of_one(folder, encoding, "null", head + elements));
    const auto value = dataset->read(0)[0];
    EXPECT_EQ(value.dtype, dtype);
    EXPECT_EQ(value.shape, shape);
    EXPECT_EQ(text_of(value), elements);
    EXPECT_EQ(dataset->schema().fields[0].dtype, dtype);
    EXPECT_EQ(dataset->schema().fields[0].shape, std::vector<std::int64_t>(shape.size(), -1));
  };
  check("ndarray", std::string("\x22\x08\2\1", 4), DType::F32, {2, 1});
  check("ndarray:uint16", std::string("\x05\4\0", 3), DType::U16, {4});
  check("ndarray:uint8", std::string("\x06\x08\0\0\0", 5), DType::U8, {8});
  check("ndarray", std::string("\x42\x07\1\0\0\0\0\0\0\0", 10), DType::F64, {1});
}

TEST(Mds, ArraysMustAgreeInDtypeAndDimensions) {
  const TestFolder folder;
  MdsShardText shard;
  shard.columns = R"("column_names":["x"],"column_encodings":["ndarray"],"column_sizes":[null])";
  const auto content =
      counted_shard({raw(5U) + "\x08\x04\2ab", raw(6U) + "\x08\x04\3abc", raw(6U) + std::string("\x08\x08\2\1ab", 6)});
  shard.samples = 3;
  shard.bytes = content.size();
  folder.write(shard.name, content);
  folder.write("index.json", mds_index({shard}));
  const auto dataset = open_mds(folder.path());
  EXPECT_EQ(dataset->read(1)[0].shape, (std::vector<std::int64_t>{3}));
  EXPECT_THROW((void)dataset->read(2), Error);
}

TEST(Mds, WhatIsNotReadIsSaid) {
  const TestFolder folder;
  EXPECT_SAYS(refusal(open_mds, mds_of_one(folder, "pkl", "null", "ab")), "pickled Python objects");
  EXPECT_SAYS(refusal(open_mds, mds_of_one(folder, "pil", "null", "ab")), "has the encoding 'pil'");
  EXPECT_SAYS(refusal(open_mds, mds_of_one(folder, "list[jpeg]", "null", "ab")), "has the encoding 'list[jpeg]'");
  auto shard = write_mds_zip(folder, 0, 3, "a.mds");
  shard.compression = R"("br:11")";
  folder.write("index.json", mds_index({shard}));
  EXPECT_SAYS(refusal(open_mds, folder.path()), "compressed by 'br:11'");
  folder.write("index.json", R"({"shards":[{"format":"csv","version":2}]})");
  EXPECT_SAYS(refusal(open_mds, folder.path()), "format 'csv'");
  auto other = write_mds_shard(folder, 0, 3, "b.mds");
  other.columns = R"("column_names":["n","s"],"column_encodings":["int32","bytes"],"column_sizes":[4,null])";
  folder.write("index.json", mds_index({write_mds_shard(folder, 0, 3, "a.mds"), other}));
  EXPECT_SAYS(refusal(open_mds, folder.path()), "b.mds has other columns");
}

TEST(Mds, LyingIndexes) {
  const TestFolder folder;
  const auto says = [&](const MdsShardText& shard, const std::string& part) {
    folder.write("index.json", mds_index({shard}));
    EXPECT_SAYS(refusal(open_mds, folder.path()), part);
  };
  const auto right = write_mds_shard(folder, 0, 3, "a.mds");
  auto shard = right;
  shard.samples = 4;
  says(shard, "it has 3 samples, and its index says 4");
  shard.samples = 4000000000;
  says(shard, "is truncated or damaged");
  shard.samples = SIZE_MAX / 8;
  says(shard, "which its 32-bit count cannot hold");
  shard = right;
  ++shard.bytes;
  says(shard, "is truncated or damaged: it has");
  for (
      const char* columns :
      {R"("column_names":["n"],"column_encodings":["int32","str"],"column_sizes":[4,null])",
       R"("column_names":["n","s"],"column_encodings":["int32","str"],"column_sizes":[4])",
       R"("column_names":"n","column_encodings":[],"column_sizes":[])",
       R"("column_names":["n","s"],"column_encodings":["int32",3],"column_sizes":[4,null])",
       R"("column_names":["n","s"],"column_encodings":["int32","str"],"column_sizes":[8,null])",
       R"("column_names":["n","s"],"column_encodings":["int32","str"],"column_sizes":[4,"x"])",
       R"("column_names":["n","s"],"column_encodings":["ndarray:int32:9223372036854775807,3","str"],"column_sizes":[4,null])",
       R"("column_names":["n","s"],"column_encodings":["ndarray:int32:2,","str"],"column_sizes":[8,null])",
       R"("column_names":["n","s"],"column_encodings":["ndarray:word","str"],"column_sizes":[null,null])"}) {
    shard = right;
    shard.columns = columns;
    says(shard, "is damaged");
  }
  shard = right;
  shard.name = "missing.mds";
  says(shard, "missing.mds does not exist");
  folder.write("index.json", R"({"shards":3})");
  EXPECT_SAYS(refusal(open_mds, folder.path()), "'shards' must be a list");
}

TEST(Mds, LyingTables) {
  const TestFolder folder;
  const auto shard = write_mds_shard(folder, 0, 2, "a.mds");
  folder.write("index.json", mds_index({shard}));
  const auto whole = content_of(folder / "a.mds");
  const auto says = [&](std::size_t at, std::uint32_t value, const std::string& part) {
    auto content = whole;
    content.replace(at, 4, raw(value));
    folder.write("a.mds", content);
    EXPECT_SAYS(refusal(open_mds, folder.path()), part);
  };
  says(4, 0, "sample 0 is at bytes 0 to");
  says(4, UINT32_MAX, "sample 0 is at bytes 4294967295 to");
  says(8, UINT32_MAX, "to 4294967295");
  says(16, UINT32_MAX, "bytes are expected");
  says(16, 5, "belong to no column");
}

TEST(Mds, DamagedCompressedShards) {
  const TestFolder folder;
  const auto shard = write_mds_zip(folder, 0, 30, "a.mds");
  folder.write("index.json", mds_index({shard}));
  auto packed = content_of(folder / "a.mds.zstd");
  packed[packed.size() / 2] ^= 1;
  folder.write("a.mds.zstd", packed);
  EXPECT_SAYS(refusal(open_mds, folder.path()), "another XXH3 hash");
  auto unhashed = shard;
  unhashed.zip = R"({"basename":"a.mds.zstd","bytes":1})";
  folder.write("index.json", mds_index({unhashed}));
  const auto says = [&](const std::string& content, const std::string& part) {
    folder.write("a.mds.zstd", mds_zstd(content));
    EXPECT_SAYS(refusal(open_mds, folder.path()), part);
  };
  says("short", "is truncated or damaged: it has 5 bytes");
  says(std::string(std::size_t{1} << 26, 'x'), "decompresses to more than");
  folder.write("a.mds.zstd", "no zstd");
  EXPECT_SAYS(refusal(open_mds, folder.path()), "zstd says");
  folder.write("a.mds.zstd", "");
  EXPECT_SAYS(refusal(open_mds, folder.path()), "a.mds.zstd is");
}

TEST(Mds, DamageIsRefusedOrReadRight) {
  const TestFolder folder;
  folder.write("index.json", mds_index({write_mds_shard(folder, 0, 3, "a.mds"), write_mds_zip(folder, 3, 3, "b.mds")}));
  for (const char* file : {"index.json", "a.mds", "b.mds.zstd"}) cut_everywhere(open_mds, folder.path(), folder / file);
  change_at_random(open_mds, folder.path(), folder / "index.json", 1000, 2000);
  change_at_random(open_mds, folder.path(), folder / "a.mds", 30, 2000);
  auto unhashed = write_mds_zip(folder, 3, 3, "b.mds");
  unhashed.zip = R"({"basename":"b.mds.zstd","bytes":1})";
  folder.write("index.json", mds_index({unhashed}));
  change_at_random(open_mds, folder.path(), folder / "b.mds.zstd", 20, 2000);
  mds_of_one(folder, "ndarray", "null", std::string("\x22\x08\2\1elements", 12));
  change_at_random(open_mds, folder.path(), folder / "shard.00000.mds", 22, 2000);
}

TEST(Mds, TheFingerprintFollowsTheShards) {
  const TestFolder folder;
  folder.write("index.json", mds_index({write_mds_shard(folder, 0, 3, "a.mds")}));
  const auto before = open_mds(folder.path())->fingerprint();
  EXPECT_EQ(open_mds(folder.path())->fingerprint(), before);
  std::filesystem::last_write_time(folder / "a.mds",
                                   std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_NE(open_mds(folder.path())->fingerprint(), before);
}

}  // namespace
}  // namespace oxytorch::data
