#include "data/file.h"

#include <limits>
#include <optional>

#include "record_test_files.h"

namespace oxytorch::data {
namespace {

TEST(FileTest, ViewsStayInside) {
  const TestFolder folder;
  const auto path = folder.write("x", "0123456789");
  const auto file = open_file(path);
  EXPECT_EQ(file->location(), path);
  EXPECT_EQ(file->size(), 10U);
  EXPECT_FALSE(file->remote());
  EXPECT_EQ(file->view(0, 10).text(), "0123456789");
  EXPECT_EQ(file->view(3, 4).text(), "3456");
  EXPECT_EQ(file->view(10, 0).text(), "");
  const auto huge = std::numeric_limits<std::uint64_t>::max();
  for (const auto& [offset, length] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {0, 11}, {10, 1}, {11, 0}, {huge, 1}, {1, huge}, {huge, huge}}) {
    expect_error(ErrorCode::Io, "x is truncated or damaged: it has 10 bytes",
                 [&, offset = offset, length = length] { (void)file->view(offset, length); });
  }
  file->will_view(0, 10);
  file->will_view(9, 100);
  file->will_view(huge, 1);
}

TEST(FileTest, AViewOutlivesItsFile) {
  const TestFolder folder;
  auto file = open_file(folder.write("x", "content"));
  const auto view = file->view(0, 7);
  file.reset();
  std::filesystem::remove(folder.path("x"));
  EXPECT_EQ(view.text(), "content");
}

TEST(FileTest, EmptyAndMissingFiles) {
  const TestFolder folder;
  const auto empty = open_file(folder.write("empty", ""));
  EXPECT_EQ(empty->size(), 0U);
  EXPECT_EQ(empty->view(0, 0).bytes.size(), 0U);
  expect_error(ErrorCode::Io, "it has 0 bytes", [&] { (void)empty->view(0, 1); });
  empty->will_view(0, 1);
  expect_error(ErrorCode::NotFound, "nothing does not exist", [&] { (void)open_file(folder.path("nothing")); });
  expect_error(ErrorCode::InvalidArgument, "no regular file", [&] { (void)open_file(folder.path()); });
}

TEST(FileTest, WhatIsThere) {
  const TestFolder folder;
  const auto path = folder.write("x", "content");
  EXPECT_TRUE(exists(path));
  EXPECT_TRUE(exists("file://" + path));
  EXPECT_EQ(open_file("file://" + path)->view(0, 7).text(), "content");
  EXPECT_FALSE(exists(path + "y"));
  EXPECT_TRUE(is_folder(folder.path()));
  EXPECT_FALSE(is_folder(path));
  EXPECT_FALSE(is_folder(path + "y"));
  EXPECT_EQ(join("a", "b"), "a/b");
  EXPECT_EQ(join("a/", "b"), "a/b");
  EXPECT_EQ(join("", "b"), "b");
}

TEST(FileTest, FoldersAreListedInOrder) {
  const TestFolder folder;
  for (const auto* name : {"b", "B", "a10", "a9", "folder/inside", ".hidden"}) (void)folder.write(name, "");
  EXPECT_EQ(list_folder(folder.path()), (std::vector<std::string>{".hidden", "B", "a10", "a9", "b", "folder/"}));
  EXPECT_EQ(list_folder(folder.path("folder")), std::vector<std::string>{"inside"});
  expect_error(ErrorCode::Io, "nothing cannot be listed", [&] { (void)list_folder(folder.path("nothing")); });
}

TEST(FileTest, Braces) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(expand_braces("x.tar"), Names{"x.tar"});
  EXPECT_EQ(expand_braces("x-{8..11}.tar"), (Names{"x-8.tar", "x-9.tar", "x-10.tar", "x-11.tar"}));
  EXPECT_THROW(expand_braces("x-{0..4294967295}"), Error);
  EXPECT_THROW(expand_braces("x-{0..9999}-{0..9999}"), Error);
  EXPECT_EQ(expand_braces("x-{0..999}-{0..999}").size(), 1'000'000U);
  EXPECT_EQ(expand_braces("x-{008..010}"), (Names{"x-008", "x-009", "x-010"}));
  EXPECT_EQ(expand_braces("{0..1}/{5..6}"), (Names{"0/5", "0/6", "1/5", "1/6"}));
  EXPECT_EQ(expand_braces("x-{3..3}"), Names{"x-3"});
  for (const auto* wrong : {"x-{0..", "x-{0}", "x-{}", "x-{1..0}", "x-{a..b}", "x-{0..99999999999}", "x-{-1..2}",
                            "x-{0.1}", "x-{0}..{1}", "x-{0..1 }"}) {
    expect_error(ErrorCode::InvalidArgument, wrong, [&] { (void)expand_braces(wrong); });
  }
}

