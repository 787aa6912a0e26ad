#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "monitor/format.h"
#include "monitor/render.h"

namespace oxytorch::monitor {
namespace {

struct Glyphs {
  const char *rule, *bar, *bar_end, *interval, *tick;
  const char* spark[8];
};
constexpr Glyphs kAscii{"-", "#", "#", "-", "|", {"_", ".", "-", "~", "=", "+", "*", "#"}};
constexpr Glyphs kUnicode{"\u2500", "\u2588",
                          "\u258C", "\u2500",
                          "\u2502", {"\u2581", "\u2582", "\u2583", "\u2584", "\u2585", "\u2586", "\u2587", "\u2588"}};

constexpr int kSparkWidth = 60;
constexpr int kBarWidth = 40;

bool terminal_takes_utf8() {
  if (::isatty(STDOUT_FILENO) == 0) return false;
  for (const char* variable : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(variable);
    if (value == nullptr || *value == '\0') continue;
    std::string lower(value);
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    return lower.find("utf-8") != std::string::npos || lower.find("utf8") != std::string::npos;
  }
  return false;
}

// Valid UTF-8 with control characters (a terminal would obey them) as '?', newlines kept on request.
std::string printable(std::string_view text, bool keep_newlines = false) {
  std::string out = valid_utf8(text);
  for (char& c : out) {
    const auto code = static_cast<unsigned char>(c);
    if ((code < 0x20 || code == 0x7F) && !(keep_newlines && c == '\n')) c = c == '\n' || c == '\t' ? ' ' : '?';
  }
  return out;
}

// Columns a terminal gives to the text; East Asian wide characters take two.
int width_of(std::string_view text) {
  int width = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto lead = static_cast<unsigned char>(text[i]);
    if ((lead & 0xC0) == 0x80) continue;
    std::uint32_t code = lead;
    if (lead >= 0xE0 && lead < 0xF0 && i + 2 < text.size()) {
      code = (lead & 0x0Fu) << 12 | (static_cast<unsigned char>(text[i + 1]) & 0x3Fu) << 6 |
             (static_cast<unsigned char>(text[i + 2]) & 0x3Fu);
    }
    const bool wide = lead >= 0xF0 || (code >= 0x1100 && code <= 0x115F) || (code >= 0x2E80 && code <= 0xA4CF) ||
                      (code >= 0xAC00 && code <= 0xD7A3) || (code >= 0xF900 && code <= 0xFAFF) ||
                      (code >= 0xFF00 && code <= 0xFF60);
    const bool combining = code >= 0x0300 && code <= 0x036F && lead >= 0xE0;
    width += combining ? 0 : wide ? 2 : 1;
  }
  return width;
}

std::string repeated(const char* glyph, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += glyph;
  return out;
}

std::string padded(const std::string& text, int width, Align align) {
  const int space = std::max(0, width - width_of(text));
  const int left = align == Align::Right ? space : align == Align::Center ? space / 2 : 0;
  return std::string(static_cast<std::size_t>(left), ' ') + text +
         std::string(static_cast<std::size_t>(space - left), ' ');
}

class TextRenderer {
 public:
  TextRenderer(const Glyphs& glyphs, int width) : glyphs_(glyphs), width_(width) {}

  std::string render(const Report& report) {
    if (!report.title().empty()) {
      const std::string title = printable(report.title());
      line(title);
      line(repeated(glyphs_.rule, std::min(width_, width_of(title))));
    }
    if (!report.subtitle().empty()) wrap(report.subtitle());
    int widest = 0;
    for (const auto& [name, value] : report.metadata()) widest = std::max(widest, width_of(printable(name)));
    for (const auto& [name, value] : report.metadata()) {
      line(padded(printable(name), widest, Align::Left) + "  " + printable(value));
    }
    for (const Block& block : report.blocks()) {
      if (!out_.empty()) out_ += '\n';
      std::visit([this](const auto& one) { add(one); }, block);
    }
    return std::move(out_);
  }

 private:
  void line(std::string text) {
    text.erase(text.find_last_not_of(' ') + 1);
    out_ += text;
    out_ += '\n';
  }

