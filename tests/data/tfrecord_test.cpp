#include "oxytorch/isa.h"
#include "record_test_files.h"

namespace oxytorch::data {
namespace {

/// The checksum of a record, bit by bit.
std::uint32_t masked_crc(const std::string& bytes) {
  std::uint32_t crc = ~0U;
  for (const char c : bytes) {
    crc ^= static_cast<std::uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78U : 0);
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8U;
}

std::string record(const std::string& data) {
  const auto length = packed(std::uint64_t{data.size()});
  return length + packed(masked_crc(length)) + data + packed(masked_crc(data));
}

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) bytes += static_cast<char>(value | 128);
  return bytes + static_cast<char>(value);
}

std::string chunk(unsigned field, const std::string& bytes) {
  return varint(field << 3 | 2) + varint(bytes.size()) + bytes;
}

std::string feature(const std::string& name, unsigned kind, const std::string& list) {
  return chunk(1, chunk(1, name) + chunk(2, chunk(kind, list)));
}

std::string bytes_feature(const std::string& name, const std::string& value) {
  return feature(name, 1, chunk(1, value));
}

template <class... T>
std::string floats_feature(const std::string& name, T... values) {
  return feature(name, 2, chunk(1, packed(static_cast<float>(values)...)));
}

std::string integers_feature(const std::string& name, const std::vector<std::int64_t>& values) {
  std::string list;
  for (const auto value : values) list += varint(static_cast<std::uint64_t>(value));
  return feature(name, 3, chunk(1, list));
}

const std::string kJpeg = "\xFF\xD8\xFF\xE0 and so on";

std::string example(const std::string& features) { return chunk(1, features); }

TEST(TfrecordTest, Examples) {
  const TestFolder folder;
  const auto path = folder.write(
      "x.tfrecord",
      record(example(bytes_feature("image", kJpeg) + integers_feature("label", {-1}) + floats_feature("box", 0.5, 1.5) +
                     bytes_feature("name", "a") + integers_feature("ids", {1, 300, INT64_MIN}))) +
          record(example(integers_feature("ids", {}) + bytes_feature("name", "") + floats_feature("box", 2, 3) +
                         integers_feature("label", {INT64_MAX}) + bytes_feature("image", kJpeg + "!"))));
  const auto dataset = open(path);
  EXPECT_EQ(dataset->format(), "tfrecord");
  ASSERT_EQ(dataset->size(), 2);
  EXPECT_EQ(dataset->schema(), (Schema{{{"box", Kind::Array, DType::F32, {2}},
                                        {"ids", Kind::Array, DType::I64, {-1}},
                                        {"image", Kind::Image, DType::U8, {}},
                                        {"label", Kind::Array, DType::I64, {1}},
                                        {"name", Kind::Bytes, DType::U8, {}}}}));
  const auto first = dataset->read(0), second = dataset->read(1);
  EXPECT_EQ(elements_of<float>(first[0]), (std::vector<float>{0.5, 1.5}));
  EXPECT_EQ(elements_of<std::int64_t>(first[1]), (std::vector<std::int64_t>{1, 300, INT64_MIN}));
  EXPECT_EQ(first[2].data.text(), kJpeg);
  EXPECT_EQ(elements_of<std::int64_t>(first[3]), std::vector<std::int64_t>{-1});
  EXPECT_EQ(first[4].data.text(), "a");
  EXPECT_EQ(second[1].elements(), 0);
  EXPECT_EQ(elements_of<std::int64_t>(second[3]), std::vector<std::int64_t>{INT64_MAX});
  EXPECT_EQ(second[4].data.text(), "");
  EXPECT_EQ(dataset->place(0), path + ", offset 0");
  expect_threads_agree(*dataset);
}

