// backends/cuda over a fake driver and a fake NVML: what conformance cannot see from outside.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/driver.h"
#include "oxytorch/backend/device.h"
#include "oxytorch/error.h"
#include "oxytorch/kernels/step_tail.h"

struct CUgraph_st;

namespace {

using namespace oxytorch::backend;
using oxytorch::Error;
using oxytorch::ErrorCode;
using oxytorch::kernels::StepTailPlan;
using oxytorch::kernels::TailGroup;
using oxytorch::kernels::TailSettings;
using oxytorch::kernels::TailTensor;

constexpr const char* kFakes = "OXYTORCH_CUDA_DRIVER=" OXY_FAKE_DRIVER " OXYTORCH_NVML=" OXY_FAKE_NVML_LIBRARY " ";

// --- in a process of its own: what the machine lacks, as the backend tells it ---

struct Result {
  int status = -1;
  std::string output;
};
Result output_of(const std::string& command) {
  Result result;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> buffer;
  while (const std::size_t got = fread(buffer.data(), 1, buffer.size(), pipe)) result.output.append(buffer.data(), got);
  const int status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}
Result run(const std::string& environment, const std::string& only = "contract.table") {
  // Nothing of what this process was given or gave itself.
  const std::string command = "env -u CUDA_VISIBLE_DEVICES -u OXY_FAKE_CUDA -u OXY_FAKE_NVML " + environment +
                              " " OXY_CONFORMANCE " " OXY_CUDA " --timeout 20 --only " + only + " 2>&1";
  return output_of(command);
}

struct Unhappy {
  const char* name;
  std::string environment;
  const char* reason;
};
class Unusable : public testing::TestWithParam<Unhappy> {};

TEST_P(Unusable, SaysWhichThingIsMissing) {
  const Result result = run(GetParam().environment);
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_NE(result.output.find("score 0, 0 device(s); " + std::string(GetParam().reason)), std::string::npos)
      << result.output;
}

const std::string kScene = std::string(kFakes) + "OXY_FAKE_CUDA=";
INSTANTIATE_TEST_SUITE_P(
    Cuda, Unusable,
    testing::Values(
        Unhappy{"NoDriver", "OXYTORCH_CUDA_DRIVER=/nowhere/libcuda.so.1",
                "there is no CUDA driver here: /nowhere/libcuda.so.1: cannot open shared object file"},
        Unhappy{"NoCudaLibraryAtAll", "OXYTORCH_CUDA_DRIVER=" OXY_FAKE_NVML_LIBRARY,
                OXY_FAKE_NVML_LIBRARY " has no cuDriverGetVersion"},
        Unhappy{"MissingSymbol", "OXYTORCH_CUDA_DRIVER=" OXY_FAKE_DRIVER_MISSING,
                "the CUDA driver " OXY_FAKE_DRIVER_MISSING " (CUDA 13.0) has no cuLaunchHostFunc"},
        Unhappy{"OldDriver", kScene + "driver=11040",
                "the CUDA driver is too old: it speaks CUDA 11.4, at least 12.0 is needed"},
        Unhappy{"NoDevice", kScene + "init=100",
                "cuInit failed: CUDA_ERROR_NO_DEVICE (100), as the fake driver was told"},
        Unhappy{
            "Forked", kScene + "init=3",
            "cuInit failed: CUDA_ERROR_NOT_INITIALIZED (3), as the fake driver was told; a process forked from one"},
        Unhappy{"ErrorWithoutAName", kScene + "init=12345", "cuInit failed: unknown status (12345)"},
        Unhappy{"CountFails", kScene + "fail=cuDeviceGetCount:1:999",
                "cuDeviceGetCount failed: CUDA_ERROR_UNKNOWN (999)"},
        Unhappy{"NoDevices", kScene + "devices=0", "the CUDA driver sees no device"},
        Unhappy{"NoneVisible", "CUDA_VISIBLE_DEVICES= " + kScene + "devices=2",
                "the CUDA driver sees no device with CUDA_VISIBLE_DEVICES="}),
    [](const auto& info) { return std::string(info.param.name); });

#define NAME(name, parameters) #name,
const std::vector<std::string> kFunctions{OXY_CUDA_FUNCTIONS(NAME)};
#undef NAME

// Whatever function fails, and with whatever status: the process goes on, and the suite has a verdict.
TEST(Cuda, NoFailureOfTheDriverEndsTheProcessOrHangs) {
  for (const std::string& name : kFunctions) {
    for (const char* status : {"1", "2", "100", "700", "999"}) {
      const Result result = run(kScene + "devices=2,fail=" + name + ":1:" + status, "order.cross_device,copy.peer");
      EXPECT_EQ(result.output.find("CRASH"), std::string::npos) << name << " " << status << "\n" << result.output;
      EXPECT_EQ(result.output.find("HANG"), std::string::npos) << name << " " << status << "\n" << result.output;
      EXPECT_TRUE(result.status == 0 || result.status == 1) << name << " " << status << "\n" << result.output;
    }
  }
}

// --- in this process, with nine cards; a test that breaks one takes one that no other test uses ---

enum Card {
  kFirst,
  kSecond,
  kLostByKernel,
  kLostByDriver,
  kLostToNvml,
  kFull,
  kCardOfFork,
  kWithCounters,
  kLostByAddress
};

void* fake(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  return handle == nullptr ? nullptr : dlsym(handle, name);
}
template <class Function>
Function driver_function(const char* name) {
  return reinterpret_cast<Function>(fake(OXY_FAKE_DRIVER, name));
}
unsigned long long count(const char* what) {
  return driver_function<unsigned long long (*)(const char*)>("fake_cuda_count")(what);
}

const Backend& cuda() {
  static const Backend& loaded = [&]() -> const Backend& {
    setenv("OXYTORCH_CUDA_DRIVER", OXY_FAKE_DRIVER, 1);
    setenv("OXYTORCH_NVML", OXY_FAKE_NVML_LIBRARY, 0);
    // Ordinals and NVML's own order differ: the first card that the process sees is the machine's second.
    setenv("CUDA_VISIBLE_DEVICES", "1,0,2,3,4,5,6,7,8", 1);
    setenv("OXY_FAKE_CUDA", "devices=9,memory=67108864", 1);
    const Backend& backend = Registry::instance().load(OXY_CUDA);
    // As torch has done before anyone makes a stream; and the fake has read its scene.
    EXPECT_EQ(backend.info().score, 90) << backend.info().reason;
    return backend;
  }();
  return loaded;
}

int plan(const char* text) {
  cuda();
  return driver_function<int (*)(const char*)>("fake_cuda_configure")(text);
}

Error caught(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::Internal, "nothing was thrown");
}
bool says(const Error& error, const std::string& part) {
  return std::string(error.what()).find(part) != std::string::npos;
}

