/// Four neighbouring elements of an array of any type: what one thread of a device reads and writes at once.
#pragma once

#include "kernels/device/formats.h"
#include "oxytorch/backend_kernels.h"

namespace oxytorch::kernels::device {

/// One value that lies in device memory.
template <class Block, class T>
OXY_HOST_DEVICE inline const T& read(const Block& block, const T* at) {
  return *block.array(at, 1);
}

/// What a device moves by one instruction.
template <class T>
struct __attribute__((may_alias, aligned(4 * sizeof(T)))) Pack {
  T element[4];
};

/// Reads `count` (1 to 4) elements, in one piece where that is possible; the others are 0.
template <class T>
OXY_HOST_DEVICE inline void read_four(const T* from, int count, T* to) {
  if (count >= 4 && reinterpret_cast<std::uintptr_t>(from) % sizeof(Pack<T>) == 0) {
    const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(from);
    for (int j = 0; j < 4; ++j) to[j] = pack.element[j];
  } else {
    for (int j = 0; j < 4; ++j) to[j] = j < count ? from[j] : T{};
  }
}

template <class T>
OXY_HOST_DEVICE inline void write_four(const T* from, int count, T* to) {
  if (count >= 4 && reinterpret_cast<std::uintptr_t>(to) % sizeof(Pack<T>) == 0) {
    Pack<T> pack;
    for (int j = 0; j < 4; ++j) pack.element[j] = from[j];
    *reinterpret_cast<Pack<T>*>(to) = pack;
  } else {
    for (int j = 0; j < 4 && j < count; ++j) to[j] = from[j];
  }
}

OXY_HOST_DEVICE inline std::int64_t bytes_of(oxy_element type, std::int64_t count) {
  return count * (type == OXY_F64 ? 8 : type == OXY_F32 ? 4 : type == OXY_INT8 ? 1 : 2);
}

/// Of `type` F32, BF16 or F16.
OXY_HOST_DEVICE inline void load_four(const void* array, oxy_element type, std::int64_t at, int count, float* to) {
  if (type == OXY_F32) return read_four(static_cast<const float*>(array) + at, count, to);
  std::uint16_t bits[4];
  read_four(static_cast<const std::uint16_t*>(array) + at, count, bits);
  for (int j = 0; j < 4; ++j) to[j] = type == OXY_BF16 ? from_bf16(bits[j]) : from_f16(bits[j]);
}

/// `piece(j)`: random bits of element j, or kNearest; of BF16 alone. `stored`, if not NULL, gets what the array now
/// says.
template <class Piece>
OXY_HOST_DEVICE inline void store_four(const float* from, void* array, oxy_element type, std::int64_t at, int count,
                                       Piece&& piece, float* stored) {
  if (type == OXY_F32) return write_four(from, count, static_cast<float*>(array) + at);
  std::uint16_t bits[4];
  for (int j = 0; j < 4; ++j) bits[j] = type == OXY_BF16 ? to_bf16(from[j], piece(j)) : to_f16(from[j]);
  write_four(bits, count, static_cast<std::uint16_t*>(array) + at);
  for (int j = 0; j < 4 && stored != nullptr; ++j)
    stored[j] = type == OXY_BF16 ? from_bf16(bits[j]) : from_f16(bits[j]);
}
OXY_HOST_DEVICE inline void store_four(const float* from, void* array, oxy_element type, std::int64_t at, int count) {
  store_four(from, array, type, at, count, [](int) { return kNearest; }, nullptr);
}

}  // namespace oxytorch::kernels::device