TEST(TfrecordTest, ListsThatAreNotPacked) {
  const TestFolder folder;
  const auto floats = feature("f", 2, varint(1 << 3 | 5) + packed(1.5F) + chunk(1, packed(2.5F)));
  const auto integers =
      feature("i", 3, varint(1 << 3) + varint(7) + chunk(1, varint(300)) + varint(1 << 3) + varint(8));
  const auto sample = open(folder.write("x", record(example(floats + integers))))->read(0);
  EXPECT_EQ(elements_of<float>(sample[0]), (std::vector<float>{1.5, 2.5}));
  EXPECT_EQ(elements_of<std::int64_t>(sample[1]), (std::vector<std::int64_t>{7, 300, 8}));
}

TEST(TfrecordTest, OtherRecordsAreBytes) {
  const TestFolder folder;
  const auto dataset = open(folder.write("x", record("anything") + record("") + record(example("x"))));
  EXPECT_EQ(dataset->schema(), (Schema{{{"record", Kind::Bytes, DType::U8, {}}}}));
  ASSERT_EQ(dataset->size(), 3);
  EXPECT_EQ(dataset->read(0)[0].data.text(), "anything");
  EXPECT_EQ(dataset->read(1)[0].data.text(), "");
  const auto hollow = open(folder.write("x", record("") + record(example(chunk(1, chunk(1, "key"))))));
  EXPECT_EQ(hollow->schema().fields.size(), 1U);
  EXPECT_EQ(hollow->read(1).size(), 1U);
  const auto late = open(folder.write("x", record(example(integers_feature("i", {1}))) + record("anything")));
  EXPECT_EQ(late->schema(), dataset->schema());
  EXPECT_EQ(open(folder.write("none.tfrecord", ""))->size(), 0);
}

TEST(TfrecordTest, FoldersAndRanges) {
  const TestFolder folder;
  (void)folder.write("t.tfrecord-00000-of-00002", record(example(integers_feature("i", {1}))));
  (void)folder.write("t.tfrecord-00001-of-00002", record(example(integers_feature("i", {2}))));
  (void)folder.write("dataset_info.json", "{}");
  for (const auto& location : {folder.path(), folder.path("t.tfrecord-{00000..00001}-of-00002")}) {
    const auto dataset = open(location);
    ASSERT_EQ(dataset->size(), 2);
    EXPECT_EQ(elements_of<std::int64_t>(dataset->read(1)[0]), std::vector<std::int64_t>{2});
  }
}

TEST(TfrecordTest, ChecksumsOfEveryLengthAndInstructionSet) {
  const TestFolder folder;
  std::string content, data;
  for (int length = 0; length < 70; ++length) {
    content += record(data);
    data += static_cast<char>(length * 37 + 200);
  }
  EXPECT_EQ(masked_crc("123456789"), ((0xE3069283U >> 15 | 0xE3069283U << 17) + 0xa282ead8U));
  const auto path = folder.write("x.tfrecord", content);
  for (const auto isa : supported_isas()) {
    const ScopedIsa scope(isa);
    EXPECT_EQ(contents_of(*open(path)).size(), 70U);
  }
}

TEST(TfrecordTest, WhatIsMissingInSomeOfTheFirstRecords) {
  const TestFolder folder;
  const auto path = folder.write("x.tfrecord", record(example(integers_feature("i", {1}) + bytes_feature("b", "x"))) +
                                                   record(example(floats_feature("f", 1))));
  const auto dataset = open(path);
  ASSERT_EQ(dataset->schema().fields.size(), 3U);
  EXPECT_EQ(dataset->schema().fields[1].shape, (std::vector<std::int64_t>{-1}));
  EXPECT_EQ(dataset->read(1)[0].data.text(), "");
  EXPECT_EQ(dataset->read(0)[1].elements(), 0);
  EXPECT_EQ(dataset->read(1)[2].elements(), 0);
}

