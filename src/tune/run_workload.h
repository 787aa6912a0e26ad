/// The training step of a LibTorch program, as a tuner's workload.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/memory/meter.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/verify.h"
#include "oxytorch/tune/workload.h"

namespace oxytorch::tune {

[[nodiscard]] std::vector<Offer> offers_of(const std::vector<RegisteredStrategy>& strategies);

/// Counts what tensors take at the most from here on, what the run holds already included. Not in timed steps.
class PeakBytes {
 public:
  explicit PeakBytes(const Run& run);
  /// Empty where it cannot be counted.
  [[nodiscard]] std::optional<std::int64_t> so_far() const;

 private:
  std::int64_t held_ = 0;
  std::optional<memory::Meter> meter_;
};

/// Run and snapshot must outlive it.
class RunWorkload : public Workload {
 public:
  /// `refused`: of strategies that settings do not allow, why. `peak`: begun before the snapshot was taken.
  RunWorkload(Run& run, Snapshot& snapshot, std::vector<RegisteredStrategy> strategies, std::uint64_t seed,
              std::map<std::string, std::string> refused = {}, const PeakBytes* peak = nullptr)
      : run_(run),
        snapshot_(snapshot),
        strategies_(std::move(strategies)),
        refused_(std::move(refused)),
        seed_(seed),
        peak_(peak) {}

  std::vector<Offer> offers() override;
  std::string hindrance() override;
  Applicability applies(const std::string& strategy) override { return run_.strategy(strategy).applies(run_); }
  double expected_cost(const std::string& strategy) override { return run_.strategy(strategy).expected_cost(run_); }

  /// But for those that are a part of the step as given.
  std::vector<std::string> active() override { return run_.beside_required(); }
  void activate(const std::vector<std::string>& strategies) override { run_.set_active(strategies); }
  void restore() override { snapshot_.restore(); }
  std::map<std::string, std::string> covered() override;

  std::vector<std::size_t> shapes() override;
  StepTimes steps(std::size_t first, int count, bool updates, bool drawn) override;
  double update() override;
  bool on_host() override { return run_.device().is_cpu(); }

  Ruling verify(Kind kind, bool glance) override;
  std::optional<std::int64_t> step_bytes() override;
  std::optional<std::int64_t> step_resident() override;
  std::optional<std::int64_t> tuning_bytes() override { return peak_ == nullptr ? std::nullopt : peak_->so_far(); }
  std::optional<std::string> told(const std::exception& error) override;

 private:
  double update(std::size_t part);

  Run& run_;
  Snapshot& snapshot_;
  std::vector<RegisteredStrategy> strategies_;
  std::map<std::string, std::string> refused_;
  std::uint64_t seed_;
  const PeakBytes* peak_;
  double loss_ = 0;  // of the last step
  std::optional<Verifier> verifier_, glance_;
};

}  // namespace oxytorch::tune
