// The C++ front ends against torch::optim, their archives, and the allocation count of a step.
#include "oxytorch/optim/optimizer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <sstream>

#include "oxytorch/error.h"

namespace {
std::atomic<std::int64_t> allocations{0};
}

#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

// Counts every allocation that C++ code in this program makes through operator new.
void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace oxytorch::optim {
namespace {

std::vector<torch::Tensor> make_params(torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(0);
  std::vector<torch::Tensor> params;
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{7}, {33, 5}, {}, {0, 2}, {5000}, {4, 3, 3, 3}}) {
    params.push_back(torch::randn(shape, dtype).requires_grad_());
  }
  return params;
}

void set_grads(std::vector<torch::Tensor>& params, int seed, double scale = 1) {
  torch::manual_seed(100 + seed);
  for (auto& p : params) p.mutable_grad() = torch::randn(p.sizes(), p.options().requires_grad(false)) * scale;
}

void expect_close(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(torch::allclose(a[i], b[i], 1e-5, 1e-6)) << "parameter " << i;
  }
}

template <class Ours, class Theirs>
void train_both(Ours& ours, Theirs& theirs, std::vector<torch::Tensor>& a, std::vector<torch::Tensor>& b, int from,
                int to) {
  for (int i = from; i < to; ++i) {
    set_grads(a, i);
    set_grads(b, i);
    ours.step();
    theirs.step();
  }
}

TEST(AdamW, FollowsTorch) {
  auto a = make_params(), b = make_params();
  AdamW ours(a, AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true));
  torch::optim::AdamW theirs(b, torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true));
  train_both(ours, theirs, a, b, 0, 8);
  expect_close(a, b);
  EXPECT_TRUE(ours.tail().native());
}

TEST(SGD, FollowsTorch) {
  auto a = make_params(), b = make_params();
  SGD ours(a, SGDOptions(1e-2).momentum(0.9).nesterov(true).weight_decay(0.1));
  torch::optim::SGD theirs(b, torch::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true).weight_decay(0.1));
  train_both(ours, theirs, a, b, 0, 8);
  expect_close(a, b);
}

TEST(AdamW, ClipsAveragesAndReportsLikeTheSeparatePieces) {
  auto a = make_params(), b = make_params();
  AdamW ours(a, AdamWOptions(1e-2).clip_norm(0.5).ema_decay(0.9));
  torch::optim::AdamW theirs(b, torch::optim::AdamWOptions(1e-2));
  std::vector<torch::Tensor> average;
  for (const auto& p : b) average.push_back(p.detach().clone());
  for (int i = 0; i < 5; ++i) {
    set_grads(a, i);
    set_grads(b, i);
    const double norm = torch::nn::utils::clip_grad_norm_(b, 0.5);
    theirs.step();
    for (std::size_t k = 0; k < b.size(); ++k) average[k].lerp_(b[k].detach(), 0.1);
    ours.step();
    EXPECT_NEAR(ours.tail_stats().grad_norm.item<double>(), norm, 1e-4 * norm);
  }
  expect_close(a, b);
  expect_close(ours.ema_parameters(), average);
  const auto kept = a[1].detach().clone();
  ours.apply_ema();
  EXPECT_TRUE(torch::allclose(a[1], average[1], 1e-5, 1e-6));
  EXPECT_THROW(ours.step(), Error);
  ours.restore_parameters();
  EXPECT_TRUE(torch::equal(a[1], kept));
}

TEST(TailOptimizer, GroupsTakeTheirOwnOptionsAndRatesChange) {
  auto a = make_params(), b = make_params();
  const auto groups = [](auto options, std::vector<torch::Tensor>& p) {
    std::vector<torch::optim::OptimizerParamGroup> result;
    result.emplace_back(std::vector<torch::Tensor>(p.begin(), p.begin() + 2),
                        std::make_unique<decltype(options)>(decltype(options)(0.05)));
    result.emplace_back(std::vector<torch::Tensor>(p.begin() + 2, p.end()));
    return result;
  };
  AdamW ours(groups(AdamWOptions(), a), AdamWOptions(1e-2).weight_decay(0.2));
  torch::optim::AdamW theirs(groups(torch::optim::AdamWOptions(), b),
                             torch::optim::AdamWOptions(1e-2).weight_decay(0.2));
  for (std::size_t i = 0; i < 2; ++i) {
    const auto& mine = static_cast<const AdamWOptions&>(ours.param_groups()[i].options());
    const auto& torchs = static_cast<const torch::optim::AdamWOptions&>(theirs.param_groups()[i].options());
    EXPECT_EQ(mine.lr(), torchs.lr()) << i;
    EXPECT_EQ(mine.weight_decay(), torchs.weight_decay()) << i;
  }
  for (int i = 0; i < 6; ++i) {
    for (auto& group : ours.param_groups()) group.options().set_lr(group.options().get_lr() * 0.9);
    for (auto& group : theirs.param_groups()) group.options().set_lr(group.options().get_lr() * 0.9);
    train_both(ours, theirs, a, b, i, i + 1);
  }
  expect_close(a, b);
}

