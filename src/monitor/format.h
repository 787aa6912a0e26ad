/// Numbers and texts as people and JSON readers want them.
#pragma once

#include <string>
#include <string_view>

namespace oxytorch::monitor {

/// Appends the text as a JSON string with quotes; bytes that are not UTF-8 become U+FFFD.
void append_json_string(std::string& out, std::string_view text);
/// Appends the shortest digits that read back as the same double; NaN and infinities as quoted names.
void append_json_number(std::string& out, double value);

/// The text with bytes that are not UTF-8 replaced by U+FFFD.
std::string valid_utf8(std::string_view text);

/// `digits` significant digits without needless zeros; whole with commas from 10,000, with an exponent from 1e9 and
/// below 1e-4: "0.001234", "12.3", "1,234,567", "1.5e-07".
std::string format_number(double value, int digits = 4);
/// Always `decimals` digits after the point, so that a column lines up; 10,000 and more as format_number() does.
std::string format_fixed(double value, int decimals);
/// Decimals that give the largest of some values `digits` significant digits.
int decimals_for(double largest, int digits);
/// A count with commas: "1,234,567".
std::string format_count(double value);
/// A share of 1 as per cent: "12.3 %".
std::string format_percent(double share);

/// A unit for durations of about `seconds`: what to multiply by and how to write it.
struct TimeUnit {
  double factor = 1;
  const char* name = "s";
};
TimeUnit time_unit(double seconds);
/// "12.3 ms".
std::string format_seconds(double seconds);

}  // namespace oxytorch::monitor
