// What torch asks of a device: allocator, guard, hooks, generator.
#include "device/torch_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

#include "device/fake.h"
#include "oxytorch/backend/sim.h"
#include "oxytorch/error.h"

// torch 2.9 has no such functions to override.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
#define OXY_SINCE_2_10
#else
#define OXY_SINCE_2_10 override
#endif

namespace oxytorch::test {
namespace {

constexpr int kMostDevices = 16;
const std::set<std::string> kQuirks{"one_device", "plain_allocator", "silent_allocator", "no_hooks",
                                    "no_streams", "no_events",       "asynchronous"};

thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams_in_use[kMostDevices] = {};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Kind chosen() {
  Kind kind;
  kind.name = variable("OXYTORCH_DEVICE");
  if (kind.name == "hpu") {
    kind.type = c10::DeviceType::HPU;
    kind.key = c10::DispatchKey::HPU;
    kind.autocast = c10::DispatchKey::AutocastHPU;
  } else if (kind.name == "sim" || kind.name == "privateuse1") {
    if (kind.name == "privateuse1") kind.name = "privateuseone";
    kind.type = c10::DeviceType::PrivateUse1;
    kind.key = c10::DispatchKey::PrivateUse1;
    kind.autocast = c10::DispatchKey::AutocastPrivateUse1;
  }
  std::istringstream quirks(variable("OXYTORCH_FAKE"));
  for (std::string quirk; std::getline(quirks, quirk, ',');) {
    TORCH_CHECK_VALUE(kQuirks.contains(quirk), "OXYTORCH_FAKE: there is no quirk '", quirk, "'");
    kind.quirks.insert(quirk);
  }
  return kind;
}

// ---- memory

struct Block {
  backend::Buffer buffer;
  void* played;
};

void release(void* block);

struct Statistics {
  std::int64_t in_use = 0, peak = 0, allocs = 0, frees = 0, largest = 0, limit = 0;
};
std::mutex statistics_mutex;
Statistics statistics[kMostDevices];  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

// As torch's own allocators tell a profiler.
void report(void* address, std::int64_t bytes, c10::DeviceIndex index) {
  if (kind().has("silent_allocator")) return;
  std::int64_t in_use = 0;
  {
    const std::lock_guard lock(statistics_mutex);
    in_use = statistics[index].in_use;
  }
  const auto all = static_cast<std::size_t>(in_use);
  c10::reportMemoryUsageToProfiler(address, bytes, all, all, c10::Device(kind().type, index));
}

c10::DataPtr allocate(std::size_t bytes) {
  const auto index = current;
  const auto wanted = static_cast<std::int64_t>(bytes);
  Statistics& s = statistics[index];
  {
    const std::lock_guard lock(statistics_mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, s.limit == 0 || s.in_use + wanted <= s.limit, kind().name, ":", int(index),
                     " out of memory: tried to allocate ", bytes, " bytes; ", s.in_use, " of ", s.limit,
                     " bytes are in use");
  }
  try {
    const backend::Device& device = devices().at(static_cast<std::size_t>(index));
    auto block = std::make_unique<Block>(Block{backend::Buffer(device, bytes), nullptr});
    void* const address = block->buffer.data();
    block->played = backend::sim_host_address(index, address);
    {
      const std::lock_guard lock(statistics_mutex);
      s.in_use += wanted;
      s.peak = std::max(s.peak, s.in_use);
      s.largest = std::max(s.largest, wanted);
      ++s.allocs;
    }
    report(address, wanted, index);
    return {address, block.release(), &release, c10::Device(kind().type, index)};
  } catch (const Error& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, error.code() != ErrorCode::OutOfMemory, error.what());
    throw;
  }
}

void release(void* held) {
  const std::unique_ptr<Block> block(static_cast<Block*>(held));
  const auto index = static_cast<c10::DeviceIndex>(block->buffer.device().index());
  const auto bytes = static_cast<std::int64_t>(block->buffer.bytes());
  {
    Statistics& s = statistics[index];
    const std::lock_guard lock(statistics_mutex);
    s.in_use -= bytes;
    ++s.frees;
  }
  report(block->buffer.data(), -bytes, index);
}

void copy_within(void* to, const void* from, std::size_t bytes) {
  const backend::Device& device = devices().at(static_cast<std::size_t>(current));
  backend::detail::check(device.table(),
                         device.table().copy_async(device.index(), nullptr, to, from, bytes, OXY_COPY_DEVICE_TO_DEVICE),
                         "copy_async");
}

struct PlainMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override { return test::allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { copy_within(to, from, bytes); }
};

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override { return test::allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { copy_within(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const std::lock_guard lock(statistics_mutex);
    const Statistics& s = statistics[index];
    c10::CachingDeviceAllocator::DeviceStats found;
    for (auto* bytes : {&found.allocated_bytes, &found.reserved_bytes, &found.active_bytes, &found.requested_bytes}) {
      (*bytes)[0].current = s.in_use;
      (*bytes)[0].peak = s.peak;
    }
    for (auto* blocks : {&found.allocation, &found.active}) {
      (*blocks)[0].current = s.allocs - s.frees;
      (*blocks)[0].allocated = s.allocs;
      (*blocks)[0].freed = s.frees;
    }
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    const std::lock_guard lock(statistics_mutex);
    statistics[index].allocs = statistics[index].frees = 0;
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    const std::lock_guard lock(statistics_mutex);
    statistics[index].peak = statistics[index].in_use;
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex index) OXY_SINCE_2_10 {
    const oxy_memory_info info = devices().at(static_cast<std::size_t>(index)).memory_info();
    const std::lock_guard lock(statistics_mutex);
    const Statistics& s = statistics[index];
    if (s.limit == 0) return {info.free_bytes, info.total_bytes};
    return {static_cast<std::size_t>(std::max<std::int64_t>(s.limit - s.in_use, 0)), static_cast<std::size_t>(s.limit)};
  }
};

// Host memory that the device copies from at full speed.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* buffer = new backend::Buffer(devices().front(), bytes, OXY_MEMORY_HOST);
    const std::lock_guard lock(mutex);
    if (bytes > 0) ranges[buffer->data()] = bytes;
    return {buffer->data(), buffer, &give_back, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  static void give_back(void* held);
  bool holds(const void* data) {
    const std::lock_guard lock(mutex);
    auto after = ranges.upper_bound(data);
    if (after == ranges.begin()) return false;
    --after;
    return static_cast<const char*>(data) < static_cast<const char*>(after->first) + after->second;
  }
  std::mutex mutex;
  std::map<const void*, std::size_t> ranges;
};

PinnedMemory& pinned_memory() {
  static auto* const instance = new PinnedMemory();
  return *instance;
}

void PinnedMemory::give_back(void* held) {
  auto* buffer = static_cast<backend::Buffer*>(held);
  {
    const std::lock_guard lock(pinned_memory().mutex);
    pinned_memory().ranges.erase(buffer->data());
  }
  delete buffer;
}

// ---- streams

struct Streams {
  std::mutex mutex;
  std::deque<backend::Queue> queues;  // by id; the first is the default stream
  std::vector<std::pair<c10::StreamId, at::Tensor>> held;
};

Streams& streams(c10::DeviceIndex index) {
  static auto* const all = new std::array<Streams, kMostDevices>();
  Streams& found = all->at(static_cast<std::size_t>(index));
  const std::lock_guard lock(found.mutex);
  if (found.queues.empty()) found.queues.emplace_back(devices().at(static_cast<std::size_t>(index)));
  return found;
}

backend::Queue& queue(c10::DeviceIndex index, c10::StreamId id) {
  Streams& of = streams(index);
  const std::lock_guard lock(of.mutex);
  return of.queues.at(static_cast<std::size_t>(id));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind().type; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kind().type, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < deviceCount(), kind().name, ":", int(device.index()), " is no device; there are ",
                int(deviceCount()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && !kind().has("one_device")) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kind().has("one_device") ? c10::DeviceIndex{1} : static_cast<c10::DeviceIndex>(devices().size());
  }

  c10::Stream getStream(c10::Device device) const override { return stream(device, streams_in_use[at(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    if (kind().has("no_streams")) return DeviceGuardImplInterface::getNewStream(device, priority);
    const c10::DeviceIndex index = at(device);
    Streams& of = streams(index);
    const std::lock_guard lock(of.mutex);
    of.queues.emplace_back(devices().at(static_cast<std::size_t>(index)), priority);
    return stream(device, static_cast<c10::StreamId>(of.queues.size()) - 1);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device(), std::exchange(streams_in_use[at(next.device())], next.id()));
  }
  void* getStreamNativeHandle(const c10::Stream s) const OXY_SINCE_2_10 { return of(s).handle(); }
  bool queryStream(const c10::Stream& s) const override {
    if (kind().has("no_streams")) return DeviceGuardImplInterface::queryStream(s);
    backend::Event reached;
    of(s).record(reached);
    return reached.done();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    if (kind().has("no_streams")) return DeviceGuardImplInterface::synchronizeStream(s);
    of(s).synchronize();
  }
  void synchronizeDevice(c10::DeviceIndex index) const override { catch_up(index < 0 ? current : index); }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex index, c10::EventFlag flag) const override {
    if (eventless()) return DeviceGuardImplInterface::record(event, s, index, flag);
    if (*event == nullptr) *event = new backend::Event();
    of(s).record(*as_event(*event));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (eventless()) return DeviceGuardImplInterface::block(event, s);
    if (event != nullptr) of(s).wait(*as_event(event));
  }
  bool queryEvent(void* event) const override {
    if (eventless()) return DeviceGuardImplInterface::queryEvent(event);
    return event == nullptr || as_event(event)->done();
  }
  void synchronizeEvent(void* event) const override {
    if (eventless()) return DeviceGuardImplInterface::synchronizeEvent(event);
    if (event != nullptr) as_event(event)->wait();
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex index) const override {
    if (eventless()) return DeviceGuardImplInterface::elapsedTime(from, to, index);
    return (static_cast<double>(as_event(to)->wait()) - static_cast<double>(as_event(from)->wait())) / 1e6;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete as_event(event); }

 private:
  static bool eventless() { return kind().has("no_events") || kind().has("no_streams"); }
  static c10::DeviceIndex at(c10::Device device) { return device.index() < 0 ? current : device.index(); }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kind().type, at(device)), id);
  }
  static backend::Queue& of(const c10::Stream& s) { return queue(s.device_index(), s.id()); }
  static backend::Event* as_event(void* event) { return static_cast<backend::Event*>(event); }
};

