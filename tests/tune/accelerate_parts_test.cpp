// The parts of accelerate(): switching strategies, and the verifier.
#include <gmock/gmock.h>

#include <functional>

#include "accelerate_fixture.h"
#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/verify.h"

namespace oxytorch::accelerate_tests {
namespace {

using testing::HasSubstr;

TEST_F(AccelerateTest, TheStepTailCarriesStateBothWays) {
  for (const auto& name : kOptimizers) {
    if (name == "oxytorch") continue;
    const auto batches = make_batches();
    auto reference = make_model();
    auto plain_optimizer = make_optimizer(name, reference);
    tune::Run plain(*reference, *plain_optimizer, loss_of(reference), batches);
    torch::manual_seed(5);
    for (int i = 0; i < 9; ++i) plain.step(batches[static_cast<std::size_t>(i) % 4]);
    auto model = make_model();
    auto optimizer = make_optimizer(name, model);
    tune::Run run(*model, *optimizer, loss_of(model), batches);
    torch::manual_seed(5);
    for (int i = 0; i < 9; ++i) {
      run.set_active(i / 3 == 1 ? std::vector<std::string>{"step_tail"} : std::vector<std::string>{});
      run.step(batches[static_cast<std::size_t>(i) % 4]);
    }
    for (std::size_t i = 0; i < run.parameters().size(); ++i) {
      // Of the bias before the normalisation the gradient is rounding alone, and these optimizers scale it up.
      if (run.parameters()[i].is_same(model->encode->bias)) continue;
      EXPECT_TRUE(at::allclose(run.parameters()[i], plain.parameters()[i], 1e-4, 1e-6)) << name << ' ' << i;
    }
  }
}

TEST_F(AccelerateTest, SwitchingWithoutAStepChangesNothing) {
  for (const auto& name : kOptimizers) {
    const auto batches = make_batches();
    auto model = make_model();
    auto optimizer = make_optimizer(name, model);
    tune::Run run(*model, *optimizer, loss_of(model), batches);
    for (int steps = 0; steps < 2; ++steps) {
      const auto before = state_of(model, *optimizer);
      if (name != "oxytorch") run.set_active({"step_tail"});
      run.set_active({"physical_cores"});
      run.set_active({});
      EXPECT_TRUE(state_of(model, *optimizer) == before) << name << " after " << steps << " steps";
      run.step(batches[0]);
    }
  }
}

TEST_F(AccelerateTest, ChannelsLastGivesTheWeightsTheirMemoryBack) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)), torch::nn::ReLU(),
                              torch::nn::AdaptiveAvgPool2d(1), torch::nn::Flatten(), torch::nn::Linear(8, 2));
  torch::optim::AdamW optimizer(model->parameters());
  const std::vector<Batch> batches{{torch::randn({4, 3, 12, 12}), torch::randint(0, 2, {4})}};
  tune::Run run(*model, optimizer, supervised(model, torch::nn::CrossEntropyLoss()), batches);
  run.step(batches[0]);
  tune::Snapshot snapshot(run);
  const auto weight = model->parameters()[0];
  const auto* const memory = weight.const_data_ptr();
  for (const auto& names : std::vector<std::vector<std::string>>{{"channels_last"}, {"step_tail", "channels_last"}}) {
    run.set_active(names);
    EXPECT_TRUE(weight.is_contiguous(at::MemoryFormat::ChannelsLast));
    run.step(batches[0]);
    run.set_active({});
    EXPECT_EQ(weight.const_data_ptr(), memory);
    EXPECT_TRUE(weight.is_contiguous());
    EXPECT_NE(snapshot.digest(), snapshot.held());
    snapshot.restore();
    EXPECT_NO_THROW(snapshot.prove());
  }
  tune::Verifier verifier(run, snapshot);
  run.set_active({"channels_last", "step_tail"});
  const auto ruling = verifier.check(Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  EXPECT_EQ(run.active().size(), 2U);
}

