/// Environment variables as text.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <string>

namespace oxytorch {

/// The first of these environment variables that is set to something; "" where none is.
inline std::string set_variable(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "";
}

}  // namespace oxytorch