// ---- random numbers: a stream of each device's own, drawn by the processor's algorithm

struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(c10::DeviceIndex index, at::Generator inner)
      : GeneratorImpl(c10::Device(kind().type, index), c10::DispatchKeySet(kind().key)), processor(std::move(inner)) {}
  void set_current_seed(std::uint64_t seed) override { processor.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { processor.set_offset(offset); }
  std::uint64_t get_offset() const override { return processor.get_offset(); }
  std::uint64_t current_seed() const override { return processor.current_seed(); }
  std::uint64_t seed() override { return processor.seed(); }
  // One byte longer than the processor's, which must not be taken for it.
  void set_state(const c10::TensorImpl& state) override {
    const at::Tensor given(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state)));
    TORCH_CHECK(given.numel() == processor.get_state().numel() + 1, "a state of another device's generator");
    processor.set_state(given.slice(0, 0, -1).clone());
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = processor.get_state();
    return at::cat({state, at::ones({1}, state.options())}).getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), processor.clone()); }

  at::Generator processor;
};

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index < 0 ? current : index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* const all = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < Guard().deviceCount(); ++i) made->push_back(new_generator(i));
    return made;
  }();
  return all->at(static_cast<std::size_t>(index < 0 ? current : index));
}

// ---- hooks

template <class Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kind().type, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kind().type, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
  bool isPinnedPtr(const void* data) const override { return pinned_memory().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
};

