/// Logging: one line of text to stderr, quiet by default (warnings and errors).
///
/// `OXYTORCH_LOG=trace|debug|info|warn|error|off` sets the level of a process; a bad value gives one warning and
/// leaves the default. Every function is safe from any thread. This header holds std types only, so that units
/// that include torch can log.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "oxytorch/api.h"

namespace oxytorch {

enum class LogLevel { Trace = 0, Debug = 1, Info = 2, Warn = 3, Error = 4, Off = 5 };

/// "trace", "debug", "info", "warn", "error" or "off".
OXY_API const char* name(LogLevel level) noexcept;

/// The level named by `text`; Error(InvalidArgument) with the nearest name for another text.
OXY_API LogLevel parse_log_level(std::string_view text);

/// The active level: messages below it are dropped.
OXY_API LogLevel log_level() noexcept;
OXY_API void set_log_level(LogLevel level) noexcept;

/// True where a message of this level would be written; guards work that is only for the log.
OXY_API bool logs(LogLevel level) noexcept;

/// Writes one message, if its level is active. Level Off is never written. `module` is the part of the library that
/// speaks, such as "tune"; sinks get it.
OXY_API void log(LogLevel level, std::string_view message, std::string_view module = "");

/// As log(), once per `key` and process; returns whether this call was the first. A dropped message counts as said.
OXY_API bool log_once(LogLevel level, std::string_view key, std::string_view message, std::string_view module = "");

/// Writes one message to stderr, whatever level and sink are set: for a sink that cannot deliver it.
OXY_API void log_to_stderr(LogLevel level, std::string_view message);

/// Forgets which keys log_once() has seen.
OXY_API void reset_log_once();

/// One message on its way to a sink; the texts live as long as the call.
struct LogRecord {
  LogLevel level;
  std::string_view module;  ///< empty where none was named
  std::string_view message;
};

/// Receives messages in place of stderr. Called on the thread that logs, maybe from several at once. What it
/// throws is written to stderr and goes no further.
using LogSink = std::function<void(const LogRecord& record)>;

/// Sends messages to `sink` and gives back the one before it; an empty function is stderr.
OXY_API LogSink set_log_sink(LogSink sink);

}  // namespace oxytorch
