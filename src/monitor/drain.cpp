#include "monitor/drain.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace oxytorch::monitor {

Drain::Drain(const MonitorOptions& options, Recorder& recorder, const Names& phases, const Names& scalars)
    : recorder_(recorder),
      phase_names_(phases),
      scalar_names_(scalars),
      curve_points_(options.curve_points),
      interval_seconds_(options.drain_seconds),
      late_tracks_(options.max_scalars) {}

Drain::~Drain() { stop_thread(); }

void Drain::add_sink(std::shared_ptr<Sink> sink) {
  OXY_CHECK(sink != nullptr, InvalidArgument, "add_sink: the sink is null.");
  const std::lock_guard lock(mutex_);
  OXY_CHECK(!closed_, InvalidState, "add_sink: the monitor is closed.");
  ring_ = &recorder_.open_ring();
  if (outlets_.empty()) next_ = ring_->pushed();
  outlets_.push_back({std::move(sink), {}, false});
  if (interval_seconds_ > 0 && !thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void Drain::set_late_source(std::function<void(std::vector<LateScalar>&)> source) {
  const std::lock_guard lock(mutex_);
  late_source_ = std::move(source);
}

void Drain::flush() {
  const std::lock_guard lock(mutex_);
  if (!closed_) drain_locked();
  rethrow();
}

void Drain::collect() {
  const std::lock_guard lock(mutex_);
  collect_locked();
}

void Drain::close() {
  stop_thread();
  const std::lock_guard lock(mutex_);
  if (!closed_) {
    drain_locked();
    deliver_late(UINT64_MAX);
    for (Outlet& outlet : outlets_) {
      guarded(outlet, [](Sink& sink) { sink.flush(); });
      guarded(outlet, [](Sink& sink) { sink.close(); });
    }
    closed_ = true;
  }
  rethrow();
}

std::uint64_t Drain::dropped() {
  const std::lock_guard lock(mutex_);
  // What the ring has already overwritten is lost, though no drain has noticed yet.
  std::uint64_t pending = 0;
  if (ring_ != nullptr && !closed_) {
    const std::uint64_t behind = ring_->pushed() - next_;
    if (behind > ring_->records()) pending = behind - ring_->records();
  }
  return dropped_ + pending;
}

std::vector<std::string> Drain::failed_sinks() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const Outlet& outlet : outlets_) {
    if (!outlet.failure.empty()) names.push_back(outlet.sink->name() + ": " + outlet.failure);
  }
  return names;
}

ScalarTrack::Reading Drain::late_reading(std::uint32_t scalar) {
  const std::lock_guard lock(mutex_);
  return late_tracks_[scalar] ? late_tracks_[scalar]->read() : ScalarTrack::Reading{};
}

