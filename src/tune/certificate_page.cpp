#include <algorithm>
#include <cmath>
#include <utility>

#include "base/size_text.h"
#include "oxytorch/monitor/report.h"
#include "oxytorch/tune/certificate.h"
#include "tune/words.h"

namespace oxytorch::tune {
namespace {

using monitor::Align;
using monitor::Cell;
using monitor::Report;

Cell seconds_cell(double seconds) { return seconds > 0 ? Cell(monitor::format_seconds(seconds), seconds) : Cell(""); }

monitor::Table table_of(const std::vector<CertificateEntry>& entries) {
  monitor::Table table;
  table.title = "What was tried";
  table.columns = {{"strategy"},
                   {"kind"},
                   {"status"},
                   {"speedup", Align::Right},
                   {"interval"},
                   {"pairs", Align::Right},
                   {"one-off", Align::Right},
                   {"repaid after", Align::Right}};
  for (const CertificateEntry& entry : entries) {
    if (entry.status == Status::Skipped) continue;
    const auto& speedup = entry.speedup;
    Cell strategy(entry.strategy);
    strategy.strong = entry.status == Status::Accepted;
    table.rows.push_back(
        {strategy, Cell(std::string(name(entry.kind))), Cell(std::string(name(entry.status))),
         speedup ? Cell(ratio_text(speedup->mid), speedup->mid) : Cell(""),
         speedup ? Cell(monitor::format_fixed(speedup->low, 3) + " to " + monitor::format_fixed(speedup->high, 3))
                 : Cell(""),
         entry.pairs > 0 ? Cell(std::to_string(entry.pairs), entry.pairs) : Cell(""), seconds_cell(entry.cost_seconds),
         entry.break_even_steps
             ? Cell(monitor::format_count(std::ceil(*entry.break_even_steps)) + " steps", *entry.break_even_steps)
             : Cell("")});
  }
  return table;
}

monitor::BarChart chart_of(const Certificate& certificate) {
  monitor::BarChart chart;
  chart.title = "Speedup of a step, with the interval that it was measured to";
  chart.axis_label = "time without over time with";
  chart.unit = "x";
  chart.reference = 1.0;
  chart.reference_label = "as given";
  const auto add = [&](const std::string& label, const std::optional<Interval>& speedup) {
    if (speedup) chart.bars.push_back({label, speedup->mid, speedup->low, speedup->high, ""});
  };
  add("all together", certificate.speedup);
  for (const CertificateEntry& entry : certificate.entries) add(entry.strategy, entry.speedup);
  return chart;
}

std::string step_line(const Certificate& certificate) {
  std::string text = "A step took " + monitor::format_seconds(certificate.baseline_seconds) + " as given and takes " +
                     monitor::format_seconds(certificate.tuned_seconds) + " now";
  if (certificate.speedup) text.append(": ").append(interval_text(*certificate.speedup));
  return text += '.';
}

/// What a step's tensors take; empty where it was not measured.
std::string memory_line(const Certificate& certificate) {
  if (!certificate.given_peak_bytes || !certificate.tuned_peak_bytes) return {};
  const auto given = static_cast<double>(std::max<std::int64_t>(*certificate.given_peak_bytes, 1));
  std::string text =
      "Its tensors take " + size_text(*certificate.tuned_peak_bytes) + " at the most, model and optimizer included";
  if (!certificate.accepted().empty()) {
    text.append(", and ").append(size_text(*certificate.given_peak_bytes)).append(" as given (");
    text.append(ratio_text(static_cast<double>(*certificate.tuned_peak_bytes) / given)).append(")");
  }
  if (certificate.tuning_peak_bytes) {
    text.append("; while tuning they took ").append(size_text(*certificate.tuning_peak_bytes)).append(" (");
    text.append(ratio_text(static_cast<double>(*certificate.tuning_peak_bytes) / given)).append(")");
  }
  return text += '.';
}

std::string repaid_line(const Certificate& certificate) {
  std::string text = "Tuning took " + monitor::format_seconds(certificate.tuning_seconds);
  if (certificate.compile_seconds > 0) {
    text.append(" and compiling ").append(monitor::format_seconds(certificate.compile_seconds));
  }
  const auto steps = [](double count) { return monitor::format_count(std::ceil(count)) + " steps"; };
  if (const auto repaid = certificate.repaid_after()) {
    text.append("; repaid after ").append(steps(*repaid));
    if (certificate.compile_seconds > 0) {
      text.append(", without compiling after ").append(steps(*certificate.repaid_after(false)));
    }
  } else {
    text.append("; nothing is saved that would repay it");
  }
  return text += '.';
}

/// What was not tried, one sentence a reason.
void add_skipped(Report& report, const std::vector<CertificateEntry>& entries) {
  std::vector<std::pair<std::string, std::string>> reasons;  // in the order of their first strategy
  for (const CertificateEntry& entry : entries) {
    if (entry.status != Status::Skipped) continue;
    auto found = std::ranges::find(reasons, entry.reason, &std::pair<std::string, std::string>::first);
    if (found == reasons.end()) found = reasons.insert(found, {entry.reason, ""});
    found->second.append(found->second.empty() ? "" : ", ").append(entry.strategy);
  }
  for (const auto& [reason, names] : reasons) {
    std::string text = "Not tried: " + names;
    text.append(": ").append(reason).append(reason.ends_with('.') ? "" : ".");
    report.paragraph(std::move(text));
  }
}

void add_sentences(Report& report, const std::vector<CertificateEntry>& entries) {
  for (const CertificateEntry& entry : entries) {
    if (entry.status == Status::Skipped) continue;
    std::string text = entry.strategy + " (" + std::string(name(entry.status)) + "): " + entry.reason;
    if (!entry.cost.empty()) text.append(" Costs: ").append(entry.cost);
    const char* before = " Evidence: ";
    for (const auto& [what, value] : entry.evidence) {
      text.append(before).append(what).append(" ").append(monitor::format_number(value));
      before = ", ";
    }
    report.paragraph(std::move(text));
  }
}

Report report_of(const Certificate& certificate, bool drawn) {
  Report report("Certificate of acceleration");
  report.subtitle(step_line(certificate) + " " + repaid_line(certificate));
  if (auto memory = memory_line(certificate); !memory.empty()) report.paragraph(std::move(memory));
  if (!certificate.disturbance.empty()) {
    report.paragraph("The machine was busy while this was measured: " + certificate.disturbance +
                     ". It is not remembered; a quiet run may find otherwise.");
  }
  report.metadata("hardware", certificate.key.hardware).metadata("torch", certificate.key.torch);
  report.metadata("model", certificate.key.model).metadata("level", certificate.level);
  report.metadata("planned", monitor::format_count(static_cast<double>(certificate.steps_planned)) + " steps");
  report.metadata("created", certificate.created).metadata("key", certificate.key.digest());
  if (!certificate.entries.empty()) {
    report.add(table_of(certificate.entries));
    if (monitor::BarChart chart = chart_of(certificate); drawn && !chart.bars.empty()) report.add(std::move(chart));
    report.heading("Why");
    add_sentences(report, certificate.entries);
    add_skipped(report, certificate.entries);
  }
  if (!certificate.verification.empty()) {
    monitor::Table checks{"How the numbers were checked", {{"check"}, {"outcome"}}, {}, {}};
    for (const auto& [check, outcome] : certificate.verification) checks.rows.push_back({check, outcome});
    report.add(std::move(checks));
  }
  if (!certificate.events.empty()) {
    report.heading("Since then");
    for (const std::string& event : certificate.events) report.paragraph(event);
  }
  return report;
}

}  // namespace

std::string Certificate::to_text() const { return report_of(*this, false).to_text(monitor::TextStyle::Auto, 120); }

std::string Certificate::to_html() const { return report_of(*this, true).to_html(); }

}  // namespace oxytorch::tune
