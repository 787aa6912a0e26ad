#include "monitor/format.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>

namespace oxytorch::monitor {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// Length of the UTF-8 sequence at `at`, or 0 if the bytes there are not one (overlong and surrogates included).
std::size_t sequence_length(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned lead = byte(at);
  if (lead < 0x80) return 1;
  std::size_t length = 0;
  std::uint32_t code = 0, least = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2, code = lead & 0x1F, least = 0x80;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3, code = lead & 0x0F, least = 0x800;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4, code = lead & 0x07, least = 0x10000;
  } else {
    return 0;
  }
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(at + i) & 0x3F);
  }
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  return code < least || surrogate || code > 0x10FFFF ? 0 : length;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = sequence_length(text, at);
    out += length == 0 ? kReplacement : text.substr(at, length);
    at += length == 0 ? 1 : length;
  }
  return out;
}

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    const std::size_t length = sequence_length(text, at);
    if (length == 0) {
      out += kReplacement;
      ++at;
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      std::array<char, 8> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", static_cast<unsigned>(c));
      out += escaped.data();
    } else {
      out += text.substr(at, length);
    }
    at += length;
  }
  out += '"';
}

void append_json_number(std::string& out, double value) {
  if (!std::isfinite(value)) {
    out += std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
    return;
  }
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  out.append(digits.data(), end);
}

std::string format_number(double value, int digits) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  if (value == 0) return "0";
  const double size = std::abs(value);
  std::array<char, 64> text{};
  if (size >= 1e4 && size < 1e9) return format_count(value);
  if (size >= 1e9 || size < 1e-4) {
    std::snprintf(text.data(), text.size(), "%.*g", digits, value);
    return text.data();
  }
  const int before = static_cast<int>(std::floor(std::log10(size))) + 1;
  std::snprintf(text.data(), text.size(), "%.*f", std::max(0, digits - before), value);
  std::string out = text.data();
  if (out.find('.') != std::string::npos) {
    out.erase(out.find_last_not_of('0') + 1);
    if (out.back() == '.') out.pop_back();
  }
  return out;
}

std::string format_fixed(double value, int decimals) {
  if (!std::isfinite(value) || std::abs(value) >= 1e4) return format_number(value);
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", decimals, value);
  return text.data();
}

int decimals_for(double largest, int digits) {
  if (!std::isfinite(largest) || largest <= 0) return 0;
  return std::clamp(digits - 1 - static_cast<int>(std::floor(std::log10(largest))), 0, 12);
}

std::string format_count(double value) {
  if (!std::isfinite(value) || std::abs(value) >= 1e15) return format_number(value);
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.0f", std::abs(value));
  std::string digits = text.data();
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<std::size_t>(at), ",");
  if (value <= -0.5) digits.insert(0, 1, '-');
  return digits;
}

std::string format_percent(double share) {
  if (!std::isfinite(share)) return format_number(share);
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %%", 100 * share);
  return text.data();
}

TimeUnit time_unit(double seconds) {
  if (seconds >= 1 || seconds <= 0) return {1, "s"};
  if (seconds >= 1e-3) return {1e3, "ms"};
  return {1e6, "us"};
}

std::string format_seconds(double seconds) {
  const TimeUnit unit = time_unit(seconds);
  return format_number(seconds * unit.factor, 3) + " " + unit.name;
}

}  // namespace oxytorch::monitor
