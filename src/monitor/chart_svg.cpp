#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "monitor/format.h"
#include "monitor/render.h"

namespace oxytorch::monitor {
namespace {

// One unit of the drawing is one CSS pixel at full width.
constexpr double kWidth = 860;
constexpr double kPlotHeight = 270;
constexpr double kCharWidth = 6.9;       // of the 12.5 px chart font, on the wide side
constexpr std::size_t kMaxDrawn = 1200;  // points per series; more are thinned to their extremes
constexpr std::size_t kMaxHover = 150;   // hover targets per series

std::string px(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f", value);
  return text.data();
}

double text_width(std::string_view text) {
  std::size_t letters = 0;
  for (char c : text) letters += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return static_cast<double>(letters) * kCharWidth;
}

std::string colour(std::size_t index) { return "c" + std::to_string(index % kPaletteSize); }

void add_text(std::string& out, double x, double y, const char* anchor, std::string_view classes,
              std::string_view text) {
  out += "<text x=\"" + px(x) + "\" y=\"" + px(y) + "\" text-anchor=\"" + anchor + "\" class=\"";
  out += classes;
  out += "\">" + escape_html(text) + "</text>";
}

void add_line(std::string& out, double x1, double y1, double x2, double y2, const char* classes) {
  out += "<line x1=\"" + px(x1) + "\" y1=\"" + px(y1) + "\" x2=\"" + px(x2) + "\" y2=\"" + px(y2) + "\" class=\"" +
         classes + "\"/>";
}

std::string open_svg(double height, std::string_view title) {
  std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + px(kWidth) + " " + px(height) +
                    "\" role=\"img\" aria-label=\"" + escape_html(title) + "\">";
  return out;
}

std::string empty_svg(std::string_view title) {
  std::string out = open_svg(80, title);
  add_text(out, kWidth / 2, 45, "middle", "empty", "nothing to draw");
  return out + "</svg>";
}

// An axis: data range to drawing range.
struct Scale {
  double low = 0, high = 1, from = 0, to = 1;
  bool log = false;