TEST(TfrecordTest, RecordsThatDoNotFitTheFirst) {
  const TestFolder folder;
  std::string content;
  for (int i = 0; i < 16; ++i) content += record(example(integers_feature("i", {1}) + bytes_feature("b", "x")));
  const auto refuse = [&](ErrorCode code, const std::string& part, const std::string& features) {
    const auto dataset = open(folder.write("x.tfrecord", content + record(features)));
    expect_error(code, part, [&] { (void)dataset->read(16); });
    expect_error(code, "offset " + std::to_string(content.size()), [&] { (void)dataset->read(16); });
  };
  const auto b = bytes_feature("b", "x");
  refuse(ErrorCode::Io, "'i' is missing", example(b));
  refuse(ErrorCode::Io, "'i' has 2 values, and 1", example(b + integers_feature("i", {1, 2})));
  refuse(ErrorCode::Io, "'i' is floats, and integers", example(b + floats_feature("i", 1)));
  refuse(ErrorCode::Io, "'i' is damaged", example(b + feature("i", 3, chunk(1, "\xff"))));
  refuse(ErrorCode::Io, "'i' is damaged", example(b + feature("i", 3, chunk(1, std::string(10, '\xff') + '\1'))));
  refuse(ErrorCode::Io, "'i' is damaged", example(b + feature("i", 3, varint(1 << 3 | 5) + "abcd")));
  refuse(ErrorCode::NotSupported, "'b' has 2 byte strings",
         example(feature("b", 1, chunk(1, "x") + chunk(1, "y")) + integers_feature("i", {1})));
  refuse(ErrorCode::Io, "no tf.train.Example", "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01");
  refuse(ErrorCode::Io, "no tf.train.Example", "nonsense");
  const auto mixed = record(example(b)) + record(example(integers_feature("b", {1})));
  expect_error(ErrorCode::Io, "'b' is integers, and bytes", [&] { (void)open(folder.write("x.tfrecord", mixed)); });
}

TEST(TfrecordTest, WhatIsRefused) {
  const TestFolder folder;
  const auto refuse = [&](ErrorCode code, const std::string& part, const std::string& content) {
    const auto path = folder.write("x.tfrecord", content);
    expect_error(code, part, [&] { contents_of(*open(path)); });
  };
  const auto whole = record("some data");
  refuse(ErrorCode::NotSupported, "gzip", "\x1F\x8B and so on");
  refuse(ErrorCode::Io, "does not fit its checksum", "nonsense that is long");
  refuse(ErrorCode::Io, "begins at offset 25", whole + "short");
  auto changed = whole;
  changed[14] ^= 1;
  refuse(ErrorCode::Io, "offset 0: the record is damaged", changed);
  const auto length = packed(~std::uint64_t{0});
  refuse(ErrorCode::Io, "has 18446744073709551615 bytes", whole + length + packed(masked_crc(length)) + "data");
}

TEST(TfrecordTest, DamageIsFound) {
  const TestFolder folder;
  const auto data =
      example(bytes_feature("image", kJpeg) + integers_feature("label", {1, 300}) + floats_feature("x", 0.5));
  const auto whole = record(data) + record(data);
  const auto path = folder.write("x.tfrecord", whole);
  expect_truncations_safe(path, whole, open);
  expect_mutations_safe(path, whole, open);
  // Under checksums that fit, so that the reader of messages sees the damage.
  std::mt19937 random(11);
  for (int round = 0; round < 4000; ++round) {
    auto changed = data;
    for (int i = 0; i < 1 + round % 3; ++i) changed[random() % changed.size()] = static_cast<char>(random());
    (void)folder.write("x.tfrecord", record(round % 2 == 0 ? changed : data) + record(changed));
    try {
      contents_of(*open(path));
    } catch (const Error& error) {
      ASSERT_NE(error.code(), ErrorCode::Internal) << error.what();
    }
  }
  std::string first;
  for (int i = 0; i < 16; ++i) first += record(data);
  for (std::size_t cut = 0; cut < data.size(); ++cut) {
    const auto dataset = open(folder.write("x.tfrecord", first + record(data.substr(0, cut))));
    expect_error(ErrorCode::Io, "offset " + std::to_string(first.size()), [&] { (void)dataset->read(16); });
  }
}

}  // namespace
}  // namespace oxytorch::data
