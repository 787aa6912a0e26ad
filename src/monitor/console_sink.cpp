#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "monitor/format.h"
#include "oxytorch/error.h"
#include "oxytorch/monitor/sink.h"

namespace oxytorch::monitor {
namespace {

constexpr std::size_t kPhasesShown = 4;

}  // namespace

struct ConsoleSink::State {
  double every_seconds = 5;
  std::function<void(std::string_view)> print;
  double last_print = -1;  // Unix seconds of training time

  // Since the last line.
  std::uint64_t step = 0, dropped = 0;
  std::vector<std::int64_t> durations;
  std::int64_t samples = 0, total_ns = 0;
  std::map<std::string, std::int64_t, std::less<>> phases;
  std::map<std::string, double, std::less<>> scalars;
  bool news = false;

  void print_line() {
    std::string line = "step " + format_count(static_cast<double>(step));
    if (!durations.empty()) {
      const auto middle = durations.begin() + static_cast<std::ptrdiff_t>(durations.size() / 2);
      std::nth_element(durations.begin(), middle, durations.end());
      line += "  " + format_seconds(static_cast<double>(*middle) * 1e-9) + "/step";
      if (samples > 0 && total_ns > 0) {
        line +=
            "  " + format_count(static_cast<double>(samples) / (static_cast<double>(total_ns) * 1e-9)) + " samples/s";
      }
      std::vector<std::pair<std::int64_t, std::string_view>> largest;
      for (const auto& [name, ns] : phases) largest.emplace_back(-ns, name);
      std::sort(largest.begin(), largest.end());
      largest.resize(std::min(largest.size(), kPhasesShown));
      for (const auto& [ns, name] : largest) {
        line += "  " + std::string(name) + " " +
                std::to_string(std::lround(-100.0 * static_cast<double>(ns) /
                                           static_cast<double>(std::max<std::int64_t>(1, total_ns)))) +
                "%";
      }
    }
    for (const auto& [name, value] : scalars) line += "  " + name + " " + format_number(value);
    if (dropped > 0) line += "  (" + format_count(static_cast<double>(dropped)) + " steps dropped)";
    line += '\n';
    durations.clear();
    phases.clear();
    samples = total_ns = 0;
    dropped = 0;
    news = false;
    print(line);
  }
};

ConsoleSink::ConsoleSink(double every_seconds, std::function<void(std::string_view)> print)
    : state_(std::make_unique<State>()) {
  OXY_CHECK(std::isfinite(every_seconds) && every_seconds >= 0, InvalidArgument, "every_seconds is ", every_seconds,
            "; use a number of seconds, 0 for a line at each drain.");
  state_->every_seconds = every_seconds;
  state_->print = print ? std::move(print) : [](std::string_view line) {
    std::fwrite(line.data(), 1, line.size(), stdout);
    std::fflush(stdout);
  };
}

ConsoleSink::~ConsoleSink() = default;

std::string ConsoleSink::name() const { return "console"; }

void ConsoleSink::write(const StepRecord& record) {
  State& state = *state_;
  state.step = record.step;
  state.dropped += record.dropped_before;
  state.news = true;
  for (const ScalarValue& scalar : record.scalars)
    state.scalars.insert_or_assign(std::string(scalar.name), scalar.value);
  if (!record.timed) return;
  state.durations.push_back(record.duration_ns);
  state.samples += record.samples;
  state.total_ns += record.duration_ns;
  for (const PhaseTime& phase : record.phases) {
    if (phase.parent < 0) state.phases[std::string(phase.name)] += phase.total_ns;
  }
  const double now = record.unix_seconds + static_cast<double>(record.duration_ns) * 1e-9;
  if (state.last_print < 0) state.last_print = record.unix_seconds;
  if (state.every_seconds > 0 && now - state.last_print >= state.every_seconds) {
    state.last_print = now;
    state.print_line();
  }
}

void ConsoleSink::flush() {
  if (state_->every_seconds == 0 && state_->news) state_->print_line();
}

void ConsoleSink::close() {
  if (state_->news) state_->print_line();
}

}  // namespace oxytorch::monitor
