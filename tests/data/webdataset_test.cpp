#include <gtest/gtest.h>

#include <cstdio>

#include "data/formats.h"
#include "shard_files.h"

namespace oxytorch::data {
namespace {

using namespace shard_files;

/// Writes the checksum of a header whose other fields stand.
void sum_tar_header(std::string& header) {
  header.replace(148, 8, 8, ' ');
  unsigned sum = 0;
  for (const char c : header) sum += static_cast<unsigned char>(c);
  char digits[8];
  std::snprintf(digits, sizeof(digits), "%06o", sum);
  header.replace(148, 7, digits, 7);
}

std::string tar_header(const std::string& name, std::uint64_t size, char type = '0', const std::string& prefix = "") {
  std::string header(512, '\0');
  header.replace(0, name.size(), name);
  char digits[13];
  std::snprintf(digits, sizeof(digits), "%011llo", static_cast<unsigned long long>(size));
  header.replace(124, 12, digits, 12);
  header[156] = type;
  header.replace(257, 8, std::string("ustar\0", 6) + "00");
  header.replace(345, prefix.size(), prefix);
  sum_tar_header(header);
  return header;
}

std::string tar_body(std::string content) {
  content.resize((content.size() + 511) / 512 * 512);
  return content;
}

std::string tar_member(const std::string& name, const std::string& content, char type = '0',
                       const std::string& prefix = "") {
  return tar_header(name, content.size(), type, prefix) + tar_body(content);
}

const std::string kTarEnd(1024, '\0');

std::string small_tar() {
  return tar_member("a.jpg", "JPEG a") + tar_member("a.cls", " 3\n") + tar_member("a.txt", "") +
         tar_member("b.jpg", "JPEG b") + tar_member("b.cls", "-4") + tar_member("b.txt", "text of b") + kTarEnd;
}

TEST(WebDataset, SamplesAreFilesOfOneKey) {
  const TestFolder folder;
  const auto tar = folder.write("x.tar", small_tar());
  for (int i = 0; i < 2; ++i) {  // the second time by the index beside the shard
    const auto dataset = open_webdataset(tar);
    ASSERT_TRUE(dataset);
    EXPECT_EQ(dataset->format(), "webdataset");
    const auto& fields = dataset->schema().fields;
    ASSERT_EQ(fields.size(), 4U);
    EXPECT_EQ(fields[0], (Field{"jpg", Kind::Image, DType::U8, {-1}}));
    EXPECT_EQ(fields[1], (Field{"cls", Kind::Array, DType::I64, {}}));
    EXPECT_EQ(fields[2], (Field{"txt", Kind::Text, DType::U8, {-1}}));
    EXPECT_EQ(fields[3], (Field{"__key__", Kind::Text, DType::U8, {-1}}));
    ASSERT_EQ(dataset->size(), 2);
    const auto first = dataset->read(0), second = dataset->read(1);
    EXPECT_EQ(text_of(first[0]), "JPEG a");
    EXPECT_EQ(number_of<std::int64_t>(first[1]), 3);
    EXPECT_EQ(text_of(first[2]), "");
    EXPECT_EQ(text_of(first[3]), "a");
    EXPECT_EQ(text_of(second[0]), "JPEG b");
    EXPECT_EQ(number_of<std::int64_t>(second[1]), -4);
    EXPECT_EQ(text_of(second[2]), "text of b");
    EXPECT_EQ(text_of(second[3]), "b");
    EXPECT_SAYS(dataset->place(1), tar + ", offset 3072, key 'b'");
    EXPECT_THROW((void)dataset->read(2), Error);
    EXPECT_TRUE(std::filesystem::exists(tar + ".oxidx"));
  }
}

TEST(WebDataset, NamesAreGroupedAsWebdatasetDoes) {
  const TestFolder folder;
  std::string tar;
  for (const std::string key : {"dir.v1/a", "dir.v1/b"}) {
    tar += tar_member(key + ".SEG.Png", key + " seg") + tar_member("__meta__", "left out") +
           tar_member("dir.v1/no_dot", "left out");
    tar += tar_member("dir.v1/.hidden", "left out") + tar_member("__more__/x.bin", "left out") +
           tar_member(key + ".b.i", key + " bi");
    tar += tar_header("dir.v1/", 0, '5') + tar_header("link.jpg", 0, '2') + tar_header("old_folder.d/", 0, '\0');
  }
  const auto dataset = open_webdataset(folder.write("x.tar", tar + kTarEnd));
  ASSERT_EQ(dataset->size(), 2);
  EXPECT_EQ(dataset->schema().fields[0], (Field{"seg.png", Kind::Image, DType::U8, {-1}}));
  EXPECT_EQ(dataset->schema().fields[1], (Field{"b.i", Kind::Bytes, DType::U8, {-1}}));
  EXPECT_EQ(text_of(dataset->read(1)[0]), "dir.v1/b seg");
  EXPECT_EQ(text_of(dataset->read(1)[1]), "dir.v1/b bi");
  EXPECT_EQ(text_of(dataset->read(1)[2]), "dir.v1/b");
}

std::string pax_record(const std::string& key, const std::string& value) {
  auto length = key.size() + value.size() + 3;
  while (std::to_string(length).size() + key.size() + value.size() + 3 != length) ++length;
  return std::to_string(length) + " " + key + "=" + value + "\n";
}

TEST(WebDataset, LongNamesOfEachKind) {
  const TestFolder folder;
  const std::string name(300, 'n');
  const auto tar =
      tar_member("tail.bin", "prefixed", '0', "head") +
      tar_member("././@LongLink", name + ".bin" + std::string(1, '\0'), 'L') + tar_member("short", "gnu") +
      tar_member("pax",
                 pax_record("mtime", "1.5") + pax_record("path", "../p/" + name + ".bin") + pax_record("size", "3"),
                 'x') +
      tar_header("other", 0) + tar_body("pax") + tar_member("global", pax_record("comment", "x"), 'g') +
      tar_member("z.bin", "last") + kTarEnd;
  const auto dataset = open_webdataset(folder.write("x.tar", tar));
  ASSERT_EQ(dataset->size(), 4);
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"prefixed", "head/tail"}, {"gnu", name}, {"pax", "../p/" + name}, {"last", "z"}};
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(text_of(dataset->read(i)[0]), expected[static_cast<std::size_t>(i)].first);
    EXPECT_EQ(text_of(dataset->read(i)[1]), expected[static_cast<std::size_t>(i)].second);
  }
}

