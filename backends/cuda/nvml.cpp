#include "backends/cuda/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

struct nvmlDevice_st;
struct nvmlGpmSample_st;

namespace oxytorch::backend::cuda {
namespace {

// --- the interface, as nvml.h has it since version 11 ---

using Return = int;  // nvmlReturn_t
using Card = nvmlDevice_st*;
using GpmSample = nvmlGpmSample_st*;
constexpr Return kOk = 0;
constexpr Return kGpuIsLost = 15;
constexpr unsigned kSmClock = 1, kMemoryClock = 2;            // nvmlClockType_t
constexpr unsigned kPcieTx = 0, kPcieRx = 1;                  // nvmlPcieUtilCounter_t
constexpr unsigned kNvlinkDataTx = 138, kNvlinkDataRx = 139;  // NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_*, in KiB
constexpr unsigned kGpmOccupancy = 3, kGpmTensor = 5, kGpmDram = 10;

struct Utilization {
  unsigned gpu, memory;
};
struct Memory {
  unsigned long long total, free, used;
};
struct FieldValue {
  unsigned field, scope;
  long long timestamp_us, latency_us;
  unsigned type;
  Return result;
  union {
    double real;
    int whole;
    unsigned natural;
    unsigned long long large;
  } value;
};
struct GpmMetric {
  unsigned id;
  Return result;
  double value;
  const char *short_name, *long_name, *unit;
};
struct GpmMetrics {
  unsigned version, count;
  GpmSample first, second;
  std::array<GpmMetric, 512> metrics;  // nvml.h of today has 333; only `count` of them are touched
};
struct GpmSupport {
  unsigned version, supported;
};
static_assert(sizeof(FieldValue) == 40 && sizeof(GpmMetric) == 40 && offsetof(GpmMetrics, metrics) == 24);

// Every function is optional but the first three: what is missing gives NaN.
#define OXY_NVML_FUNCTIONS(X)                                                          \
  X(nvmlInit_v2, ())                                                                   \
  X(nvmlDeviceGetHandleByPciBusId_v2, (const char* id, Card* card))                    \
  X(nvmlDeviceGetUtilizationRates, (Card card, Utilization * rates))                   \
  X(nvmlDeviceGetMemoryInfo, (Card card, Memory * memory))                             \
  X(nvmlDeviceGetPowerUsage, (Card card, unsigned* milliwatts))                        \
  X(nvmlDeviceGetEnforcedPowerLimit, (Card card, unsigned* milliwatts))                \
  X(nvmlDeviceGetTotalEnergyConsumption, (Card card, unsigned long long* millijoules)) \
  X(nvmlDeviceGetTemperature, (Card card, unsigned sensor, unsigned* degrees))         \
  X(nvmlDeviceGetClockInfo, (Card card, unsigned clock, unsigned* megahertz))          \
  X(nvmlDeviceGetCurrentClocksThrottleReasons, (Card card, unsigned long long* bits))  \
  X(nvmlDeviceGetPcieThroughput, (Card card, unsigned counter, unsigned* kilobytes))   \
  X(nvmlDeviceGetMaxPcieLinkGeneration, (Card card, unsigned* generation))             \
  X(nvmlDeviceGetMaxPcieLinkWidth, (Card card, unsigned* width))                       \
  X(nvmlDeviceGetCurrPcieLinkGeneration, (Card card, unsigned* generation))            \
  X(nvmlDeviceGetCurrPcieLinkWidth, (Card card, unsigned* width))                      \
  X(nvmlDeviceGetFieldValues, (Card card, int count, FieldValue* values))              \
  X(nvmlGpmQueryDeviceSupport, (Card card, GpmSupport * support))                      \
  X(nvmlGpmSampleAlloc, (GpmSample * sample))                                          \
  X(nvmlGpmSampleFree, (GpmSample sample))                                             \
  X(nvmlGpmSampleGet, (Card card, GpmSample sample))                                   \
  X(nvmlGpmMetricsGet, (GpmMetrics * metrics))

struct Library {
#define OXY_NVML_MEMBER(name, parameters) Return(*name) parameters = nullptr;  // NOLINT(bugprone-macro-parentheses)
  OXY_NVML_FUNCTIONS(OXY_NVML_MEMBER)
#undef OXY_NVML_MEMBER
  std::string status;
  bool usable = false;
};

const Library& library() {
  static const Library* const loaded = [] {
    auto* made = new Library();
    const char* path = std::getenv("OXYTORCH_NVML");
    if (path == nullptr || *path == '\0') path = "libnvidia-ml.so.1";
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) {
      const char* why = dlerror();
      made->status = std::string("there is no NVML here: ") + (why == nullptr ? path : why);
      return made;
    }
#define OXY_NVML_SYMBOL(name, parameters) made->name = reinterpret_cast<decltype(made->name)>(dlsym(handle, #name));
    OXY_NVML_FUNCTIONS(OXY_NVML_SYMBOL)
#undef OXY_NVML_SYMBOL
    if (made->nvmlInit_v2 == nullptr || made->nvmlDeviceGetHandleByPciBusId_v2 == nullptr) {
      made->status = std::string(path) + " has no nvmlInit_v2 and nvmlDeviceGetHandleByPciBusId_v2";
      return made;
    }
    const Return result = made->nvmlInit_v2();
    made->usable = result == kOk;
    made->status = made->usable ? "NVML is in use" : "nvmlInit failed with status " + std::to_string(result);
    return made;
  }();
  return *loaded;
}

// --- a sample ---

enum Place {
  kGpuUtilization,
  kMemoryUtilization,
  kMemoryUsed,
  kPower,
  kPowerLimit,
  kEnergy,
  kTemperature,
  kSmClockHz,
  kMemoryClockHz,
  kThrottleReasons,
  kPcieTxRate,
  kPcieRxRate,
  kPcieGeneration,
  kPcieWidth,
  kNvlinkTxRate,
  kNvlinkRxRate,
  kSmOccupancy,
  kTensorActivity,
  kDramUtilization,
  kPlaces
};
constexpr std::array<NvmlCounter, kPlaces> kCounters{{{"gpu_utilization", "%"},
                                                      {"memory_utilization", "%"},
                                                      {"memory_used", "B"},
                                                      {"power", "W"},
                                                      {"power_limit", "W"},
                                                      {"energy", "J"},
                                                      {"temperature", "degC"},
                                                      {"sm_clock", "Hz"},
                                                      {"memory_clock", "Hz"},
                                                      {"throttle_reasons", "1"},
                                                      {"pcie_tx", "B/s"},
                                                      {"pcie_rx", "B/s"},
                                                      {"pcie_generation", "1"},
                                                      {"pcie_width", "1"},
                                                      {"nvlink_tx", "B/s"},
                                                      {"nvlink_rx", "B/s"},
                                                      {"sm_occupancy", "%"},
                                                      {"tensor_activity", "%"},
                                                      {"dram_utilization", "%"}}};
using Sample = std::array<double, kPlaces>;
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

Sample unknown() {
  Sample sample;
  sample.fill(kUnknown);
  return sample;
}

// One card as the sampling thread sees it.
class CardSampler {
 public:
  explicit CardSampler(const std::string& bus_id) {
    if (library().usable) see(library().nvmlDeviceGetHandleByPciBusId_v2(bus_id.c_str(), &card_));
    GpmSupport support{1, 0};
    const Library& nvml = library();
    if (card_ == nullptr || !nvml.nvmlGpmQueryDeviceSupport || !nvml.nvmlGpmSampleAlloc || !nvml.nvmlGpmSampleGet ||
        !nvml.nvmlGpmMetricsGet || !see(nvml.nvmlGpmQueryDeviceSupport(card_, &support)) || support.supported == 0) {
      return;
    }
    gpm_ = see(nvml.nvmlGpmSampleAlloc(&older_)) && see(nvml.nvmlGpmSampleAlloc(&newer_)) &&
           see(nvml.nvmlGpmSampleGet(card_, older_));
  }

