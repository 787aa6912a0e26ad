// Native kernels (oxytorch/backend_kernels.h), where a device has them: the step tail against an evaluation in fp64.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>
#include "oxytorch/backend_kernels.h"

#include "suite.h"

namespace conformance {
namespace {

using Floats = std::vector<float>;

const oxy_kernels& kernels_of(const Subject& subject) {
  const oxy_kernels* kernels = subject.table.kernels;
  if (kernels == nullptr) throw NotApplicable{"the device has no native kernels"};
  if (kernels->size < sizeof(oxy_kernels) || kernels->tail_create == nullptr) {
    throw NotApplicable{"the device has no native step tail"};
  }
  return *kernels;
}

Floats draw(std::size_t count, std::uint32_t seed, double scale, bool positive = false) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  Floats values(count);
  for (float& value : values) {
    const double drawn = scale * normal(random);
    value = static_cast<float>(positive ? std::abs(drawn) : drawn);
  }
  return values;
}

template <class T>
Bytes as_bytes(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <class T>
std::vector<T> values_in(const Memory& memory, std::size_t count) {
  const Bytes bytes = memory.read(count * sizeof(T));
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}
template <class T>
T value_in(const Memory& memory) {
  return values_in<T>(memory, 1).front();
}

// One fp32 parameter with all that the step tail may keep for it.
struct Parameter {
  Parameter(const Subject& subject, std::size_t elements, std::uint32_t seed)
      : count(elements),
        param_memory(subject, 4 * count),
        grad_memory(subject, 4 * count),
        ema_memory(subject, 4 * count),
        copy_memory(subject, 2 * count),
        step_memory(subject, 4),
        first_memory(subject, 4 * count),
        second_memory(subject, 4 * count) {
    param = draw(count, seed, 1);
    grad = draw(count, seed + 1, 1e-2);
    ema = draw(count, seed + 2, 1);
    first = draw(count, seed + 3, 1e-2);
    second = draw(count, seed + 4, 1e-4, true);
    param_memory.write(as_bytes(param));
    grad_memory.write(as_bytes(grad));
    ema_memory.write(as_bytes(ema));
    copy_memory.fill(0x11);
    first_memory.write(as_bytes(first));
    second_memory.write(as_bytes(second));
    step_memory.write(as_bytes(Floats{step}));
  }
  [[nodiscard]] oxy_tail_tensor view(oxy_tail_rule rule, std::uint32_t stream) const {
    oxy_tail_tensor t{};
    t.param = param_memory.at();
    t.grad = grad_memory.at();
    t.copy = copy_memory.at();
    t.ema = reinterpret_cast<float*>(ema_memory.at());
    t.step = reinterpret_cast<float*>(step_memory.at());
    if (rule != OXY_RULE_ADAGRAD) t.state[0] = first_memory.at();
    if (rule != OXY_RULE_SGD && rule != OXY_RULE_LION) t.state[1] = second_memory.at();
    t.numel = static_cast<std::int64_t>(count);
    t.rows = 1;
    t.stream = stream;
    t.copy_type = OXY_BF16;
    return t;
  }
  // Every byte that a skipped round must leave alone.
  [[nodiscard]] Bytes all() const {
    Bytes bytes;
    for (const Memory* memory :
         {&param_memory, &ema_memory, &copy_memory, &step_memory, &first_memory, &second_memory}) {
      const Bytes part = memory->read(memory->size());
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return bytes;
  }

  std::size_t count;
  float step = 3;
  Floats param, grad, ema, first, second;
  Memory param_memory, grad_memory, ema_memory, copy_memory, step_memory, first_memory, second_memory;
};

oxy_tail_group group_of(oxy_tail_rule rule) {
  oxy_tail_group group{};
  group.lr = 3e-2;
  group.beta1 = 0.9;
  group.beta2 = 0.99;
  group.eps = 1e-8;
  group.weight_decay = 0.1;
  group.momentum = 0.9;
  group.dampening = 0.2;
  group.lr_decay = 0.01;
  group.rule = rule;
  return group;
}

// A tail over three parameters, the second of several chunks' length, and the memory of its results.
class Tail {
 public:
  explicit Tail(const Subject& subject, oxy_tail_rule rule = OXY_RULE_ADAMW)
      : subject_(subject),
        kernels_(kernels_of(subject)),
        group(group_of(rule)),
        sums(subject, 8 * kCount),
        verdict(subject, sizeof(oxy_tail_verdict)),
        scalars(subject, 64),
        norms(subject, 4 * kCount * 3) {
    parameters.emplace_back(std::make_unique<Parameter>(subject, 33, 1));
    parameters.emplace_back(std::make_unique<Parameter>(subject, 40001, 11));
    parameters.emplace_back(std::make_unique<Parameter>(subject, 1, 21));
    for (std::uint32_t i = 0; i < kCount; ++i) tensors.push_back(parameters[i]->view(rule, i));
    settings.size = sizeof(settings);
    settings.grad_divisor = 1;
    settings.ema_decay = 0.9;
    settings.agc_eps = 1e-3;
    results.size = sizeof(results);
    results.count = kCount;
    scalars.fill(0);
    norms.fill(0);
    results.grad_norm = scalar(0);
    results.found_inf = scalar(4);
    results.applied = scalar(8);
    results.skipped = reinterpret_cast<std::int64_t*>(scalars.at(16));
    results.grad_norms = reinterpret_cast<float*>(norms.at());
    results.param_norms = reinterpret_cast<float*>(norms.at(4 * kCount));
    results.update_norms = reinterpret_cast<float*>(norms.at(8 * kCount));
    expect_ok(subject, kernels_.tail_create(0, tensors.data(), kCount, &handle_), "tail_create");
    expect(handle_ != nullptr, "tail_create gives a tail", "NULL");
  }
  ~Tail() {
    if (handle_ != nullptr) kernels_.tail_destroy(handle_);
  }
  Tail(const Tail&) = delete;
  Tail& operator=(const Tail&) = delete;

  void round(oxy_queue queue = nullptr) {
    expect_ok(subject_, kernels_.tail_configure(handle_, queue, tensors.data(), kCount, &group, 1), "tail_configure");
    auto* const sum = reinterpret_cast<double*>(sums.at());
    auto* const found = reinterpret_cast<oxy_tail_verdict*>(verdict.at());
    expect_ok(subject_, kernels_.tail_measure(handle_, queue, sum), "tail_measure");
    expect_ok(subject_, kernels_.tail_judge(handle_, queue, sum, &settings, &results, found), "tail_judge");
    expect_ok(subject_, kernels_.tail_apply(handle_, queue, found, &settings, &results), "tail_apply");
  }
  void destroy() {
    expect_ok(subject_, kernels_.tail_destroy(handle_), "tail_destroy");
    handle_ = nullptr;
  }

  // One fp32 value of device memory, of 16 there are, the first eight of which are taken.
  [[nodiscard]] float* scalar(std::uint64_t offset) const { return reinterpret_cast<float*>(scalars.at(offset)); }
  float* input(std::uint64_t index, float value) const {
    scalars.write(as_bytes(Floats{value}), 32 + 4 * index);
    return scalar(32 + 4 * index);
  }
  [[nodiscard]] float result(const float* at) const {
    const Bytes bytes =
        scalars.read(4, static_cast<std::uint64_t>(reinterpret_cast<const std::uint8_t*>(at) - scalars.at()));
    float value = 0;
    std::memcpy(&value, bytes.data(), 4);
    return value;
  }
  [[nodiscard]] std::int64_t skipped() const {
    const Bytes bytes = scalars.read(8, 16);
    std::int64_t value = 0;
    std::memcpy(&value, bytes.data(), 8);
    return value;
  }
  [[nodiscard]] double norm() const {
    double sum = 0;
    for (const auto& p : parameters) {
      for (const float g : p->grad) sum += static_cast<double>(g) * g;
    }
    return std::sqrt(sum);
  }

  static constexpr std::uint32_t kCount = 3;

 private:
  const Subject& subject_;
  const oxy_kernels& kernels_;
  oxy_tail handle_ = nullptr;

 public:
  oxy_tail_group group;
  std::vector<std::unique_ptr<Parameter>> parameters;
  std::vector<oxy_tail_tensor> tensors;
  oxy_tail_settings settings{};
  oxy_tail_results results{};
  Memory sums, verdict, scalars, norms;
};

struct Expected {
  double weight, first, second;
  double terms;  // magnitude of the update's parts: a sum that cancels has the error of its terms
};

// One element of one step in fp64, by the formulas of torch.optim.
Expected evaluate(const oxy_tail_group& g, double step, double p, double grad, double first, double second) {
  const bool decoupled = g.rule == OXY_RULE_ADAMW || g.rule == OXY_RULE_LION;
  double size = std::abs(grad);
  if (decoupled) {
    p *= 1 - g.lr * g.weight_decay;
  } else {
    grad += g.weight_decay * p;
    size += std::abs(g.weight_decay * p);
  }
  double lr = g.lr;
  double update = grad;
  switch (g.rule) {
    case OXY_RULE_ADAMW:
    case OXY_RULE_ADAM: {
      size = g.beta1 * std::abs(first) + (1 - g.beta1) * size;
      first = g.beta1 * first + (1 - g.beta1) * grad;
      second = g.beta2 * second + (1 - g.beta2) * grad * grad;
      const double denominator = std::sqrt(second) / std::sqrt(1 - std::pow(g.beta2, step)) + g.eps;
      update = first / denominator;
      size /= denominator;
      lr /= 1 - std::pow(g.beta1, step);
      break;
    }
    case OXY_RULE_SGD:
      size = g.momentum * std::abs(first) + (1 - g.dampening) * size;
      first = g.momentum * first + (1 - g.dampening) * grad;
      update = first;
      break;
    case OXY_RULE_LION: {
      const double direction = g.beta1 * first + (1 - g.beta1) * grad;
      first = g.beta2 * first + (1 - g.beta2) * grad;
      update = direction > 0 ? 1 : direction < 0 ? -1 : 0;
      size = 1;
      break;
    }
    case OXY_RULE_ADAGRAD:
      second += grad * grad;
      update = grad / (std::sqrt(second) + g.eps);
      size /= std::sqrt(second) + g.eps;
      lr /= 1 + (step - 1) * g.lr_decay;
      break;
    default:
      second = g.beta2 * second + (1 - g.beta2) * grad * grad;
      size = g.momentum * std::abs(first) + size / (std::sqrt(second) + g.eps);
      first = g.momentum * first + grad / (std::sqrt(second) + g.eps);
      update = first;
      break;
  }
  return {p - lr * update, first, second, lr * size};
}

void expect_near(double seen, double wanted, double bound, const std::string& what) {
  expect(std::abs(seen - wanted) <= bound, what + " " + std::to_string(wanted) + " within " + std::to_string(bound),
         std::to_string(seen));
}

double ulp(double magnitude) {
  return std::ldexp(1.0, (magnitude == 0 ? -126 : std::max(std::ilogb(magnitude), -126)) - 23);
}

float from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value = 0;
  std::memcpy(&value, &wide, 4);
  return value;
}

// The parameters after one applied round in which each gradient was multiplied by `multiplier`.
void expect_step(const Tail& tail, double multiplier) {
  for (std::size_t k = 0; k < tail.parameters.size(); ++k) {
    const Parameter& p = *tail.parameters[k];
    const std::string name = "parameter " + std::to_string(k) + ", ";
    const Floats param = values_in<float>(p.param_memory, p.count), ema = values_in<float>(p.ema_memory, p.count);
    const Floats first = values_in<float>(p.first_memory, p.count), second = values_in<float>(p.second_memory, p.count);
    const auto copy = values_in<std::uint16_t>(p.copy_memory, p.count);
    const float step = value_in<float>(p.step_memory);
    expect(step == p.step + 1, name + "step " + std::to_string(p.step + 1), std::to_string(step));
    for (std::size_t i = 0; i < p.count; ++i) {
      const double grad = multiplier * static_cast<double>(p.grad[i]);
      const Expected e = evaluate(tail.group, step, p.param[i], grad, p.first[i], p.second[i]);
      const std::string place = name + "element " + std::to_string(i) + ": ";
      const double size = std::max({std::abs(static_cast<double>(p.param[i])), std::abs(e.weight), e.terms});
      expect_near(param[i], e.weight, 8 * ulp(size), place + "weight");
      const double state = std::abs(grad) + tail.group.weight_decay * std::abs(static_cast<double>(p.param[i]));
      if (tail.tensors[k].state[0] != nullptr) {
        const double error = tail.group.rule == OXY_RULE_RMSPROP ? e.terms / tail.group.lr : state;
        expect_near(first[i], e.first, 8 * ulp(std::abs(static_cast<double>(p.first[i])) + error), place + "state[0]");
      }
      if (tail.tensors[k].state[1] != nullptr) {
        expect_near(second[i], e.second, 8 * ulp(static_cast<double>(p.second[i]) + state * state), place + "state[1]");
      }
      const double average =
          static_cast<double>(p.ema[i]) + (1 - tail.settings.ema_decay) * (static_cast<double>(param[i]) - p.ema[i]);
      expect_near(ema[i], average, 2 * ulp(std::abs(static_cast<double>(p.ema[i])) + std::abs(param[i])),
                  place + "average");
      // Half a unit of bf16, which has 16 bits fewer.
      expect_near(from_bf16(copy[i]), param[i], 0x1p15 * ulp(param[i]), place + "copy");
    }
  }
}

void rules(const Subject& subject) {
  for (const oxy_tail_rule rule :
       {OXY_RULE_ADAMW, OXY_RULE_ADAM, OXY_RULE_SGD, OXY_RULE_LION, OXY_RULE_ADAGRAD, OXY_RULE_RMSPROP}) {
    Tail tail(subject, static_cast<oxy_tail_rule>(rule));
    tail.round();
    expect_step(tail, 1);
  }
}

void verdict(const Subject& subject) {
  Tail tail(subject);
  const double scale = 1024.0 * 4;
  const double norm = tail.norm() / scale;
  tail.settings.grad_divisor = 4;
  tail.settings.clip_norm = norm / 3;
  tail.settings.grad_scale = tail.input(0, 1024);
  tail.settings.found_inf = tail.input(1, 0);
  tail.settings.flags = OXY_TAIL_ZERO_GRAD | OXY_TAIL_COLLECT;
  tail.round();
  const auto found = value_in<oxy_tail_verdict>(tail.verdict);
  const double multiplier = tail.settings.clip_norm / (norm + 1e-6) / scale;
  expect_near(found.norm, norm, 1e-12 * norm, "verdict.norm");
  expect_near(found.multiplier, multiplier, 1e-11 * multiplier, "verdict.multiplier");
  expect_near(found.inverse, 1 / scale, 1e-15 / scale, "verdict.inverse");
  expect(found.skip == 0, "verdict.skip 0", std::to_string(found.skip));
  expect_near(tail.result(tail.results.grad_norm), norm, 1e-6 * norm, "grad_norm");
  expect(tail.result(tail.results.applied) == 1, "applied 1", std::to_string(tail.result(tail.results.applied)));
  expect_step(tail, multiplier);
  const Floats norms = values_in<float>(tail.norms, Tail::kCount * 3);
  for (std::size_t k = 0; k < Tail::kCount; ++k) {
    const Parameter& p = *tail.parameters[k];
    double grad = 0, weight = 0, update = 0;
    const Floats param = values_in<float>(p.param_memory, p.count);
    for (std::size_t i = 0; i < p.count; ++i) {
      grad += static_cast<double>(p.grad[i]) * p.grad[i];
      weight += static_cast<double>(param[i]) * param[i];
      update += std::pow(static_cast<double>(param[i]) - p.param[i], 2);
    }
    const std::string of = " of parameter " + std::to_string(k);
    expect_near(norms[k], std::sqrt(grad) / scale, 1e-6 * std::sqrt(grad) / scale, "grad_norms" + of);
    expect_near(norms[Tail::kCount + k], std::sqrt(weight), 1e-5 * std::sqrt(weight), "param_norms" + of);
    expect_near(norms[2 * Tail::kCount + k], std::sqrt(update), 1e-5 * std::sqrt(update), "update_norms" + of);
    expect_same(p.grad_memory.read(4 * p.count), Bytes(4 * p.count, 0), "gradients that were to be zeroed");
  }
}

void limits(const Subject& subject) {
  Tail tail(subject, OXY_RULE_SGD);
  tail.group.weight_decay = 0;
  tail.group.lr = 0.5;
  tail.settings.agc = 1e-3;
  tail.settings.clip_value = 1e-3;
  tail.round();
  for (const auto& p : tail.parameters) {
    double grad = 0, weight = 0;
    for (std::size_t i = 0; i < p->count; ++i) {
      grad += static_cast<double>(p->grad[i]) * p->grad[i];
      weight += static_cast<double>(p->param[i]) * p->param[i];
    }
    const double factor = std::min(1.0, 1e-3 * std::max(std::sqrt(weight), 1e-3) / std::max(std::sqrt(grad), 1e-6));
    const Floats param = values_in<float>(p->param_memory, p->count);
    for (std::size_t i = 0; i < p->count; ++i) {
      const double limited = std::clamp(factor * p->grad[i], -1e-3, 1e-3);
      const Expected e = evaluate(tail.group, 4, p->param[i], limited, p->first[i], 0);
      expect_near(param[i], e.weight, 8 * ulp(std::max(std::abs(e.weight), std::abs(static_cast<double>(p->param[i])))),
                  "a weight after adaptive clipping and clipping by value");
    }
  }
}

void skip(const Subject& subject) {
  for (int reason = 0; reason < 4; ++reason) {
    Tail tail(subject);
    tail.round();  // what a first round sets up is there
    std::vector<Bytes> before;
    for (const auto& p : tail.parameters) before.push_back(p->all());
    if (reason == 0) tail.settings.skip = tail.input(0, 1);
    if (reason == 1) tail.settings.found_inf = tail.input(0, 1);
    if (reason == 2) tail.settings.norm_limit = tail.input(0, static_cast<float>(tail.norm() / 2));
    if (reason == 3) {
      tail.settings.found_inf = tail.input(0, 0);
      tail.parameters[1]->grad_memory.write(as_bytes(Floats{std::numeric_limits<float>::infinity()}), 4 * 40000);
    }
    tail.settings.flags = OXY_TAIL_ZERO_GRAD;
    tail.round();
    for (std::size_t k = 0; k < before.size(); ++k) {
      expect_same(tail.parameters[k]->all(), before[k],
                  "parameter " + std::to_string(k) + " over a skipped round, reason " + std::to_string(reason));
      expect_same(tail.parameters[k]->grad_memory.read(4), Bytes(4, 0), "its gradient, which is zeroed all the same");
    }
    const bool bad = reason == 1 || reason == 3;
    expect(tail.result(tail.results.applied) == 0, "applied 0", std::to_string(tail.result(tail.results.applied)));
    expect(tail.result(tail.results.found_inf) == (bad ? 1 : 0), "found_inf for inf and NaN alone",
           std::to_string(tail.result(tail.results.found_inf)));
    if (bad) {
      const float told = tail.result(tail.settings.found_inf);
      expect(told == 1, "settings.found_inf 1", std::to_string(told));
    }
    expect(tail.skipped() == 1, "skipped 1", std::to_string(tail.skipped()));
  }
}

void order(const Subject& subject) {
  subject.need_queues();
  Tail tail(subject);
  std::vector<Bytes> gradients;
  for (const auto& p : tail.parameters) {
    gradients.push_back(as_bytes(p->grad));
    p->grad_memory.fill(0);
  }
  {
    const Queue queue(subject);
    const Load load(subject);
    load.enqueue(queue);
    for (std::size_t k = 0; k < gradients.size(); ++k) {
      queue.copy(tail.parameters[k]->grad_memory.at(), gradients[k].data(), gradients[k].size(),
                 OXY_COPY_HOST_TO_DEVICE);
    }
    tail.round(queue.handle());
    queue.synchronize();
  }
  expect_step(tail, 1);
}

void learning_rate(const Subject& subject) {
  Tail tail(subject);
  tail.group.lr_tensor = tail.input(0, 0.01F);
  tail.group.lr_type = OXY_F32;
  tail.round();
  tail.group.lr = static_cast<double>(0.01F);
  expect_step(tail, 1);
}

void absent_gradient(const Subject& subject) {
  Tail tail(subject);
  tail.tensors[1].grad = nullptr;
  const Bytes before = tail.parameters[1]->all();
  tail.sums.fill(0xFF);
  tail.round();
  expect_same(tail.parameters[1]->all(), before, "a parameter without a gradient");
  const auto sums = values_in<double>(tail.sums, Tail::kCount);
  expect(sums[1] == 0, "the sum of no gradient is 0", std::to_string(sums[1]));
  for (const int k : {0, 2}) {
    const double sum = sums[static_cast<std::size_t>(k)];
    expect(sum > 0, "the sum of gradient " + std::to_string(k) + " is above 0", std::to_string(sum));
  }
}

void arguments(const Subject& subject) {
  const oxy_kernels& kernels = kernels_of(subject);
  Tail good(subject);
  oxy_tail tail = nullptr;
  const auto refused = [&](oxy_status status, const std::string& call) {
    expect_status(subject, status, OXY_INVALID_ARGUMENT, call);
    const char* error = subject.table.last_error();
    expect(error != nullptr && *error != '\0', call + " leaves a sentence", "none");
  };
  refused(kernels.tail_create(0, good.tensors.data(), Tail::kCount, nullptr), "tail_create into NULL");
  refused(kernels.tail_create(-1, good.tensors.data(), Tail::kCount, &tail), "tail_create on device -1");
  refused(kernels.tail_create(0, nullptr, 1, &tail), "tail_create of NULL tensors");
  refused(kernels.tail_destroy(nullptr), "tail_destroy of NULL");
  refused(kernels.tail_configure(nullptr, nullptr, nullptr, 0, nullptr, 0), "tail_configure of NULL");
  oxy_tail_tensor bad = good.tensors[0];
  bad.rows = 2;  // of 33 elements
  refused(kernels.tail_create(0, &bad, 1, &tail), "tail_create with rows that do not divide the elements");
  bad = good.tensors[0];
  bad.type = OXY_INT8;
  refused(kernels.tail_create(0, &bad, 1, &tail), "tail_create of an 8-bit parameter");
  expect(tail == nullptr, "a refused tail_create gives NULL", hex(tail));
}

void leaks(const Subject& subject) {
  const std::uint64_t start = subject.memory().allocated_bytes;
  for (int turn = 0; turn < 3; ++turn) {
    Tail tail(subject);
    tail.settings.agc = 0.01;
    tail.round();
    tail.destroy();
  }
  const std::uint64_t end = subject.memory().allocated_bytes;
  expect(end == start, "allocated_bytes back at " + std::to_string(start), std::to_string(end));
}

void steady(const Subject& subject) {
  Tail tail(subject);
  tail.settings.flags = OXY_TAIL_COLLECT;
  tail.round();
  const std::uint64_t after_one = subject.memory().allocated_bytes;
  for (int turn = 0; turn < 3; ++turn) tail.round();
  const std::uint64_t now = subject.memory().allocated_bytes;
  expect(now == after_one, "allocated_bytes of the first round, " + std::to_string(after_one), std::to_string(now));
}

}  // namespace

void add_kernel_checks(std::vector<Check>& checks) {
  checks.insert(checks.end(),
                {
                    {"kernels.rules", "K3", "every rule is that of torch.optim, within 8 units of fp32", rules},
                    {"kernels.verdict", "K3", "norm, unscaling, clipping and statistics", verdict},
                    {"kernels.limits", "K3", "adaptive clipping and clipping by value", limits},
                    {"kernels.learning_rate", "K1", "the learning rate is read in device memory", learning_rate},
                    {"kernels.absent_gradient", "K3", "no gradient: no part in the round", absent_gradient},
                    {"kernels.skip", "K4", "a skipped round changes no byte", skip},
                    {"kernels.order", "K1", "a round has its place in its queue", order},
                    {"kernels.steady", "K1", "nothing is allocated after the first round", steady},
                    {"kernels.leaks", "K2", "tail_destroy gives everything back", leaks},
                    {"kernels.arguments", "F2", "bad arguments are refused with a sentence", arguments},
                });
}

}  // namespace conformance
