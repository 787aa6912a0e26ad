/// What went wrong, as it is handed to another thread.
#pragma once

#include <exception>
#include <string>

#include "oxytorch/error.h"

namespace oxytorch::data {

struct Failure {
  ErrorCode code;
  std::string text;
};

inline Failure failure_of(const std::exception& error, const std::string& before = "") {
  const auto* known = dynamic_cast<const Error*>(&error);
  return {known == nullptr ? ErrorCode::InvalidState : known->code(), before + error.what()};
}

}  // namespace oxytorch::data
