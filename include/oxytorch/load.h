/// Who uses the processor: counters of this process and of the machine, to tell whether times that were measured in
/// between are this program's own; and which other programs run on the same cores. Linux.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

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

/// Another process, and what it uses of the cores that this one may use.
struct Neighbour {
  int pid = 0;
  std::string name;
  double cores = 0;
  int threads = 1;
};

struct Neighbours {
  double cores = 0;                       ///< that other programs use, all together
  int of = 1;                             ///< cores that this process may use
  std::vector<Neighbour> processes = {};  ///< those that use a tenth of a core or more, the busiest first

  /// Whether they are in the way of a thread on each core: they use half a core or more.
  [[nodiscard]] OXY_API bool share_cores() const noexcept;
  /// "1.9 of 2 cores: python3 (pid 77, 4 threads) 1.9".
  [[nodiscard]] OXY_API std::string said() const;
};

/// Looks twice, a quarter of a second apart, at the processes of the machine that may run on a core of this one's; its
/// own children are left out. `pause` stands for that time, for tests. Empty where the system does not tell.
OXY_API std::optional<Neighbours> read_neighbours(const std::string& root = "/",
                                                  const std::function<void()>& pause = {});

/// What read_neighbours() of this machine says from now on; empty: what is so. For tests.
OXY_API void set_neighbours(std::optional<Neighbours> found);

/// Whether OpenMP's threads spin while they wait, by OMP_WAIT_POLICY, GOMP_SPINCOUNT and KMP_BLOCKTIME as `variable`
/// gives them (null: not set; the environment of this process).
OXY_API bool waiting_threads_spin(const std::function<const char*(const char*)>& variable = {});

/// What to set where programs share cores, one sentence or two.
OXY_API std::string advice_on_shared_cores(bool threads_spin);

/// Where each LoadWatch made from now on has its samples from; empty: read_load(). For tests.
OXY_API void set_load_source(LoadWatch::Source source);

}  // namespace oxytorch
