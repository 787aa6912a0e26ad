#include "oxytorch/optim/stability.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"
#include "oxytorch/optim/optimizers.h"
#include "oxytorch/optim/schedule.h"

namespace oxytorch::optim {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<Spike> judged(const std::vector<double>& losses, SpikeOptions options = {},
                          at::ScalarType type = at::kFloat) {
  SpikeDetector detector(options, at::kCPU);
  std::vector<Spike> found;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    detector.judge(torch::tensor(losses[i]).to(type));
    detector.record(static_cast<std::int64_t>(i), torch::ones({}));
    for (const Spike& spike : detector.arrived(true)) found.push_back(spike);
  }
  return found;
}

std::vector<double> noisy(int steps) {
  torch::manual_seed(0);
  const auto values = torch::randn({steps}, torch::kDouble).mul_(0.2).exp_();
  return {values.data_ptr<double>(), values.data_ptr<double>() + steps};
}

TEST(SpikeDetector, FindsWhatIsPlantedAndNothingElse) {
  std::vector<double> losses = noisy(1000);
  EXPECT_TRUE(judged(losses).empty());
  losses[3] = kNan;
  losses[500] = 10;
  for (const bool composite : {false, true}) {
    SpikeOptions options;
    options.force_composite = composite;
    const auto found = judged(losses, options);
    ASSERT_EQ(found.size(), 2U) << composite;
    EXPECT_EQ(found[0].step, 3);
    EXPECT_EQ(found[1].step, 500);
    EXPECT_TRUE(found[1].loss);
    EXPECT_FALSE(found[1].grad_norm);
    EXPECT_EQ(found[1].loss_value, 10);
    EXPECT_GT(found[1].loss_limit, 2);
    EXPECT_LT(found[1].loss_limit, 6);
  }
}

TEST(SpikeDetector, HoldsALossAgainstTheLevelOfThoseBefore) {
  std::vector<double> losses = noisy(300);
  for (double& loss : losses) loss *= 40;
  for (const bool composite : {false, true}) {
    SpikeOptions options;
    options.force_composite = composite;
    EXPECT_TRUE(judged(losses, options).empty()) << composite;
    auto planted = losses;
    planted[200] = 400;
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const auto found = judged(planted, options, type);
      ASSERT_EQ(found.size(), 1U) << composite << type;
      EXPECT_EQ(found[0].step, 200);
      EXPECT_EQ(found[0].loss_value, 400);
    }
  }
}

TEST(SpikeDetector, HasNoMeasureInAHistoryOfZeros) {
  std::vector<double> losses(100, 0.0);
  losses[60] = 1e-3;
  for (const bool composite : {false, true}) {
    SpikeOptions options;
    options.force_composite = composite;
    EXPECT_TRUE(judged(losses, options).empty()) << composite;
  }
}

TEST(SpikeDetector, WhatIsStillOnItsWayIsDrained) {
  for (const bool composite : {false, true}) {
    SpikeOptions options;
    options.force_composite = composite;
    SpikeDetector detector(options, at::kCPU);
    for (int i = 0; i < 50; ++i) {
      detector.judge(torch::tensor(i == 49 ? kNan : 1.0));
      detector.record(i, torch::ones({}));
      if (i < 49) {
        EXPECT_TRUE(detector.arrived(true).empty());
      }
    }
    const auto found = detector.drain();
    ASSERT_EQ(found.size(), 1U) << composite;
    EXPECT_EQ(found[0].step, 49);
    EXPECT_TRUE(detector.drain().empty());
  }
}

TEST(SpikeDetector, RefusesOptionsOutOfRange) {
  for (const SpikeOptions& options :
       {SpikeOptions{.window = 2}, SpikeOptions{.threshold = 0}, SpikeOptions{.floor = -1},
        SpikeOptions{.warmup = 1000}, SpikeOptions{.patience = 0}}) {
    EXPECT_THROW(SpikeDetector(options, at::kCPU), Error);
  }
  SpikeDetector detector({}, at::kCPU);
  EXPECT_THROW(detector.judge(torch::ones({2})), Error);
}

TEST(StabilityPolicy, NamesAndTextsAgree) {
  for (const char* text : {"skip", "backoff", "rollback", "warn"}) {
    EXPECT_STREQ(name(parse_stability_policy(text)), text);
  }
  EXPECT_THROW(parse_stability_policy("stop"), Error);
}

