// A CUDA driver without a card: what backends/cuda uses of libcuda.so.1, on host memory, with a thread per stream so
// that work really happens later. Kernels are looked up by name and run on the host (fake_kernels.h). It behaves as
// NVIDIA documents the driver, awkward parts included: pageable memory makes asynchronous copies wait, an error of a
// context stays, an event that is recorded again leaves earlier waits alone.
//
// OXY_FAKE_CUDA sets the scene, entries separated by commas:
//   devices=N memory=BYTES driver=VERSION latency_us=N      the machine; latency of each piece of work
//   init=STATUS                                             what cuInit gives
//   fail=NAME:N:STATUS                                      the Nth call of that function gives STATUS
//   alloc=N copy=N                                          the Nth is out of memory; fails on its stream (999)
//   lost=N lost_status=STATUS                               the device breaks at its Nth piece of work (719)
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/driver.h"
#include "fake_kernels.h"

#define FAKE extern "C" __attribute__((visibility("default"))) int

using namespace oxytorch::backend::cuda;
using std::chrono::steady_clock;

namespace {

constexpr int kMaxDevices = 9;
constexpr Result kCapturedEvent = 907, kCaptureInvalidated = 901;

struct Settings {
  std::atomic<int> devices{1}, driver{13000}, init{0}, lost_status{kLaunchFailed};
  std::atomic<std::uint64_t> memory{std::uint64_t{256} << 20};
  std::atomic<std::int64_t> latency_us{5}, alloc{0}, copy{0}, lost{0}, fail_at{0};
  std::atomic<int> fail_status{0};
  std::string fail_name;
  std::vector<int> visible;  // physical device of each ordinal
};
Settings& settings() {
  static auto* const instance = new Settings();
  return *instance;
}

bool strikes(std::atomic<std::int64_t>& countdown) { return countdown.load() > 0 && countdown.fetch_sub(1) == 1; }

bool configure(const std::string& text) {
  Settings& now = settings();
  now.alloc = now.copy = now.lost = now.fail_at = 0;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto equals = entry.find('=');
    const std::string key = entry.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : entry.substr(equals + 1);
    const long long number = std::atoll(value.c_str());
    if (key == "devices") {
      now.devices = static_cast<int>(number);
    } else if (key == "memory") {
      now.memory = static_cast<std::uint64_t>(number);
    } else if (key == "driver") {
      now.driver = static_cast<int>(number);
    } else if (key == "latency_us") {
      now.latency_us = number;
    } else if (key == "init") {
      now.init = static_cast<int>(number);
    } else if (key == "alloc") {
      now.alloc = number;
    } else if (key == "copy") {
      now.copy = number;
    } else if (key == "lost") {
      now.lost = number;
    } else if (key == "lost_status") {
      now.lost_status = static_cast<int>(number);
    } else if (key == "fail") {
      const auto first = value.find(':'), second = value.rfind(':');
      now.fail_name = value.substr(0, first);
      now.fail_at = std::atoll(value.c_str() + first + 1);
      now.fail_status = std::atoi(value.c_str() + second + 1);
    } else if (!key.empty()) {
      return false;
    }
  }
  return true;
}

// --- memory ---

struct Block {
  std::uint64_t bytes;
  int device;  // -1: pinned host memory
};
struct Memory {
  std::mutex mutex;
  std::map<std::uint64_t, Block> blocks;
  std::array<std::uint64_t, kMaxDevices> used{};
};
Memory& memory() {
  static auto* const instance = new Memory();
  return *instance;
}

// The block that holds all of a range; device -2 where none does.
Block find(std::uint64_t address, std::uint64_t bytes) {
  const std::lock_guard lock(memory().mutex);
  const auto after = memory().blocks.upper_bound(address);
  if (after == memory().blocks.begin()) return {0, -2};
  const auto& [start, block] = *std::prev(after);
  return address - start <= block.bytes && bytes <= block.bytes - (address - start) ? block : Block{0, -2};
}
bool on_device(std::uint64_t address, std::uint64_t bytes) { return find(address, bytes).device >= 0; }
bool pinned_range(const void* host, std::uint64_t bytes) {
  return find(reinterpret_cast<std::uint64_t>(host), bytes).device != -2;
}

std::array<std::atomic<Result>, kMaxDevices> device_errors{};
std::atomic<std::uint64_t> pageable_copies{0}, synchronizations{0}, allocations{0}, events_made{0};

// --- streams, events, graphs ---

struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  Result error = kSuccess;
  steady_clock::time_point time;

  void reach(Result why) {
    const std::lock_guard lock(mutex);
    reached = true;
    error = why;
    time = steady_clock::now();
    changed.notify_all();
  }
  Result wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return reached; });
    return error;
  }
};

struct Work {
  std::function<Result()> run;
  std::shared_ptr<Mark> mark;  // recorded here, also behind an error
};

}  // namespace

struct CUctx_st {
  int device;
};
struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;
  bool captured = false;
};
struct CUgraph_st {
  std::vector<Work> work;
};
struct CUmod_st {};
struct CUfunc_st {
  int kernel;
};

struct CUstream_st {
  explicit CUstream_st(int device) : device(device), worker([this] { run(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex);
      ending = true;
      changed.notify_all();
    }
    worker.join();
  }

  Result enqueue(Work work) {
    const std::lock_guard lock(mutex);
    if (error != kSuccess) return error;
    if (capture != nullptr) {
      capture->work.push_back(std::move(work));
      return kSuccess;
    }
    queue.push_back(std::move(work));
    ++enqueued;
    changed.notify_all();
    return kSuccess;
  }
  Result drain() {
    std::unique_lock lock(mutex);
    if (capture != nullptr) return kCaptureUnsupported;
    const std::uint64_t target = enqueued;
    changed.wait(lock, [&] { return done >= target; });
    return error;
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return ending || !queue.empty(); });
      if (queue.empty()) return;
      Work work = std::move(queue.front());
      queue.pop_front();
      Result seen = error;
      lock.unlock();
      if (seen == kSuccess && work.run) seen = perform(work);
      if (seen == kSuccess) seen = device_errors[static_cast<std::size_t>(device)].load();
      if (work.mark != nullptr) work.mark->reach(seen);
      work = {};
      lock.lock();
      if (error == kSuccess) error = seen;
      ++done;
      changed.notify_all();
    }
  }
  Result perform(const Work& work) const {
    if (const auto us = settings().latency_us.load(); us > 0)
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    if (strikes(settings().lost)) device_errors[static_cast<std::size_t>(device)] = settings().lost_status.load();
    if (const Result broken = device_errors[static_cast<std::size_t>(device)].load(); broken != kSuccess) return broken;
    return work.run();
  }

  const int device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  std::uint64_t enqueued = 0, done = 0;
  bool ending = false;
  Result error = kSuccess;
  std::unique_ptr<CUgraph_st> capture;
  std::thread worker;
};

namespace {

struct State {
  std::mutex mutex;
  std::array<CUctx_st, kMaxDevices> contexts{{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}}};
  std::vector<CUstream_st*> streams;
  std::array<CUstream_st*, kMaxDevices> defaults{};
  std::atomic<int> capturing{0};
};
State& state() {
  static auto* const instance = new State();
  return *instance;
}
thread_local std::vector<CUctx_st*> current;
std::atomic<bool> initialized{false};
std::atomic<pid_t> owner{0};

void set_scene() {
  static const bool once = [] {
    const char* text = std::getenv("OXY_FAKE_CUDA");
    if (!configure(text == nullptr ? "" : text)) std::fprintf(stderr, "OXY_FAKE_CUDA is wrong: %s\n", text);
    Settings& now = settings();
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (visible == nullptr) {
      for (int i = 0; i < now.devices; ++i) now.visible.push_back(i);
    } else {
      std::istringstream list(visible);
      for (std::string entry; std::getline(list, entry, ',');) now.visible.push_back(std::atoi(entry.c_str()));
    }
    return true;
  }();
  static_cast<void>(once);
}

// What every function asks first: the planned failure, and whether there is a driver to talk to.
Result enter(const char* name) {
  Settings& now = settings();
  if (now.fail_at.load() > 0 && now.fail_name == name && strikes(now.fail_at)) return now.fail_status;
  return initialized.load() && owner.load() == getpid() ? kSuccess : kNotInitialized;
}
// The same, and a context that is whole.
Result enter_context(const char* name) {
  if (const Result result = enter(name); result != kSuccess) return result;
  if (current.empty()) return kInvalidContext;
  return device_errors[static_cast<std::size_t>(current.back()->device)].load();
}
// What a graph cannot hold is refused while anything is captured.
Result enter_unsafe(const char* name) {
  if (const Result result = enter_context(name); result != kSuccess) return result;
  return state().capturing.load() > 0 ? kCaptureUnsupported : kSuccess;
}