TEST_F(AccelerateTest, ChannelsLastIsForOptimizersOfOursTooAlsoInMidRun) {
  namespace nn = torch::nn;
  using Made = std::unique_ptr<torch::optim::Optimizer>;
  const auto make = [](int kind, const std::vector<at::Tensor>& parameters) -> Made {
    const optim::AdamWOptions adam(1e-2);
    if (kind == 0) return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions(adam).ema_decay(0.9));
    if (kind == 1) return std::make_unique<optim::SGD>(parameters, optim::SGDOptions(1e-2).momentum(0.9));
    return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions(adam).state_dtype(optim::StateFormat::Int8));
  };
  const std::vector<Batch> batches{{torch::randn({4, 3, 12, 12}), torch::randint(0, 2, {4})}};
  for (const int kind : {0, 1, 2}) {
    SCOPED_TRACE(kind);
    std::vector<at::Tensor> ends;
    for (const bool switches : {false, true}) {
      torch::manual_seed(0);
      nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(3, 8, 3)), nn::ReLU(), nn::AdaptiveAvgPool2d(1), nn::Flatten(),
                           nn::Linear(8, 2));
      const auto optimizer = make(kind, model->parameters());
      tune::Run run(*model, *optimizer, supervised(model, nn::CrossEntropyLoss()), batches);
      for (int i = 0; i < 8; ++i) {
        run.set_active(switches && i % 4 > 1 ? std::vector<std::string>{"channels_last"} : std::vector<std::string>{});
        run.step(batches[0]);
        if (!switches || i != 1) continue;
        EXPECT_TRUE(run.strategy("channels_last").applies(run).holds);
        tune::Snapshot snapshot(run);
        run.set_active({"channels_last"});
        run.step(batches[0]);
        run.set_active({});
        EXPECT_NE(snapshot.digest(), snapshot.held());
        snapshot.restore();
        EXPECT_NO_THROW(snapshot.prove());
        tune::Verifier verifier(run, snapshot);
        run.set_active({"channels_last"});
        const auto ruling = verifier.check(Kind::Tolerance);
        EXPECT_EQ(ruling.held, kind != 2) << ruling.reason << " (8-bit state shares its scales with other neighbours)";
        run.set_active({});
        EXPECT_NO_THROW(snapshot.prove());
      }
      run.set_active({});
      ends.push_back(torch::nn::utils::parameters_to_vector(model->parameters()).detach());
    }
    const double loose = kind == 2 ? 2000 : 1;
    EXPECT_TRUE(at::allclose(ends[0], ends[1], 1e-4, 1e-5 * loose)) << (ends[0] - ends[1]).abs().max();
  }
}

TEST_F(AccelerateTest, WithoutABatchOrALossNothingIsTried) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  EXPECT_THROW(static_cast<void>(accelerate(*model, *optimizer, loss_of(model), {}, only({"no_delay"}))), Error);
  EXPECT_THROW(static_cast<void>(accelerate(*model, *optimizer, nullptr, make_batches(), only({"no_delay"}))), Error);
  tune::Run run(*model, *optimizer, loss_of(model), {});
  run.take(make_batches()[0]);
  EXPECT_EQ(run.taken(), 1);
  tune::Snapshot snapshot(run);
  EXPECT_THROW(tune::Verifier(run, snapshot), Error);
}

TEST_F(AccelerateTest, TheVerifierPassesWhatIsRightAndSaysWhatIsNot) {
  for (const auto& name : kOptimizers) {
    const auto batches = make_batches();
    auto model = make_model();
    auto optimizer = make_optimizer(name, model);
    tune::Run run(*model, *optimizer, loss_of(model), batches, 0.5);
    run.step(batches[0]);
    tune::Snapshot snapshot(run);
    tune::Verifier verifier(run, snapshot);
    EXPECT_TRUE(verifier.check(Kind::Exact).held) << name;
    EXPECT_TRUE(verifier.check(Kind::Tolerance).held) << name << verifier.check(Kind::Tolerance).reason;
    if (name != "oxytorch") {
      run.set_active({"step_tail"});
      const auto ruling = verifier.check(Kind::Tolerance);
      EXPECT_TRUE(ruling.held) << name << ": " << ruling.reason;
      run.set_active({});
    }
    run.set_active({"bf16_autocast"});
    EXPECT_FALSE(verifier.check(Kind::Tolerance).held) << name;
    const auto ruling = verifier.check(Kind::Precision);
    EXPECT_TRUE(ruling.held) << name << ": " << ruling.reason;
    run.set_active({});
    EXPECT_NO_THROW(snapshot.prove());
  }
}

/// Makes backward wrong in some steps.
struct WrongBackward : Strategy {
  void apply(Run& /*run*/) override { wrong = true; }
  void revert(Run& /*run*/) override { wrong = false; }
  static inline bool wrong = false;
};

