#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "monitor/format.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"
#include "oxytorch/monitor/sink.h"

namespace oxytorch::monitor {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 16;

void append_key(std::string& out, std::string_view key) {
  append_json_string(out, key);
  out += ':';
}

void append_seconds(std::string& out, std::int64_t ns) { append_json_number(out, static_cast<double>(ns) / 1e9); }

void append_record(std::string& out, const StepRecord& record) {
  out += "{\"step\":";
  out += std::to_string(record.step);
  if (record.dropped_before > 0) out += ",\"dropped_before\":" + std::to_string(record.dropped_before);
  if (record.timed) {
    out += ",\"time\":";
    // Microseconds are what a double of today's Unix time holds.
    append_json_number(out, std::round(record.unix_seconds * 1e6) / 1e6);
    out += ",\"duration\":";
    append_seconds(out, record.duration_ns);
    out += ",\"gap\":";
    append_seconds(out, record.gap_ns);
    out += ",\"samples\":";
    out += std::to_string(record.samples);
    out += ",\"phases\":{";
    bool nested = false;
    for (std::size_t i = 0; i < record.phases.size(); ++i) {
      if (i > 0) out += ',';
      append_key(out, record.phases[i].name);
      append_seconds(out, record.phases[i].total_ns);
      nested = nested || record.phases[i].parent >= 0;
    }
    out += '}';
    if (nested) {
      out += ",\"parents\":{";
      bool first = true;
      for (const PhaseTime& phase : record.phases) {
        if (phase.parent < 0) continue;
        if (!first) out += ',';
        first = false;
        append_key(out, phase.name);
        append_json_string(out, record.phases[static_cast<std::size_t>(phase.parent)].name);
      }
      out += '}';
    }
  }
  out += ",\"scalars\":{";
  for (std::size_t i = 0; i < record.scalars.size(); ++i) {
    if (i > 0) out += ',';
    append_key(out, record.scalars[i].name);
    append_json_number(out, record.scalars[i].value);
  }
  out += "}}\n";
}

}  // namespace

Sink::~Sink() = default;

JsonlSink::JsonlSink(std::string path) : path_(std::move(path)) {
  file_ = ::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  OXY_CHECK(file_ >= 0, Io, "cannot open '", path_, "' for appending: ", std::strerror(errno),
            "; check that its folder exists and can be written.");
  // A run that died inside a line must not swallow our first one.
  const off_t end = ::lseek(file_, 0, SEEK_END);
  char last = '\n';
  if (end > 0 && ::pread(file_, &last, 1, end - 1) == 1 && last != '\n') buffer_ += '\n';
  buffer_.reserve(kBufferBytes + 4096);
}

JsonlSink::~JsonlSink() {
  if (file_ < 0) return;
  try {
    close();
  } catch (const std::exception& error) {
    log(LogLevel::Error, error.what(), "monitor");
  }
}

std::string JsonlSink::name() const { return "jsonl " + path_; }

void JsonlSink::write(const StepRecord& record) {
  OXY_CHECK(file_ >= 0, InvalidState, "'", path_, "' is closed.");
  append_record(buffer_, record);
  if (buffer_.size() >= kBufferBytes) write_out();
}

void JsonlSink::flush() { write_out(); }

void JsonlSink::close() {
  if (file_ < 0) return;
  struct Closer {
    int& file;
    ~Closer() {
      ::close(file);
      file = -1;
    }
  } closer{file_};
  write_out();
}

void JsonlSink::write_out() {
  std::size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t wrote = ::write(file_, buffer_.data() + done, buffer_.size() - done);
    if (wrote >= 0) {
      done += static_cast<std::size_t>(wrote);
    } else if (errno != EINTR) {
      const int failure = errno;
      buffer_.erase(0, done);
      detail::raise(ErrorCode::Io, "cannot append to '", path_, "': ", std::strerror(failure), ".");
    }
  }
  buffer_.clear();
}

}  // namespace oxytorch::monitor
