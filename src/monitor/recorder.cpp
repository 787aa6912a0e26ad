#include "monitor/recorder.h"

#include <chrono>
#include <cstring>

#include "oxytorch/clock.h"

namespace oxytorch::monitor {

Recorder::Recorder(const MonitorOptions& options, const Names& phases, const Names& scalars)
    : step_curve(options.curve_points),
      phase_tracks(options.max_phases),
      phase_names_(phases),
      scalar_names_(scalars),
      phases_(options.max_phases),
      scalars_(options.max_scalars),
      phase_slots_(options.max_phases),
      scalar_slots_(options.max_scalars),
      stack_(kMaxDepth),
      ring_records_(options.ring_records),
      words_(kHeaderWords + kPhaseWords * options.max_phases + kScalarWords * options.max_scalars) {
  for (std::size_t i = 0; i < options.max_scalars; ++i) scalar_tracks.emplace_back(options.curve_points);
  epoch_ns_ = monotonic_ns();
  epoch_unix_seconds_ = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::int64_t Recorder::now() const noexcept { return monotonic_ns() - epoch_ns_; }

void Recorder::begin_step(std::int64_t samples) {
  OXY_CHECK(!in_step(), InvalidState, "begin_step: step ", current_step(), " is still open; call end_step() first.");
  OXY_CHECK(samples >= 0, InvalidArgument, "begin_step: samples is ", samples, "; use 0 if it is unknown.");
  owner_ = pthread_self();
  ++serial_;
  depth_ = 0;
  in_phases_ns_ = 0;
  header_ = RecordHeader{};
  header_.step = next_step_;
  header_.samples = samples;
  header_.timed = 1;
  current_step_.set(next_step_);
  in_step_.set(1);
  header_.start_ns = now();
  header_.gap_ns = previous_end_ns_ < 0 ? 0 : header_.start_ns - previous_end_ns_;
}

void Recorder::end_step() {
  const std::int64_t end = now();
  OXY_CHECK(in_step(), InvalidState, "end_step: no step is open; call begin_step() first.");
  OXY_CHECK(depth_ == 0, InvalidState, "end_step: phase '", phase_names_[phases_[stack_[depth_ - 1].slot].id],
            "' is still open; end it first.");
  header_.duration_ns = end - header_.start_ns;
  add_statistics();
  push_record();
  previous_end_ns_ = end;
  ++next_step_;
  in_step_.set(0);
}

void Recorder::cancel_step() noexcept {
  if (!in_step()) return;
  previous_end_ns_ = now();
  depth_ = 0;
  cancelled.add(1);
  current_step_.set(next_step_ - 1);
  in_step_.set(0);
}

void Recorder::set_samples(std::int64_t samples) {
  OXY_CHECK(in_step(), InvalidState, "set_samples: no step is open; call it between begin_step() and end_step().");
  OXY_CHECK(samples >= 0, InvalidArgument, "set_samples: samples is ", samples, "; it cannot be negative.");
  header_.samples = samples;
}

void Recorder::set_next_step(std::uint64_t step) {
  OXY_CHECK(!in_step(), InvalidState, "set_next_step: step ", current_step(), " is open; call it between steps.");
  OXY_CHECK(step >= 1, InvalidArgument, "set_next_step: steps count from 1; got 0.");
  next_step_ = step;
  current_step_.set(step - 1);
}

void Recorder::begin_phase(std::uint32_t id) {
  OXY_CHECK(id < phase_names_.count(), OutOfRange, "begin_phase: phase ", id, " is not of this monitor, which has ",
            phase_names_.count(), "; use what its phase(name) returned.");
  if (!in_step()) {
    phases_outside.add(1);
    return;
  }
  OXY_CHECK(pthread_equal(owner_, pthread_self()), InvalidState, "begin_phase: phase '", phase_names_[id],
            "' began on another thread than step ", header_.step, "; time phases on the thread that steps.");
  OXY_CHECK(depth_ < kMaxDepth, InvalidState, "begin_phase: phase '", phase_names_[id], "' would be level ", depth_ + 1,
            "; at most ", kMaxDepth, " are nested. Is an end_phase missing?");
  Slot& slot = phase_slots_[id];
  if (slot.serial != serial_) {
    slot.serial = serial_;
    slot.index = header_.phases++;
    RecordPhase& fresh = phases_[slot.index];
    fresh = RecordPhase{};
    fresh.id = id;
    fresh.parent = depth_ == 0 ? -1 : static_cast<std::int32_t>(stack_[depth_ - 1].slot);
    fresh.start_ns = -1;
  }
  RecordPhase& phase = phases_[slot.index];
  ++phase.count;
  ++phase.open;
  Frame& frame = stack_[depth_++];
  frame.slot = slot.index;
  frame.nested_ns = 0;
  frame.start_ns = now();
  if (phase.start_ns < 0) phase.start_ns = frame.start_ns - header_.start_ns;
}

void Recorder::close_top(std::int64_t now_ns) noexcept {
  const Frame& frame = stack_[--depth_];
  RecordPhase& phase = phases_[frame.slot];
  const std::int64_t elapsed = now_ns - frame.start_ns;
  phase.self_ns += elapsed - frame.nested_ns;
  if (--phase.open == 0) phase.total_ns += elapsed;  // a phase inside itself counts once
  if (depth_ > 0) {
    stack_[depth_ - 1].nested_ns += elapsed;
  } else {
    in_phases_ns_ += elapsed;
  }
}

void Recorder::end_phase(std::uint32_t id) {
  const std::int64_t end = now();
  if (!in_step()) return;
  OXY_CHECK(pthread_equal(owner_, pthread_self()), InvalidState, "end_phase: called on another thread than step ",
            header_.step, "'s; time phases on the thread that steps.");
  OXY_CHECK(id < phase_names_.count(), OutOfRange, "end_phase: phase ", id, " is not of this monitor.");
  OXY_CHECK(depth_ > 0, InvalidState, "end_phase: phase '", phase_names_[id], "' is not open.");
  const std::uint32_t top = phases_[stack_[depth_ - 1].slot].id;
  OXY_CHECK(top == id, InvalidState, "end_phase: phase '", phase_names_[id], "' cannot end before '", phase_names_[top],
            "', which began inside it.");
  close_top(end);
}

void Recorder::leave_phase(std::uint32_t id) noexcept {
  const std::int64_t end = now();
  if (!in_step() || !pthread_equal(owner_, pthread_self()) || depth_ == 0) return;
  if (phases_[stack_[depth_ - 1].slot].id == id) close_top(end);
}

void Recorder::scalar(std::uint32_t id, double value) {
  OXY_CHECK(id < scalar_names_.count(), OutOfRange, "scalar: id ", id, " is not of this monitor, which has ",
            scalar_names_.count(), "; use what its scalar(name) returned.");
  if (!in_step()) {
    header_ = RecordHeader{};
    header_.step = current_step();
    header_.scalars = 1;
    scalars_[0] = {id, value};
    scalar_tracks[id].add(header_.step, value);
    push_record();
    return;
  }
  OXY_CHECK(pthread_equal(owner_, pthread_self()), InvalidState, "scalar: '", scalar_names_[id],
            "' was set on another thread than step ", header_.step, "'s; set scalars on the thread that steps.");
  Slot& slot = scalar_slots_[id];
  if (slot.serial != serial_) {
    slot.serial = serial_;
    slot.index = header_.scalars++;
  }
  scalars_[slot.index] = {id, value};
}

void Recorder::add_statistics() noexcept {
  version.open();
  steps.add(header_.duration_ns);
  step_curve.add(static_cast<double>(header_.step), static_cast<double>(header_.duration_ns) * 1e-9);
  samples.add(header_.samples);
  between_ns.add(header_.gap_ns);
  unattributed_ns.add(header_.duration_ns - in_phases_ns_);
  for (std::uint32_t i = 0; i < header_.phases; ++i) {
    const RecordPhase& phase = phases_[i];
    PhaseTrack& track = phase_tracks[phase.id];
    if (track.total.count() == 0 && phase.parent >= 0) {
      track.parent.set(static_cast<std::int32_t>(phases_[static_cast<std::size_t>(phase.parent)].id));
    }
    track.total.add(phase.total_ns);
    track.self_ns.add(phase.self_ns);
    track.entries.add(phase.count);
  }
  version.close();
  for (std::uint32_t i = 0; i < header_.scalars; ++i) {
    scalar_tracks[scalars_[i].id].add(header_.step, scalars_[i].value);
  }
}

void Recorder::push_record() noexcept {
  Ring* ring = ring_.load(std::memory_order_acquire);
  if (ring == nullptr) return;
  std::uint64_t* at = words_.data();
  std::memcpy(at, &header_, sizeof(header_));
  at += kHeaderWords;
  std::memcpy(at, phases_.data(), header_.phases * sizeof(RecordPhase));
  at += header_.phases * kPhaseWords;
  std::memcpy(at, scalars_.data(), header_.scalars * sizeof(RecordScalar));
  at += header_.scalars * kScalarWords;
  ring->push({words_.data(), static_cast<std::size_t>(at - words_.data())});
}

Ring& Recorder::open_ring() {
  if (!ring_storage_) {
    ring_storage_ = std::make_unique<Ring>(ring_records_, words_.size());
    ring_.store(ring_storage_.get(), std::memory_order_release);
  }
  return *ring_storage_;
}

}  // namespace oxytorch::monitor