std::vector<std::uint8_t> bytes_of(std::size_t count, unsigned seed) {
  std::vector<std::uint8_t> made(count);
  for (std::uint8_t& byte : made) byte = static_cast<std::uint8_t>((seed = seed * 1664525u + 1013904223u) >> 24);
  return made;
}

// A stream that someone else made, as torch does.
class Native {
 public:
  explicit Native(int ordinal) {
    using Retain = int (*)(CUctx_st**, int);
    using Push = int (*)(CUctx_st*);
    using Create = int (*)(CUstream_st**, unsigned, int);
    CUctx_st* context = nullptr;
    driver_function<Retain>("cuDevicePrimaryCtxRetain")(&context, ordinal);
    driver_function<Push>("cuCtxPushCurrent_v2")(context);
    driver_function<Create>("cuStreamCreateWithPriority")(&stream, 1, 0);
  }
  ~Native() {
    CUctx_st* context = nullptr;
    driver_function<int (*)(CUstream_st*)>("cuStreamDestroy_v2")(stream);
    driver_function<int (*)(CUctx_st**)>("cuCtxPopCurrent_v2")(&context);
  }
  CUstream_st* stream = nullptr;
};

oxy_status wrap(int ordinal, CUstream_st* stream, oxy_queue& queue) {
  oxy_queue_options options{};
  options.size = sizeof(options);
  options.flags = OXY_QUEUE_WRAP_NATIVE;
  options.native_handle = stream;
  return cuda().table().queue_create(ordinal, &options, &queue);
}

TEST(Cuda, PropertiesAreTheDrivers) {
  const oxy_device_properties properties = Device(cuda(), kFirst).properties();
  EXPECT_STREQ(properties.name, "Fake H100");
  EXPECT_STREQ(properties.architecture, "sm_90");
  EXPECT_STREQ(properties.torch_device, "cuda");
  EXPECT_EQ(properties.memory_bytes, 67108864u);
  EXPECT_EQ(properties.compute_units, 4u);
  EXPECT_EQ(properties.link_bytes_per_s, std::uint64_t{16} * 3938500000);  // PCI Express 5, 16 lanes
}

TEST(Cuda, PageableCopiesOnAQueueNeverReachTheDriverAsSuch) {
  const Device device(cuda(), kFirst);
  const std::size_t size = (std::size_t{9} << 20) + 5;  // three parts
  const auto source = bytes_of(size, 1);
  std::vector<std::uint8_t> back(size);
  const Buffer buffer(device, size);
  const auto pageable = count("pageable");
  const double staged = device.counter("staged_bytes");
  {
    Queue queue(device);
    for (int turn = 0; turn < 3; ++turn) {
      queue.copy_to_device(buffer.data(), source.data(), size);
      queue.copy_to_host(back.data(), buffer.data(), size);
    }
    queue.synchronize();
  }
  EXPECT_EQ(back, source);
  EXPECT_EQ(count("pageable"), pageable);
  EXPECT_EQ(device.counter("staged_bytes") - staged, 6.0 * static_cast<double>(size));
}

