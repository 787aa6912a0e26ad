/// Errors and checks.
///
/// `OXY_CHECK` is for the caller's mistakes: it throws `oxytorch::Error` with what was wrong, the value seen and
/// what to do. `OXY_ASSERT` is for ours: it throws with code `Internal` and asks for a report. Nothing here
/// allocates on the passing path. Bindings map each code to the Python exception named beside it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "oxytorch/api.h"

namespace oxytorch {

enum class ErrorCode {
  InvalidArgument,  ///< a bad value: ValueError
  InvalidType,      ///< a bad type or dtype: TypeError
  OutOfRange,       ///< an index outside its range: IndexError
  NotFound,         ///< a missing file: FileNotFoundError
  OutOfMemory,      ///< no memory left: torch.OutOfMemoryError
  NotSupported,     ///< a valid request that this build or device cannot serve: NotImplementedError
  InvalidState,     ///< called at the wrong moment, or an object changed underneath: RuntimeError
  DeviceError,      ///< the device or its driver failed: RuntimeError
  Io,               ///< reading or writing failed: OSError
  Internal,         ///< a bug in Oxytorch: AssertionError
};

/// Name of a code as written in messages, for example "InvalidArgument".
OXY_API const char* name(ErrorCode code) noexcept;

/// The one exception type of the library. `what()` is the whole message.
class OXY_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ~Error() override;
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

namespace detail {
template <class... Parts>
[[noreturn]] __attribute__((noinline, cold)) void raise(ErrorCode code, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(code, message.str());
}
}  // namespace detail

}  // namespace oxytorch

/// Throws Error(code, message...) unless `condition`; the parts of the message are streamed only on failure.
#define OXY_CHECK(condition, code, ...)                                    \
  do {                                                                     \
    if (__builtin_expect(!(condition), 0)) {                               \
      ::oxytorch::detail::raise(::oxytorch::ErrorCode::code, __VA_ARGS__); \
    }                                                                      \
  } while (false)

/// As OXY_CHECK, for what only a bug in Oxytorch can break.
#define OXY_ASSERT(condition, ...)                                                                               \
  do {                                                                                                           \
    if (__builtin_expect(!(condition), 0)) {                                                                     \
      ::oxytorch::detail::raise(::oxytorch::ErrorCode::Internal, "Oxytorch bug, please report it: ", #condition, \
                                " is false at ", __FILE__, ":", __LINE__, ". ", __VA_ARGS__);                    \
    }                                                                                                            \
  } while (false)
