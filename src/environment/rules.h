/// What is harmful where, and which settings contradict each other.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "oxytorch/environment.h"

namespace oxytorch::environment {

/// What is set at one moment, and what it is judged for.
struct View {
  const std::map<std::string, Assignment, std::less<>>& set;
  const Context& context;
  std::string backend;  ///< that of the context, or guessed

  [[nodiscard]] bool has(std::string_view name) const { return set.find(name) != set.end(); }
  /// The value, where it is set and known.
  [[nodiscard]] std::optional<std::string> get(std::string_view name) const;
  [[nodiscard]] bool on(std::string_view name) const;
  [[nodiscard]] std::optional<long long> number(std::string_view name) const;
  /// Negative, zero or positive as the component is older than, equal to or newer than `version`; empty where unknown.
  [[nodiscard]] std::optional<int> compare(std::string_view component, std::string_view version) const;
};

/// "NAME=value", with a value of odd characters in quotes.
std::string shown(const Assignment& assignment);

/// "cuda" or "hpu" where the names that are set tell, else "".
std::string guess_backend(const std::map<std::string, Assignment, std::less<>>& set);

/// Issues of all rules for the setting `assignment` of the view, whose value is known and well written.
void apply_rules(const View& view, const Assignment& assignment, const std::function<void(EnvironmentIssue)>& report);

}  // namespace oxytorch::environment