TEST(Cuda, PinnedCopiesGoStraight) {
  const Device device(cuda(), kFirst);
  const Buffer host(device, 1 << 20, OXY_MEMORY_HOST), there(device, 1 << 20);
  std::memset(host.data(), 7, 1 << 20);
  const double staged = device.counter("staged_bytes"), copied = device.counter("copied_bytes");
  Queue queue(device);
  queue.copy_to_device(there.data(), host.data(), 1 << 20);
  queue.fill(there.data(), 9, 1 << 19);
  queue.copy_to_host(host.data(), there.data(), 1 << 20);
  queue.synchronize();
  EXPECT_EQ(static_cast<std::uint8_t*>(host.data())[(1 << 19) - 1], 9);
  EXPECT_EQ(static_cast<std::uint8_t*>(host.data())[1 << 19], 7);
  EXPECT_EQ(device.counter("staged_bytes"), staged);
  EXPECT_EQ(device.counter("copied_bytes") - copied, 2.0 * (1 << 20));
}

TEST(Cuda, WrapsAStreamOfAnother) {
  const oxy_backend& table = cuda().table();
  const Native native(kFirst);
  const Buffer buffer(Device(cuda(), kFirst), 4096);
  std::vector<std::uint8_t> back(4096);
  oxy_queue queue = nullptr;
  ASSERT_EQ(wrap(kFirst, native.stream, queue), OXY_OK) << table.last_error();
  // Work that went into the stream natively comes first.
  using Fill = int (*)(unsigned long long, unsigned char, std::size_t, CUstream_st*);
  ASSERT_EQ(driver_function<Fill>("cuMemsetD8Async")(reinterpret_cast<unsigned long long>(buffer.data()), 3, 4096,
                                                     native.stream),
            0);
  ASSERT_EQ(table.fill_async(kFirst, queue, buffer.data(), 4, 2048), OXY_OK);
  ASSERT_EQ(table.copy_async(kFirst, queue, back.data(), buffer.data(), 4096, OXY_COPY_DEVICE_TO_HOST), OXY_OK);
  EXPECT_EQ(table.queue_destroy(queue), OXY_OK);
  EXPECT_EQ(back[2047], 4);
  EXPECT_EQ(back[2048], 3);
  // The stream is still its owner's.
  EXPECT_EQ(driver_function<Fill>("cuMemsetD8Async")(reinterpret_cast<unsigned long long>(buffer.data()), 5, 4096,
                                                     native.stream),
            0);
  EXPECT_EQ(driver_function<int (*)(CUstream_st*)>("cuStreamSynchronize")(native.stream), 0);
  oxy_queue other = nullptr;
  EXPECT_EQ(wrap(kSecond, native.stream, other), OXY_INVALID_ARGUMENT);
  EXPECT_NE(std::string(table.last_error()).find("is not one of CUDA device 1"), std::string::npos);
  ASSERT_EQ(wrap(kSecond, nullptr, other), OXY_OK) << "the default stream";
  EXPECT_EQ(table.queue_destroy(other), OXY_OK);
}

TEST(Cuda, ACapturedStreamTakesWorkAndRefusesWhatAGraphCannotHold) {
  const oxy_backend& table = cuda().table();
  const Native native(kFirst);
  const Device device(cuda(), kFirst);
  const Buffer buffer(device, 4096);
  std::vector<std::uint8_t> host(4096, 1);
  oxy_queue queue = nullptr;
  ASSERT_EQ(wrap(kFirst, native.stream, queue), OXY_OK) << table.last_error();
  Queue(device).fill(buffer.data(), 1, 4096);
  ASSERT_EQ(driver_function<int (*)(CUstream_st*, int)>("cuStreamBeginCapture_v2")(native.stream, 0), 0);
  const auto waits = count("synchronizations"), allocations = count("allocations");
  EXPECT_EQ(table.fill_async(kFirst, queue, buffer.data(), 8, 4096), OXY_OK);
  EXPECT_EQ(table.copy_async(kFirst, queue, buffer.data(), host.data(), 64, OXY_COPY_HOST_TO_DEVICE),
            OXY_NOT_SUPPORTED);
  EXPECT_NE(std::string(table.last_error()).find("cannot be captured in a graph"), std::string::npos);
  EXPECT_EQ(table.synchronize(kFirst, queue), OXY_INVALID_STATE);
  EXPECT_NE(std::string(table.last_error()).find("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"), std::string::npos);
  EXPECT_EQ(count("allocations"), allocations);
  EXPECT_EQ(count("synchronizations"), waits + 1) << "the one that was refused";
  EXPECT_EQ(table.queue_destroy(queue), OXY_OK) << "does not wait for a stream that is being captured";
  CUgraph_st* graph = nullptr;
  ASSERT_EQ(driver_function<int (*)(CUstream_st*, CUgraph_st**)>("cuStreamEndCapture")(native.stream, &graph), 0);
  ASSERT_EQ(driver_function<int (*)(CUgraph_st*, CUstream_st*)>("cuGraphLaunch")(graph, native.stream), 0);
  ASSERT_EQ(driver_function<int (*)(CUstream_st*)>("cuStreamSynchronize")(native.stream), 0);
  ASSERT_EQ(table.copy_async(kFirst, nullptr, host.data(), buffer.data(), 4096, OXY_COPY_DEVICE_TO_HOST), OXY_OK);
  EXPECT_EQ(host, std::vector<std::uint8_t>(4096, 8));
  driver_function<int (*)(CUgraph_st*)>("cuGraphDestroy")(graph);
}

