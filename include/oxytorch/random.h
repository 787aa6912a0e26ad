/// Counter-based random numbers: Philox4x32-10.
///
/// J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11. A block
/// is a pure function of (key, counter), so a result does not depend on threads, chunks or order. Everything is
/// constexpr and runs on host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define OXY_HOST_DEVICE __host__ __device__
#else
#define OXY_HOST_DEVICE
#endif

namespace oxytorch {

/// Four random words.
struct PhiloxBlock {
  std::uint32_t word[4];
  constexpr bool operator==(const PhiloxBlock&) const = default;
};

/// Ten rounds of Philox4x32 on counter {c0, c1, c2, c3} with key {k0, k1}.
OXY_HOST_DEVICE constexpr PhiloxBlock philox4x32(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                                                 std::uint32_t k0, std::uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// The block for (seed, stream, index): key = seed, counter = index (low half) and stream (high half).
OXY_HOST_DEVICE constexpr PhiloxBlock philox(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return philox4x32(static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                    static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32),
                    static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
}

/// A float in [0, 1): the word's high 24 bits, each value equally likely.
OXY_HOST_DEVICE constexpr float uniform_float(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

/// A double in [0, 1): 53 bits of two words.
OXY_HOST_DEVICE constexpr double uniform_double(std::uint32_t high, std::uint32_t low) {
  const std::uint64_t bits = (std::uint64_t{high} << 32 | low) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

/// The words of (seed, stream) in order. A value type: a copy goes on from the same place.
class PhiloxStream {
 public:
  OXY_HOST_DEVICE constexpr explicit PhiloxStream(std::uint64_t seed, std::uint64_t stream = 0)
      : seed_(seed), stream_(stream) {}

  OXY_HOST_DEVICE constexpr std::uint32_t next() {
    const auto lane = static_cast<unsigned>(position_ % 4);
    if (lane == 0) block_ = philox(seed_, stream_, position_ / 4);
    ++position_;
    return block_.word[lane];
  }

  OXY_HOST_DEVICE constexpr std::uint64_t next64() {
    const std::uint64_t high = next();
    return high << 32 | next();
  }

  OXY_HOST_DEVICE constexpr float uniform_float() { return oxytorch::uniform_float(next()); }

  OXY_HOST_DEVICE constexpr double uniform_double() {
    const std::uint32_t high = next();
    return oxytorch::uniform_double(high, next());
  }

  /// An integer in [0, bound), without bias; 0 for a bound of 0 or 1.
  /// D. Lemire, "Fast random integer generation in an interval", 2019; wide bounds by masking and rejection.
  OXY_HOST_DEVICE constexpr std::uint64_t below(std::uint64_t bound) {
    if (bound <= 1) return 0;
    if (bound <= 0xFFFFFFFFu) {
      const auto narrow = static_cast<std::uint32_t>(bound);
      const std::uint32_t threshold = (0u - narrow) % narrow;
      for (;;) {
        const std::uint64_t product = std::uint64_t{next()} * narrow;
        if (static_cast<std::uint32_t>(product) >= threshold) return product >> 32;
      }
    }
    std::uint64_t mask = bound - 1;
    for (unsigned shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    for (;;) {
      const std::uint64_t value = next64() & mask;
      if (value < bound) return value;
    }
  }

  /// Words handed out so far; seek() goes to any of them in constant time.
  [[nodiscard]] OXY_HOST_DEVICE constexpr std::uint64_t position() const { return position_; }
  OXY_HOST_DEVICE constexpr void seek(std::uint64_t position) {
    position_ = position;
    if (position_ % 4 != 0) block_ = philox(seed_, stream_, position_ / 4);
  }

 private:
  std::uint64_t seed_;
  std::uint64_t stream_;
  std::uint64_t position_ = 0;
  PhiloxBlock block_{};
};

}  // namespace oxytorch
