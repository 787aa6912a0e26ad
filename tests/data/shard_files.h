/// What tests of shard formats share: folders that go with the test, files made by hand, and files damaged on purpose.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "oxytorch/data/dataset.h"
#include "oxytorch/error.h"
#include "test_folder.h"

namespace oxytorch::data::shard_files {

inline std::string content_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

/// The bytes of a number.
template <class T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

/// u32 count, u32 offsets, items: a shard of MDS and LitData.
inline std::string counted_shard(const std::vector<std::string>& items) {
  const auto head = static_cast<std::uint32_t>(4 * (items.size() + 2));
  std::string table = raw(static_cast<std::uint32_t>(items.size())), body;
  for (const auto& item : items) {
    table += raw(head + static_cast<std::uint32_t>(body.size()));
    body += item;
  }
  return table + raw(head + static_cast<std::uint32_t>(body.size())) + body;
}

inline std::string text_of(const Value& value) { return std::string(value.data.text()); }

template <class T>
T number_of(const Value& value) {
  T number{};
  EXPECT_EQ(value.data.bytes.size(), sizeof(T));
  std::memcpy(&number, value.data.bytes.data(), std::min(sizeof(T), value.data.bytes.size()));
  return number;
}

/// All samples as one text; each byte is touched.
inline std::string all_of(const Dataset& dataset) {
  std::ostringstream text;
  for (std::int64_t i = 0; i < dataset.size(); ++i) {
    dataset.will_read(i);
    EXPECT_FALSE(dataset.place(i).empty());
    for (const auto& value : dataset.read(i)) {
      text << name(value.dtype) << '[';
      for (const auto dimension : value.shape) text << dimension << ' ';
      text << ']' << value.data.text() << ';';
    }
  }
  return text.str();
}

using OpenShards = std::shared_ptr<const Dataset> (*)(const std::string&);

/// Opens and reads damaged data. Nothing but an Error may come of it; the text of what was read without one.
inline std::string read_or_refuse(OpenShards open, const std::string& location) {
  try {
    const auto dataset = open(location);
    return dataset ? all_of(*dataset) : "";
  } catch (const Error& error) {
    EXPECT_GT(std::strlen(error.what()), 10U);
    return "";
  }
}

/// Cuts a file at every byte: what is read then must be what was written, or nothing.
inline void cut_everywhere(OpenShards open, const std::string& location, const std::string& file) {
  const auto whole = content_of(file), right = read_or_refuse(open, location);
  ASSERT_FALSE(right.empty());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    std::ofstream(file, std::ios::binary) << whole.substr(0, length);
    const auto read = read_or_refuse(open, location);
    EXPECT_TRUE(read.empty() || read == right) << "cut at " << length << " of " << whole.size();
  }
  std::ofstream(file, std::ios::binary) << whole;
}

/// Changes a few bytes at random, many times; those before `first` at least half of the time.
inline void change_at_random(OpenShards open, const std::string& location, const std::string& file, std::size_t first,
                             int times) {
  const auto whole = content_of(file);
  std::mt19937 random(20);
  constexpr unsigned char kTelling[] = {0, 1, 0x7F, 0x80, 0xFF};
  for (int i = 0; i < times; ++i) {
    auto content = whole;
    for (auto changes = 1 + random() % 4; changes > 0; --changes) {
      const auto end = random() % 2 == 0 ? std::min(first, content.size()) : content.size();
      content[random() % end] = static_cast<char>(random() % 2 == 0 ? kTelling[random() % 5] : random() % 256);
    }
    std::ofstream(file, std::ios::binary) << content;
    (void)read_or_refuse(open, location);
  }
  std::ofstream(file, std::ios::binary) << whole;
}

/// Several threads read all samples, each in an order of its own.
inline void read_by_threads(const Dataset& dataset) {
  std::vector<std::string> expected;
  const auto sample = [&](std::int64_t i) {
    std::string text;
    for (const auto& value : dataset.read(i)) text += text_of(value) + ";";
    return text;
  };
  for (std::int64_t i = 0; i < dataset.size(); ++i) expected.push_back(sample(i));
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937 random(seed);
        for (int k = 0; k < 300; ++k) {
          const auto i = static_cast<std::int64_t>(random() % static_cast<std::size_t>(dataset.size()));
          dataset.will_read(i);
          if (sample(i) != expected[static_cast<std::size_t>(i)]) ++wrong;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
}

/// The message of the Error that opening and reading ends with.
inline std::string refusal(OpenShards open, const std::string& location) {
  try {
    const auto dataset = open(location);
    if (dataset) (void)all_of(*dataset);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

}  // namespace oxytorch::data::shard_files