TEST(WebDataset, SizesInBase256) {
  const TestFolder folder;
  auto header = tar_header("a.bin", 0);
  header.replace(124, 12, std::string("\x80\0\0\0\0\0\0\0\0\0\0\5", 12));
  sum_tar_header(header);
  const auto dataset = open_webdataset(folder.write("x.tar", header + tar_body("12345") + kTarEnd));
  EXPECT_EQ(text_of(dataset->read(0)[0]), "12345");
  header.replace(124, 12, std::string("\x80\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 12));
  sum_tar_header(header);
  EXPECT_SAYS(refusal(open_webdataset, folder.write("y.tar", header + tar_body("12345") + kTarEnd)),
              "size that is no number");
}

TEST(WebDataset, ShardsByFolderBracesAndOne) {
  const TestFolder folder;
  for (int shard = 0; shard < 12; ++shard) {
    std::string tar;
    for (int i = 0; i < shard % 4; ++i) {  // some are empty, and the order of the fields differs
      const auto key = std::to_string(shard * 10 + i);
      tar += shard % 2 == 0 ? tar_member(key + ".bin", key) + tar_member(key + ".cls", key)
                            : tar_member(key + ".cls", key) + tar_member(key + ".bin", key);
    }
    folder.write("s-" + std::to_string(100 + shard) + ".tar", tar + kTarEnd);
  }
  const auto whole = open_webdataset(folder.path()), braces = open_webdataset(folder / "s-{100..111}.tar");
  const auto part = open_webdataset(folder / "s-{102..103}.tar");
  ASSERT_EQ(whole->size(), 18);
  EXPECT_EQ(all_of(*whole), all_of(*braces));
  EXPECT_EQ(part->size(), 5);
  for (std::int64_t i = 0; i < whole->size(); ++i) {
    const auto sample = whole->read(i);
    EXPECT_EQ(text_of(sample[static_cast<std::size_t>(whole->schema().find("bin"))]), text_of(sample[2]));
    EXPECT_EQ(std::to_string(number_of<std::int64_t>(sample[static_cast<std::size_t>(whole->schema().find("cls"))])),
              text_of(sample[2]));
  }
  read_by_threads(*whole);
  EXPECT_EQ(whole->fingerprint(), braces->fingerprint());
  EXPECT_NE(whole->fingerprint(), part->fingerprint());
  EXPECT_THROW((void)open_webdataset(folder / "s-{111..112}.tar"), Error);
}

TEST(WebDataset, KnownByContentToo) {
  const TestFolder folder;
  EXPECT_TRUE(open_webdataset(folder.write("no_ending", small_tar())));
  EXPECT_FALSE(open_webdataset(folder.write("other.bin", std::string(2000, 'x'))));
  EXPECT_FALSE(open_webdataset(folder.write("empty.bin", "")));
  EXPECT_FALSE(open_webdataset(folder.path()));
  const auto empty = open_webdataset(folder.write("empty.tar", kTarEnd));
  ASSERT_TRUE(empty);
  EXPECT_EQ(empty->size(), 0);
  EXPECT_SAYS(refusal(open_webdataset, folder.write("nothing.tar", "")), "is truncated");
}

TEST(WebDataset, CompressedTarsAreRefused) {
  const TestFolder folder;
  EXPECT_SAYS(refusal(open_webdataset, folder.write("z/x.tar.gz", "\x1F\x8B\x08")), "is a compressed tar");
  EXPECT_SAYS(refusal(open_webdataset, folder / "z"), "holds compressed tars");
  EXPECT_SAYS(refusal(open_webdataset, folder.write("x.tar", "\x1F\x8B\x08\x08" + std::string(600, 'x'))),
              "compressed by gzip");
  EXPECT_SAYS(refusal(open_webdataset, folder.write("y.tar", "\x28\xB5\x2F\xFD" + std::string(600, 'x'))),
              "compressed by zstd");
}

TEST(WebDataset, SamplesMustBeAlike) {
  const TestFolder folder;
  const auto says = [&](const std::string& tar, const std::string& part) {
    EXPECT_SAYS(refusal(open_webdataset, folder.write("x.tar", tar + kTarEnd)), part);
  };
  const auto a = tar_member("a.jpg", "1") + tar_member("a.cls", "1");
  says(a + tar_member("b.jpg", "2"), "offset 2048: sample 'b' lacks a '.cls'");
  says(a + tar_member("b.jpg", "2") + tar_member("c.jpg", "2"), "sample 'b' lacks a '.cls'");
  says(a + tar_member("b.jpg", "2") + tar_member("b.cls", "2") + tar_member("b.txt", "2"), "sample 'b' has a '.txt'");
  says(a + tar_member("a.JPG", "2"), "sample 'a' has two '.jpg'");
  says(tar_member("a.jpg", "1") + tar_member("a.cls", "dog"), "must hold an integer, and this one holds 'dog'");
  folder.write("y.tar", tar_member("b.jpg", "2") + kTarEnd);
  folder.write("x.tar", a + kTarEnd);
  EXPECT_SAYS(refusal(open_webdataset, folder.path()), "y.tar: sample 'b' lacks a '.cls'");
  folder.write("y.tar", tar_member("b.jpg", "2") + tar_member("b.cls", "2") + tar_member("b.txt", "2") + kTarEnd);
  EXPECT_SAYS(refusal(open_webdataset, folder.path()), "y.tar: sample 'b' has a '.txt'");
}

TEST(WebDataset, DamageIsNamed) {
  const TestFolder folder;
  const auto says = [&](const std::string& tar, const std::string& part) {
    EXPECT_SAYS(refusal(open_webdataset, folder.write("x.tar", tar)), part);
  };
  auto tar = small_tar();
  tar[3 * 1024 - 512 - 500] = 'x';
  says(tar, "the tar header at offset 2048 has a wrong checksum");
  says(tar_member("a.bin", "1"), "without the block of zeros");
  says(tar_header("a.bin", 0777777777) + kTarEnd, "the file at offset 0 has 134217727 bytes");
  says(tar_header("a.bin", 0, 'S') + kTarEnd, "sparse");
  says(tar_member("p", pax_record("GNU.sparse.major", "1"), 'x') + tar_member("a.bin", "1") + kTarEnd, "sparse");
  says(tar_member("p", "12 path=", 'x') + tar_member("a.bin", "1") + kTarEnd, "no list of records");
  says(tar_member("p", "99999999999999999999 path=x\n", 'x') + tar_member("a.bin", "1") + kTarEnd,
       "no list of records");
  says(tar_member("p", pax_record("size", "-1"), 'x') + tar_member("a.bin", "1") + kTarEnd, "no list of records");
  says(tar_header("L", (1 << 20) + 1, 'L') + std::string(2 << 20, 'n') + kTarEnd,
       "the name at offset 0 has 1048577 bytes");
}

TEST(WebDataset, DamagedTarsAreRefusedOrReadRight) {
  const TestFolder folder;
  const auto tar = folder.write("x.tar", small_tar());
  cut_everywhere(open_webdataset, tar, tar);
  const auto rich = folder.write(
      "y.tar", tar_member("pax", pax_record("path", "q/p.bin") + pax_record("size", "3"), 'x') +
                   tar_header("other", 0) + tar_body("pax") +
                   tar_member("long", "some/name.bin" + std::string(1, '\0'), 'L') + tar_member("x", "gnu") + kTarEnd);
  cut_everywhere(open_webdataset, rich, rich);
  std::mt19937 random(7);
  const auto whole = content_of(rich);
  for (int i = 0; i < 2000; ++i) {  // with checksums that are right, so that the rest of a header is read
    auto content = whole;
    for (int k = 0; k < 3; ++k)
      content[random() % content.size()] = static_cast<char>(random() % 2 == 0 ? random() % 256 : '0' + random() % 10);
    for (std::size_t at = 0; at + 512 <= content.size(); at += 512) {
      auto header = content.substr(at, 512);
      if (header.substr(257, 5) == "ustar") sum_tar_header(header), content.replace(at, 512, header);
    }
    std::ofstream(rich, std::ios::binary) << content;
    (void)read_or_refuse(open_webdataset, rich);
  }
  change_at_random(open_webdataset, tar, tar, 512, 1000);
}

TEST(WebDataset, AnIndexOfOtherContentIsMadeAgain) {
  const TestFolder folder;
  const auto tar = folder.write("x.tar", small_tar());
  const auto index = tar + ".oxidx";
  const auto right = all_of(*open_webdataset(tar));
  const auto kept = content_of(index);
  ASSERT_FALSE(kept.empty());
  for (std::size_t length = 0; length < kept.size(); ++length) {
    folder.write("x.tar.oxidx", kept.substr(0, length));
    ASSERT_EQ(all_of(*open_webdataset(tar)), right);
    ASSERT_EQ(content_of(index), kept);
  }
  std::mt19937 random(3);
  for (int i = 0; i < 1000; ++i) {
    auto content = kept;
    content[random() % content.size()] ^= static_cast<char>(1 + random() % 255);
    folder.write("x.tar.oxidx", content);
    ASSERT_EQ(all_of(*open_webdataset(tar)), right);
  }
  // A shard that changed makes the index stale.
  folder.write("x.tar", tar_member("c.bin", "new") + kTarEnd);
  EXPECT_EQ(text_of(open_webdataset(tar)->read(0)[0]), "new");
  EXPECT_NE(content_of(index), kept);
}

TEST(WebDataset, TheIndexIsUsed) {
  const TestFolder folder;
  const auto tar = folder.write("x.tar", small_tar());
  (void)open_webdataset(tar);
  const auto time = std::filesystem::last_write_time(tar);
  auto content = small_tar();
  content[148] = 'x';  // a header that a second pass would refuse
  folder.write("x.tar", content);
  std::filesystem::last_write_time(tar, time);
  EXPECT_EQ(text_of(open_webdataset(tar)->read(1)[0]), "JPEG b");
}

TEST(WebDataset, AFolderThatCannotBeWrittenIsNoError) {
  const TestFolder folder;
  const auto tar = folder.write("x.tar", small_tar());
  std::filesystem::create_directory(tar + ".oxidx");  // stands where the index would: root may write everywhere else
  EXPECT_EQ(open_webdataset(tar)->size(), 2);
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) files += entry.is_regular_file();
  EXPECT_EQ(files, 1U) << "the index that was written aside must go";
}

}  // namespace
}  // namespace oxytorch::data