TEST_F(AccelerateTest, TheVerifierSeesFaultsOfSomeStepsAlone) {
  tune::register_strategy<WrongBackward>("wrong_backward", Kind::Tolerance);
  struct Case {
    const char* name;
    std::function<bool(int)> acts;
    double factor;
  };
  const std::vector<Case> cases{
      {"zeroed each fifth step", [](int step) { return step % 5 == 0; }, 0},
      {"flipped in steps 2 to 6", [](int step) { return step >= 2 && step <= 6; }, -1},
      {"1.9 percent wrong in step 7", [](int step) { return step == 7; }, 1.019},
      {"zeroed each tenth step", [](int step) { return step % 10 == 0; }, 0},
      {"flipped from step 20 on", [](int step) { return step >= 20; }, -1},
  };
  for (const auto& one : cases) {
    auto model = make_model();
    auto optimizer = make_optimizer("AdamW", model);
    int taken = 0;
    tune::Run run(
        *model, *optimizer,
        [&, inner = loss_of(model)](const Batch& batch) {
          const auto value = inner(batch);
          if (!WrongBackward::wrong) {
            taken = 0;
            return value;
          }
          const double factor = one.acts(++taken) ? one.factor : 1;
          return value.detach() + (value - value.detach()) * factor;
        },
        make_batches());
    tune::Snapshot snapshot(run);
    tune::Verifier verifier(run, snapshot);
    EXPECT_TRUE(verifier.check(Kind::Tolerance).held) << verifier.check(Kind::Tolerance).reason;
    run.set_active({"wrong_backward"});
    const auto ruling = verifier.check(Kind::Tolerance);
    EXPECT_FALSE(ruling.held) << one.name;
    EXPECT_THAT(ruling.reason, HasSubstr("step ")) << one.name;
    EXPECT_EQ(ruling.evidence.count("drawn_by"), 1U);
  }
}

TEST_F(AccelerateTest, TheVerifierTakesTorchsOwnNormForWhatItIs) {
  // Of a norm over millions, torch's sum in float32 is off by more than any bound of an update.
  torch::manual_seed(0);
  struct ManyImpl : torch::nn::Module {
    ManyImpl() {
      weight = register_parameter("weight", torch::randn({3'000'000}) * 1e-3);
      sizes = register_buffer("sizes", torch::rand({3'000'000}).pow(8));
    }
    at::Tensor weight, sizes;
  };
  auto model = std::make_shared<ManyImpl>();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  const std::vector<Batch> batches{{torch::rand({4}) + 1, torch::zeros({1})}};
  tune::Run run(
      *model, optimizer,
      [model](const Batch& b) {
        return ((model->weight * model->sizes.to(model->weight.dtype())).sum() * b.input.mean() + 1).square();
      },
      batches, 0.25);
  run.step(batches[0]);
  tune::Snapshot snapshot(run);
  tune::Verifier verifier(run, snapshot, {.steps = 2, .span = 0, .trajectory = 2});
  const auto nothing = verifier.check(Kind::Tolerance);
  EXPECT_TRUE(nothing.held) << nothing.reason;
  run.set_active({"step_tail"});
  const auto ruling = verifier.check(Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  run.set_active({});
}

double gradient_factor = 1;

struct Factor : Strategy {
  void apply(Run& run) override {
    run.scope("autocast", [] { return std::make_shared<amp::Autocast>(at::kCPU, at::kBFloat16); });
    gradient_factor = 1.03;
  }
  void revert(Run& run) override {
    run.scope("autocast", {});
    gradient_factor = 1;
  }
};

TEST_F(AccelerateTest, TheVerifierSeesAFactorOnGradientsUnderBf16) {
  const auto batches = make_batches(4, 64);
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  tune::Run run(
      *model, *optimizer,
      [inner = loss_of(model)](const Batch& batch) {
        const auto value = inner(batch);
        return value.detach() + (value - value.detach()) * gradient_factor;
      },
      batches);
  tune::Snapshot snapshot(run);
  tune::Verifier verifier(run, snapshot);
  tune::register_strategy<Factor>("factor", Kind::Precision);
  run.set_active({"factor"});
  const auto ruling = verifier.check(Kind::Precision);
  EXPECT_FALSE(ruling.held);
  EXPECT_THAT(ruling.reason, HasSubstr("gradient"));
}

}  // namespace
}  // namespace oxytorch::accelerate_tests
