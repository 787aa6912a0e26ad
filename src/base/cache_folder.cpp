#include "base/cache_folder.h"

#include "base/set_variable.h"

namespace oxytorch {
bool cache_is_off() { return set_variable({"OXYTORCH_CACHE"}) == "off"; }

std::string cache_folder() {
  if (cache_is_off()) return "";
  if (const std::string own = set_variable({"OXYTORCH_CACHE"}); !own.empty()) return own;
  // The XDG specification: a path that is not absolute is to be ignored.
  if (const std::string cache = set_variable({"XDG_CACHE_HOME"}); cache.starts_with('/')) return cache + "/oxytorch";
  const std::string home = set_variable({"HOME"});
  return home.empty() ? "" : home + "/.cache/oxytorch";
}

}  // namespace oxytorch
