#include "ops/hidden_tiles.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <limits>
#include <utility>

namespace oxytorch::ops {

HiddenTiles::HiddenTiles(const at::Tensor& mask, const Tiled& queries, const Tiled& keys)
    : samples_(mask.stride(0) == 0 ? 1 : mask.size(0)),
      heads_(mask.stride(1) == 0 ? 1 : mask.size(1)),
      query_tiles_(queries.tiles),
      key_tiles_(keys.tiles) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  const auto* data = mask.const_data_ptr<float>();
  const auto is_hidden = [&](const float* from, std::int64_t rows, std::int64_t columns) {
    for (std::int64_t j = 0; j < rows; ++j) {
      for (std::int64_t i = 0; i < columns; ++i) {
        if (from[j * mask.stride(2) + i * mask.stride(3)] != kHidden) return false;
      }
    }
    return true;
  };
  std::vector<std::uint8_t> found(static_cast<std::size_t>(samples_ * heads_ * query_tiles_ * key_tiles_));
  std::atomic<bool> is_any = false;
  at::parallel_for(0, samples_ * heads_ * query_tiles_, 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) {
      const std::int64_t part = begin / query_tiles_, tile = begin % query_tiles_;
      const float* from =
          data + part / heads_ * mask.stride(0) + part % heads_ * mask.stride(1) + queries.begin(tile) * mask.stride(2);
      const std::int64_t rows = mask.stride(2) == 0 ? 1 : queries.used(tile);
      for (std::int64_t k = 0; k < key_tiles_; ++k) {
        if (!is_hidden(from + keys.begin(k) * mask.stride(3), rows, keys.used(k))) continue;
        found[static_cast<std::size_t>(begin * key_tiles_ + k)] = 1;
        is_any = true;
      }
    }
  });
  if (is_any) hidden_ = std::move(found);
}

}  // namespace oxytorch::ops
