// libnvidia-ml.so.1 without a card: what backends/cuda asks of it. OXY_FAKE_NVML sets the scene, later
// fake_nvml_configure(): init=STATUS, power=MILLIWATTS, temperature=DEGREES, throttle=BITS, lost=ORDINAL (that card
// answers NVML_ERROR_GPU_IS_LOST), unsupported=NAME (that function answers NVML_ERROR_NOT_SUPPORTED), gpm=0 (a card
// before Hopper).
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>

#define FAKE extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr int kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6, kGpuIsLost = 15;

struct Scene {
  std::mutex mutex;
  int init = 0, lost = -1, gpm = 1;
  unsigned power = 350000, temperature = 61;
  unsigned long long throttle = 0;
  std::string unsupported;
};
Scene& scene() {
  static auto* const instance = new Scene();
  return *instance;
}
std::atomic<unsigned long long> calls{0};

void configure(const std::string& text) {
  Scene& now = scene();
  const std::lock_guard lock(now.mutex);
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto equals = entry.find('=');
    const std::string key = entry.substr(0, equals), value = entry.substr(equals + 1);
    const auto number = std::atoll(value.c_str());
    if (key == "init") now.init = static_cast<int>(number);
    if (key == "lost") now.lost = static_cast<int>(number);
    if (key == "gpm") now.gpm = static_cast<int>(number);
    if (key == "power") now.power = static_cast<unsigned>(number);
    if (key == "temperature") now.temperature = static_cast<unsigned>(number);
    if (key == "throttle") now.throttle = static_cast<unsigned long long>(number);
    if (key == "unsupported") now.unsupported = value;
  }
}

}  // namespace

struct nvmlDevice_st {
  int index;
};
struct nvmlGpmSample_st {
  unsigned long long taken = 0;
};

namespace {

nvmlDevice_st cards[8]{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

int enter(const char* name, const nvmlDevice_st* card) {
  ++calls;
  Scene& now = scene();
  const std::lock_guard lock(now.mutex);
  if (card == nullptr) return kInvalidArgument;
  if (card->index == now.lost) return kGpuIsLost;
  return now.unsupported == name ? kNotSupported : 0;
}

}  // namespace

FAKE fake_nvml_configure(const char* text) {
  configure(text);
  return 0;
}
extern "C" __attribute__((visibility("default"))) unsigned long long fake_nvml_calls() { return calls; }

FAKE nvmlInit_v2() {
  const char* text = std::getenv("OXY_FAKE_NVML");
  if (text != nullptr) configure(text);
  return scene().init;
}
FAKE nvmlDeviceGetHandleByPciBusId_v2(const char* id, nvmlDevice_st** card) {
  int bus = -1;
  if (std::sscanf(id, "0000:%x:00.0", reinterpret_cast<unsigned*>(&bus)) != 1 || bus < 16 || bus > 23) return kNotFound;
  *card = &cards[bus - 16];
  return enter("nvmlDeviceGetHandleByPciBusId_v2", *card);
}
FAKE nvmlDeviceGetUtilizationRates(nvmlDevice_st* card, unsigned* rates) {
  rates[0] = 40 + static_cast<unsigned>(card->index);
  rates[1] = 30;
  return enter("nvmlDeviceGetUtilizationRates", card);
}
FAKE nvmlDeviceGetMemoryInfo(nvmlDevice_st* card, unsigned long long* memory) {
  memory[0] = 80ull << 30;
  memory[1] = 70ull << 30;
  memory[2] = 10ull << 30;
  return enter("nvmlDeviceGetMemoryInfo", card);
}
FAKE nvmlDeviceGetPowerUsage(nvmlDevice_st* card, unsigned* milliwatts) {
  *milliwatts = scene().power;
  return enter("nvmlDeviceGetPowerUsage", card);
}
FAKE nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_st* card, unsigned* milliwatts) {
  *milliwatts = 700000;
  return enter("nvmlDeviceGetEnforcedPowerLimit", card);
}
FAKE nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_st* card, unsigned long long* millijoules) {
  *millijoules = 5000;
  return enter("nvmlDeviceGetTotalEnergyConsumption", card);
}
FAKE nvmlDeviceGetTemperature(nvmlDevice_st* card, unsigned sensor, unsigned* degrees) {
  *degrees = scene().temperature + sensor;
  return enter("nvmlDeviceGetTemperature", card);
}
FAKE nvmlDeviceGetClockInfo(nvmlDevice_st* card, unsigned clock, unsigned* megahertz) {
  *megahertz = clock == 1 ? 1980 : 2619;
  return enter("nvmlDeviceGetClockInfo", card);
}
FAKE nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_st* card, unsigned long long* bits) {
  *bits = scene().throttle;
  return enter("nvmlDeviceGetCurrentClocksThrottleReasons", card);
}
FAKE nvmlDeviceGetPcieThroughput(nvmlDevice_st* card, unsigned counter, unsigned* kilobytes) {
  *kilobytes = counter == 0 ? 1000 : 2000;
  return enter("nvmlDeviceGetPcieThroughput", card);
}
FAKE nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_st* card, unsigned* generation) {
  *generation = 5;
  return enter("nvmlDeviceGetMaxPcieLinkGeneration", card);
}
FAKE nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_st* card, unsigned* width) {
  *width = 16;
  return enter("nvmlDeviceGetMaxPcieLinkWidth", card);
}
FAKE nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_st* card, unsigned* generation) {
  *generation = 4;
  return enter("nvmlDeviceGetCurrPcieLinkGeneration", card);
}
FAKE nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_st* card, unsigned* width) {
  *width = 8;
  return enter("nvmlDeviceGetCurrPcieLinkWidth", card);
}

