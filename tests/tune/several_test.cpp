// Several models and several optimizers in one step: what a GAN needs of accelerate(). The C++ half of
// tests/tune/test_several_models.py and test_several_models_verified.py.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate_fixture.h"
#include "oxytorch/error.h"
#include "oxytorch/trainer.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/verify.h"

namespace oxytorch::several_tests {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using accelerate_tests::clock;
using accelerate_tests::costs;
using accelerate_tests::delayed;
using accelerate_tests::only;
using accelerate_tests::pass_step;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using tune::Kind;
using tune::Run;
using Tensors = std::vector<at::Tensor>;

// -- steps ------------------------------------------------------------------------------------------------------------

/// What is trained, and the run that its step is made of.
struct Case {
  std::vector<std::shared_ptr<nn::Module>> models = {};
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers = {};
  std::vector<LossFunction> losses = {};
  std::vector<Batch> batches = {};

  [[nodiscard]] Models all_models() const {
    Models all;
    for (const auto& model : models) all.emplace_back(*model);
    return all;
  }
  [[nodiscard]] Optimizers all_optimizers() const {
    Optimizers all;
    for (const auto& optimizer : optimizers) all.emplace_back(*optimizer);
    return all;
  }
  [[nodiscard]] std::unique_ptr<Run> run(double clip_norm = 0) const {
    return std::make_unique<Run>(all_models(), all_optimizers(), losses, batches, clip_norm);
  }
  /// Weights, buffers, and the optimizers' averages.
  [[nodiscard]] Tensors state() const {
    Tensors all;
    for (const auto& model : models) {
      for (const auto& t : model->parameters()) all.push_back(t.detach().clone());
      for (const auto& t : model->buffers()) all.push_back(t.clone());
    }
    for (const auto& optimizer : optimizers) {
      for (const auto& group : optimizer->param_groups()) {
        for (const auto& p : group.params()) {
          const auto found = optimizer->state().find(p.unsafeGetTensorImpl());
          if (found == optimizer->state().end()) continue;
          if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(found->second.get())) {
            all.insert(all.end(), {adam->exp_avg().clone(), adam->exp_avg_sq().clone()});
          } else if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(found->second.get())) {
            all.push_back(sgd->momentum_buffer().clone());
          }
        }
      }
    }
    return all;
  }
  /// The loop that everybody writes, on one batch; the sum of the losses.
  double plain_step(const Batch& batch) const {
    double total = 0;
    for (std::size_t i = 0; i < losses.size(); ++i) {
      for (std::size_t k = 0; k < optimizers.size(); ++k) {
        if (losses.size() == 1 || i == k) optimizers[k]->zero_grad();
      }
      auto loss = losses[i](batch);
      loss.backward();
      for (std::size_t k = 0; k < optimizers.size(); ++k) {
        if (losses.size() == 1 || i == k) optimizers[k]->step();
      }
      total += loss.item<double>();
    }
    return total;
  }
};

void expect_same(const Tensors& got, const Tensors& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
}

std::unique_ptr<Adam> adam(const Tensors& parameters, double lr = 1e-2) {
  return std::make_unique<Adam>(parameters, AdamOptions(lr).betas({0.5, 0.999}));
}