  ~CardSampler() {
    for (GpmSample sample : {older_, newer_}) {
      if (sample != nullptr && library().nvmlGpmSampleFree != nullptr) library().nvmlGpmSampleFree(sample);
    }
  }
  CardSampler(const CardSampler&) = delete;
  CardSampler& operator=(const CardSampler&) = delete;

  [[nodiscard]] bool lost() const { return lost_; }

  Sample take() {
    Sample sample = unknown();
    if (card_ == nullptr) return sample;
    const Library& nvml = library();
    if (Utilization rates{}; ask(nvml.nvmlDeviceGetUtilizationRates, &rates)) {
      sample[kGpuUtilization] = rates.gpu;
      sample[kMemoryUtilization] = rates.memory;
    }
    if (Memory memory{}; ask(nvml.nvmlDeviceGetMemoryInfo, &memory)) {
      sample[kMemoryUsed] = static_cast<double>(memory.used);
    }
    number(sample[kPower], 1e-3, nvml.nvmlDeviceGetPowerUsage);
    number(sample[kPowerLimit], 1e-3, nvml.nvmlDeviceGetEnforcedPowerLimit);
    if (unsigned long long millijoules = 0; ask(nvml.nvmlDeviceGetTotalEnergyConsumption, &millijoules)) {
      sample[kEnergy] = static_cast<double>(millijoules) * 1e-3;
    }
    number(sample[kTemperature], 1, nvml.nvmlDeviceGetTemperature, 0u);
    number(sample[kSmClockHz], 1e6, nvml.nvmlDeviceGetClockInfo, kSmClock);
    number(sample[kMemoryClockHz], 1e6, nvml.nvmlDeviceGetClockInfo, kMemoryClock);
    if (unsigned long long bits = 0; ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, &bits)) {
      sample[kThrottleReasons] = static_cast<double>(bits);
    }
    number(sample[kPcieTxRate], 1e3, nvml.nvmlDeviceGetPcieThroughput, kPcieTx);
    number(sample[kPcieRxRate], 1e3, nvml.nvmlDeviceGetPcieThroughput, kPcieRx);
    number(sample[kPcieGeneration], 1, nvml.nvmlDeviceGetCurrPcieLinkGeneration);
    number(sample[kPcieWidth], 1, nvml.nvmlDeviceGetCurrPcieLinkWidth);
    take_nvlink(sample);
    if (gpm_) take_gpm(sample);
    return sample;
  }

