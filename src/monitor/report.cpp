#include "oxytorch/monitor/report.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/whole_file.h"
#include "monitor/format.h"
#include "monitor/render.h"
#include "oxytorch/error.h"

namespace oxytorch::monitor {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json numbers(const std::vector<double>& values) {
  Json array = Json::array();
  for (double value : values) array.push_back(number(value));
  return array;
}

const char* align_name(Align align) {
  switch (align) {
    case Align::Left: return "left";
    case Align::Right: return "right";
    case Align::Center: return "center";
  }
  return "left";
}

// One overload per block.
Json to_json(const Heading& block) {
  return {{"type", "heading"}, {"text", valid_utf8(block.text)}, {"level", block.level}};
}
Json to_json(const Paragraph& block) { return {{"type", "paragraph"}, {"text", valid_utf8(block.text)}}; }
Json to_json(const Preformatted& block) { return {{"type", "preformatted"}, {"text", valid_utf8(block.text)}}; }

Json to_json(const std::vector<std::string>& texts) {
  Json array = Json::array();
  for (const std::string& text : texts) array.push_back(valid_utf8(text));
  return array;
}

Json to_json(const Table& block) {
  Json columns = Json::array(), rows = Json::array();
  for (const Column& column : block.columns) {
    columns.push_back(
        {{"title", valid_utf8(column.title)}, {"unit", valid_utf8(column.unit)}, {"align", align_name(column.align)}});
  }
  for (const auto& row : block.rows) {
    Json cells = Json::array();
    for (const Cell& cell : row) {
      Json entry = {{"text", valid_utf8(cell.text)}};
      if (cell.value) entry["value"] = number(*cell.value);
      if (cell.strong) entry["strong"] = true;
      cells.push_back(std::move(entry));
    }
    rows.push_back(std::move(cells));
  }
  return {{"type", "table"},
          {"title", valid_utf8(block.title)},
          {"columns", std::move(columns)},
          {"rows", std::move(rows)},
          {"notes", to_json(block.notes)}};
}

Json to_json(const LineChart& block) {
  Json series = Json::array();
  for (const Series& one : block.series) {
    Json entry = {{"name", valid_utf8(one.name)}, {"x", numbers(one.x)}, {"y", numbers(one.y)}};
    if (!one.low.empty()) {
      entry["low"] = numbers(one.low);
      entry["high"] = numbers(one.high);
    }
    series.push_back(std::move(entry));
  }
  return {{"type", "line_chart"},
          {"title", valid_utf8(block.title)},
          {"x_label", valid_utf8(block.x_label)},
          {"y_label", valid_utf8(block.y_label)},
          {"log_x", block.log_x},
          {"log_y", block.log_y},
          {"series", std::move(series)},
          {"notes", to_json(block.notes)}};
}

Json to_json(const BarChart& block) {
  Json bars = Json::array();
  for (const Bar& bar : block.bars) {
    Json entry = {{"label", valid_utf8(bar.label)}, {"value", number(bar.value)}};
    if (!bar.group.empty()) entry["group"] = valid_utf8(bar.group);
    if (bar.low) {
      entry["low"] = number(*bar.low);
      entry["high"] = number(*bar.high);
    }
    bars.push_back(std::move(entry));
  }
  Json result = {{"type", "bar_chart"},
                 {"title", valid_utf8(block.title)},
                 {"axis_label", valid_utf8(block.axis_label)},
                 {"unit", valid_utf8(block.unit)},
                 {"bars", std::move(bars)},
                 {"notes", to_json(block.notes)}};
  if (block.reference) {
    result["reference"] = number(*block.reference);
    result["reference_label"] = valid_utf8(block.reference_label);
  }
  return result;
}

}  // namespace

Cell::Cell(double value, int digits) : text(format_number(value, digits)), value(value) {}

Report::Report(std::string title) : title_(std::move(title)) {}

