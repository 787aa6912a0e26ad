#include <unordered_map>

#include "base/spelling.h"
#include "settings_file.h"
#include "value.h"

namespace oxytorch::environment {
namespace {

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
  const Grammar* known = find_grammar(grammar);
  return known == nullptr ? "" : known->allowed;
}

const std::vector<Setting>& settings() {
  static const std::vector<Setting> all = read_settings(settings_files());
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