  [[nodiscard]] bool shows(double value) const { return std::isfinite(value) && (!log || value > 0); }
  [[nodiscard]] double at(double value) const {
    const double a = log ? std::log10(low) : low, b = log ? std::log10(high) : high;
    const double v = log ? std::log10(value) : value;
    return b > a ? from + (v - a) / (b - a) * (to - from) : (from + to) / 2;
  }
};

struct Range {
  double low = INFINITY, high = -INFINITY;
  void take(double value, bool log) {
    if (!std::isfinite(value) || (log && value <= 0)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  [[nodiscard]] bool empty() const { return low > high; }
};

// Widens a range that has no extent, and leaves a margin.
Range roomy(Range range, bool log, bool zero_based) {
  if (zero_based && !log) {
    range.low = std::min(range.low, 0.0);
    range.high = std::max(range.high, 0.0);
  }
  if (log) {
    if (range.low == range.high) return {range.low / 2, range.high * 2};
    const double margin = std::pow(range.high / range.low, 0.04);
    return {range.low / margin, range.high * margin};
  }
  if (range.low == range.high) {
    const double margin = range.low == 0 ? 1 : std::abs(range.low) * 0.1;
    return {range.low - margin, range.high + margin};
  }
  const double margin = (range.high - range.low) * 0.04;
  const double low = zero_based && range.low == 0 ? 0 : range.low - margin;
  const double high = zero_based && range.high == 0 ? 0 : range.high + margin;
  return {low, high};
}

std::vector<double> ticks_of(const Scale& scale, int wanted) {
  return scale.log ? log_ticks(scale.low, scale.high, wanted) : linear_ticks(scale.low, scale.high, wanted);
}

double spacing_of(const std::vector<double>& ticks, bool log) {
  if (log || ticks.size() < 2) return 0;
  return ticks[1] - ticks[0];
}

// Indices to draw: all, or in each stretch the first, the lowest, the highest and the last.
std::vector<std::size_t> thinned(const Series& series, const Scale& y) {
  std::vector<std::size_t> keep;
  const std::size_t n = series.x.size();
  if (n <= kMaxDrawn) {
    for (std::size_t i = 0; i < n; ++i) keep.push_back(i);
    return keep;
  }
  const std::size_t stretches = kMaxDrawn / 4;
  for (std::size_t s = 0; s < stretches; ++s) {
    const std::size_t begin = s * n / stretches, end = (s + 1) * n / stretches;
    std::array<std::size_t, 4> chosen{begin, begin, begin, end - 1};
    for (std::size_t i = begin; i < end; ++i) {
      if (!y.shows(series.y[i])) {
        chosen[0] = i;  // keeps the gap
        continue;
      }
      if (!y.shows(series.y[chosen[1]]) || series.y[i] < series.y[chosen[1]]) chosen[1] = i;
      if (!y.shows(series.y[chosen[2]]) || series.y[i] > series.y[chosen[2]]) chosen[2] = i;
    }
    std::sort(chosen.begin(), chosen.end());
    keep.insert(keep.end(), chosen.begin(), std::unique(chosen.begin(), chosen.end()));
  }
  return keep;
}

void add_series(std::string& out, const Series& series, std::size_t index, const Scale& x, const Scale& y) {
  const std::vector<std::size_t> drawn = thinned(series, y);
  const auto visible = [&](std::size_t i) { return x.shows(series.x[i]) && y.shows(series.y[i]); };
  const auto clamped = [&](double value) { return y.shows(value) ? y.at(std::clamp(value, y.low, y.high)) : y.from; };

  if (!series.low.empty()) {
    for (std::size_t begin = 0; begin < drawn.size();) {
      if (!visible(drawn[begin])) {
        ++begin;
        continue;
      }
      std::size_t end = begin;
      while (end < drawn.size() && visible(drawn[end])) ++end;
      std::string path;
      for (std::size_t k = begin; k < end; ++k) {
        path += (k == begin ? "M" : "L") + px(x.at(series.x[drawn[k]])) + " " + px(clamped(series.high[drawn[k]]));
      }
      for (std::size_t k = end; k-- > begin;) {
        path += "L" + px(x.at(series.x[drawn[k]])) + " " + px(clamped(series.low[drawn[k]]));
      }
      out += "<path class=\"band " + colour(index) + "\" d=\"" + path + "Z\"/>";
      begin = end;
    }
  }
  std::string path;
  bool pen_down = false;
  for (std::size_t k = 0; k < drawn.size(); ++k) {
    const std::size_t i = drawn[k];
    if (!visible(i)) {
      pen_down = false;
      continue;
    }
    const bool alone = !pen_down && (k + 1 == drawn.size() || !visible(drawn[k + 1]));
    if (alone) {
      out += "<circle class=\"dot " + colour(index) + "\" cx=\"" + px(x.at(series.x[i])) + "\" cy=\"" +
             px(y.at(series.y[i])) + "\" r=\"3\"/>";
    }
    path += (pen_down ? "L" : "M") + px(x.at(series.x[i])) + " " + px(y.at(series.y[i]));
    pen_down = true;
  }
  if (!path.empty()) {
    const bool dashed = series.dashed || index >= kPaletteSize;
    out += "<path class=\"curve " + colour(index) + (dashed ? " dashed" : "") + "\" d=\"" + path + "\"/>";
  }
}

void add_hover(std::string& out, const LineChart& chart, const Series& series, std::size_t index, const Scale& x,
               const Scale& y) {
  const std::size_t n = series.x.size();
  const std::size_t stride = std::max<std::size_t>(1, (n + kMaxHover - 1) / kMaxHover);
  for (std::size_t i = 0; i < n; i += stride) {
    if (!x.shows(series.x[i]) || !y.shows(series.y[i])) continue;
    std::string title = series.name + "\n" + (chart.x_label.empty() ? "x" : chart.x_label) + ": " +
                        format_number(series.x[i], 6) + "\n" + (chart.y_label.empty() ? "value" : chart.y_label) +
                        ": " + format_number(series.y[i], 5);
    if (!series.low.empty()) {
      title += " (" + format_number(series.low[i], 4) + " to " + format_number(series.high[i], 4) + ")";
    }
    out += "<circle class=\"hover " + colour(index) + "\" cx=\"" + px(x.at(series.x[i])) + "\" cy=\"" +
           px(y.at(series.y[i])) + "\" r=\"5\"><title>" + escape_html(title) + "</title></circle>";
  }
}

struct LegendEntry {
  std::string name;
  std::size_t index = 0;
  bool dashed = false, block = false;
};

// Rows of names with their colours from `left`; returns the height used.
double add_legend(std::string& out, const std::vector<LegendEntry>& entries, double left, double top) {
  double x = left, y = top + 12;
  for (const LegendEntry& entry : entries) {
    const double wide = 26 + text_width(entry.name) + 18;
    if (x > left && x + wide > kWidth) {
      x = left;
      y += 20;
    }
    if (entry.block) {
      out += "<rect class=\"bar " + colour(entry.index) + "\" x=\"" + px(x) + "\" y=\"" + px(y - 10) +
             "\" width=\"14\" height=\"12\" rx=\"2\"/>";
    } else {
      out += "<path class=\"curve " + colour(entry.index) + (entry.dashed ? " dashed" : "") + "\" d=\"M" + px(x) + " " +
             px(y - 4) + "L" + px(x + 18) + " " + px(y - 4) + "\"/>";
    }
    add_text(out, x + (entry.block ? 20 : 24), y, "start", "legend", entry.name);
    x += wide;
  }
  return y - top + 12;
}

std::string shortened(const std::string& text, std::size_t letters) {
  std::size_t seen = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) == 0x80) continue;
    if (++seen > letters) return text.substr(0, i) + "\u2026";
  }
  return text;
}

}  // namespace

