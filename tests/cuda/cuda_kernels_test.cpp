// The step tail of backends/cuda over a fake driver, which runs the kernels on the processor.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "fake_cards.h"
#include "oxytorch/backend/device.h"
#include "oxytorch/backend_kernels.h"
#include "oxytorch/kernels/step_tail.h"

namespace {

using namespace oxytorch::backend;
using namespace oxytorch::test;
using oxytorch::kernels::StepTailPlan;
using oxytorch::kernels::TailGroup;
using oxytorch::kernels::TailSettings;
using oxytorch::kernels::TailTensor;
using oxytorch::test::cuda;  // not the namespace of the driver

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
