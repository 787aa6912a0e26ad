#include <gtest/gtest.h>

#include <filesystem>

#include "data/formats.h"
#include "oxytorch/data/cache.h"
#include "oxytorch/data/convert.h"
#include "oxytorch/data/loader.h"
#include "shard_files.h"

namespace oxytorch::data {
namespace {

using namespace shard_files;

std::string beton_header(std::uint16_t fields, std::uint64_t samples, std::uint64_t table, std::uint16_t version = 2) {
  return raw(version) + raw(fields) + raw(1U << 21) + raw(samples) + raw(table);
}

std::string beton_field(std::uint8_t type, const std::string& name, const std::string& arguments = "") {
  std::string field(1 + 16 + 1024, '\0');
  field[0] = static_cast<char>(type);
  field.replace(1, name.size(), name);
  field.replace(17, arguments.size(), arguments);
  return field;
}

std::string beton_array(const std::vector<std::uint64_t>& shape, const std::string& description) {
  std::string arguments;
  for (std::size_t i = 0; i < 32; ++i) arguments += raw(i < shape.size() ? shape[i] : std::uint64_t{0});
  return arguments + raw(static_cast<std::uint64_t>(description.size())) + description;
}

std::string beton_allocation(std::uint64_t sample, std::uint64_t offset, std::uint64_t bytes) {
  return raw(sample) + raw(offset) + raw(bytes);
}

/// JPEG, number, text and array: rows of 13 bytes, 3 of padding, 8, 16 and 8.
struct SmallBeton {
  std::uint64_t samples = 3, row = 48;
  std::string fields = beton_field(2, "image") + beton_field(1, "label") + beton_field(5, "note") +
                       beton_field(4, "array", beton_array({2, 2}, R"([["", "<i2"]])"));
  std::uint64_t first = 24 + 4 * 1041 + samples * row;

