/// Memory of a run, looked at and cleaned up at the boundaries of its steps.
///
/// ```cpp
/// oxytorch::MemoryManager memory(oxytorch::MemoryConfig().limit("8GiB").warn_at(0.7));
/// memory.on(oxytorch::MemoryLevel::Warning, [](const oxytorch::MemoryUse& use) { std::cerr << use.text() << '\n'; });
/// for (auto& batch : *loader) {
///   trainer.step(batch);
///   memory.step();
/// }
/// ```
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch {

struct MemoryConfig {
  /// Hard limit on the process, "8GiB" or "80%" of what it may use, as memory::set_limit(); empty: none.
  TORCH_ARG(std::string, limit);
  /// Shares of MemoryUse::allowed from which the levels Warning and Critical are reached.
  TORCH_ARG(double, warn_at) = 0.8;
  TORCH_ARG(double, critical_at) = 0.95;
  /// Share from which a check cleans up; above 1: none does.
  TORCH_ARG(double, clean_at) = 0.9;
  /// Steps between two clean-ups, whatever is in use; 0: none.
  TORCH_ARG(std::int64_t, clean_every) = 0;
  /// What allocators may keep free, "512MiB" or a share of what the process may use: a check that finds more cleans up.
  /// Empty: their own limits.
  TORCH_ARG(std::string, cache_limit);
  /// Steps between two checks, each of which reads files of the kernel.
  TORCH_ARG(std::int64_t, check_every) = 10;
};

/// Bytes, as the kernel tells them.
struct OXY_API MemoryUse {
  std::uint64_t resident = 0;   ///< of this process, now
  std::uint64_t peak = 0;       ///< the most it was
  std::uint64_t allowed = 0;    ///< the lowest limit that is set, or what the process can reach: resident and available
  std::uint64_t available = 0;  ///< of the machine or container, still
  std::uint64_t kept = 0;       ///< free, and kept by allocators for reuse; a part of resident, at most
  std::int64_t tensors = 0;     ///< in CPU tensors that were made while they were counted (a limit, a Meter)

  /// resident over allowed.
  [[nodiscard]] double share() const noexcept;
  [[nodiscard]] std::string text() const;
};

enum class MemoryLevel { Normal, Warning, Critical };

/// Movable. Not for use from several threads at once. Its end lifts its limit.
class OXY_API MemoryManager {
 public:
  using Callback = std::function<void(const MemoryUse&)>;

  /// Error(InvalidArgument) for shares that are not above 0 or warn_at above critical_at, intervals below 0 (of
  /// check_every: below 1), and sizes that are none or a limit below what is resident already; NotSupported where a
  /// limit cannot be set.
  explicit MemoryManager(const MemoryConfig& config = {});
  ~MemoryManager();
  MemoryManager(MemoryManager&&) noexcept;
  MemoryManager& operator=(MemoryManager&&) noexcept;

  [[nodiscard]] MemoryUse use() const;

  /// Calls `callback` when a check finds this level, or a higher one, after a lower one: once, until a check has found
  /// less than 0.95 of its share again. What it throws passes through step() and check().
  void on(MemoryLevel level, Callback callback);
  /// Called first in each clean-up: lets go of what the program keeps for reuse.
  void on_clean(std::function<void()> release);

  /// Gives memory that is only kept for reuse back to the kernel. Returns by how many bytes less is resident then.
  /// Milliseconds, and the steps that follow fault in anew what they use.
  std::uint64_t clean();

  /// Lifts its limit; the rest goes on.
  void revert();

  /// To be called after each training step. Trainer does.
  void step();
  /// What step() does after each check_every steps.
  MemoryLevel check();

  [[nodiscard]] MemoryLevel level() const noexcept;   ///< as the last check found it
  [[nodiscard]] std::int64_t steps() const noexcept;  ///< calls of step()
  [[nodiscard]] std::int64_t clean_ups() const noexcept;
  [[nodiscard]] std::uint64_t bytes_cleaned() const noexcept;  ///< by all clean-ups
  /// What happened, in sentences, the last 100.
  [[nodiscard]] const std::vector<std::string>& events() const noexcept;
  /// Figures and events, as text.
  [[nodiscard]] std::string report() const;

 private:
  struct Inside;
  std::unique_ptr<Inside> inside_;
};

}  // namespace oxytorch
