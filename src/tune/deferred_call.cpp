#include "tune/deferred_call.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <utility>

#include "oxytorch/error.h"
#include "tune/thread_key.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

class AsAutocast {
 public:
  explicit AsAutocast(const Autocast& was) : before_(was.device()) { was.set(); }
  ~AsAutocast() { before_.set(); }
  AsAutocast(const AsAutocast&) = delete;
  AsAutocast& operator=(const AsAutocast&) = delete;

 private:
  Autocast before_;
};

// What a model does in place to a deferred tensor is done to what it stands for.
std::vector<std::uint32_t> versions_of(const Arguments& arguments) {
  std::vector<std::uint32_t> versions;
  for (const Tensor& one : tensors_of(arguments)) versions.push_back(is_deferred(one) ? 0 : version_of(one));
  return versions;
}

}  // namespace

Autocast::Autocast(at::DeviceType device)
    : device_(device),
      is_on_(at::autocast::is_autocast_enabled(device)),
      type_(at::autocast::get_autocast_dtype(device)) {}

at::ScalarType Autocast::softmax_type(at::ScalarType of) const {
  if (!is_on_) return of;
  // Torch's lists differ from device to device.
  static std::mutex mutex;
  static std::map<std::pair<at::DeviceType, at::ScalarType>, at::ScalarType> all;
  const std::lock_guard lock(mutex);
  const auto found = all.find({device_, of});
  if (found != all.end()) return found->second;
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
  const auto type = at::softmax(at::zeros({1}, at::TensorOptions(device_).dtype(of)), 0).scalar_type();
  return all.emplace(std::pair(device_, of), type).first->second;
}

void Autocast::set() const {
  at::autocast::set_autocast_enabled(device_, is_on_);
  at::autocast::set_autocast_dtype(device_, type_);
}

DeferredCall::DeferredCall(c10::OperatorHandle op, Arguments arguments, at::Device on)
    : op_(std::move(op)), arguments_(std::move(arguments)), versions_(versions_of(arguments_)), autocast_(on.type()) {
  device = on;
}

DeferredCall::DeferredCall(const DeferredCall& other)
    : DeferredValue(other),
      op_(other.op_),
      arguments_(other.arguments_),
      versions_(other.versions_),
      autocast_(other.autocast_) {}

Tensor DeferredCall::values() {
  const std::lock_guard lock(mutex_);
  if (made_.defined()) return made_;
  OXY_CHECK(is_unchanged(), InvalidState, changed());
  const at::AutoGradMode as_in_training(true);
  auto made = made_instead();
  if (!made) {
    std::vector<Tensor> given;
    for (const Tensor& one : tensors_of(arguments_)) given.push_back(values_of(one));
    made = made_of()(given);
  }
  made_ = behind_hooks(*made);
  arguments_.clear();
  versions_.clear();
  let_go();
  return made_;
}

bool DeferredCall::is_computed() {
  const std::lock_guard lock(mutex_);
  return made_.defined();
}

bool DeferredCall::is_unchanged() const {
  const std::lock_guard lock(mutex_);
  return made_.defined() || versions_of(arguments_) == versions_;
}

std::function<Tensor(const std::vector<Tensor>&)> DeferredCall::made_of() const {
  Arguments with = arguments_;
  std::vector<std::size_t> at;
  for (std::size_t i = 0; i < with.size(); ++i) {
    if (!is_tensor(with[i])) continue;
    at.push_back(i);
    with[i] = Tensor();
  }
  return [op = op_, with, at, autocast = autocast_](const std::vector<Tensor>& given) {
    const c10::impl::ExcludeDispatchKeyGuard as_left_alone(kThreadKey);
    const AsAutocast as_it_was(autocast);
    torch::jit::Stack stack(with);
    for (std::size_t i = 0; i < at.size(); ++i) stack[at[i]] = given[i];
    op.callBoxed(&stack);
    return std::move(stack.back()).toTensor();
  };
}

void DeferredCall::become(c10::OperatorHandle op, Arguments arguments) {
  const std::lock_guard lock(mutex_);
  op_ = std::move(op);
  arguments_ = std::move(arguments);
  versions_ = versions_of(arguments_);
  autocast_ = Autocast(device.type());
}

Tensor tensor_of(const std::shared_ptr<DeferredCall>& call) {
  Tensor tensor = deferred_tensor(call);
  put_in_graph(tensor, *call);
  return tensor;
}

void put_in_graph(const Tensor& tensor, DeferredCall& call) {
  put_in_graph(tensor, call, tensors_of(call.arguments_), call.made_of());
}

}  // namespace oxytorch::tune
