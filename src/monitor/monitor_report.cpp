#include <array>
#include <ctime>

#include "monitor/format.h"
#include "monitor/state.h"

namespace oxytorch::monitor {
namespace {

Table phase_table(const Summary& summary) {
  const TimeUnit unit = time_unit(summary.step.median);
  const int decimals = decimals_for(summary.step.median * unit.factor, 4);
  const auto time_cell = [&](double seconds) {
    return Cell(format_fixed(seconds * unit.factor, decimals), seconds * unit.factor);
  };
  Table table;
  table.columns = {{"phase", Align::Left, ""},          {"share", Align::Right, "%"},
                   {"median", Align::Right, unit.name}, {"p10", Align::Right, unit.name},
                   {"p90", Align::Right, unit.name},    {"max", Align::Right, unit.name},
                   {"entries", Align::Right, ""}};
  const auto row = [&](std::string name, double share, const Distribution& time, std::uint64_t entries) {
    const std::string percent = format_percent(share);
    table.rows.push_back({std::move(name),
                          {percent.substr(0, percent.find(' ')), 100 * share},
                          time_cell(time.median),
                          time_cell(time.p10),
                          time_cell(time.p90),
                          time_cell(time.max),
                          {format_count(static_cast<double>(entries)), static_cast<double>(entries)}});
  };
  row("step", 1, summary.step, summary.steps);
  for (Cell& cell : table.rows.back()) cell.strong = true;
  for (const PhaseSummary& phase : summary.phases) {
    row(std::string(static_cast<std::size_t>(2 * phase.depth + 2), ' ') + phase.name, phase.share, phase.time,
        phase.entries);
  }
  if (!summary.phases.empty()) {
    const std::string percent = format_percent(summary.other_share);
    table.rows.push_back({Cell("  (in no phase)"),
                          {percent.substr(0, percent.find(' ')), 100 * summary.other_share},
                          "",
                          "",
                          "",
                          "",
                          ""});
  }
  return table;
}

std::string plural(std::uint64_t count, const char* noun) {
  return format_count(static_cast<double>(count)) + " " + noun + (count == 1 ? "" : "s");
}

std::vector<std::string> remarks(const Summary& summary) {
  std::vector<std::string> lines;
  if (summary.dropped > 0) {
    lines.push_back(plural(summary.dropped, "record") +
                    " reached no sink because the ring was full; flush more often or raise ring_records.");
  }
  if (summary.cancelled > 0) lines.push_back(plural(summary.cancelled, "step") + " left by an exception, not timed.");
  if (summary.phases_outside > 0) {
    lines.push_back(plural(summary.phases_outside, "phase") + " entered outside any step, not timed.");
  }
  for (const std::string& sink : summary.failed_sinks) lines.push_back("sink failed: " + sink);
  return lines;
}

Table scalar_table(const Summary& summary) {
  Table table;
  table.columns = {{"scalar", Align::Left, ""},     {"last", Align::Right, ""}, {"mean", Align::Right, ""},
                   {"min", Align::Right, ""},       {"max", Align::Right, ""},  {"count", Align::Right, ""},
                   {"not finite", Align::Right, ""}};
  for (const ScalarSummary& scalar : summary.scalars) {
    const bool any = scalar.count > scalar.non_finite;
    const auto finite = [any](double value) { return any ? Cell(value) : Cell("-"); };
    const auto count = [](std::uint64_t n) {
      return Cell(format_count(static_cast<double>(n)), static_cast<double>(n));
    };
    table.rows.push_back({scalar.name, Cell(scalar.last), finite(scalar.mean), finite(scalar.min), finite(scalar.max),
                          count(scalar.count), count(scalar.non_finite)});
    if (scalar.non_finite > 0) table.rows.back().back().strong = true;
  }
  return table;
}

std::string headline(const Summary& summary) {
  if (summary.steps == 0) return "No finished steps.";
  std::string text = plural(summary.steps, "step") + ", median " + format_seconds(summary.step.median) + " (p10 " +
                     format_seconds(summary.step.p10) + ", p90 " + format_seconds(summary.step.p90) + ")";
  if (summary.samples > 0) text += ", " + format_count(summary.samples_per_second) + " samples/s inside steps";
  text += ", " + format_seconds(summary.step.sum) + " in steps and " + format_seconds(summary.between_seconds) +
          " between them.";
  return text;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 64> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M UTC", &parts);
  return text.data();
}

Series as_series(std::string name, const std::vector<CurvePoint>& points, double factor) {
  Series series;
  series.name = std::move(name);
  bool band = false;
  for (const CurvePoint& point : points) {
    series.x.push_back(point.x);
    series.y.push_back(point.mean * factor);
    series.low.push_back(point.min * factor);
    series.high.push_back(point.max * factor);
    band = band || point.min < point.max;
  }
  if (!band) {
    series.low.clear();
    series.high.clear();
  }
  return series;
}

}  // namespace

std::string table_text(const Summary& summary, TextStyle style) {
  Report report("");
  report.paragraph(headline(summary));
  if (summary.steps > 0) report.add(phase_table(summary));
  if (!summary.scalars.empty()) report.add(scalar_table(summary));
  for (const std::string& line : remarks(summary)) report.paragraph(line);
  return report.to_text(style);
}

Report build_report(std::string title, const Summary& summary, const Curves& curves) {
  Report report(std::move(title));
  report.subtitle(headline(summary));
  report.metadata("written", utc_now());
  report.metadata("steps", format_count(static_cast<double>(summary.steps)));
  if (summary.samples > 0) {
    report.metadata("samples", format_count(static_cast<double>(summary.samples)));
    report.metadata("samples per second", format_count(summary.samples_per_second));
  }
  for (const std::string& line : remarks(summary)) report.paragraph(line);
  if (summary.steps > 0) {
    report.heading("Where the step goes");
    Table table = phase_table(summary);
    table.notes.push_back(
        "Host time per step. A phase includes what is nested inside it; the median and the quantiles are over the "
        "steps that entered it.");
    report.add(std::move(table));
    if (!summary.phases.empty()) {
      BarChart shares;
      shares.title = "Share of the step";
      shares.axis_label = "share of all step time, without nested phases";
      shares.unit = "%";
      for (const PhaseSummary& phase : summary.phases)
        shares.bars.push_back({phase.name, 100 * phase.self_share, {}, {}, ""});
      shares.bars.push_back({"in no phase", 100 * summary.other_share, {}, {}, ""});
      report.add(std::move(shares));
    }
    report.heading("Step time");
    const TimeUnit unit = time_unit(summary.step.median);
    LineChart times;
    times.x_label = "step";
    times.y_label = std::string("step time, ") + unit.name;
    times.series.push_back(as_series("step time", curves.step_time, unit.factor));
    // A slow first step must not flatten the rest.
    times.log_y = summary.step.max > 20 * summary.step.median;
    times.zero_based = !times.log_y;
    if (!times.series[0].low.empty()) times.notes.push_back("Line: mean of neighbouring steps; band: their range.");
    report.add(std::move(times));
  }
  if (!summary.scalars.empty()) {
    report.heading("Scalars");
    report.add(scalar_table(summary));
    for (const NamedCurve& curve : curves.scalars) {
      LineChart chart;
      chart.title = curve.name;
      chart.x_label = "step";
      chart.series.push_back(as_series(curve.name, curve.points, 1));
      report.add(std::move(chart));
    }
  }
  return report;
}

}  // namespace oxytorch::monitor