/// A generator and a discriminator; the discriminator's optimizer steps first. Batches are real images and noise.
Case gan() {
  torch::manual_seed(0);
  nn::Sequential g(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(6, 8, 4).bias(false)), nn::BatchNorm2d(8), nn::ReLU(),
                   nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 3, 4).stride(2).padding(1).bias(false)),
                   nn::Tanh());
  nn::Sequential d(nn::Conv2d(nn::Conv2dOptions(3, 8, 4).stride(2).padding(1).bias(false)),
                   nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                   nn::Conv2d(nn::Conv2dOptions(8, 1, 4).bias(false)), nn::Flatten());
  const auto judged_as = [](const at::Tensor& out, double truth) {
    return F::binary_cross_entropy_with_logits(out, torch::full_like(out, truth));
  };
  Case made{.models = {g.ptr(), d.ptr()}};
  made.optimizers.push_back(adam(d->parameters(), 2e-3));
  made.optimizers.push_back(adam(g->parameters(), 2e-3));
  made.losses = {[=](const Batch& b) mutable {
                   return judged_as(d->forward(b.input), 1) + judged_as(d->forward(g->forward(b.target).detach()), 0);
                 },
                 [=](const Batch& b) mutable { return judged_as(d->forward(g->forward(b.target)), 1); }};
  torch::manual_seed(7);
  for (int i = 0; i < 4; ++i) made.batches.push_back({torch::randn({6, 3, 8, 8}), torch::randn({6, 6, 1, 1})});
  return made;
}

struct EncoderImpl : nn::Module {
  EncoderImpl() {
    embed = register_module("embed", nn::Embedding(12, 8));
    body = register_module("body", nn::Sequential(nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 8)));
  }
  at::Tensor forward(const at::Tensor& tokens) { return body->forward(embed(tokens)).mean(1); }
  nn::Embedding embed{nullptr};
  nn::Sequential body{nullptr};
};
TORCH_MODULE(Encoder);

struct HeadImpl : nn::Module {
  explicit HeadImpl(const at::Tensor& shared)
      : weight(register_parameter("weight", shared.defined() ? shared : 0.3 * torch::randn({12, 8}))),
        bias(register_parameter("bias", torch::zeros(12))) {}
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Head);

struct EncoderAndHead {
  explicit EncoderAndHead(bool tied) {
    torch::manual_seed(2);
    encoder = Encoder();
    head = Head(tied ? encoder->embed->weight : at::Tensor());
  }
  [[nodiscard]] LossFunction loss(bool flipped = false) const {
    return [encoder = encoder, head = head, flipped](const Batch& b) mutable {
      return F::cross_entropy(head(encoder(flipped ? b.input.flip(1) : b.input)), b.target);
    };
  }
  [[nodiscard]] Case made() const {
    Case found{.models = {encoder.ptr(), head.ptr()}, .losses = {loss()}};
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i) found.batches.push_back({torch::randint(12, {8, 5}), torch::randint(12, {8})});
    return found;
  }
  [[nodiscard]] Tensors parameters() const {
    auto all = encoder->parameters();
    all.push_back(head->bias);
    if (!head->weight.is_same(encoder->embed->weight)) all.push_back(head->weight);
    return all;
  }
  Encoder encoder{nullptr};
  Head head{nullptr};
};

// -- normal cases -----------------------------------------------------------------------------------------------------

Case tied() {
  const EncoderAndHead parts(true);
  auto made = parts.made();
  made.optimizers.push_back(adam(parts.parameters()));
  return made;
}
Case tied_in_two_optimizers() {
  const EncoderAndHead parts(true);
  auto made = parts.made();
  made.optimizers.push_back(adam(parts.encoder->parameters()));
  made.optimizers.push_back(
      std::make_unique<SGD>(Tensors{parts.encoder->embed->weight, parts.head->bias}, SGDOptions(0.1).momentum(0.9)));
  made.losses.push_back(parts.loss(/*flipped=*/true));
  return made;
}
Case frozen() {
  const EncoderAndHead parts(false);
  auto made = parts.made();
  for (auto& p : parts.encoder->parameters()) p.set_requires_grad(false);
  made.optimizers.push_back(adam(parts.parameters()));
  return made;
}
Case frozen_while_the_other_steps() {
  auto made = gan();
  made.losses[1] = [inner = made.losses[1], d = made.models[1]](const Batch& b) {
    for (auto& p : d->parameters()) p.set_requires_grad(false);
    auto loss = inner(b);
    for (auto& p : d->parameters()) p.set_requires_grad(true);
    return loss;
  };
  return made;
}
Case a_part() {
  const EncoderAndHead parts(false);
  auto made = parts.made();
  auto some = parts.encoder->body->parameters();
  some.push_back(parts.head->bias);
  made.optimizers.push_back(adam(some));
  return made;
}
Case one_loss_of_two_optimizers() {
  const EncoderAndHead parts(false);
  auto made = parts.made();
  made.optimizers.push_back(adam(parts.encoder->parameters()));
  made.optimizers.push_back(std::make_unique<SGD>(parts.head->parameters(), SGDOptions(0.1)));
  return made;
}

