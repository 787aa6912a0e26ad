#include "memory/changed.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "memory/cheap_operators.h"

namespace oxytorch::memory {
namespace {

thread_local Changed* watched = nullptr;

/// Running statistics that operators change although their schemas do not say so: the first of two arguments.
std::size_t hidden_statistics(std::string_view name) {
  static const std::unordered_map<std::string_view, std::size_t> first{{"aten::batch_norm", 3},
                                                                       {"aten::native_batch_norm", 3},
                                                                       {"aten::_batch_norm_impl_index", 3},
                                                                       {"aten::cudnn_batch_norm", 3},
                                                                       {"aten::miopen_batch_norm", 3},
                                                                       {"aten::instance_norm", 3},
                                                                       {"aten::batch_norm_gather_stats", 3},
                                                                       {"aten::batch_norm_gather_stats_with_counts", 3},
                                                                       {"aten::batch_norm_update_stats", 1}};
  const auto found = first.find(name);
  return found == first.end() ? 0 : found->second;
}

/// The arguments that an operator writes to. By the address of its name, which lives as long as the operator.
const std::vector<std::size_t>& written_by(const at::RecordFunction& call) {
  thread_local std::unordered_map<const char*, std::vector<std::size_t>> known;
  const auto [entry, is_new] = known.try_emplace(call.name());
  if (!is_new) return entry->second;
  auto& written = entry->second;
  if (const auto first = hidden_statistics(call.name())) return written = {first, first + 1};
  const auto name = call.operator_name();
  const auto found = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!found) return written;
  const auto& arguments = found->schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) written.push_back(i);
  }
  return written;
}

template <class Take>
void each_tensor(const c10::IValue& value, const Take& take) {
  if (value.isTensor()) {
    take(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) take(tensor);
  }
}

std::unique_ptr<at::ObserverContext> note_writes(const at::RecordFunction& call) {
  if (watched == nullptr || inside_operator()) return nullptr;
  const auto inputs = call.inputs();
  for (const auto i : written_by(call)) {
    if (i < inputs.size()) each_tensor(inputs[i], [](const at::Tensor& tensor) { watched->written(tensor); });
  }
  return nullptr;
}

/// Operators whose results share memory with nothing: what a function makes by them need not be kept when it is written
/// to. Of others it is kept for the time of the function, for nothing.
bool makes_memory(const char* name) {
  static const std::unordered_set<std::string_view> makers{
      "aten::clone",         "aten::empty",     "aten::empty_like",
      "aten::empty_strided", "aten::full",      "aten::full_like",
      "aten::new_empty",     "aten::new_full",  "aten::new_empty_strided",
      "aten::new_ones",      "aten::new_zeros", "aten::ones",
      "aten::ones_like",     "aten::zeros",     "aten::zeros_like"};
  thread_local std::unordered_map<const char*, bool> known;
  const auto [entry, is_new] = known.try_emplace(name);
  if (is_new) entry->second = makers.contains(name);
  return entry->second;
}

void after_operator(const at::RecordFunction& call, at::ObserverContext* /*context*/) {
  if (watched == nullptr || inside_operator() || !makes_memory(call.name())) return;
  for (const auto& output : call.outputs()) {
    each_tensor(output, [](const at::Tensor& tensor) { watched->made(tensor); });
  }
}

/// The whole of a storage as bytes. Its own operators are not watched.
at::Tensor bytes_of(c10::intrusive_ptr<c10::StorageImpl> storage) {
  const auto size = static_cast<std::int64_t>(storage->nbytes());
  auto bytes = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(storage->device()));
  bytes.set_(c10::Storage(std::move(storage)), 0, {size}, {1});
  return bytes;
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.storage().nbytes() == 0) return nullptr;
  return tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

Changed::Recording::Recording(Changed& into)
    : into_(into),
      previous_(std::exchange(watched, &into)),
      handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(note_writes, after_operator)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}))) {}

Changed::Recording::~Recording() {
  at::removeCallback(handle_);
  watched = previous_;
  std::erase_if(into_.memory_, [](const Memory& each) { return each.storage.expired(); });
  into_.known_.clear();
}

void Changed::made(const at::Tensor& tensor) {
  if (const auto* storage = storage_of(tensor)) known_.insert(storage);
}

void Changed::written(const at::Tensor& tensor) {
  const auto* storage = storage_of(tensor);
  // What has a node was made by the function, or is an input, whose change autograd reports.
  if (storage == nullptr || !tensor.is_leaf() || !known_.insert(storage).second) return;
  auto* const self = std::exchange(watched, nullptr);
  const c10::AutoGradMode no_grad(false);
  memory_.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()),
                     c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr()),
                     bytes_of(tensor.storage().getWeakStorageImpl().lock()).clone()});
  watched = self;
}

AsBefore::AsBefore(const Changed& changed) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& each : changed.memory()) {
    auto storage = each.storage.lock();
    if (!storage || storage->nbytes() != static_cast<std::size_t>(each.before.numel())) continue;
    if (auto tensor = each.tensor.lock()) {
      at::Tensor alive(std::move(tensor));
      const auto& version = alive.unsafeGetTensorImpl()->version_counter();
      if (version.enabled()) versions_.push_back({alive, static_cast<std::int64_t>(version.current_version())});
    }
    auto live = bytes_of(std::move(storage));
    bytes_.push_back({live, live.clone()});
    live.copy_(each.before);
  }
}

AsBefore::~AsBefore() {
  const c10::AutoGradMode no_grad(false);
  for (const auto& each : bytes_) each.live.copy_(each.now);
  for (const auto& each : versions_) {
    auto version = each.tensor.unsafeGetTensorImpl()->version_counter();
    version.set_version(each.version);
  }
}

}  // namespace oxytorch::memory
