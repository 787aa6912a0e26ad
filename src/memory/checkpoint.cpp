#include "oxytorch/memory/checkpoint.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <string>

#include "memory/changed.h"
#include "memory/saved_tensors.h"
#include "oxytorch/error.h"

namespace oxytorch::memory {
namespace {

namespace autograd = torch::autograd;

/// Ends the second forward once all that backward needs is there. A std::exception, so that Python hands it on too.
struct RecomputationDone final : std::exception {
  [[nodiscard]] const char* what() const noexcept override {
    return "oxytorch.memory.checkpoint ends the second forward here: all that backward needs is there. Do not catch "
           "it.";
  }
};

/// Of a tensor that a node saves: what the second forward must give again.
struct Shape {
  explicit Shape(const at::Tensor& tensor)
      : sizes(tensor.sizes().begin(), tensor.sizes().end()), dtype(tensor.scalar_type()), device(tensor.device()) {}
  bool operator==(const Shape&) const = default;
  [[nodiscard]] std::string text() const {
    std::string found = at::toString(dtype) + std::string(" [");
    for (std::size_t i = 0; i < sizes.size(); ++i) found += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
    return found + "] on " + device.str();
  }
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype;
  c10::Device device;
};

/// The states of torch's generators of the CPU and of the devices of some tensors. Kept as bytes: a plan of what a step
/// takes could not tell which blocks draw numbers, and so which would keep one more tensor.
class RandomStates {
 public:
  explicit RandomStates(const std::vector<at::Tensor>& inputs) : devices_{c10::Device(c10::DeviceType::CPU)} {
    for (const auto& input : inputs) {
      if (!input.defined() || input.is_meta()) continue;
      if (std::find(devices_.begin(), devices_.end(), input.device()) == devices_.end())
        devices_.push_back(input.device());
    }
    read();
  }
  /// Where nothing was drawn since they were read, there is nothing to keep.
  void drop_if_unused() {
    const auto after = now();
    if (states_ != after.states_) return;
    devices_.clear();
    states_.clear();
  }
  [[nodiscard]] RandomStates now() const {
    auto found = *this;
    found.read();
    return found;
  }
  void set() const {
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      auto generator = at::globalContext().defaultGenerator(devices_[i]);
      const std::lock_guard lock(generator.mutex());
      const auto& bytes = states_[i];
      const auto state = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
      std::copy(bytes.begin(), bytes.end(), state.mutable_data_ptr<std::uint8_t>());
      generator.set_state(state);
    }
  }

 private:
  void read() {
    states_.clear();
    for (const auto device : devices_) {
      auto generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard lock(generator.mutex());
      const auto state = generator.get_state();  // on the host, of any device
      const auto* const bytes = state.const_data_ptr<std::uint8_t>();
      states_.emplace_back(bytes, bytes + state.numel());
    }
  }
  std::vector<c10::Device> devices_;
  std::vector<std::vector<std::uint8_t>> states_;
};

/// Autocast of this thread, for the CPU and the devices of some tensors.
class AutocastState {
 public:
  explicit AutocastState(const std::vector<at::Tensor>& inputs) : cache_(at::autocast::is_autocast_cache_enabled()) {
    add(at::kCPU);
    for (const auto& input : inputs) {
      if (input.defined()) add(input.device().type());
    }
  }
  /// As it is on this thread now, for the same devices.
  [[nodiscard]] AutocastState now() const {
    auto found = *this;
    for (auto& each : found.devices_) each = Device(each.type);
    found.cache_ = at::autocast::is_autocast_cache_enabled();
    return found;
  }
  void set() const {
    for (const auto& each : devices_) {
      at::autocast::set_autocast_dtype(each.type, each.dtype);
      at::autocast::set_autocast_enabled(each.type, each.enabled);
    }
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  struct Device {
    explicit Device(at::DeviceType type)
        : type(type), dtype(at::autocast::get_autocast_dtype(type)), enabled(at::autocast::is_autocast_enabled(type)) {}
    at::DeviceType type;
    at::ScalarType dtype;
    bool enabled;
  };
  void add(at::DeviceType type) {
    const auto same = [&](const Device& each) { return each.type == type; };
    if (at::autocast::is_autocast_available(type) && std::none_of(devices_.begin(), devices_.end(), same))
      devices_.emplace_back(type);
  }
  std::vector<Device> devices_;
  bool cache_;
};

/// A state of autocast holds on this thread until it is destroyed.
class WithAutocast {
 public:
  explicit WithAutocast(const AutocastState& state) : before_(state.now()) {
    at::autocast::increment_nesting();
    state.set();
  }
  ~WithAutocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    before_.set();
  }
  WithAutocast(const WithAutocast&) = delete;
  WithAutocast& operator=(const WithAutocast&) = delete;

