#include "oxytorch/tune/run.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <set>
#include <utility>

#include "oxytorch/logging.h"
#include "oxytorch/memory/parked.h"
#include "tune/optimizer_state.h"

namespace oxytorch::tune {

Run::Run(const Models& models, const Optimizers& optimizers, std::vector<LossFunction> losses,
         std::vector<Batch> batches, double clip_norm)
    : TrainingStep(models, optimizers, std::move(losses), clip_norm), batches_(std::move(batches)) {}

Run::Run(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, std::vector<Batch> batches,
         double clip_norm)
    : TrainingStep(model, optimizer, std::move(loss), clip_norm), batches_(std::move(batches)) {}

Run::~Run() {
  try {
    required.clear();
    set_active({});
  } catch (const std::exception& error) {
    log(LogLevel::Error, std::string("a strategy could not be taken back: ") + error.what(), "tune");
  }
}

Strategy& Run::strategy(const std::string& name) {
  auto& made = strategies_[name];
  if (!made) made = find_strategy(name).make();
  return *made;
}

std::int64_t Run::held_bytes(const Batch& batch) const {
  std::set<const void*> seen;
  std::int64_t bytes = 0;
  const auto add = [&](const at::Tensor& tensor) {
    const bool takes_memory =
        tensor.defined() && tensor.has_storage() && tensor.device() == device() && !memory::is_parked(tensor);
    if (takes_memory && seen.insert(tensor.storage().unsafeGetStorageImpl()).second)
      bytes += static_cast<std::int64_t>(tensor.storage().nbytes());
  };
  for (const torch::nn::Module& model : models()) {
    for (const auto& parameter : model.parameters()) add(parameter);
    for (const auto& buffer : model.buffers()) add(buffer);
  }
  for (const auto& parameter : parameters()) add(parameter);
  for (const auto& tensor : batch.tensors()) add(tensor);
  for (const auto& slot : slots()) {
    for (auto* const optimizer : {&slot.original(), &slot.optimizer()}) {  // seldom two
      each_state_tensor(*optimizer, [&](const at::Tensor& /*parameter*/, at::Tensor& value) { add(value); });
    }
  }
  return bytes;
}

std::vector<std::string> Run::beside_required() const {
  auto names = active_;
  std::erase_if(names,
                [&](const auto& name) { return std::find(required.begin(), required.end(), name) != required.end(); });
  return names;
}

void Run::settle() {
  for (const auto& name : active_) strategy(name).settle_in(*this);
}

void Run::set_active(const std::vector<std::string>& given) {
  const auto holds = [](const std::vector<std::string>& all, const std::string& name) {
    return std::find(all.begin(), all.end(), name) != all.end();
  };
  auto names = required;
  std::copy_if(given.begin(), given.end(), std::back_inserter(names),
               [&](const auto& name) { return !holds(required, name); });
  std::exception_ptr failure;
  for (std::size_t i = active_.size(); i-- > 0;) {
    const std::string name = active_[i];
    if (holds(names, name)) continue;
    active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
    try {
      strategy(name).revert(*this);
    } catch (...) {  // the others are taken back all the same
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  std::vector<std::string> added;
  try {
    for (const auto& name : names) {
      if (holds(active_, name)) continue;
      strategy(name).apply(*this);
      active_.push_back(name);
      added.push_back(name);
    }
  } catch (...) {
    while (!added.empty()) {
      active_.pop_back();
      strategy(added.back()).revert(*this);
      added.pop_back();
    }
    throw;
  }
}

}  // namespace oxytorch::tune
