// A fake libhlml.so: all 61 functions of the public header (HabanaAI/gohlml, hlml.h) over a scenario file, which
// FAKE_HLML names and which is read anew at each call. Never installed. Lines are `key=value`; `3.` before a key means
// card 3 alone; a value with commas is told one part a call, the last for ever.
//   cards=8  name=HL-225  power=350000  used=0 ...   what the functions tell (the keys are in the code below)
//   lost=1                     every question about the card gives code 15
//   fail.NAME=CODE             hlml_NAME gives the code
//   hang.NAME=MS               hlml_NAME takes so long
//   down=5                     the link of port 5 is down
//   calls=PATH                 a line is appended to that file for each call: NAME
// FAKE_HLML_OLD leaves out what old libraries have not, FAKE_HLML_OTHER is some other library.
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <thread>

// ---- layouts

struct hlml_pci_cap {
  char link_speed[10];
  char link_width[10];
};
struct hlml_pci_info {
  unsigned bus;
  char bus_id[15];
  unsigned device;
  unsigned domain;
  unsigned pci_device_id;
  hlml_pci_cap caps;
};
struct hlml_utilization {
  unsigned aip;
};
struct hlml_memory {
  unsigned long long free, total, used;
};
struct hlml_pcb_info {
  char pcb_ver[32];
  char pcb_assembly_ver[32];
};
struct hlml_event_data {
  void* device;
  unsigned long long event_type;
};
struct hlml_mac_info {
  unsigned char addr[6];
  int id;
};
struct hlml_nic_stats_info {
  std::uint32_t port;
  char* str_buf;
  std::uint64_t* val_buf;
  std::uint32_t* num_of_counters_out;
};
struct hlml_violation_time {
  unsigned long long reference_time, violation_time;
};
struct hlml_row_address {
  std::uint8_t hbm_idx, pc, sid, bank_idx;
  std::uint16_t row_addr;
};
static_assert(sizeof(hlml_pci_info) == 52 && offsetof(hlml_pci_info, device) == 20 &&
              offsetof(hlml_pci_info, caps) == 32);
static_assert(sizeof(hlml_utilization) == 4 && sizeof(hlml_memory) == 24 && offsetof(hlml_memory, total) == 8);
static_assert(sizeof(hlml_pcb_info) == 64 && sizeof(hlml_event_data) == 16);
static_assert(sizeof(hlml_mac_info) == 12 && offsetof(hlml_mac_info, id) == 8);
static_assert(sizeof(hlml_nic_stats_info) == 32 && offsetof(hlml_nic_stats_info, str_buf) == 8);
static_assert(sizeof(hlml_violation_time) == 16 && sizeof(hlml_row_address) == 6);

namespace {

enum { kOk = 0, kUninitialized = 1, kInvalid = 2, kNotSupported = 3, kTwice = 5, kNotFound = 6, kTooSmall = 7 };
enum { kTimeout = 10, kLost = 15 };

// ---- the scenario

std::mutex mutex;
std::map<std::string, std::size_t> asked;  // of values with commas
bool initialized = false;
int event_set = 0;

using Scenario = std::map<std::string, std::string>;

Scenario scenario() {
  Scenario found;
  const char* path = std::getenv("FAKE_HLML");
  std::ifstream file(path == nullptr ? "" : path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t split = line.find('=');
    if (split != std::string::npos && line[0] != '#') found[line.substr(0, split)] = line.substr(split + 1);
  }
  return found;
}

std::string part(const std::string& key, const std::string& value) {
  if (value.find(',') == std::string::npos) return value;
  std::size_t left = asked[key]++, start = 0;
  for (std::size_t comma; left > 0 && (comma = value.find(',', start)) != std::string::npos; --left) start = comma + 1;
  return value.substr(start, value.find(',', start) - start);
}

// A device handle is the card's number and one, so that none is NULL.
int card_of(void* device) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(device)) - 1; }

// One call: who asks, of which card, and what the scenario says.
class HlmlCall {
 public:
  explicit HlmlCall(const char* name, int card = -1) : lock_(mutex), all_(scenario()), card_(card) {
    if (const std::string path = text("calls", ""); !path.empty()) std::ofstream(path, std::ios::app) << name << '\n';
    const long hang = number(std::string("hang.") + name, 0);
    if (hang > 0) {
      lock_.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(hang));
      lock_.lock();
    }
    status = static_cast<int>(number(std::string("fail.") + name, kOk));
    if (status == kOk && !initialized && std::strncmp(name, "init", 4) != 0) status = kUninitialized;
    if (status == kOk && card >= number("cards", 1)) status = kInvalid;
    if (status == kOk && card >= 0 && number("lost", 0) != 0) status = kLost;
  }

  std::string text(const std::string& key, const char* otherwise) {
    const std::string own = std::to_string(card_) + "." + key;
    for (const std::string& name : {own, key}) {
      if (const auto found = all_.find(name); found != all_.end()) return part(name, found->second);
    }
    return otherwise;
  }
  long long number(const std::string& key, long long otherwise) {
    const std::string value = text(key, "");
    return value.empty() ? otherwise : std::strtoll(value.c_str(), nullptr, 0);
  }

  int status = kOk;

 private:
  std::unique_lock<std::mutex> lock_;
  Scenario all_;
  int card_;
};