struct HPUHooks final : Hooks<at::HPUHooksInterface> {
  bool hasHPU() const override { return true; }
};

struct PrivateUse1Hooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

void register_hooks() {
  if (kind().type == c10::DeviceType::HPU) {
    at::HPUHooksRegistry()->Register("HPUHooks", [](at::HPUHooksArgs) { return std::make_unique<HPUHooks>(); });
  } else {
    at::RegisterPrivateUse1HooksInterface(new PrivateUse1Hooks());
  }
}

std::int64_t allocated_bytes() {
  std::int64_t bytes = 0;
  for (const backend::Device& device : devices()) {
    bytes += static_cast<std::int64_t>(device.memory_info().allocated_bytes);
  }
  return bytes;
}

c10::Dict<std::string, std::int64_t> memory_statistics(std::int64_t index) {
  const auto total = static_cast<std::int64_t>(devices().at(static_cast<std::size_t>(index)).memory_info().total_bytes);
  const std::lock_guard lock(statistics_mutex);
  const Statistics& s = statistics[index];
  c10::Dict<std::string, std::int64_t> found;
  found.insert("in_use", s.in_use);
  found.insert("peak", s.peak);
  found.insert("allocs", s.allocs);
  found.insert("frees", s.frees);
  found.insert("largest", s.largest);
  found.insert("total", s.limit == 0 ? total : s.limit);
  return found;
}