 private:
  bool see(Return result) {
    lost_ = lost_ || result == kGpuIsLost;
    return result == kOk;
  }
  template <class... Parameters, class... Arguments>
  bool ask(Return (*function)(Card, Parameters...), Arguments... arguments) {
    return function != nullptr && !lost_ && see(function(card_, arguments...));
  }
  template <class... Parameters, class... Arguments>
  void number(double& value, double scale, Return (*function)(Card, Parameters...), Arguments... arguments) {
    if (unsigned raw = 0; ask(function, arguments..., &raw)) value = raw * scale;
  }

  // Monotone KiB of all links together; the rate is taken between two samples.
  void take_nvlink(Sample& sample) {
    std::array<FieldValue, 2> fields{};
    fields[0].field = kNvlinkDataTx;
    fields[1].field = kNvlinkDataRx;
    for (FieldValue& field : fields) field.scope = std::numeric_limits<unsigned>::max();
    if (!ask(library().nvmlDeviceGetFieldValues, 2, fields.data())) return;
    for (std::size_t i = 0; i < 2; ++i) {
      if (fields[i].result != kOk) continue;
      const double bytes = static_cast<double>(fields[i].value.large) * 1024;
      const double seconds = static_cast<double>(fields[i].timestamp_us - nvlink_us_[i]) * 1e-6;
      if (nvlink_us_[i] != 0 && seconds > 0) sample[kNvlinkTxRate + i] = (bytes - nvlink_bytes_[i]) / seconds;
      nvlink_us_[i] = fields[i].timestamp_us;
      nvlink_bytes_[i] = bytes;
    }
  }

