/// What a Plan holds: the run, its certificate, and the watch over it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/config.h"
#include "oxytorch/host.h"
#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/watch.h"

namespace oxytorch {

/// Settings of the process that a configuration names; taken back in the reverse order, at the latest at its end.
class NamedSettings {
 public:
  NamedSettings() = default;
  explicit NamedSettings(const PerformanceConfig& config);
  NamedSettings(NamedSettings&&) noexcept = default;
  NamedSettings& operator=(NamedSettings&&) = delete;
  ~NamedSettings() { revert(); }

  [[nodiscard]] const std::vector<HostSetting>& all() const noexcept { return settings_; }
  void revert();

 private:
  void add(HostSetting setting);
  std::vector<HostSetting> settings_;
};

/// What allocator_retain_limit says, in bytes; empty where it is left to the allocator.
std::optional<std::uint64_t> retain_limit_of(const PerformanceConfig& config);

struct Plan::Impl : tune::Watched {
  Impl(std::unique_ptr<tune::Run> run, tune::Certificate certificate, std::optional<tune::CertificateStore> store,
       tune::Kind widest, std::uint64_t seed, NamedSettings named);

  at::Tensor step(const Batch& batch);
  void update();
  void revert();

  void activate(const std::vector<std::string>& strategies) override { run->bring(strategies); }
  tune::BothWays compare() override;

  NamedSettings named;  // first, so that it outlives the run
  std::unique_ptr<tune::Run> run;
  tune::Certificate certificate;
  std::optional<tune::CertificateStore> store;
  std::optional<tune::Watch> watch;
  const Batch* batch = nullptr;  // of the window under way, the first; valid while it is taken
  bool watched = false;          // the window under way
  double window_seconds = 0;
  std::optional<double> updated;  // when the last update() of a watched loop of the caller's ended
  std::size_t updates = 0;
};

}  // namespace oxytorch
