#include "backends/sim/queue.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "backends/last_error.h"
#include "backends/sim/kernels.h"
#include "backends/sim/mutants.h"

namespace oxytorch::backend::sim {
namespace {

using std::chrono::steady_clock;

void pause_us(double us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
}

oxy_status report(const Failure& failure) {
  return failure.status == OXY_OK ? OXY_OK : fail(failure.status, "%s", failure.text.c_str());
}

Failure copy(std::int32_t device_index, const Work& work) {
  SimDevice& self = device(device_index);
  const bool to_device = work.direction != OXY_COPY_DEVICE_TO_HOST;
  const bool from_device = work.direction != OXY_COPY_HOST_TO_DEVICE;
  std::uint64_t bytes = work.bytes;
  if (mutant("copy_rounds_down") && bytes > 8) bytes -= bytes % 8;
  Range to, from;
  if (to_device && (to = self.find(work.to, bytes)).data == nullptr) return gone(work.to);
  if (from_device && (from = device(work.from_device).find(work.from, bytes)).data == nullptr) return gone(work.from);
  if (mutant("copy_one_more") && to_device && to.left > bytes && (!from_device || from.left > bytes)) ++bytes;
  if (mutant("drops_copies") && self.counters.copies.load() % 5 == 4) bytes = 0;
  void* target = to_device ? to.data : static_cast<std::uint8_t*>(work.to);
  const void* source = from_device ? from.data : static_cast<const std::uint8_t*>(work.from);
  if (mutant("copy_reversed") && to_device && from_device) {
    std::memcpy(from.data, to.data, bytes);
  } else {
    std::memcpy(target, source, bytes);
  }
  self.counters.copies.fetch_add(1, std::memory_order_relaxed);
  self.counters.copied_bytes.fetch_add(work.bytes, std::memory_order_relaxed);
  return {};
}

Failure fill(std::int32_t device_index, const Work& work) {
  const Range range = device(device_index).find(work.to, work.bytes);
  if (range.data == nullptr) return gone(work.to);
  std::uint64_t bytes = work.bytes;
  if (mutant("fill_ignores_size")) bytes = range.left;
  if (mutant("fill_rounds_down")) bytes -= bytes % 4;
  std::memset(range.data, mutant("fill_ignores_value") ? 0 : work.value, bytes);
  device(device_index).counters.fills.fetch_add(1, std::memory_order_relaxed);
  return {};
}

double link_us(const Work& work) {
  const double gbps = settings().link_gbps.load(std::memory_order_relaxed);
  const bool crosses = work.kind == Work::Kind::Copy && work.direction != OXY_COPY_DEVICE_TO_DEVICE;
  return crosses && gbps > 0 ? static_cast<double>(work.bytes) * 8 / (gbps * 1e3) : 0;
}

}  // namespace

Failure gone(const void* address) {
  char text[160];
  std::snprintf(text, sizeof(text), "work on %p, which is no live device memory any more; freed before it was done?",
                address);
  return {OXY_INVALID_STATE, text};
}

Failure perform(std::int32_t device_index, const Work& work) {
  SimDevice& self = device(device_index);
  pause_us(settings().latency_us.load(std::memory_order_relaxed) + link_us(work));
  if (strikes(settings().lose_device)) self.lost.store(true);
  Failure failure;
  if (self.lost.load() && !mutant("lost_device_works")) {
    failure = {OXY_DEVICE_LOST, "simulated device " + std::to_string(device_index) + " is lost"};
  } else if (work.fails) {
    failure = {OXY_DEVICE_ERROR, "a copy failed on the device, as the settings asked"};
    if (mutant("swallows_errors")) failure = {};
  } else {
    switch (work.kind) {
      case Work::Kind::Copy: failure = copy(device_index, work); break;
      case Work::Kind::Launch: failure = run_launch(device_index, *work.launch); break;
      default: failure = fill(device_index, work);
    }
  }
  if (failure.status != OXY_OK) self.counters.failures.fetch_add(1, std::memory_order_relaxed);
  return failure;
}

void Mark::reach(const Failure& failure) {
  const std::lock_guard lock(mutex_);
  if (reached_) return;
  reached_ = true;
  failure_ = failure;
  const auto since = steady_clock::now().time_since_epoch();
  time_ns_ = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
  reached_condition_.notify_all();
}

oxy_status Mark::wait(std::uint64_t timeout_ns, std::uint64_t* time_ns) {
  std::unique_lock lock(mutex_);
  // Longer than a century is for ever; the clock's arithmetic would overflow.
  constexpr std::uint64_t kForever = std::uint64_t{1} << 61;
  if (timeout_ns >= kForever) {
    reached_condition_.wait(lock, [this] { return reached_; });
  } else if (timeout_ns > 0) {
    reached_condition_.wait_until(lock, steady_clock::now() + std::chrono::nanoseconds(timeout_ns),
                                  [this] { return reached_; });
  }
  if (!reached_) return mutant("timeout_says_ok") ? OXY_OK : OXY_NOT_READY;
  if (time_ns != nullptr) *time_ns = time_ns_;
  return mutant("event_hides_errors") ? OXY_OK : report(failure_);
}

Failure Mark::wait() {
  std::unique_lock lock(mutex_);
  reached_condition_.wait(lock, [this] { return reached_; });
  return mutant("wait_hides_errors") ? Failure{} : failure_;
}

void QueueState::start() {
  worker_ = std::thread([this] { run(); });
}

oxy_status QueueState::enqueue(Work work) {
  const std::lock_guard lock(mutex_);
  if (failure_.status != OXY_OK) return report(failure_);
  if (mutant("swaps_copies") && work_.size() > 1 && work.kind == Work::Kind::Copy) {
    work_.insert(work_.end() - 1, std::move(work));
  } else {
    work_.push_back(std::move(work));
  }
  ++enqueued_;
  work_condition_.notify_one();
  return OXY_OK;
}

oxy_status QueueState::synchronize() {
  std::unique_lock lock(mutex_);
  const std::uint64_t target = enqueued_;
  if (!mutant("sync_returns_early")) done_condition_.wait(lock, [&] { return done_ >= target; });
  const oxy_status status = report(failure_);
  if (mutant("error_told_once")) failure_ = {};
  return status;
}

oxy_status QueueState::finish() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    if (mutant("destroy_drops_work")) {
      for (Work& work : work_) {
        if (work.mark != nullptr) work.mark->reach({});
      }
      done_ += work_.size();
      work_.clear();
    }
    work_condition_.notify_one();
  }
  worker_.join();
  return report(failure_);
}

void QueueState::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_condition_.wait(lock, [this] { return ending_ || !work_.empty(); });
    if (work_.empty()) return;
    if (mutant("newest_first")) std::swap(work_.front(), work_.back());
    Work work = std::move(work_.front());
    work_.pop_front();
    Failure failure = failure_;
    lock.unlock();
    if (work.kind == Work::Kind::Record) {
      pause_us(settings().slow_event_us.load(std::memory_order_relaxed));
      if (failure.status == OXY_OK && device(device_).lost.load()) failure = {OXY_DEVICE_LOST, "the device is lost"};
      work.mark->reach(failure);
    } else if (failure.status == OXY_OK) {
      failure = work.kind == Work::Kind::Wait ? work.mark->wait() : perform(device_, work);
    }
    lock.lock();
    if (failure_.status == OXY_OK) failure_ = std::move(failure);
    ++done_;
    done_condition_.notify_all();
  }
}

}  // namespace oxytorch::backend::sim
