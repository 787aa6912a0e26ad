/// The management library of Gaudi cards, `libhlml.so`, opened at run time: no header of Habana's, nothing linked.
///
/// Layouts, numbers and units are those of the public header (HabanaAI/gohlml, hlml.h). The order of a card's memory is
/// free, total, used. One library per process, initialised once; a symbol that an older library lacks is a null
/// pointer.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace oxytorch::backend::hpu {

struct HlmlUtilization {
  unsigned aip;  // percent of the last second
};
struct HlmlMemory {
  unsigned long long free, total, used;  // bytes
};
struct HlmlViolation {
  unsigned long long reference_time, violation_time;
};
static_assert(sizeof(HlmlUtilization) == 4 && sizeof(HlmlMemory) == 24 && sizeof(HlmlViolation) == 16);

using HlmlDevice = void*;
using HlmlStatus = int;

/// Every function that is called: `X(what follows "hlml_", arguments)`.
#define OXY_HLML_FUNCTIONS(X)                                                                           \
  X(init, ())                                                                                           \
  X(shutdown, ())                                                                                       \
  X(get_hlml_version, (char* text, unsigned bytes))                                                     \
  X(get_driver_version, (char* text, unsigned bytes))                                                   \
  X(device_get_count, (unsigned* count))                                                                \
  X(device_get_handle_by_index, (unsigned index, HlmlDevice* device))                                   \
  X(device_get_name, (HlmlDevice device, char* text, unsigned bytes))                                   \
  X(device_get_uuid, (HlmlDevice device, char* text, unsigned bytes))                                   \
  X(device_get_serial, (HlmlDevice device, char* text, unsigned bytes))                                 \
  X(device_get_minor_number, (HlmlDevice device, unsigned* value))                                      \
  X(device_get_module_id, (HlmlDevice device, unsigned* value))                                         \
  X(device_get_memory_info, (HlmlDevice device, HlmlMemory * memory))                                   \
  X(device_get_utilization_rates, (HlmlDevice device, HlmlUtilization * utilization))                   \
  X(device_get_power_usage, (HlmlDevice device, unsigned* milliwatts))                                  \
  X(device_get_total_energy_consumption, (HlmlDevice device, unsigned long long* mj))                   \
  X(device_get_temperature, (HlmlDevice device, int sensor, unsigned* celsius))                         \
  X(device_get_clock_info, (HlmlDevice device, int clock, unsigned* mhz))                               \
  X(device_get_max_clock_info, (HlmlDevice device, int clock, unsigned* mhz))                           \
  X(device_get_current_clocks_throttle_reasons, (HlmlDevice device, unsigned long long* bits))          \
  X(device_get_violation_status, (HlmlDevice device, int policy, HlmlViolation* times))                 \
  X(device_get_total_ecc_errors, (HlmlDevice device, int type, int counter, unsigned long long* count)) \
  X(device_get_replaced_rows, (HlmlDevice device, int cause, unsigned* count, void* rows))              \
  X(device_get_replaced_rows_pending_status, (HlmlDevice device, int* pending))                         \
  X(device_get_pcie_replay_counter, (HlmlDevice device, unsigned* count))                               \
  X(get_mac_addr_info, (HlmlDevice device, std::uint64_t * ports, std::uint64_t * external_ports))      \
  X(nic_get_link, (HlmlDevice device, std::uint32_t port, bool* up))

struct Hlml {
#define OXY_HLML_POINTER(name, arguments) HlmlStatus(*name) arguments = nullptr;  // NOLINT(bugprone-macro-parentheses)
  OXY_HLML_FUNCTIONS(OXY_HLML_POINTER)
#undef OXY_HLML_POINTER
};

constexpr HlmlStatus kHlmlAlreadyInitialized = 5, kHlmlLost = 15;

/// What a status means, as the end of a sentence; for 0 "it succeeded".
std::string hlml_says(HlmlStatus status);

/// One thing that a card tells.
struct Meter {
  const char* name;
  const char* unit;
  const char* symbols;  ///< the functions it needs, for people
  bool (*present)(const Hlml&);
  HlmlStatus (*read)(const Hlml&, HlmlDevice, double& value);
};
/// All of them, in the order of counters.
const std::vector<Meter>& meters();

/// What is known of one card.
struct Card {
  HlmlDevice handle = nullptr;
  std::string name, uuid, serial;
  int minor = -1, module = -1;                               ///< -1: unknown
  std::vector<double> values;                                ///< as meters(); NaN where unknown
  std::vector<std::pair<std::string, std::string>> unknown;  ///< meter, why
  bool lost = false;
};

/// Opens `libhlml.so` (`OXYTORCH_HLML`, else where Habana installs it, else the loader's path); `path` gets the name
/// that worked. False: `why` gets a sentence.
bool open_hlml(Hlml& hlml, std::string& path, std::string& why);

/// Reads every meter of a card. `shared_memory` is the folder in which the process that owns the card leaves its note
/// of used bytes ("/dev/shm"); a note older than 30 seconds makes `memory_used` unknown.
void read_card(const Hlml& hlml, Card& card, const std::string& shared_memory);

/// Name, serial number, minor number and module of a card whose handle is set.
void describe_card(const Hlml& hlml, Card& card);

}  // namespace oxytorch::backend::hpu
