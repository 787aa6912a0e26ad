/// How a rule is written, and where those of each family are.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "oxytorch/environment.h"
#include "rules.h"
#include "value.h"

namespace oxytorch::environment {

/// Rules write their issues through this.
class Judge {
 public:
  Judge(const View& view, const Assignment& assignment, const std::function<void(EnvironmentIssue)>& report)
      : view(view), assignment(assignment), report_(report) {}

  const View& view;
  const Assignment& assignment;

  [[nodiscard]] const std::string& value() const { return assignment.value; }
  [[nodiscard]] bool on() const { return is_on(value()); }

  /// `text` follows "NAME=value ".
  void harmful(Severity severity, const std::string& text, std::string replacement = "",
               std::string evidence = "") const {
    add(Verdict::Harmful, severity, text, "", std::move(replacement), std::move(evidence));
  }
  void contradicting(Severity severity, const std::string& other, const std::string& text) const {
    add(Verdict::Contradicting, severity, text, other, "", "");
  }
  void obsolete(Severity severity, const std::string& text, std::string replacement, std::string evidence = "") const {
    add(Verdict::Obsolete, severity, text, "", std::move(replacement), std::move(evidence));
  }
  void bad(Severity severity, const std::string& text) const { add(Verdict::BadValue, severity, text, "", "", ""); }

  /// The other setting as it is written, for texts.
  [[nodiscard]] std::string other(std::string_view name) const {
    const auto found = view.set.find(name);
    return found == view.set.end() ? std::string(name) : shown(found->second);
  }

 private:
  void add(Verdict verdict, Severity severity, const std::string& text, std::string other, std::string replacement,
           std::string evidence) const {
    const Setting* setting = find(assignment.name);
    if (evidence.empty() && setting != nullptr) evidence = setting->evidence;
    report_({verdict, severity, assignment.name, assignment.value, shown(assignment) + " " + text, std::move(other),
             std::move(replacement), std::move(evidence), assignment.file, assignment.line});
  }

  const std::function<void(EnvironmentIssue)>& report_;
};

inline constexpr Severity kNote = Severity::Note;
inline constexpr Severity kWarning = Severity::Warning;
inline constexpr Severity kError = Severity::Error;
inline constexpr char kHostNicPage[] = "docs.habana.ai 1.23, Scale-out via Host NIC";

struct Rule {
  const char* name;  ///< a name, or a prefix that ends in *
  void (*apply)(const Judge&);
};

/// No setting has rules in two of these; those of one setting apply in the order of their rows.
std::span<const Rule> nccl_rules();
std::span<const Rule> torch_rules();
std::span<const Rule> host_rules();
std::span<const Rule> gaudi_rules();

}  // namespace oxytorch::environment
