/// What tensors take: live bytes, peak and timeline, exact to the byte; and a limit on the memory of the process.
///
/// On the CPU an allocator around torch's own counts the bytes that tensors ask for. It does not see memory that
/// does not come from torch's allocator: from_blob and tensors that numpy made, mapped files, shared memory, and
/// scratch that oneDNN, MKL and LAPACK take from malloc. resident_bytes() has those too. On another device torch's
/// allocator of that device is asked: for its peak, which then begins anew for torch's own statistics too, and for a
/// timeline by what it reports to a profiler.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/host.h"
#include "oxytorch/memory/timeline.h"

namespace oxytorch::memory {

/// Names the part of a model that runs on this thread, until it is destroyed: a timeline says of each tensor in which
/// region it was made. What backward makes belongs to the region whose forward recorded the node that runs. Regions
/// nest; the innermost counts. Costs some tens of nanoseconds.
class OXY_API Region {
 public:
  /// `inputs`, and what outputs() is given before the end: tensors that go into it and come out.
  explicit Region(std::string_view name, at::ArrayRef<at::Tensor> inputs = {});
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  void outputs(at::ArrayRef<at::Tensor> tensors);

 private:
  int previous_;
  std::vector<std::uint64_t> outputs_;
};

/// A part of a step, as a meter saw it.
struct PhaseUse {
  std::string name;
  std::int64_t begin_bytes = 0;  ///< live when it began
  std::int64_t peak_bytes = 0;   ///< the most that was live in it
  std::int64_t end_bytes = 0;    ///< live when it ended
  double seconds = 0;
};

/// Blocks of one origin that were live at the peak.
struct PeakPart {
  std::string phase, region, site;  ///< empty where there was none
  std::int64_t bytes = 0;
  std::int64_t blocks = 0;
};

/// Blocks of one origin that were taken while the meter ran and are live.
using LivePart = PeakPart;

struct MeterOptions {
  c10::Device device{c10::DeviceType::CPU};
  /// Records each block: for some steps, not for a run. On a device those of the thread that makes the meter and of
  /// backward passes it begins, and the device is waited for where regions begin and end.
  bool timeline = false;
  bool sites = false;  ///< records the Python calls that took it too: microseconds a block
};

/// Counts from construction until stop() or destruction. Any number may run, up to 32 with their open phases, one of
/// them with a timeline; all see the tensors of all threads. Tensors that were made before anything was counted
/// are not seen, nor that they go: what lives before a meter does not count in its figures, which can so fall below 0.
///
/// Errors: NotSupported where another allocator than torch's serves CPU tensors, and for a device whose allocator has
/// no statistics, or, with a timeline, reports no blocks; InvalidState for a second timeline, and for one of a device
/// where torch's profiler runs on this thread. A timeline of a device ends on the thread that made the meter.
class OXY_API Meter {
 public:
  explicit Meter(const MeterOptions& options = {});
  ~Meter();
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  /// Figures stay what they are. Not while this thread holds a lock that tensors are made under.
  void stop();

  /// Bytes of tensors made since the meter began that are live, less those of older ones that went.
  [[nodiscard]] std::int64_t live_bytes() const;
  /// The most that live_bytes() was.
  [[nodiscard]] std::int64_t peak_bytes() const;
  /// The peak begins anew from what is live.
  void reset_peak();
  /// Tensors that took memory since the meter began. On the CPU.
  [[nodiscard]] std::int64_t allocations() const;

  /// Phases that have ended, in order.
  [[nodiscard]] std::vector<PhaseUse> phases() const;

  /// Error(InvalidState) without MeterOptions::timeline, as the two below.
  [[nodiscard]] Timeline timeline() const;
  /// What made the peak, by origin, the largest first.
  [[nodiscard]] std::vector<PeakPart> peak_parts() const;
  /// What is left, by origin, the largest first: after the same step twice, that which grew is a leak.
  [[nodiscard]] std::vector<LivePart> live_parts() const;

  /// Peak, phases and, with a timeline, what made the peak, as text.
  [[nodiscard]] std::string table(std::size_t most_parts = 12) const;

