/// The step path: clock reads and stores into memory taken at construction.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "monitor/names.h"
#include "monitor/ring.h"
#include "monitor/statistics.h"

namespace oxytorch::monitor {

/// A record in a ring: kHeaderWords words, then kPhaseWords per phase, then kScalarWords per scalar.
struct RecordHeader {
  std::uint64_t step = 0;
  std::uint32_t phases = 0, scalars = 0;
  std::int64_t start_ns = 0;  ///< since the recorder's epoch
  std::int64_t duration_ns = 0, gap_ns = 0, samples = 0;
  std::uint64_t timed = 0;
};
struct RecordPhase {
  std::uint32_t id = 0;
  std::int32_t parent = -1;
  std::uint32_t count = 0, open = 0;
  std::int64_t start_ns = 0, total_ns = 0, self_ns = 0;
};
struct RecordScalar {
  std::uint64_t id = 0;
  double value = 0;
};
inline constexpr std::size_t kHeaderWords = sizeof(RecordHeader) / 8;
inline constexpr std::size_t kPhaseWords = sizeof(RecordPhase) / 8;
inline constexpr std::size_t kScalarWords = sizeof(RecordScalar) / 8;

/// Running statistics of a phase. All phases of a recorder share its version.
struct PhaseTrack {
  DurationTrack total;
  Shared<std::int64_t> self_ns;
  Shared<std::uint64_t> entries;
  Shared<std::int32_t> parent{-1};  ///< phase id, as first entered
};

class Recorder {
 public:
  static constexpr std::uint32_t kMaxDepth = 64;

  Recorder(const MonitorOptions& options, const Names& phases, const Names& scalars);

  void begin_step(std::int64_t samples);
  void end_step();
  void cancel_step() noexcept;
  void set_samples(std::int64_t samples);
  void begin_phase(std::uint32_t id);
  void end_phase(std::uint32_t id);
  void leave_phase(std::uint32_t id) noexcept;
  void scalar(std::uint32_t id, double value);
  [[nodiscard]] std::uint64_t current_step() const noexcept { return current_step_.get(); }
  [[nodiscard]] bool in_step() const noexcept { return in_step_.get() != 0; }
  void set_next_step(std::uint64_t step);

  /// Makes the ring, once; before that, records go nowhere.
  Ring& open_ring();

  /// Unix time of the recorder's epoch in seconds.
  [[nodiscard]] double epoch_unix_seconds() const noexcept { return epoch_unix_seconds_; }

  // Read by summaries.
  Version version;
  DurationTrack steps;
  Curve step_curve;
  Shared<std::int64_t> samples, between_ns, unattributed_ns;
  Shared<std::uint64_t> cancelled, phases_outside;
  std::vector<PhaseTrack> phase_tracks;
  std::deque<ScalarTrack> scalar_tracks;

 private:
  struct Frame {
    std::uint32_t slot = 0;
    std::int64_t start_ns = 0, nested_ns = 0;
  };
  struct Slot {
    std::uint64_t serial = 0;  // of the step that used it last
    std::uint32_t index = 0;
  };

  [[nodiscard]] std::int64_t now() const noexcept;
  void close_top(std::int64_t now_ns) noexcept;
  void add_statistics() noexcept;
  void push_record() noexcept;
  void leave_step() noexcept;

  const Names& phase_names_;
  const Names& scalar_names_;
  std::int64_t epoch_ns_ = 0;
  double epoch_unix_seconds_ = 0;

  Shared<std::uint32_t> in_step_;
  Shared<std::uint64_t> current_step_;
  std::uint64_t next_step_ = 1;
  pthread_t owner_{};  // the thread inside the step
  std::uint64_t serial_ = 0;
  std::int64_t previous_end_ns_ = -1;
  RecordHeader header_;
  std::vector<RecordPhase> phases_;
  std::vector<RecordScalar> scalars_;
  std::vector<Slot> phase_slots_, scalar_slots_;
  std::vector<Frame> stack_;
  std::uint32_t depth_ = 0;
  std::int64_t in_phases_ns_ = 0;

  std::size_t ring_records_;
  std::vector<std::uint64_t> words_;
  std::unique_ptr<Ring> ring_storage_;
  std::atomic<Ring*> ring_{nullptr};
};

}  // namespace oxytorch::monitor