 private:
  AutocastState before_;
};

}  // namespace

struct Recomputation::Inside : std::enable_shared_from_this<Inside>, TensorKeeper {
  Inside(const std::vector<at::Tensor>& tensors, std::function<void(const std::vector<at::Tensor>&)> again)
      : again(std::move(again)), random(tensors), autocast(tensors) {
    inputs.reserve(tensors.size());
    for (const auto& tensor : tensors) inputs.emplace_back(tensor, /*is_output=*/false);
  }

  /// In place of a tensor that forward saved.
  struct Placeholder final : autograd::SavedVariableHooks {
    explicit Placeholder(std::shared_ptr<Inside> of) : of(std::move(of)) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      index = of->saved.size();
      of->saved.emplace_back(tensor);
    }
    at::Tensor call_unpack_hook() override { return of->value(index); }
    std::shared_ptr<Inside> of;
    std::size_t index = 0;
  };
  std::unique_ptr<autograd::SavedVariableHooks> make() override {
    return std::make_unique<Placeholder>(shared_from_this());
  }

  struct Value {
    at::Tensor tensor;
    std::uint32_t version = 0;
  };

  /// What the second forward saves. Its own graph goes unused.
  struct Second final : TensorKeeper {
    explicit Second(const std::vector<Shape>& saved) : saved(saved), values(saved.size()) {}
    struct Take final : autograd::SavedVariableHooks {
      explicit Take(Second& second) : second(second) {}
      void call_pack_hook(const at::Tensor& tensor) override { second.take(tensor); }
      at::Tensor call_unpack_hook() override {
        OXY_CHECK(false, InvalidState,
                  "a function under checkpoint() ran backward through what it computes itself "
                  "while it was run again. Take that part out of it.");
      }
      Second& second;
    };
    std::unique_ptr<autograd::SavedVariableHooks> make() override { return std::make_unique<Take>(*this); }
    void take(const at::Tensor& tensor) {
      if (taken == saved.size()) throw RecomputationDone();
      if (const Shape shape(tensor); !(shape == saved[taken])) {
        wrong = "of tensor " + std::to_string(taken) + " the first forward saved " + saved[taken].text() +
                " and the second " + shape.text();
        throw RecomputationDone();
      }
      values[taken++] = {tensor.detach(), static_cast<std::uint32_t>(tensor._version())};
      if (taken == saved.size()) throw RecomputationDone();
    }
    const std::vector<Shape>& saved;
    std::vector<Value> values;
    std::size_t taken = 0;
    std::string wrong;
  };

  at::Tensor value(std::size_t index) {
    const std::lock_guard lock(mutex);
    const int task = autograd::get_current_graph_task_id();
    if (task != task_of_values || index >= values.size() || !values[index].tensor.defined()) compute_again(task);
    // Each is handed out once, so that it goes when its node is done.
    const auto found = std::exchange(values[index], {});
    if (task == -1) values.clear();
    OXY_CHECK(found.version == found.tensor._version(), InvalidState, "a tensor of ", Shape(found.tensor).text(),
              " that a function under checkpoint() computes is needed for backward, and the function changes it in "
              "place later on (its version is ",
              found.tensor._version(), ", ", found.version,
              " was saved). Make that operation one that is not in place.");
    return found.tensor;
  }

  void compute_again(int task) {
    values.clear();
    std::vector<at::Tensor> tensors;
    tensors.reserve(inputs.size());
    for (const auto& input : inputs) {
      const auto tensor = input.unpack();
      // An undefined tensor is one; of integers none requires a gradient.
      tensors.push_back(tensor.defined() ? tensor.detach().set_requires_grad(tensor.requires_grad()) : tensor);
    }
    Second second(saved);
    const auto random_now = random.now();
    {
      const AsBefore as_before(changed);
      const c10::AutoGradMode grad(true);
      const WithAutocast with_autocast(autocast);
      const KeepingTensors keeping(second);
      random.set();
      try {
        again(tensors);
      } catch (...) {
        const bool stopped = second.taken == saved.size() || !second.wrong.empty();
        if (!stopped) {
          random_now.set();
          throw;
        }
      }
    }
    random_now.set();
    if (second.wrong.empty() && second.taken < saved.size()) {
      second.wrong = "the first forward saved " + std::to_string(saved.size()) + " tensors and the second " +
                     std::to_string(second.taken);
    }
    OXY_CHECK(second.wrong.empty(), InvalidState,
              "a function under checkpoint() did not do the same when it was run again: ", second.wrong,
              ". It must depend on its arguments and torch's random generators alone.");
    values = std::move(second.values);
    task_of_values = task;
    if (task == -1) return;
    // What this backward does not ask for goes when it ends.
    autograd::Engine::get_default_engine().queue_callback([inside = weak_from_this(), task] {
      const auto alive = inside.lock();
      if (alive == nullptr) return;
      const std::lock_guard lock(alive->mutex);
      if (alive->task_of_values == task) alive->values.clear();
    });
  }

  std::function<void(const std::vector<at::Tensor>&)> again;
  RandomStates random;
  AutocastState autocast;
  std::vector<autograd::SavedVariable> inputs;
  Changed changed;           // by the first forward
  std::vector<Shape> saved;  // by the first forward, in order
  std::mutex mutex;
  std::vector<Value> values;
  int task_of_values = -1;
};

