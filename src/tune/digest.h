/// Digest: a hash over named values that can say which of them differs from another digest's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oxytorch::tune {

/// 64 bits over bytes: four lanes of multiply and rotate, then a mix. Not for untrusted data.
std::uint64_t hash_bytes(const void* data, std::size_t size, std::uint64_t seed = 0);

class Digest {
 public:
  void add(std::string name, std::string_view bytes);
  /// Dtype, shape and values; not the layout. An undefined tensor is a value of its own.
  void add(std::string name, const at::Tensor& tensor);

  [[nodiscard]] std::string text() const;  ///< 16 hexadecimal digits
  /// The name of the first entry that differs; empty where none does.
  [[nodiscard]] std::string first_difference(const Digest& other) const;

 private:
  std::vector<std::pair<std::string, std::uint64_t>> entries_;
};

}  // namespace oxytorch::tune