  [[nodiscard]] std::string jpeg(std::uint64_t i) const { return "JPEG " + std::string(i, 'x'); }
  [[nodiscard]] std::string note(std::uint64_t i) const { return "{\"i\": " + std::to_string(i) + "}"; }
  [[nodiscard]] std::string text() const {
    std::string rows, data, table;
    for (std::uint64_t i = 0; i < samples; ++i) {
      const auto image_at = first + data.size();
      data += jpeg(i);
      const auto note_at = first + data.size();
      data += note(i) + std::string(1, '\0');
      const auto array_at = first + data.size();
      data += "array " + std::to_string(i) + ".";
      rows +=
          std::string(1, '\0') + raw(std::uint16_t{5}) + raw(std::uint16_t{4}) + raw(image_at) + std::string(3, '\0');
      rows += raw(static_cast<std::int64_t>(i) - 1) + raw(note_at) +
              raw(static_cast<std::uint64_t>(note(i).size()) + 1) + raw(array_at);
      table = beton_allocation(i, image_at, jpeg(i).size()) + beton_allocation(i, note_at, note(i).size() + 1) + table;
    }
    return beton_header(4, samples, first + data.size()) + fields + rows + data + table;
  }
};

TEST(Beton, ReadsEachField) {
  const TestFolder folder;
  const SmallBeton small;
  const auto path = folder.write("x.beton", small.text());
  const auto dataset = open_beton(path);
  ASSERT_TRUE(dataset);
  EXPECT_EQ(dataset->format(), "beton");
  ASSERT_EQ(dataset->size(), 3);
  const auto& fields = dataset->schema().fields;
  ASSERT_EQ(fields.size(), 4U);
  EXPECT_EQ(fields[0], (Field{"image", Kind::Image, DType::U8, {-1}}));
  EXPECT_EQ(fields[1], (Field{"label", Kind::Array, DType::I64, {}}));
  EXPECT_EQ(fields[2], (Field{"note", Kind::Text, DType::U8, {-1}}));
  EXPECT_EQ(fields[3], (Field{"array", Kind::Array, DType::I16, {2, 2}}));
  for (std::uint64_t i = 0; i < 3; ++i) {
    const auto sample = dataset->read(static_cast<std::int64_t>(i));
    EXPECT_EQ(text_of(sample[0]), small.jpeg(i));
    EXPECT_EQ(number_of<std::int64_t>(sample[1]), static_cast<std::int64_t>(i) - 1);
    EXPECT_EQ(text_of(sample[2]), small.note(i));
    EXPECT_EQ(text_of(sample[3]), "array " + std::to_string(i) + ".");
    EXPECT_EQ(sample[3].shape, (std::vector<std::int64_t>{2, 2}));
  }
  EXPECT_SAYS(dataset->place(0), path + ", sample 0, offset " + std::to_string(small.first));
  EXPECT_THROW((void)dataset->read(3), Error);
  EXPECT_THROW((void)dataset->read(-1), Error);
  read_by_threads(*dataset);
  EXPECT_EQ(dataset->fingerprint(), open_beton(path)->fingerprint());
}

/// Two samples of one image field, of mode, width, height and pixels.
std::string beton_of_images(const std::vector<std::tuple<int, int, int, std::string>>& images) {
  std::string rows, data, table;
  const auto first = 24 + 1041 + 13 * images.size();
  for (const auto& [mode, width, height, content] : images) {
    rows += std::string(1, static_cast<char>(mode)) + raw(static_cast<std::uint16_t>(width)) +
            raw(static_cast<std::uint16_t>(height)) + raw(static_cast<std::uint64_t>(first + data.size()));
    table += beton_allocation(0, first + data.size(), content.size());
    data += content;
  }
  return beton_header(1, images.size(), first + data.size()) + beton_field(2, "sixteen_letters_") + rows + data + table;
}

// FFCV chooses for each image in its mode "smart", and by chance in "proportion".
TEST(Beton, ImagesAreJpegsOrPixels) {
  const TestFolder folder;
  const auto path =
      folder.write("x.beton", beton_of_images({{1, 2, 1, "RGBRGB"}, {0, 1, 1, "JPEG"}, {1, 1, 1, "rgb"}}));
  const auto dataset = open_beton(path);
  EXPECT_EQ(dataset->schema().fields[0], (Field{"sixteen_letters_", Kind::Image, DType::U8, {-1}}));
  EXPECT_EQ(text_of(dataset->read(0)[0]), "RGBRGB");
  EXPECT_EQ(dataset->read(0)[0].shape, (std::vector<std::int64_t>{1, 2, 3}));
  EXPECT_EQ(text_of(dataset->read(1)[0]), "JPEG");
  EXPECT_EQ(dataset->read(1)[0].shape, (std::vector<std::int64_t>{4}));
  EXPECT_EQ(dataset->read(2)[0].shape, (std::vector<std::int64_t>{1, 1, 3}));
  const auto shape_of = [&](const std::vector<std::tuple<int, int, int, std::string>>& images) {
    return open_beton(folder.write("x.beton", beton_of_images(images)))->schema().fields[0].shape;
  };
  EXPECT_EQ(shape_of({{1, 2, 1, "RGBRGB"}, {1, 2, 1, "rgbrgb"}}), (std::vector<std::int64_t>{1, 2, 3}));
  EXPECT_EQ(shape_of({{1, 2, 1, "RGBRGB"}, {1, 1, 1, "rgb"}}), (std::vector<std::int64_t>{-1, -1, 3}));
}

TEST(Beton, JpegsAndPixelsGoThroughTheSameStages) {
  const TestFolder folder;
  Pixels pixels{6, 4, 3, std::make_shared<std::uint8_t[]>(72)};
  for (int i = 0; i < 72; ++i) pixels.data[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(i * 37);
  const std::string raw_bytes(reinterpret_cast<const char*>(pixels.data.get()), 72), jpeg = encode_jpeg(pixels, 90);
  const auto path = folder.write("x.beton", beton_of_images({{1, 6, 4, raw_bytes}, {0, 6, 4, jpeg}}));
  const auto decoded = decode_image(std::as_bytes(std::span(jpeg)));
  const std::string jpeg_bytes(reinterpret_cast<const char*>(decoded.data.get()), 72);
  for (const bool cached : {false, true}) {
    LoaderOptions options{.batch_size = 2};
    options.image.channels_last = true;
    if (cached) options.cache = std::make_shared<Cache>(CacheOptions{.memory = "1MB"});
    Loader loader(open_beton(path), options);
    for (int epoch = 0; epoch < 2; ++epoch) {
      const auto batch = loader.next();
      ASSERT_TRUE(batch);
      EXPECT_EQ(text_of(batch->columns[0].array), raw_bytes + jpeg_bytes);
      EXPECT_FALSE(loader.next());
    }
  }
  // Written anew, pixels become PNGs, and JPEGs stay.
  const auto anew = (std::filesystem::path(folder.path()) / "mds").string();
  convert(*open_beton(path), anew);
  const auto written = open(anew);
  EXPECT_EQ(image_header(written->read(0)[0].data.bytes).format, ImageFormat::Png);
  const auto png = decode_image(written->read(0)[0].data.bytes);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(png.data.get()), 72), raw_bytes);
  EXPECT_EQ(text_of(written->read(1)[0]), jpeg);
}

TEST(Beton, ASecondImageIsAnArrayWhereItIsPixelsAlone) {
  const TestFolder folder;
  const auto at = std::uint64_t{24 + 2 * 1041 + 4 * 13};
  const auto image = [&](int mode, std::uint64_t offset) {
    return std::string(1, static_cast<char>(mode)) + raw(std::uint16_t{1}) + raw(std::uint16_t{1}) + raw(at + offset);
  };
  const auto beton = [&](int mode) {
    return beton_header(2, 2, at + 12) + beton_field(2, "image") + beton_field(2, "depth") + image(1, 0) + image(1, 3) +
           image(1, 6) + image(mode, 9) + "rgbRGBxyzXYZ" + beton_allocation(0, at + 9, 3);
  };
  Loader loader(open_beton(folder.write("x.beton", beton(1))), {.batch_size = 2});
  const auto batch = loader.next();
  EXPECT_EQ(text_of(batch->columns[1].array), "RGBXYZ");
  EXPECT_EQ(batch->columns[1].array.shape, (std::vector<std::int64_t>{2, 1, 1, 3}));
  Loader mixed(open_beton(folder.write("mixed.beton", beton(0))), {.batch_size = 2});
  try {
    (void)mixed.next();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_SAYS(std::string(error.what()), "'depth' is a second image");
  }
}

TEST(Beton, NumbersBytesAndNoSamples) {
  const TestFolder folder;
  const auto at = std::uint64_t{24 + 2 * 1041 + 24};
  const auto text = beton_header(2, 1, at + 3) + beton_field(0, "weight") + beton_field(3, "blob") + raw(2.5) +
                    raw(at) + raw(std::uint64_t{3}) + "abc" + beton_allocation(0, at, 3);
  const auto dataset = open_beton(folder.write("x.beton", text));
  EXPECT_EQ(number_of<double>(dataset->read(0)[0]), 2.5);
  EXPECT_EQ(text_of(dataset->read(0)[1]), "abc");
  EXPECT_EQ(dataset->schema().fields[1], (Field{"blob", Kind::Bytes, DType::U8, {-1}}));
  EXPECT_EQ(open_beton(folder.write("y.beton", beton_header(1, 0, 24 + 1041) + beton_field(2, "image")))->size(), 0);
  EXPECT_FALSE(open_beton(folder.write("x.bin", text)));
  EXPECT_FALSE(open_beton(folder.path()));
}

TEST(Beton, WhatIsNotReadIsSaid) {
  const TestFolder folder;
  const auto says = [&](const std::string& text, const std::string& part) {
    EXPECT_SAYS(refusal(open_beton, folder.write("x.beton", text)), part);
  };
  says(beton_header(1, 0, 24, 1) + beton_field(0, "x"), "of version 1");
  says(beton_header(1, 0, 24 + 1041) + beton_field(255, "mine"), "field 'mine' has type 255");
  for (const char* description :
       {R"([["", ">f4"]])", R"([["", "<c8"]])", R"([])", R"([["a", "<f4"], ["b", "<f4"]])", R"([["", "<f4", [2]]])"}) {
    says(beton_header(1, 0, 24 + 1041) + beton_field(4, "x", beton_array({2}, description)), "are not read here");
  }
}

TEST(Beton, LyingHeaders) {
  const TestFolder folder;
  const SmallBeton small;
  const auto whole = small.text();
  const auto says = [&](std::size_t at, const std::string& bytes, const std::string& part) {
    auto text = whole;
    text.replace(at, bytes.size(), bytes);
    EXPECT_SAYS(refusal(open_beton, folder.write("x.beton", text)), part);
  };
  const auto rows = std::size_t{24 + 4 * 1041}, array = std::size_t{24 + 3 * 1041 + 17};
  says(2, raw(std::uint16_t{0}), "it has no fields");
  says(2, raw(UINT16_MAX), "truncated or damaged");
  says(8, raw(UINT64_MAX), "it says at offset 8");
  says(8, raw(UINT64_MAX / 48), "it says at offset 8");
  says(16, raw(UINT64_MAX), "its allocation table is said to begin at offset 18446744073709551615");
  says(16, raw(static_cast<std::uint64_t>(whole.size() - 24)), "has no entry for the image");
  says(rows + 5, raw(std::uint64_t{7}), "has no entry for the image at offset 7");
  says(rows + 24, raw(UINT64_MAX), "truncated or damaged");
  says(rows + 32, raw(UINT64_MAX), "truncated or damaged");
  says(rows + 40, raw(static_cast<std::uint64_t>(whole.size() - 7)), "truncated or damaged");
  says(array, raw(UINT64_MAX), "truncated or damaged");
  says(array, raw(UINT64_MAX / 4), "truncated or damaged");
  says(array + 256, raw(UINT64_MAX), "bytes are expected");
}

TEST(Beton, DamageIsRefusedOrReadRight) {
  const TestFolder folder;
  const auto path = folder.write("x.beton", SmallBeton().text());
  const auto rows = std::size_t{24 + 4 * 1041};
  // Every byte of what varies; the arguments, nearly all zero, are cut here and there.
  const auto whole = content_of(path), right = read_or_refuse(open_beton, path);
  ASSERT_FALSE(right.empty());
  for (std::size_t length = 0; length < whole.size(); length += length >= 64 && length + 64 < rows ? 61 : 1) {
    folder.write("x.beton", whole.substr(0, length));
    const auto read = read_or_refuse(open_beton, path);
    EXPECT_TRUE(read.empty() || read == right) << "cut at " << length;
  }
  folder.write("x.beton", whole);
  change_at_random(open_beton, path, path, 24, 2000);
  auto fields = whole;
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    fields = whole;
    fields[rows + random() % (whole.size() - rows)] = static_cast<char>(random() % 256);
    const auto field = 24 + 1041 * (random() % 4);
    fields[field + (random() % 2 == 0 ? 0 : 17 + random() % 300)] = static_cast<char>(random() % 8);
    folder.write("x.beton", fields);
    (void)read_or_refuse(open_beton, path);
  }
}

}  // namespace
}  // namespace oxytorch::data
