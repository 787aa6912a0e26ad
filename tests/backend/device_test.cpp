#include "oxytorch/backend/device.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "oxytorch/backend/sim.h"
#include "oxytorch/error.h"

namespace oxytorch::backend {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes counted(std::size_t size, std::uint8_t first) {
  Bytes bytes(size);
  std::iota(bytes.begin(), bytes.end(), first);
  return bytes;
}

class DeviceOn : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { configure_sim(SimOptions{}); }
  void TearDown() override { configure_sim(SimOptions{}); }
  const Backend& backend_ = backend(GetParam());
};

TEST_P(DeviceOn, CarriesBytesThereAndBack) {
  const Device device(backend_);
  const Bytes source = counted(100001, 3);
  Bytes seen(source.size());
  {
    Buffer first(device, source.size()), second(device, source.size());
    Queue producer(device), consumer(device, -1);
    Event ready;
    EXPECT_TRUE(ready.done());
    EXPECT_EQ(ready.wait(), 0u);
    consumer.wait(ready);
    producer.copy_to_device(first.data(), source.data(), source.size());
    producer.copy(second.data(), first.data(), source.size(), OXY_COPY_DEVICE_TO_DEVICE);
    producer.fill(first.data(), 0, first.bytes());
    producer.record(ready);
    consumer.wait(ready);
    consumer.copy_to_host(seen.data(), second.data(), seen.size());
    consumer.synchronize();
    EXPECT_EQ(seen, source);
    EXPECT_TRUE(ready.done());
    consumer.copy_to_host(seen.data(), first.data(), seen.size());
    device.synchronize();
    EXPECT_EQ(seen, Bytes(seen.size(), 0));
    EXPECT_GE(device.memory_info().allocated_bytes, 2 * source.size());
  }
  EXPECT_EQ(device.memory_info().allocated_bytes, 0u);
}

TEST_P(DeviceOn, OwnersMoveAndFreeOnce) {
  const Device device(backend_);
  Buffer first(device, 1000);
  void* const data = first.data();
  Buffer second(std::move(first));
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(second.data(), data);
  first = std::move(second);
  EXPECT_EQ(first.data(), data);
  EXPECT_EQ(first.bytes(), 1000u);
  first.reset();
  EXPECT_EQ(first.data(), nullptr);
  first.reset();
  Queue one(device);
  Queue two(std::move(one));
  EXPECT_EQ(one.handle(), nullptr);
  Event event;
  two.record(event);
  Event other(std::move(event));
  EXPECT_TRUE(event.done());
  other.wait();
  two = Queue(device);
  two.synchronize();
  EXPECT_EQ(device.memory_info().allocated_bytes, 0u);
}

TEST_P(DeviceOn, RefusesADeviceThatIsNotThere) {
  EXPECT_THROW(
      {
        try {
          Device(backend_, 1);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::OutOfRange);
          EXPECT_NE(std::string(error.what()).find("has 1 device(s); there is no device 1"), std::string::npos);
          throw;
        }
      },
      Error);
  EXPECT_THROW(Device(backend_, -1), Error);
}

TEST_P(DeviceOn, NoNativeStreamToWrap) {
  try {
    Queue::wrap(Device(backend_), nullptr);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::NotSupported);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceOn, testing::Values("cpu", "sim"),
                         [](const auto& info) { return std::string(info.param); });

ErrorCode code_of(oxy_status status) {
  try {
    detail::check(backend("cpu").table(), status, "call");
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("backend 'cpu', call: "), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(status_name(status)), std::string::npos) << error.what();
    return error.code();
  }
  ADD_FAILURE() << "status " << status << " is no error";
  return ErrorCode::Internal;
}

TEST(Device, StatusesBecomeErrors) {
  EXPECT_EQ(code_of(OXY_INVALID_ARGUMENT), ErrorCode::InvalidArgument);
  EXPECT_EQ(code_of(OXY_OUT_OF_MEMORY), ErrorCode::OutOfMemory);
  EXPECT_EQ(code_of(OXY_NOT_SUPPORTED), ErrorCode::NotSupported);
  EXPECT_EQ(code_of(OXY_INVALID_STATE), ErrorCode::InvalidState);
  EXPECT_EQ(code_of(OXY_DEVICE_ERROR), ErrorCode::DeviceError);
  EXPECT_EQ(code_of(OXY_DEVICE_LOST), ErrorCode::DeviceError);
  EXPECT_EQ(code_of(OXY_INTERNAL), ErrorCode::Internal);
  EXPECT_EQ(code_of(1234), ErrorCode::DeviceError);
  EXPECT_STREQ(status_name(1234), "unknown status");
}

TEST(Device, ErrorsCarryTheBackendsOwnSentence) {
  const Device device(backend("sim"));
  try {
    Buffer(device, std::uint64_t{1} << 40);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::OutOfMemory);
    EXPECT_EQ(std::string(error.what()),
              "backend 'sim', alloc: cannot allocate 1099511627776 bytes: 0 of 268435456 are in use "
              "(OXY_OUT_OF_MEMORY 3)");
  }
}

TEST(Device, EventsStayWithTheirBackend) {
  const Device cpu(backend("cpu")), sim(backend("sim"));
  Queue on_cpu(cpu), on_sim(sim);
  Event event;
  on_sim.record(event);
  EXPECT_THROW(on_cpu.wait(event), Error);
  EXPECT_THROW(on_cpu.record(event), Error);
}

TEST(Device, CountersByName) {
  configure_sim(SimOptions{});
  const Device device(backend("sim"));
  Buffer buffer(device, 64);
  Queue queue(device);
  const Bytes host(64);
  for (int turn = 0; turn < 3; ++turn) queue.copy_to_device(buffer.data(), host.data(), host.size());
  queue.synchronize();
  EXPECT_EQ(device.counter("copies"), 3);
  EXPECT_EQ(device.counter("copied_bytes"), 192);
  EXPECT_EQ(device.counter("failures"), 0);
  EXPECT_THROW(static_cast<void>(device.counter("watts")), Error);
  EXPECT_TRUE(Device(backend("cpu")).counters().empty());
}

// A device with the queue group NULL: queues are the calling thread, events are reached.
TEST(Device, SynchronousBackendNeedsNoQueues) {
  static oxy_backend table = backend("cpu").table();
  table.name = "test-synchronous";
  table.queue_create = nullptr;
  table.queue_destroy = nullptr;
  table.event_record = nullptr;
  table.event_wait = nullptr;
  table.event_destroy = nullptr;
  table.synchronize = nullptr;
  const Device device(Registry::instance().add(&table, "a test"));
  const Bytes source = counted(1000, 9);
  Bytes seen(source.size());
  Buffer buffer(device, source.size());
  Queue queue(device);
  Event event;
  queue.copy_to_device(buffer.data(), source.data(), source.size());
  queue.record(event);
  EXPECT_TRUE(event.done());
  queue.wait(event);
  queue.copy_to_host(seen.data(), buffer.data(), seen.size());
  EXPECT_EQ(seen, source);
  queue.synchronize();
  device.synchronize();
  EXPECT_THROW(Queue::wrap(device, nullptr), Error);
  // The calling thread itself waits for work of another backend.
  configure_sim(parse_sim_options("fault=slow_event:2000"));
  Event slow;
  Queue sim(Device(backend("sim")));
  sim.record(slow);
  queue.wait(slow);
  EXPECT_TRUE(slow.done());
  configure_sim(SimOptions{});
}

}  // namespace
}  // namespace oxytorch::backend
