#include <cmath>
#include <cstdlib>
#include <sstream>

#include "oxytorch/backend/sim.h"
#include "oxytorch/error.h"

namespace oxytorch::backend {
namespace {

constexpr const char* kKeys = "devices, memory, latency_us, link_gbps, fault";
constexpr double kLargestMemory = 32.0 * (1 << 30);

double number(const std::string& key, const std::string& text, std::string* unit = nullptr) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const std::string rest(end);
  OXY_CHECK(end != text.c_str() && std::isfinite(value) && value >= 0 && (unit != nullptr || rest.empty()),
            InvalidArgument, "OXYTORCH_SIM: '", key, "=", text, "' is no number of 0 or more.");
  if (unit != nullptr) *unit = rest;
  return value;
}

std::uint64_t bytes(const std::string& text) {
  std::string unit;
  double value = number("memory", text, &unit);
  struct {
    const char* name;
    double factor;
  } constexpr kUnits[] = {{"", 1},     {"B", 1},         {"KB", 1e3},      {"MB", 1e6},
                          {"GB", 1e9}, {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}};
  for (const auto& known : kUnits) {
    if (unit != known.name) continue;
    value *= known.factor;
    OXY_CHECK(value <= kLargestMemory, InvalidArgument, "OXYTORCH_SIM: 'memory=", text,
              "' is over 32GiB; a simulated device lives in host memory.");
    return static_cast<std::uint64_t>(value);
  }
  oxytorch::detail::raise(ErrorCode::InvalidArgument, "OXYTORCH_SIM: 'memory=", text, "' has the unknown unit '", unit,
                          "'; use B, KB, MB, GB, KiB, MiB or GiB.");
}

void set_faults(const std::string& list, SimOptions& options) {
  std::istringstream faults(list);
  for (std::string fault; std::getline(faults, fault, '+');) {
    const auto colon = fault.find(':');
    const std::string name = fault.substr(0, colon);
    const double value = colon == std::string::npos ? 1 : number("fault", fault.substr(colon + 1));
    const auto count = static_cast<std::uint64_t>(value);
    if (name == "alloc") {
      options.fail_alloc = count;
    } else if (name == "copy") {
      options.fail_copy = count;
    } else if (name == "lost") {
      options.lose_device = count;
    } else if (name == "slow_event") {
      options.slow_event_us = value;
    } else {
      oxytorch::detail::raise(ErrorCode::InvalidArgument, "OXYTORCH_SIM: there is no fault '", name,
                              "'; there are: alloc, copy, lost, slow_event.");
    }
  }
}

}  // namespace

SimOptions parse_sim_options(const std::string& text) {
  SimOptions options;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    if (entry.empty()) continue;
    const auto equals = entry.find('=');
    const std::string key = entry.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : entry.substr(equals + 1);
    if (key == "devices") {
      const double devices = number(key, value);
      OXY_CHECK(devices >= 1 && devices <= 16 && devices == std::floor(devices), InvalidArgument,
                "OXYTORCH_SIM: 'devices=", value, "' is not a whole number from 1 to 16.");
      options.devices = static_cast<int>(devices);
    } else if (key == "memory") {
      options.memory_bytes = bytes(value);
    } else if (key == "latency_us") {
      options.latency_us = number(key, value);
    } else if (key == "link_gbps") {
      options.link_gbps = number(key, value);
    } else if (key == "fault") {
      set_faults(value, options);
    } else {
      oxytorch::detail::raise(ErrorCode::InvalidArgument, "OXYTORCH_SIM: there is no setting '", key,
                              "'; there are: ", kKeys, ".");
    }
  }
  return options;
}

}  // namespace oxytorch::backend