TEST(Cuda, AKernelsFaultLosesItsDeviceAndNoOther) {
  const Device device(cuda(), kLostByKernel);
  Buffer buffer(device, 4096);
  Queue queue(device);
  ASSERT_EQ(plan("lost=1,lost_status=700"), 0);
  queue.fill(buffer.data(), 1, 4096);
  const Error error = caught([&] { queue.synchronize(); });
  EXPECT_TRUE(says(error, "CUDA device 2 failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)")) << error.what();
  EXPECT_TRUE(says(error, "OXY_DEVICE_LOST")) << error.what();
  EXPECT_TRUE(says(caught([&] { static_cast<void>(device.memory_info()); }), "is lost for the rest of this process: "));
  Device(cuda(), kFirst).synchronize();
  const char* reason = nullptr;
  std::int32_t devices = 0;
  EXPECT_EQ(cuda().table().score(&reason, &devices), 90);
  EXPECT_EQ(devices, 9);
}

TEST(Cuda, ACallsOwnStickyErrorLosesTheDevice) {
  const Device device(cuda(), kLostByDriver);
  const Buffer buffer(device, 64);
  ASSERT_EQ(plan("fail=cuMemAlloc_v2:1:214"), 0);
  EXPECT_TRUE(says(caught([&] { Buffer(device, 64); }), "CUDA_ERROR_ECC_UNCORRECTABLE (214)"));
  EXPECT_TRUE(says(caught([&] { static_cast<void>(device.properties()); }), "OXY_DEVICE_LOST"));
}

TEST(Cuda, AFullDeviceIsOutOfMemoryAndStaysUsable) {
  const Device device(cuda(), kFull);
  std::vector<Buffer> held;
  const Error error = caught([&] {
    while (held.size() < 1000) held.emplace_back(device, 1 << 20);
  });
  EXPECT_EQ(error.code(), ErrorCode::OutOfMemory);
  EXPECT_TRUE(says(error, "cannot allocate 1048576 bytes on CUDA device 5")) << error.what();
  EXPECT_EQ(held.size(), 64u);
  held.clear();
  EXPECT_EQ(device.memory_info().free_bytes, device.memory_info().total_bytes);
}

TEST(Cuda, EventsRunOnTheHostsClock) {
  const Device device(cuda(), kFirst);
  const auto now = [] {
    return static_cast<double>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
  };
  Queue queue(device);
  Event event;
  const double before = now();
  queue.record(event);
  event.wait();
  std::uint64_t time = 0, again = 0;
  ASSERT_EQ(cuda().table().event_wait(nullptr, event.handle(), UINT64_MAX, &time), OXY_OK);
  ASSERT_EQ(cuda().table().event_wait(nullptr, event.handle(), 0, &again), OXY_OK);
  EXPECT_EQ(time, again);
  // The origin was noted within a blocking call.
  EXPECT_GT(static_cast<double>(time), before - 1e9);
  EXPECT_LT(static_cast<double>(time), now() + 1e9);
}

