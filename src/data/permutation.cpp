#include <cmath>

#include "oxytorch/data/order.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

/// Four rounds make a Feistel network strong where halves are wide (M. Luby, C. Rackoff, 1988); narrow ones mix slowly.
constexpr std::uint64_t feistel_rounds(std::uint64_t side) { return side < 32 ? 24 : side < 1024 ? 8 : 6; }
constexpr std::uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;

/// The finaliser of splitmix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014).
constexpr std::uint64_t mix_key(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

/// A number of [0, side) by key, round and half; it needs good high bits only, which the second product has.
inline std::uint64_t round_number(std::uint64_t half, std::uint64_t key, std::uint64_t round, std::uint64_t side) {
  std::uint64_t x = (half ^ (key + round * kGoldenRatio)) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 32) * 0x94D049BB133111EB;
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(x) * side >> 64);
}

inline std::uint64_t encrypt(std::uint64_t x, std::uint64_t key, std::uint64_t side) {
  std::uint64_t left = x / side, right = x % side;
  for (std::uint64_t round = 1, last = feistel_rounds(side); round <= last; ++round) {
    std::uint64_t sum = left + round_number(right, key, round, side);
    if (sum >= side) sum -= side;
    left = right;
    right = sum;
  }
  return left * side + right;
}

inline std::uint64_t decrypt(std::uint64_t x, std::uint64_t key, std::uint64_t side) {
  std::uint64_t left = x / side, right = x % side;
  for (std::uint64_t round = feistel_rounds(side); round >= 1; --round) {
    const std::uint64_t number = round_number(left, key, round, side);
    const std::uint64_t difference = right >= number ? right - number : right + side - number;
    right = left;
    left = difference;
  }
  return left * side + right;
}

/// Swaps elements 0 and 1 for half of the keys: a Feistel network alone makes even permutations more often than odd
/// ones.
inline std::uint64_t swap_first(std::uint64_t x, std::uint64_t key, std::uint64_t size) {
  return x < 2 && size > 1 ? x ^ (key >> 32 & 1) : x;
}

}  // namespace

Permutation::Permutation(std::int64_t size, std::uint64_t key) : size_(size), key_(mix_key(key + kGoldenRatio)) {
  OXY_CHECK(size >= 0, InvalidArgument, "a permutation cannot have ", size, " elements; give 0 or more.");
  const auto wide = static_cast<std::uint64_t>(size);
  side_ = static_cast<std::uint64_t>(std::sqrt(static_cast<double>(wide)));
  while (side_ * side_ < wide) ++side_;
  while (side_ > 0 && (side_ - 1) * (side_ - 1) >= wide) --side_;
}

std::int64_t Permutation::operator()(std::int64_t position) const noexcept {
  const auto size = static_cast<std::uint64_t>(size_);
  auto x = static_cast<std::uint64_t>(position);
  if (x >= size) return -1;  // its walk might never come inside
  do x = encrypt(x, key_, side_);
  while (x >= size);
  return static_cast<std::int64_t>(swap_first(x, key_, size));
}

std::int64_t Permutation::position_of(std::int64_t element) const noexcept {
  const auto size = static_cast<std::uint64_t>(size_);
  auto x = static_cast<std::uint64_t>(element);
  if (x >= size) return -1;
  x = swap_first(x, key_, size);
  do x = decrypt(x, key_, side_);
  while (x >= size);
  return static_cast<std::int64_t>(x);
}

}  // namespace oxytorch::data