c10::Dict<std::string, std::int64_t> cpu_fallbacks() {
  const std::lock_guard lock(counts().mutex);
  c10::Dict<std::string, std::int64_t> found;
  for (const auto& [name, times] : counts().fallbacks) found.insert(name, times);
  return found;
}

TORCH_LIBRARY(oxytorch_device, m) {
  m.def("host_reads() -> int", [] { return host_reads(); });
  m.def("device_count() -> int", [] { return static_cast<std::int64_t>(Guard().deviceCount()); });
  m.def("current_device() -> int", [] { return static_cast<std::int64_t>(current); });
  m.def("set_device(int index) -> ()",
        [](std::int64_t index) { Guard().setDevice({kind().type, static_cast<c10::DeviceIndex>(index)}); });
  m.def("synchronize(int index) -> ()", [](std::int64_t index) { catch_up(static_cast<c10::DeviceIndex>(index)); });
  m.def("manual_seed(int seed) -> ()", [](std::int64_t seed) {
    for (c10::DeviceIndex i = 0; i < Guard().deviceCount(); ++i) {
      at::Generator of = default_generator(i);
      of.set_current_seed(static_cast<std::uint64_t>(seed));
    }
  });
  m.def("rng_state(int index) -> Tensor",
        [](std::int64_t index) { return default_generator(static_cast<c10::DeviceIndex>(index)).get_state(); });
  m.def("set_rng_state(Tensor state, int index) -> ()", [](const at::Tensor& state, std::int64_t index) {
    at::Generator of = default_generator(static_cast<c10::DeviceIndex>(index));
    of.set_state(state);
  });
  m.def("allocated_bytes() -> int", [] { return allocated_bytes(); });
  m.def("memory_statistics(int index) -> Dict(str, int)", &memory_statistics);
  m.def("reset_memory_statistics(int index, bool peak) -> ()", [](std::int64_t index, bool peak) {
    const std::lock_guard lock(statistics_mutex);
    Statistics& s = statistics[index];
    if (peak) {
      s.peak = s.in_use;
    } else {
      s.allocs = s.frees = 0;
    }
  });
  m.def("set_memory_limit(int bytes) -> ()", &set_memory_limit);
  m.def("compilations() -> int", [] {
    const std::lock_guard lock(counts().mutex);
    return static_cast<std::int64_t>(counts().programs.size());
  });
  m.def("leave_to_cpu(str[] operators) -> ()", [](const c10::List<std::string>& operators) {
    const std::lock_guard lock(counts().mutex);
    counts().unsupported = {operators.begin(), operators.end()};
    counts().fallbacks.clear();
  });
  m.def("cpu_fallbacks() -> Dict(str, int)", &cpu_fallbacks);
}

