#include "oxytorch/machine/host_report.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <system_error>
#include <tuple>

#include "machine/host_reader.h"

namespace oxytorch::machine {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostNames = 4096;

bool is_plain(const std::string& name) {
  return !name.empty() && name.size() <= 128 && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.' || c == ':';
  });
}

/// "cpu10" after "cpu9".
bool natural_less(const std::string& a, const std::string& b) {
  const auto split = [](const std::string& text) {
    const std::size_t last = text.find_last_not_of("0123456789");
    const std::size_t digits = last == std::string::npos ? 0 : last + 1;
    return std::tuple(text.substr(0, digits), text.size() - digits, text.substr(digits));
  };
  return split(a) < split(b);
}

}  // namespace

const char* name(Verdict verdict) noexcept {
  switch (verdict) {
    case Verdict::Fine: return "fine";
    case Verdict::Change: return "change";
    case Verdict::Reported: break;
  }
  return "reported";
}

std::string shown(std::string_view text) {
  constexpr std::size_t kLongest = 160;
  text = trim(text);
  std::string out;
  for (const char c : text.substr(0, kLongest)) out += c == '\t' || c == '\n' ? ' ' : c >= ' ' && c <= '~' ? c : '?';
  if (text.size() > kLongest) out += "...";
  return out;
}

std::string joined(std::initializer_list<std::string_view> parts) {
  std::string whole;
  for (const std::string_view part : parts) whole += part;
  return whole;
}

std::string selected(std::string_view text) {
  const std::size_t open = text.find('[');
  const std::size_t close = text.find(']', open == std::string_view::npos ? 0 : open);
  if (open == std::string_view::npos || close == std::string_view::npos) return "";
  return std::string(text.substr(open + 1, close - open - 1));
}

std::string shell_word(const std::string& text) {
  if (is_plain(text)) return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string sysctl(const std::string& key, const std::string& value) {
  return "sysctl -w " + key + "=" + (value.find(' ') == std::string::npos ? value : "'" + value + "'");
}

HostReader::HostReader(const HostReportOptions& options)
    : options_(options),
      mounts_(detail::read_mounts(options.root)),
      cores_(read_cores(options.root)),
      memory_(read_memory(options.root)) {}

std::optional<std::string> HostReader::text(const std::string& path) const {
  const std::string whole = detail::read_text(detail::under(options_.root, path));
  const std::string_view trimmed = trim(whole);
  if (trimmed.empty()) return std::nullopt;
  return std::string(trimmed);
}

bool HostReader::exists(const std::string& path) const {
  std::error_code unknown;
  return fs::exists(detail::under(options_.root, path), unknown);
}

std::vector<std::string> HostReader::names(const std::string& folder) const {
  std::vector<std::string> found;
  std::error_code stopped;
  for (fs::directory_iterator entry(detail::under(options_.root, folder), stopped), end;
       !stopped && entry != end && found.size() < kMostNames; entry.increment(stopped)) {
    std::string name = entry->path().filename().string();
    if (is_plain(name)) found.push_back(std::move(name));
  }
  std::sort(found.begin(), found.end(), natural_less);
  return found;
}

std::string HostReader::link_name(const std::string& path) const {
  std::error_code none;
  const std::string name = fs::read_symlink(detail::under(options_.root, path), none).filename().string();
  return is_plain(name) ? name : "";
}

int HostReader::numa_nodes() const {
  int count = 0;
  for (const std::string& name : names("/sys/devices/system/node")) {
    count += name.starts_with("node") && detail::parse<int>(std::string_view(name).substr(4)) ? 1 : 0;
  }
  return count;
}

bool HostReader::is_virtual() const {
  const auto flags = detail::field(detail::read_lines(detail::under(options_.root, "/proc/cpuinfo")), "flags");
  return flags && (" " + *flags + " ").find(" hypervisor ") != std::string::npos;
}

bool HostReader::has_fast_network() const {
  constexpr std::int64_t kFast = 10'000;  // Mb/s
  if (!names("/sys/class/infiniband").empty()) return true;
  const auto interfaces = names("/sys/class/net");
  return std::any_of(interfaces.begin(), interfaces.end(), [&](const std::string& one) {
    return number("/sys/class/net/" + one + "/speed").value_or(0) >= kFast;
  });
}

void HostReader::fine(std::string what, std::string where, std::string_view value, std::string why) {
  rows_.push_back(
      {area_, std::move(what), std::move(where), shown(value), Verdict::Fine, "", std::move(why), "", false});
}

void HostReader::reported(std::string what, std::string where, std::string_view value, std::string why) {
  rows_.push_back(
      {area_, std::move(what), std::move(where), shown(value), Verdict::Reported, "", std::move(why), "", false});
}

void HostReader::change(std::string what, std::string where, std::string_view value, std::string suggestion,
                        std::string why, std::string command, bool needs_root) {
  rows_.push_back({area_, std::move(what), std::move(where), shown(value), Verdict::Change, std::move(suggestion),
                   std::move(why), std::move(command), needs_root});
}

std::vector<HostRow> host_report(const HostReportOptions& options) {
  HostReader host(options);
  host.area("processor");
  read_processor_rows(host);
  host.area("memory");
  read_memory_rows(host);
  host.area("limits");
  read_limit_rows(host);
  host.area("network");
  read_network_rows(host);
  host.area("storage");
  read_storage_rows(host);
  host.area("accelerator");
  read_accelerator_rows(host);
  return host.take();
}

std::string to_json(std::span<const HostRow> rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const HostRow& row : rows) {
    list.push_back({{"area", row.area},
                    {"what", row.what},
                    {"where", row.where},
                    {"value", row.value},
                    {"verdict", name(row.verdict)},
                    {"suggestion", row.suggestion},
                    {"why", row.why},
                    {"command", row.command},
                    {"needs_root", row.needs_root}});
  }
  return list.dump(2, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
}

std::string to_text(std::span<const HostRow> rows) {
  std::string changes;
  std::string rest;
  std::string area;
  for (const HostRow& row : rows) {
    if (row.verdict == Verdict::Change) {
      changes += "change  " + row.what + ": " + row.value + " -> " + row.suggestion + "\n        " + row.why +
                 "\n        " + (row.needs_root ? "# " : "$ ") + row.command + "\n";
      continue;
    }
    if (row.area != area) rest += row.area + "\n";
    area = row.area;
    rest += std::string(row.verdict == Verdict::Fine ? "  fine     " : "  reported ") + row.what + ": " + row.value +
            "\n           " + row.why + "\n";
  }
  if (changes.empty()) changes = "Nothing to change.\n";
  return changes + (rest.empty() ? "" : "\n" + rest);
}

}  // namespace oxytorch::machine