struct Normal {
  const char* name;
  Case (*make)();
};
constexpr std::array<Normal, 6> kNormal{{{"Tied", tied},
                                         {"TiedInTwoOptimizers", tied_in_two_optimizers},
                                         {"Frozen", frozen},
                                         {"FrozenWhileTheOtherSteps", frozen_while_the_other_steps},
                                         {"APart", a_part},
                                         {"OneLossOfTwoOptimizers", one_loss_of_two_optimizers}}};

// -- faults -----------------------------------------------------------------------------------------------------------

/// Does something wrong to a run; what it returns takes that back.
using Plant = std::function<std::function<void()>(Run& run)>;
Plant planted_now;

struct PlantedFault : accelerate_tests::NoDelay {  // so that only its numbers speak against it
  void apply(Run& run) override {
    NoDelay::apply(run);
    undo = planted_now(run);
  }
  void revert(Run& run) override {
    undo();
    NoDelay::revert(run);
  }
  std::function<void()> undo;
};

Plant wrong_gradient(std::size_t slot, double factor) {
  return [=](Run& run) {
    const auto& all = run.slots()[slot].parameters();
    const auto weight = *std::find_if(all.begin(), all.end(), [](const auto& p) { return p.requires_grad(); });
    const auto made = weight.register_hook([factor](const at::Tensor& grad) { return grad * factor; });
    return [weight, made] { weight.remove_hook(made); };
  };
}

/// The optimizer of a slot, and then something wrong.
struct Wrongly : torch::optim::Optimizer {
  using After = std::function<void(torch::optim::Optimizer& own, const Tensors& before)>;
  Wrongly(torch::optim::Optimizer& o, After a)
      : Optimizer(accelerate_tests::WrongOptimizer::copied(o), o.defaults().clone()), own(o), after(std::move(a)) {}
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    Tensors before;
    for (const auto& p : own.param_groups()[0].params()) before.push_back(p.detach().clone());
    if (steps) own.step();
    const torch::NoGradGuard no_grad;
    if (after) after(own, before);
    return {};
  }
  torch::optim::Optimizer& own;
  After after;
  bool steps = true;
};

Plant stepping(std::size_t slot, Wrongly::After after, bool steps = true) {
  return [=](Run& run) {
    run.replace_optimizer([=, wrong = &run.slots()[slot].original()](torch::optim::Optimizer& original) {
      tune::Replacement made;
      if (&original != wrong) return made;
      auto replacement = std::make_unique<Wrongly>(original, after);
      replacement->steps = steps;
      made.optimizer = std::move(replacement);
      made.hand_back = [] {};
      return made;
    });
    return [&run] { run.replace_optimizer({}); };
  };
}
Plant wrong_update(std::size_t slot, double factor) {
  return stepping(slot, [factor](auto& own, const Tensors& before) {
    for (std::size_t i = 0; i < before.size(); ++i) {
      auto p = own.param_groups()[0].params()[i];
      p.copy_(before[i] + factor * (p - before[i]));
    }
  });
}
Plant wrong_state(std::size_t slot, double factor) {
  return stepping(slot, [factor](auto& own, const Tensors&) {
    auto& state = *own.state().begin()->second;
    static_cast<torch::optim::AdamParamState&>(state).exp_avg_sq().mul_(factor);
  });
}
Plant no_step(std::size_t slot, double /*factor*/) { return stepping(slot, {}, /*steps=*/false); }
Plant wrong_buffer(std::size_t /*slot*/, double factor) {
  return [=](Run& run) {
    const auto mean = run.model().named_buffers()["model[0].1.running_mean"];
    run.scope("fault", [=]() -> std::shared_ptr<void> {
      return {nullptr, [=](void*) { mean.variable_data().add_(factor - 1); }};
    });
    return [&run] { run.scope("fault", {}); };
  };
}

