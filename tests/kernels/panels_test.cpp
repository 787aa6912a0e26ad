// pack_panels() against its definition, on every instruction set.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "oxytorch/isa.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::kernels {
namespace {

struct Sizes {
  std::int64_t rows, columns, terms, stride;
};

std::uint16_t narrow(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }

void check(const Sizes& sizes, ElementType element) {
  const auto [rows, columns, terms, stride] = sizes;
  const auto bytes = static_cast<std::int64_t>(element == ElementType::F32 ? 4 : 2);
  std::vector<std::byte> from(static_cast<std::size_t>(rows * stride * bytes));
  // Whole numbers below 256 are bfloat16 too.
  const auto value = [&](std::int64_t i, std::int64_t j) { return static_cast<float>((7 * i + 3 * j) % 256 - 100); };
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < stride; ++j) {
      std::byte* at = from.data() + (i * stride + j) * bytes;
      const float one = value(i, j);
      const std::uint16_t half = narrow(one);
      std::memcpy(at, bytes == 4 ? static_cast<const void*>(&one) : &half, static_cast<std::size_t>(bytes));
    }
  }
  const std::int64_t panels = (columns + kTile - 1) / kTile, panel = (terms + 16) * kTile;
  std::vector<std::uint16_t> to(static_cast<std::size_t>(panels * panel), 0xABCD);
  pack_panels({element, from.data(), stride, rows, columns}, terms, to.data(), panel);
  for (std::int64_t p = 0; p < panels; ++p) {
    for (std::int64_t i = 0; i < terms + 16; ++i) {
      for (std::int64_t j = 0; j < kTile; ++j) {
        const std::int64_t column = p * kTile + j;
        const float expected = i < rows && column < columns ? value(i, column) : 0;
        const auto packed = to[static_cast<std::size_t>(p * panel + (i / 2 * kTile + j) * 2 + i % 2)];
        ASSERT_EQ(packed, i < terms ? narrow(expected) : 0xABCD) << "row " << i << ", column " << column;
      }
    }
  }
}

TEST(PackPanels, HoldsPairsOfRowsAndZeros) {
  for (const Isa isa : supported_isas()) {
    SCOPED_TRACE(name(isa));
    const ScopedIsa scope(isa);
    for (const ElementType element : {ElementType::BF16, ElementType::F32}) {
      for (const Sizes& sizes :
           {Sizes{1, 1, 16, 1}, Sizes{16, 64, 16, 64}, Sizes{17, 65, 32, 70}, Sizes{64, 128, 64, 128},
            Sizes{63, 200, 64, 333}, Sizes{256, 192, 256, 192}, Sizes{100, 63, 112, 64}, Sizes{5, 130, 208, 131}}) {
        SCOPED_TRACE(testing::Message() << sizes.rows << " x " << sizes.columns << " of " << sizes.terms << " terms");
        check(sizes, element);
      }
    }
  }
}

}  // namespace
}  // namespace oxytorch::kernels
