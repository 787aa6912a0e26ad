/// Who uses the processor: counters of this process and of the machine, to tell whether times that were measured in
/// between are this program's own. Linux.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "oxytorch/api.h"

namespace oxytorch {

/// Seconds, each counted from a moment of its own: only differences of two samples mean something. What a system does
/// not tell is empty.
struct LoadSample {
  double wall = 0;
  double own = 0;                     ///< processor time of this process and of those it started
  std::optional<double> busy = {};    ///< processor time of all programs, on all cores (/proc/stat)
  std::optional<double> stolen = {};  ///< that the host of a virtual machine gave to others, on all cores (/proc/stat)
  std::optional<double> waited = {};  ///< that threads of this process were ready and had no core (/proc/self/task)
  std::optional<double> throttled = {};  ///< that the cgroup's quota held this process back
  int cores = 1;                         ///< of the machine
};

/// Some system calls and small files: between measurements, not inside of one. `root` as in oxytorch/system.h.
OXY_API LoadSample read_load(const std::string& root = "/");

/// Says of stretches of time whether other programs disturbed them. Disturbed is one in which this process had to wait
/// for a core while others used some, in which the host took processor time away, or the quota did. Its own threads in
/// each other's way, and what waits for a disk or a device, are no disturbance. Stretches of under 0.1 s go with the
/// next one, as the counters have hundredths of a second. Not for use from several threads at once.
class OXY_API LoadWatch {
 public:
  using Source = std::function<LoadSample()>;
  /// read_load() unless set_load_source() gave another one.
  explicit LoadWatch(Source source = {});

  void begin();
  /// Whether the stretch since begin() was disturbed.
  bool end();
  /// Of all seconds between begin() and end(), those of disturbed stretches.
  [[nodiscard]] double share() const noexcept;
  /// Whether what was measured is not to be trusted: over a tenth of it was disturbed, or its first stretch, against
  /// which the rest is held.
  [[nodiscard]] bool disturbed() const noexcept;
  /// What showed it where it was worst, one sentence; empty where nothing was disturbed.
  [[nodiscard]] const std::string& evidence() const noexcept { return evidence_; }

 private:
  Source source_;
  std::optional<LoadSample> began_;
  double seconds_ = 0, disturbed_ = 0, worst_ = 0;
  bool first_ = false;  // whether the first stretch was disturbed
  std::string evidence_;
};

/// Where each LoadWatch made from now on has its samples from; empty: read_load(). For tests.
OXY_API void set_load_source(LoadWatch::Source source);

}  // namespace oxytorch
