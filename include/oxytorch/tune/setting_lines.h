/// The lines of a trainer's report: what came of each setting, and why. One set of sentences for both languages.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/config.h"
#include "oxytorch/monitor/training_report.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/workload.h"

namespace oxytorch {

namespace tune {

/// What the lines are made of. The configuration and the certificate must outlive it.
struct OXY_API SettingLines {
  const PerformanceConfig& config;
  const Certificate& certificate;
  std::vector<Offer> offers;                   ///< of all strategies that there are
  std::map<std::string, std::string> refused;  ///< as Asked::refused
  std::vector<std::string> active;             ///< active strategies
  std::vector<std::string> required;           ///< of those, the ones that settings ask for
  std::string untried;                         ///< why what is "auto" was not tried
  std::string slow = {};  ///< why the hardware does not multiply the precision that was asked for; empty where it does

  /// Of a setting that strategies bring about: precision, channels_last, allocator ...
  [[nodiscard]] SettingLine of(const std::string& setting) const;
  /// Of what is active, whatever it is called.
  [[nodiscard]] SettingLine active_as(const std::string& name, const std::vector<std::string>& strategies) const;
  /// Of what is active and belongs to no setting.
  [[nodiscard]] std::vector<SettingLine> beside_settings() const;

 private:
  [[nodiscard]] std::string setting_of(const std::string& strategy) const;
};

}  // namespace tune
}  // namespace oxytorch
