#include "monitor_step.h"
#include "oxytorch/monitor/training_report.h"
#include "path.h"

namespace oxytorch::bindings {
namespace {

using namespace monitor;  // NOLINT(google-build-using-namespace): every name of the module is used here
using Path = std::optional<PathArgument>;
using Numbers = py::typing::Iterable<py::float_>;
using Rows = py::typing::Iterable<py::typing::Iterable<py::object>>;

Cell to_cell(py::handle value) {
  if (value.is_none()) return {};
  if (py::isinstance<Cell>(value)) return value.cast<Cell>();
  if (py::isinstance<py::str>(value)) return Cell(value.cast<std::string>());
  if (py::isinstance<py::bool_>(value)) return Cell(value.cast<bool>() ? "yes" : "no");
  if (py::isinstance<py::int_>(value)) return Cell(py::str(value).cast<std::string>(), value.cast<double>());
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return Cell(py::str(value).cast<std::string>());
  }
  return Cell(number);
}

Report training_report_of(
    const std::string& level,
    const std::vector<std::tuple<std::string, std::string, std::string, std::string, std::optional<double>>>& settings,
    std::vector<std::pair<std::string, double>> timings, std::vector<std::pair<std::string, double>> counters,
    std::string verdict) {
  std::vector<SettingLine> lines;
  lines.reserve(settings.size());
  for (const auto& [name, state, reason, cost, gain] : settings) lines.push_back({name, state, reason, cost, gain});
  return training_report(level, lines, {std::move(timings), std::move(counters), std::move(verdict)});
}

Table to_table(const std::vector<std::variant<Column, std::string>>& columns, const Rows& rows, std::string title,
               std::vector<std::string> notes) {
  Table table;
  table.title = std::move(title);
  table.notes = std::move(notes);
  for (const auto& column : columns) {
    if (const auto* name = std::get_if<std::string>(&column)) {
      table.columns.push_back({*name});
    } else {
      table.columns.push_back(std::get<Column>(column));
    }
  }
  for (py::handle row : rows) {
    table.rows.emplace_back();
    for (py::handle cell : py::reinterpret_borrow<py::iterable>(row)) table.rows.back().push_back(to_cell(cell));
  }
  return table;
}

std::vector<double> to_numbers(const Numbers& values) {
  std::vector<double> numbers;
  for (py::handle value : values) {
    numbers.push_back(PyFloat_AsDouble(value.ptr()));
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  }
  return numbers;
}

Align parse_align(const std::string& align) {
  if (align == "left") return Align::Left;
  if (align == "right") return Align::Right;
  if (align == "center") return Align::Center;
  throw py::value_error("align is '" + align + "'; use 'left', 'right' or 'center'.");
}

template <class Render, class Write>
std::string render(const Path& path, Render&& render, Write&& write) {
  const py::gil_scoped_release release;
  if (path) write(path->text);
  return render();
}

}  // namespace

TextStyle text_style(std::optional<bool> unicode) {
  return !unicode ? TextStyle::Auto : *unicode ? TextStyle::Unicode : TextStyle::Ascii;
}