CUstream_st* stream_of(CUstream_st* stream) {
  if (stream != nullptr) return stream;
  const std::lock_guard lock(state().mutex);
  auto& made = state().defaults[static_cast<std::size_t>(current.back()->device)];
  if (made == nullptr) state().streams.push_back(made = new CUstream_st(current.back()->device));
  return made;
}

Result submit(CUstream_st* stream, std::function<Result()> run) {
  CUstream_st* target = stream_of(stream);
  if (target->device != current.back()->device) return kInvalidHandle;
  return target->enqueue({std::move(run), nullptr});
}

Result copy(void* to, const void* from, std::size_t bytes, CUstream_st* stream) {
  const bool fails = strikes(settings().copy);
  return submit(stream, [=]() -> Result {
    if (fails) return kUnknown;
    std::memcpy(to, from, bytes);
    return kSuccess;
  });
}

}  // namespace

// --- for tests ---

FAKE fake_cuda_configure(const char* text) { return configure(text) ? 0 : 1; }
extern "C" __attribute__((visibility("default"))) unsigned long long fake_cuda_count(const char* what) {
  const std::string name = what;
  return name == "pageable"           ? pageable_copies
         : name == "synchronizations" ? synchronizations
         : name == "events"           ? events_made
                                      : allocations;
}

// --- the driver ---