TEST(FileTest, VersionsAndFingerprints) {
  const TestFolder folder;
  const auto path = folder.write("x", "content");
  const auto version = open_file(path)->version();
  EXPECT_EQ(open_file(path)->version(), version);
  const auto before = std::filesystem::last_write_time(path);
  std::filesystem::last_write_time(path, before + std::chrono::seconds(1));
  EXPECT_NE(open_file(path)->version(), version);
  (void)folder.write("x", "content and more");
  std::filesystem::last_write_time(path, before);
  EXPECT_NE(open_file(path)->version(), version);

  const auto fingerprint = fingerprint_of({"a", "bc"});
  EXPECT_EQ(fingerprint.size(), 16U);
  EXPECT_EQ(fingerprint.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(fingerprint, fingerprint_of({"a", "bc"}));
  EXPECT_NE(fingerprint, fingerprint_of({"ab", "c"}));
  EXPECT_NE(fingerprint, fingerprint_of({"bc", "a"}));
  EXPECT_NE(fingerprint_of({}), fingerprint_of({""}));
}

TEST(FileTest, ATouchedFileChangesTheFingerprintOfADataset) {
  const TestFolder folder;
  const auto path = folder.write("x.bin", "abcd");
  const auto before = open_raw(path, DType::U8, {})->fingerprint();
  EXPECT_EQ(open_raw(path, DType::U8, {})->fingerprint(), before);
  std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + std::chrono::seconds(1));
  EXPECT_NE(open_raw(path, DType::U8, {})->fingerprint(), before);
}

/// Whether the kernel was told that the mapping of a file is read here and there: "rr" of its flags.
bool is_read_here_and_there(const std::string& path) {
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < line.find(' ') && line.find(':') > line.find(' ')) inside = line.ends_with(path);
    if (inside && line.starts_with("VmFlags:")) return line.find(" rr") != std::string::npos;
  }
  ADD_FAILURE() << path << " is not mapped";
  return false;
}

TEST(File, ReadsAheadWhereReadsFollowEachOther) {
  const TestFolder folder;
  const auto path = folder.write("large", "");
  std::filesystem::resize_file(path, std::uintmax_t{1} << 30);  // of holes
  const auto file = open_file(path);
  const auto jump = [&](int count) {
    for (int i = 0; i < count; ++i) (void)file->view((static_cast<std::uint64_t>(i) * 391 % 1024) << 20, 100);
  };
  for (std::uint64_t i = 0; i < 100; ++i) (void)file->view(i * 4096, 4096);
  EXPECT_FALSE(is_read_here_and_there(path));
  jump(200);
  EXPECT_TRUE(is_read_here_and_there(path));
  for (std::uint64_t i = 0; i < 200; ++i) (void)file->view((500 << 20) + i * 70'000, 70'000);
  EXPECT_FALSE(is_read_here_and_there(path));
  // Of a file that was opened just now, before a hundred pages were missed.
  const auto again = folder.write("other", "");
  std::filesystem::resize_file(again, std::uintmax_t{1} << 30);
  const auto other = open_file(again);
  for (const std::uint64_t at : {700, 100, 900}) (void)other->view(at << 20, 100);
  EXPECT_TRUE(is_read_here_and_there(again));
}

}  // namespace
}  // namespace oxytorch::data
