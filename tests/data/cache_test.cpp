#include "oxytorch/data/cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "data/sample_entry.h"
#include "oxytorch/data/order.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

using testing::HasSubstr;

namespace fs = std::filesystem;

constexpr std::int64_t kNeverAgain = std::numeric_limits<std::int64_t>::max();

View bytes_of(const std::string& text) { return own(text).data; }

std::string content_of(const std::string& key) { return key + " holds " + std::string(100, 'x'); }

TEST(Cache, GivesBackWhatWasPut) {
  Cache cache({.memory = "1MB"});
  EXPECT_FALSE(cache.find("a").has_value());
  cache.put("a", bytes_of("one"), 5);
  cache.put("", bytes_of(""), 5);
  EXPECT_EQ(cache.find("a")->text(), "one");
  EXPECT_EQ(cache.find("")->text(), "");
  EXPECT_EQ(cache.stats().memory.hits, 2);
  EXPECT_EQ(cache.stats().memory.misses, 1);
  EXPECT_EQ(cache.stats().memory.entries, 2);
  cache.clear();
  EXPECT_FALSE(cache.find("a").has_value());
}

TEST(Cache, LetsGoOfWhatIsUsedLast) {
  Cache cache({.memory = "350"});
  cache.put("a", bytes_of(std::string(99, 'a')), 10);
  cache.put("b", bytes_of(std::string(99, 'b')), 30);
  cache.put("c", bytes_of(std::string(99, 'c')), 20);
  cache.put("d", bytes_of(std::string(99, 'd')), 5);
  EXPECT_FALSE(cache.find("b").has_value());
  EXPECT_TRUE(cache.find("a") && cache.find("c") && cache.find("d"));
  cache.put("e", bytes_of(std::string(99, 'e')), kNeverAgain);
  EXPECT_FALSE(cache.find("e").has_value()) << "not kept: all others are used sooner";
  cache.put("f", bytes_of(std::string(999, 'f')), 0);
  EXPECT_FALSE(cache.find("f").has_value()) << "larger than the cache";
  EXPECT_EQ(cache.stats().memory.entries, 3);
}

TEST(Cache, LeastRecentlyUsedGoByPriorityThenAge) {
  Cache cache({.memory = "350", .policy = "lru"});
  cache.put("a", bytes_of(std::string(99, 'a')), 0, 1);
  static_cast<void>(cache.find("nothing"));
  cache.put("b", bytes_of(std::string(99, 'b')), 0);
  static_cast<void>(cache.find("nothing"));
  cache.put("c", bytes_of(std::string(99, 'c')), 0);
  if (const auto b = cache.find("b")) cache.put("b", *b, 0);
  cache.put("d", bytes_of(std::string(99, 'd')), 0);
  EXPECT_FALSE(cache.find("c").has_value()) << "b was used after it";
  EXPECT_TRUE(cache.find("a") && cache.find("b") && cache.find("d"));
}

TEST(Cache, EntriesAge) {
  Cache cache({.memory = "1MB", .ttl_seconds = 0.5});
  cache.put("a", bytes_of("one"), 1);
  EXPECT_TRUE(cache.find("a").has_value());
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_FALSE(cache.find("a").has_value());
}

class DiskCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("cache" + std::to_string(::getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  [[nodiscard]] CacheOptions options(const std::string& disk = "1MB") const {
    return {.memory = "0", .disk = disk, .folder = folder_.string()};
  }
  [[nodiscard]] std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      if (entry.is_regular_file()) found.push_back(entry.path());
    }
    return found;
  }
  fs::path folder_;
};

TEST_F(DiskCacheTest, OutlivesTheProcessAndIsShared) {
  Cache one(options()), other(options());
  one.put("a", bytes_of(content_of("a")), 5);
  EXPECT_EQ(other.find("a")->text(), content_of("a"));
  Cache later(options());
  EXPECT_EQ(later.find("a")->text(), content_of("a"));
  EXPECT_EQ(later.stats().disk.entries, 1);
  EXPECT_EQ(later.stats().disk.hits, 1);
}

TEST_F(DiskCacheTest, KeepsItsLimit) {
  Cache cache(options("2000"));
  for (int i = 0; i < 50; ++i) cache.put("key " + std::to_string(i), bytes_of(content_of("x")), 100 - i);
  std::uintmax_t bytes = 0;
  for (const auto& file : files()) bytes += fs::file_size(file);
  EXPECT_LE(bytes, 2000U);
  EXPECT_EQ(cache.stats().disk.bytes, static_cast<std::int64_t>(bytes));
  EXPECT_GT(cache.stats().disk.evictions, 0);
  EXPECT_TRUE(cache.find("key 49").has_value());
  EXPECT_FALSE(cache.find("key 0").has_value());
}