FAKE cuInit(unsigned) {
  set_scene();
  if (const int result = settings().init; result != 0) return result;
  pid_t nobody = 0;
  if (!owner.compare_exchange_strong(nobody, getpid()) && nobody != getpid()) return kNotInitialized;
  initialized = true;
  return kSuccess;
}
FAKE cuDriverGetVersion(int* version) {
  set_scene();
  *version = settings().driver;
  return kSuccess;
}
FAKE cuGetErrorName(Result result, const char** name) {
  *name = nullptr;
#define FAKE_NAME(ours, theirs, value) \
  if (result == (value) && *name == nullptr && std::strncmp(#theirs, "CUDA_", 5) == 0) *name = #theirs;
  OXY_CUDA_CONSTANTS(FAKE_NAME)
#undef FAKE_NAME
  return *name == nullptr ? kInvalidValue : kSuccess;
}
FAKE cuGetErrorString(Result result, const char** text) {
  *text = "as the fake driver was told";
  return result == kSuccess ? kSuccess : kSuccess;
}
FAKE cuDeviceGetCount(int* count) {
  if (const Result result = enter("cuDeviceGetCount"); result != kSuccess) return result;
  *count = static_cast<int>(settings().visible.size());
  return kSuccess;
}
FAKE cuDeviceGet(int* device, int ordinal) {
  if (const Result result = enter("cuDeviceGet"); result != kSuccess) return result;
  *device = ordinal;
  return ordinal >= 0 && ordinal < static_cast<int>(settings().visible.size()) ? kSuccess : kInvalidDevice;
}
FAKE cuDeviceGetName(char* name, int length, int device) {
  std::snprintf(name, static_cast<std::size_t>(length), "Fake H%d00", device + 1);
  return enter("cuDeviceGetName");
}
FAKE cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = settings().memory;
  return enter("cuDeviceTotalMem_v2");
}
FAKE cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == kAttributeMajor ? 9 : attribute == kAttributeMinor ? 0 : 4;
  return enter("cuDeviceGetAttribute");
}
FAKE cuDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02X:00.0",
                16 + settings().visible[static_cast<std::size_t>(device)]);
  return enter("cuDeviceGetPCIBusId");
}
FAKE cuDevicePrimaryCtxRetain(CUctx_st** context, int device) {
  *context = &state().contexts[static_cast<std::size_t>(device)];
  return enter("cuDevicePrimaryCtxRetain");
}
FAKE cuCtxGetCurrent(CUctx_st** context) {
  *context = current.empty() ? nullptr : current.back();
  return enter("cuCtxGetCurrent");
}
FAKE cuCtxPushCurrent_v2(CUctx_st* context) {
  current.push_back(context);
  return enter("cuCtxPushCurrent_v2");
}
FAKE cuCtxPopCurrent_v2(CUctx_st** context) {
  *context = current.back();
  current.pop_back();
  return enter("cuCtxPopCurrent_v2");
}
FAKE cuCtxGetDevice(int* device) {
  if (const Result result = enter_context("cuCtxGetDevice"); result != kSuccess) return result;
  *device = current.back()->device;
  return kSuccess;
}
FAKE cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  if (const Result result = enter_context("cuMemGetInfo_v2"); result != kSuccess) return result;
  const std::lock_guard lock(memory().mutex);
  *total = settings().memory;
  *free = *total - memory().used[static_cast<std::size_t>(current.back()->device)];
  return kSuccess;
}
FAKE cuMemAlloc_v2(Address* address, std::size_t bytes) {
  if (const Result result = enter_unsafe("cuMemAlloc_v2"); result != kSuccess) return result;
  if (bytes == 0) return kInvalidValue;
  if (strikes(settings().alloc)) return kOutOfMemory;
  const int device = current.back()->device;
  const std::lock_guard lock(memory().mutex);
  auto& used = memory().used[static_cast<std::size_t>(device)];
  if (bytes > settings().memory - used) return kOutOfMemory;
  void* made = ::operator new(bytes, std::align_val_t{512});
  std::memset(made, 0xCD, bytes);  // undefined contents shall look it
  used += bytes;
  *address = reinterpret_cast<Address>(made);
  memory().blocks[*address] = {bytes, device};
  ++allocations;
  return kSuccess;
}
FAKE cuMemFree_v2(Address address) {
  if (const Result result = enter_unsafe("cuMemFree_v2"); result != kSuccess) return result;
  std::vector<CUstream_st*> streams;
  {
    const std::lock_guard lock(state().mutex);
    for (CUstream_st* stream : state().streams) {
      // Work on it may still be under way: the driver waits, so does this one.
      if (stream->device == current.back()->device) stream->drain();
    }
  }
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().blocks.find(address);
  if (found == memory().blocks.end() || found->second.device < 0) return kInvalidValue;
  memory().used[static_cast<std::size_t>(found->second.device)] -= found->second.bytes;
  memory().blocks.erase(found);
  ::operator delete(reinterpret_cast<void*>(address), std::align_val_t{512});
  return kSuccess;
}
FAKE cuMemHostAlloc(void** made, std::size_t bytes, unsigned) {
  if (const Result result = enter_unsafe("cuMemHostAlloc"); result != kSuccess) return result;
  if (bytes > std::size_t{1} << 34) return kOutOfMemory;
  *made = ::operator new(bytes, std::align_val_t{4096});
  const std::lock_guard lock(memory().mutex);
  memory().blocks[reinterpret_cast<Address>(*made)] = {bytes, -1};
  ++allocations;
  return kSuccess;
}
FAKE cuMemFreeHost(void* host) {
  if (const Result result = enter_unsafe("cuMemFreeHost"); result != kSuccess) return result;
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().blocks.find(reinterpret_cast<Address>(host));
  if (found == memory().blocks.end() || found->second.device >= 0) return kInvalidValue;
  memory().blocks.erase(found);
  ::operator delete(host, std::align_val_t{4096});
  return kSuccess;
}
FAKE cuPointerGetAttribute(void* value, int attribute, Address address) {
  if (const Result result = enter_context("cuPointerGetAttribute"); result != kSuccess) return result;
  const int device = find(address, 1).device;
  if (device == -2) return kInvalidValue;
  if (attribute == kPointerDeviceOrdinal) {
    *static_cast<int*>(value) = device < 0 ? current.back()->device : device;
  } else {
    *static_cast<unsigned*>(value) = device < 0 ? 1 : 2;
  }
  return kSuccess;
}
FAKE cuMemcpyHtoDAsync_v2(Address to, const void* from, std::size_t bytes, CUstream_st* stream) {
  if (const Result result = enter_context("cuMemcpyHtoDAsync_v2"); result != kSuccess) return result;
  if (!on_device(to, bytes)) return kInvalidValue;
  if (pinned_range(from, bytes)) return copy(reinterpret_cast<void*>(to), from, bytes, stream);
  ++pageable_copies;
  if (const Result result = stream_of(stream)->drain(); result != kSuccess) return result;
  const auto staged =
      std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  const bool fails = strikes(settings().copy);
  return submit(stream, [=]() -> Result {
    if (fails) return kUnknown;
    std::memcpy(reinterpret_cast<void*>(to), staged->data(), bytes);
    return kSuccess;
  });
}
FAKE cuMemcpyDtoHAsync_v2(void* to, Address from, std::size_t bytes, CUstream_st* stream) {
  if (const Result result = enter_context("cuMemcpyDtoHAsync_v2"); result != kSuccess) return result;
  if (!on_device(from, bytes)) return kInvalidValue;
  const bool waits = !pinned_range(to, bytes);
  const Result result = copy(to, reinterpret_cast<const void*>(from), bytes, stream);
  if (!waits || result != kSuccess) return result;
  ++pageable_copies;
  return stream_of(stream)->drain();
}
FAKE cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t bytes, CUstream_st* stream) {
  if (const Result result = enter_context("cuMemcpyDtoDAsync_v2"); result != kSuccess) return result;
  if (!on_device(to, bytes) || !on_device(from, bytes)) return kInvalidValue;
  return copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, stream);
}
FAKE cuMemcpyPeerAsync(Address to, CUctx_st* to_context, Address from, CUctx_st* from_context, std::size_t bytes,
                       CUstream_st* stream) {
  if (const Result result = enter_context("cuMemcpyPeerAsync"); result != kSuccess) return result;
  if (find(to, bytes).device != to_context->device || find(from, bytes).device != from_context->device) {
    return kInvalidValue;
  }
  return copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, stream);
}
FAKE cuMemsetD8Async(Address to, unsigned char value, std::size_t bytes, CUstream_st* stream) {
  if (const Result result = enter_context("cuMemsetD8Async"); result != kSuccess) return result;
  if (!on_device(to, bytes)) return kInvalidValue;
  return submit(stream, [=]() -> Result {
    std::memset(reinterpret_cast<void*>(to), value, bytes);
    return kSuccess;
  });
}
FAKE cuLaunchHostFunc(CUstream_st* stream, HostFunction function, void* data) {
  if (const Result result = enter_context("cuLaunchHostFunc"); result != kSuccess) return result;
  return submit(stream, [=]() -> Result {
    function(data);
    return kSuccess;
  });
}
FAKE cuStreamCreateWithPriority(CUstream_st** stream, unsigned, int) {
  if (const Result result = enter_context("cuStreamCreateWithPriority"); result != kSuccess) return result;
  *stream = new CUstream_st(current.back()->device);
  const std::lock_guard lock(state().mutex);
  state().streams.push_back(*stream);
  return kSuccess;
}
FAKE cuStreamDestroy_v2(CUstream_st* stream) {
  {
    const std::lock_guard lock(state().mutex);
    std::erase(state().streams, stream);
  }
  delete stream;
  return enter("cuStreamDestroy_v2");
}
FAKE cuStreamSynchronize(CUstream_st* stream) {
  if (const Result result = enter_context("cuStreamSynchronize"); result != kSuccess) return result;
  ++synchronizations;
  return stream_of(stream)->drain();
}
FAKE cuStreamGetCtx(CUstream_st* stream, CUctx_st** context) {
  if (const Result result = enter_context("cuStreamGetCtx"); result != kSuccess) return result;
  *context = stream == nullptr ? current.back() : &state().contexts[static_cast<std::size_t>(stream->device)];
  return kSuccess;
}
FAKE cuStreamIsCapturing(CUstream_st* stream, int* status) {
  if (const Result result = enter_context("cuStreamIsCapturing"); result != kSuccess) return result;
  CUstream_st* target = stream_of(stream);
  const std::lock_guard lock(target->mutex);
  *status = target->capture != nullptr ? 1 : 0;
  return kSuccess;
}
FAKE cuEventCreate(CUevent_st** event, unsigned) {
  if (const Result result = enter_context("cuEventCreate"); result != kSuccess) return result;
  *event = new CUevent_st();
  ++events_made;
  return kSuccess;
}
FAKE cuEventRecord(CUevent_st* event, CUstream_st* stream) {
  if (const Result result = enter_context("cuEventRecord"); result != kSuccess) return result;
  CUstream_st* target = stream_of(stream);
  if (target->device != current.back()->device) return kInvalidHandle;
  auto mark = std::make_shared<Mark>();
  bool captured = false;
  {
    const std::lock_guard lock(target->mutex);
    captured = target->capture != nullptr;
  }
  if (const Result result = target->enqueue({nullptr, mark}); result != kSuccess) return result;
  const std::lock_guard lock(event->mutex);
  event->mark = std::move(mark);
  event->captured = captured;
  return kSuccess;
}
namespace {
std::shared_ptr<Mark> mark_of(CUevent_st* event, bool& captured) {
  const std::lock_guard lock(event->mutex);
  captured = event->captured;
  return event->mark;
}
}  // namespace
FAKE cuStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned) {
  if (const Result result = enter_context("cuStreamWaitEvent"); result != kSuccess) return result;
  bool captured = false;
  const std::shared_ptr<Mark> mark = mark_of(event, captured);
  if (mark == nullptr || captured) return kSuccess;
  return stream_of(stream)->enqueue({[mark] { return mark->wait(); }, nullptr});
}
FAKE cuEventQuery(CUevent_st* event) {
  if (const Result result = enter_context("cuEventQuery"); result != kSuccess) return result;
  bool captured = false;
  const std::shared_ptr<Mark> mark = mark_of(event, captured);
  if (captured) return kCapturedEvent;
  if (mark == nullptr) return kSuccess;
  const std::lock_guard lock(mark->mutex);
  return mark->reached ? mark->error : kNotReady;
}
FAKE cuEventSynchronize(CUevent_st* event) {
  if (const Result result = enter_context("cuEventSynchronize"); result != kSuccess) return result;
  ++synchronizations;
  bool captured = false;
  const std::shared_ptr<Mark> mark = mark_of(event, captured);
  if (captured) return kCapturedEvent;
  return mark == nullptr ? kSuccess : mark->wait();
}
FAKE cuEventElapsedTime(float* milliseconds, CUevent_st* from, CUevent_st* to) {
  if (const Result result = enter_context("cuEventElapsedTime"); result != kSuccess) return result;
  bool captured = false;
  const auto first = mark_of(from, captured), second = mark_of(to, captured);
  if (first == nullptr || second == nullptr) return kInvalidHandle;
  const std::scoped_lock lock(first->mutex);
  if (first == second) {
    *milliseconds = 0;
    return kSuccess;
  }
  const std::lock_guard other(second->mutex);
  if (!first->reached || !second->reached) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(second->time - first->time).count();
  return kSuccess;
}

