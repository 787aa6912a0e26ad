#include "oxytorch/kernels/attention.h"

#include <algorithm>
#include <limits>

#include "kernels/operators_table.h"

namespace oxytorch::kernels {

Rows Rows::part(std::int64_t first, std::int64_t count) const {
  const std::int64_t size = element == ElementType::F32 ? 4 : 2;
  return {element, static_cast<const char*>(data) + first * stride * size,
          stride,  count,
          columns, following + rows - first - count};
}

void SoftmaxState::reset() {
  std::fill_n(largest, kTile, -std::numeric_limits<float>::infinity());
  std::fill_n(sum, kTile, 0.0F);
}

void load_tile(TileFormat format, const Rows& from, std::int64_t rows, std::int64_t width, void* tile) {
  operator_table(active_isa()).load_tile(format, from, rows, width, tile);
}

void make_operand(TileFormat format, Operand operand, const void* tile, std::int64_t rows, std::int64_t width,
                  void* work, void* to, std::int64_t stride) {
  operator_table(active_isa()).make_operand(format, operand, tile, rows, width, work, to, stride);
}

void pack_operand(Operand operand, const Rows& from, std::int64_t rows, std::int64_t width, void* to,
                  std::int64_t stride) {
  operator_table(active_isa()).pack_operand(operand, from, rows, width, to, stride);
}

void pack_panels(const Rows& from, std::int64_t terms, void* to, std::int64_t panel) {
  operator_table(active_isa()).pack_panels(from, terms, to, panel);
}

void apply_rule(const ScoreRule& rule, std::int64_t rows, std::int64_t columns, float* scores) {
  operator_table(active_isa()).apply_rule(rule, rows, columns, scores);
}

void dropout_tile(const TileDropout& rule, std::int64_t rows, std::uint32_t* keep) {
  operator_table(active_isa()).dropout_tile(rule, rows, keep);
}

bool softmax_tile(TileFormat format, float factor, std::int64_t rows, std::int64_t columns, const float* scores,
                  const std::uint32_t* keep, SoftmaxState& state, float* correction, void* weights) {
  return operator_table(active_isa())
      .softmax_tile(format, factor, rows, columns, scores, keep, state, correction, weights);
}

void scale_columns(std::int64_t rows, const float* factors, float* tile) {
  operator_table(active_isa()).scale_columns(rows, factors, tile);
}

void softmax_gradient(const SoftmaxGradient& tile) { operator_table(active_isa()).softmax_gradient(tile); }

void dot_rows(const Rows& a, const Rows& b, float* to) { operator_table(active_isa()).dot_rows(a, b, to); }

void store_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float factor,
                const float* factors, ElementType element, void* to, std::int64_t to_stride, const float* added,
                bool relu) {
  operator_table(active_isa())
      .store_rows(from, stride, rows, columns, factor, factors, element, to, to_stride, added, relu);
}

void add_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* to,
              std::int64_t to_stride) {
  operator_table(active_isa()).add_rows(from, stride, rows, columns, to, to_stride);
}

void sum_columns(const Rows& from, float* to) { operator_table(active_isa()).sum_columns(from, to); }

void transpose_words(const void* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, void* to,
                     std::int64_t to_stride) {
  operator_table(active_isa()).transpose_words(from, stride, rows, columns, to, to_stride);
}

}  // namespace oxytorch::kernels
