#include "backends/hpu/hlml.h"

#include <dlfcn.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>

namespace oxytorch::backend::hpu {
namespace {

constexpr const char* kInstalled = "/usr/lib/habanalabs/libhlml.so";

// Numbers of the public header.
constexpr int kOnChip = 0, kOnBoard = 1;
constexpr int kSocClock = 0;
constexpr unsigned long long kThrottledByPower = 1, kThrottledByHeat = 2;
constexpr int kPowerPolicy = 0, kHeatPolicy = 1;
constexpr int kUncorrected = 1, kSinceBoot = 0;
constexpr int kManySingleBitErrors = 0, kDoubleBitError = 1;

// The header has two words of ports; room for as many again costs nothing.
using PortMask = std::array<std::uint64_t, 4>;

template <auto Field>
HlmlStatus read_memory(const Hlml& hlml, HlmlDevice device, double& value) {
  HlmlMemory memory{};
  const HlmlStatus status = hlml.device_get_memory_info(device, &memory);
  value = static_cast<double>(memory.*Field);
  return status;
}

template <int Sensor>
HlmlStatus read_temperature(const Hlml& hlml, HlmlDevice device, double& value) {
  unsigned celsius = 0;
  const HlmlStatus status = hlml.device_get_temperature(device, Sensor, &celsius);
  value = celsius;
  return status;
}

template <unsigned long long Bit>
HlmlStatus read_throttle(const Hlml& hlml, HlmlDevice device, double& value) {
  unsigned long long bits = 0;
  const HlmlStatus status = hlml.device_get_current_clocks_throttle_reasons(device, &bits);
  value = (bits & Bit) != 0 ? 1 : 0;
  return status;
}

template <int Policy>
HlmlStatus read_violation(const Hlml& hlml, HlmlDevice device, double& value) {
  HlmlViolation times{};
  const HlmlStatus status = hlml.device_get_violation_status(device, Policy, &times);
  value = static_cast<double>(times.violation_time);
  return status;
}

template <auto Function, int Thousandths = 0>
HlmlStatus read_unsigned(const Hlml& hlml, HlmlDevice device, double& value) {
  unsigned found = 0;
  const HlmlStatus status = (hlml.*Function)(device, &found);
  value = found / (Thousandths != 0 ? 1e3 : 1.0);
  return status;
}

template <auto Function>
HlmlStatus read_clock(const Hlml& hlml, HlmlDevice device, double& value) {
  unsigned mhz = 0;
  const HlmlStatus status = (hlml.*Function)(device, kSocClock, &mhz);
  value = mhz;
  return status;
}

// Addresses NULL asks for the number alone.
HlmlStatus read_replaced_rows(const Hlml& hlml, HlmlDevice device, double& value) {
  value = 0;
  for (const int cause : {kManySingleBitErrors, kDoubleBitError}) {
    unsigned rows = 0;
    const HlmlStatus status = hlml.device_get_replaced_rows(device, cause, &rows, nullptr);
    if (status != 0) return status;
    value += rows;
  }
  return 0;
}

HlmlStatus for_each_port(const Hlml& hlml, HlmlDevice device, double& value, bool links) {
  PortMask ports{}, external{};
  value = 0;
  if (const HlmlStatus status = hlml.get_mac_addr_info(device, ports.data(), external.data()); status != 0) {
    return status;
  }
  for (std::uint32_t port = 0; port < ports.size() * 64; ++port) {
    if ((ports[port / 64] >> (port % 64) & 1) == 0) continue;
    bool up = true;
    if (links) {
      if (const HlmlStatus status = hlml.nic_get_link(device, port, &up); status != 0) return status;
    }
    value += up ? 1 : 0;
  }
  return 0;
}

// The process that owns a card notes once a second how much it uses: version, seconds since 1970, bytes.
enum class Note { None, Fresh, Stale };
Note used_note(const std::string& folder, int minor) {
  constexpr std::uint64_t kVersion = 1, kSecondsFresh = 30;
  std::ifstream file(folder + "/mem_usage_accel" + std::to_string(minor), std::ios::binary);
  std::array<std::uint64_t, 3> note{};
  if (minor < 0 || !file.read(reinterpret_cast<char*>(note.data()), sizeof(note))) return Note::None;
  const auto now = static_cast<std::uint64_t>(std::time(nullptr));
  const bool fresh = note[0] == kVersion && note[1] <= now + kSecondsFresh && now <= note[1] + kSecondsFresh;
  return fresh ? Note::Fresh : Note::Stale;
}

std::string text(HlmlStatus (*read)(HlmlDevice, char*, unsigned), HlmlDevice device) {
  std::array<char, 128> buffer{};
  if (read == nullptr || read(device, buffer.data(), buffer.size() - 1) != 0) return {};
  return buffer.data();
}

int number(HlmlStatus (*read)(HlmlDevice, unsigned*), HlmlDevice device) {
  unsigned value = 0;
  return read != nullptr && read(device, &value) == 0 ? static_cast<int>(value) : -1;
}

}  // namespace

std::string hlml_says(HlmlStatus status) {
  switch (status) {
    case 0: return "it succeeded";
    case 1: return "HLML is not initialised (code 1)";
    case 2: return "HLML refuses an argument (code 2)";
    case 3: return "this card or driver does not support it (code 3)";
    case 5: return "HLML is initialised already (code 5)";
    case 6: return "HLML finds no such thing (code 6)";
    case 7: return "a buffer is too small for HLML (code 7)";
    case 9: return "the habanalabs driver is not loaded (code 9)";
    case 10: return "the card did not answer in time (code 10)";
    case 15: return "the card is lost: it fell off the bus or is being reset (code 15)";
    case 20: return "HLML has no host memory left (code 20)";
    case 21: return "the card has no such data now (code 21)";
    case 49: return "HLML failed for a reason it does not know (code 49)";
    default: return "HLML gives the undocumented code " + std::to_string(status);
  }
}

const std::vector<Meter>& meters() {
#define OXY_NEEDS(name) "hlml_" #name, [](const Hlml& hlml) { return hlml.name != nullptr; }
  static const auto* const all = new std::vector<Meter>{
      {"memory_total", "B", OXY_NEEDS(device_get_memory_info), read_memory<&HlmlMemory::total>},
      {"memory_free", "B", OXY_NEEDS(device_get_memory_info), read_memory<&HlmlMemory::free>},
      {"memory_used", "B", OXY_NEEDS(device_get_memory_info), read_memory<&HlmlMemory::used>},
      {"utilization", "%", OXY_NEEDS(device_get_utilization_rates),
       [](const Hlml& hlml, HlmlDevice device, double& value) {
         HlmlUtilization rates{};
         const HlmlStatus status = hlml.device_get_utilization_rates(device, &rates);
         value = rates.aip;
         return status;
       }},
      {"power", "W", OXY_NEEDS(device_get_power_usage), read_unsigned<&Hlml::device_get_power_usage, 1>},
      {"energy", "J", OXY_NEEDS(device_get_total_energy_consumption),
       [](const Hlml& hlml, HlmlDevice device, double& value) {
         unsigned long long millijoules = 0;
         const HlmlStatus status = hlml.device_get_total_energy_consumption(device, &millijoules);
         value = static_cast<double>(millijoules) / 1e3;
         return status;
       }},
      {"temperature", "degC", OXY_NEEDS(device_get_temperature), read_temperature<kOnChip>},
      {"board_temperature", "degC", OXY_NEEDS(device_get_temperature), read_temperature<kOnBoard>},
      {"clock", "MHz", OXY_NEEDS(device_get_clock_info), read_clock<&Hlml::device_get_clock_info>},
      {"max_clock", "MHz", OXY_NEEDS(device_get_max_clock_info), read_clock<&Hlml::device_get_max_clock_info>},
      {"throttled_by_power", "1", OXY_NEEDS(device_get_current_clocks_throttle_reasons),
       read_throttle<kThrottledByPower>},
      {"throttled_by_heat", "1", OXY_NEEDS(device_get_current_clocks_throttle_reasons),
       read_throttle<kThrottledByHeat>},
      {"power_violation", "ns", OXY_NEEDS(device_get_violation_status), read_violation<kPowerPolicy>},
      {"heat_violation", "ns", OXY_NEEDS(device_get_violation_status), read_violation<kHeatPolicy>},
      {"uncorrected_ecc_errors", "1", OXY_NEEDS(device_get_total_ecc_errors),
       [](const Hlml& hlml, HlmlDevice device, double& value) {
         unsigned long long count = 0;
         const HlmlStatus status = hlml.device_get_total_ecc_errors(device, kUncorrected, kSinceBoot, &count);
         value = static_cast<double>(count);
         return status;
       }},
      {"replaced_rows", "1", OXY_NEEDS(device_get_replaced_rows), read_replaced_rows},
      {"replaced_rows_pending", "1", OXY_NEEDS(device_get_replaced_rows_pending_status),
       [](const Hlml& hlml, HlmlDevice device, double& value) {
         int pending = 0;
         const HlmlStatus status = hlml.device_get_replaced_rows_pending_status(device, &pending);
         value = pending;
         return status;
       }},
      {"pcie_replays", "1", OXY_NEEDS(device_get_pcie_replay_counter),
       read_unsigned<&Hlml::device_get_pcie_replay_counter>},
      {"ports", "1", OXY_NEEDS(get_mac_addr_info),
       [](const Hlml& hlml, HlmlDevice device, double& value) { return for_each_port(hlml, device, value, false); }},
      {"ports_up", "1", "hlml_get_mac_addr_info and hlml_nic_get_link",
       [](const Hlml& hlml) { return hlml.get_mac_addr_info != nullptr && hlml.nic_get_link != nullptr; },
       [](const Hlml& hlml, HlmlDevice device, double& value) { return for_each_port(hlml, device, value, true); }},
  };
#undef OXY_NEEDS
  return *all;
}

bool open_hlml(Hlml& hlml, std::string& path, std::string& why) {
  const char* const named = std::getenv("OXYTORCH_HLML");
  const bool chosen = named != nullptr && *named != '\0';
  void* library = nullptr;
  for (const char* candidate : {chosen ? named : kInstalled, chosen ? named : "libhlml.so"}) {
    library = dlopen(candidate, RTLD_NOW | RTLD_LOCAL);
    path = candidate;
    if (library != nullptr) break;
  }
  if (library == nullptr) {
    const char* const reason = dlerror();
    why = std::string(chosen ? "OXYTORCH_HLML names a library that cannot be opened: "
                             : "Gaudi's management library libhlml.so cannot be opened: ") +
          (reason == nullptr ? "the loader gives no reason" : reason);
    return false;
  }
#define OXY_HLML_LOOK_UP(name, arguments) \
  hlml.name = reinterpret_cast<decltype(hlml.name)>(dlsym(library, "hlml_" #name));
  OXY_HLML_FUNCTIONS(OXY_HLML_LOOK_UP)
#undef OXY_HLML_LOOK_UP
  if (hlml.init == nullptr || hlml.device_get_count == nullptr || hlml.device_get_handle_by_index == nullptr) {
    why = path + " lacks hlml_init, hlml_device_get_count or hlml_device_get_handle_by_index, so it is no libhlml.so";
    return false;
  }
  return true;
}

void describe_card(const Hlml& hlml, Card& card) {
  card.name = text(hlml.device_get_name, card.handle);
  card.uuid = text(hlml.device_get_uuid, card.handle);
  card.serial = text(hlml.device_get_serial, card.handle);
  card.minor = number(hlml.device_get_minor_number, card.handle);
  card.module = number(hlml.device_get_module_id, card.handle);
}

void read_card(const Hlml& hlml, Card& card, const std::string& shared_memory) {
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  card.values.assign(meters().size(), kUnknown);
  card.unknown.clear();
  for (std::size_t i = 0; i < meters().size(); ++i) {
    const Meter& meter = meters()[i];
    if (!meter.present(hlml)) {
      card.unknown.emplace_back(meter.name, std::string("this libhlml.so is too old: it has no ") + meter.symbols);
      continue;
    }
    // What is lost may take long to say so again.
    const HlmlStatus status = card.lost ? kHlmlLost : meter.read(hlml, card.handle, card.values[i]);
    if (status != 0) {
      card.values[i] = kUnknown;
      card.unknown.emplace_back(meter.name, hlml_says(status));
      card.lost = card.lost || status == kHlmlLost;
    } else if (std::strcmp(meter.name, "memory_used") == 0 && used_note(shared_memory, card.minor) == Note::Stale) {
      card.values[i] = kUnknown;
      card.unknown.emplace_back(meter.name, "the note of the process that owned the card is older than 30 seconds");
    }
  }
}

}  // namespace oxytorch::backend::hpu