namespace {
struct FieldValue {  // nvmlFieldValue_t
  unsigned field, scope;
  long long timestamp_us, latency_us;
  unsigned type;
  int result;
  unsigned long long value;
};
struct GpmMetric {  // nvmlGpmMetric_t
  unsigned id;
  int result;
  double value;
  char* texts[3];
};
struct GpmMetrics {  // nvmlGpmMetricsGet_t
  unsigned version, count;
  nvmlGpmSample_st *first, *second;
  GpmMetric metrics[333];
};
}  // namespace

FAKE nvmlDeviceGetFieldValues(nvmlDevice_st* card, int count, FieldValue* values) {
  static std::atomic<long long> seconds{1};
  const long long now = seconds++;
  for (int i = 0; i < count; ++i) {
    values[i].timestamp_us = now * 1000000;
    values[i].value = static_cast<unsigned long long>(now) * (values[i].field == 138 ? 1000 : 3000);  // KiB
    values[i].result = values[i].scope == ~0u ? 0 : kNotSupported;
  }
  return enter("nvmlDeviceGetFieldValues", card);
}
FAKE nvmlGpmQueryDeviceSupport(nvmlDevice_st* card, unsigned* support) {
  if (support[0] != 1) return 25;
  support[1] = static_cast<unsigned>(scene().gpm);
  return enter("nvmlGpmQueryDeviceSupport", card);
}
FAKE nvmlGpmSampleAlloc(nvmlGpmSample_st** sample) {
  *sample = new nvmlGpmSample_st();
  return 0;
}
FAKE nvmlGpmSampleFree(nvmlGpmSample_st* sample) {
  delete sample;
  return 0;
}
FAKE nvmlGpmSampleGet(nvmlDevice_st* card, nvmlGpmSample_st* sample) {
  static std::atomic<unsigned long long> time{0};
  sample->taken = ++time;
  return enter("nvmlGpmSampleGet", card);
}
FAKE nvmlGpmMetricsGet(GpmMetrics* metrics) {
  // The earlier sample comes first.
  if (metrics->version != 1 || metrics->first->taken >= metrics->second->taken) return kInvalidArgument;
  for (unsigned i = 0; i < metrics->count; ++i) {
    GpmMetric& metric = metrics->metrics[i];
    metric.value = 10.0 * metric.id;
    metric.result = 0;
  }
  return 0;
}