  void take_gpm(Sample& sample) {
    if (!ask(library().nvmlGpmSampleGet, newer_)) return;
    static GpmMetrics metrics;
    metrics.version = 1;
    metrics.count = 3;
    metrics.first = older_;
    metrics.second = newer_;
    for (std::size_t i = 0; i < 3; ++i) metrics.metrics[i].id = std::array{kGpmOccupancy, kGpmTensor, kGpmDram}[i];
    if (see(library().nvmlGpmMetricsGet(&metrics))) {
      for (std::size_t i = 0; i < 3; ++i) {
        if (metrics.metrics[i].result == kOk) sample[kSmOccupancy + i] = metrics.metrics[i].value;
      }
    }
    std::swap(older_, newer_);
  }

  Card card_ = nullptr;
  bool lost_ = false;
  bool gpm_ = false;
  GpmSample older_ = nullptr, newer_ = nullptr;
  std::array<long long, 2> nvlink_us_{};
  std::array<double, 2> nvlink_bytes_{};
};

// --- the thread ---

struct Entry {
  Sample sample = unknown();
  bool lost = false;
};

class Sampler {
 public:
  Entry newest(const std::string& bus_id) {
    const std::lock_guard lock(mutex_);
    const auto [entry, added] = entries_.try_emplace(bus_id);
    if (added) wake_.notify_all();
    if (!running_) {
      running_ = true;
      // A process must not end while the thread is inside the library, nor wait long for it.
      static Sampler* const self = this;
      std::atexit([] { self->stop(); });
      std::thread([this] { run(); }).detach();
    }
    return entry->second;
  }

 private:
  void stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
    ended_.wait_for(lock, std::chrono::seconds(1), [this] { return !running_; });
  }

  void run() {
    std::map<std::string, CardSampler> samplers;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      std::vector<std::string> cards;
      for (const auto& [bus_id, entry] : entries_) cards.push_back(bus_id);
      const auto next = std::chrono::steady_clock::now() + std::chrono::seconds(1);
      lock.unlock();
      std::vector<Entry> fresh;
      for (const std::string& bus_id : cards) {
        CardSampler& sampler = samplers.try_emplace(bus_id, bus_id).first->second;
        Entry& entry = fresh.emplace_back();
        entry.sample = sampler.take();
        entry.lost = sampler.lost();
      }
      lock.lock();
      for (std::size_t i = 0; i < cards.size(); ++i) entries_[cards[i]] = fresh[i];
      wake_.wait_until(lock, next, [&] { return stopping_ || entries_.size() > cards.size(); });
    }
    running_ = false;
    ended_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::map<std::string, Entry> entries_;
  bool running_ = false, stopping_ = false;
};

}  // namespace

std::span<const NvmlCounter> nvml_counters() { return kCounters; }

bool nvml_sample(const std::string& bus_id, std::span<double> values) {
  static auto* const sampler = new Sampler();
  const Entry entry = sampler->newest(bus_id);
  std::copy(entry.sample.begin(), entry.sample.end(), values.begin());
  return entry.lost;
}

std::uint64_t nvml_link_bytes_per_s(const std::string& bus_id) {
  const Library& nvml = library();
  Card card = nullptr;
  unsigned generation = 0, width = 0;
  if (!nvml.usable || nvml.nvmlDeviceGetMaxPcieLinkGeneration == nullptr ||
      nvml.nvmlDeviceGetMaxPcieLinkWidth == nullptr ||
      nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.c_str(), &card) != kOk ||
      nvml.nvmlDeviceGetMaxPcieLinkGeneration(card, &generation) != kOk ||
      nvml.nvmlDeviceGetMaxPcieLinkWidth(card, &width) != kOk) {
    return 0;
  }
  // Bytes a second of a lane, after line coding (PCI Express base specification): 8b/10b, then 128b/130b, then PAM4.
  constexpr std::array<double, 7> kLane{0, 250e6, 500e6, 984.6e6, 1969.2e6, 3938.5e6, 7563e6};
  return generation < kLane.size() ? static_cast<std::uint64_t>(kLane[generation] * width) : 0;
}

const std::string& nvml_status() { return library().status; }

}  // namespace oxytorch::backend::cuda
