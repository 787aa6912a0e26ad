#include "oxytorch/load.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/file_tree.h"
#include "oxytorch/clock.h"
#include "oxytorch/system.h"

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

constexpr auto kLook = std::chrono::milliseconds(250);
constexpr double kSharesCores = 0.5;
constexpr double kNamed = 0.1;  // cores that a process must use to be named
constexpr std::size_t kMostNamed = 5;

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
std::optional<Neighbours> given_neighbours;

/// What a process has used so far, and what is needed to tell whose it is.
struct Process {
  int parent = 0;
  double seconds = 0;
  int threads = 1;
  std::string name;
};

std::map<int, Process> processes(const std::string& root) {
  std::map<int, Process> found;
  std::error_code error;
  for (fs::directory_iterator it(under(root, "/proc"), error), end; !error && it != end; it.increment(error)) {
    const auto pid = parse<int>(it->path().filename().string());
    const auto fields = pid ? stat_fields(it->path() / "stat") : std::vector<std::string>{};
    if (fields.size() < 18) continue;
    Process one;
    one.parent = parse<int>(fields[1]).value_or(0);
    one.seconds = (parse<double>(fields[11]).value_or(0) + parse<double>(fields[12]).value_or(0)) / ticks();
    one.threads = parse<int>(fields[17]).value_or(1);
    one.name = trim(read_text(it->path() / "comm"));
    found.emplace(*pid, std::move(one));
  }
  return found;
}

bool is_of_this_program(const std::map<int, Process>& all, int pid) {
  const int self = getpid();
  for (int depth = 0; depth < 64; ++depth) {
    if (pid == self) return true;
    const auto one = all.find(pid);
    if (one == all.end()) return false;
    pid = one->second.parent;
  }
  return false;
}

std::set<int> allowed_cores(const std::string& root, const std::string& pid) {
  const auto lines = read_lines(under(root, "/proc/" + pid + "/status"));
  return parse_list(field(lines, "Cpus_allowed_list").value_or(""));
}

bool overlap(const std::set<int>& a, const std::set<int>& b) {
  return a.empty() || b.empty() || std::any_of(a.begin(), a.end(), [&](int core) { return b.contains(core); });
}

std::string one_decimal(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

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

bool Neighbours::share_cores() const noexcept { return cores >= kSharesCores; }

std::string Neighbours::said() const {
  std::string text = one_decimal(cores) + " of " + std::to_string(of) + (of == 1 ? " core" : " cores");
  const char* before = ": ";
  for (const Neighbour& one : processes) {
    text += std::exchange(before, ", ") + one.name + " (pid " + std::to_string(one.pid) + ", " +
            std::to_string(one.threads) + (one.threads == 1 ? " thread) " : " threads) ") + one_decimal(one.cores);
  }
  return text;
}

std::optional<Neighbours> read_neighbours(const std::string& root, const std::function<void()>& pause) {
  {
    const std::lock_guard lock(source_mutex);
    if (given_neighbours && root == "/") return given_neighbours;
  }
  const auto before = processes(root);
  if (before.empty()) return std::nullopt;
  const auto began = monotonic_ns();
  if (pause) {
    pause();
  } else {
    std::this_thread::sleep_for(kLook);
  }
  const double measured = 1e-9 * static_cast<double>(monotonic_ns() - began);
  const double wall = pause ? std::chrono::duration<double>(kLook).count() : measured;
  const auto after = processes(root);
  const auto mine = allowed_cores(root, "self");
  Neighbours found;
  found.of = std::max(1, read_cores(root).affinity.value_or(static_cast<int>(mine.size())));
  for (const auto& [pid, now] : after) {
    const auto then = before.find(pid);
    const double cores = (now.seconds - (then == before.end() ? 0 : then->second.seconds)) / wall;
    if (cores <= 0 || is_of_this_program(after, pid) || !overlap(mine, allowed_cores(root, std::to_string(pid)))) {
      continue;
    }
    found.cores += cores;
    if (cores >= kNamed) found.processes.push_back({pid, now.name, cores, now.threads});
  }
  std::stable_sort(found.processes.begin(), found.processes.end(),
                   [](const Neighbour& a, const Neighbour& b) { return a.cores > b.cores; });
  if (found.processes.size() > kMostNamed) found.processes.resize(kMostNamed);
  return found;
}

void set_neighbours(std::optional<Neighbours> found) {
  const std::lock_guard lock(source_mutex);
  given_neighbours = std::move(found);
}

bool waiting_threads_spin(const std::function<const char*(const char*)>& variable) {
  const auto is = [&](const char* name, std::string_view value) {
    const char* const text = variable ? variable(name) : std::getenv(name);
    if (text == nullptr) return false;
    std::string lower = text;
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    return trim(lower) == value;
  };
  return !is("OMP_WAIT_POLICY", "passive") && !is("GOMP_SPINCOUNT", "0") && !is("KMP_BLOCKTIME", "0");
}

std::string advice_on_shared_cores(bool threads_spin) {
  const std::string less = "give each program fewer threads (OMP_NUM_THREADS) or cores of its own (taskset -c).";
  if (!threads_spin) return "Programs share cores: " + less;
  return "Waiting threads of OpenMP spin, and programs that do so on the same cores slow each other many times over: "
         "start each with OMP_WAIT_POLICY=passive, or " +
         less;
}

void set_load_source(LoadWatch::Source source) {
  const std::lock_guard lock(source_mutex);
  given_source = std::move(source);
}

}  // namespace oxytorch