  void wrap(std::string_view raw, const std::string& prefix = "") {
    const std::string text = printable(raw);
    std::string current = prefix;
    bool empty = true;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find(' ', at), text.size());
      const std::string word = text.substr(at, end - at);
      at = end + 1;
      if (word.empty()) continue;
      if (!empty && width_of(current) + 1 + width_of(word) > width_) {
        line(std::move(current));
        current = std::string(prefix.size(), ' ');
        empty = true;
      }
      if (!empty) current += ' ';
      current += word;
      empty = false;
    }
    if (!empty) line(std::move(current));
  }

  void notes(const std::vector<std::string>& texts) {
    for (const std::string& text : texts) wrap(text, "  ");
  }

  void add(const Heading& heading) {
    const std::string text = printable(heading.text);
    line(text);
    if (heading.level == 2) line(repeated(glyphs_.rule, std::min(width_, width_of(text))));
  }
  void add(const Paragraph& paragraph) { wrap(paragraph.text); }
  void add(const Preformatted& block) { line(printable(block.text, true)); }

  void add(const Table& table) {
    if (!table.title.empty()) line(printable(table.title));
    std::vector<std::string> heads;
    std::vector<int> widths;
    for (const Column& column : table.columns) {
      heads.push_back(printable(column.unit.empty() ? column.title : column.title + " (" + column.unit + ")"));
      widths.push_back(width_of(heads.back()));
    }
    for (const auto& row : table.rows) {
      for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(printable(row[i].text)));
    }
    std::string text;
    int total = 0;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      text += (i > 0 ? "  " : "") + padded(heads[i], widths[i], table.columns[i].align);
      total += widths[i] + (i > 0 ? 2 : 0);
    }
    line(text);
    line(repeated(glyphs_.rule, total));
    for (const auto& row : table.rows) {
      text.clear();
      for (std::size_t i = 0; i < row.size(); ++i) {
        text += (i > 0 ? "  " : "") + padded(printable(row[i].text), widths[i], table.columns[i].align);
      }
      line(text);
    }
    notes(table.notes);
  }

  // A terminal gets the shape: one line of blocks per series, with first, last and extremes.
  void add(const LineChart& chart) {
    const std::string y_label = printable(chart.y_label), title = printable(chart.title);
    line(title.empty() ? y_label : y_label.empty() ? title : title + ", " + y_label);
    int widest = 0;
    for (const Series& series : chart.series) widest = std::max(widest, width_of(printable(series.name)));
    bool any = false;
    for (const Series& series : chart.series) {
      std::vector<std::pair<double, double>> points;
      for (std::size_t i = 0; i < series.x.size(); ++i) {
        const bool shown =
            std::isfinite(series.x[i]) && std::isfinite(series.y[i]) && (!chart.log_y || series.y[i] > 0);
        if (shown) points.emplace_back(series.x[i], series.y[i]);
      }
      const std::string name = "  " + padded(printable(series.name), widest, Align::Left) + "  ";
      if (points.empty()) {
        line(name + "(no finite points)");
        continue;
      }
      any = true;
      std::stable_sort(points.begin(), points.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      line(name + spark(points, chart.log_y) + "  " + format_number(points.front().second) + " to " +
           format_number(points.back().second));
    }
    if (chart.series.empty() || !any) line("  (nothing to draw)");
    notes(chart.notes);
  }

  std::string spark(const std::vector<std::pair<double, double>>& points, bool log_y) const {
    const int columns = std::clamp(width_ - 40, 10, kSparkWidth);
    const double x0 = points.front().first, x1 = points.back().first;
    std::vector<double> sums(static_cast<std::size_t>(columns), 0);
    std::vector<int> counts(static_cast<std::size_t>(columns), 0);
    for (const auto& [x, y] : points) {
      const double at = x1 > x0 ? (x - x0) / (x1 - x0) : 0;
      const auto i = static_cast<std::size_t>(std::clamp(static_cast<int>(at * columns), 0, columns - 1));
      sums[i] += log_y ? std::log(y) : y;
      ++counts[i];
    }
    double low = INFINITY, high = -INFINITY;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (counts[i] == 0) continue;
      sums[i] /= counts[i];
      low = std::min(low, sums[i]);
      high = std::max(high, sums[i]);
    }
    std::string text;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (counts[i] == 0) {
        text += ' ';
        continue;
      }
      const double level = high > low ? (sums[i] - low) / (high - low) : 0;
      text += glyphs_.spark[std::clamp(static_cast<int>(level * 8), 0, 7)];
    }
    return text;
  }

  void add(const BarChart& chart) {
    const std::string title = printable(chart.title), label = printable(chart.axis_label);
    line(title.empty() ? label : label.empty() ? title : title + ", " + label);
    int widest = 0;
    double most = 0;
    for (const Bar& bar : chart.bars) {
      widest = std::max(widest, width_of(printable(bar.label)));
      if (std::isfinite(bar.value)) most = std::max(most, bar.value);
    }
    const int decimals = decimals_for(most, 3);
    const std::string* group = nullptr;
    for (const Bar& bar : chart.bars) {
      if (!bar.group.empty() && (group == nullptr || *group != bar.group)) line(printable(bar.group));
      group = &bar.group;
      const double part = std::isfinite(bar.value) && most > 0 ? std::max(0.0, bar.value) / most * kBarWidth : 0;
      std::string drawn = repeated(glyphs_.bar, static_cast<int>(part));
      if (part - std::floor(part) >= 0.5) drawn += glyphs_.bar_end;
      std::string text = "  " + padded(printable(bar.label), widest, Align::Left) + "  " +
                         padded(drawn, kBarWidth + 1, Align::Left) + " " + format_fixed(bar.value, decimals);
      if (!chart.unit.empty()) text += " " + printable(chart.unit);
      if (bar.low) text += "  [" + format_number(*bar.low) + ", " + format_number(*bar.high) + "]";
      line(text);
    }
    if (chart.bars.empty()) line("  (nothing to draw)");
    notes(chart.notes);
  }

  const Glyphs& glyphs_;
  int width_;
  std::string out_;
};

}  // namespace

std::string render_text(const Report& report, TextStyle style, int width) {
  const bool unicode = style == TextStyle::Unicode || (style == TextStyle::Auto && terminal_takes_utf8());
  return TextRenderer(unicode ? kUnicode : kAscii, width).render(report);
}

}  // namespace oxytorch::monitor
