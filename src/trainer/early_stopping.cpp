#include "oxytorch/trainer/early_stopping.h"

#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <cmath>

#include "oxytorch/error.h"

namespace oxytorch {
namespace {

std::vector<at::Tensor> tensors_of(const torch::nn::Module& model) {
  auto all = model.parameters();
  for (auto& buffer : model.buffers()) all.push_back(std::move(buffer));
  return all;
}

}  // namespace

EarlyStopping::EarlyStopping(EarlyStoppingOptions options)
    : options_(options),
      best_(options.minimize ? std::numeric_limits<double>::infinity() : -std::numeric_limits<double>::infinity()) {
  OXY_CHECK(options.patience >= 1, InvalidArgument, "patience is ", options.patience, ", expected at least 1.");
  OXY_CHECK(options.min_delta >= 0 && std::isfinite(options.min_delta), InvalidArgument, "min_delta is ",
            options.min_delta, ", expected finite and at least 0.");
}

bool EarlyStopping::step(double metric, const torch::nn::Module* model) {
  if (options_.minimize ? metric < best_ - options_.min_delta : metric > best_ + options_.min_delta) {
    best_ = metric;
    best_evaluation_ = evaluations_;
    bad_ = 0;
    if (options_.restore_best && model) {
      kept_.clear();
      for (const auto& tensor : tensors_of(*model)) kept_.push_back(tensor.detach().clone());
    }
  } else {
    ++bad_;
  }
  ++evaluations_;
  return bad_ >= options_.patience;
}

bool EarlyStopping::restore(torch::nn::Module& model) const {
  if (kept_.empty()) return false;
  auto now = tensors_of(model);
  bool same = now.size() == kept_.size();
  for (size_t i = 0; same && i < now.size(); ++i) same = now[i].sizes() == kept_[i].sizes();
  OXY_CHECK(same, InvalidArgument, "the model has other tensors than the one whose weights were kept.");
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < now.size(); ++i) now[i].copy_(kept_[i]);
  return true;
}

std::vector<double> EarlyStopping::state() const {
  return {best_, static_cast<double>(best_evaluation_), static_cast<double>(bad_), static_cast<double>(evaluations_)};
}

void EarlyStopping::load_state(const std::vector<double>& state) {
  OXY_CHECK(state.size() == 4, InvalidArgument, "the state of early stopping has ", state.size(),
            " values, expected 4. Pass what state() returned.");
  best_ = state[0];
  best_evaluation_ = static_cast<int64_t>(state[1]);
  bad_ = static_cast<int64_t>(state[2]);
  evaluations_ = static_cast<int64_t>(state[3]);
}

void EarlyStopping::save(torch::serialize::OutputArchive& archive) const {
  archive.write("state", torch::tensor(state(), at::kDouble));
  archive.write("kept_count", torch::tensor(static_cast<int64_t>(kept_.size())));
  for (size_t i = 0; i < kept_.size(); ++i) archive.write("kept" + std::to_string(i), kept_[i]);
}

void EarlyStopping::load(torch::serialize::InputArchive& archive) {
  at::Tensor values, count;
  archive.read("state", values);
  archive.read("kept_count", count);
  std::vector<at::Tensor> kept(static_cast<size_t>(count.item<int64_t>()));
  for (size_t i = 0; i < kept.size(); ++i) archive.read("kept" + std::to_string(i), kept[i]);
  load_state({values.data_ptr<double>(), values.data_ptr<double>() + values.numel()});
  kept_ = std::move(kept);
}

}  // namespace oxytorch