int give_text(HlmlCall& call, const std::string& value, char* text, unsigned length) {
  if (call.status != kOk) return call.status;
  if (text == nullptr) return kInvalid;
  if (value.size() >= length) return kTooSmall;
  std::memcpy(text, value.c_str(), value.size() + 1);
  return kOk;
}

template <class Number>
int give(HlmlCall& call, Number* to, long long value) {
  if (call.status != kOk) return call.status;
  if (to == nullptr) return kInvalid;
  *to = static_cast<Number>(value);
  return kOk;
}

constexpr int kPorts = 24;

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) int
#define OF(device) card_of(device)

#if defined(FAKE_HLML_OTHER)

FAKE hlml_something_else() { return kOk; }

#else

FAKE hlml_init() {
  HlmlCall call("init");
  if (call.status != kOk) return call.status;
  if (initialized) return kTwice;
  initialized = true;
  return kOk;
}
FAKE hlml_init_with_flags(unsigned) { return hlml_init(); }
FAKE hlml_shutdown() {
  HlmlCall call("shutdown");
  if (call.status == kOk) initialized = false;
  return call.status;
}
FAKE hlml_device_get_count(unsigned* count) {
  HlmlCall call("device_get_count");
  return give(call, count, call.number("cards", 1));
}
FAKE hlml_device_get_handle_by_index(unsigned index, void** device) {
  HlmlCall call("device_get_handle_by_index", static_cast<int>(index));
  if (call.status != kOk) return call.status;
  *device = reinterpret_cast<void*>(static_cast<std::uintptr_t>(index) + 1);
  return kOk;
}
FAKE hlml_device_get_handle_by_UUID(const char* uuid, void** device) {
  const std::string wanted = uuid == nullptr ? "" : uuid;
  const std::size_t dash = wanted.rfind('-');
  if (dash == std::string::npos) return kNotFound;
  return hlml_device_get_handle_by_index(static_cast<unsigned>(std::atoi(wanted.c_str() + dash + 1)), device);
}
FAKE hlml_device_get_handle_by_pci_bus_id(const char* address, void** device) {
  unsigned domain = 0, bus = 0;
  if (address == nullptr || std::sscanf(address, "%x:%x", &domain, &bus) != 2) return kNotFound;
  return hlml_device_get_handle_by_index(bus, device);
}

#define FAKE_TEXT(name, key, otherwise)                              \
  FAKE hlml_##name(void* device, char* text, unsigned length) {      \
    HlmlCall call(#name, OF(device));                                \
    return give_text(call, call.text(key, otherwise), text, length); \
  }
#define FAKE_NUMBER(name, type, key, otherwise)            \
  FAKE hlml_##name(void* device, type* value) {            \
    HlmlCall call(#name, OF(device));                      \
    return give(call, value, call.number(key, otherwise)); \
  }
#define FAKE_CHOSEN(name, type, key, otherwise)                                    \
  FAKE hlml_##name(void* device, int which, type* value) {                         \
    HlmlCall call(#name, OF(device));                                              \
    return give(call, value, call.number(key + std::to_string(which), otherwise)); \
  }

