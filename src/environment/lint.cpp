#include <algorithm>
#include <set>
#include <tuple>

#include "base/spelling.h"
#include "oxytorch/environment.h"
#include "oxytorch/load.h"
#include "rules.h"
#include "value.h"

namespace oxytorch::environment {

const char* name(Verdict verdict) noexcept {
  switch (verdict) {
    case Verdict::Fine: return "fine";
    case Verdict::Unknown: return "unknown";
    case Verdict::Obsolete: return "obsolete";
    case Verdict::Harmful: return "harmful";
    case Verdict::Contradicting: return "contradicting";
    case Verdict::BadValue: break;
  }
  return "bad value";
}

const char* name(Severity severity) noexcept {
  switch (severity) {
    case Severity::Note: return "note";
    case Severity::Warning: return "warning";
    case Severity::Error: break;
  }
  return "error";
}

namespace {

using Set = std::map<std::string, Assignment, std::less<>>;

/// A prefix of names. Closed: the registry holds all of them, so another one is unknown. Open: there are more, and
/// only what is a letter or two from a known name is taken for a slip.
struct Prefix {
  const char* text;
  bool closed;
};
constexpr Prefix kPrefixes[] = {
    {"PT_HPU_", true},    {"PT_HPUGRAPH_", true},  {"PT_HABANA_", true},      {"PT_HCCL_", true},
    {"PT_RECIPE_", true}, {"HABANA_", true},       {"NCCL_", true},           {"TORCH_NCCL_", true},
    {"OFI_NCCL_", true},  {"FI_EFA_", true},       {"HCCL_", false},          {"FI_", false},
    {"RDMAV_", false},    {"CUDA_", false},        {"CUBLAS_", false},        {"CUBLASLT_", false},
    {"CUDNN_", false},    {"OMP_", false},         {"GOMP_", false},          {"KMP_", false},
    {"MALLOC_", false},   {"TCMALLOC_", false},    {"GLIBC_", false},         {"PYTORCH_", false},
    {"TORCH_", false},    {"TORCHDYNAMO_", false}, {"TORCHINDUCTOR_", false}, {"TORCHELASTIC_", false},
    {"ONEDNN_", false},   {"DNNL_", false},        {"MKL_", false},           {"GLOO_", false},
    {"MASTER_", false},   {"LOCAL_", false},       {"PT_ENABLE_", false},
};

/// Under a closed prefix, but of others: plugins, tests and builds of NCCL.
bool is_foreign(std::string_view name) {
  // The bridge makes such names of its passes, in small letters.
  constexpr std::string_view kPass = "PT_HPU_DISABLE_";
  if (name.size() > kPass.size() && name.starts_with(kPass)) return name[kPass.size()] >= 'a';
  for (const char* prefix :
       {"NCCL_TESTS_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_SHIMNET_", "NCCL_UCX_", "NCCL_SHARP_",
        "NCCL_PLUGIN_", "NCCL_TUNER_", "NCCL_PROFILER_", "NCCL_INSPECTOR_", "NCCL_EP_", "NCCL_IBEXT_"}) {
    if (name.starts_with(prefix)) return true;
  }
  if (!name.starts_with("NCCL_") && !name.starts_with("OFI_NCCL_")) return false;
  for (const char* suffix : {"_HOME", "_ROOT", "DIR", "_DIRS", "_PATH", "_LIB", "_LIBRARY", "_LIBRARIES", "_INCLUDE",
                             "_VERSION", "_PACKAGE"}) {
    if (name.ends_with(suffix)) return true;
  }
  return false;
}

/// Names that circulate and that no public source reads; `name` may end in * for a prefix.
struct Invented {
  const char* name;
  const char* replacement;
  const char* advice;
};
constexpr char kNotHuawei[] =
    "it is of Huawei's HCCL, for Ascend; Gaudi's library has that name too and does not read it.";
constexpr Invented kInvented[] = {
    {"PT_HPU_ENABLE_LAZY_COMPILATION", "PT_HPU_LAZY_MODE",
     "lazy mode is PT_HPU_LAZY_MODE=1, and the default is eager mode."},
    {"PT_HPU_ENABLE_EAGER_EXECUTION", "PT_HPU_LAZY_MODE", "eager mode is PT_HPU_LAZY_MODE=0, the default."},
    {"PT_HPU_GRAPH_COMPILER_OPT_LEVEL", "", "the graph compiler has no level to set."},
    {"PT_HPU_ENABLE_SYNAPSE_LAYOUT_OPT", "PT_HPU_ENABLE_SYNAPSE_OUTPUT_PERMUTE",
     "layouts are chosen by PT_HPU_ENABLE_SYNAPSE_OUTPUT_PERMUTE, on by default."},
    {"PT_HPU_ENABLE_COMPILATION_CACHE", "PT_HPU_RECIPE_CACHE_CONFIG",
     "the cache on disk is PT_HPU_RECIPE_CACHE_CONFIG=path,false,1024,false."},
    {"PT_HPU_COMPILATION_CACHE_PATH", "PT_HPU_RECIPE_CACHE_CONFIG",
     "the cache on disk is PT_HPU_RECIPE_CACHE_CONFIG=path,false,1024,false."},
    {"PT_HPU_ENABLE_CONV_FLATTEN_OPT", "", "there is nothing to set in its place."},
    {"PT_HPU_ENABLE_DYNAMIC_COMPILATION", "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES",
     "dynamic shapes are PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES."},
    {"HABANA_ENABLE_GRADIENT_COMPRESSION", "",
     "gradients are compressed by a communication hook of DistributedDataParallel."},
    {"HABANA_COMM_*", "HCCL_OVER_OFI", "the network is found by itself; HCCL_OVER_OFI forces host memory."},
    {"HABANA_ROCE_*", "HCCL_OVER_OFI", "the network is found by itself; HCCL_OVER_OFI forces host memory."},
    {"HCCL_RDMA_*", "", kNotHuawei},
    {"HCCL_IF_IP", "HCCL_SOCKET_IFNAME", kNotHuawei},
    {"HCCL_IF_BASE_PORT", "", kNotHuawei},
    {"HCCL_SOCKET_FAMILY", "", kNotHuawei},
    {"HCCL_HOST_SOCKET_PORT_RANGE", "", kNotHuawei},
    {"HCCL_NPU_SOCKET_PORT_RANGE", "", kNotHuawei},
    {"HCCL_CONNECT_TIMEOUT", "", kNotHuawei},
    {"HCCL_EXEC_TIMEOUT", "", kNotHuawei},
    {"HCCL_WHITELIST_*", "", kNotHuawei},
};

const Invented* invented(std::string_view name) {
  for (const Invented& one : kInvented) {
    const std::string_view known = one.name;
    const bool prefix = known.back() == '*';
    if (prefix ? name.starts_with(known.substr(0, known.size() - 1)) : name == known) return &one;
  }
  return nullptr;
}

/// The known name with the fewest letters between, and how many those are.
std::pair<std::string, std::size_t> nearest_name(std::string_view text, std::string_view prefix) {
  std::pair<std::string, std::size_t> best{"", ~std::size_t{0}};
  for (const Setting& setting : settings()) {
    if (!setting.name.starts_with(prefix)) continue;
    const std::size_t longer = std::max(text.size(), setting.name.size());
    if (longer - std::min(text.size(), setting.name.size()) >= best.second) continue;
    if (const std::size_t far = edit_distance(text, setting.name); far < best.second) best = {setting.name, far};
  }
  return best;
}

class Linter {
 public:
  explicit Linter(const Context& context) : context_(context) {}