std::vector<double> linear_ticks(double low, double high, int wanted) {
  const double rough = (high - low) / std::max(1, wanted);
  if (!(rough > 0) || !std::isfinite(rough)) return {low};
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double part = rough / power;
  const double step = power * (part <= 1 ? 1 : part <= 2 ? 2 : part <= 5 ? 5 : 10);
  std::vector<double> ticks;
  const double slack = step * 1e-9;
  for (double k = std::ceil((low - slack) / step); k * step <= high + slack && ticks.size() < 50; ++k) {
    ticks.push_back(k == 0 ? 0 : k * step);
  }
  return ticks;
}

std::vector<double> log_ticks(double low, double high, int wanted) {
  const double decades = std::log10(high / low);
  std::vector<double> parts{1};
  if (decades < 1.5) {
    parts = {1, 2, 3, 5, 7};
  } else if (decades < 3) {
    parts = {1, 2, 5};
  }
  const int stride = std::max(1, static_cast<int>(std::ceil(decades / std::max(1, wanted))));
  std::vector<double> ticks;
  for (int e = static_cast<int>(std::floor(std::log10(low))); e <= std::log10(high) + 1e-9; ++e) {
    if (parts.size() == 1 && e % stride != 0) continue;
    for (double part : parts) {
      const double tick = part * std::pow(10.0, e);
      if (tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9)) ticks.push_back(tick);
    }
  }
  if (ticks.size() < 2) return linear_ticks(low, high, wanted);
  return ticks;
}

std::string tick_text(double value, double spacing) {
  const double size = std::max(std::abs(value), spacing);
  if (value == 0) return "0";
  if (size >= 1e6 || size < 1e-3) {
    std::array<char, 32> text{};
    const int digits =
        spacing > 0 ? std::max(1, static_cast<int>(std::floor(std::log10(std::abs(value) / spacing))) + 1) : 1;
    std::snprintf(text.data(), text.size(), "%.*g", std::min(digits, 15), value);
    return text.data();
  }
  if (spacing <= 0) return format_number(value, 3);
  const int decimals = std::max(0, -static_cast<int>(std::floor(std::log10(spacing) + 1e-9)));
  if (decimals == 0) return format_count(value);
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", decimals, value);
  return text.data();
}