FAKE_TEXT(device_get_name, "name", "HL-325L")
FAKE hlml_device_get_uuid(void* device, char* text, unsigned length) {
  HlmlCall call("device_get_uuid", OF(device));
  return give_text(call, "01P0-FAKE-" + std::to_string(OF(device)), text, length);
}
FAKE hlml_device_get_serial(void* device, char* text, unsigned length) {
  HlmlCall call("device_get_serial", OF(device));
  return give_text(call, "FAKE" + std::to_string(OF(device)), text, length);
}
FAKE hlml_device_get_pci_info(void* device, hlml_pci_info* pci) {
  HlmlCall call("device_get_pci_info", OF(device));
  if (call.status != kOk) return call.status;
  *pci = {static_cast<unsigned>(OF(device)), "", 0, 0, 0x1da31060, {"32GT/s", "x16"}};
  std::snprintf(pci->bus_id, sizeof(pci->bus_id), "0000:%02x:00.0", static_cast<unsigned>(OF(device)) & 0xFF);
  return kOk;
}
FAKE_CHOSEN(device_get_clock_info, unsigned, "clock", 1650)
FAKE_CHOSEN(device_get_max_clock_info, unsigned, "max_clock", 1800)
FAKE hlml_device_get_utilization_rates(void* device, hlml_utilization* rates) {
  HlmlCall call("device_get_utilization_rates", OF(device));
  return give(call, &rates->aip, call.number("utilization", 42));
}
FAKE hlml_device_get_memory_info(void* device, hlml_memory* memory) {
  HlmlCall call("device_get_memory_info", OF(device));
  if (call.status != kOk) return call.status;
  const auto total = static_cast<unsigned long long>(call.number("total", 137438953472));
  const auto used = static_cast<unsigned long long>(call.number("used", 1 << 30));
  *memory = {total - used, total, used};
  return kOk;
}
FAKE_CHOSEN(device_get_temperature, unsigned, "temperature", 41 + which)
FAKE_CHOSEN(device_get_temperature_threshold, unsigned, "threshold", 100 + which)
FAKE_NUMBER(device_get_persistence_mode, int, "fail.device_get_persistence_mode", (call.status = kNotSupported))
FAKE_NUMBER(device_get_performance_state, int, "fail.device_get_performance_state", (call.status = kNotSupported))
FAKE_NUMBER(device_get_power_usage, unsigned, "power", 350000)
FAKE_NUMBER(device_get_power_management_default_limit, unsigned, "power_limit", 900000)
FAKE hlml_device_get_ecc_mode(void* device, int* current, int* pending) {
  HlmlCall call("device_get_ecc_mode", OF(device));
  if (give(call, current, 1) != kOk) return call.status;
  return give(call, pending, 1);
}
FAKE hlml_device_get_total_ecc_errors(void* device, int type, int counter, unsigned long long* count) {
  HlmlCall call("device_get_total_ecc_errors", OF(device));
  if (type == 0) return kNotSupported;  // corrected ones are not counted
  return give(call, count, call.number("ecc" + std::to_string(counter), 0));
}
FAKE hlml_device_get_memory_error_counter(void* device, int type, int counter, int, unsigned long long* count) {
  HlmlCall call("device_get_memory_error_counter", OF(device));
  if (type == 0) return kNotSupported;
  return give(call, count, call.number("ecc" + std::to_string(counter), 0));
}
FAKE hlml_device_get_minor_number(void* device, unsigned* minor) {
  HlmlCall call("device_get_minor_number", OF(device));
  return give(call, minor, call.number("minor", OF(device)));
}
FAKE hlml_device_register_events(void* device, unsigned long long, void* set) {
  HlmlCall call("device_register_events", OF(device));
  return call.status != kOk ? call.status : set == &event_set ? kOk : kInvalid;
}
FAKE hlml_event_set_create(void** set) {
  HlmlCall call("event_set_create");
  if (call.status == kOk) *set = &event_set;
  return call.status;
}
FAKE hlml_event_set_free(void* set) {
  HlmlCall call("event_set_free");
  return call.status != kOk ? call.status : set == &event_set ? kOk : kInvalid;
}
FAKE hlml_event_set_wait(void*, hlml_event_data* data, unsigned milliseconds) {
  HlmlCall call("event_set_wait");
  const long long type = call.number("event", 0);
  if (call.status != kOk) return call.status;
  if (type == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    return kTimeout;
  }
  *data = {reinterpret_cast<void*>(std::uintptr_t{1}), static_cast<unsigned long long>(type)};
  return kOk;
}
FAKE hlml_device_get_mac_info(void* device, hlml_mac_info* infos, unsigned size, unsigned first, unsigned* actual) {
  HlmlCall call("device_get_mac_info", OF(device));
  if (call.status != kOk) return call.status;
  *actual = 0;
  for (unsigned id = first; id < kPorts && *actual < size; ++id) {
    const auto card = static_cast<unsigned char>(OF(device));
    infos[(*actual)++] = {{0xB0, 0xFD, 0x0B, 0, card, static_cast<unsigned char>(id)}, static_cast<int>(id)};
  }
  return kOk;
}
FAKE hlml_device_err_inject(void* device, int) {
  HlmlCall call("device_err_inject", OF(device));
  return call.status != kOk ? call.status : kNotSupported;
}
FAKE_NUMBER(device_get_hl_revision, int, "revision", 1)
FAKE hlml_device_get_pcb_info(void* device, hlml_pcb_info* pcb) {
  HlmlCall call("device_get_pcb_info", OF(device));
  if (call.status == kOk) *pcb = {"V1", "R2"};
  return call.status;
}
FAKE hlml_device_get_module_id(void* device, unsigned* module) {
  HlmlCall call("device_get_module_id", OF(device));
  return give(call, module, call.number("module", OF(device)));
}
FAKE_NUMBER(device_get_board_id, unsigned, "board", 0)
FAKE_CHOSEN(device_get_pcie_throughput, unsigned, "pcie", 1000)
FAKE_NUMBER(device_get_pcie_replay_counter, unsigned, "replays", 0)
FAKE_NUMBER(device_get_curr_pcie_link_generation, unsigned, "pcie_generation", 5)
FAKE_NUMBER(device_get_curr_pcie_link_width, unsigned, "pcie_width", 16)
FAKE_NUMBER(device_get_current_clocks_throttle_reasons, unsigned long long, "throttle", 0)
FAKE_NUMBER(device_get_total_energy_consumption, unsigned long long, "energy", 5000000)
FAKE hlml_get_hlml_version(char* text, unsigned length) {
  HlmlCall call("get_hlml_version");
  return give_text(call, call.text("hlml", "1.24.0-fake"), text, length);
}
FAKE hlml_get_driver_version(char* text, unsigned length) {
  HlmlCall call("get_driver_version");
  return give_text(call, call.text("driver", "1.24.0-fake"), text, length);
}