  std::vector<EnvironmentIssue> run(const std::vector<Assignment>& assignments) {
    // Names anywhere tell the device; a script sets them line by line.
    backend_ = context_.backend;
    if (backend_.empty()) {
      Set all;
      for (const Assignment& one : assignments) all[one.name] = one;
      backend_ = guess_backend(all);
    }
    Set command;
    int scope = 0;
    const auto end_command = [&] {
      if (scope != 0) judge_environment(command);
      scope = 0;
    };
    for (const Assignment& one : assignments) {
      if (one.scope != scope) end_command();
      if (!one.removed) judge_alone(one);
      if (one.scope != 0) {
        if (scope == 0) command = set_;
        scope = one.scope;
        if (one.removed) {
          command.erase(one.name);
        } else {
          command[one.name] = one;
        }
        continue;
      }
      // What is replaced was active until now.
      if (const auto before = set_.find(one.name); before != set_.end()) judge_one(set_, before->second);
      apply(one);
    }
    end_command();
    judge_environment(set_);
    if (context_.fine) list_fine(assignments);
    std::stable_sort(issues_.begin(), issues_.end(),
                     [](const EnvironmentIssue& a, const EnvironmentIssue& b) { return a.line < b.line; });
    return std::move(issues_);
  }

 private:
  void apply(const Assignment& one) {
    if (one.removed) {
      set_.erase(one.name);
    } else {
      set_[one.name] = one;
    }
  }