double counter_once_known(const Device& device, const std::string& name) {
  double value = NAN;
  for (int turn = 0; turn < 400 && std::isnan(value = device.counter(name)); ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return value;
}

TEST(Cuda, CountersComeFromTheCardOfThatPciBusId) {
  const Device first(cuda(), kFirst), second(cuda(), kSecond), third(cuda(), kWithCounters);
  EXPECT_EQ(counter_once_known(first, "gpu_utilization"), 41);
  EXPECT_EQ(counter_once_known(second, "gpu_utilization"), 40);
  EXPECT_EQ(counter_once_known(third, "gpu_utilization"), 47);
  EXPECT_EQ(third.counter("memory_used"), 10.0 * (1u << 30));
  EXPECT_EQ(third.counter("power"), 350);
  EXPECT_EQ(third.counter("power_limit"), 700);
  EXPECT_EQ(third.counter("energy"), 5);
  EXPECT_EQ(third.counter("temperature"), 61);
  EXPECT_EQ(third.counter("sm_clock"), 1980e6);
  EXPECT_EQ(third.counter("memory_clock"), 2619e6);
  EXPECT_EQ(third.counter("throttle_reasons"), 0);
  EXPECT_EQ(third.counter("pcie_tx"), 1e6);
  EXPECT_EQ(third.counter("pcie_rx"), 2e6);
  EXPECT_EQ(third.counter("pcie_generation"), 4);
  EXPECT_EQ(third.counter("pcie_width"), 8);
  EXPECT_EQ(third.counter("sm_occupancy"), 30);
  EXPECT_EQ(third.counter("tensor_activity"), 50);
  EXPECT_EQ(third.counter("dram_utilization"), 100);
  EXPECT_EQ(counter_once_known(third, "nvlink_rx"), 3 * counter_once_known(third, "nvlink_tx"));
}

TEST(Cuda, CountersFollowTheCardAndNeverAskItInTheCallersThread) {
  const auto configure = reinterpret_cast<int (*)(const char*)>(fake(OXY_FAKE_NVML_LIBRARY, "fake_nvml_configure"));
  const auto calls = reinterpret_cast<unsigned long long (*)()>(fake(OXY_FAKE_NVML_LIBRARY, "fake_nvml_calls"));
  const Device device(cuda(), kWithCounters);
  EXPECT_EQ(counter_once_known(device, "power"), 350);
  const auto before = calls();
  for (int turn = 0; turn < 10000; ++turn) static_cast<void>(device.counter("power"));
  EXPECT_LT(calls() - before, 1000u);
  configure("power=120000,throttle=72,unsupported=nvmlDeviceGetTemperature");
  for (int turn = 0; turn < 400 && device.counter("power") != 120; ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(device.counter("power"), 120);
  EXPECT_EQ(device.counter("throttle_reasons"), 72);
  EXPECT_TRUE(std::isnan(device.counter("temperature"))) << "not supported is not zero";
  configure("power=350000,throttle=0,unsupported=");
}

TEST(Cuda, ACardThatNvmlLostIsLost) {
  const auto configure = reinterpret_cast<int (*)(const char*)>(fake(OXY_FAKE_NVML_LIBRARY, "fake_nvml_configure"));
  const Device device(cuda(), kLostToNvml);
  EXPECT_EQ(counter_once_known(device, "gpu_utilization"), 44);
  configure("lost=4");
  std::string what;
  for (int turn = 0; turn < 400 && what.empty(); ++turn) {
    try {
      static_cast<void>(device.counters());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    } catch (const Error& error) {
      what = error.what();
    }
  }
  EXPECT_NE(what.find("NVML_ERROR_GPU_IS_LOST"), std::string::npos) << what;
  EXPECT_TRUE(says(caught([&] { Buffer(device, 64); }), "OXY_DEVICE_LOST"));
  configure("lost=-1");
}

TEST(Cuda, AForkedProcessIsToldSo) {
  const oxy_backend& table = cuda().table();
  const Device device(cuda(), kCardOfFork);
  Queue queue(device);
  const pid_t child = fork();
  if (child == 0) {
    void* memory = nullptr;
    const bool refused = table.alloc(kCardOfFork, OXY_MEMORY_DEVICE, 64, &memory) == OXY_INVALID_STATE &&
                         std::strstr(table.last_error(), "forked") != nullptr &&
                         table.synchronize(kCardOfFork, nullptr) == OXY_INVALID_STATE;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(Cuda, TwoThousandMarksNeedFewEventsOfTheDriver) {
  const Device device(cuda(), kFirst);
  Queue queue(device);
  Event event;
  queue.record(event);
  const auto made = count("events");
  for (int turn = 0; turn < 2000; ++turn) queue.record(event);
  event.wait();
  EXPECT_TRUE(event.done());
  EXPECT_LE(count("events") - made, 2u) << "a mark that nobody holds gives its event back";
}

// Not a test: what the next one runs in processes of their own.
TEST(CudaScene, DISABLED_PrintsItsCounters) {
  const Device device(cuda(), kFirst);
  for (int turn = 0; turn < 150 && std::isnan(device.counter("gpu_utilization")); ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  for (const oxy_counter& counter : device.counters()) std::printf("%s is %g\n", counter.name, counter.value);
}

std::string counters_with(const std::string& environment) {
  const std::string command = "exec env " + environment + " /proc/" + std::to_string(getpid()) +
                              "/exe --gtest_also_run_disabled_tests --gtest_filter=CudaScene.* 2>&1";
  return output_of(command).output;
}

TEST(Cuda, WhatNvmlCannotTellIsUnknownAndNothingElse) {
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  const std::string none = counters_with("OXYTORCH_NVML=/nowhere/libnvidia-ml.so.1");
  EXPECT_TRUE(has(none, "allocations is 0") && has(none, "power is nan") && has(none, "sm_occupancy is nan")) << none;
  const std::string refused = counters_with("OXY_FAKE_NVML=init=9");
  EXPECT_TRUE(has(refused, "allocations is 0") && has(refused, "power is nan")) << refused;
  const std::string old = counters_with("OXYTORCH_NVML=" OXY_FAKE_NVML_OLD);
  EXPECT_TRUE(has(old, "power is 350") && has(old, "sm_occupancy is nan")) << old;
  const std::string ampere = counters_with("OXY_FAKE_NVML=gpm=0,temperature=93,throttle=64");
  EXPECT_TRUE(has(ampere, "temperature is 93") && has(ampere, "throttle_reasons is 64")) << ampere;
  EXPECT_TRUE(has(ampere, "dram_utilization is nan")) << ampere;
}

// --- the step tail ---

// Two tensors, one with a group of its own, and all that a round reads and writes, on one device.
class Tail {
 public:
  static constexpr int kNumel[2] = {20011, 77};

  explicit Tail(int ordinal) : device_(cuda(), ordinal) {
    for (int i = 0; i < 2; ++i) {
      const auto numel = static_cast<std::uint64_t>(kNumel[i]);
      for (auto* array : {&param, &grad, &average, &square, &ema}) array->emplace_back(device_, 4 * numel);
      step.emplace_back(device_, 4);
      write(param[i], noise(numel, 10u + static_cast<unsigned>(i), 0.1f));
      for (const auto* array : {&average, &square}) zero((*array)[i]);
      write(ema[i], noise(numel, 10u + static_cast<unsigned>(i), 0.1f));
      zero(step[i]);
    }
    zero(skipped);
    set(1e-3, 1.0f);
    std::array<oxy_tail_tensor, 2> tensors = describe();
    EXPECT_EQ(kernels().tail_create(ordinal, tensors.data(), 2, &tail_), OXY_OK) << cuda().table().last_error();
  }
  ~Tail() { EXPECT_EQ(kernels().tail_destroy(tail_), OXY_OK); }

  std::vector<Buffer> param;

  static const oxy_kernels& kernels() { return *cuda().table().kernels; }

  // What the next round shall see.
  void set(double rate, float scale) {
    write(lr, std::vector<double>{rate});
    write(grad_scale, std::vector<float>{scale});
  }
  void grads(unsigned seed, float scale, bool broken) {
    for (int i = 0; i < 2; ++i) {
      std::vector<float> values = noise(static_cast<std::uint64_t>(kNumel[i]), seed + static_cast<unsigned>(i), scale);
      if (broken) values[5] = INFINITY;
      write(grad[i], values);
    }
    zero(found_inf);
  }
  void configure(oxy_queue queue) {
    std::array<oxy_tail_tensor, 2> tensors = describe();
    std::array<oxy_tail_group, 2> groups{};
    for (oxy_tail_group& group : groups) {
      group.lr_tensor = lr.data();
      group.lr_type = OXY_F64;
      group.beta1 = 0.9;
      group.beta2 = 0.999;
      group.eps = 1e-8;
      group.weight_decay = 0.01;
      group.rule = OXY_RULE_ADAMW;
    }
    groups[1].rule = OXY_RULE_ADAM;
    EXPECT_EQ(kernels().tail_configure(tail_, queue, tensors.data(), 2, groups.data(), 2), OXY_OK)
        << cuda().table().last_error();
  }
  oxy_status round(oxy_queue queue) {
    oxy_tail_settings settings{};
    settings.size = sizeof(settings);
    settings.flags = OXY_TAIL_ZERO_GRAD;
    settings.grad_divisor = 1;
    settings.clip_norm = 0.5;
    settings.ema_decay = 0.99;
    settings.grad_scale = static_cast<const float*>(grad_scale.data());
    settings.found_inf = static_cast<float*>(found_inf.data());
    oxy_tail_results results{};
    results.size = sizeof(results);
    results.count = 2;
    results.grad_norm = static_cast<float*>(norm.data());
    results.skipped = static_cast<std::int64_t*>(skipped.data());
    auto* sum = static_cast<double*>(sums.data());
    auto* said = static_cast<oxy_tail_verdict*>(verdict.data());
    oxy_status status = kernels().tail_measure(tail_, queue, sum);
    if (status == OXY_OK) status = kernels().tail_judge(tail_, queue, sum, &settings, &results, said);
    if (status == OXY_OK) status = kernels().tail_apply(tail_, queue, said, &settings, &results);
    return status;
  }
  // All that must agree, bit by bit.
  std::vector<std::uint8_t> everything() {
    std::vector<std::uint8_t> all = weights_and_state();
    for (const auto* array : {&grad, &step}) {
      for (const Buffer& buffer : *array) append(buffer, all);
    }
    for (const Buffer* buffer : {&found_inf, &norm, &skipped}) append(*buffer, all);
    return all;
  }
  std::vector<std::uint8_t> weights_and_state() {
    std::vector<std::uint8_t> all;
    for (const auto* array : {&param, &average, &square, &ema}) {
      for (const Buffer& buffer : *array) append(buffer, all);
    }
    return all;
  }
  static std::vector<float> noise(std::uint64_t count, unsigned seed, float scale) {
    std::vector<float> values(count);
    for (float& value : values) {
      seed = seed * 1664525u + 1013904223u;
      value = (static_cast<float>(seed >> 8) * 0x1p-24f - 0.5f) * scale;
    }
    return values;
  }

 private:
  void append(const Buffer& buffer, std::vector<std::uint8_t>& all) {
    const std::size_t at = all.size();
    all.resize(at + buffer.bytes());
    Queue queue(device_);
    queue.copy_to_host(all.data() + at, buffer.data(), buffer.bytes());
    queue.synchronize();
  }
  template <class T>
  void write(const Buffer& buffer, const std::vector<T>& values) {
    Queue queue(device_);
    queue.copy_to_device(buffer.data(), values.data(), values.size() * sizeof(T));
    queue.synchronize();
  }
  void zero(const Buffer& buffer) {
    Queue queue(device_);
    queue.fill(buffer.data(), 0, buffer.bytes());
    queue.synchronize();
  }
  std::array<oxy_tail_tensor, 2> describe() {
    std::array<oxy_tail_tensor, 2> tensors{};
    for (unsigned i = 0; i < 2; ++i) {
      oxy_tail_tensor& tensor = tensors[i];
      tensor.param = param[i].data();
      tensor.grad = grad[i].data();
      tensor.state[0] = average[i].data();
      tensor.state[1] = square[i].data();
      tensor.ema = static_cast<float*>(ema[i].data());
      tensor.step = static_cast<float*>(step[i].data());
      tensor.numel = kNumel[i];
      tensor.rows = 1;
      tensor.group = tensor.stream = i;
    }
    return tensors;
  }

  Device device_;
  std::vector<Buffer> grad, average, square, ema, step;
  Buffer lr{device_, 8}, grad_scale{device_, 4}, found_inf{device_, 4}, norm{device_, 4}, skipped{device_, 8},
      sums{device_, 16}, verdict{device_, sizeof(oxy_tail_verdict)};
  oxy_tail tail_ = nullptr;
};

// The same round on the processor's engine.
class HostTail {
 public:
  HostTail() {
    for (int i = 0; i < 2; ++i) {
      const auto numel = static_cast<std::uint64_t>(Tail::kNumel[i]);
      param.push_back(Tail::noise(numel, 10u + static_cast<unsigned>(i), 0.1f));
      ema.push_back(param.back());
      for (auto* array : {&grad, &average, &square}) array->emplace_back(numel);
    }
  }
  void round(unsigned seed, float noise, double rate, float scale, bool broken) {
    std::vector<TailTensor> tensors(2);
    for (unsigned i = 0; i < 2; ++i) {
      grad[i] = Tail::noise(grad[i].size(), seed + i, noise);
      if (broken) grad[i][5] = INFINITY;
      TailTensor& tensor = tensors[i];
      tensor.param = param[i].data();
      tensor.grad = grad[i].data();
      tensor.state[0].data = average[i].data();
      tensor.state[1].data = square[i].data();
      tensor.ema = ema[i].data();
      tensor.step = &step[i];
      tensor.numel = Tail::kNumel[i];
      tensor.group = tensor.stream = i;
    }
    StepTailPlan plan(tensors);
    const double norm = std::sqrt(plan.measure({})) / static_cast<double>(scale);
    TailSettings settings;
    settings.zero_grad = true;
    settings.ema_decay = 0.99;
    settings.grad_multiplier = std::min(1.0, 0.5 / (norm + 1e-6)) / static_cast<double>(scale);
    std::array<TailGroup, 2> groups;
    for (TailGroup& group : groups) {
      group.lr = rate;
      group.weight_decay = 0.01;
    }
    groups[1].rule = oxytorch::kernels::Rule::Adam;
    if (!broken) plan.apply(groups, settings, {});
  }
  std::vector<std::uint8_t> weights_and_state() const {
    std::vector<std::uint8_t> all;
    for (const auto* array : {&param, &average, &square, &ema}) {
      for (const std::vector<float>& values : *array) {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
        all.insert(all.end(), bytes, bytes + values.size() * sizeof(float));
      }
    }
    return all;
  }

 private:
  std::vector<std::vector<float>> param, grad, average, square, ema;
  std::array<float, 2> step{};
};

TEST(Cuda, RoundsOnTheDeviceAreThoseOfTheProcessorBitForBit) {
  Tail there(kFirst);
  HostTail here;
  Queue queue(Device(cuda(), kFirst));
  for (unsigned index = 0; index < 6; ++index) {
    const float scale = index % 2 == 0 ? 1024.0f : 3.0f;
    const double rate = 1e-3 / (1 + index);
    there.set(rate, scale);
    there.grads(7 * index, scale, index == 3);
    there.configure(queue.handle());
    ASSERT_EQ(there.round(queue.handle()), OXY_OK) << cuda().table().last_error();
    queue.synchronize();
    here.round(7 * index, scale, rate, scale, index == 3);
    ASSERT_TRUE(there.weights_and_state() == here.weights_and_state()) << "round " << index;
  }
}

TEST(Cuda, ACapturedRoundIsTheEagerOneWhileRateAndScaleChange) {
  Tail eager(kFirst), captured(kFirst);
  const Native native(kFirst);
  oxy_queue queue = nullptr;
  ASSERT_EQ(wrap(kFirst, native.stream, queue), OXY_OK);
  const auto prepare = [&](unsigned index) {
    const float scale = index % 3 == 0 ? 1024.0f : 64.0f;
    for (Tail* tail : {&eager, &captured}) {
      tail->set(1e-3 / (1 + index % 7), scale);
      tail->grads(100 * index, scale, index % 5 == 3);
    }
  };
  prepare(0);
  for (Tail* tail : {&eager, &captured}) {
    tail->configure(queue);
    ASSERT_EQ(tail->round(queue), OXY_OK) << cuda().table().last_error();
  }
  ASSERT_EQ(cuda().table().synchronize(kFirst, queue), OXY_OK) << cuda().table().last_error();
  const auto allocations = count("allocations"), waits = count("synchronizations");
  ASSERT_EQ(driver_function<int (*)(CUstream_st*, int)>("cuStreamBeginCapture_v2")(native.stream, 0), 0);
  ASSERT_EQ(captured.round(queue), OXY_OK) << cuda().table().last_error();
  CUgraph_st* graph = nullptr;
  ASSERT_EQ(driver_function<int (*)(CUstream_st*, CUgraph_st**)>("cuStreamEndCapture")(native.stream, &graph), 0);
  EXPECT_EQ(count("allocations"), allocations) << "K1";
  EXPECT_EQ(count("synchronizations"), waits) << "K1";
  for (unsigned index = 1; index < 12; ++index) {
    prepare(index);
    ASSERT_EQ(eager.round(queue), OXY_OK);
    ASSERT_EQ(driver_function<int (*)(CUgraph_st*, CUstream_st*)>("cuGraphLaunch")(graph, native.stream), 0);
    ASSERT_EQ(cuda().table().synchronize(kFirst, queue), OXY_OK) << cuda().table().last_error();
    ASSERT_TRUE(eager.everything() == captured.everything()) << "round " << index;
  }
  driver_function<int (*)(CUgraph_st*)>("cuGraphDestroy")(graph);
  EXPECT_EQ(cuda().table().queue_destroy(queue), OXY_OK);
}

TEST(Cuda, KernelsThatCannotBeLoadedAreNotSupported) {
  oxy_tail_tensor tensor{};
  tensor.numel = tensor.rows = 1;
  for (const char* planned : {"fail=cuModuleLoadData:1:209", "fail=cuModuleGetFunction:3:500"}) {
    ASSERT_EQ(plan(planned), 0);
    oxy_tail tail = nullptr;
    EXPECT_EQ(Tail::kernels().tail_create(kWithCounters, &tensor, 1, &tail), OXY_NOT_SUPPORTED);
    EXPECT_EQ(tail, nullptr);
    EXPECT_NE(std::string(cuda().table().last_error()).find("cuModule"), std::string::npos);
  }
  plan("");
}

TEST(Cuda, AKernelThatLeavesItsMemoryLosesTheDevice) {
  Tail tail(kLostByAddress);
  tail.configure(nullptr);
  tail.param[0].reset();
  tail.grads(1, 1, false);
  const oxy_status status = tail.round(nullptr);
  EXPECT_EQ(status, OXY_DEVICE_LOST);
  EXPECT_NE(std::string(cuda().table().last_error()).find("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), std::string::npos);
}

}  // namespace
