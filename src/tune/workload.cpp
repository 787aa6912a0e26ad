#include "oxytorch/tune/workload.h"

#include <algorithm>

#include "tune/sources.h"

namespace oxytorch::tune {

bool acts_on_update(std::string_view group) noexcept { return group == "optimizer" || group == "update"; }

Workload::~Workload() = default;

std::string Workload::hindrance() { return {}; }
std::optional<double> Workload::likely_speedup(const std::string& /*strategy*/) { return std::nullopt; }
std::optional<std::int64_t> Workload::step_bytes() { return std::nullopt; }
std::optional<std::int64_t> Workload::step_resident() { return std::nullopt; }
std::optional<std::int64_t> Workload::tuning_bytes() { return std::nullopt; }
void Workload::let_go() {}
bool Workload::has_update() { return true; }
double Workload::drawing(double /*step_seconds*/) { return 0; }
void Workload::draw(bool /*on*/) {}
void Workload::say(const std::string& /*what*/) {}
double Workload::seconds() { return seconds_now(); }
double Workload::processor_seconds() { return thread_seconds_now(); }
double Workload::page_faults() { return static_cast<double>(page_faults_now()); }

std::optional<std::string> Workload::told(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, std::min<std::size_t>(text.find('\n'), 200));
}

}  // namespace oxytorch::tune
