#include "oxytorch/backend/sim.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "oxytorch/backend/device.h"
#include "oxytorch/error.h"

namespace oxytorch::backend {
namespace {

using Bytes = std::vector<std::uint8_t>;
using std::chrono::steady_clock;

class Sim : public testing::Test {
 protected:
  void SetUp() override { configure_sim(SimOptions{}); }
  void TearDown() override { configure_sim(SimOptions{}); }
  static ErrorCode code_of(const std::function<void()>& call, const std::string& says) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
      return error.code();
    }
    ADD_FAILURE() << "nothing was thrown";
    return ErrorCode::Internal;
  }
  static double microseconds(const std::function<void()>& call) {
    const auto start = steady_clock::now();
    call();
    return std::chrono::duration<double, std::micro>(steady_clock::now() - start).count();
  }
};

TEST_F(Sim, ReadsItsSettings) {
  const SimOptions options = parse_sim_options(
      "devices=2,memory=64MiB,latency_us=50.5,link_gbps=100,fault=alloc:3+copy:2+lost:9+slow_event:250");
  EXPECT_EQ(options.devices, 2);
  EXPECT_EQ(options.memory_bytes, std::uint64_t{64} << 20);
  EXPECT_EQ(options.latency_us, 50.5);
  EXPECT_EQ(options.link_gbps, 100);
  EXPECT_EQ(options.fail_alloc, 3u);
  EXPECT_EQ(options.fail_copy, 2u);
  EXPECT_EQ(options.lose_device, 9u);
  EXPECT_EQ(options.slow_event_us, 250);
  EXPECT_EQ(parse_sim_options("memory=1GB").memory_bytes, 1000000000u);
  EXPECT_EQ(parse_sim_options("").devices, 1);
}

TEST_F(Sim, RefusesBadSettingsByName) {
  const auto refused = [](const std::string& text, const std::string& says) {
    EXPECT_EQ(code_of([&] { parse_sim_options(text); }, says), ErrorCode::InvalidArgument) << text;
  };
  refused("device=2", "did you mean 'devices'?");
  refused("devices=0", "is not a whole number from 1 to 16");
  refused("devices=17", "is not a whole number from 1 to 16");
  refused("devices=1.5", "is not a whole number");
  refused("devices", "is no number");
  refused("memory=64XB", "64XB");
  refused("memory=50%", "up to 32GiB");
  refused("memory=33GiB", "up to 32GiB");
  refused("latency_us=-1", "is no number of 0 or more");
  refused("latency_us=nan", "is no number of 0 or more");
  refused("latency_us=5ms", "is no number of 0 or more");
  refused("fault=aloc:1", "did you mean 'alloc'?");
}

TEST_F(Sim, HasAsManyDevicesAndBytesAsAsked) {
  configure_sim(parse_sim_options("devices=3,memory=1MiB"));
  EXPECT_EQ(backend("sim").info().devices.size(), 3u);
  const Device last(backend("sim"), 2);
  EXPECT_EQ(last.properties().memory_bytes, 1u << 20);
  const Buffer half(last, 1 << 19);
  EXPECT_EQ(last.memory_info().free_bytes, 1u << 19);
  EXPECT_EQ(code_of([&] { Buffer(last, (1 << 19) + 1); }, "524288 of 1048576 are in use"), ErrorCode::OutOfMemory);
  const Buffer rest(last, 1 << 19);
  const Buffer elsewhere(Device(backend("sim"), 0), 1 << 20);
}

TEST_F(Sim, LatencyAndLinkTakeAtLeastTheirTime) {
  configure_sim(parse_sim_options("latency_us=2000,link_gbps=1"));
  const Device device(backend("sim"));
  Buffer buffer(device, 125000);
  Queue queue(device);
  Bytes host(buffer.bytes());
  EXPECT_GE(microseconds([&] {
              queue.fill(buffer.data(), 0, buffer.bytes());
              queue.fill(buffer.data(), 1, buffer.bytes());
              queue.synchronize();
            }),
            4000);
  // 125,000 bytes at 1 Gb/s are a millisecond.
  EXPECT_GE(microseconds([&] {
              queue.copy_to_device(buffer.data(), host.data(), host.size());
              queue.synchronize();
            }),
            3000);
}

TEST_F(Sim, WorkReallyHappensLater) {
  configure_sim(parse_sim_options("latency_us=20000"));
  const Device device(backend("sim"));
  Buffer buffer(device, 1000);
  Queue queue(device);
  Event event;
  Bytes host(1000, 1);
  queue.copy_to_device(buffer.data(), host.data(), host.size());
  queue.record(event);
  EXPECT_FALSE(event.done());
  // A caller who reuses its memory too early sees it on the device.
  std::fill(host.begin(), host.end(), 2);
  queue.copy_to_host(host.data(), buffer.data(), host.size());
  queue.synchronize();
  EXPECT_EQ(host, Bytes(1000, 2));
}