void Drain::collect_locked() {
  if (!late_source_) return;
  const auto earlier = [](const LateScalar& a, const LateScalar& b) { return a.step < b.step; };
  late_arrivals_.clear();
  try {
    late_source_(late_arrivals_);
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
  std::stable_sort(late_arrivals_.begin(), late_arrivals_.end(), earlier);
  for (const LateScalar& value : late_arrivals_) {
    const auto id = static_cast<std::uint32_t>(value.id);
    if (id >= scalar_names_.count()) continue;
    if (!late_tracks_[id]) late_tracks_[id] = std::make_unique<ScalarTrack>(curve_points_);
    late_tracks_[id]->add(value.step, value.value);
    if (!outlets_.empty() && !closed_) late_.push_back(value);
  }
  std::stable_sort(late_.begin(), late_.end(), earlier);
}

void Drain::drain_locked() {
  collect_locked();
  if (ring_ == nullptr) return;
  const std::uint64_t end = ring_->pushed();
  if (end - next_ > ring_->records()) {
    const std::uint64_t lost = end - next_ - ring_->records();
    dropped_ += lost;
    dropped_before_ += lost;
    next_ += lost;
  }
  while (next_ < end) deliver_next(next_++);
  // A late value of a step that has ended belongs to a record already delivered or dropped.
  const std::uint64_t current = recorder_.current_step();
  if (current > 0) deliver_late(recorder_.in_step() ? current - 1 : current);
  for (Outlet& outlet : outlets_) {
    if (std::exchange(outlet.fresh, false)) guarded(outlet, [](Sink& sink) { sink.flush(); });
  }
}

void Drain::deliver_next(std::uint64_t number) {
  if (!ring_->read(number, words_)) {
    ++dropped_;
    ++dropped_before_;
    return;
  }
  RecordHeader header;
  std::memcpy(static_cast<void*>(&header), words_.data(), sizeof(header));
  if (header.step > 0) deliver_late(header.step - 1);
  const std::uint64_t* at = words_.data() + kHeaderWords;
  phases_.clear();
  for (std::uint32_t i = 0; i < header.phases; ++i, at += kPhaseWords) {
    RecordPhase phase;
    std::memcpy(static_cast<void*>(&phase), at, sizeof(phase));
    phases_.push_back(
        {phase_names_[phase.id], phase.id, phase.parent, phase.count, phase.start_ns, phase.total_ns, phase.self_ns});
  }
  scalars_.clear();
  for (std::uint32_t i = 0; i < header.scalars; ++i, at += kScalarWords) {
    RecordScalar scalar;
    std::memcpy(static_cast<void*>(&scalar), at, sizeof(scalar));
    const auto id = static_cast<std::uint32_t>(scalar.id);
    scalars_.push_back({scalar_names_[id], id, scalar.value});
  }
  if (header.timed != 0) {
    for (; !late_.empty() && late_.front().step == header.step; late_.pop_front()) {
      const auto id = static_cast<std::uint32_t>(late_.front().id);
      const auto same = std::find_if(scalars_.begin(), scalars_.end(), [&](const auto& s) { return s.id == id; });
      if (same != scalars_.end()) {
        same->value = late_.front().value;
      } else {
        scalars_.push_back({scalar_names_[id], id, late_.front().value});
      }
    }
  }
  StepRecord record;
  record.step = header.step;
  record.timed = header.timed != 0;
  record.unix_seconds = recorder_.epoch_unix_seconds() + static_cast<double>(header.start_ns) * 1e-9;
  record.duration_ns = header.duration_ns;
  record.gap_ns = header.gap_ns;
  record.samples = header.samples;
  record.dropped_before = std::exchange(dropped_before_, 0);
  record.phases = phases_;
  record.scalars = scalars_;
  deliver(record);
}

void Drain::deliver_late(std::uint64_t through) {
  while (!late_.empty() && late_.front().step <= through) {
    StepRecord record;
    record.step = late_.front().step;
    record.timed = false;
    scalars_.clear();
    for (; !late_.empty() && late_.front().step == record.step; late_.pop_front()) {
      const auto id = static_cast<std::uint32_t>(late_.front().id);
      scalars_.push_back({scalar_names_[id], id, late_.front().value});
    }
    record.scalars = scalars_;
    deliver(record);
  }
}

void Drain::deliver(const StepRecord& record) {
  for (Outlet& outlet : outlets_) {
    outlet.fresh = true;
    guarded(outlet, [&](Sink& sink) { sink.write(record); });
  }
}

template <class Call>
void Drain::guarded(Outlet& outlet, Call&& call) {
  if (!outlet.failure.empty()) return;
  try {
    call(*outlet.sink);
  } catch (const std::exception& error) {
    outlet.failure = error.what();
    if (outlet.failure.empty()) outlet.failure = "unknown error";
    if (!error_) error_ = std::current_exception();
  } catch (...) {
    outlet.failure = "an exception that is not a std::exception";
    if (!error_) error_ = std::current_exception();
  }
}

void Drain::rethrow() {
  if (std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
}

void Drain::run() {
  // Short naps so that fast steps do not outrun the ring; a full drain only when due or when the ring fills.
  constexpr double kLongestNap = 0.02;
  std::unique_lock lock(mutex_);
  auto last = std::chrono::steady_clock::now();
  while (!stopping_) {
    wake_.wait_for(lock, std::chrono::duration<double>(std::min(interval_seconds_, kLongestNap)),
                   [this] { return stopping_; });
    const auto now = std::chrono::steady_clock::now();
    const bool due = std::chrono::duration<double>(now - last).count() >= interval_seconds_;
    const bool filling = ring_->pushed() - next_ > ring_->records() / 4;
    if (due || filling) {
      drain_locked();
      last = now;
    }
  }
}

void Drain::stop_thread() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace oxytorch::monitor
