#include "oxytorch/error.h"

namespace oxytorch {

// Out of line, so that the type has one home and catches across library borders.
Error::~Error() = default;

const char* name(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::InvalidArgument: return "InvalidArgument";
    case ErrorCode::InvalidType: return "InvalidType";
    case ErrorCode::OutOfRange: return "OutOfRange";
    case ErrorCode::NotFound: return "NotFound";
    case ErrorCode::OutOfMemory: return "OutOfMemory";
    case ErrorCode::NotSupported: return "NotSupported";
    case ErrorCode::InvalidState: return "InvalidState";
    case ErrorCode::DeviceError: return "DeviceError";
    case ErrorCode::Io: return "Io";
    case ErrorCode::Internal: return "Internal";
  }
  return "Unknown";
}

}  // namespace oxytorch