TEST_F(DiskCacheTest, NothingDamagedIsDelivered) {
  {
    Cache cache(options());
    cache.put("a", bytes_of(content_of("a")), 5);
  }
  const auto path = files().at(0);
  std::string whole;
  {
    std::ifstream file(path, std::ios::binary);
    whole.assign(std::istreambuf_iterator<char>(file), {});
  }
  const auto write = [&](const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; };
  for (std::size_t at = 0; at < whole.size(); ++at) {
    auto changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    write(changed);
    Cache cache(options());
    ASSERT_FALSE(cache.find("a").has_value()) << "byte " << at;
    EXPECT_EQ(cache.stats().disk.damaged, 1);
    EXPECT_FALSE(fs::exists(path)) << "it is removed";
    write(whole.substr(0, at));
    EXPECT_FALSE(Cache(options()).find("a").has_value()) << "cut at " << at;
  }
  write(whole);
  EXPECT_TRUE(Cache(options()).find("a").has_value());
}

TEST_F(DiskCacheTest, AnotherEntrysFileIsNoHit) {
  Cache cache(options());
  cache.put("a", bytes_of(content_of("a")), 5);
  const auto of_a = files().at(0);
  cache.put("b", bytes_of(content_of("b")), 5);
  for (const auto& file : files()) {
    if (file != of_a) fs::copy_file(of_a, file, fs::copy_options::overwrite_existing);
  }
  EXPECT_FALSE(cache.find("b").has_value());
  EXPECT_EQ(cache.stats().disk.damaged, 1);
}

TEST_F(DiskCacheTest, ClearRemovesItsOwnFilesAlone) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "notes.txt") << "mine";
  Cache cache(options());
  cache.put("a", bytes_of("one"), 5);
  cache.clear();
  ASSERT_EQ(files().size(), 1U);
  EXPECT_EQ(files()[0].filename(), "notes.txt");
}

TEST_F(DiskCacheTest, ServesManyThreads) {
  auto both = options("20000");
  both.memory = "5000";
  Cache cache(both);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned seed = 0; seed < 6; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < 400; ++i) {
        const auto key = "key " + std::to_string(random() % 100);
        if (const auto found = cache.find(key)) {
          if (found->text() != content_of(key)) ++wrong;
        } else {
          cache.put(key, bytes_of(content_of(key)), random() % 200);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(cache.stats().memory.hits + cache.stats().disk.hits, 0);
}

TEST(SampleEntry, ComesBackAsItWas) {
  const Sample sample{own(DType::I64, {2}, own("0123456789abcdef").data.bytes), own("text"),
                      own(DType::F32, {0, 3}, {})};
  const auto found = unpack_sample(own(pack_sample(sample, -1, "")).data, 3);
  ASSERT_TRUE(found);
  for (std::size_t i = 0; i < sample.size(); ++i) {
    EXPECT_EQ(found->sample[i].dtype, sample[i].dtype);
    EXPECT_EQ(found->sample[i].shape, sample[i].shape);
    EXPECT_EQ(found->sample[i].data.text(), sample[i].data.text());
  }
  EXPECT_FALSE(unpack_sample(own(pack_sample(sample, -1, "")).data, 2));
  const auto stripped = unpack_sample(own(pack_sample(sample, 1, "coefficients")).data, 3);
  ASSERT_TRUE(stripped);
  EXPECT_EQ(stripped->stripped.text(), "coefficients");
}

TEST(SampleEntry, ShapesThatDoNotFitTheirBytesAreDamage) {
  const auto text = own("0123456789abcdef").data;
  for (const auto& shape :
       std::vector<std::vector<std::int64_t>>{{15},
                                              {-16},
                                              {-4, -4},
                                              {std::int64_t{1} << 62, 1 << 6},
                                              {(std::int64_t{1} << 32) + 1, std::int64_t{1} << 32, 16}}) {
    const Sample lying{Value{DType::U8, shape, text}};
    EXPECT_FALSE(unpack_sample(own(pack_sample(lying, -1, "")).data, 1)) << testing::PrintToString(shape);
  }
}

TEST(Cache, RefusesWhatCannotBeMeant) {
  EXPECT_THROW(Cache({.memory = "many"}), Error);
  EXPECT_THROW(Cache({.policy = "random"}), Error);
  EXPECT_THROW(Cache({.ttl_seconds = -1}), Error);
  EXPECT_THROW(Cache({.remote = "/somewhere"}), Error);
  EXPECT_THROW(Cache({.disk = "1MB", .folder = "/proc/nowhere"}), Error);
}

}  // namespace
}  // namespace oxytorch::data