std::string render_svg(const LineChart& chart) {
  const std::string title = chart.title.empty() ? chart.y_label : chart.title;
  Range x_range, y_range;
  for (const Series& series : chart.series) {
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      const bool shown = std::isfinite(series.x[i]) && std::isfinite(series.y[i]) &&
                         (!chart.log_x || series.x[i] > 0) && (!chart.log_y || series.y[i] > 0);
      if (!shown) continue;
      x_range.take(series.x[i], chart.log_x);
      y_range.take(series.y[i], chart.log_y);
      if (!series.low.empty()) {
        y_range.take(series.low[i], chart.log_y);
        y_range.take(series.high[i], chart.log_y);
      }
    }
  }
  if (x_range.empty() || y_range.empty()) return empty_svg(title);

  std::string body;
  double top = 8;
  if (!chart.y_label.empty()) {
    add_text(body, 0, top + 11, "start", "label", chart.y_label);
    top += 24;
  }
  Scale y{0, 1, top + kPlotHeight, top, chart.log_y};
  const Range y_room = roomy(y_range, chart.log_y, chart.zero_based);
  y.low = y_room.low;
  y.high = y_room.high;
  const std::vector<double> y_ticks = ticks_of(y, 5);
  double left = 30;
  for (double tick : y_ticks) left = std::max(left, text_width(tick_text(tick, spacing_of(y_ticks, y.log))) + 12);

  Scale x{x_range.low, x_range.high, left, kWidth - 14, chart.log_x};
  if (x.low == x.high) {
    const Range room = roomy(x_range, chart.log_x, false);
    x.low = room.low;
    x.high = room.high;
  }
  for (double tick : y_ticks) {
    add_line(body, left, y.at(tick), kWidth - 14, y.at(tick), "grid");
    add_text(body, left - 8, y.at(tick) + 4, "end", "tick", tick_text(tick, spacing_of(y_ticks, y.log)));
  }
  const std::vector<double> x_ticks = ticks_of(x, 8);
  add_line(body, left, y.from, kWidth - 14, y.from, "axis");
  for (double tick : x_ticks) {
    add_line(body, x.at(tick), y.from, x.at(tick), y.from + 5, "axis");
    add_text(body, x.at(tick), y.from + 19, "middle", "tick", tick_text(tick, spacing_of(x_ticks, x.log)));
  }
  double bottom = y.from + 26;
  if (!chart.x_label.empty()) {
    add_text(body, (left + kWidth - 14) / 2, bottom + 13, "middle", "label", chart.x_label);
    bottom += 22;
  }
  for (std::size_t i = 0; i < chart.series.size(); ++i) add_series(body, chart.series[i], i, x, y);
  for (std::size_t i = 0; i < chart.series.size(); ++i) add_hover(body, chart, chart.series[i], i, x, y);
  if (chart.series.size() > 1) {
    std::vector<LegendEntry> entries;
    for (std::size_t i = 0; i < chart.series.size(); ++i) {
      entries.push_back({chart.series[i].name, i, chart.series[i].dashed || i >= kPaletteSize, false});
    }
    bottom += add_legend(body, entries, left, bottom + 4);
  }
  return open_svg(bottom + 4, title) + body + "</svg>";
}

