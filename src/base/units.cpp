#include "oxytorch/units.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/spelling.h"
#include "oxytorch/error.h"

namespace oxytorch {
namespace {

__extension__ using Wide = unsigned __int128;

struct Unit {
  const char* name;
  std::uint64_t bytes;
};

// Largest first; where two texts are equally short, the earlier one is printed.
constexpr std::array<Unit, 13> kUnits{{{"EiB", 1ull << 60},
                                       {"EB", 1'000'000'000'000'000'000ull},
                                       {"PiB", 1ull << 50},
                                       {"PB", 1'000'000'000'000'000ull},
                                       {"TiB", 1ull << 40},
                                       {"TB", 1'000'000'000'000ull},
                                       {"GiB", 1ull << 30},
                                       {"GB", 1'000'000'000ull},
                                       {"MiB", 1ull << 20},
                                       {"MB", 1'000'000ull},
                                       {"KiB", 1ull << 10},
                                       {"KB", 1'000ull},
                                       {"B", 1ull}}};

constexpr const char* kForms = "Write '10GB', '1.5GiB', '512 MiB', a number of bytes, '90%' or 'auto'.";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
char to_lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool same_word(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (to_lower(a[i]) != to_lower(b[i])) return false;
  }
  return true;
}

[[noreturn]] void too_large(std::string_view text) {
  detail::raise(ErrorCode::InvalidArgument, "size ", in_quotes(text), " is over the largest, ", UINT64_MAX, " bytes.");
}

/// Digits [. digits], times `unit`, rounded down; exact, so "0.1KB" is 100.
std::uint64_t scaled(std::string_view digits, std::uint64_t unit, std::string_view text) {
  const std::size_t point = digits.find('.');
  const std::string_view whole = digits.substr(0, point);
  const std::string_view part = point == std::string_view::npos ? std::string_view{} : digits.substr(point + 1);
  Wide bytes = 0;
  for (const char c : whole) {
    bytes = bytes * 10 + static_cast<unsigned>(c - '0');
    if (bytes > UINT64_MAX) too_large(text);
  }
  bytes *= unit;
  // 19 digits after the point are finer than one byte of the largest unit, and 10^19 times it fits 128 bits.
  Wide numerator = 0;
  Wide denominator = 1;
  for (std::size_t i = 0; i < part.size() && i < 19; ++i) {
    numerator = numerator * 10 + static_cast<unsigned>(part[i] - '0');
    denominator *= 10;
  }
  bytes += numerator * unit / denominator;
  if (bytes > UINT64_MAX) too_large(text);
  return static_cast<std::uint64_t>(bytes);
}

std::uint64_t unit_named(std::string_view suffix, std::string_view text) {
  if (suffix.empty()) return 1;
  for (const Unit& unit : kUnits) {
    if (same_word(suffix, unit.name)) return unit.bytes;
  }
  if (suffix.size() == 1 && std::string_view("kmgtpe").find(to_lower(suffix[0])) != std::string_view::npos) {
    const char letter = static_cast<char>(to_lower(suffix[0]) - 'a' + 'A');
    detail::raise(ErrorCode::InvalidArgument, "size ", in_quotes(text), " does not say which unit: write '", letter,
                  "B' (powers of 1000) or '", letter, "iB' (powers of 1024).");
  }
  detail::raise(ErrorCode::InvalidArgument, "size ", in_quotes(text), " has the unknown unit ", in_quotes(suffix), ". ",
                kForms);
}

double percent_of(std::string_view digits, std::string_view text) {
  double value = 0;
  const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  OXY_CHECK(status == std::errc() && end == digits.data() + digits.size(), InvalidArgument, "size ", in_quotes(text),
            " is not a percentage. ", kForms);
  OXY_CHECK(value <= 100, InvalidArgument, "size ", in_quotes(text), " is over 100%. ", kForms);
  return value;
}

}  // namespace

Size Size::bytes(std::uint64_t count) {
  Size size;
  size.kind_ = Kind::Bytes;
  size.bytes_ = count;
  return size;
}

Size Size::percent(double value) {
  OXY_CHECK(value >= 0 && value <= 100, InvalidArgument, "a share must be from 0 to 100 percent, not ", value, ".");
  Size size;
  size.kind_ = Kind::Share;
  size.percent_ = value == 0 ? 0 : value;  // -0 would print as "-0%"
  return size;
}

Size Size::parse(std::string_view text) {
  const std::string_view body = trim(text);
  OXY_CHECK(!body.empty(), InvalidArgument, "a size is empty. ", kForms);
  if (same_word(body, "auto")) return automatic();
  OXY_CHECK(body.front() != '-', InvalidArgument, "size ", in_quotes(text), " is negative. ", kForms);
  std::size_t end = 0;
  std::size_t points = 0;
  while (end < body.size() && (is_digit(body[end]) || body[end] == '.')) points += body[end++] == '.' ? 1 : 0;
  const std::string_view digits = body.substr(0, end);
  OXY_CHECK(points <= 1 && digits.size() > points, InvalidArgument, "size ", in_quotes(text),
            " does not start with a number. ", kForms);
  const std::string_view suffix = trim(body.substr(end));
  if (suffix == "%") return percent(percent_of(digits, text));
  const std::uint64_t unit = unit_named(suffix, text);
  const std::size_t point = digits.find('.');
  OXY_CHECK(
      unit > 1 || point == std::string_view::npos || digits.find_first_not_of('0', point + 1) == std::string_view::npos,
      InvalidArgument, "size ", in_quotes(text), " is a fraction of a byte. ", kForms);
  return bytes(scaled(digits, unit, text));
}

std::uint64_t Size::resolve(std::uint64_t total, std::optional<std::uint64_t> automatic) const noexcept {
  switch (kind_) {
    case Kind::Auto: return automatic.value_or(total);
    case Kind::Bytes: return bytes_;
    case Kind::Share: break;
  }
  if (percent_ >= 100) return total;
  // long double holds 64 bits, so the share of a large total is not off by rounding.
  return static_cast<std::uint64_t>(static_cast<long double>(total) * percent_ / 100);
}

std::string Size::to_string() const {
  if (kind_ == Kind::Auto) return "auto";
  if (kind_ == Kind::Share) {
    std::array<char, 400> buffer{};  // fixed notation of the least double takes 325
    const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), percent_, std::chars_format::fixed);
    return std::string(buffer.data(), result.ptr) + '%';
  }
  std::string best = std::to_string(bytes_);
  if (bytes_ == 0) return best;
  for (const Unit& unit : kUnits) {
    const Wide thousandths = Wide{bytes_} * 1000;
    if (bytes_ < unit.bytes || unit.bytes == 1 || thousandths % unit.bytes != 0) continue;
    const auto value = static_cast<std::uint64_t>(thousandths / unit.bytes);
    std::string text = std::to_string(value / 1000);
    if (const std::uint64_t part = value % 1000; part != 0) {
      std::string digits = std::to_string(1000 + part).substr(1);
      digits.erase(digits.find_last_not_of('0') + 1);
      text += '.' + digits;
    }
    text += unit.name;
    if (text.size() < best.size() || (text.size() == best.size() && is_digit(best.back()))) best = text;
  }
  return best;
}

std::string format_size(std::uint64_t bytes) {
  std::array<char, 48> buffer{};
  if (bytes < 1024) {
    std::snprintf(buffer.data(), buffer.size(), "%llu B", static_cast<unsigned long long>(bytes));
    return buffer.data();
  }
  constexpr std::array<const char*, 6> kNames{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t i = 0;
  // 999.5 and up would need four digits.
  while (value >= 999.5 && i + 1 < kNames.size()) {
    value /= 1024;
    ++i;
  }
  const int digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  std::snprintf(buffer.data(), buffer.size(), "%.*f %s", digits, value, kNames[i]);
  return buffer.data();
}

std::string format_duration(double seconds) {
  std::array<char, 64> buffer{};
  if (std::isnan(seconds)) return "unknown";
  if (std::isinf(seconds)) return seconds > 0 ? "forever" : "-forever";
  if (seconds < 0) return '-' + format_duration(-seconds);
  if (seconds < 59.95) {
    constexpr std::array<const char*, 4> kNames{"ns", "us", "ms", "s"};
    double value = seconds * 1e9;
    std::size_t i = 0;
    while (value >= 999.5 && i + 1 < kNames.size()) {
      value /= 1000;
      ++i;
    }
    const int digits = value == 0 ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
    std::snprintf(buffer.data(), buffer.size(), "%.*f %s", digits, value, value == 0 ? "s" : kNames[i]);
    return buffer.data();
  }
  if (seconds < 3599.5) {
    const auto whole = std::lround(seconds);
    std::snprintf(buffer.data(), buffer.size(), "%ld min %02ld s", whole / 60, whole % 60);
  } else if (seconds < 86370) {
    const auto minutes = std::lround(seconds / 60);
    std::snprintf(buffer.data(), buffer.size(), "%ld h %02ld min", minutes / 60, minutes % 60);
  } else if (seconds < 1e12) {
    const auto hours = std::lround(seconds / 3600);
    std::snprintf(buffer.data(), buffer.size(), "%ld d %02ld h", hours / 24, hours % 24);
  } else {
    std::snprintf(buffer.data(), buffer.size(), "%.2e d", seconds / 86400);
  }
  return buffer.data();
}

namespace {

constexpr const char* kRateForms = "Write '400Gb/s' (bits), '50GB/s' (bytes), '25GiB/s' or a number of bytes a second.";
constexpr const char* kDurationForms = "Write '1.5us', '300ns', '2ms', '0.5s', '2min', '3h' or a number of seconds.";

/// The number that `text` begins with, and what follows it.
std::pair<double, std::string_view> number_and_unit(const char* what, std::string_view text, const char* forms) {
  const std::string_view body = trim(text);
  double value = 0;
  const auto [end, status] = std::from_chars(body.data(), body.data() + body.size(), value);
  OXY_CHECK(status == std::errc() && std::isfinite(value), InvalidArgument, what, ' ', in_quotes(text),
            " does not start with a number. ", forms);
  OXY_CHECK(value >= 0, InvalidArgument, what, ' ', in_quotes(text), " is negative. ", forms);
  return {value, trim(body.substr(static_cast<std::size_t>(end - body.data())))};
}

}  // namespace

double parse_rate(std::string_view text) {
  auto [value, unit] = number_and_unit("rate", text, kRateForms);
  if (unit.empty()) return value;
  constexpr std::string_view kPrefixes = "kmgtp";
  std::string_view rest = unit;
  double scale = 1;
  const std::size_t power = kPrefixes.find(to_lower(rest.front()));
  if (power != std::string_view::npos) {
    rest.remove_prefix(1);
    const bool binary = rest.starts_with('i');
    if (binary) rest.remove_prefix(1);
    scale = std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(power) + 1);
  }
  OXY_CHECK(std::isfinite(value * scale), InvalidArgument, "rate ", in_quotes(text), " is too large. ", kRateForms);
  for (const std::string_view word : {"b/s", "bit/s", "bps", "b/sec"}) {
    if (rest == word) return value * scale / 8;
  }
  for (const std::string_view word : {"B/s", "Bps", "B/sec"}) {
    if (rest == word) return value * scale;
  }
  detail::raise(ErrorCode::InvalidArgument, "rate ", in_quotes(text), " has the unknown unit ", in_quotes(unit), ". ",
                kRateForms);
}

std::string format_rate(double bytes_per_s) {
  constexpr std::array<const char*, 6> kNames{"B/s", "KB/s", "MB/s", "GB/s", "TB/s", "PB/s"};
  std::size_t i = 0;
  while (bytes_per_s >= 999.5 && i + 1 < kNames.size()) {
    bytes_per_s /= 1000;
    ++i;
  }
  std::array<char, 48> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%.3g %s", bytes_per_s, kNames[i]);
  return buffer.data();
}

double parse_duration(std::string_view text) {
  const auto [value, unit] = number_and_unit("duration", text, kDurationForms);
  if (unit.empty()) return value;
  constexpr std::array<std::pair<std::string_view, double>, 6> kTimes{
      {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"min", 60}, {"h", 3600}}};
  for (const auto& [name, seconds] : kTimes) {
    if (unit == name) return value * seconds;
  }
  detail::raise(ErrorCode::InvalidArgument, "duration ", in_quotes(text), " has the unknown unit ", in_quotes(unit),
                ". ", kDurationForms);
}

}  // namespace oxytorch