tune::Ruling ruling_on(Run& run, const std::string& name, Kind kind) {
  tune::Snapshot snapshot(run);
  tune::Verifier verifier(run, snapshot);
  run.set_active({name});
  auto ruling = verifier.check(kind);
  run.set_active({});
  EXPECT_NO_THROW(snapshot.prove());
  return ruling;
}

class SeveralTest : public accelerate_tests::AccelerateTest {
 protected:
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    static const bool once = [] {
      tune::register_strategy<PlantedFault>("fault_of_one", Kind::Tolerance);
      return true;
    }();
    static_cast<void>(once);
  }
};

// -- the step ---------------------------------------------------------------------------------------------------------

TEST_F(SeveralTest, AStepIsThePlainLoop) {
  for (const auto& make : {gan, one_loss_of_two_optimizers}) {
    const auto plain = make(), mine = make();
    const auto run = mine.run();
    for (int i = 0; i < 6; ++i) {
      const auto& batch = plain.batches[static_cast<std::size_t>(i) % 4];
      EXPECT_FLOAT_EQ(run->take(batch).item<float>(), static_cast<float>(plain.plain_step(batch)));
    }
    EXPECT_EQ(run->taken(), 6);
    expect_same(mine.state(), plain.state());
  }
}

TEST_F(SeveralTest, EachOptimizerClipsItsOwnGradients) {
  const auto plain = gan(), mine = gan();
  const auto run = mine.run(/*clip_norm=*/0.05);
  for (const auto& batch : plain.batches) {
    for (std::size_t i = 0; i < 2; ++i) {
      plain.optimizers[i]->zero_grad();
      plain.losses[i](batch).backward();
      nn::utils::clip_grad_norm_(plain.optimizers[i]->param_groups()[0].params(), 0.05);
      plain.optimizers[i]->step();
    }
    run->step(batch);
  }
  const auto got = mine.state(), expected = plain.state();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-3, 1e-6)) << i;
}

TEST_F(SeveralTest, WhatThrowsLeavesNoGradients) {
  auto made = gan();
  made.losses[1] = [](const Batch&) -> at::Tensor { throw std::runtime_error("it was planted"); };
  const auto run = made.run();
  EXPECT_THROW(run->take(made.batches[0]), std::runtime_error);
  for (const auto& p : run->parameters()) EXPECT_FALSE(p.grad().defined());
  EXPECT_EQ(run->taken(), 0);
}

