// norm_in_backward and step_in_backward: the bits of a plain step, whatever happens between backward() and step().
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <thread>

#include "optimizer_cases.h"

namespace oxytorch::optim::testing {
namespace {

using ::testing::HasSubstr;

template <class Case>
class EachInBackward : public ::testing::Test {};
TYPED_TEST_SUITE(EachInBackward, NativeCases);

// A loss whose gradients depend on the parameters and on `seed`; every parameter arrives once.
torch::Tensor loss_of(const Tensors& params, int seed) {
  torch::manual_seed(300 + seed);
  torch::Tensor loss = torch::zeros({});
  for (const auto& p : params) loss = loss + (p * torch::randn(p.sizes())).sum().to(torch::kFloat) + p.square().sum();
  return loss;
}

const auto kNormInBackward = [](auto o) { return o.clip_norm(0.5).collect_stats(true).norm_in_backward(true); };
const auto kClipped = [](auto o) { return o.clip_norm(0.5).collect_stats(true); };
const auto kStepInBackward = [](auto o) { return o.nonfinite(NonFinite::Propagate).step_in_backward(true); };
const auto kPropagate = [](auto o) { return o.nonfinite(NonFinite::Propagate); };

// Steps two optimizers of a case alike; `between` runs on the gradients of both before each step.
template <class Case, class A, class B, class Between>
void expect_alike(A with, B without, Between between) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    Trial<Case> a(dtype, with), b(dtype, without);
    for (int i = 0; i < 4; ++i) {
      for (Trial<Case>* trial : {&a, &b}) {
        trial->optimizer.zero_grad();
        loss_of(trial->params, i).backward();
        between(*trial);
        trial->optimizer.step();
      }
    }
    expect_same_bits(a.everything(), b.everything());
    if (a.optimizer.tail().options().collect_stats) {
      expect_same_bits({a.optimizer.tail_stats().grad_norm, a.optimizer.tail_stats().grad_norms},
                       {b.optimizer.tail_stats().grad_norm, b.optimizer.tail_stats().grad_norms});
    }
  }
}

TYPED_TEST(EachInBackward, NormTakenAsGradientsArriveGivesTheBitsOfAPlainStep) {
  expect_alike<TypeParam>(kNormInBackward, kClipped, [](auto&) {});
}

TYPED_TEST(EachInBackward, StepTakenAsGradientsArriveGivesTheBitsOfAPlainStep) {
  expect_alike<TypeParam>(kStepInBackward, kPropagate, [](auto& trial) {
    for (const auto& p : trial.params) {
      EXPECT_EQ(p.grad().defined(), !trial.optimizer.tail().options().step_in_backward);
    }
  });
}

TYPED_TEST(EachInBackward, GradientsChangedBeforeTheStepAreMeasuredAnew) {
  const auto scaled_by_hand = [](auto& trial) {
    const torch::NoGradGuard no_grad;
    trial.params[1].mutable_grad().mul_(1000);
    trial.params[4].mutable_grad() = torch::full_like(trial.params[4], 3);
  };
  expect_alike<TypeParam>(kNormInBackward, kClipped, scaled_by_hand);
  expect_alike<TypeParam>(kNormInBackward, kClipped,
                          [](auto& trial) { torch::nn::utils::clip_grad_norm_(trial.params, 0.1); });
  expect_alike<TypeParam>(kNormInBackward, kClipped, [](auto& trial) {
    Tensors grads;
    for (const auto& p : trial.params) grads.push_back(p.grad());
    auto found = torch::zeros({});
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found, torch::full({}, 0.125F));
  });
  // A second pass into the same gradients.
  expect_alike<TypeParam>(kNormInBackward, kClipped, [](auto& trial) { loss_of(trial.params, 77).backward(); });
}

TEST(InBackward, AGradientThatFollowsADiscardedOneIsMeasured) {
  Trial<AdamWCase> a(torch::kFloat, kNormInBackward), b(torch::kFloat, kClipped);
  for (auto* trial : {&a, &b}) {
    loss_of(trial->params, 0).backward();
    trial->optimizer.zero_grad();
    trial->step(1);  // often in the memory of the gradient that went
  }
  expect_same_bits({a.optimizer.tail_stats().grad_norms}, {b.optimizer.tail_stats().grad_norms});
  expect_same_bits(a.params, b.params);
}

TYPED_TEST(EachInBackward, MicroBatchesAreSummedUnderTheGuard) {
  for (const bool step_in_backward : {false, true}) {
    const auto options = [&](auto o) { return step_in_backward ? kStepInBackward(o) : kNormInBackward(o); };
    const auto plain = [&](auto o) { return step_in_backward ? kPropagate(o) : kClipped(o); };
    Trial<TypeParam> a(torch::kFloat, options), b(torch::kFloat, plain);
    for (auto* trial : {&a, &b}) {
      trial->optimizer.set_grad_divisor(3);
      for (int step = 0; step < 2; ++step) {
        {
          const AccumulateGuard more(trial->optimizer);
          EXPECT_TRUE(trial->optimizer.accumulating());
          loss_of(trial->params, 3 * step).backward();
          loss_of(trial->params, 3 * step + 1).backward();
        }
        EXPECT_FALSE(trial->optimizer.accumulating());
        loss_of(trial->params, 3 * step + 2).backward();
        trial->optimizer.step();
        trial->optimizer.zero_grad();
      }
    }
    expect_same_bits(a.everything(), b.everything());
  }
}