Recomputation::Recomputation(const std::vector<at::Tensor>& inputs,
                             std::function<void(const std::vector<at::Tensor>&)> again)
    : inside_(std::make_shared<Inside>(inputs, std::move(again))) {}
Recomputation::~Recomputation() = default;

void Recomputation::run(const std::function<void()>& first) {
  const Changed::Recording recording(inside_->changed);
  const KeepingTensors keeping(*inside_);
  first();
  inside_->random.drop_if_unused();
}

bool records_gradients() { return c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled(); }

at::Tensor checkpoint_sequential(const torch::nn::Sequential& sequential, std::int64_t segments,
                                 const at::Tensor& input) {
  const auto modules = static_cast<std::int64_t>(sequential->size());
  OXY_CHECK(segments >= 1 && segments <= modules, InvalidArgument, "checkpoint_sequential() of ", modules,
            " modules in ", segments, " segments; give 1 to ", modules, ".");
  const auto part = [sequential](std::int64_t begin, std::int64_t end, at::Tensor tensor) {
    auto modules = sequential;
    for (auto i = begin; i < end; ++i) tensor = (modules->begin() + i)->forward<at::Tensor>(tensor);
    return tensor;
  };
  const auto length = modules / segments, last = length * (segments - 1);
  auto tensor = input;
  for (std::int64_t begin = 0; begin < last; begin += length) {
    tensor = checkpoint([=](const at::Tensor& in) { return part(begin, begin + length, in); }, tensor);
  }
  return part(last, modules, tensor);
}

}  // namespace oxytorch::memory