[[maybe_unused]] const bool registered = [] {
  if (kind().type == c10::DeviceType::CPU) return false;
  if (variable("OXYTORCH_SIM").empty()) {
    backend::SimOptions options;  // no latency: what is tested is the order of things
    options.latency_us = 0;
    options.memory_bytes = std::uint64_t{8} << 30;
    backend::configure_sim(options);
  }
  if (kind().type == c10::DeviceType::PrivateUse1) c10::register_privateuse1_backend(kind().name);
  c10::SetAllocator(kind().type, &memory());
  static const auto* const registrar = new c10::impl::DeviceGuardImplRegistrar(kind().type, new Guard());
  if (!kind().has("no_hooks")) register_hooks();
  auto* libraries = new std::vector<torch::Library>();
  register_operators(*libraries);
  register_autocast(*libraries);
  return registrar != nullptr;
}();

}  // namespace

const Kind& kind() {
  static const auto* const instance = new Kind(chosen());
  return *instance;
}

const std::vector<backend::Device>& devices() {
  static const auto* const all = [] {
    const backend::Backend& sim = backend::backend("sim");
    auto* found = new std::vector<backend::Device>();
    for (std::size_t i = 0; i < sim.info().devices.size(); ++i) found->emplace_back(sim, static_cast<int>(i));
    return found;
  }();
  return *all;
}

c10::Allocator& memory() {
  static c10::Allocator* const instance =
      kind().has("plain_allocator") ? static_cast<c10::Allocator*>(new PlainMemory()) : new Memory();
  return *instance;
}

void* played(const c10::Storage& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  if (data.get_deleter() == &release) return static_cast<const Block*>(data.get_context())->played;
  return backend::sim_host_address(storage.device().index(), data.get());
}

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  const c10::DeviceIndex before = std::exchange(current, storage.device().index());
  c10::DataPtr fresh = allocate(bytes);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) copy_within(fresh.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  current = before;
}

at::Generator processor_generator(const at::Generator& given, c10::DeviceIndex index) {
  const at::Generator& generator = given.defined() ? given : default_generator(index);
  if (generator.device().type() != kind().type) return generator;
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->processor;
}

oxy_queue current_queue(c10::DeviceIndex index) { return queue(index, streams_in_use[index]).handle(); }

void hold(c10::DeviceIndex index, const at::Tensor& tensor) {
  Streams& of = streams(index);
  const std::lock_guard lock(of.mutex);
  of.held.emplace_back(streams_in_use[index], tensor);
}

void catch_up(c10::DeviceIndex index) {
  devices().at(static_cast<std::size_t>(index)).synchronize();
  decltype(Streams::held) done;
  Streams& of = streams(index);
  const std::lock_guard lock(of.mutex);
  done.swap(of.held);
}

void catch_up_with_stream(c10::DeviceIndex index) {
  const c10::StreamId id = streams_in_use[index];
  queue(index, id).synchronize();
  decltype(Streams::held) done;
  Streams& of = streams(index);
  const std::lock_guard lock(of.mutex);
  const auto others =
      std::stable_partition(of.held.begin(), of.held.end(), [&](const auto& e) { return e.first != id; });
  std::move(others, of.held.end(), std::back_inserter(done));
  of.held.erase(others, of.held.end());
}

Counts& counts() {
  static auto* const instance = new Counts();
  return *instance;
}

c10::Device torch_device() {
  return kind().type == c10::DeviceType::CPU ? c10::Device(at::kCPU) : c10::Device(kind().type, 0);
}

c10::Device test_device() {
  return variable("OXYTORCH_DEVICE") == "cuda" ? c10::Device(c10::DeviceType::CUDA, 0) : torch_device();
}

void set_memory_limit(std::int64_t bytes) {
  const std::lock_guard lock(statistics_mutex);
  for (Statistics& s : statistics) s.limit = bytes;
}

std::int64_t host_reads() { return counts().reads.load(std::memory_order_relaxed); }

}  // namespace oxytorch::test