TEST_F(SeveralTest, RefusesWhatCannotBeMeant) {
  const auto made = gan();
  const auto refusal = [&](const Models& models, const Optimizers& optimizers, std::vector<LossFunction> losses) {
    try {
      tune::Run run(models, optimizers, std::move(losses), made.batches);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto models = made.all_models();
  const auto optimizers = made.all_optimizers();
  EXPECT_THAT(refusal({}, optimizers, made.losses), HasSubstr("there is no model"));
  EXPECT_THAT(refusal(models, {}, made.losses), HasSubstr("there is no optimizer"));
  EXPECT_THAT(refusal({models[0], models[0]}, optimizers, made.losses), HasSubstr("model[1] is the same object"));
  EXPECT_THAT(refusal(models, {optimizers[0], optimizers[0]}, made.losses),
              HasSubstr("optimizer[1] is the same object as optimizer[0]"));
  auto losses = made.losses;
  losses.push_back(losses.front());
  EXPECT_THAT(refusal(models, optimizers, losses), HasSubstr("there are 3 losses and 2 optimizers"));
  EXPECT_THAT(refusal(models, optimizers, {losses[0], LossFunction()}), HasSubstr("loss[1] is empty"));
  EXPECT_EQ(refusal(models, optimizers, made.losses), "");
  EXPECT_THROW(made.run()->take([] { return at::Tensor(); }), Error);
  EXPECT_THROW(static_cast<void>(accelerate(models, optimizers, {}, made.batches)), Error);
}

// -- strategies -------------------------------------------------------------------------------------------------------

TEST_F(SeveralTest, TheNativeStepOfEachGivesTheBitsOfThePlainLoop) {
  for (const auto& [name, make] : kNormal) {
    const auto plain = make(), mine = make();
    const auto run = mine.run();
    ASSERT_TRUE(run->strategy("native_step").applies(*run).holds) << name;
    run->set_active({"native_step"});
    for (const auto& slot : run->slots()) EXPECT_NE(&slot.optimizer(), &slot.original()) << name;
    for (const auto& batch : plain.batches) {
      plain.plain_step(batch);
      run->step(batch);
    }
    SCOPED_TRACE(name);
    expect_same(mine.state(), plain.state());
  }
}

TEST_F(SeveralTest, AnOptimizerThatIsNotFitStepsItself) {
  auto made = gan();
  made.optimizers[0] = std::make_unique<torch::optim::RMSprop>(made.models[1]->parameters());
  const auto run = made.run();
  run->set_active({"native_step"});
  EXPECT_EQ(&run->slots()[0].optimizer(), &run->slots()[0].original());
  EXPECT_NE(&run->slots()[1].optimizer(), &run->slots()[1].original());
  auto unfit = gan();
  for (std::size_t i = 0; i < 2; ++i) {
    unfit.optimizers[i] = std::make_unique<torch::optim::RMSprop>(unfit.models[1 - i]->parameters());
  }
  const auto neither = unfit.run();
  const auto answer = neither->strategy("native_step").applies(*neither);
  EXPECT_FALSE(answer.holds);
  EXPECT_THAT(answer.reason, AllOf(HasSubstr("optimizer[0]: "), HasSubstr("optimizer[1]: ")));
  EXPECT_FALSE(neither->strategy("split_2").applies(*neither).holds) << "there are two losses";
}

TEST_F(SeveralTest, EachStrategyIsVerifiedOnBoth) {
  for (const char* name : {"native_step", "step_tail", "int8_state", "channels_last", "bf16_autocast"}) {
    const auto made = gan();
    const auto run = made.run();
    const auto before = made.state();
    const auto ruling = ruling_on(*run, name, tune::find_strategy(name).kind);
    EXPECT_TRUE(ruling.held) << name << ": " << ruling.reason;
    SCOPED_TRACE(name);
    expect_same(made.state(), before);
  }
}

TEST_F(SeveralTest, NormalCasesAreVerified) {
  for (const auto& [name, make] : kNormal) {
    for (const char* strategy : {"native_step", "step_tail"}) {
      const auto made = make();
      const auto run = made.run();
      for (int i = 0; i < 2; ++i) run->step(made.batches[0]);
      const auto ruling = ruling_on(*run, strategy, tune::find_strategy(strategy).kind);
      EXPECT_TRUE(ruling.held) << name << ", " << strategy << ": " << ruling.reason;
    }
  }
}

TEST_F(SeveralTest, AFaultInEitherIsRefused) {
  const std::vector<std::pair<const char*, Plant (*)(std::size_t, double)>> faults = {{"gradient", wrong_gradient},
                                                                                      {"update", wrong_update},
                                                                                      {"state", wrong_state},
                                                                                      {"no step", no_step},
                                                                                      {"buffer", wrong_buffer}};
  for (const auto& [name, fault] : faults) {
    for (const std::size_t slot : {0U, 1U}) {
      for (const auto kind : {Kind::Exact, Kind::Tolerance, Kind::Precision}) {
        planted_now = fault(slot, kind == Kind::Precision ? 3 : 1.1);
        const auto made = gan();
        const auto run = made.run();
        for (int i = 0; i < 2; ++i) run->step(made.batches[0]);  // there is state to be wrong
        EXPECT_FALSE(ruling_on(*run, "fault_of_one", kind).held) << name << " of " << slot;
      }
    }
  }
}

TEST_F(SeveralTest, AFaultInANormalCaseIsRefusedAndNamed) {
  for (const auto& [name, make] : kNormal) {
    for (const auto& fault : {wrong_gradient, wrong_update}) {
      const auto made = make();
      const auto run = made.run();
      planted_now = fault(run->slots().size() - 1, 1.1);
      for (const auto kind : {Kind::Exact, Kind::Tolerance}) {
        EXPECT_FALSE(ruling_on(*run, "fault_of_one", kind).held) << name;
      }
    }
  }
  const auto made = gan();
  const auto run = made.run();
  planted_now = wrong_update(1, 1.1);
  EXPECT_THAT(ruling_on(*run, "fault_of_one", Kind::Tolerance).reason, HasSubstr("model[0].0.weight"));
}

// -- accelerate() -----------------------------------------------------------------------------------------------------

/// Whose losses take time, twice as long while `delayed`.
Case timed_gan() {
  auto made = gan();
  for (auto& loss : made.losses) {
    loss = [inner = loss](const Batch& batch) {
      pass_step();
      if (delayed) clock.pass(costs.delay);
      return inner(batch);
    };
  }
  return made;
}

TEST_F(SeveralTest, AcceleratesAStepOfTwoAndLeavesThemAsTheyWere) {
  const auto plain = gan(), mine = timed_gan();
  planted_now = wrong_gradient(1, 1.1);
  auto plan = accelerate(mine.all_models(), mine.all_optimizers(), mine.losses, mine.batches,
                         only({"fault_of_one", "no_delay", "native_step", "split_2"}));
  EXPECT_EQ(accelerate_tests::entry(plan, "fault_of_one").status, tune::Status::Refused);
  EXPECT_THAT(plan.accepted(), ElementsAre("no_delay"));
  EXPECT_NEAR(plan.speedup().mid, 2, 0.1);
  expect_same(mine.state(), plain.state());
  for (int i = 0; i < 40; ++i) {
    const auto& batch = plain.batches[static_cast<std::size_t>(i) % 4];
    EXPECT_FLOAT_EQ(plan.step(batch).item<float>(), static_cast<float>(plain.plain_step(batch)));
  }
  expect_same(mine.state(), plain.state());
  EXPECT_THAT(plan.certificate().events, IsEmpty());
  EXPECT_THROW(Trainer(plan, PerformanceConfig("basic")), Error);
  plan.revert();
  EXPECT_TRUE(delayed);
}

TEST_F(SeveralTest, ALoopOfOnesOwnStepsEachByItsNumber) {
  const auto plain = gan(), mine = timed_gan();
  auto plan =
      accelerate(mine.all_models(), mine.all_optimizers(), mine.losses, mine.batches, only({"no_delay"}).loop("yours"));
  EXPECT_THAT(plan.accepted(), ElementsAre("no_delay"));
  for (int i = 0; i < 40; ++i) {
    const auto& batch = plain.batches[static_cast<std::size_t>(i) % 4];
    plain.plain_step(batch);
    for (std::size_t part = 0; part < 2; ++part) {
      mine.optimizers[part]->zero_grad();
      plan.loss(batch, part).backward();
      plan.update(part);
    }
  }
  expect_same(mine.state(), plain.state());
  EXPECT_THROW(static_cast<void>(plan.loss(plain.batches[0], 2)), Error);
  EXPECT_THROW(static_cast<void>(plan.optimizer(2)), std::out_of_range);
}

}  // namespace
}  // namespace oxytorch::several_tests
