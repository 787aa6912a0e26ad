#include "tune/chance.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/rnn.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "generators/generators.h"
#include "tune/record.h"

namespace oxytorch::tune {
namespace {

constexpr int kDraws = 24;
constexpr double kRise = 0.03;  // of the loss, on either side of a difference quotient

double error_of_part(Run& run, const Batch& batch, std::size_t part) {
  const auto random = generators::states(run.device());
  run.zero_grad(part);
  const auto whole = run.loss(batch, part);  // not in pieces, as the ends below
  whole.backward();
  const double there = number(whole.detach());
  Tensors moved, directions;
  double square = 0;
  for (const auto& p : run.parameters(part)) {
    if (!p.grad().defined()) continue;
    moved.push_back(p);
    directions.push_back((p.grad().is_sparse() ? p.grad().to_dense() : p.grad()).detach().clone());
    square += directions.back().to(at::kDouble).square().sum().item<double>();
  }
  const double norm = std::sqrt(square);
  if (norm == 0) return 0;
  const double length = kRise * std::abs(there) / norm;
  const at::NoGradGuard no_grad;
  const auto held = copies(moved);
  std::vector<double> ends;
  for (const double factor : {length / norm, -2 * length / norm}) {
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i].add_(directions[i], factor);
    generators::set_states(run.device(), random);
    ends.push_back(number(run.loss(batch, part)));
  }
  for (std::size_t i = 0; i < moved.size(); ++i) moved[i].copy_(held[i]);
  return std::abs((ends[0] - ends[1]) / (2 * length) / norm - 1);
}

}  // namespace

template <class Module>
void Still::of_dropout(torch::nn::Module& module) {
  if (auto* found = module.as<Module>()) set(found->options.p());
}

void Still::set(double& probability) {
  before_.emplace_back(&probability, probability);
  probability = 0;
}

Still::Still(torch::nn::Module& model) {
  for (const auto& module : model.modules()) {
    of_dropout<torch::nn::Dropout>(*module);
    of_dropout<torch::nn::Dropout2d>(*module);
    of_dropout<torch::nn::Dropout3d>(*module);
    of_dropout<torch::nn::AlphaDropout>(*module);
    of_dropout<torch::nn::FeatureAlphaDropout>(*module);
    if (auto* lstm = module->as<torch::nn::LSTM>()) set(lstm->options_base.dropout());
    if (auto* gru = module->as<torch::nn::GRU>()) set(gru->options_base.dropout());
    if (auto* rnn = module->as<torch::nn::RNN>()) set(rnn->options_base.dropout());
    if (auto* attention = module->as<torch::nn::MultiheadAttention>()) set(attention->options.dropout());
  }
}

Still::~Still() {
  for (auto& [place, value] : before_) *place = value;
}

Draws draw_losses(Run& run, const Batch& batch) {
  Draws found{.spread_of = "gradients"};
  Tensors before;
  for (int i = 0; i < kDraws; ++i) {
    double square = 0;
    std::size_t k = 0;
    found.losses.push_back(number(run.backward(batch, [&](std::size_t part) {
      for (const auto& p : run.parameters(part)) {
        const auto& now = p.grad();
        if (i % 2 == 0) {
          before.push_back(copied(now));
        } else if (const auto& then = before[k++]; now.defined() && then.defined()) {
          const auto change = now.is_sparse() ? (now - then).to_dense() : now - then;
          square += change.detach().to(at::kDouble).square().sum().item<double>();
        }
      }
    })));
    if (i % 2 == 0) continue;
    before.clear();
    found.spreads.push_back(square / 2);
  }
  return found;
}

double backward_error(Run& run, const Batch& batch) {
  double worst = 0;
  for (std::size_t part = 0; part < run.parts(); ++part) worst = std::max(worst, error_of_part(run, batch, part));
  return worst;
}

}  // namespace oxytorch::tune
