/// Small files for the tests of readers, whole and damaged.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "oxytorch/data/dataset.h"
#include "oxytorch/error.h"
#include "test_folder.h"

namespace oxytorch::data {

/// The bytes of numbers, as they lie in a little-endian file.
template <class... T>
std::string packed(T... numbers) {
  std::string bytes;
  (bytes.append(reinterpret_cast<const char*>(&numbers), sizeof(numbers)), ...);
  return bytes;
}

template <class T, class... N>
std::string packed_as(N... numbers) {
  return packed(static_cast<T>(numbers)...);
}

/// The elements of a value.
template <class T>
std::vector<T> elements_of(const Value& value) {
  EXPECT_EQ(value.data.bytes.size(), static_cast<std::size_t>(value.elements()) * size_of(value.dtype));
  EXPECT_EQ(sizeof(T), size_of(value.dtype));
  std::vector<T> elements(value.data.bytes.size() / sizeof(T));
  if (!elements.empty()) std::memcpy(elements.data(), value.data.bytes.data(), value.data.bytes.size());
  return elements;
}

/// All of a sample: dtypes, shapes and bytes.
inline std::string content_of(const Sample& sample) {
  std::string text;
  for (const auto& value : sample) {
    EXPECT_EQ(value.data.bytes.size(), static_cast<std::size_t>(value.elements()) * size_of(value.dtype));
    text += name(value.dtype);
    for (const auto dimension : value.shape) text += " " + std::to_string(dimension);
    text += ":";
    text += value.data.text();
  }
  return text;
}

/// A sample that goes straight to memory is the one that is read.
inline void expect_read_into(const Dataset& dataset, std::int64_t index, const Sample& sample) {
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte*> fields;
  for (const auto& value : sample) memory.emplace_back(value.data.bytes.size());
  for (auto& field : memory) fields.push_back(field.data());
  dataset.read_into(index, fields);
  for (std::size_t k = 0; k < sample.size(); ++k) {
    EXPECT_TRUE(std::equal(memory[k].begin(), memory[k].end(), sample[k].data.bytes.begin())) << index;
  }
}

/// The contents of the first thousand samples.
inline std::vector<std::string> contents_of(const Dataset& dataset) {
  std::vector<std::string> contents;
  for (std::int64_t i = 0; i < std::min<std::int64_t>(dataset.size(), 1000); ++i) {
    dataset.will_read(i);
    const Sample sample = dataset.read(i);
    contents.push_back(content_of(sample));
    if (dataset.reads_into()) expect_read_into(dataset, i, sample);
    EXPECT_FALSE(dataset.place(i).empty());
  }
  return contents;
}

inline void expect_error(ErrorCode code, const std::string& part, const std::function<void()>& act) {
  try {
    act();
    ADD_FAILURE() << "no error, and one with '" << part << "' was expected";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

using TestOpener = std::function<std::shared_ptr<const Dataset>(const std::string&)>;

/// Cuts a file at each byte: what is left is refused, or gives the samples of before.
inline void expect_truncations_safe(const std::string& path, const std::string& whole, const TestOpener& open) {
  const auto expected = contents_of(*open(path));
  for (std::size_t length = 0; length < whole.size(); ++length) {
    std::filesystem::resize_file(path, 0);
    std::ofstream(path, std::ios::binary) << whole.substr(0, length);
    try {
      const auto dataset = open(path);
      if (!dataset) continue;
      ASSERT_LE(dataset->size(), static_cast<std::int64_t>(expected.size())) << length;
      for (std::int64_t i = 0; i < dataset->size(); ++i) {
        ASSERT_EQ(content_of(dataset->read(i)), expected[static_cast<std::size_t>(i)]) << length;
      }
    } catch (const Error& error) {
      ASSERT_NE(error.code(), ErrorCode::Internal) << error.what();
    }
  }
  std::ofstream(path, std::ios::binary) << whole;
}

/// Changes bytes at random: nothing but an Error may come of it.
inline void expect_mutations_safe(const std::string& path, const std::string& whole, const TestOpener& open,
                                  int rounds = 2000) {
  std::mt19937 random(7);
  const auto draw = [&](std::size_t below) { return std::uniform_int_distribution<std::size_t>(0, below - 1)(random); };
  for (int round = 0; round < rounds; ++round) {
    auto changed = whole;
    for (std::size_t i = 0, changes = 1 + draw(4); i < changes; ++i) {
      static constexpr char kEdges[] = {'\0', '\x01', '\x7f', '\x80', '\xff', '"', '{', ','};
      changed[draw(changed.size())] = draw(2) == 0 ? kEdges[draw(8)] : static_cast<char>(draw(256));
    }
    std::ofstream(path, std::ios::binary) << changed;
    try {
      if (const auto dataset = open(path)) contents_of(*dataset);
    } catch (const Error& error) {
      ASSERT_NE(error.code(), ErrorCode::Internal) << error.what();
    }
  }
  std::ofstream(path, std::ios::binary) << whole;
}

/// Reads all samples by four threads at once.
inline void expect_threads_agree(const Dataset& dataset) {
  const auto expected = contents_of(dataset);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) wrong += contents_of(dataset) != expected;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace oxytorch::data