template <class Source, class Target>
void expect_archive_loads(Source& source, Target& target) {
  std::stringstream stream;
  torch::save(source, stream);
  torch::load(target, stream);
}

TEST(AdamW, ExchangesArchivesWithTorchBothWays) {
  auto a = make_params(), b = make_params(), c = make_params();
  AdamW ours(a, AdamWOptions(1e-2).amsgrad(true));
  torch::optim::AdamW theirs(b, torch::optim::AdamWOptions(0.5));
  for (int i = 0; i < 3; ++i) {
    set_grads(a, i);
    ours.step();
  }
  const torch::NoGradGuard no_grad;
  for (std::size_t k = 0; k < a.size(); ++k) {
    b[k].copy_(a[k]);
    c[k].copy_(a[k]);
  }
  expect_archive_loads(ours, theirs);
  EXPECT_EQ(theirs.param_groups()[0].options().get_lr(), 1e-2);
  AdamW again(c, AdamWOptions(0.5).clip_norm(1e9).maximize(false));
  expect_archive_loads(theirs, again);
  train_both(ours, theirs, a, b, 3, 6);
  for (int i = 3; i < 6; ++i) {
    set_grads(c, i);
    again.step();
  }
  expect_close(a, b);
  for (std::size_t k = 0; k < a.size(); ++k) EXPECT_TRUE(torch::equal(a[k], c[k])) << k;
}

TEST(SGD, ExchangesArchivesWithTorchBothWays) {
  auto a = make_params(), b = make_params();
  SGD ours(a, SGDOptions(1e-2).momentum(0.9));
  set_grads(a, 0);
  ours.step();
  const torch::NoGradGuard no_grad;
  for (std::size_t k = 0; k < a.size(); ++k) b[k].copy_(a[k]);
  torch::optim::SGD theirs(b, torch::optim::SGDOptions(0.5));
  expect_archive_loads(ours, theirs);
  train_both(ours, theirs, a, b, 1, 4);
  expect_close(a, b);
}

TEST(TailOptimizer, AllocatesNothingOnTheStepPathAfterTheFirst) {
  for (const bool skip : {false, true}) {
    auto params = make_params();
    AdamW opt(params, AdamWOptions(1e-3).clip_norm(1.0).ema_decay(0.9).collect_stats(true));
    set_grads(params, 0);
    opt.step();
    if (skip) params[0].mutable_grad()[0] = std::nan("");
    opt.step();
    const std::int64_t before = allocations.load();
    for (int i = 0; i < 10; ++i) opt.step();
    EXPECT_EQ(allocations.load() - before, 0) << (skip ? "skipped" : "taken") << " steps";
    EXPECT_EQ(opt.tail_stats().skipped.item<std::int64_t>(), skip ? 11 : 0);
  }
}

TEST(TailOptimizer, DividesByTheScaleAndReportsInf) {
  auto a = make_params(), b = make_params();
  AdamW scaled(a, AdamWOptions(1e-2)), plain(b, AdamWOptions(1e-2));
  const auto scale = torch::full({}, 1024.0F);
  auto found = torch::zeros({});
  set_grads(a, 1, 1024);
  set_grads(b, 1);
  scaled.set_grad_scale(scale, found);
  scaled.step();
  plain.step();
  expect_close(a, b);
  EXPECT_EQ(found.item<float>(), 0);
  a[4].mutable_grad()[4999] = std::numeric_limits<float>::infinity();
  const auto kept = a[4].detach().clone();
  scaled.set_grad_scale(scale, found);
  scaled.step();
  EXPECT_EQ(found.item<float>(), 1);
  EXPECT_TRUE(torch::equal(a[4], kept));
}

TEST(TailOptimizer, RefusesBadOptionsByNameAndValue) {
  const auto message_of = [](const auto& work) -> std::string {
    try {
      work();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  auto params = make_params();
  EXPECT_NE(message_of([&] { AdamW(params, AdamWOptions(-1)); }).find("lr = -1"), std::string::npos);
  EXPECT_NE(message_of([&] { AdamW(params, AdamWOptions().betas({1.0, 0.9})); }).find("betas[0] = 1"),
            std::string::npos);
  EXPECT_NE(message_of([&] { AdamW(params, AdamWOptions().clip_norm(-2)); }).find("clip_norm is -2"),
            std::string::npos);
  EXPECT_NE(message_of([&] { SGD(params, SGDOptions(0.1).nesterov(true)); }).find("nesterov"), std::string::npos);
  AdamW opt(params, AdamWOptions(0.1));
  set_grads(params, 0);
  opt.param_groups()[0].options().set_lr(std::nan(""));
  EXPECT_NE(message_of([&] { opt.step(); }).find("lr = nan"), std::string::npos);
}

}  // namespace
}  // namespace oxytorch::optim
