#include "tune/digest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace oxytorch::tune {
namespace {

constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15U;
constexpr std::uint64_t kOther = 0xC2B2AE3D27D4EB4FU;

// The finaliser of MurmurHash3 with the constants of D. Stafford, "Better bit mixing" (2011), Mix13.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

std::uint64_t absorb(std::uint64_t lane, std::uint64_t word) { return std::rotl(lane + word * kOther, 31) * kOdd; }

}  // namespace

std::uint64_t hash_bytes(const void* data, std::size_t size, std::uint64_t seed) {
  std::array<std::uint64_t, 4> lanes{seed + kOdd, seed + kOther, seed, seed - kOdd};
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::array<std::uint64_t, 4> block{};
  std::size_t done = 0;
  for (; done + sizeof(block) <= size; done += sizeof(block)) {
    std::memcpy(block.data(), bytes + done, sizeof(block));
    for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = absorb(lanes[i], block[i]);
  }
  block = {};
  if (done < size) std::memcpy(block.data(), bytes + done, size - done);
  std::uint64_t result = size;
  for (std::size_t i = 0; i < lanes.size(); ++i) result = mix(result ^ absorb(lanes[i], block[i])) + kOdd;
  return result;
}

void Digest::add(std::string name, std::string_view bytes) {
  entries_.emplace_back(std::move(name), hash_bytes(bytes.data(), bytes.size()));
}

void Digest::add(std::string name, const at::Tensor& tensor) {
  if (!tensor.defined()) return add(std::move(name), std::string_view("undefined"));
  const auto dense = tensor.is_sparse() ? tensor.detach().to_dense() : tensor.detach();
  const auto plain = dense.cpu().contiguous();
  const auto type = static_cast<std::uint64_t>(plain.scalar_type());
  const auto shape = hash_bytes(plain.sizes().data(), plain.sizes().size() * sizeof(std::int64_t), type);
  entries_.emplace_back(std::move(name), hash_bytes(plain.const_data_ptr(), plain.nbytes(), shape));
}

std::string Digest::text() const {
  std::uint64_t all = entries_.size();
  for (const auto& [name, value] : entries_) all = mix(hash_bytes(name.data(), name.size(), all) ^ value);
  constexpr const char* kDigits = "0123456789abcdef";
  std::string result(16, '0');
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = kDigits[(all >> (60 - 4 * i)) & 15U];
  return result;
}

std::string Digest::first_difference(const Digest& other) const {
  const auto [mine, theirs] =
      std::mismatch(entries_.begin(), entries_.end(), other.entries_.begin(), other.entries_.end());
  return mine != entries_.end() ? mine->first : theirs != other.entries_.end() ? theirs->first : "";
}

}  // namespace oxytorch::tune
