#include "oxytorch/monitor/training_report.h"

#include <algorithm>

#include "monitor/format.h"

namespace oxytorch::monitor {

Report training_report(const std::string& level, const std::vector<SettingLine>& settings,
                       const TrainingFigures& figures) {
  Report report("Oxytorch trainer");
  report.subtitle("Level " + level);
  if (!figures.verdict.empty()) report.paragraph(figures.verdict);
  Table lines{"Settings", {{"setting"}, {"state"}, {"gain", Align::Right}, {"why"}, {"cost"}}, {}, {}};
  for (const SettingLine& line : settings) {
    Cell name(line.name);
    name.strong = line.state == "on";
    lines.rows.push_back({name, line.state, line.gain ? Cell(format_fixed(*line.gain, 2) + "x", *line.gain) : Cell(),
                          line.reason, line.cost});
  }
  report.add(std::move(lines));
  if (!figures.timings.empty()) {
    const auto longest = std::max_element(figures.timings.begin(), figures.timings.end(),
                                          [](const auto& a, const auto& b) { return a.second < b.second; });
    const TimeUnit unit = time_unit(longest->second);
    BarChart chart{"Time of a step", "time", unit.name, {}, {}, "", {}};
    for (const auto& [name, seconds] : figures.timings) chart.bars.push_back({name, seconds * unit.factor, {}, {}, ""});
    report.add(std::move(chart));
  }
  if (!figures.counters.empty()) {
    Table counters{"Counters", {{"what"}, {"count", Align::Right}}, {}, {}};
    for (const auto& [name, value] : figures.counters) counters.rows.push_back({name, Cell(value)});
    report.add(std::move(counters));
  }
  return report;
}

}  // namespace oxytorch::monitor
