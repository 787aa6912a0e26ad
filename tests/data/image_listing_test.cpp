#include "data/image_listing.h"

#define XXH_INLINE_ALL
#include <gtest/gtest.h>
#include <xxhash.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "oxytorch/error.h"
#include "test_folder.h"

namespace oxytorch::data {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> paths_of(const ImageListing& listing) {
  std::vector<std::string> paths;
  for (std::size_t i = 0; i < listing.size(); ++i) {
    const auto name = listing.classes().empty() ? "" : listing.classes()[listing.class_of(i)] + ": ";
    paths.push_back(name + std::string(listing.path(i)));
  }
  return paths;
}

class ImageListingTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"cat/2.jpg", "cat/10.png", "cat/more/x.webp", "dog/1.jpg", "dog/notes.txt"})
      images_.write(name, name);
  }
  [[nodiscard]] std::string root() const { return images_.path(); }
  [[nodiscard]] ImageListing::Keeping keeping() const { return {kept_ / "listings", 0, 0}; }
  [[nodiscard]] ImageListing listed() const { return ImageListing::of(root(), keeping()); }
  [[nodiscard]] ImageListing anew() const { return ImageListing::of(root(), {}); }
  [[nodiscard]] std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    if (!fs::exists(kept_ / "listings")) return found;
    for (const auto& entry : fs::directory_iterator(kept_ / "listings")) found.push_back(entry.path());
    return found;
  }
  [[nodiscard]] std::string content() const {
    std::ifstream file(files().at(0), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void write(const std::string& bytes) const { std::ofstream(files().at(0), std::ios::binary) << bytes; }
  /// Of a content that was changed on purpose.
  static void rehash(std::string& bytes) {
    const std::uint64_t hash = XXH3_64bits(bytes.data() + 16, bytes.size() - 16);
    std::memcpy(bytes.data() + 8, &hash, sizeof(hash));
  }
  /// A step of the file system's clock.
  static void pass_time() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

  TestFolder images_, kept_;
};

TEST_F(ImageListingTest, IsThereAgain) {
  const auto first = paths_of(listed());
  EXPECT_EQ(first,
            (std::vector<std::string>{"cat: cat/10.png", "cat: cat/2.jpg", "cat: cat/more/x.webp", "dog: dog/1.jpg"}));
  ASSERT_EQ(files().size(), 1U);
  EXPECT_EQ(paths_of(listed()), first);
  EXPECT_EQ(listed().fingerprint(), anew().fingerprint());
  // It is what was kept: a name that is not in the folder shows it.
  auto bytes = content();
  bytes.replace(bytes.find("2.jpg"), 5, "3.jpg");
  rehash(bytes);
  write(bytes);
  EXPECT_EQ(paths_of(listed()).at(1), "cat: cat/3.jpg");
  EXPECT_EQ(paths_of(ImageListing::of(root() + "/../" + fs::path(root()).filename().string() + "/.", keeping())).at(1),
            "cat: cat/3.jpg");
}

TEST_F(ImageListingTest, FollowsEachChange) {
  const TestFolder other;
  other.write("far.jpg", "x");
  const std::vector<std::function<void()>> changes = {
      [&] { images_.write("cat/0.jpg", "new"); },
      [&] { fs::remove(root() + "/cat/2.jpg"); },
      [&] { fs::rename(root() + "/dog/1.jpg", root() + "/dog/7.jpg"); },
      [&] { images_.write("cat/more/deep/y.png", "new"); },
      [&] { fs::remove(root() + "/cat/more/deep/y.png"); },
      [&] { fs::rename(root() + "/dog", root() + "/bird"); },
      [&] { fs::create_directory_symlink(other.path(), root() + "/fish"); },
      [&] { other.write("near.jpg", "new, behind a link"); },
      [&] { fs::remove_all(root() + "/cat/more"); },
  };
  auto before = paths_of(listed());
  for (std::size_t i = 0; i < changes.size(); ++i) {
    pass_time();
    changes[i]();
    const auto now = paths_of(listed());
    EXPECT_NE(now, before) << i;
    EXPECT_EQ(now, paths_of(anew())) << i;
    EXPECT_EQ(listed().fingerprint(), anew().fingerprint()) << i;
    before = now;
  }
  EXPECT_EQ(files().size(), 1U);
}

TEST_F(ImageListingTest, OfAFolderThatStillChangesIsNotKept) {
  (void)ImageListing::of(root(), {kept_ / "listings", 0, 3600});
  EXPECT_TRUE(files().empty());
  (void)ImageListing::of(root(), {kept_ / "listings", 3600, 0});  // quick to list
  EXPECT_TRUE(files().empty());
}

TEST_F(ImageListingTest, NothingDamagedIsTaken) {
  const auto expected = paths_of(listed());
  const auto whole = content();
  for (std::size_t at = 0; at < whole.size(); ++at) {
    auto changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x20);
    write(changed);
    ASSERT_EQ(paths_of(listed()), expected) << "byte " << at;
    write(whole.substr(0, at));
    ASSERT_EQ(paths_of(listed()), expected) << at << " bytes";
  }
  // Numbers that lie, with the right hash.
  for (std::size_t at = 16; at + 8 <= whole.size(); at += 8) {
    for (const std::uint64_t lie : {std::uint64_t{1}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
      auto changed = whole;
      std::memcpy(changed.data() + at, &lie, sizeof(lie));
      rehash(changed);
      write(changed);
      const auto listing = listed();
      ASSERT_EQ(paths_of(listing).size(), listing.size());
    }
  }
}

TEST_F(ImageListingTest, OfAnotherRootIsNotTaken) {
  const TestFolder other;
  other.write("x.jpg", "alone");
  (void)listed();
  const auto here = content();
  EXPECT_EQ(paths_of(ImageListing::of(other.path(), keeping())), (std::vector<std::string>{"x.jpg"}));
  for (const auto& file : files()) std::ofstream(file, std::ios::binary) << here;  // as if both had one name
  EXPECT_EQ(paths_of(ImageListing::of(other.path(), keeping())), (std::vector<std::string>{"x.jpg"}));
}

TEST_F(ImageListingTest, WhereNothingCanBeKeptItIsListed) {
  const auto file = kept_.write("file", "no folder");
  EXPECT_EQ(paths_of(ImageListing::of(root(), {file + "/listings", 0, 0})), paths_of(anew()));
}

}  // namespace
}  // namespace oxytorch::data