// A regression with dropout; batch `bad` has targets that are far off.
struct Training {
  torch::nn::Sequential model{torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::Dropout(0.3),
                              torch::nn::Linear(8, 1)};
  std::unique_ptr<AdamW> optimizer;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> data;

  explicit Training(int batches, int bad = -1, double factor = 100) {
    torch::manual_seed(1);
    for (auto& p : model->parameters()) torch::nn::init::normal_(p, 0, 0.3);
    optimizer = std::make_unique<AdamW>(model->parameters(), AdamWOptions(1e-2).ema_decay(0.9));
    for (int i = 0; i < batches; ++i) {
      const auto x = torch::randn({32, 6});
      data.emplace_back(x, x.sum(1, true) * (i == bad ? factor : 1.0));
    }
    torch::manual_seed(2);
  }

  torch::Tensor loss(std::size_t i) {
    optimizer->zero_grad();
    return torch::mse_loss(model->forward(data[i].first), data[i].second);
  }

  void train(NumericalStabilityManager& guard, std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      const auto value = loss(i);
      value.backward();
      guard.step(value);
    }
  }

  std::vector<torch::Tensor> everything() {
    std::vector<torch::Tensor> found;
    for (const auto& p : model->parameters()) found.push_back(p.detach().clone());
    for (const auto& b : model->buffers()) found.push_back(b.clone());
    for (std::size_t i = 0; i < optimizer->tail().param_count(); ++i) {
      const ParamState& s = optimizer->tail().state(i);
      for (const auto& t : {s.step, s.moments[0], s.moments[1], s.ema}) {
        if (t.defined()) found.push_back(t.clone());
      }
    }
    found.push_back(at::globalContext().defaultGenerator(at::kCPU).get_state());
    return found;
  }
};

void expect_same(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
}

TEST(NumericalStabilityManager, SkipsASpikeAndGoesOn) {
  for (const double factor : {100.0, kNan}) {
    Training run(60, 50, factor);
    NumericalStabilityManager guard(*run.optimizer);
    run.train(guard, 0, 50);
    std::vector<torch::Tensor> before;
    for (const auto& p : run.model->parameters()) before.push_back(p.detach().clone());
    run.train(guard, 50, 51);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], run.model->parameters()[i]));
    run.train(guard, 51, 60);
    EXPECT_FALSE(torch::equal(before[0], run.model->parameters()[0]));
    ASSERT_EQ(guard.events().size(), 1U);
    EXPECT_EQ(guard.events()[0].spike.step, 51);
    EXPECT_EQ(guard.events()[0].action, "skipped");
  }
}

TEST(NumericalStabilityManager, WarnOnlyNotes) {
  Training guarded(60, 50), plain(60, 50);
  NumericalStabilityManager guard(*guarded.optimizer, {.policy = StabilityPolicy::Warn});
  torch::manual_seed(2);
  guarded.train(guard, 0, 60);
  torch::manual_seed(2);
  for (std::size_t i = 0; i < 60; ++i) {
    plain.loss(i).backward();
    plain.optimizer->step();
  }
  expect_same(guarded.everything(), plain.everything());
  ASSERT_EQ(guard.events().size(), 1U);
  EXPECT_EQ(guard.events()[0].action, "noted");
}

TEST(NumericalStabilityManager, BacksOffAndReturns) {
  auto p = torch::zeros({2}).requires_grad_();
  SGD optimizer({p}, SGDOptions(1.0));
  NumericalStabilityManager guard(optimizer,
                                  {.policy = StabilityPolicy::Backoff, .backoff_factor = 0.2, .backoff_steps = 4});
  const std::vector<double> expected = {1, 0, 0.2, 0.4, 0.6, 0.8, 1, 1};
  for (int i = 0; i < 46; ++i) {
    const double before = p[0].item<double>();
    p.mutable_grad() = torch::full({2}, i == 39 ? 80.0 : 1.0);
    guard.step(torch::ones({}));
    if (i < 38) continue;
    EXPECT_NEAR(before - p[0].item<double>(), expected[static_cast<std::size_t>(i - 38)], 1e-5) << i;
  }
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1.0);
}

