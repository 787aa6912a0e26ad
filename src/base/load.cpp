#include "oxytorch/load.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "base/file_tree.h"
#include "oxytorch/clock.h"

namespace oxytorch {
namespace {

namespace fs = std::filesystem;
using namespace detail;

constexpr double kLeastStretch = 0.1;
/// Of a stretch, what may be waited, stolen or throttled; and cores that others may use meanwhile.
constexpr double kMostWaited = 0.05;
constexpr double kMostOthers = 0.1;
/// Where waiting is not told: cores that others may use where none is idle.
constexpr double kMostOthersUnseen = 0.25;
constexpr double kNoneIdle = 0.9;

constexpr double kMostDisturbed = 0.1;

double ticks() { return static_cast<double>(sysconf(_SC_CLK_TCK)); }

std::vector<fs::path> tasks(const std::string& root) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(under(root, "/proc/self/task"), error), end; !error && it != end;
       it.increment(error)) {
    found.push_back(it->path());
  }
  return found;
}

/// The fields of /proc/<pid>/stat from the third one on: the second, a name in parentheses, may hold anything.
std::vector<std::string> stat_fields(const fs::path& file) {
  const std::string text = read_text(file);
  const auto end = text.rfind(") ");
  return end == std::string::npos ? std::vector<std::string>{} : split(text.substr(end + 2), ' ');
}

/// Processor time of a process and of those that it has waited for.
double process_seconds(const fs::path& folder) {
  const auto fields = stat_fields(folder / "stat");
  double sum = 0;
  for (std::size_t i = 11; i < 15 && i < fields.size(); ++i) sum += parse<double>(fields[i]).value_or(0);
  return sum / ticks();
}

/// What workers and other children use is the program's own.
double descendants_seconds(const std::string& root, const std::vector<fs::path>& threads, int depth) {
  double sum = 0;
  for (const fs::path& thread : threads) {
    for (const std::string& child : split(read_text(thread / "children"), ' ')) {
      if (!parse<int>(child)) continue;
      const fs::path folder = under(root, "/proc/" + std::string(trim(child)));
      sum += process_seconds(folder);
      if (depth > 0) sum += descendants_seconds(root, {folder / "task" / std::string(trim(child))}, depth - 1);
    }
  }
  return sum;
}

double own_seconds() {
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  double sum = 0;
  for (const auto who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    getrusage(who, &usage);
    sum += seconds(usage.ru_utime) + seconds(usage.ru_stime);
  }
  return sum;
}

void read_machine(const std::string& root, LoadSample& sample) {
  int cores = 0;
  for (const std::string& line : read_lines(under(root, "/proc/stat"))) {
    if (!line.starts_with("cpu")) break;
    if (!line.starts_with("cpu ")) {
      ++cores;
      continue;
    }
    std::vector<double> numbers;
    for (const std::string& word : split(line.substr(4), ' ')) {
      if (const auto number = parse<double>(word)) numbers.push_back(*number / ticks());
    }
    if (numbers.size() < 8) return;
    // user, nice, system, idle, iowait, irq, softirq, steal
    sample.busy = numbers[0] + numbers[1] + numbers[2] + numbers[5] + numbers[6];
    sample.stolen = numbers[7];
  }
  sample.cores = std::max(1, cores);
}

/// Of the cgroup that this process sees as its own: v2 in microseconds, v1 in nanoseconds.
std::optional<double> throttled_seconds(const std::string& root) {
  for (const auto& [file, key, unit] : {std::tuple("/sys/fs/cgroup/cpu.stat", "throttled_usec", 1e-6),
                                        std::tuple("/sys/fs/cgroup/cpu/cpu.stat", "throttled_time", 1e-9)}) {
    if (const auto text = field(read_lines(under(root, file)), key, ' ')) {
      if (const auto value = parse<double>(*text)) return *value * unit;
    }
  }
  return std::nullopt;
}

std::mutex source_mutex;
LoadWatch::Source given_source;

std::string percent(double share) {
  char text[16];
  std::snprintf(text, sizeof text, "%.0f %%", 100 * share);
  return text;
}

/// How much of a stretch was disturbed, 0 where it was not, and what shows it.
std::pair<double, std::string> judge(const LoadSample& from, const LoadSample& to) {
  const double wall = to.wall - from.wall;
  const auto spent = [](const std::optional<double>& before, const std::optional<double>& after) {
    return before && after ? std::max(0.0, *after - *before) : 0.0;
  };
  const double cores = to.cores;
  const double stolen = spent(from.stolen, to.stolen) / wall / cores;
  if (stolen > kMostWaited) return {stolen, "the machine's host gave " + percent(stolen) + " of its cores to others"};
  const double throttled = spent(from.throttled, to.throttled) / wall;
  if (throttled > kMostWaited)
    return {throttled, "the quota of its cgroup held it back " + percent(throttled) + " of the time"};
  const double busy = spent(from.busy, to.busy) / wall;
  const double others = from.busy && to.busy ? std::max(0.0, busy - (to.own - from.own) / wall) : 0.0;
  char used[64];
  std::snprintf(used, sizeof used, "other programs used %.1f of its %d cores", others, to.cores);
  if (from.waited && to.waited) {
    const double waited = spent(from.waited, to.waited) / wall;
    if (waited <= kMostWaited || others <= kMostOthers) return {0, ""};
    return {waited, std::string(used) + ", and threads of this one waited " + percent(waited) + " of the time for one"};
  }
  if (others <= kMostOthersUnseen || busy < kNoneIdle * cores) return {0, ""};
  return {others / cores, std::string(used) + ", and none was idle"};
}

}  // namespace

LoadSample read_load(const std::string& root) {
  LoadSample sample;
  sample.wall = 1e-9 * static_cast<double>(monotonic_ns());
  const auto threads = tasks(root);
  sample.own = own_seconds() + descendants_seconds(root, threads, 2);
  for (const fs::path& thread : threads) {
    const auto fields = split(read_text(thread / "schedstat"), ' ');  // running, waiting, turns
    if (fields.size() < 2) continue;
    if (const auto waited = parse<double>(fields[1])) sample.waited = sample.waited.value_or(0) + 1e-9 * *waited;
  }
  read_machine(root, sample);
  sample.throttled = throttled_seconds(root);
  return sample;
}

LoadWatch::LoadWatch(Source source) : source_(std::move(source)) {
  if (source_) return;
  const std::lock_guard lock(source_mutex);
  source_ = given_source ? given_source : [] { return read_load(); };
}

void LoadWatch::begin() {
  if (!began_) began_ = source_();
}

bool LoadWatch::end() {
  if (!began_) return false;
  const LoadSample now = source_();
  const double wall = now.wall - began_->wall;
  if (wall < kLeastStretch) return false;
  auto [severity, evidence] = judge(*std::exchange(began_, std::nullopt), now);
  const bool is_first = seconds_ == 0;
  seconds_ += wall;
  if (severity <= 0) return false;
  first_ = first_ || is_first;
  disturbed_ += wall;
  if (severity > worst_) {
    worst_ = severity;
    evidence_ = std::move(evidence);
  }
  return true;
}

double LoadWatch::share() const noexcept { return seconds_ > 0 ? disturbed_ / seconds_ : 0; }

bool LoadWatch::disturbed() const noexcept { return first_ || share() > kMostDisturbed; }

void set_load_source(LoadWatch::Source source) {
  const std::lock_guard lock(source_mutex);
  given_source = std::move(source);
}

}  // namespace oxytorch
