#include "oxytorch/tune/run.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "oxytorch/error.h"
#include "oxytorch/logging.h"
#include "oxytorch/optim/optimizer.h"

namespace oxytorch::tune {
namespace {

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

template <class Value>
void set_entry(std::vector<std::pair<std::string, Value>>& table, const std::string& name, Value value) {
  std::erase_if(table, [&](const auto& entry) { return entry.first == name; });
  if (value) table.emplace_back(name, std::move(value));
}

std::vector<Batch> split(const Batch& batch, int pieces) {
  const auto count = rows(batch);
  const auto part = [&](const at::Tensor& t, std::int64_t low, std::int64_t high) {
    return t.defined() && t.dim() > 0 && t.size(0) == count ? t.slice(0, low, high) : t;
  };
  std::vector<Batch> result;
  for (std::int64_t i = 0; i < pieces; ++i) {
    const auto low = count * i / pieces, high = count * (i + 1) / pieces;
    if (low < high) result.push_back({part(batch.input, low, high), part(batch.target, low, high)});
  }
  return result;
}

/// As torch does. torch::nn::utils::clip_grad_norm_ leaves a sparse gradient as it is: it scales what data() returns,
/// which shares no values with it. Its values are handed to that function in its place.
void clip(const std::vector<at::Tensor>& parameters, double norm) {
  std::vector<at::Tensor> clipped;
  for (at::Tensor parameter : parameters) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined() || !gradient.is_sparse()) {
      clipped.push_back(std::move(parameter));
      continue;
    }
    parameter.mutable_grad() = gradient.coalesce();
    const auto values = parameter.grad()._values().detach();
    clipped.push_back(values.alias());
    clipped.back().mutable_grad() = values;
  }
  torch::nn::utils::clip_grad_norm_(clipped, norm);
}

}  // namespace

std::int64_t rows(const Batch& batch) {
  return batch.input.defined() && batch.input.dim() > 0 ? batch.input.size(0) : 1;
}

Run::Run(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, std::vector<Batch> batches,
         double clip_norm)
    : model_(model),
      original_(optimizer),
      loss_(std::move(loss)),
      batches_(std::move(batches)),
      parameters_(parameters_of(optimizer)),
      device_(parameters_.empty() ? at::Device(at::kCPU) : parameters_.front().device()),
      clip_norm_(clip_norm) {
  OXY_CHECK(loss_, InvalidArgument, "there is no loss function. Pass one, for example supervised(model, criterion).");
  OXY_CHECK(!parameters_.empty(), InvalidArgument, "the optimizer has no parameters. Pass model->parameters().");
  OXY_CHECK(!batches_.empty(), InvalidArgument, "there is no batch. Pass some of the run's own, four to eight.");
  OXY_CHECK(clip_norm >= 0, InvalidArgument, "clip_norm is ", clip_norm, ", expected 0 (no clipping) or more.");
}

Run::~Run() {
  try {
    bring({});
  } catch (const std::exception& error) {
    log(LogLevel::Error, std::string("a strategy could not be taken back: ") + error.what());
  }
}

torch::optim::Optimizer& Run::optimizer() const noexcept {
  return replacement_.optimizer ? *replacement_.optimizer : original_;
}

at::Tensor Run::loss(const Batch& batch) const {
  Batch given = batch;
  for (const auto& [name, change] : inputs_) given = change(given);
  std::vector<std::shared_ptr<void>> entered;
  struct Leave {
    std::vector<std::shared_ptr<void>>& entered;
    ~Leave() {
      while (!entered.empty()) entered.pop_back();
    }
  } leave{entered};
  for (const auto& [name, enter] : scopes_) entered.push_back(enter());
  auto value = loss_(given);
  OXY_CHECK(value.defined() && value.numel() == 1, InvalidArgument, "the loss ",
            value.defined() ? "is not a scalar" : "is undefined", ". Return one number, for example a mean.");
  return value;
}

at::Tensor Run::backward(const Batch& batch) {
  optimizer().zero_grad();
  if (micro_batches_ == 1) {
    const auto value = loss(batch);
    value.backward();
    return value.detach();
  }
  const auto pieces = split(batch, micro_batches_);
  auto* const tail = dynamic_cast<optim::TailOptimizer*>(&optimizer());
  at::Tensor total;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const double share = static_cast<double>(rows(pieces[i])) / static_cast<double>(rows(batch));
    const auto value = loss(pieces[i]) * share;
    std::optional<optim::AccumulateGuard> more_to_come;
    if (tail && i + 1 < pieces.size()) more_to_come.emplace(*tail);
    value.backward();
    total = total.defined() ? total + value.detach() : value.detach();
  }
  return total;
}

void Run::update() {
  if (clip_norm_ > 0 && !replacement_.clips) clip(parameters_, clip_norm_);
  if (replacement_.optimizer) {
    auto& groups = replacement_.optimizer->param_groups();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      groups[g].options().set_lr(original_.param_groups()[g].options().get_lr());
    }
  }
  optimizer().step();
}

at::Tensor Run::step(const Batch& batch) {
  auto value = backward(batch);
  update();
  return value;
}

void Run::scope(const std::string& name, Scope enter) { set_entry(scopes_, name, std::move(enter)); }
void Run::inputs(const std::string& name, Transform change) { set_entry(inputs_, name, std::move(change)); }

void Run::set_micro_batches(int pieces) {
  OXY_CHECK(pieces >= 1, InvalidArgument, "micro_batches is ", pieces, ", expected at least 1.");
  micro_batches_ = pieces;
}

void Run::replace_optimizer(MakeReplacement make) {
  hand_back();
  Replacement made;
  if (make) made = make(original_);
  make_ = std::move(make);
  replacement_ = std::move(made);
}

void Run::hand_back() {
  if (replacement_.optimizer) replacement_.hand_back();
}

void Run::renew_replacement() {
  if (make_) replacement_ = make_(original_);
}

Strategy& Run::strategy(const std::string& name) {
  auto& made = strategies_[name];
  if (!made) made = find_strategy(name).make();
  return *made;
}

void Run::bring(const std::vector<std::string>& names) {
  const auto holds = [](const std::vector<std::string>& all, const std::string& name) {
    return std::find(all.begin(), all.end(), name) != all.end();
  };
  std::exception_ptr failure;
  for (std::size_t i = in_force_.size(); i-- > 0;) {
    const std::string name = in_force_[i];
    if (holds(names, name)) continue;
    in_force_.erase(in_force_.begin() + static_cast<std::ptrdiff_t>(i));
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
      if (holds(in_force_, name)) continue;
      strategy(name).apply(*this);
      in_force_.push_back(name);
      added.push_back(name);
    }
  } catch (...) {
    while (!added.empty()) {
      in_force_.pop_back();
      strategy(added.back()).revert(*this);
      added.pop_back();
    }
    throw;
  }
}

}  // namespace oxytorch::tune
