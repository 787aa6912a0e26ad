#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "oxytorch/error.h"
#include "oxytorch/spelling.h"
#include "table.h"

namespace oxytorch::environment {
namespace {

std::vector<std::string> split(std::string_view text, char by) {
  std::vector<std::string> parts;
  for (std::size_t from = 0;;) {
    const std::size_t to = text.find(by, from);
    parts.emplace_back(text.substr(from, to - from));
    if (to == std::string_view::npos) return parts;
    from = to + 1;
  }
}

std::optional<std::int64_t> number_in(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Reads the tables' language; see Row.
void read_accepts(Setting& setting, std::string_view accepts) {
  const std::size_t space = accepts.find(' ');
  const std::string_view word = accepts.substr(0, space);
  const std::string_view rest = space == std::string_view::npos ? "" : accepts.substr(space + 1);
  const std::pair<std::string_view, Kind> kinds[] = {
      {"bool", Kind::Flag}, {"digit", Kind::Digit},   {"int", Kind::Integer},     {"number", Kind::Number},
      {"size", Kind::Size}, {"choice", Kind::Choice}, {"Choice", Kind::Choice},   {"list", Kind::List},
      {"path", Kind::Path}, {"text", Kind::Text},     {"grammar", Kind::Grammar}, {"level", Kind::Grammar},
  };
  const auto* kind =
      std::find_if(std::begin(kinds), std::end(kinds), [&](const auto& one) { return one.first == word; });
  OXY_ASSERT(kind != std::end(kinds), "the row of ", setting.name, " has no kind ", word);
  setting.kind = kind->second;
  setting.any_case = word == "Choice";
  if (setting.kind == Kind::Choice) setting.choices = split(rest, '/');
  if (setting.kind == Kind::Grammar) setting.grammar = rest.empty() ? word : rest;
  if (const std::size_t dots = rest.find(".."); setting.kind != Kind::Grammar && dots != std::string_view::npos) {
    setting.low = number_in(rest.substr(0, dots));
    setting.high = number_in(rest.substr(dots + 2));
  }
}

std::vector<Setting> read_tables() {
  std::vector<Setting> all;
  for (const auto tables :
       {cuda_tables(), nccl_tables(), fabric_tables(), gaudi_tables(), host_tables(), torch_tables()}) {
    for (const Table& table : tables) {
      for (const Row& row : table.rows) {
        Setting setting{};
        setting.name = row.name;
        setting.family = table.family;
        setting.component = table.component;
        setting.standard = row.standard;
        setting.since = row.since;
        setting.until = row.until;
        setting.deprecated = row.deprecated;
        setting.replacement = row.replacement;
        setting.what = row.what;
        setting.evidence = table.evidence;
        read_accepts(setting, row.accepts);
        all.push_back(std::move(setting));
      }
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Setting& a, const Setting& b) { return a.family < b.family; });
  return all;
}

std::string range_text(const Setting& setting, const char* what) {
  const auto text = [](std::int64_t value) { return std::to_string(value); };
  if (setting.low && setting.high) return what + (" from " + text(*setting.low) + " to " + text(*setting.high));
  if (setting.low) return what + (" from " + text(*setting.low));
  return what;
}

}  // namespace

const char* name(Family family) noexcept {
  switch (family) {
    case Family::Cuda: return "cuda";
    case Family::Nccl: return "nccl";
    case Family::Fabric: return "fabric";
    case Family::Gaudi: return "gaudi";
    case Family::OpenMp: return "openmp";
    case Family::Allocator: return "allocator";
    case Family::PyTorch: return "pytorch";
    case Family::OneDnn: return "onednn";
    case Family::Mkl: return "mkl";
    case Family::Gloo: return "gloo";
    case Family::Launcher: break;
  }
  return "launcher";
}

const char* name(Kind kind) noexcept {
  switch (kind) {
    case Kind::Flag: return "flag";
    case Kind::Digit: return "digit";
    case Kind::Integer: return "integer";
    case Kind::Number: return "number";
    case Kind::Size: return "size";
    case Kind::Choice: return "choice";
    case Kind::List: return "list";
    case Kind::Path: return "path";
    case Kind::Text: return "text";
    case Kind::Grammar: break;
  }
  return "grammar";
}

std::string Setting::allowed() const {
  switch (kind) {
    case Kind::Flag: return "0, 1, true or false";
    case Kind::Digit: return "0 or 1";
    case Kind::Integer: return range_text(*this, "a whole number");
    case Kind::Number: return range_text(*this, "a number");
    case Kind::Size: return "a size in bytes";
    case Kind::Choice: return list_of(choices);
    case Kind::List: return "a list separated by commas";
    case Kind::Path: return "a path";
    case Kind::Text: return "a text";
    case Kind::Grammar: break;
  }
  if (grammar == "level") return "'LOC', 'NVL', 'PIX', 'PXB', 'PHB' or 'SYS'";
  if (grammar == "cuda_devices") return "card numbers or UUIDs, separated by commas";
  if (grammar == "cublas_workspace") return ":KiB:count, such as :4096:8";
  if (grammar == "thread_counts") return "whole numbers from 1, separated by commas";
  if (grammar == "proc_bind") return "'false', 'true', or 'primary', 'close' or 'spread' for each level";
  if (grammar == "places")
    return "'threads', 'cores', 'sockets', 'll_caches' or 'numa_domains', or lists such as {0:4}";
  if (grammar == "schedule") return "'static', 'dynamic', 'guided' or 'auto', with a chunk after a comma";
  if (grammar == "stack_size") return "a size in KiB, or with B, K, M or G";
  if (grammar == "spin_count") return "a whole number with k, M, G or T, or 'infinite'";
  if (grammar == "cpu_affinity") return "processor numbers, ranges such as 0-3, and steps such as 0-15:2";
  if (grammar == "recipe_cache") return "path,delete,megabytes,nfs such as /tmp/recipes,false,1024,false";
  return "settings of its own, see what it does";
}

const std::vector<Setting>& settings() {
  static const std::vector<Setting> all = read_tables();
  return all;
}

const Setting* find(std::string_view name) {
  static const auto index = [] {
    std::unordered_map<std::string_view, const Setting*> made;
    for (const Setting& setting : settings()) made.emplace(setting.name, &setting);
    return made;
  }();
  const auto found = index.find(name);
  return found == index.end() ? nullptr : found->second;
}

}  // namespace oxytorch::environment