TEST_F(Sim, FaultsStrikeWhenAsked) {
  configure_sim(parse_sim_options("fault=alloc:2+copy:2"));
  const Device device(backend("sim"));
  Buffer first(device, 1000);
  EXPECT_EQ(code_of([&] { Buffer(device, 1000); }, "as the settings asked"), ErrorCode::OutOfMemory);
  Buffer third(device, 1000);
  Bytes host(1000);
  Queue queue(device), other(device);
  queue.copy_to_device(first.data(), host.data(), 1000);
  queue.synchronize();
  queue.copy_to_device(first.data(), host.data(), 1000);
  EXPECT_EQ(code_of([&] { queue.synchronize(); }, "a copy failed on the device"), ErrorCode::DeviceError);
  EXPECT_EQ(code_of([&] { queue.fill(first.data(), 0, 1); }, "a copy failed"), ErrorCode::DeviceError);
  other.copy_to_device(third.data(), host.data(), 1000);
  other.synchronize();
  EXPECT_EQ(device.counter("failures"), 1);
}

TEST_F(Sim, LostDeviceLeavesTheOthersAndComesBackWithNewSettings) {
  configure_sim(parse_sim_options("devices=2,fault=lost:1"));
  const Device lost(backend("sim"), 0), alive(backend("sim"), 1);
  Buffer here(lost, 100), there(alive, 100);
  Queue queue(lost);
  queue.fill(here.data(), 1, 100);
  EXPECT_EQ(code_of([&] { queue.synchronize(); }, "simulated device 0 is lost"), ErrorCode::DeviceError);
  EXPECT_EQ(code_of([&] { static_cast<void>(lost.memory_info()); }, "is lost"), ErrorCode::DeviceError);
  Queue elsewhere(alive);
  elsewhere.fill(there.data(), 1, 100);
  elsewhere.synchronize();
  configure_sim(SimOptions{});
  EXPECT_EQ(lost.memory_info().allocated_bytes, 100u);
}

TEST_F(Sim, NoticesRangesThatAreNotItsOwn) {
  const Device device(backend("sim"));
  Buffer buffer(device, 1000);
  Bytes host(2000);
  Queue queue(device);
  const auto outside = [&](const std::function<void()>& call) {
    EXPECT_EQ(code_of(call, "do not lie in one live allocation"), ErrorCode::InvalidArgument);
  };
  outside([&] { queue.copy_to_device(buffer.data(), host.data(), 1001); });
  outside([&] { queue.copy_to_host(host.data(), static_cast<char*>(buffer.data()) + 1, 1000); });
  outside([&] { queue.copy_to_device(host.data(), host.data() + 1000, 10); });
  outside([&] { queue.fill(static_cast<char*>(buffer.data()) - 1, 0, 10); });
  queue.synchronize();
}

TEST_F(Sim, NoticesMemoryFreedUnderItsWork) {
  configure_sim(parse_sim_options("latency_us=20000"));
  const Device device(backend("sim"));
  Queue queue(device);
  Buffer buffer(device, 1000);
  queue.fill(buffer.data(), 1, 1000);
  buffer.reset();
  EXPECT_EQ(code_of([&] { queue.synchronize(); }, "freed before it was done"), ErrorCode::InvalidState);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_F(Sim, HostCannotTouchDeviceMemory) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const Buffer buffer(Device(backend("sim")), 1000);
  EXPECT_EXIT(static_cast<volatile char*>(buffer.data())[0] = 1, testing::KilledBySignal(SIGSEGV), "");
}
#endif

#if !defined(__SANITIZE_THREAD__)
TEST_F(Sim, ForkedChildIsToldThatTheThreadsStayedBehind) {
  const Device device(backend("sim"));
  Queue queue(device);
  const pid_t child = fork();
  if (child == 0) {
    const oxy_backend& table = backend("sim").table();
    const oxy_status status = table.synchronize(0, queue.handle());
    const bool told = std::strstr(table.last_error(), "forked") != nullptr;
    _exit(status == OXY_INVALID_STATE && told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  queue.synchronize();
}
#endif

TEST_F(Sim, AddressesComeBackLate) {
  const Device device(backend("sim"));
  void* const first = Buffer(device, 1000).data();
  for (int turn = 0; turn < 100; ++turn) EXPECT_NE(Buffer(device, 1000).data(), first);
}

}  // namespace
}  // namespace oxytorch::backend
