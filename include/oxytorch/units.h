/// Sizes in bytes, shares of a total, and durations, as text and back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "oxytorch/api.h"

namespace oxytorch {

/// An amount of memory or disk as a user writes it: bytes, a share of a total, or "auto".
///
/// Text forms: "10GB" (decimal, 10^9), "1.5GiB" (binary, 2^30), "512 MiB", "4096", "90%", "auto"; suffixes B, KB to
/// EB and KiB to EiB in any case. A fraction of a byte is dropped ("1.1GiB" is 1181116006 bytes).
class OXY_API Size {
 public:
  enum class Kind { Auto, Bytes, Share };

  /// "auto".
  Size() = default;
  static Size automatic() { return {}; }
  static Size bytes(std::uint64_t count);
  /// 0 to 100; Error(InvalidArgument) outside.
  static Size percent(double value);
  /// Error(InvalidArgument) that names the text and the forms for anything but the forms above: an empty or negative
  /// text, an unknown suffix, over 2^64 - 1 bytes, over 100 percent.
  static Size parse(std::string_view text);

  [[nodiscard]] Kind kind() const noexcept { return kind_; }
  [[nodiscard]] bool is_auto() const noexcept { return kind_ == Kind::Auto; }

  /// Bytes for a given total: the bytes themselves, whatever the total; the share of it, rounded down; and for
  /// "auto" the value `automatic`, or the whole total where none is given.
  [[nodiscard]] std::uint64_t resolve(std::uint64_t total, std::optional<std::uint64_t> automatic = {}) const noexcept;

  /// The shortest exact text: parse(to_string()) gives an equal Size.
  [[nodiscard]] std::string to_string() const;

  bool operator==(const Size&) const = default;

 private:
  Kind kind_ = Kind::Auto;
  std::uint64_t bytes_ = 0;
  double percent_ = 0;
};

/// Bytes for a reader: three digits and a binary unit ("1.50 GiB", "512 B").
OXY_API std::string format_size(std::uint64_t bytes);

/// Seconds for a reader: "3.42 us", "12.0 ms", "1.50 s", "2 min 05 s", "3 h 07 min", "2 d 04 h".
OXY_API std::string format_duration(double seconds);

/// Bytes a second of "400Gb/s" (bits, 10^9), "50GB/s" (bytes), "25 GiB/s" (2^30), "100 Gbps" or "5e9": a small b is a
/// bit, a large B a byte. Error(InvalidArgument) that names the text and the forms for anything else, below 0 included.
OXY_API double parse_rate(std::string_view text);

/// "50 GB/s", "312 MB/s": three digits at most, decimal units.
OXY_API std::string format_rate(double bytes_per_s);

/// Seconds of "1.5us", "300 ns", "2 ms", "0.5s", "2min", "3h" or "0.25". Error(InvalidArgument) as above.
OXY_API double parse_duration(std::string_view text);

}  // namespace oxytorch
