#include "base/cache_folder.h"

#include <cstdlib>

namespace oxytorch {
namespace {

std::string from_environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

}  // namespace

bool cache_is_off() { return from_environment("OXYTORCH_CACHE") == "off"; }

std::string cache_folder() {
  if (cache_is_off()) return "";
  if (const std::string own = from_environment("OXYTORCH_CACHE"); !own.empty()) return own;
  // The XDG specification: a path that is not absolute is to be ignored.
  if (const std::string cache = from_environment("XDG_CACHE_HOME"); cache.starts_with('/')) return cache + "/oxytorch";
  const std::string home = from_environment("HOME");
  return home.empty() ? "" : home + "/.cache/oxytorch";
}

}  // namespace oxytorch
