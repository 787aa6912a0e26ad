/// Settings of the host process that make a training step faster without touching the model: the allocator here;
/// denormals and threads, which need torch, in tune/host.h. Each is applied by a function that returns a
/// HostSetting: what was done or why not, what it costs, and the way back.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "oxytorch/api.h"

namespace oxytorch {

/// One setting and its state. Movable. Destruction leaves the setting as it is; revert() takes it back.
class OXY_API HostSetting {
 public:
  static HostSetting refused(std::string name, std::string reason);
  /// What it would bring about is so already, by somebody else: there is nothing to take back.
  static HostSetting unchanged(std::string name, std::string reason);
  static HostSetting applied(std::string name, std::string reason, std::string cost, std::function<void()> undo);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// True from a successful apply until revert().
  [[nodiscard]] bool is_applied() const noexcept { return applied_; }
  /// Applied here, or found so.
  [[nodiscard]] bool is_in_effect() const noexcept { return applied_ || unchanged_; }
  /// One sentence: what was done, or why nothing was.
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  /// One sentence: what it costs; empty where nothing was done.
  [[nodiscard]] const std::string& cost() const noexcept { return cost_; }
  /// Takes the setting back; does nothing where it is not applied.
  void revert();

 private:
  std::string name_;
  std::string reason_;
  std::string cost_;
  bool applied_ = false;
  bool unchanged_ = false;
  std::function<void()> undo_;
};

/// What an allocator may hold free where the user set no limit: half of what the machine or container has available
/// now, at least 64 MiB.
OXY_API uint64_t default_retain_limit();

/// Makes glibc keep freed memory instead of returning it to the kernel after each step and faulting it in again:
/// no separate mapping for large blocks, no trimming, 64 MiB of head room. Results keep every bit.
///
/// The cost is that resident memory stays at its peak. Freed memory above `retain_limit` bytes (default: half of
/// what the machine or container had available) is given back by a background thread that looks once a second,
/// never on the step path.
///
/// Process-wide; a second call returns a setting that says so. Refused where the C library is not glibc, where
/// another allocator is preloaded, or where GLIBC_TUNABLES or MALLOC_* in the environment already decide. revert() sets
/// the thresholds that glibc had (see note_heap()) and gives free memory back; from then on glibc does not move them
/// by itself any more, which cannot be turned on again.
OXY_API HostSetting tune_allocator(std::optional<uint64_t> retain_limit = std::nullopt);

/// Keeps glibc from giving free memory at the end of its heap back to the kernel, and changes nothing else.
///
/// Cost, limit, refusals and the way back are those of tune_allocator(), which is more: it takes large blocks from the
/// heap too. May be applied several times, also beside it; the last revert() restores trimming.
OXY_API HostSetting keep_heap(std::optional<uint64_t> retain_limit = std::nullopt);

/// Has blocks of 1 MiB or more come from mappings of their own, which go back to the kernel as they are freed: for work
/// that must leave nothing resident, such as a verification, which frees and takes large blocks in another order than
/// steps do. Slow: not for the step path. Comes before tune_allocator() and keep_heap(), which hold again after it.
///
/// Refusals and the way back are those of tune_allocator(). May be applied several times; the last revert() counts.
OXY_API HostSetting map_large_blocks();

/// Notes the thresholds that glibc has now and the free memory that its heap keeps, to which the settings above go
/// back: glibc moves them by what a program frees, so this is called after some steps of a run and before anything else
/// (trials, a verification in float64) has freed larger blocks. Unless called, the first setting that is applied notes
/// them. Of no effect once one was.
OXY_API void note_heap();

/// Bytes from which glibc's malloc gives a block a mapping of its own now, to a page; empty where malloc is not glibc's
/// or the environment sets it. Takes about a millisecond: not for the step path.
OXY_API std::optional<uint64_t> heap_mmap_threshold();

/// Resident bytes that the allocator holds free for reuse, at most; empty where the C library cannot say. Takes the
/// allocator's locks for some tens of microseconds: not for the step path.
OXY_API std::optional<uint64_t> allocator_retained_bytes();

/// Gives the heap's free pages back to the kernel, but for `keep` bytes at its end. Of no effect where malloc is not
/// glibc's.
OXY_API void trim_heap(uint64_t keep = 0);

/// Times that the background thread has given memory back since the process started.
OXY_API uint64_t allocator_trims();

/// Page faults of this process since it started (minor and major), by getrusage: one system call.
OXY_API uint64_t page_faults();

}  // namespace oxytorch
