// MixUp and CutMix: sample i beside sample i - 1, by the share that the labels say.
#include "oxytorch/data/mix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/isa.h"

namespace oxytorch::data {
namespace {

template <class T>
Column column_of(const char* column, DType dtype, std::vector<std::int64_t> shape, const std::vector<T>& values) {
  Column made;
  made.name = column;
  made.array = own(dtype, std::move(shape), std::as_bytes(std::span(values)));
  return made;
}

template <class T>
std::vector<T> values_of(const Batch& batch, std::size_t column) {
  const auto& bytes = batch.columns[column].array.data.bytes;
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Images with a value of their own everywhere: sample i is 10 (i + 1), labels are i.
template <class T>
Batch batch_of(std::int64_t size, std::vector<std::int64_t> image, DType dtype, const std::function<T(float)>& to) {
  image.insert(image.begin(), size);
  const auto each = static_cast<std::size_t>(image[1] * image[2] * image[3]);
  std::vector<T> pixels;
  std::vector<std::int64_t> labels;
  for (std::int64_t i = 0; i < size; ++i) {
    pixels.insert(pixels.end(), each, to(10.0F * static_cast<float>(i + 1)));
    labels.push_back(i);
  }
  Batch batch;
  batch.size = size;
  batch.columns.push_back(column_of("image", dtype, image, pixels));
  batch.columns.push_back(column_of("label", DType::I64, {size}, labels));
  return batch;
}

Batch batch_of_floats(std::int64_t size, std::vector<std::int64_t> image) {
  return batch_of<float>(size, std::move(image), DType::F32, [](float value) { return value; });
}

// The share that a sample keeps, from its soft label.
float share_of(const Batch& batch, std::int64_t classes) {
  EXPECT_EQ(batch.columns[1].array.dtype, DType::F32);
  EXPECT_EQ(batch.columns[1].array.shape, (std::vector<std::int64_t>{batch.size, classes}));
  const auto labels = values_of<float>(batch, 1);
  const float share = labels[0];
  for (std::int64_t i = 0; i < batch.size; ++i) {
    const std::int64_t before = (i + batch.size - 1) % batch.size;
    for (std::int64_t c = 0; c < classes; ++c) {
      const float expected = (c == i ? share : 0) + (c == before ? 1 - share : 0);
      EXPECT_NEAR(labels[static_cast<std::size_t>(i * classes + c)], expected, 1e-6) << i << ", " << c;
    }
  }
  return share;
}

TEST(Mix, MixUpWeighsNeighbours) {
  const auto stage = mix_up(1, 4);
  EXPECT_EQ(stage->name(), "MixUp");
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Batch batch = batch_of_floats(3, {3, 5, 7});
    PhiloxStream random(seed);
    stage->apply(batch, random);
    const float share = share_of(batch, 4);
    EXPECT_GE(share, 0);
    EXPECT_LE(share, 1);
    const float others[] = {30, 10, 20};
    const auto values = values_of<float>(batch, 0);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t sample = i / (3 * 5 * 7);
      const float own_value = 10 * static_cast<float>(sample + 1);
      ASSERT_NEAR(values[i], share * own_value + (1 - share) * others[sample], 1e-4);
    }
  }
}

TEST(Mix, CutMixPutsABoxOfTheSampleBefore) {
  const auto stage = cut_mix(1, 3);
  EXPECT_EQ(stage->name(), "CutMix");
  constexpr std::int64_t kHeight = 9, kWidth = 13;
  int boxes = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    for (const bool last : {false, true}) {
      Batch batch = last ? batch_of_floats(3, {kHeight, kWidth, 3}) : batch_of_floats(3, {3, kHeight, kWidth});
      PhiloxStream random(seed);
      stage->apply(batch, random);
      const float share = share_of(batch, 3);
      const auto values = values_of<float>(batch, 0);
      const float others[] = {30, 10, 20};
      for (std::int64_t sample = 0; sample < 3; ++sample) {
        std::int64_t cut = 0, left = kWidth, right = 0, top = kHeight, bottom = 0;
        for (std::int64_t y = 0; y < kHeight; ++y) {
          for (std::int64_t x = 0; x < kWidth; ++x) {
            const auto at = [&](std::int64_t c) {
              const std::int64_t of_image = last ? (y * kWidth + x) * 3 + c : (c * kHeight + y) * kWidth + x;
              return values[static_cast<std::size_t>(sample * 3 * kHeight * kWidth + of_image)];
            };
            ASSERT_TRUE(at(0) == at(1) && at(1) == at(2));
            if (at(0) == 10 * static_cast<float>(sample + 1)) continue;
            ASSERT_EQ(at(0), others[sample]);
            ++cut;
            left = std::min(left, x), right = std::max(right, x + 1);
            top = std::min(top, y), bottom = std::max(bottom, y + 1);
          }
        }
        EXPECT_NEAR(share, 1 - static_cast<double>(cut) / (kHeight * kWidth), 1e-6);
        if (cut > 0) {
          EXPECT_EQ(cut, (right - left) * (bottom - top));
        }
        boxes += cut > 0 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(boxes, 60);
}

TEST(Mix, WorksOnEveryDtypeWithTheSameBitsOnEveryInstructionSet) {
  const auto bf16 = [](float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); };
  const auto narrow_of = [&](DType dtype) {
    // As float16, 10 to 50 are their bf16's exponent and mantissa moved: 0x4900 is 10.
    const std::uint16_t halves[] = {0x4900, 0x4D00, 0x4F80, 0x5100, 0x5240};
    return batch_of<std::uint16_t>(5, {1, 3, 7}, dtype, [=](float value) {
      return dtype == DType::BF16 ? bf16(value) : halves[static_cast<std::size_t>(value / 10) - 1];
    });
  };
  const auto mixed = [&](DType dtype, std::uint64_t seed) {
    Batch batch =
        dtype == DType::U8
            ? batch_of<std::uint8_t>(5, {1, 3, 7}, dtype, [](float value) { return static_cast<std::uint8_t>(value); })
            : narrow_of(dtype);
    PhiloxStream random(seed);
    mix_up(0.4, 5)->apply(batch, random);
    return batch;
  };
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const Batch bytes = mixed(DType::U8, seed);
    const float share = share_of(bytes, 5);
    const float exact = share * 10 + (1 - share) * 50;
    EXPECT_EQ(values_of<std::uint8_t>(bytes, 0)[0], static_cast<std::uint8_t>(std::lround(exact)));
    const auto wide = std::uint32_t{values_of<std::uint16_t>(mixed(DType::BF16, seed), 0)[20]} << 16;
    EXPECT_NEAR(std::bit_cast<float>(wide), exact, exact / 256);
    const std::uint16_t half = values_of<std::uint16_t>(mixed(DType::F16, seed), 0)[20];
    EXPECT_NEAR(std::ldexp(1024 + (half & 1023), (half >> 10) - 25), exact, exact / 2048);
    for (const DType dtype : {DType::U8, DType::BF16, DType::F16}) {
      const auto expected = values_of<std::uint8_t>(mixed(dtype, seed), 0);
      for (const Isa isa : supported_isas()) {
        const ScopedIsa scope(isa);
        EXPECT_EQ(values_of<std::uint8_t>(mixed(dtype, seed), 0), expected) << name(isa) << ", " << name(dtype);
      }
    }
  }
}

TEST(Mix, DrawsFromBeta) {
  for (const double alpha : {0.05, 0.2, 1.0, 4.0}) {
    const auto stage = mix_up(alpha, 2);
    PhiloxStream random(11);
    double sum = 0, squares = 0;
    constexpr int kDraws = 4000;
    for (int i = 0; i < kDraws; ++i) {
      Batch batch = batch_of_floats(2, {1, 1, 1});
      stage->apply(batch, random);
      const double share = values_of<float>(batch, 1)[0];
      ASSERT_TRUE(share >= 0 && share <= 1);
      sum += share;
      squares += (share - 0.5) * (share - 0.5);
    }
    EXPECT_NEAR(sum / kDraws, 0.5, 0.03) << alpha;
    const double variance = 1 / (4 * (2 * alpha + 1));
    EXPECT_NEAR(squares / kDraws / variance, 1, 0.08) << alpha;
  }
}

TEST(Mix, OneSampleStaysAndSoftLabelsAreMixedAgain) {
  Batch one = batch_of_floats(1, {3, 4, 4});
  PhiloxStream random(1);
  cut_mix(1, 2)->apply(one, random);
  mix_up(1, 2)->apply(one, random);
  EXPECT_EQ(values_of<float>(one, 1), (std::vector<float>{1, 0}));
  for (const float value : values_of<float>(one, 0)) EXPECT_FLOAT_EQ(value, 10);
  Batch two = batch_of_floats(2, {3, 4, 4});
  cut_mix(1, 2)->apply(two, random);
  mix_up(1, 2)->apply(two, random);
  const auto labels = values_of<float>(two, 1);
  EXPECT_NEAR(labels[0] + labels[1], 1, 1e-6);
  EXPECT_NEAR(labels[0], labels[3], 1e-6);
}

TEST(Mix, ReadsLabelsOfAnyIntegerInAnyColumn) {
  Batch batch = batch_of_floats(2, {3, 4, 4});
  batch.columns[0].name = "jpg";
  batch.columns[1] = column_of("cls", DType::U8, {2}, std::vector<std::uint8_t>{200, 7});
  PhiloxStream random(1);
  mix_up(1, 256, {"jpg", "cls"})->apply(batch, random);
  const auto labels = values_of<float>(batch, 1);
  EXPECT_FLOAT_EQ(labels[200] + labels[7], 1);
  EXPECT_FLOAT_EQ(labels[256 + 200], labels[7]);
}

TEST(Mix, SaysWhatIsWrong) {
  for (const double alpha : {0.0, -1.0, std::nan(""), HUGE_VAL}) EXPECT_THROW(mix_up(alpha, 2), Error);
  EXPECT_THROW(cut_mix(1, 0), Error);
  const auto refused = [](const std::function<void(Batch&)>& spoil) {
    Batch batch = batch_of_floats(2, {3, 4, 4});
    spoil(batch);
    const auto before = batch.columns.empty() ? std::vector<float>() : values_of<float>(batch, 0);
    PhiloxStream random(1);
    for (const auto& stage : {mix_up(1, 2), cut_mix(1, 2)}) EXPECT_THROW(stage->apply(batch, random), Error);
    if (!batch.columns.empty()) {
      EXPECT_EQ(values_of<float>(batch, 0), before);
    }
  };
  refused([](Batch& batch) { batch.columns.clear(); });
  refused([](Batch& batch) { batch.columns[0].name = "picture"; });
  refused([](Batch& batch) { batch.columns[0].array.shape = {2, 48}; });
  refused([](Batch& batch) { batch.columns[0].array.shape = {2, 2, 6, 4}; });
  refused([](Batch& batch) { batch.columns[0].array.shape = {2, 3, 400, 400}; });
  refused([](Batch& batch) { batch.columns[0].array.shape = {0, 3, 4, 4}; });
  refused([](Batch& batch) { batch.columns[0].array.dtype = DType::I32; });
  refused(
      [](Batch& batch) { batch.columns[1] = column_of("label", DType::I64, {2}, std::vector<std::int64_t>{0, 2}); });
  refused(
      [](Batch& batch) { batch.columns[1] = column_of("label", DType::I64, {2}, std::vector<std::int64_t>{-1, 0}); });
  refused([](Batch& batch) { batch.columns[1] = column_of("label", DType::I64, {2}, std::vector<std::int64_t>{0}); });
  refused([](Batch& batch) { batch.columns[1] = column_of("label", DType::I64, {1}, std::vector<std::int64_t>{0}); });
  refused([](Batch& batch) { batch.columns[1] = column_of("label", DType::F64, {2}, std::vector<double>{0, 1}); });
}

}  // namespace
}  // namespace oxytorch::data
