/// Fixed-size running statistics with one writer and any number of readers.
///
/// Writers store with release and readers load with acquire, so that a version read before and after tells a reader
/// whether it saw one state; on x86 these are plain moves.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "oxytorch/monitor/performance_monitor.h"

namespace oxytorch::monitor {

/// A number that one thread writes and others read.
template <class T>
class Shared {
 public:
  Shared() = default;
  explicit Shared(T value) : value_(value) {}
  [[nodiscard]] T get() const noexcept { return value_.load(std::memory_order_acquire); }
  void set(T value) noexcept { value_.store(value, std::memory_order_release); }
  void add(T value) noexcept { set(value_.load(std::memory_order_relaxed) + value); }

 private:
  std::atomic<T> value_{};
};

/// Marks a writer's change: odd while it runs.
class Version {
 public:
  void open() noexcept { value_.store(value_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  void close() noexcept { value_.store(value_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

  /// Runs `read` until no change ran beside it, at most a thousand times.
  template <class Read>
  void consistent(Read&& read) const {
    for (int attempt = 0; attempt < 1000; ++attempt) {
      const std::uint64_t before = value_.load(std::memory_order_acquire);
      read();
      if (before % 2 == 0 && value_.load(std::memory_order_relaxed) == before) return;
    }
  }

 private:
  std::atomic<std::uint64_t> value_{0};
};

/// Durations in nanoseconds: exact to 63 ns, then 32 buckets an octave up to 4.9 hours.
class Histogram {
 public:
  static constexpr int kBuckets = 1280;

  Histogram() : counts_(kBuckets) {}

  void add(std::int64_t ns) noexcept { counts_[static_cast<std::size_t>(bucket(ns))].add(1); }

  static int bucket(std::int64_t ns) noexcept {
    const std::uint64_t value = ns > 0 ? static_cast<std::uint64_t>(ns) : 0;
    if (value < 64) return static_cast<int>(value);
    const int shift = std::bit_width(value) - 6;
    return std::min(kBuckets - 1, shift * 32 + static_cast<int>(value >> shift));
  }
  static double lower_edge(int bucket) noexcept {
    if (bucket < 64) return bucket;
    const int shift = bucket / 32 - 1;
    return std::ldexp(bucket - shift * 32, shift);
  }

  void copy(std::vector<std::uint64_t>& counts) const {
    counts.resize(kBuckets);
    for (int i = 0; i < kBuckets; ++i) counts[static_cast<std::size_t>(i)] = counts_[static_cast<std::size_t>(i)].get();
  }

  /// Quantile `q` in nanoseconds, by linear interpolation inside the bucket.
  static double quantile(const std::vector<std::uint64_t>& counts, double q) {
    std::uint64_t total = 0;
    for (std::uint64_t count : counts) total += count;
    if (total == 0) return 0;
    const double rank = q * static_cast<double>(total - 1);
    double below = 0;
    for (int i = 0; i < kBuckets; ++i) {
      const auto count = static_cast<double>(counts[static_cast<std::size_t>(i)]);
      if (count > 0 && rank < below + count) {
        const double low = lower_edge(i);
        const double width = i < 64 ? 0 : lower_edge(i + 1) - low;
        return low + width * (rank - below + 0.5) / count;
      }
      below += count;
    }
    return lower_edge(kBuckets - 1);
  }

 private:
  std::vector<Shared<std::uint64_t>> counts_;
};

/// Running statistics of a duration.
class DurationTrack {
 public:
  void add(std::int64_t ns) noexcept {
    if (count_.get() == 0 || ns < min_.get()) min_.set(ns);
    if (ns > max_.get()) max_.set(ns);
    count_.add(1);
    sum_.add(ns);
    histogram_.add(ns);
  }

  [[nodiscard]] std::uint64_t count() const noexcept { return count_.get(); }

  /// `counts` is scratch space.
  [[nodiscard]] Distribution read(std::vector<std::uint64_t>& counts) const {
    Distribution result;
    result.count = count_.get();
    if (result.count == 0) return result;
    const auto low = static_cast<double>(min_.get());
    const auto high = std::max(low, static_cast<double>(max_.get()));
    result.sum = static_cast<double>(sum_.get()) * 1e-9;
    result.min = low * 1e-9;
    result.max = high * 1e-9;
    result.mean = result.sum / static_cast<double>(result.count);
    histogram_.copy(counts);
    const auto at = [&](double q) { return std::clamp(Histogram::quantile(counts, q), low, high) * 1e-9; };
    result.p10 = at(0.1);
    result.median = at(0.5);
    result.p90 = at(0.9);
    return result;
  }

 private:
  Shared<std::uint64_t> count_;
  Shared<std::int64_t> sum_, min_, max_;
  Histogram histogram_;
};

/// One point of a Curve: the values of neighbouring steps.
struct CurvePoint {
  double x = 0, mean = 0, min = 0, max = 0;
};

/// A curve of any length in a fixed number of points: when they are all used, neighbours merge.
class Curve {
 public:
  explicit Curve(std::size_t points) : slots_(std::max<std::size_t>(2, points + points % 2)) {}

  void add(double x, double value) noexcept {
    if (used_.get() == 0 || slots_[used_.get() - 1].count.get() >= per_point_.get()) {
      if (used_.get() == slots_.size()) merge();
      if (used_.get() == 0 || slots_[used_.get() - 1].count.get() >= per_point_.get()) open();
    }
    Slot& slot = slots_[used_.get() - 1];
    slot.min.set(slot.count.get() == 0 ? value : std::min(slot.min.get(), value));
    slot.max.set(slot.count.get() == 0 ? value : std::max(slot.max.get(), value));
    slot.count.add(1);
    slot.x_sum.add(x);
    slot.sum.add(value);
  }

  void read(std::vector<CurvePoint>& points) const {
    points.clear();
    const std::size_t used = std::min(used_.get(), slots_.size());
    for (std::size_t i = 0; i < used; ++i) {
      const Slot& slot = slots_[i];
      const auto count = static_cast<double>(slot.count.get());
      if (count == 0) continue;
      points.push_back({slot.x_sum.get() / count, slot.sum.get() / count, slot.min.get(), slot.max.get()});
    }
  }

 private:
  struct Slot {
    Shared<std::uint64_t> count;
    Shared<double> x_sum, sum, min, max;
  };

  void open() noexcept {
    Slot& slot = slots_[used_.get()];
    slot.count.set(0);
    slot.x_sum.set(0);
    slot.sum.set(0);
    used_.add(1);
  }

  void merge() noexcept {
    for (std::size_t i = 0; i < slots_.size() / 2; ++i) {
      const Slot &a = slots_[2 * i], &b = slots_[2 * i + 1];
      const double low = std::min(a.min.get(), b.min.get()), high = std::max(a.max.get(), b.max.get());
      const double sum = a.sum.get() + b.sum.get(), x_sum = a.x_sum.get() + b.x_sum.get();
      const std::uint64_t count = a.count.get() + b.count.get();
      Slot& into = slots_[i];
      into.count.set(count);
      into.x_sum.set(x_sum);
      into.sum.set(sum);
      into.min.set(low);
      into.max.set(high);
    }
    used_.set(slots_.size() / 2);
    per_point_.set(per_point_.get() * 2);
  }

  std::vector<Slot> slots_;
  Shared<std::size_t> used_;
  Shared<std::uint64_t> per_point_{1};
};

/// Running statistics and curve of a scalar.
class ScalarTrack {
 public:
  explicit ScalarTrack(std::size_t curve_points) : curve_(curve_points) {}

  void add(std::uint64_t step, double value) noexcept {
    version_.open();
    count_.add(1);
    last_.set(value);
    last_step_.set(step);
    if (!std::isfinite(value)) {
      non_finite_.add(1);
    } else {
      const bool first = count_.get() - non_finite_.get() == 1;
      min_.set(first ? value : std::min(min_.get(), value));
      max_.set(first ? value : std::max(max_.get(), value));
      sum_.add(value);
      curve_.add(static_cast<double>(step), value);
    }
    version_.close();
  }

  struct Reading {
    std::uint64_t count = 0, non_finite = 0, last_step = 0;
    double last = 0, min = 0, max = 0, sum = 0;
    std::vector<CurvePoint> curve;
  };
  [[nodiscard]] Reading read() const {
    Reading reading;
    version_.consistent([&] {
      reading.count = count_.get();
      reading.non_finite = non_finite_.get();
      reading.last_step = last_step_.get();
      reading.last = last_.get();
      reading.min = min_.get();
      reading.max = max_.get();
      reading.sum = sum_.get();
      curve_.read(reading.curve);
    });
    return reading;
  }

 private:
  Version version_;
  Shared<std::uint64_t> count_, non_finite_, last_step_;
  Shared<double> last_, min_, max_, sum_;
  Curve curve_;
};

}  // namespace oxytorch::monitor
