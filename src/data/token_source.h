/// Datasets of tokens that can be read across the borders of samples.
#pragma once

#include <cstdint>
#include <string>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

/// Whether tokens may be of this dtype.
[[nodiscard]] constexpr bool is_integer(DType dtype) noexcept { return dtype <= DType::I64; }

/// Integers in the order of a dataset's samples, as one long text. Methods may be called by several threads at once.
class TokenSource {
 public:
  TokenSource() = default;
  TokenSource(const TokenSource&) = delete;
  TokenSource& operator=(const TokenSource&) = delete;
  virtual ~TokenSource();

  /// How many there are; -1 where they are no integers or do not lie in order, so that samples must be read one by one.
  /// The methods below are for the other case.
  [[nodiscard]] virtual std::int64_t tokens() const = 0;
  [[nodiscard]] virtual DType token_dtype() const = 0;
  /// Tokens from `first`, which is in [0, tokens()): at least one, at most `count`, as many as lie together.
  [[nodiscard]] virtual View view_tokens(std::int64_t first, std::int64_t count) const = 0;
  virtual void will_view_tokens(std::int64_t first, std::int64_t count) const = 0;
  /// Says where a token is, for error messages.
  [[nodiscard]] virtual std::string token_place(std::int64_t token) const = 0;
};

}  // namespace oxytorch::data
