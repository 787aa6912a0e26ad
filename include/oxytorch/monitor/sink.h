/// Where finished steps go. A monitor hands every sink each step once, in order, from whichever thread drains.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::monitor {

/// Time one step spent in one phase, summed over the phase's entries in that step.
struct PhaseTime {
  std::string_view name;
  std::uint32_t id = 0;       ///< the interned phase
  std::int32_t parent = -1;   ///< index of the enclosing phase in StepRecord::phases, -1 directly under the step
  std::uint32_t count = 0;    ///< entries in this step
  std::int64_t start_ns = 0;  ///< first entry, from the start of the step
  std::int64_t total_ns = 0;  ///< with the phases nested inside
  std::int64_t self_ns = 0;   ///< without them: over one step, self times and time in no phase add up to the duration
};

/// One named value of one step. The value may be NaN or infinite.
struct ScalarValue {
  std::string_view name;
  std::uint32_t id = 0;
  double value = 0;
};

/// What a sink receives. Names and spans are valid during the call only.
struct StepRecord {
  std::uint64_t step = 0;
  /// False for values that arrived outside a step: then only `step` (the latest step) and `scalars` mean something.
  bool timed = true;
  double unix_seconds = 0;  ///< start of the step, seconds since 1970-01-01 UTC
  std::int64_t duration_ns = 0;
  std::int64_t gap_ns = 0;  ///< from the end of the step before to the start of this one; 0 for the first
  std::int64_t samples = 0;
  std::uint64_t dropped_before = 0;  ///< records lost to a full ring directly before this one
  std::span<const PhaseTime> phases;
  std::span<const ScalarValue> scalars;
};

/// Receiver of finished steps. A monitor calls its sinks under one lock, never from inside a step unless the user
/// flushes there. A sink that throws is not called again; the monitor's next flush() or close() throws what it threw.
class OXY_API Sink {
 public:
  virtual ~Sink();
  /// Short name for messages, for example "jsonl run.jsonl".
  [[nodiscard]] virtual std::string name() const = 0;
  virtual void write(const StepRecord& record) = 0;
  /// After each batch of records: make them visible to readers.
  virtual void flush() {}
  /// Last call, once.
  virtual void close() {}
};

/// Appends one JSON object per record to a file: `step, time, duration, gap, samples, phases, scalars`, times in
/// seconds, `phases` with what is nested inside each, and `parents` (phase to enclosing phase) where phases nest.
/// Lines are written whole with O_APPEND. NaN and infinities are the strings "NaN", "Infinity", "-Infinity".
/// Throws Error(Io), which names the path, if the file cannot be opened or written.
class OXY_API JsonlSink : public Sink {
 public:
  explicit JsonlSink(std::string path);
  ~JsonlSink() override;
  JsonlSink(const JsonlSink&) = delete;
  JsonlSink& operator=(const JsonlSink&) = delete;
  [[nodiscard]] std::string name() const override;
  void write(const StepRecord& record) override;
  void flush() override;
  void close() override;

 private:
  void write_out();
  std::string path_;
  std::string buffer_;
  int file_ = -1;
};

/// Prints one line for the steps since the last line, at most every `every_seconds` of training time and once at the
/// end: step, median step time, samples per second, the largest phases, and the latest scalars.
class OXY_API ConsoleSink : public Sink {
 public:
  /// `print` receives each line, newline included; by default it goes to standard output.
  explicit ConsoleSink(double every_seconds = 5.0, std::function<void(std::string_view)> print = {});
  ~ConsoleSink() override;
  [[nodiscard]] std::string name() const override;
  void write(const StepRecord& record) override;
  void flush() override;
  void close() override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace oxytorch::monitor
