#include <gtest/gtest.h>
#include <zstd.h>

#include "data/formats.h"
#include "shard_files.h"

namespace oxytorch::data {
namespace {

using namespace shard_files;

std::string litdata_zstd(const std::string& content) {
  std::string packed(ZSTD_compressBound(content.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), content.data(), content.size(), 3));
  return packed;
}

/// u32 sizes, then the values.
std::string litdata_item(const std::vector<std::string>& values) {
  std::string sizes, body;
  for (const auto& value : values) {
    sizes += raw(static_cast<std::uint32_t>(value.size()));
    body += value;
  }
  return sizes + body;
}

struct LitdataIndex {
  std::string formats = R"("int","str")";
  std::string spec =
      R"("[1, {\"type\": \"builtins.dict\", \"context\": \"[\\\"n\\\", \\\"s\\\"]\", \"children_spec\": [)"
      R"({\"type\": null, \"context\": null, \"children_spec\": []}, {\"type\": null, \"context\": null, \"children_spec\": []}]}]")";
  std::string rest = R"("compression":null,"encryption":null,"item_loader":"PyTreeLoader")";
  std::string chunks;

  void add(const std::string& name, std::size_t items, std::size_t bytes) {
    chunks += (chunks.empty() ? "" : ",") + std::string(R"({"filename":")") + name + R"(","chunk_size":)" +
              std::to_string(items) + R"(,"chunk_bytes":)" + std::to_string(bytes) + R"(,"dim":null})";
  }
  [[nodiscard]] std::string json() const {
    return R"({"chunks":[)" + chunks + R"(],"config":{"data_format":[)" + formats + R"(],"data_spec":)" + spec + "," +
           rest + "}}";
  }
};

std::vector<std::string> litdata_items(int first, int count) {
  std::vector<std::string> items;
  for (std::int64_t i = first; i < first + count; ++i)
    items.push_back(litdata_item({raw(i), "text " + std::to_string(i)}));
  return items;
}

void expect_litdata_samples(const std::shared_ptr<const Dataset>& dataset, int count) {
  ASSERT_TRUE(dataset);
  ASSERT_EQ(dataset->size(), count);
  for (int i = 0; i < count; ++i) {
    const auto sample = dataset->read(i);
    EXPECT_EQ(number_of<std::int64_t>(sample[0]), i);
    EXPECT_EQ(text_of(sample[1]), "text " + std::to_string(i));
  }
}

TEST(Litdata, ReadsChunks) {
  const TestFolder folder;
  LitdataIndex index;
  const auto a = counted_shard(litdata_items(0, 5)), b = counted_shard(litdata_items(5, 1)), c = counted_shard({});
  folder.write("a.bin", a);
  folder.write("b.bin", b);
  folder.write("c.bin", c);
  index.add("a.bin", 5, a.size());
  index.add("c.bin", 0, c.size());
  index.add("b.bin", 1, b.size() - 12);  // as older versions count: without the table
  folder.write("index.json", index.json());
  const auto dataset = open_litdata(folder.path());
  expect_litdata_samples(dataset, 6);
  EXPECT_EQ(dataset->format(), "litdata");
  EXPECT_EQ(dataset->schema().fields[0], (Field{"n", Kind::Array, DType::I64, {}}));
  EXPECT_EQ(dataset->schema().fields[1], (Field{"s", Kind::Text, DType::U8, {-1}}));
  EXPECT_SAYS(dataset->place(5), "b.bin, sample 0, offset 12");
  EXPECT_THROW((void)dataset->read(6), Error);
  read_by_threads(*dataset);
}

/// LitData's batches: a table of items within all batches, a table of batches, and the batches, each compressed.
std::string litdata_frames(const std::vector<std::string>& items, std::uint32_t batch) {
  const auto count = static_cast<std::uint32_t>(items.size()), frames = (count + batch - 1) / batch;
  std::string offsets = raw(0U), table, body;
  std::uint32_t at = 0;
  for (const auto& item : items) offsets += raw(at += static_cast<std::uint32_t>(item.size()));
  const std::uint64_t first = 24 + offsets.size() + 24 * frames;
  for (std::uint32_t frame = 0; frame < frames; ++frame) {
    std::string content;
    const auto begin = frame * batch, end = std::min(count, begin + batch);
    for (auto i = begin; i < end; ++i) content += items[i];
    const auto packed = litdata_zstd(content);
    table += raw(begin) + raw(end - begin) + raw(first + body.size()) + raw(static_cast<std::uint32_t>(packed.size())) +
             raw(static_cast<std::uint32_t>(content.size()));
    body += packed;
  }
  return std::string("LDFZ01\0\0\1\0\0\0", 12) + raw(count) + raw(batch) + raw(frames) + offsets + table + body;
}

std::string litdata_packed_items(std::vector<std::string> items) {
  for (auto& item : items) item = litdata_zstd(item);
  return counted_shard(items);
}

TEST(Litdata, CompressedAsAWholeByBatchesAndByItems) {
  const TestFolder folder;
  const auto items = litdata_items(0, 10);
  const auto plain = counted_shard(items);
  const auto check = [&](const std::string& level, const std::string& content, std::size_t bytes) {
    LitdataIndex index;
    index.rest = R"("compression":"zstd:4","compression_level":)" + level;
    folder.write("a.bin", content);
    index.add("a.bin", 10, bytes);
    folder.write("index.json", index.json());
    const auto dataset = open_litdata(folder.path());
    expect_litdata_samples(dataset, 10);
    read_by_threads(*dataset);
  };
  check("null", litdata_zstd(plain), plain.size());
  check(R"("chunk")", litdata_zstd(plain), plain.size() - 48);
  for (const std::uint32_t batch : {1U, 3U, 5U, 10U, 256U}) {
    const auto framed = litdata_frames(items, batch);
    check(R"("batch")", framed, framed.size());
  }
  const auto single = litdata_packed_items(items);
  check(R"("sample")", single, single.size());
}

/// One sample of one field, without a tree of names.
std::string litdata_of_one(const TestFolder& folder, const std::string& format, const std::string& value) {
  LitdataIndex index;
  index.formats = '"' + format + '"';
  index.spec = "null";
  const auto content = counted_shard({litdata_item({value})});
  folder.write("a.bin", content);
  index.add("a.bin", 1, content.size());
  folder.write("index.json", index.json());
  return folder.path();
}

std::string big(std::uint32_t value) { return raw(__builtin_bswap32(value)); }

TEST(Litdata, EachFormat) {
  const TestFolder folder;
  const auto check = [&](const std::string& format, const std::string& value, const std::string& content, DType dtype,
                         const std::vector<std::int64_t>& shape, const Field& field) {
    const auto dataset = open_litdata(litdata_of_one(folder, format, value));
    const auto read = dataset->read(0)[0];
    EXPECT_EQ(text_of(read), content) << format;
    EXPECT_EQ(read.dtype, dtype) << format;
    EXPECT_EQ(read.shape, shape) << format;
    EXPECT_EQ(dataset->schema().fields[0], field) << format;
  };
  const auto same = [&](const std::string& format, const std::string& value, DType dtype,
                        const std::vector<std::int64_t>& shape, Kind kind) {
    check(format, value, value, dtype, shape,
          {"field_0", kind, dtype, shape.empty() ? shape : std::vector<std::int64_t>{-1}});
  };
  same("int", "8 bytes.", DType::I64, {}, Kind::Array);
  same("float", "8 bytes.", DType::F64, {}, Kind::Array);
  same("bool", std::string("\1"), DType::Bool, {}, Kind::Array);
  same("boolean", std::string("\0", 1), DType::Bool, {}, Kind::Array);
  for (const char* format : {"str", "text"}) same(format, "abc", DType::U8, {3}, Kind::Text);
  for (const char* format : {"jpeg", "image:png", "image:jpg", "image:webp"})
    same(format, "abc", DType::U8, {3}, Kind::Image);
  for (const char* format : {"bytes", "tifffile", "video:mp4", "file:txt", "image:gif"})
    same(format, "abc", DType::U8, {3}, Kind::Bytes);
  same("bytes", "", DType::U8, {0}, Kind::Bytes);
  same("no_header_tensor:17", "8 bytes.", DType::I64, {1}, Kind::Array);
  same("no_header_tensor:20", "8 bytes.", DType::U16, {4}, Kind::Array);
  same("no_header_numpy:5", "8 bytes.", DType::U16, {4}, Kind::Array);
  same("no_header_numpy:13", "8 bytes.", DType::Bool, {8}, Kind::Array);
  const Field grid{"field_0", Kind::Array, DType::I16, {-1, -1}};
  check("tensor", big(13) + big(2) + big(2) + big(2) + "8 bytes.", "8 bytes.", DType::I16, {2, 2}, grid);
  check("tensor", raw(13U) + raw(2U) + raw(2U) + raw(2U) + "8 bytes.", "8 bytes.", DType::I16, {2, 2}, grid);
  check("tensor", big(13) + big(2) + big(3) + big(0), "", DType::I16, {3, 0}, grid);
  check("numpy", raw(1U) + raw(2U) + raw(4U) + raw(1U) + "8 bytes.", "8 bytes.", DType::I16, {4, 1}, grid);
  check("tensor", big(0) + big(0) + "four", "four", DType::F32, {}, {"field_0", Kind::Array, DType::F32, {}});
}

TEST(Litdata, NamesAreThePathsToTheLeaves) {
  const TestFolder folder;
  LitdataIndex index;
  const std::string leaf = R"({\"type\": null, \"context\": null, \"children_spec\": []})";
  const auto node = [](const std::string& type, const std::string& context, const std::string& children) {
    return R"({\"type\": \")" + type + R"(\", \"context\": )" + context + R"(, \"children_spec\": [)" + children + "]}";
  };
  const auto names = [&](const std::string& tree, int count) {
    index.spec = "\"[1, " + tree + "]\"";
    index.formats.clear();
    for (int i = 0; i < count; ++i) index.formats += (i == 0 ? "" : ",") + std::string(R"("bytes")");
    folder.write("index.json", index.json());
    std::string joined;
    const auto dataset = open_litdata(folder.path());
    for (const auto& field : dataset->schema().fields) joined += field.name + " ";
    return joined;
  };
  EXPECT_EQ(names(leaf, 1), "field_0 ");
  EXPECT_EQ(names(node("builtins.tuple", R"(\"null\")", leaf + "," + leaf), 2), "field_0 field_1 ");
  const auto pair = node("builtins.list", R"(\"null\")", leaf + "," + leaf);
  EXPECT_EQ(names(node("builtins.dict", R"(\"[\\\"a\\\", 7]\")", pair + "," + leaf), 3), "a.0 a.1 7 ");
  EXPECT_THROW((void)names(leaf, 2), Error);
  EXPECT_THROW((void)names("3", 1), Error);
}

TEST(Litdata, TokensAreOneArrayAnItem) {
  const TestFolder folder;
  LitdataIndex index;
  index.formats = R"("no_header_tensor:16")";
  index.spec = "null";
  index.rest = R"("compression":null,"item_loader":"TokensLoader")";
  const auto content = counted_shard({"tokens..", "", "more"});
  folder.write("a.bin", content);
  index.add("a.bin", 3, content.size());
  folder.write("index.json", index.json());
  const auto dataset = open_litdata(folder.path());
  ASSERT_EQ(dataset->size(), 3);
  EXPECT_EQ(dataset->read(0)[0].shape, (std::vector<std::int64_t>{2}));
  EXPECT_EQ(dataset->read(1)[0].shape, (std::vector<std::int64_t>{0}));
  EXPECT_EQ(text_of(dataset->read(2)[0]), "more");
  index.formats = R"("str")";
  folder.write("index.json", index.json());
  EXPECT_SAYS(refusal(open_litdata, folder.path()), "must have one field of tokens");
}

TEST(Litdata, WhatIsNotReadIsSaid) {
  const TestFolder folder;
  EXPECT_SAYS(refusal(open_litdata, litdata_of_one(folder, "pickle", "x")), "pickled Python objects");
  EXPECT_SAYS(refusal(open_litdata, litdata_of_one(folder, "graph", "x")), "pickled Python objects");
  EXPECT_SAYS(refusal(open_litdata, litdata_of_one(folder, "pil", "x")), "LitData's format 'pil'");
  EXPECT_SAYS(refusal(open_litdata, litdata_of_one(folder, "no_header_tensor:4", "x")), "dtype number 4");
  EXPECT_SAYS(refusal(open_litdata, litdata_of_one(folder, "no_header_tensor:99", "x")), "dtype number 99");
  EXPECT_SAYS(refusal(open_litdata, litdata_of_one(folder, "no_header_numpy:", "x")), "dtype number 4294967295");
  EXPECT_SAYS(refusal(open_litdata, litdata_of_one(folder, "numpy", raw(14U) + raw(0U))), "dtype number 14");
  const auto with = [&](const std::string& rest) {
    LitdataIndex index;
    index.rest = rest;
    folder.write("index.json", index.json());
    return refusal(open_litdata, folder.path());
  };
  EXPECT_SAYS(with(R"("encryption":{"algorithm":"fernet"})"), "encrypted");
  EXPECT_SAYS(with(R"("item_loader":"ParquetLoader")"), "ParquetLoader");
  EXPECT_SAYS(with(R"("compression":"lz4")"), "compressed by 'lz4'");
  EXPECT_SAYS(with(R"("compression":"zstd","compression_level":"row")"), "compression_level 'row'");
  LitdataIndex arrow;
  folder.write("a.bin", counted_shard({"", ""}));
  arrow.add("a.bin", 2, 16);
  folder.write("index.json", arrow.json());
  EXPECT_SAYS(refusal(open_litdata, folder.path()), "Arrow table");
}

TEST(Litdata, OtherFoldersAreNone) {
  const TestFolder folder;
  EXPECT_FALSE(open_litdata(folder.path()));
  folder.write("index.json", R"({"version":2,"shards":[]})");
  EXPECT_FALSE(open_litdata(folder.path()));
  EXPECT_FALSE(open_litdata(folder / "index.json"));
  LitdataIndex index;
  folder.write("index.json", index.json());
  EXPECT_EQ(open_litdata(folder.path())->size(), 0);
}

TEST(Litdata, LyingValues) {
  const TestFolder folder;
  const auto says = [&](const std::string& format, const std::string& value, const std::string& part) {
    EXPECT_SAYS(refusal(open_litdata, litdata_of_one(folder, format, value)), part);
  };
  says("int", "seven b", "do not fit its shape and dtype int64");
  says("no_header_tensor:17", "seven b", "do not fit its shape and dtype int64");
  says("tensor", big(0) + big(2) + big(3), "says that it has 2 dimensions");
  says("tensor", big(0) + big(UINT16_MAX), "says that it has 65535 dimensions");
  says("tensor", big(0) + big(1) + big(UINT32_MAX) + "four", "do not fit its shape");
  says("tensor", big(0) + big(3) + big(UINT32_MAX) + big(UINT32_MAX) + big(UINT32_MAX) + "four",
       "do not fit its shape");
  says("numpy", raw(9U), "4 bytes are expected");
  LitdataIndex index;
  const auto content = counted_shard({litdata_item({raw(std::int64_t{1}), "a"}) + "left over"});
  folder.write("a.bin", content);
  index.add("a.bin", 1, content.size());
  folder.write("index.json", index.json());
  EXPECT_SAYS(refusal(open_litdata, folder.path()), "belong to no field");
}

TEST(Litdata, DamageIsRefusedOrReadRight) {
  const TestFolder folder;
  const auto items = litdata_items(0, 7);
  const auto chunks = [&](const std::string& rest, const std::string& content, std::size_t bytes) {
    LitdataIndex index;
    index.rest = rest;
    index.add("a.bin", 7, bytes);
    folder.write("a.bin", content);
    folder.write("index.json", index.json());
    cut_everywhere(open_litdata, folder.path(), folder / "a.bin");
    change_at_random(open_litdata, folder.path(), folder / "a.bin", 130, 1500);
  };
  const auto plain = counted_shard(items), framed = litdata_frames(items, 3), single = litdata_packed_items(items);
  chunks(R"("compression":"zstd")", litdata_zstd(plain), plain.size());
  chunks(R"("compression":"zstd","compression_level":"batch")", framed, framed.size());
  chunks(R"("compression":"zstd","compression_level":"sample")", single, single.size());
  chunks(R"("compression":null)", plain, plain.size());
  cut_everywhere(open_litdata, folder.path(), folder / "index.json");
  change_at_random(open_litdata, folder.path(), folder / "index.json", 400, 2000);
  litdata_of_one(folder, "tensor", big(13) + big(2) + big(2) + big(2) + "8 bytes.");
  change_at_random(open_litdata, folder.path(), folder / "a.bin", 40, 2000);
}

}  // namespace
}  // namespace oxytorch::data