TEST(InBackward, StepUsesTheRatesOfThatMomentAndGroupsAddedLater) {
  Tensors a = make_params<SGDCase>(), b = make_params<SGDCase>();
  const auto train = [](Tensors& params, SGDOptions options) {
    SGD opt(Tensors(params.begin(), params.begin() + 3), options);
    for (int i = 0; i < 4; ++i) {
      if (i == 2) opt.add_param_group({Tensors(params.begin() + 3, params.end()), std::make_unique<SGDOptions>(0.3)});
      opt.param_groups()[0].options().set_lr(0.1 / (i + 1));
      for (auto& p : params) p.mutable_grad().reset();
      loss_of(params, i).backward();
      EXPECT_EQ(params[4].grad().defined(), i < 2 || !options.tail().step_in_backward);
      opt.step();
    }
  };
  train(a, kStepInBackward(SGDOptions(0.1).momentum(0.9)));
  train(b, kPropagate(SGDOptions(0.1).momentum(0.9)));
  expect_same_bits(a, b);
}

TEST(InBackward, AnErrorIsThrownByBackward) {
  Trial<AdamWCase> trial(torch::kFloat, [](auto o) { return kStepInBackward(o).ema_decay(0.9); });
  loss_of(trial.params, 0).backward();
  trial.optimizer.step();
  trial.optimizer.apply_ema();
  EXPECT_THAT(message_of([&] { loss_of(trial.params, 1).backward(); }), HasSubstr("moving averages stand in"));
  trial.optimizer.restore_parameters();
  trial.optimizer.zero_grad();
  loss_of(trial.params, 1).backward();
  trial.optimizer.step();
  trial.optimizer.set_grad_scale(torch::ones({}), torch::zeros({}));
  EXPECT_THAT(message_of([&] { trial.optimizer.step(); }), HasSubstr("step_in_backward cannot serve a loss scale"));
}

struct CountingHook final : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int& calls) : calls(calls) {}
  void operator()(const torch::Tensor&) override { ++calls; }
  int& calls;
};

TEST(InBackward, AHookThatWasThereStaysAndOursGoWithTheOptimizer) {
  Tensors params = make_params<AdamWCase>();
  int calls = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(params[1], std::make_unique<CountingHook>(calls));
  const auto* const before = torch::autograd::impl::post_acc_grad_hooks(params[1]).get();
  auto first = std::make_unique<AdamW>(params, kNormInBackward(AdamWOptions()));
  auto second = std::make_unique<AdamW>(params, kNormInBackward(AdamWOptions()));
  loss_of(params, 0).backward();
  EXPECT_EQ(calls, 1);
  first.reset();  // not the one that was made last
  loss_of(params, 1).backward();
  EXPECT_EQ(calls, 2);
  second->step();
  second.reset();
  EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(params[1]).get(), before);
  EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(params[0]).get(), nullptr);
  loss_of(params, 2).backward();
  EXPECT_EQ(calls, 3);
}

TEST(InBackward, HooksThatAnotherOneHoldsDoNothingAfterTheOptimizer) {
  struct Wrapper final : torch::autograd::PostAccumulateGradHook {
    void operator()(const torch::Tensor& p) override { (*inner)(p); }
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> inner;
  };
  Tensors params = make_params<AdamWCase>();
  {
    const AdamW opt(params, kStepInBackward(AdamWOptions()));
    auto wrapper = std::make_unique<Wrapper>();
    wrapper->inner = std::move(torch::autograd::impl::post_acc_grad_hooks(params[0]));
    torch::autograd::impl::set_post_acc_grad_hooks(params[0], std::move(wrapper));
  }
  loss_of(params, 0).backward();
  EXPECT_TRUE(params[0].grad().defined());
}

TEST(InBackward, BackwardMayRunOnSeveralThreads) {
  Trial<AdamWCase> a(torch::kFloat, kStepInBackward), b(torch::kFloat, kPropagate);
  for (int i = 0; i < 3; ++i) {
    const auto half = [&](std::size_t from, std::size_t to) {
      return Tensors(a.params.begin() + static_cast<std::ptrdiff_t>(from),
                     a.params.begin() + static_cast<std::ptrdiff_t>(to));
    };
    torch::Tensor first = torch::zeros({}), second = torch::zeros({});
    for (const auto& p : half(0, 3)) first = first + (p * (i + 1)).sin().sum();
    for (const auto& p : half(3, 6)) second = second + (p * (i + 1)).sin().sum();
    std::thread other([&] { first.backward(); });
    second.backward();
    other.join();
    a.optimizer.step();
    torch::Tensor loss = torch::zeros({});
    for (const auto& p : b.params) loss = loss + (p * (i + 1)).sin().sum();
    b.optimizer.zero_grad();
    loss.backward();
    b.optimizer.step();
  }
  expect_same_bits(a.params, b.params);
}

}  // namespace
}  // namespace oxytorch::optim::testing