// Steps with a schedule and a place in the data that are rolled back too; `left_out` is never seen.
std::vector<torch::Tensor> train_with_rollback(Training& run, NumericalStabilityManager& guard, std::size_t left_out) {
  CosineAnnealing schedule(*run.optimizer, 200);
  std::size_t next = 0;
  guard.restore_also(run.model->buffers());
  guard.restore_also([&] {
    return [&schedule, &next, state = schedule.state_dict(), place = next] {
      schedule.load_state_dict(state);
      next = place;
    };
  });
  while (next < run.data.size()) {
    const std::size_t i = next++;
    if (i == left_out || guard.skip_batch()) continue;
    const auto value = run.loss(i);
    value.backward();
    guard.step(value);
    schedule.step();
  }
  return run.everything();
}

TEST(NumericalStabilityManager, AfterARollbackTrainingIsThatWithoutTheBadBatch) {
  const StabilityOptions options{.policy = StabilityPolicy::Rollback, .every = 20};
  Training bad(110, 73), clean(110, 73);
  NumericalStabilityManager first(*bad.optimizer, options), second(*clean.optimizer, options);
  torch::manual_seed(2);
  const auto rolled = train_with_rollback(bad, first, 1000);
  torch::manual_seed(2);
  const auto straight = train_with_rollback(clean, second, 73);
  expect_same(rolled, straight);
  EXPECT_EQ(first.rollbacks(), 1);
  EXPECT_EQ(second.rollbacks(), 0);
  ASSERT_EQ(first.events().size(), 1U);
  EXPECT_EQ(first.events()[0].action, "rolled back to step 60");
}

TEST(NumericalStabilityManager, TakesOlderSnapshotsAndThenGivesUp) {
  Training run(60), bad(1, 0);
  NumericalStabilityManager guard(*run.optimizer,
                                  {.policy = StabilityPolicy::Rollback, .every = 10, .keep = 2, .max_rollbacks = 2});
  guard.restore_also(run.model->buffers());
  std::vector<torch::Tensor> at_50;
  for (std::size_t i = 0; i < 55; ++i) {
    run.train(guard, i, i + 1);
    if (i + 1 == 50) at_50 = run.everything();
  }
  run.data.push_back(bad.data[0]);
  const std::size_t last = run.data.size() - 1;
  run.train(guard, last, last + 1);
  EXPECT_TRUE(guard.rolled_back());
  expect_same(run.everything(), at_50);
  run.train(guard, last, last + 1);
  EXPECT_EQ(guard.events().back().action, "rolled back to step 40");
  EXPECT_THROW(run.train(guard, last, last + 1), Error);
}

TEST(NumericalStabilityManager, StateMadeAfterTheSnapshotGoesAgain) {
  auto a = torch::zeros({3}).requires_grad_(), b = torch::ones({3}).requires_grad_();
  AdamW optimizer({a, b}, AdamWOptions(1e-2).ema_decay(0.9));
  NumericalStabilityManager guard(optimizer, {.policy = StabilityPolicy::Rollback, .every = 5});
  const auto step = [&](bool late, double grad) {
    a.mutable_grad() = torch::full({3}, grad);
    b.mutable_grad() = late ? torch::full({3}, grad) : torch::Tensor();
    guard.step();
  };
  for (int i = 0; i < 5; ++i) step(false, 1);
  const auto then = a.detach().clone();
  for (int i = 0; i < 3; ++i) step(true, 1);
  EXPECT_TRUE(optimizer.tail().state(1).ema.defined());
  step(true, kNan);
  EXPECT_TRUE(guard.rolled_back());
  EXPECT_TRUE(torch::equal(a, then));
  EXPECT_TRUE(torch::equal(b, torch::ones({3})));
  EXPECT_FALSE(optimizer.tail().state(1).ema.defined());
  EXPECT_FALSE(optimizer.tail().state(1).moments[0].defined());
}

TEST(NumericalStabilityManager, SevenBytesAParameterGoBackToTheBit) {
  const auto trained = [](int bad) {
    torch::manual_seed(0);
    auto p = torch::randn({64, 48}, torch::kBFloat16).requires_grad_();
    AdamW optimizer({p}, AdamWOptions(1e-2)
                             .state_dtype(StateFormat::Int8)
                             .master_weights(MasterFormat::Int8)
                             .stochastic_rounding(true)
                             .ema_decay(0.9));
    NumericalStabilityManager guard(optimizer, {.policy = StabilityPolicy::Rollback, .every = 10});
    for (int step = 1; step <= 30; ++step) {
      torch::manual_seed(step);
      p.mutable_grad() = torch::randn({64, 48}, torch::kBFloat16) * (step == bad ? kNan : 1.0);
      guard.step();
      if (guard.rolled_back()) {
        bad = 0;
        step = 20;
      }
    }
    const ParamState& s = optimizer.tail().state(0);
    return std::vector<torch::Tensor>{p.detach(), s.step, s.moments[0], s.moments[1], s.scales[0], s.low_bits, s.ema};
  };
  expect_same(trained(27), trained(0));
}