// --- modules and kernels ---

FAKE cuModuleLoadData(CUmod_st** module, const void* image) {
  if (const Result result = enter_unsafe("cuModuleLoadData"); result != kSuccess) return result;
  static CUmod_st any;
  *module = &any;
  return image == nullptr ? kInvalidImage : kSuccess;
}
FAKE cuModuleGetFunction(CUfunc_st** function, CUmod_st*, const char* name) {
  if (const Result result = enter_context("cuModuleGetFunction"); result != kSuccess) return result;
  const int kernel = fake_kernel(name);
  if (kernel < 0) return kNotFound;
  static std::mutex mutex;
  static std::map<std::string, CUfunc_st> functions;
  const std::lock_guard lock(mutex);
  *function = &functions.try_emplace(name, CUfunc_st{kernel}).first->second;
  return kSuccess;
}
FAKE cuLaunchKernel(CUfunc_st* function, unsigned grid_x, unsigned, unsigned, unsigned block_x, unsigned, unsigned,
                    unsigned shared_bytes, CUstream_st* stream, void** parameters, void**) {
  if (const Result result = enter_context("cuLaunchKernel"); result != kSuccess) return result;
  if (grid_x == 0 || block_x == 0 || block_x > 1024 || shared_bytes > 48 << 10) return kInvalidValue;
  // Arguments are copied at the launch, as the driver does.
  std::function<bool()> run = fake_launch(function->kernel, grid_x, block_x, parameters, on_device);
  return submit(stream, [run = std::move(run)]() -> Result { return run() ? kSuccess : kIllegalAddress; });
}

