#include "oxytorch/logging.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/spelling.h"
#include "oxytorch/error.h"

namespace oxytorch {
namespace {

const std::vector<std::string>& level_names() {
  static const std::vector<std::string> names{"trace", "debug", "info", "warn", "error", "off"};
  return names;
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::Trace: return spdlog::level::trace;
    case LogLevel::Debug: return spdlog::level::debug;
    case LogLevel::Info: return spdlog::level::info;
    case LogLevel::Warn: return spdlog::level::warn;
    case LogLevel::Error: return spdlog::level::err;
    case LogLevel::Off: break;
  }
  return spdlog::level::off;
}

/// Leaked on purpose: other libraries' destructors may still log while the process ends.
struct State {
  State() : logger("oxytorch", std::make_shared<spdlog::sinks::stderr_color_sink_mt>()) {
    logger.set_pattern("%^oxytorch %l:%$ %v");
    logger.set_level(spdlog::level::trace);
    logger.flush_on(spdlog::level::trace);
    const char* text = std::getenv("OXYTORCH_LOG");
    if (text == nullptr || *text == '\0') return;
    try {
      level = parse_log_level(text);
    } catch (const Error& error) {
      logger.warn("OXYTORCH_LOG is ignored: {}", error.what());
    }
  }

  spdlog::logger logger;
  std::atomic<LogLevel> level{LogLevel::Warn};
  std::mutex mutex;  // guards what follows
  std::shared_ptr<const LogSink> sink;
  std::set<std::string, std::less<>> said;
};

State& state() {
  static State* const instance = new State;
  return *instance;
}

}  // namespace

const char* name(LogLevel level) noexcept {
  const auto index = static_cast<std::size_t>(level);
  return index < level_names().size() ? level_names()[index].c_str() : "unknown";
}

LogLevel parse_log_level(std::string_view text) {
  for (std::size_t i = 0; i < level_names().size(); ++i) {
    if (text == level_names()[i]) return static_cast<LogLevel>(i);
  }
  detail::raise(ErrorCode::InvalidArgument, "unknown log level ", in_quotes(text), "; ",
                did_you_mean(text, level_names()), "use ", list_of(level_names()), ".");
}

LogLevel log_level() noexcept { return state().level.load(std::memory_order_relaxed); }

void set_log_level(LogLevel level) noexcept { state().level.store(level, std::memory_order_relaxed); }

bool logs(LogLevel level) noexcept { return level != LogLevel::Off && level >= log_level(); }

void log_to_stderr(LogLevel level, std::string_view message) {
  state().logger.log(to_spdlog(level), spdlog::string_view_t(message.data(), message.size()));
}

void log(LogLevel level, std::string_view message, std::string_view module) {
  if (!logs(level)) return;
  State& s = state();
  std::shared_ptr<const LogSink> sink;
  {
    const std::lock_guard lock(s.mutex);
    sink = s.sink;
  }
  if (!sink) {
    log_to_stderr(level, message);
    return;
  }
  // Outside the lock: a sink may log.
  try {
    (*sink)({level, module, message});
  } catch (const std::exception& error) {
    s.logger.error("the log sink failed: {}", error.what());
    log_to_stderr(level, message);
  }
}

bool log_once(LogLevel level, std::string_view key, std::string_view message, std::string_view module) {
  State& s = state();
  {
    const std::lock_guard lock(s.mutex);
    if (!s.said.emplace(key).second) return false;
  }
  log(level, message, module);
  return true;
}

void reset_log_once() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.said.clear();
}

LogSink set_log_sink(LogSink sink) {
  State& s = state();
  auto next = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  const std::lock_guard lock(s.mutex);
  std::swap(s.sink, next);
  return next ? *next : LogSink{};
}

}  // namespace oxytorch
