/// Takes finished records out of the ring and hands them to the sinks, on request or from a background thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "monitor/recorder.h"
#include "oxytorch/monitor/sink.h"

namespace oxytorch::monitor {

class Drain {
 public:
  Drain(const MonitorOptions& options, Recorder& recorder, const Names& phases, const Names& scalars);
  ~Drain();

  void add_sink(std::shared_ptr<Sink> sink);
  void set_late_source(std::function<void(std::vector<LateScalar>&)> source);
  void flush();
  /// Reads late scalars into their statistics; delivers nothing.
  void collect();
  void close();

  /// Records that no sink received.
  [[nodiscard]] std::uint64_t dropped();
  [[nodiscard]] std::vector<std::string> failed_sinks();
  /// Statistics of late values; empty readings for scalars that have none.
  [[nodiscard]] ScalarTrack::Reading late_reading(std::uint32_t scalar);

 private:
  struct Outlet {
    std::shared_ptr<Sink> sink;
    std::string failure;  // not empty: it threw and is left alone
    bool fresh = false;   // received a record since its last flush
  };

  void run();
  void collect_locked();
  void drain_locked();
  void deliver_next(std::uint64_t number);
  void deliver_late(std::uint64_t through);
  void deliver(const StepRecord& record);
  template <class Call>
  void guarded(Outlet& outlet, Call&& call);
  void rethrow();
  void stop_thread();

  Recorder& recorder_;
  const Names& phase_names_;
  const Names& scalar_names_;
  std::size_t curve_points_;
  double interval_seconds_;

  std::mutex mutex_;  // everything below
  Ring* ring_ = nullptr;
  std::uint64_t next_ = 0, dropped_ = 0, dropped_before_ = 0;
  std::vector<Outlet> outlets_;
  std::exception_ptr error_;
  bool closed_ = false;
  std::function<void(std::vector<LateScalar>&)> late_source_;
  std::vector<LateScalar> late_arrivals_;
  std::deque<LateScalar> late_;  // by step, not yet delivered
  std::vector<std::unique_ptr<ScalarTrack>> late_tracks_;
  std::vector<std::uint64_t> words_;
  std::vector<PhaseTime> phases_;
  std::vector<ScalarValue> scalars_;

  std::thread thread_;
  std::condition_variable wake_;
  bool stopping_ = false;
};

}  // namespace oxytorch::monitor
