/// Tiles of scores that a mask hides whole.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/tiles.h"

namespace oxytorch::ops {

/// Those in which it is minus infinity everywhere, so that their weights are 0.
class HiddenTiles {
 public:
  HiddenTiles() = default;
  /// Of a mask that is added: float32, samples x heads x queries x keys, where what shares a mask has stride 0 and is
  /// looked at once.
  HiddenTiles(const at::Tensor& mask, const Tiled& queries, const Tiled& keys);

  [[nodiscard]] bool holds(std::int64_t sample, std::int64_t head, std::int64_t key_tile,
                           std::int64_t query_tile) const {
    if (hidden_.empty()) return false;
    const std::int64_t part = (sample % samples_) * heads_ + head % heads_;
    return hidden_[static_cast<std::size_t>((part * query_tiles_ + query_tile) * key_tiles_ + key_tile)] != 0;
  }

 private:
  std::int64_t samples_ = 1, heads_ = 1, query_tiles_ = 0, key_tiles_ = 0;
  std::vector<std::uint8_t> hidden_;  // samples x heads x tiles of queries x tiles of keys; empty: none
};

}  // namespace oxytorch::ops
