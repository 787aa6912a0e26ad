// backends/cuda over a fake driver and a fake NVML: what conformance cannot see from outside.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/driver.h"
#include "fake_cards.h"
#include "oxytorch/backend/device.h"
#include "oxytorch/error.h"

namespace {

using namespace oxytorch::backend;
using namespace oxytorch::test;
using oxytorch::Error;
using oxytorch::ErrorCode;
using oxytorch::test::cuda;  // not the namespace of the driver

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

// --- in this process, on its nine cards ---

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

}  // namespace
