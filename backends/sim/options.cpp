#include <cmath>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "base/spelling.h"
#include "oxytorch/backend/sim.h"
#include "oxytorch/error.h"
#include "oxytorch/units.h"

namespace oxytorch::backend {
namespace {

const std::vector<std::string> kKeys{"devices", "memory", "latency_us", "link_gbps", "fault"};
const std::vector<std::string> kFaults{"alloc", "copy", "lost", "slow_event"};
constexpr std::uint64_t kLargestMemory = std::uint64_t{32} << 30;

double number(const std::string& key, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  OXY_CHECK(end != text.c_str() && *end == '\0' && std::isfinite(value) && value >= 0 && value < 1e15, InvalidArgument,
            "OXYTORCH_SIM: '", key, "' is no number of 0 or more: ", in_quotes(text), ".");
  return value;
}

std::uint64_t bytes(const std::string& text) {
  const Size size = Size::parse(text);
  OXY_CHECK(size.kind() == Size::Kind::Bytes && size.resolve(0) > 0 && size.resolve(0) <= kLargestMemory,
            InvalidArgument, "OXYTORCH_SIM: 'memory' is ", in_quotes(text),
            "; give bytes up to 32GiB, for example 64MiB: a simulated device lives in host memory.");
  return size.resolve(0);
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
      oxytorch::detail::raise(ErrorCode::InvalidArgument, "OXYTORCH_SIM: there is no fault ", in_quotes(name), "; ",
                              did_you_mean(name, kFaults), "there are: ", list_of(kFaults), ".");
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
      oxytorch::detail::raise(ErrorCode::InvalidArgument, "OXYTORCH_SIM: there is no setting ", in_quotes(key), "; ",
                              did_you_mean(key, kKeys), "there are: ", list_of(kKeys), ".");
    }
  }
  return options;
}

}  // namespace oxytorch::backend
