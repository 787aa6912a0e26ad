// The engine of StepGraph with recorders that play the step itself.
#include "oxytorch/trainer/step_graph.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "oxytorch/error.h"
#include "oxytorch/optim/optimizers.h"

namespace {

using oxytorch::GraphRecorder;
using oxytorch::StepGraph;
using oxytorch::StepGraphOptions;

struct Training {
  Training() {
    torch::manual_seed(0);
    model = torch::nn::Linear(4, 1);
    optimizer = std::make_unique<oxytorch::optim::AdamW>(model->parameters(),
                                                         oxytorch::optim::AdamWOptions(1e-2).clip_norm(1.0));
  }
  std::vector<at::Tensor> step(const std::vector<at::Tensor>& in) {
    if (recording) return {outcome};
    optimizer->zero_grad();
    const auto loss = torch::mse_loss(model->forward(in[0]), in[1]);
    loss.backward();
    optimizer->step();
    const torch::NoGradGuard no_grad;
    model->weight.add_(noise * std::uniform_real_distribution<double>(-1, 1)(order));
    return {loss.detach()};
  }

  torch::nn::Linear model{nullptr};
  double noise = 0;  // as of sums whose order no seed decides
  std::mt19937 order;
  std::unique_ptr<oxytorch::optim::AdamW> optimizer;
  bool recording = false;
  at::Tensor outcome = torch::zeros({});
};

// Records nothing; a replay is the step on the inputs that the recording was given.
struct Replayer final : GraphRecorder {
  Replayer(Training& training, std::vector<at::Tensor>& inputs, double error)
      : training(training), inputs(inputs), error(error) {}
  void begin() override { training.recording = true; }
  void end() override { training.recording = false; }
  void replay() override {
    training.outcome.copy_(training.step(inputs)[0]);
    const torch::NoGradGuard no_grad;
    training.model->bias.add_(error);
  }
  Training& training;
  std::vector<at::Tensor>& inputs;
  double error;
};

struct Graphed {
  explicit Graphed(double error = 0, StepGraphOptions options = {}) {
    options.warmup = 2;
    options.recorder = [this, error] { return std::make_unique<Replayer>(training, inputs, error); };
    graph = std::make_unique<StepGraph>(
        [this](const std::vector<at::Tensor>& in) {
          if (training.recording) inputs = in;
          return training.step(in);
        },
        std::vector<oxytorch::optim::TailOptimizer*>{training.optimizer.get()}, options);
  }
  Training training;
  std::vector<at::Tensor> inputs;
  std::unique_ptr<StepGraph> graph;
};

std::vector<at::Tensor> batch(int i) {
  torch::manual_seed(100 + i);
  return {torch::randn({3, 4}), torch::randn({3, 1})};
}

TEST(StepGraph, ReplaysAreTheEagerSteps) {
  Training eager;
  Graphed graphed;
  for (int i = 0; i < 50; ++i) {
    if (i == 20) {
      for (Training* t : {&eager, &graphed.training}) t->optimizer->param_groups()[0].options().set_lr(1e-3);
    }
    const auto expected = eager.step(batch(i))[0];
    const auto found = (*graphed.graph)(batch(i))[0];
    ASSERT_TRUE(torch::equal(expected, found)) << i;
  }
  EXPECT_TRUE(torch::equal(eager.model->weight, graphed.training.model->weight));
  EXPECT_TRUE(graphed.graph->replayed());
  EXPECT_EQ(graphed.graph->recordings(), 2);  // the second for the new rate
  EXPECT_EQ(graphed.graph->replays(), 48);
}

TEST(StepGraph, ARecordingThatIsNotTheStepIsNotUsed) {
  Training eager;
  Graphed graphed(1e-6);
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(torch::equal(eager.step(batch(i))[0], (*graphed.graph)(batch(i))[0])) << i;
  }
  EXPECT_FALSE(graphed.graph->replayed());
  EXPECT_EQ(graphed.graph->replays(), 1);
  EXPECT_NE(graphed.graph->reason().find("of the state differs"), std::string::npos) << graphed.graph->reason();
}