  void add(EnvironmentIssue issue) {
    if (seen_.insert({issue.name, issue.file, issue.line, issue.message}).second) {
      issues_.push_back(std::move(issue));
    }
  }

  void add(const Assignment& one, Verdict verdict, Severity severity, std::string message,
           std::string replacement = "") {
    const Setting* setting = find(one.name);
    add({verdict, severity, one.name, one.value, std::move(message), "", std::move(replacement),
         setting == nullptr ? "" : setting->evidence, one.file, one.line});
  }

  /// What can be said of a setting without the others: its name, its age, its value.
  void judge_alone(const Assignment& one) {
    const Setting* setting = find(one.name);
    if (setting == nullptr) {
      judge_unknown(one);
      return;
    }
    judge_age(one, *setting);
    if (!one.exact) return;
    if (const std::string fault = fault_of(*setting, one.value); !fault.empty()) {
      const bool fatal = setting->component == "gaudi" && setting->kind != Kind::Text;
      const std::string then = fatal ? " The bridge stops at a value it cannot read." : "";
      add(one, Verdict::BadValue, fatal ? Severity::Error : Severity::Warning,
          shown(one) + " " + fault + (fault.back() == '?' ? "" : ".") + then);
    }
  }

  void judge_unknown(const Assignment& one) {
    if (!one.exported) return;
    if (const Invented* known = invented(one.name)) {
      add(one, Verdict::Unknown, Severity::Warning,
          shown(one) + " has no effect: no public source of Gaudi's software reads it; " + known->advice,
          known->replacement);
      return;
    }
    const auto* prefix = std::find_if(std::begin(kPrefixes), std::end(kPrefixes),
                                      [&](const Prefix& each) { return one.name.starts_with(each.text); });
    if (prefix == std::end(kPrefixes) || is_foreign(one.name)) return;
    const auto [near, far] = nearest_name(one.name, prefix->text);
    const bool slip = far <= (one.name.size() < 12 ? 1U : 2U);
    if (!slip && !prefix->closed) return;
    if (find("TORCH_" + one.name) != nullptr) {
      add(one, Verdict::Unknown, Severity::Warning,
          shown(one) + " has no effect: no such setting is known. Did you mean TORCH_" + one.name + "?",
          "TORCH_" + one.name);
      return;
    }
    std::string message = shown(one) + " has no effect: no such setting is known.";
    if (!near.empty()) message += (slip ? " Did you mean " : " The nearest real name is ") + near + (slip ? "?" : ".");
    add(one, Verdict::Unknown, Severity::Warning, std::move(message), near);
  }

