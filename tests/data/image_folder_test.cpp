#include <gtest/gtest.h>
#include <sys/stat.h>

#include "data/formats.h"
#include "shard_files.h"

namespace oxytorch::data {
namespace {

using namespace shard_files;

TEST(ImageFolder, ClassesAreTheSortedFolders) {
  const TestFolder folder;
  for (const char* name : {"dog/2.jpg", "dog/10.JPEG", "cat/b.png", "cat/a.WebP", "cat/notes.txt", "bird/x.jpg"})
    folder.write(name, name);
  folder.write("top.jpg", "belongs to no class");
  const auto dataset = open_image_folder(folder.path());
  ASSERT_TRUE(dataset);
  EXPECT_EQ(dataset->format(), "image_folder");
  EXPECT_EQ(dataset->classes(), (std::vector<std::string>{"bird", "cat", "dog"}));
  ASSERT_EQ(dataset->schema().fields.size(), 2U);
  EXPECT_EQ(dataset->schema().fields[0], (Field{"image", Kind::Image, DType::U8, {-1}}));
  EXPECT_EQ(dataset->schema().fields[1], (Field{"label", Kind::Array, DType::I64, {}}));
  const std::vector<std::pair<std::string, std::int64_t>> expected = {
      {"bird/x.jpg", 0}, {"cat/a.WebP", 1}, {"cat/b.png", 1}, {"dog/10.JPEG", 2}, {"dog/2.jpg", 2}};
  ASSERT_EQ(dataset->size(), 5);
  for (std::int64_t i = 0; i < 5; ++i) {
    const auto sample = dataset->read(i);
    const auto& [content, label] = expected[static_cast<std::size_t>(i)];
    EXPECT_EQ(text_of(sample[0]), content);
    EXPECT_EQ(sample[0].shape, (std::vector<std::int64_t>{static_cast<std::int64_t>(content.size())}));
    EXPECT_EQ(number_of<std::int64_t>(sample[1]), label);
    EXPECT_TRUE(dataset->place(i).ends_with(content));
  }
  EXPECT_THROW((void)dataset->read(5), Error);
  EXPECT_THROW((void)dataset->read(-1), Error);
  read_by_threads(*dataset);
}

TEST(ImageFolder, AClassIsReadFolderAfterFolder) {
  const TestFolder folder;
  for (const char* name : {"c/z.jpg", "c/b/1.jpg", "c/b-2/1.jpg", "c/b/a/1.jpg", "c/empty/readme"})
    folder.write(name, name);
  const auto dataset = open_image_folder("file://" + folder.path());
  ASSERT_TRUE(dataset);
  std::vector<std::string> order;
  for (std::int64_t i = 0; i < dataset->size(); ++i) order.push_back(text_of(dataset->read(i)[0]));
  EXPECT_EQ(order, (std::vector<std::string>{"c/z.jpg", "c/b/1.jpg", "c/b-2/1.jpg", "c/b/a/1.jpg"}));
}

TEST(ImageFolder, ImagesWithoutClasses) {
  const TestFolder folder;
  for (int i = 0; i < 100; ++i) folder.write(std::to_string(1000 + i) + ".png", std::to_string(i));
  folder.write("empty.jpg", "");
  const auto dataset = open_image_folder(folder.path());
  ASSERT_TRUE(dataset);
  EXPECT_EQ(dataset->schema().fields.size(), 1U);
  EXPECT_TRUE(dataset->classes().empty());
  ASSERT_EQ(dataset->size(), 101);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(text_of(dataset->read(i)[0]), std::to_string(i));
  EXPECT_EQ(text_of(dataset->read(100)[0]), "");
}

TEST(ImageFolder, OtherFoldersAreNone) {
  const TestFolder folder;
  EXPECT_FALSE(open_image_folder(folder.path()));
  const auto file = folder.write("sub/readme.txt", "no image");
  EXPECT_FALSE(open_image_folder(folder.path()));
  EXPECT_FALSE(open_image_folder(file));
  EXPECT_FALSE(open_image_folder(folder / "missing"));
}

TEST(ImageFolder, AnEmptyClassIsNamed) {
  const TestFolder folder;
  folder.write("cat/a.jpg", "a");
  folder.write("dog/a.bmp", "of another format");
  EXPECT_SAYS(refusal(open_image_folder, folder.path()), folder / "dog");
}

TEST(ImageFolder, LinksAreFollowedButNotInCircles) {
  const TestFolder folder, other;
  other.write("x.jpg", "linked");
  std::filesystem::create_directory_symlink(other.path(), folder / "cat");
  std::filesystem::create_symlink(folder / "nowhere", folder / "dangling.jpg");
  EXPECT_EQ(text_of(open_image_folder(folder.path())->read(0)[0]), "linked");
  std::filesystem::create_directory_symlink(other.path(), other / "back");
  EXPECT_SAYS(refusal(open_image_folder, folder.path()), "is a link to a folder that holds it");
}

TEST(ImageFolder, FilesThatGoLaterAreNamed) {
  const TestFolder folder;
  const auto path = folder.write("cat/a.jpg", "a");
  ASSERT_EQ(::mkfifo((folder / "cat/pipe.jpg").c_str(), 0600), 0);
  const auto dataset = open_image_folder(folder.path());
  ASSERT_EQ(dataset->size(), 1);
  std::filesystem::remove(path);
  try {
    (void)dataset->read(0);
    FAIL() << "the file is gone";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::NotFound);
    EXPECT_SAYS(std::string(error.what()), path);
  }
}

TEST(ImageFolder, TheFingerprintFollowsTheNames) {
  const TestFolder folder;
  folder.write("cat/a.jpg", "a");
  const auto before = open_image_folder(folder.path())->fingerprint();
  EXPECT_EQ(before.size(), 16U);
  EXPECT_EQ(open_image_folder(folder.path())->fingerprint(), before);
  folder.write("cat/b.jpg", "b");
  EXPECT_NE(open_image_folder(folder.path())->fingerprint(), before);
}

}  // namespace
}  // namespace oxytorch::data