  struct Inside;

 private:
  friend class Phase;
  std::shared_ptr<Inside> inside_;
};

/// A phase of a step, from construction to destruction: meter.phases() has its peak. Phases of a meter may nest.
class OXY_API Phase {
 public:
  Phase(Meter& meter, std::string name);
  ~Phase();
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  struct Inside;
  std::unique_ptr<Inside> inside_;
};

/// What each of `steps` training steps leaves behind, after two that are not looked at, by region: bytes and blocks a
/// step, the most first. Memory that a step only replaces, as gradients and caches are, is not in it. At least 3 steps;
/// Error(InvalidArgument). With `sites`, by Python calls too. What `step` throws passes through.
[[nodiscard]] OXY_API std::vector<LivePart> leaks(const std::function<void()>& step, int steps = 5, bool sites = false,
                                                  c10::Device device = c10::DeviceType::CPU);

/// Whether bytes of a device's tensors can be counted: on the CPU torch's own allocator serves them, on another device
/// its allocator has statistics.
[[nodiscard]] OXY_API bool can_count(c10::Device device = c10::DeviceType::CPU);
/// Why no timeline of a device's tensors can be recorded; empty where one can.
[[nodiscard]] OXY_API std::string timeline_refusal(c10::Device device = c10::DeviceType::CPU);

/// Bytes of this process that are in memory now; 0 where the kernel does not say.
[[nodiscard]] OXY_API std::uint64_t resident_bytes();

/// A hard limit on the memory of this process: a CPU tensor that would pass it raises c10::OutOfMemoryError
/// (torch.OutOfMemoryError) and takes nothing, in place of the process being killed. What may be taken is the limit
/// less what the process has resident beside counted tensors; before it raises, free memory that is only kept is given
/// back and the process is measured anew.
///
/// It holds tensors alone: other memory counts, but is not held back. 100 to 200 ns a tensor. revert() lifts it. Of
/// several the lowest holds. Refused where another allocator than torch's serves CPU tensors and where the kernel does
/// not tell what is resident. Error(InvalidArgument) for a limit below what is resident already.
OXY_API HostSetting set_limit(std::uint64_t bytes);

/// The lowest limit that is set, if any.
[[nodiscard]] OXY_API std::optional<std::uint64_t> limit();

/// While one lives no limit holds back a tensor: for a step that is looked at so that later ones take less.
class OXY_API LimitPaused {
 public:
  LimitPaused();
  ~LimitPaused();
  LimitPaused(const LimitPaused&) = delete;
  LimitPaused& operator=(const LimitPaused&) = delete;
};

/// While one lives tensors that are made are not counted, if nothing but one meter asks for it: for a step that is
/// timed, where counting is no part of what a step costs. That meter sees blocks of before go, and no others.
class OXY_API CountingPaused {
 public:
  CountingPaused();
  ~CountingPaused();
  CountingPaused(const CountingPaused&) = delete;
  CountingPaused& operator=(const CountingPaused&) = delete;
};

/// Bytes that tensors of `device` may still take, nine tenths of what is left: on the CPU under limit(), or without one
/// of what the machine or container has available, after memory that is only kept has gone back to the kernel; on
/// another device of what is free or kept by torch's allocator. Error(NotSupported) where that is not told.
[[nodiscard]] OXY_API std::int64_t available_bytes(c10::Device device = c10::DeviceType::CPU);
/// Bytes of a budget for tensors of `device` as a user writes it: "900MiB", or "50%" of what this process may use of
/// the host's memory, or of all the memory of another device. Error(InvalidArgument) as of Size::parse().
[[nodiscard]] OXY_API std::int64_t budget_bytes(std::string_view text, c10::Device device = c10::DeviceType::CPU);
/// At most what is then left of so many bytes: for all of this process on the CPU, for all tensors on another device.
[[nodiscard]] OXY_API std::int64_t available_bytes(std::uint64_t limit, c10::Device device = c10::DeviceType::CPU);

}  // namespace oxytorch::memory
