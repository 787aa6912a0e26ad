/// The renderers of a Report.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/monitor/report.h"

namespace oxytorch::monitor {

std::string render_html(const Report& report);
std::string render_text(const Report& report, TextStyle style, int width);

/// Charts as one <svg> element; colours and fonts come from the page's style.
std::string render_svg(const LineChart& chart);
std::string render_svg(const BarChart& chart);

/// The text for HTML and XML element content and attributes: markup escaped, bad UTF-8 and control characters replaced.
std::string escape_html(std::string_view text);

/// Colours of the palette; series beyond it start again, dashed.
inline constexpr int kPaletteSize = 6;

/// Round numbers that span [low, high], about `wanted` of them; on a logarithmic axis, powers of ten and their parts.
std::vector<double> linear_ticks(double low, double high, int wanted);
std::vector<double> log_ticks(double low, double high, int wanted);
/// A tick's text, with as many digits as telling neighbours apart takes.
std::string tick_text(double value, double spacing);

}  // namespace oxytorch::monitor