TEST(StepGraph, AStepThatNeverComesOutTheSameIsProvenByHowFarItDiffers) {
  Graphed graphed;
  graphed.training.noise = 1e-5;
  for (int i = 0; i < 3; ++i) (*graphed.graph)(batch(i));
  EXPECT_NE(graphed.graph->reason().find("as far as eager steps do"), std::string::npos) << graphed.graph->reason();
  (*graphed.graph)(batch(3));
  EXPECT_TRUE(graphed.graph->replayed());

  Graphed wrong(/*error=*/1e-3);  // of an update of 1e-2
  wrong.training.noise = 1e-5;
  for (int i = 0; i < 4; ++i) (*wrong.graph)(batch(i));
  EXPECT_FALSE(wrong.graph->replayed());
  EXPECT_NE(wrong.graph->reason().find("differs"), std::string::npos) << wrong.graph->reason();

  Graphed noisy(/*error=*/1e-3);
  noisy.training.noise = 1e-2;  // as large as the update: nothing is proven
  for (int i = 0; i < 4; ++i) (*noisy.graph)(batch(i));
  EXPECT_FALSE(noisy.graph->replayed());
}

TEST(StepGraph, TheStateThatAProofLeavesIsThatOfOneStep) {
  Graphed graphed;
  graphed.training.noise = 1e-5;
  Training eager;
  for (int i = 0; i < 3; ++i) {
    eager.step(batch(i));
    (*graphed.graph)(batch(i));
  }
  const auto off = (eager.model->weight - graphed.training.model->weight).abs().max().item<double>();
  EXPECT_LT(off, 1e-4);  // a step more or less is 1e-2
  EXPECT_GT(off, 0);
}

TEST(StepGraph, RatesOnTheDeviceAreNotRecordedAnew) {
  Graphed graphed;
  graphed.training.optimizer->use_lr_tensors();
  for (int i = 0; i < 10; ++i) {
    graphed.training.optimizer->param_groups()[0].options().set_lr(1e-2 / (1 + i));
    graphed.training.optimizer->sync_lr();
    (*graphed.graph)(batch(i));
  }
  EXPECT_EQ(graphed.graph->recordings(), 1);
}

TEST(StepGraph, AStepThatCannotBeRecordedRunsEagerly) {
  struct Refuses final : GraphRecorder {
    void begin() override { throw oxytorch::Error(oxytorch::ErrorCode::NotSupported, "no capture here."); }
    void end() override {}
    void replay() override {}
  };
  Training training;
  StepGraphOptions options;
  options.warmup = 1;
  options.recorder = [] { return std::make_unique<Refuses>(); };
  StepGraph graph([&](const auto& in) { return training.step(in); }, {training.optimizer.get()}, options);
  for (int i = 0; i < 4; ++i) graph(batch(i));
  EXPECT_EQ(graph.reason(), "the step could not be recorded: no capture here; steps run eagerly");
  EXPECT_FLOAT_EQ(training.optimizer->tail().state(0).step.item<float>(), 4);
}

TEST(StepGraph, RefusesBadInput) {
  EXPECT_THROW(StepGraph(nullptr, StepGraphOptions()), oxytorch::Error);
  const auto step = [](const std::vector<at::Tensor>& in) { return in; };
  EXPECT_THROW(StepGraph(step, StepGraphOptions{.warmup = 0}), oxytorch::Error);
  EXPECT_THROW(StepGraph(step, StepGraphOptions{.max_recordings = 0}), oxytorch::Error);
  StepGraph graph(step, StepGraphOptions());
  EXPECT_THROW(graph({}), oxytorch::Error);
  EXPECT_THROW(graph({at::Tensor()}), oxytorch::Error);
  EXPECT_THROW(oxytorch::make_graph_recorder(at::kCPU), oxytorch::Error);
}

}  // namespace
