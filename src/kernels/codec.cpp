#include "oxytorch/kernels/codec.h"

#include "kernels/step_tail_table.h"
#include "oxytorch/random.h"

namespace oxytorch::kernels {
namespace {

const KernelTable& table() { return kernel_table(active_isa()); }
std::int64_t count_of(std::span<const float> values) { return static_cast<std::int64_t>(values.size()); }

}  // namespace

void encode_state(StateCode code, std::span<const float> values, void* codes, std::uint16_t* scales) {
  table().encode_state(code, values.data(), count_of(values), codes, scales);
}

void decode_state(StateCode code, const void* codes, const std::uint16_t* scales, std::span<float> values) {
  table().decode_state(code, codes, scales, count_of(values), values.data());
}

void split_weights(std::span<const float> values, std::uint16_t* bf16, std::int8_t* low_bits) {
  table().split_weights(values.data(), count_of(values), bf16, low_bits);
}

void join_weights(const std::uint16_t* bf16, const std::int8_t* low_bits, std::span<float> values) {
  table().join_weights(bf16, low_bits, count_of(values), values.data());
}

std::uint16_t rounding_bits(std::uint64_t seed, std::uint32_t stream, RoundingOperand operand, std::uint32_t step,
                            std::int64_t element) {
  const PhiloxBlock block =
      philox4x32(static_cast<std::uint32_t>(element / 128 * 16 + element % 16), static_cast<std::uint32_t>(operand),
                 stream, step, static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
  const auto piece = static_cast<unsigned>(element % 128 / 16);
  return static_cast<std::uint16_t>(block.word[piece / 2] >> (piece % 2 * 16));
}

}  // namespace oxytorch::kernels
