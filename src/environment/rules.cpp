#include "rules.h"

#include <algorithm>

#include "base/spelling.h"
#include "judge.h"
#include "value.h"

namespace oxytorch::environment {

std::optional<std::string> View::get(std::string_view name) const {
  const auto found = set.find(name);
  if (found == set.end() || !found->second.exact) return std::nullopt;
  return found->second.value;
}

bool View::on(std::string_view name) const {
  const auto value = get(name);
  return value && is_on(*value);
}

std::optional<long long> View::number(std::string_view name) const {
  const auto value = get(name);
  return value ? whole(*value) : std::nullopt;
}

std::optional<int> View::compare(std::string_view component, std::string_view version) const {
  const auto found = context.versions.find(std::string(component));
  if (found == context.versions.end() || found->second.empty()) return std::nullopt;
  return compare_versions(found->second, version);
}

std::string shown(const Assignment& assignment) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("_.,:/+-^=@%").find(c) != std::string_view::npos;
  };
  const std::string& value = assignment.value;
  const bool bare = !value.empty() && value.size() <= 80 && std::all_of(value.begin(), value.end(), plain);
  return assignment.name + "=" + (bare ? value : in_quotes(value));
}

std::string guess_backend(const std::map<std::string, Assignment, std::less<>>& set) {
  bool cuda = false;
  for (const auto& [name, assignment] : set) {
    const Setting* setting = find(name);
    if (name.starts_with("PT_HPU_") || name.starts_with("HABANA_") || name == "HCCL_OVER_OFI") return "hpu";
    if (setting == nullptr) continue;
    if (setting->family == Family::Gaudi) return "hpu";
    const bool build = setting->component == "nccl-build" || name == "CUDA_HOME" || name == "CUDA_PATH" ||
                       name == "CUDA_VERSION" || name.starts_with("NVIDIA_");
    cuda =
        cuda || (!build && (setting->family == Family::Nccl || name.starts_with("TORCH_NCCL_") ||
                            (name == "CUDA_VISIBLE_DEVICES" && !assignment.value.empty() && assignment.value != "-1")));
  }
  return cuda ? "cuda" : "";
}

void apply_rules(const View& view, const Assignment& assignment, const std::function<void(EnvironmentIssue)>& report) {
  for (const auto rules : {nccl_rules(), torch_rules(), host_rules(), gaudi_rules()}) {
    for (const Rule& rule : rules) {
      const std::string_view name = rule.name;
      const bool prefix = name.back() == '*';
      const bool match =
          prefix ? assignment.name.starts_with(name.substr(0, name.size() - 1)) : assignment.name == name;
      if (match) rule.apply(Judge(view, assignment, report));
    }
  }
}

}  // namespace oxytorch::environment
