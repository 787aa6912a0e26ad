#include "optim/formats.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace oxytorch::optim {
namespace {

constexpr std::int64_t kSignBit = 0x7FFFFFFF;
constexpr std::int64_t kHalved = 0x1FC00000;          // codec.h, signed
constexpr std::int64_t kQuartered = 0x2FA00000;       // codec.h, unsigned
constexpr std::int64_t kLeastMagnitude = 0x03800000;  // 2^-120
constexpr std::int64_t kOne = 0x3F800000;
constexpr std::int64_t kInfinity = 0x7F800000;

at::Tensor bits_of(const at::Tensor& fp32) { return fp32.view(at::kInt); }
at::Tensor float_of(const at::Tensor& bits) { return bits.to(at::kInt).view(at::kFloat); }

at::Tensor laid_out_as(const at::Tensor& flat, const at::Tensor& like) {
  at::Tensor result = at::empty_like(like, like.options().dtype(flat.scalar_type()), at::MemoryFormat::Preserve);
  in_memory_order(result).copy_(flat);
  return result;
}

// The 16 random bits of each element: int64 [numel]. See kernels::rounding_bits.
at::Tensor random_pieces(std::int64_t numel, const Rounding& r, at::Device device) {
  constexpr std::int64_t kWord = 0xFFFFFFFF;
  const at::Tensor i = at::arange(numel, at::TensorOptions(at::kLong).device(device));
  at::Tensor c0 = at::floor_divide(i, 128).mul(16).add(i.remainder(16));
  at::Tensor c1 = at::full({}, static_cast<std::int64_t>(r.operand), i.options());
  at::Tensor c2 = at::full({}, static_cast<std::int64_t>(r.stream), i.options());
  at::Tensor c3 = r.step.to(i.options()).reshape({}).bitwise_and(kWord);
  auto k0 = static_cast<std::uint32_t>(r.seed), k1 = static_cast<std::uint32_t>(r.seed >> 32);
  const auto high = [](const at::Tensor& product) {
    return at::bitwise_right_shift(product, at::Scalar(32)).bitwise_and(kWord);
  };
  for (int round = 0; round < 10; ++round) {
    // Products of 32-bit words wrap in int64 as they do in uint64.
    const at::Tensor p0 = c0.mul(std::int64_t{0xD2511F53});
    const at::Tensor p1 = c2.mul(std::int64_t{0xCD9E8D57});
    c0 = high(p1).bitwise_xor(c1).bitwise_xor(std::int64_t{k0});
    c2 = high(p0).bitwise_xor(c3).bitwise_xor(std::int64_t{k1});
    c1 = p1.bitwise_and(kWord);
    c3 = p0.bitwise_and(kWord);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  const at::Tensor piece = at::floor_divide(i, 16).remainder(8);
  const at::Tensor words = at::stack(at::broadcast_tensors({c0, c1, c2, c3}));
  const at::Tensor word = words.gather(0, at::floor_divide(piece, 2).unsqueeze(0)).squeeze(0);
  return at::bitwise_right_shift(word, piece.remainder(2).mul(16)).bitwise_and(0xFFFF);
}

// floor(levels * y + r), rounded once before the floor as a fused multiply-add does. In fp32 alone, since not every
// device has more: the products of y's halves are exact, the errors of both sums are kept and fit one number.
at::Tensor quantized(const at::Tensor& y, double levels, const std::optional<Rounding>& rounding) {
  const at::Tensor offset = rounding ? random_pieces(y.numel(), *rounding, y.device()).to(at::kFloat).mul(1.0 / 65536)
                                     : at::full({}, 0.5, y.options());
  constexpr std::int64_t kUpperHalf = 0x7FFFF000;
  const at::Tensor upper = float_of(bits_of(y).bitwise_and(kUpperHalf));
  const at::Tensor large = upper.mul(levels), small = y.sub(upper).mul(levels);
  const at::Tensor product = large.add(small), product_error = small.sub(product.sub(large));
  const at::Tensor sum = product.add(offset), added = sum.sub(product);
  const at::Tensor sum_error = product.sub(sum.sub(added)).add(offset.sub(added));
  return sum.add(sum_error.add(product_error)).floor().clamp_max(levels);
}

// Codes and scales of fp32 values in memory's order.
std::pair<at::Tensor, at::Tensor> encoded(const at::Tensor& flat, kernels::StateCode code,
                                          const std::optional<Rounding>& rounding) {
  const std::int64_t n = flat.numel(), groups = kernels::state_groups(n);
  const at::Tensor padded = at::constant_pad_nd(flat, {0, groups * kernels::kStateGroup - n});
  const at::Tensor magnitude = bits_of(padded).bitwise_and(kSignBit).view({groups, kernels::kStateGroup});
  at::Tensor largest = (groups == 0 ? at::zeros({0}, magnitude.options()) : magnitude.amax(1)).to(at::kLong);
  at::Tensor upper = at::bitwise_right_shift(largest.add(0xFFFF), at::Scalar(16)).clamp_max(0x7F7F);
  upper = upper.masked_fill(largest.lt(kLeastMagnitude), 0).masked_fill(largest.ge(kInfinity), 0x7FC0);
  const at::Tensor scale = float_of(at::bitwise_left_shift(upper, at::Scalar(16)));
  const at::Tensor inverse = scale.reciprocal().masked_fill(scale.eq(0).logical_or(scale.isnan()), 0);
  // As integers a NaN is above 1 and becomes the top code.
  const at::Tensor a = bits_of(float_of(magnitude).mul(inverse.unsqueeze(1))).view({-1}).slice(0, 0, n);
  const at::Tensor bits = a.bitwise_and(kSignBit).clamp_max(kOne);
  const bool is_signed = code == kernels::StateCode::Signed;
  const at::Tensor y =
      float_of(at::bitwise_right_shift(bits, at::Scalar(is_signed ? 1 : 2)).add(is_signed ? kHalved : kQuartered));
  at::Tensor q = quantized(y, is_signed ? 127 : 255, rounding);
  q = is_signed ? q.mul(at::where(flat.signbit(), -1.0, 1.0)) : at::where(flat.ne(0), q.clamp_min(1), q);
  return {q.to(is_signed ? at::kChar : at::kByte), scale.to(at::kBFloat16)};
}

// fp32 values of codes in memory's order.
at::Tensor decoded(const at::Tensor& codes, const at::Tensor& scales, kernels::StateCode code) {
  const bool is_signed = code == kernels::StateCode::Signed;
  const at::Tensor flat = codes.to(at::kFloat);
  const at::Tensor y = flat.abs().mul(is_signed ? 1.0F / 127 : 1.0F / 255);
  const at::Tensor bits = bits_of(y).sub(is_signed ? kHalved : kQuartered);
  const at::Tensor a = float_of(at::bitwise_left_shift(bits, at::Scalar(is_signed ? 1 : 2))).masked_fill(flat.eq(0), 0);
  const at::Tensor scale = scales.to(at::kFloat).repeat_interleave(kernels::kStateGroup).slice(0, 0, flat.numel());
  return a.mul(scale).mul(flat.sign());
}

// Elements that are converted at once: it takes some twenty times their memory. Launches cost more on other devices.
std::int64_t piece_on(at::Device device) { return std::int64_t{1} << (device.is_cpu() ? 16 : 24); }

}  // namespace

at::Tensor in_memory_order(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

at::Tensor flat_like(const at::Tensor& values, const at::Tensor& like) {
  return in_memory_order(
      at::empty_like(like, like.options().dtype(at::kFloat), at::MemoryFormat::Preserve).copy_(values));
}

std::pair<at::Tensor, at::Tensor> encode_int8(const at::Tensor& values, kernels::StateCode code, const at::Tensor& like,
                                              const std::optional<Rounding>& rounding) {
  const bool as_it_lies =
      values.scalar_type() == at::kFloat && values.sizes() == like.sizes() && values.strides() == like.strides();
  const at::Tensor flat = as_it_lies ? in_memory_order(values) : flat_like(values, like);
  const std::int64_t piece = piece_on(flat.device());
  if (rounding || flat.numel() <= piece) {
    const auto [codes, scales] = encoded(flat, code, rounding);
    return {laid_out_as(codes, like), scales};
  }
  const auto type = code == kernels::StateCode::Signed ? at::kChar : at::kByte;
  const at::Tensor codes = at::empty_like(like, like.options().dtype(type), at::MemoryFormat::Preserve);
  const at::Tensor scales = at::empty({kernels::state_groups(flat.numel())}, flat.options().dtype(at::kBFloat16));
  for (std::int64_t first = 0; first < flat.numel(); first += piece) {
    const auto last = std::min(flat.numel(), first + piece);
    const auto [part, of_groups] = encoded(flat.slice(0, first, last), code, std::nullopt);
    in_memory_order(codes).slice(0, first, last).copy_(part);
    scales.narrow(0, first / kernels::kStateGroup, of_groups.numel()).copy_(of_groups);
  }
  return {codes, scales};
}

at::Tensor decode_int8(const at::Tensor& codes, const at::Tensor& scales, kernels::StateCode code) {
  const at::Tensor flat = in_memory_order(codes);
  const at::Tensor values = at::empty_like(codes, codes.options().dtype(at::kFloat), at::MemoryFormat::Preserve);
  const std::int64_t piece = piece_on(flat.device());
  for (std::int64_t first = 0; first < flat.numel(); first += piece) {
    const auto last = std::min(flat.numel(), first + piece);
    const auto groups = kernels::state_groups(last - first);
    const at::Tensor part =
        decoded(flat.slice(0, first, last), scales.slice(0, first / kernels::kStateGroup).slice(0, 0, groups), code);
    in_memory_order(values).slice(0, first, last).copy_(part);
  }
  return values;
}

at::Tensor round_bf16(const at::Tensor& values, const at::Tensor& like, const Rounding& rounding) {
  const at::Tensor flat = flat_like(values, like);
  const at::Tensor bits = bits_of(flat).to(at::kLong).bitwise_and(std::int64_t{0xFFFFFFFF});
  const at::Tensor cut = bits.add(random_pieces(flat.numel(), rounding, flat.device())).bitwise_and(0xFFFF0000);
  const at::Tensor rounded = at::where(flat.isnan(), flat, float_of(cut));
  return laid_out_as(rounded.to(at::kBFloat16), like);
}

std::pair<at::Tensor, at::Tensor> split_weights(const at::Tensor& values, const at::Tensor& like,
                                                const std::optional<Rounding>& rounding) {
  const at::Tensor flat = flat_like(values, like);
  const at::Tensor bits = bits_of(flat).to(at::kLong).bitwise_and(std::int64_t{0xFFFFFFFF});
  at::Tensor magnitude = bits.bitwise_and(kSignBit);
  magnitude = at::where(flat.isnan(), at::full({}, 0x7FC00000, magnitude.options()), magnitude);
  const at::Tensor added =
      rounding ? at::bitwise_right_shift(random_pieces(flat.numel(), *rounding, flat.device()), at::Scalar(8))
               : at::full({}, 0x80, magnitude.options());
  const at::Tensor m = at::bitwise_right_shift(magnitude.add(added), at::Scalar(8));
  const at::Tensor upper = at::bitwise_right_shift(m.add(0x80), at::Scalar(8));
  const at::Tensor low_bits = m.sub(at::bitwise_left_shift(upper, at::Scalar(8))).to(at::kChar);
  const at::Tensor sign = bits.bitwise_and(std::int64_t{0x80000000});
  const at::Tensor weight = float_of(at::bitwise_left_shift(upper, at::Scalar(16)).bitwise_or(sign)).to(at::kBFloat16);
  return {laid_out_as(weight, like), laid_out_as(low_bits, like)};
}

at::Tensor join_weights(const at::Tensor& weights, const at::Tensor& low_bits) {
  // The weights may be a strided view; the low bits are dense.
  const at::Tensor bits = bits_of(flat_like(weights, low_bits)).to(at::kLong).bitwise_and(std::int64_t{0xFFFFFFFF});
  const at::Tensor upper = at::bitwise_right_shift(bits.bitwise_and(kSignBit), at::Scalar(8));
  const at::Tensor m = upper.add(in_memory_order(low_bits)).clamp_min(0);
  const at::Tensor sign = bits.bitwise_and(std::int64_t{0x80000000});
  return laid_out_as(float_of(at::bitwise_left_shift(m, at::Scalar(8)).bitwise_or(sign)), low_bits);
}

}  // namespace oxytorch::optim