void bind_report(py::module_& m) {
  py::class_<Column>(m, "Column",
                     "A table's column. `align` is 'left', 'right' or 'center'; `unit` stands beside the title.")
      .def(py::init([](std::string title, const std::string& align, std::string unit) {
             return Column{std::move(title), parse_align(align), std::move(unit)};
           }),
           py::arg("title"), py::arg("align") = "left", py::arg("unit") = "");
  py::class_<Cell>(m, "Cell",
                   "A table's cell: a text, the number behind it if there is one, and whether it stands out.")
      .def(py::init([](std::string text, std::optional<double> value, bool strong) {
             Cell cell(std::move(text));
             cell.value = value;
             cell.strong = strong;
             return cell;
           }),
           py::arg("text"), py::arg("value") = py::none(), py::arg("strong") = false);
  py::class_<Series>(
      m, "Series",
      "A curve: y over x, with a band from `low` to `high` if both are given. Points that are not finite "
      "break the line.")
      .def(py::init([](std::string name, const Numbers& x, const Numbers& y, const std::optional<Numbers>& low,
                       const std::optional<Numbers>& high, bool dashed) {
             return Series{std::move(name),
                           to_numbers(x),
                           to_numbers(y),
                           low ? to_numbers(*low) : std::vector<double>{},
                           high ? to_numbers(*high) : std::vector<double>{},
                           dashed};
           }),
           py::arg("name"), py::arg("x"), py::arg("y"), py::arg("low") = py::none(), py::arg("high") = py::none(),
           py::arg("dashed") = false);
  py::class_<Bar>(
      m, "Bar",
      "A bar, with an interval if `low` and `high` are given. Bars of one `group` stand together; equal labels "
      "share a colour.")
      .def(py::init([](std::string label, double value, std::optional<double> low, std::optional<double> high,
                       std::string group) { return Bar{std::move(label), value, low, high, std::move(group)}; }),
           py::arg("label"), py::arg("value"), py::arg("low") = py::none(), py::arg("high") = py::none(),
           py::arg("group") = "");

  py::class_<Report>(m, "Report", R"doc(A document of headings, paragraphs, tables and charts.

Every method that adds something returns the report. Texts are data and are escaped. The HTML is one file with
inline style and SVG, light and dark, that needs nothing else.)doc")
      .def(py::init<std::string>(), py::arg("title") = "Report")
      .def_property_readonly("title", &Report::title)
      .def("subtitle", static_cast<Report& (Report::*)(std::string)>(&Report::subtitle), py::arg("text"),
           "A line under the title.")
      .def("metadata", static_cast<Report& (Report::*)(std::string, std::string)>(&Report::metadata), py::arg("name"),
           py::arg("value"), "A name and a value shown at the top.")
      .def("heading", &Report::heading, py::arg("text"), py::arg("level") = 2, "A heading of level 2 or 3.")
      .def("paragraph", &Report::paragraph, py::arg("text"), "A paragraph of text.")
      .def("preformatted", &Report::preformatted, py::arg("text"), "Fixed-width text kept as it is.")
      .def(
          "table",
          [](Report& report, const std::vector<std::variant<Column, std::string>>& columns, const Rows& rows,
             std::string title, std::vector<std::string> notes) -> Report& {
            return report.add(to_table(columns, rows, std::move(title), std::move(notes)));
          },
          py::arg("columns"), py::arg("rows"), py::arg("title") = "", py::arg("notes") = std::vector<std::string>{},
          R"doc(A table.

Parameters
----------
columns
    Titles, or `Column`s for those with an alignment or a unit.
rows
    Each with as many cells as columns: texts, numbers (shown with four significant digits; integers whole), None for
    an empty cell, or `Cell`s.
title, notes
    A line above, and lines below.

Raises
------
ValueError
    If a row has the wrong number of cells.)doc")
      .def(
          "line_chart",
          [](Report& report, std::vector<Series> series, std::string title, std::string x_label, std::string y_label,
             bool log_x, bool log_y, bool zero_based, std::vector<std::string> notes) -> Report& {
            return report.add(LineChart{std::move(title), std::move(x_label), std::move(y_label), std::move(series),
                                        log_x, log_y, zero_based, std::move(notes)});
          },
          py::arg("series"), py::arg("title") = "", py::arg("x_label") = "", py::arg("y_label") = "",
          py::arg("log_x") = false, py::arg("log_y") = false, py::arg("zero_based") = false,
          py::arg("notes") = std::vector<std::string>{},
          R"doc(Curves over a common x axis.

Parameters
----------
series
    The curves. More than one get a legend.
x_label, y_label
    What the axes show, with the unit.
log_x, log_y
    Logarithmic axes; points that are not positive are left out.
zero_based
    The y axis includes 0.

Raises
------
ValueError
    If the lengths of a series' parts differ.)doc")
      .def(
          "bar_chart",
          [](Report& report, std::vector<Bar> bars, std::string title, std::string axis_label, std::string unit,
             std::optional<double> reference, std::string reference_label, std::vector<std::string> notes) -> Report& {
            return report.add(BarChart{std::move(title), std::move(axis_label), std::move(unit), std::move(bars),
                                       reference, std::move(reference_label), std::move(notes)});
          },
          py::arg("bars"), py::arg("title") = "", py::arg("axis_label") = "", py::arg("unit") = "",
          py::arg("reference") = py::none(), py::arg("reference_label") = "",
          py::arg("notes") = std::vector<std::string>{},
          R"doc(Horizontal bars with intervals.

Parameters
----------
bars
    In order from the top. Each bar is drawn with its value.
axis_label, unit
    What the axis shows, and the unit written after each value ("ms", "%", "x").
reference, reference_label
    A line across all bars, for example at 1.0.

Raises
------
ValueError
    If a bar has one end of an interval.)doc")
      .def("append", &Report::append, py::arg("other"), "The blocks of another report under a heading with its title.")
      .def_static("of_training", &training_report_of, py::arg("level"), py::arg("settings"), py::arg("timings"),
                  py::arg("counters"), py::arg("verdict"),
                  "A trainer's report. `settings` are lists of name, state, reason, cost and gain, or None for the "
                  "last; `timings` seconds of a step by phase.")
      .def(
          "to_html",
          [](const Report& report, const Path& path) {
            return render(path, [&] { return report.to_html(); }, [&](const std::string& p) { report.write_html(p); });
          },
          py::arg("path") = py::none(),
          "The report as one HTML file; written to `path` if given, whole or not at all. Raises OSError, which names "
          "the path.")
      .def(
          "to_json",
          [](const Report& report, const Path& path) {
            return render(path, [&] { return report.to_json(); }, [&](const std::string& p) { report.write_json(p); });
          },
          py::arg("path") = py::none(),
          "The report as JSON with \"schema\": \"oxytorch-report/1\"; written to `path` if given. Numbers that are not "
          "finite are the strings \"NaN\", \"Infinity\" and \"-Infinity\".")
      .def(
          "to_text",
          [](const Report& report, const Path& path, std::optional<bool> unicode, int width) {
            const TextStyle style = text_style(unicode);
            return render(
                path, [&] { return report.to_text(style, width); },
                [&](const std::string& p) { report.write_text(p, style); });
          },
          py::arg("path") = py::none(), py::arg("unicode") = py::none(), py::arg("width") = 100,
          "The report as plain text; box-drawing characters if `unicode`, by default on a UTF-8 terminal only.");
}

}  // namespace oxytorch::bindings