TEST(NumericalStabilityManager, CodesThatWereLaidOutAnewGoBackWithTheirScales) {
  torch::manual_seed(0);
  auto p = torch::randn({8, 4, 6, 6}).requires_grad_();
  AdamW optimizer({p}, AdamWOptions(1e-2).state_dtype(StateFormat::Int8));
  NumericalStabilityManager guard(optimizer, {.policy = StabilityPolicy::Rollback, .every = 10});
  // Each element has a size of its own, so that codes under another's scale are seen.
  const auto sizes = torch::logspace(-3, 1, p.numel()).view_as(p);
  const auto step = [&](double times) {
    p.mutable_grad() = torch::randn_like(p) * sizes * times;
    guard.step();
  };
  for (int i = 0; i < 10; ++i) step(1);
  const ParamState then = optimizer.tail().decoded_state(0);
  const auto weights = p.detach().clone();
  {
    const torch::NoGradGuard no_grad;
    p.set_data(p.contiguous(at::MemoryFormat::ChannelsLast));
  }
  for (int i = 0; i < 2; ++i) step(1);
  ASSERT_TRUE(optimizer.tail().state(0).moments[0].is_contiguous(at::MemoryFormat::ChannelsLast));
  step(kNan);
  ASSERT_TRUE(guard.rolled_back());
  EXPECT_TRUE(torch::equal(p, weights));
  const ParamState back = optimizer.tail().decoded_state(0);
  for (const std::size_t k : {0U, 1U}) {  // coded anew in the layout that the weights have now
    const auto apart = (back.moments[k] - then.moments[k]).norm().item<double>();
    EXPECT_LT(apart, 0.05 * then.moments[k].norm().item<double>()) << k;
  }
}

TEST(NumericalStabilityManager, WhatGoesBackStaysTheSameTensors) {
  auto p = torch::randn({20}).requires_grad_();
  AdamW optimizer({p}, AdamWOptions(1e-2));
  NumericalStabilityManager guard(optimizer, {.policy = StabilityPolicy::Rollback, .every = 5});
  const auto step = [&](double times) {
    p.mutable_grad() = torch::ones({20}) * times;
    guard.step();
  };
  for (int i = 0; i < 7; ++i) step(1);
  const void* const held = optimizer.tail().state(0).moments[0].const_data_ptr();
  step(kNan);
  ASSERT_TRUE(guard.rolled_back());
  EXPECT_EQ(optimizer.tail().state(0).moments[0].const_data_ptr(), held);
}

TEST(NumericalStabilityManager, ServesALossScaler) {
  Training run(60, 50);
  amp::GradScaler scaler(amp::GradScalerOptions{.init_scale = 1e38});
  NumericalStabilityManager guard(*run.optimizer);
  for (std::size_t i = 0; i < 60; ++i) {
    const auto value = run.loss(i);
    scaler.scale(value).backward();
    guard.step(value, [&] { scaler.step(*run.optimizer); }, scaler.is_enabled());
    scaler.update();
  }
  EXPECT_LT(scaler.get_scale(), 1e38);  // overflows came, and were the scaler's alone
  ASSERT_EQ(guard.events().size(), 1U);
  EXPECT_EQ(guard.events()[0].spike.step, 51);
}

TEST(NumericalStabilityManager, RefusesWhatItCannotServe) {
  auto p = torch::zeros({2}).requires_grad_();
  SGD propagating({p}, SGDOptions(0.1).nonfinite(NonFinite::Propagate));
  EXPECT_THROW(NumericalStabilityManager{propagating}, Error);
  NumericalStabilityManager(propagating, {.policy = StabilityPolicy::Warn});
  SGD optimizer({p}, SGDOptions(0.1));
  for (const StabilityOptions& options : {StabilityOptions{.backoff_factor = 1}, StabilityOptions{.every = 0},
                                          StabilityOptions{.keep = 0}, StabilityOptions{.max_rollbacks = 0}}) {
    EXPECT_THROW(NumericalStabilityManager(optimizer, options), Error);
  }
}

}  // namespace
}  // namespace oxytorch::optim