std::string render_svg(const BarChart& chart) {
  Range range;
  range.take(0, false);
  std::vector<std::string> labels;
  bool grouped = false;
  std::size_t finite = 0;
  for (const Bar& bar : chart.bars) {
    finite += std::isfinite(bar.value);
    range.take(bar.value, false);
    if (bar.low) {
      range.take(*bar.low, false);
      range.take(*bar.high, false);
    }
    if (std::find(labels.begin(), labels.end(), bar.label) == labels.end()) labels.push_back(bar.label);
    grouped = grouped || !bar.group.empty();
  }
  if (finite == 0) return empty_svg(chart.title);
  if (chart.reference) range.take(*chart.reference, false);
  if (range.low == range.high) range.high = 1;

  constexpr double kBar = 20, kGap = 7, kGroupGap = 16;
  double left = 40;
  for (const std::string& label : labels) left = std::max(left, text_width(shortened(label, 30)) + 14);
  const int decimals = decimals_for(std::max(std::abs(range.low), std::abs(range.high)), 3);
  const auto value_text = [&](const Bar& bar) {
    std::string text = format_fixed(bar.value, decimals);
    if (!chart.unit.empty()) text += (chart.unit == "x" ? "" : " ") + chart.unit;
    return text;
  };
  double right = 40;
  for (const Bar& bar : chart.bars) right = std::max(right, text_width(value_text(bar)) + 16);
  Scale x{range.low, range.high, left, kWidth - right, false};

  std::string body, marks;
  double y = chart.reference && !chart.reference_label.empty() ? 22 : 6;
  const double top = y;
  const std::string* group = nullptr;
  for (const Bar& bar : chart.bars) {
    if (!bar.group.empty() && (group == nullptr || *group != bar.group)) {
      if (group != nullptr) y += kGroupGap;
      add_text(marks, 0, y + 13, "start", "group", bar.group);
      y += 24;
    }
    group = &bar.group;
    const auto which = static_cast<std::size_t>(std::find(labels.begin(), labels.end(), bar.label) - labels.begin());
    const std::size_t index = grouped ? which : 0;
    add_text(marks, left - 8, y + 14, "end", "tick", shortened(bar.label, 30));
    std::string title = (bar.group.empty() ? "" : bar.group + ", ") + bar.label + ": " + value_text(bar);
    if (bar.low) title += " (" + format_number(*bar.low, 4) + " to " + format_number(*bar.high, 4) + ")";
    double end = x.at(0);
    if (std::isfinite(bar.value)) {
      const double a = std::min(x.at(0), x.at(bar.value)), b = std::max(x.at(0), x.at(bar.value));
      marks += "<rect class=\"bar " + colour(index) + "\" x=\"" + px(a) + "\" y=\"" + px(y) + "\" width=\"" +
               px(std::max(0.5, b - a)) + "\" height=\"" + px(kBar) + "\" rx=\"2\"><title>" + escape_html(title) +
               "</title></rect>";
      end = b;
    }
    if (bar.low && std::isfinite(*bar.low) && std::isfinite(*bar.high)) {
      const double a = x.at(*bar.low), b = x.at(*bar.high), middle = y + kBar / 2;
      add_line(marks, a, middle, b, middle, "whisker");
      add_line(marks, a, middle - 5, a, middle + 5, "whisker");
      add_line(marks, b, middle - 5, b, middle + 5, "whisker");
      end = std::max(end, b);
    }
    add_text(marks, end + 8, y + 14, "start", "value", value_text(bar));
    y += kBar + kGap;
  }
  const std::vector<double> ticks = linear_ticks(range.low, range.high, 6);
  for (double tick : ticks) {
    add_line(body, x.at(tick), top - 2, x.at(tick), y, "grid");
    add_text(body, x.at(tick), y + 17, "middle", "tick", tick_text(tick, spacing_of(ticks, false)));
  }
  body += marks;
  add_line(body, x.at(0), top - 2, x.at(0), y, "axis");
  if (chart.reference) {
    add_line(body, x.at(*chart.reference), top - 2, x.at(*chart.reference), y, "reference");
    if (!chart.reference_label.empty()) {
      add_text(body, x.at(*chart.reference), top - 8, "middle", "tick", chart.reference_label);
    }
  }
  double bottom = y + 24;
  if (!chart.axis_label.empty()) {
    const bool with_unit = !chart.unit.empty() && chart.unit != "x";
    const std::string label = with_unit ? chart.axis_label + ", " + chart.unit : chart.axis_label;
    add_text(body, (left + kWidth - right) / 2, bottom + 12, "middle", "label", label);
    bottom += 20;
  }
  return open_svg(bottom + 4, chart.title) + body + "</svg>";
}

}  // namespace oxytorch::monitor