  void judge_age(const Assignment& one, const Setting& setting) {
    const View view{set_, context_, backend_};
    const auto than = [&](const std::string& version) {
      return version.empty() ? std::nullopt : view.compare(setting.component, version);
    };
    const std::string instead =
        setting.replacement.empty() ? ": unset it." : ": set " + setting.replacement + " instead.";
    if (!setting.until.empty()) {
      if (const auto age = than(setting.until); age && *age < 0) return;
      add(one, Verdict::Obsolete, Severity::Warning,
          shown(one) + " has no effect since " + setting.component + " " + setting.until + instead,
          setting.replacement);
    } else if (!setting.replacement.empty()) {
      if (const auto age = than(setting.deprecated); age && *age < 0) return;
      const std::string since =
          setting.deprecated.empty() ? "" : " since " + setting.component + " " + setting.deprecated;
      const Severity severity = setting.family == Family::Nccl ? Severity::Warning : Severity::Note;
      add(one, Verdict::Obsolete, severity,
          shown(one) + " is an old setting that is still read, deprecated" + since + instead, setting.replacement);
    }
    if (const auto age = than(setting.since); age && *age < 0) {
      add(one, Verdict::Unknown, Severity::Warning,
          shown(one) + " has no effect here: it came with " + setting.component + " " + setting.since +
              ", and this is " + context_.versions.at(setting.component) + ".");
    }
  }

  /// The rules for one setting among those that are set with it.
  void judge_one(const Set& set, const Assignment& one) {
    const Setting* setting = find(one.name);
    if (setting == nullptr || !one.exact || !fault_of(*setting, one.value).empty()) return;
    apply_rules({set, context_, backend_}, one, [this](EnvironmentIssue issue) { add(std::move(issue)); });
  }

  void judge_environment(const Set& set) {
    for (const auto& [name, one] : set) judge_one(set, one);
    judge_sharing(set);
  }

  /// What is not set, and ought to be where programs share cores.
  void judge_sharing(const Set& set) {
    const auto value = [&](const char* name) {
      const auto one = set.find(name);
      return one == set.end() ? nullptr : one->second.value.c_str();
    };
    if (context_.neighbours.empty() || !waiting_threads_spin(value)) return;
    const auto policy = set.find("OMP_WAIT_POLICY");
    EnvironmentIssue found{Verdict::Harmful,
                           Severity::Warning,
                           "OMP_WAIT_POLICY",
                           "",
                           "other programs use " + context_.neighbours + ", and " +
                               (policy == set.end() ? "OMP_WAIT_POLICY is not set" : shown(policy->second)) + ". " +
                               advice_on_shared_cores(true),
                           "",
                           "passive",
                           "OpenMP 5.2, OMP_WAIT_POLICY",
                           "",
                           0};
    if (policy != set.end()) {
      found.value = policy->second.value;
      found.file = policy->second.file;
      found.line = policy->second.line;
    }
    add(std::move(found));
  }

  void list_fine(const std::vector<Assignment>& assignments) {
    for (const Assignment& one : assignments) {
      const Setting* setting = find(one.name);
      const bool judged = std::any_of(issues_.begin(), issues_.end(), [&](const EnvironmentIssue& issue) {
        return issue.name == one.name && issue.line == one.line;
      });
      if (setting == nullptr || judged || one.removed) continue;
      const bool standard = one.exact && !setting->standard.empty() && lower(one.value) == lower(setting->standard);
      add(one, Verdict::Fine, Severity::Note, shown(one) + (standard ? " is the default: " : ": ") + setting->what);
    }
  }

  const Context& context_;
  std::string backend_;
  Set set_;
  std::set<std::tuple<std::string, std::string, int, std::string>> seen_;
  std::vector<EnvironmentIssue> issues_;
};

}  // namespace

std::vector<EnvironmentIssue> lint(const std::vector<Assignment>& assignments, const Context& context) {
  return Linter(context).run(assignments);
}

std::vector<EnvironmentIssue> lint(const std::map<std::string, std::string>& variables, const Context& context) {
  std::vector<Assignment> assignments;
  assignments.reserve(variables.size());
  for (const auto& [name, value] : variables) {
    Assignment one;
    one.name = name;
    one.value = value;
    assignments.push_back(std::move(one));
  }
  return lint(assignments, context);
}

}  // namespace oxytorch::environment
