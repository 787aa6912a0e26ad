/// A small document: headings, paragraphs, tables and charts, written as one HTML file that needs nothing else, as
/// plain text for a terminal, or as JSON.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::monitor {

enum class TextStyle {
  Ascii,
  Unicode,  ///< box drawing and block characters, UTF-8
  Auto,     ///< Unicode if standard output is a terminal whose locale is UTF-8, else Ascii
};

enum class Align { Left, Right, Center };

struct OXY_API Column {
  std::string title;
  Align align = Align::Left;
  std::string unit = {};  ///< shown beside the title
};

/// One cell: a text, and the number behind it where there is one (JSON carries both).
struct OXY_API Cell {
  std::string text;
  std::optional<double> value;
  bool strong = false;

  Cell() = default;
  Cell(std::string text) : text(std::move(text)) {}
  Cell(const char* text) : text(text) {}
  Cell(std::string text, double value) : text(std::move(text)), value(value) {}
  /// The number with `digits` significant digits.
  Cell(double value, int digits = 4);
};

struct OXY_API Table {
  std::string title;
  std::vector<Column> columns;
  std::vector<std::vector<Cell>> rows;  ///< each as long as `columns`
  std::vector<std::string> notes;
};

/// y over x. `low` and `high` draw a band; they are empty or as long as `x`. Points that are not finite, or not
/// positive on a logarithmic axis, break the line.
struct OXY_API Series {
  std::string name;
  std::vector<double> x, y;
  std::vector<double> low, high;
  bool dashed = false;
};

struct OXY_API LineChart {
  std::string title;
  std::string x_label, y_label;
  std::vector<Series> series;
  bool log_x = false, log_y = false;
  bool zero_based = false;  ///< the y axis starts at 0
  std::vector<std::string> notes;
};

/// One bar, with an interval where low and high are set. Bars of one group stand together; bars with the same label
/// share a colour across groups.
struct OXY_API Bar {
  std::string label;
  double value = 0;
  std::optional<double> low, high;
  std::string group;
};

struct OXY_API BarChart {
  std::string title;
  std::string axis_label;
  std::string unit;  ///< after each value, for example "ms", "%", "x"
  std::vector<Bar> bars;
  std::optional<double> reference;  ///< a line across the bars, for example 1.0
  std::string reference_label;
  std::vector<std::string> notes;
};

struct OXY_API Heading {
  std::string text;
  int level = 2;  ///< 2 or 3
};

struct OXY_API Paragraph {
  std::string text;
};

/// Fixed-width text kept as it is: a command line, a log.
struct OXY_API Preformatted {
  std::string text;
};

using Block = std::variant<Heading, Paragraph, Preformatted, Table, LineChart, BarChart>;

/// The document. Every text is data: renderers escape it, and bytes that are not UTF-8 become U+FFFD. A value type;
/// one thread at a time.
class OXY_API Report {
 public:
  explicit Report(std::string title = "Report");

  /// A line under the title. All of these return *this.
  Report& subtitle(std::string text);
  /// A name and a value shown at the top, in the order given.
  Report& metadata(std::string name, std::string value);
  Report& heading(std::string text, int level = 2);
  Report& paragraph(std::string text);
  Report& preformatted(std::string text);
  /// The add functions throw Error(InvalidArgument) for a block whose parts do not fit together: a row with the wrong
  /// number of cells, a series whose lengths differ, an interval with one end.
  Report& add(Table table);
  Report& add(LineChart chart);
  Report& add(BarChart chart);
  /// The blocks of another report under a heading with its title.
  Report& append(const Report& other);

  [[nodiscard]] const std::string& title() const noexcept { return title_; }
  [[nodiscard]] const std::string& subtitle() const noexcept { return subtitle_; }
  [[nodiscard]] const std::vector<std::pair<std::string, std::string>>& metadata() const noexcept { return metadata_; }
  [[nodiscard]] const std::vector<Block>& blocks() const noexcept { return blocks_; }

  /// One HTML file: inline style and SVG, light and dark, no script, no reference to anything outside it.
  [[nodiscard]] std::string to_html() const;
  /// JSON with "schema": "oxytorch-report/1". Numbers that are not finite are the strings "NaN", "Infinity",
  /// "-Infinity".
  [[nodiscard]] std::string to_json() const;
  [[nodiscard]] std::string to_text(TextStyle style = TextStyle::Auto, int width = 100) const;
  /// Written to a file beside `path`, synchronised and renamed over it. Throw Error(NotFound) where its folder is
  /// missing and Error(Io), which name the path.
  void write_html(const std::string& path) const;
  void write_json(const std::string& path) const;
  void write_text(const std::string& path, TextStyle style = TextStyle::Unicode) const;

 private:
  std::string title_, subtitle_;
  std::vector<std::pair<std::string, std::string>> metadata_;
  std::vector<Block> blocks_;
};

}  // namespace oxytorch::monitor
