/// A dataset whose samples are counted, and what tests of the loader look at.
#pragma once

#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "oxytorch/data/loader.h"
#include "oxytorch/error.h"

namespace oxytorch::data {

template <typename Number>
Value scalar(DType dtype, Number number) {
  return own(dtype, {}, std::as_bytes(std::span(&number, 1)));
}

/// Sample i is the number i, "text i", i % 4 + 1 numbers, and where asked for an image of one colour.
class Counting final : public Dataset {
 public:
  explicit Counting(std::int64_t size, bool images = false, std::set<std::int64_t> damaged = {})
      : size_(size), images_(images), damaged_(std::move(damaged)) {
    schema_.fields = {{"number", Kind::Array, DType::I64, {}},
                      {"text", Kind::Text, DType::U8, {}},
                      {"some", Kind::Array, DType::I32, {-1}}};
    if (images_) schema_.fields.push_back({"image", Kind::Image, DType::U8, {}});
  }
  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return size_; }
  [[nodiscard]] Sample read(std::int64_t index) const override {
    ++reads;
    OXY_CHECK(!damaged_.contains(index), Io, "damaged at byte 7.");
    std::vector<std::int32_t> some(static_cast<std::size_t>(index % 4 + 1), static_cast<std::int32_t>(index));
    Sample sample{scalar(DType::I64, index), own("text " + std::to_string(index)),
                  own(DType::I32, {index % 4 + 1}, std::as_bytes(std::span(some)))};
    if (images_) {
      const std::vector<std::uint8_t> pixels(4 * 6 * 3, static_cast<std::uint8_t>(index));
      sample.push_back(own(DType::U8, {4, 6, 3}, std::as_bytes(std::span(pixels))));
    }
    return sample;
  }
  [[nodiscard]] std::string place(std::int64_t index) const override { return "counted " + std::to_string(index); }
  [[nodiscard]] std::string fingerprint() const override { return "counting" + std::to_string(size_); }
  [[nodiscard]] bool remote() const noexcept override { return is_remote; }
  [[nodiscard]] std::string format() const override { return "counting"; }
  mutable std::atomic<int> reads{0};
  bool is_remote = false;

 private:
  std::int64_t size_;
  bool images_;
  std::set<std::int64_t> damaged_;
  Schema schema_;
};

inline std::vector<std::int64_t> numbers_of(const Batch& batch) {
  const auto& array = batch.columns.at(0).array;
  std::vector<std::int64_t> numbers(array.data.bytes.size() / 8);
  std::memcpy(numbers.data(), array.data.bytes.data(), array.data.bytes.size());
  return numbers;
}

/// All that a batch holds, as text.
inline std::string text_of_batch(const Batch& batch) {
  std::string text;
  for (const auto& column : batch.columns) {
    text += column.name;
    text += column.array.data.text();
    for (const auto each : column.lengths) text += std::to_string(each) + ",";
    for (const auto& each : column.texts) text += each;
  }
  return text;
}

inline std::vector<Batch> epoch_of(Loader& loader) {
  std::vector<Batch> batches;
  while (auto batch = loader.next()) batches.push_back(*std::move(batch));
  return batches;
}

/// Writes a random number into the sample: what augmentation does.
inline StagePtr randomly() {
  return stage("randomly", [](Item& item, PhiloxStream& random) {
    item.sample[0] = scalar(DType::I64, static_cast<std::int64_t>(random.next64()));
  });
}

}  // namespace oxytorch::data