// --- graphs: what a test needs to capture a stream and run it again ---

FAKE cuStreamBeginCapture_v2(CUstream_st* stream, int) {
  if (const Result result = enter_context("cuStreamBeginCapture_v2"); result != kSuccess) return result;
  const std::lock_guard lock(stream->mutex);
  stream->capture = std::make_unique<CUgraph_st>();
  ++state().capturing;
  return kSuccess;
}
FAKE cuStreamEndCapture(CUstream_st* stream, CUgraph_st** graph) {
  if (const Result result = enter_context("cuStreamEndCapture"); result != kSuccess) return result;
  const std::lock_guard lock(stream->mutex);
  if (stream->capture == nullptr) return kCaptureInvalidated;
  *graph = stream->capture.release();
  --state().capturing;
  return kSuccess;
}
FAKE cuGraphLaunch(CUgraph_st* graph, CUstream_st* stream) {  // an executable graph is the graph itself here
  if (const Result result = enter_context("cuGraphLaunch"); result != kSuccess) return result;
  for (const Work& work : graph->work) {
    if (const Result result = stream_of(stream)->enqueue({work.run, nullptr}); result != kSuccess) return result;
  }
  return kSuccess;
}
FAKE cuGraphDestroy(CUgraph_st* graph) {
  delete graph;
  return enter("cuGraphDestroy");
}
