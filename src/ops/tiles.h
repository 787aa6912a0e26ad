/// Matrices in tiles, and the memory they lie in.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "optim/dense.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::ops {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

[[nodiscard]] constexpr std::int64_t round_up(std::int64_t count, std::int64_t step) {
  return (count + step - 1) / step * step;
}

/// The tensor with the elements of a row next to each other.
[[nodiscard]] inline at::Tensor dense(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

/// The rows of a dense() matrix.
[[nodiscard]] inline kernels::Rows rows_of(const at::Tensor& matrix) {
  return {optim::element_type(matrix).value(), matrix.const_data_ptr(), matrix.stride(0), matrix.size(0),
          matrix.size(1)};
}

/// The tensor as a dense() matrix of its last dimension: a view where its strides allow.
[[nodiscard]] inline at::Tensor as_rows(const at::Tensor& tensor) {
  const at::Tensor rows = tensor.dim() < 2 ? tensor.reshape({1, -1}) : tensor.flatten(0, -2);
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

/// Rows or columns of a matrix, cut into tiles.
struct Tiled {
  explicit Tiled(std::int64_t count) : count(count), tiles(round_up(count, kernels::kTile) / kernels::kTile) {}
  [[nodiscard]] std::int64_t begin(std::int64_t tile) const { return tile * kernels::kTile; }
  [[nodiscard]] std::int64_t used(std::int64_t tile) const { return std::min(kernels::kTile, count - begin(tile)); }
  [[nodiscard]] std::int64_t padded(std::int64_t tile) const { return round_up(used(tile), kernels::kTileStep); }
  std::int64_t count, tiles;
};

/// Memory by pieces, from torch's allocator; not cleared.
class Scratch {
 public:
  std::byte* bytes(std::int64_t count) {
    pieces_.push_back(at::empty({count}, at::kByte));
    return static_cast<std::byte*>(pieces_.back().mutable_data_ptr());
  }
  float* floats(std::int64_t count) {
    return reinterpret_cast<float*>(bytes(count * static_cast<std::int64_t>(sizeof(float))));
  }

 private:
  std::vector<at::Tensor> pieces_;
};

/// Tiles of `width` elements a row, as operands.
class Packed {
 public:
  Packed() = default;
  Packed(Scratch& scratch, kernels::TileFormat format, std::int64_t width, std::int64_t tiles)
      : size_(kernels::kTile * width * (format == kernels::TileFormat::BFloat16 ? 2 : 4)),
        data_(scratch.bytes(size_ * tiles)) {}
  [[nodiscard]] std::byte* operator[](std::int64_t tile) const { return data_ + size_ * tile; }

 private:
  std::int64_t size_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace oxytorch::ops