#if !defined(FAKE_HLML_OLD)

FAKE hlml_get_mac_addr_info(void* device, std::uint64_t* mask, std::uint64_t* external) {
  HlmlCall call("get_mac_addr_info", OF(device));
  if (call.status != kOk) return call.status;
  mask[0] = static_cast<std::uint64_t>(call.number("ports", (1 << kPorts) - 1));
  mask[1] = static_cast<std::uint64_t>(call.number("ports1", 0));
  external[0] = mask[0] & 0x700000;
  external[1] = 0;
  return kOk;
}
FAKE hlml_nic_get_link(void* device, std::uint32_t port, bool* up) {
  HlmlCall call("nic_get_link", OF(device));
  return give(call, up, call.number("down", -1) != static_cast<long long>(port));
}
FAKE hlml_nic_get_statistics(void* device, hlml_nic_stats_info* info) {
  HlmlCall call("nic_get_statistics", OF(device));
  if (call.status != kOk) return call.status;
  std::snprintf(info->str_buf, 32, "port_rcv_data");
  info->val_buf[0] = static_cast<std::uint64_t>(call.number("received", 0));
  *info->num_of_counters_out = 1;
  return kOk;
}
FAKE hlml_device_clear_cpu_affinity(void* device) { return HlmlCall("device_clear_cpu_affinity", OF(device)).status; }
FAKE hlml_device_set_cpu_affinity(void* device) { return HlmlCall("device_set_cpu_affinity", OF(device)).status; }
FAKE hlml_device_get_cpu_affinity(void* device, unsigned, unsigned long* set) {
  HlmlCall call("device_get_cpu_affinity", OF(device));
  return give(call, set, 0xFF);
}
FAKE hlml_device_get_cpu_affinity_within_scope(void* device, unsigned, unsigned long* set, unsigned) {
  HlmlCall call("device_get_cpu_affinity_within_scope", OF(device));
  return give(call, set, 0xFF);
}
FAKE hlml_device_get_memory_affinity(void* device, unsigned, unsigned long* set, unsigned) {
  HlmlCall call("device_get_memory_affinity", OF(device));
  return give(call, set, OF(device) < 4 ? 1 : 2);
}
FAKE hlml_device_get_violation_status(void* device, int policy, hlml_violation_time* times) {
  HlmlCall call("device_get_violation_status", OF(device));
  if (call.status != kOk) return call.status;
  const long long nanoseconds = call.number("violation" + std::to_string(policy), 0);
  *times = {1, static_cast<unsigned long long>(nanoseconds)};
  return kOk;
}
FAKE hlml_device_get_replaced_rows(void* device, int cause, unsigned* count, hlml_row_address* rows) {
  HlmlCall call("device_get_replaced_rows", OF(device));
  const auto there = static_cast<unsigned>(call.number("rows" + std::to_string(cause), 0));
  if (call.status != kOk) return call.status;
  if (rows != nullptr && *count < there) return kTooSmall;
  for (unsigned i = 0; rows != nullptr && i < there; ++i) rows[i] = {0, 0, 0, 0, static_cast<std::uint16_t>(i)};
  *count = there;
  return kOk;
}
FAKE_NUMBER(device_get_replaced_rows_pending_status, int, "rows_pending", 0)
FAKE_TEXT(get_model_number, "model", "HL-325L-A")
FAKE_TEXT(get_serial_number, "serial_number", "FAKE")
FAKE_TEXT(get_firmware_fit_version, "fit", "fake-fit")
FAKE_TEXT(get_firmware_spi_version, "spi", "fake-spi")
FAKE_TEXT(get_fw_boot_version, "boot", "fake-boot")
FAKE_TEXT(get_fw_os_version, "os", "fake-os")
FAKE_TEXT(get_cpld_version, "cpld", "fake-cpld")

#endif  // FAKE_HLML_OLD
#endif  // FAKE_HLML_OTHER