Report& Report::subtitle(std::string text) {
  subtitle_ = std::move(text);
  return *this;
}

Report& Report::metadata(std::string name, std::string value) {
  metadata_.emplace_back(std::move(name), std::move(value));
  return *this;
}

Report& Report::heading(std::string text, int level) {
  OXY_CHECK(level == 2 || level == 3, InvalidArgument, "heading '", text, "' has level ", level, "; use 2 or 3.");
  blocks_.emplace_back(Heading{std::move(text), level});
  return *this;
}

Report& Report::paragraph(std::string text) {
  blocks_.emplace_back(Paragraph{std::move(text)});
  return *this;
}

Report& Report::preformatted(std::string text) {
  blocks_.emplace_back(Preformatted{std::move(text)});
  return *this;
}

Report& Report::add(Table table) {
  OXY_CHECK(!table.columns.empty(), InvalidArgument, "table '", table.title, "' has no columns.");
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    OXY_CHECK(table.rows[i].size() == table.columns.size(), InvalidArgument, "row ", i, " of table '", table.title,
              "' has ", table.rows[i].size(), " cells; the table has ", table.columns.size(), " columns.");
  }
  blocks_.emplace_back(std::move(table));
  return *this;
}

Report& Report::add(LineChart chart) {
  for (const Series& one : chart.series) {
    OXY_CHECK(one.x.size() == one.y.size(), InvalidArgument, "series '", one.name, "' has ", one.x.size(),
              " x values and ", one.y.size(), " y values; they must be equally many.");
    OXY_CHECK(one.low.size() == one.high.size() && (one.low.empty() || one.low.size() == one.x.size()), InvalidArgument,
              "series '", one.name, "' has a band of ", one.low.size(), " low and ", one.high.size(),
              " high values; give both for each of its ", one.x.size(), " points, or neither.");
  }
  blocks_.emplace_back(std::move(chart));
  return *this;
}

Report& Report::add(BarChart chart) {
  for (const Bar& bar : chart.bars) {
    OXY_CHECK(bar.low.has_value() == bar.high.has_value(), InvalidArgument, "bar '", bar.label,
              "' has one end of an interval; give low and high, or neither.");
  }
  blocks_.emplace_back(std::move(chart));
  return *this;
}

Report& Report::append(const Report& other) {
  const std::vector<Block> blocks = other.blocks_;  // `other` may be this
  heading(other.title_);
  if (!other.subtitle_.empty()) paragraph(other.subtitle_);
  for (Block block : blocks) {
    if (auto* inner = std::get_if<Heading>(&block)) inner->level = 3;
    blocks_.push_back(std::move(block));
  }
  return *this;
}

std::string Report::to_html() const { return render_html(*this); }

std::string Report::to_text(TextStyle style, int width) const {
  OXY_CHECK(width >= 40, InvalidArgument, "to_text: width is ", width, "; use at least 40 columns.");
  return render_text(*this, style, width);
}

std::string Report::to_json() const {
  Json metadata = Json::array(), blocks = Json::array();
  for (const auto& [name, value] : metadata_)
    metadata.push_back({{"name", valid_utf8(name)}, {"value", valid_utf8(value)}});
  for (const Block& block : blocks_) {
    blocks.push_back(std::visit([](const auto& one) { return monitor::to_json(one); }, block));
  }
  const Json document = {{"schema", "oxytorch-report/1"},
                         {"title", valid_utf8(title_)},
                         {"subtitle", valid_utf8(subtitle_)},
                         {"metadata", std::move(metadata)},
                         {"blocks", std::move(blocks)}};
  return document.dump() + "\n";
}

void Report::write_html(const std::string& path) const { write_whole_file(path, {to_html()}); }
void Report::write_json(const std::string& path) const { write_whole_file(path, {to_json()}); }
void Report::write_text(const std::string& path, TextStyle style) const { write_whole_file(path, {to_text(style)}); }

}  // namespace oxytorch::monitor
