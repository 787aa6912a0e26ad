/// The training runs that faults are planted in, and the places where a fault reaches into them.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/tune/run.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/verify.h"

namespace oxytorch::planted {

namespace F = torch::nn::functional;

/// Whether a fault acts, by the number of updates taken before and the batch under way.
using Acts = std::function<bool(int taken, const Batch& batch)>;

/// A block of a language model with dropout and tied weights; its fields are what faults change.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(std::int64_t vocabulary = 31, std::int64_t width = 32) {
    table = register_module("table", torch::nn::Embedding(vocabulary, width));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 2 * width));
    down = register_module("down", torch::nn::Linear(2 * width, width));
    drop = register_module("drop", torch::nn::Dropout(0.1));
  }
  at::Tensor masked(const at::Tensor& x) {
    if (!own_rate) return drop(x);
    const double rate = drop->options.p() > 0 ? *own_rate : 0;  // switched off with dropout
    return x * (torch::rand(x.sizes(), x.options().dtype(at::kFloat)) >= rate) / (1 - rate);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = table(tokens);
    const auto rows = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv(norm(x)).view({rows, length, 3, 4, width / 4}).permute({2, 0, 3, 1, 4});
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, causal);
    x = x + masked(out(mixed.transpose(1, 2).reshape({rows, length, width})));
    const auto weight = stale_up.defined() ? stale_up + (up->weight - up->weight.detach()) : up->weight;
    const auto hidden = at::gelu(at::linear(x, weight, up->bias));
    x = x + masked(down(detached ? hidden.detach() : hidden));
    return at::linear(x, untied.defined() ? untied : table->weight);
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  torch::nn::Dropout drop{nullptr};
  bool causal = true, detached = false;
  std::optional<double> own_rate;
  at::Tensor untied, stale_up;
};
TORCH_MODULE(Attention);

/// What a fault replaces while it is active; nothing set is the run as given.
struct Reach {
  std::function<at::Tensor(const at::Tensor& x)> model;
  std::function<at::Tensor(const at::Tensor& out)> outputs;
  std::function<at::Tensor(const Batch& batch)> loss;  ///< of a whole batch, in place of model and criterion
  std::function<void()> after_loss;
  std::function<void(torch::optim::Optimizer& own)> step;
  bool clips = false;  ///< by itself: the run does not
};

struct PlantedRun {
  std::shared_ptr<torch::nn::Module> model;
  std::function<at::Tensor(const at::Tensor& x)> forward;
  std::function<at::Tensor(const at::Tensor& out, const at::Tensor& target)> criterion;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<Batch> batches;
  double clip_norm = 0;
  Reach reach = {};
  int taken = 0;  ///< updates since the fault became active
  Batch under_way = {};

  std::unique_ptr<tune::Run> run = {};
  std::unique_ptr<tune::Snapshot> snapshot = {};
  std::unique_ptr<tune::Verifier> verifier = {};

  [[nodiscard]] const at::Tensor& parameter(std::size_t i) const { return run->parameters()[i]; }
  [[nodiscard]] at::Tensor plain_loss(const Batch& batch) {
    auto out = reach.model ? reach.model(batch.input) : forward(batch.input);
    return criterion(reach.outputs ? reach.outputs(out) : out, batch.target);
  }
  [[nodiscard]] at::Tensor loss(const Batch& batch) {
    under_way = batch;
    auto value = reach.loss ? reach.loss(batch) : plain_loss(batch);
    if (reach.after_loss) reach.after_loss();
    return value;
  }
  /// Begins the run: `warm` steps, then its snapshot and its verifier.
  void start(int warm) {
    run =
        std::make_unique<tune::Run>(*model, *optimizer, [this](const Batch& b) { return loss(b); }, batches, clip_norm);
    for (int i = 0; i < warm; ++i) run->step(batches[static_cast<std::size_t>(i) % batches.size()]);
    snapshot = std::make_unique<tune::Snapshot>(*run);
    verifier = std::make_unique<tune::Verifier>(*run, *snapshot);
  }
};

inline at::Tensor cross_entropy(const at::Tensor& out, const at::Tensor& target) {
  return F::cross_entropy(out.dim() == 3 ? out.flatten(0, 1) : out, target.flatten());
}

/// Of a Sequential of any modules.
template <class Model>
void take_model(PlantedRun& planted, Model model) {
  planted.model = model.ptr();
  planted.forward = [model](const at::Tensor& x) mutable { return model->forward(x); };
}

/// Batch norm, two parameter groups, clipping.
inline PlantedRun mlp() {
  PlantedRun planted;
  take_model(planted, torch::nn::Sequential(torch::nn::Linear(16, 24), torch::nn::BatchNorm1d(24), torch::nn::Tanh(),
                                            torch::nn::Linear(24, 24), torch::nn::Tanh(), torch::nn::Linear(24, 5)));
  std::vector<at::Tensor> matrices, others;
  for (const auto& p : planted.model->parameters()) (p.dim() > 1 ? matrices : others).push_back(p);
  const auto options = [](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-3).weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, options(0.1));
  groups.emplace_back(others, options(0));
  planted.optimizer = std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(3e-3));
  for (int i = 0; i < 4; ++i) planted.batches.push_back({torch::randn({31, 16}), torch::randint(0, 5, {31})});
  planted.criterion = cross_entropy;
  planted.clip_norm = 0.5;
  return planted;
}

/// Convolutions and momentum.
inline PlantedRun conv() {
  using namespace torch::nn;
  PlantedRun planted;
  take_model(planted, Sequential(Conv2d(Conv2dOptions(3, 8, 3).padding(1)), BatchNorm2d(8), ReLU(), MaxPool2d(2),
                                 Conv2d(Conv2dOptions(8, 8, 3).padding(1)), BatchNorm2d(8), ReLU(),
                                 AdaptiveAvgPool2d(2), Flatten(), Linear(32, 4)));
  planted.optimizer = std::make_unique<torch::optim::SGD>(
      planted.model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(1e-3));
  for (int i = 0; i < 4; ++i) planted.batches.push_back({torch::randn({16, 3, 12, 12}), torch::randint(0, 4, {16})});
  planted.criterion = cross_entropy;
  return planted;
}

/// Attention, tied weights, dropout.
inline PlantedRun gpt() {
  PlantedRun planted;
  take_model(planted, Attention());
  planted.optimizer = std::make_unique<torch::optim::AdamW>(planted.model->parameters(),
                                                            torch::optim::AdamWOptions(1e-3).betas({0.8, 0.95}));
  for (int i = 0; i < 4; ++i) {
    planted.batches.push_back({torch::randint(0, 31, {8, 12}), torch::randint(0, 31, {8, 12})});
  }
  planted.criterion = cross_entropy;
  return planted;
}

/// Steps the user's optimizer as the fault has it.
class PlantedOptimizer : public torch::optim::Optimizer {
 public:
  PlantedOptimizer(torch::optim::Optimizer& own, PlantedRun& planted)
      : Optimizer(groups_of(own), own.defaults().clone()), own_(own), planted_(planted) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    if (planted_.reach.step) {
      planted_.reach.step(own_);
    } else {
      own_.step();
    }
    ++planted_.taken;
    return {};
  }

 private:
  static std::vector<torch::optim::OptimizerParamGroup> groups_of(torch::optim::Optimizer& own) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const auto& g : own.param_groups()) groups.emplace_back(g.params(), g.options().clone());
    return groups;
  }
  torch::optim::Optimizer& own_;
  PlantedRun& planted_;
};

// -- runs whose numbers are hard: tiny, huge, cancelling, clipped, beside kinks ---------------------------------------

struct Hard {
  double factor = 1;  ///< of the loss
  double clip = 0;
  double lr = 1e-3, eps = 1e-8, decay = 1e-2;
  bool amsgrad = false, relu = false;
  int warm = 1;
};

inline PlantedRun small(const Hard& hard) {
  using namespace torch::nn;
  PlantedRun planted;
  const auto width = hard.relu ? 256 : 32;
  Sequential model;
  const auto act = [&] {
    if (hard.relu) {
      model->push_back(ReLU());
    } else {
      model->push_back(Tanh());
    }
  };
  model->push_back(Linear(16, width));
  act();
  model->push_back(Linear(width, width));
  act();
  model->push_back(Linear(width, 5));
  take_model(planted, model);
  planted.optimizer = std::make_unique<torch::optim::AdamW>(
      planted.model->parameters(),
      torch::optim::AdamWOptions(hard.lr).eps(hard.eps).weight_decay(hard.decay).amsgrad(hard.amsgrad));
  const std::int64_t rows = hard.relu ? 256 : 24;
  for (int i = 0; i < 4; ++i) planted.batches.push_back({torch::randn({rows, 16}), torch::randint(0, 5, {rows})});
  planted.criterion = [factor = hard.factor](const at::Tensor& out, const at::Tensor& y) {
    return factor * cross_entropy(out, y);
  };
  planted.clip_norm = hard.clip;
  return planted;
}

/// Few rows of a table are touched by a step.
struct LanguageImpl : torch::nn::Module {
  LanguageImpl(std::int64_t vocabulary, std::int64_t width, bool tied) {
    table = register_module("table", torch::nn::Embedding(vocabulary, width));
    if (!tied) head = register_module("head", torch::nn::Linear(width, vocabulary));
    for (const auto& p : parameters()) torch::nn::init::uniform_(p, -0.1, 0.1);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto x = table(tokens) * std::sqrt(static_cast<double>(table->options.embedding_dim()));
    return at::log_softmax(head ? head(x) : at::linear(x, table->weight), -1);
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Language);

inline PlantedRun language(std::int64_t vocabulary, std::int64_t width, std::vector<std::int64_t> shape, double clip,
                           bool tied, double lr = 1e-3) {
  PlantedRun planted;
  take_model(planted, Language(vocabulary, width, tied));
  planted.optimizer =
      std::make_unique<torch::optim::AdamW>(planted.model->parameters(), torch::optim::AdamWOptions(lr));
  const auto often = 1 / torch::arange(1, vocabulary + 1).to(at::kFloat);  // as words of a language
  for (int i = 0; i < 4; ++i) {
    const auto draw = [&] { return torch::multinomial(often, shape[0] * shape[1], true).view(shape); };
    planted.batches.push_back({draw(), draw()});
  }
  planted.criterion = [](const at::Tensor& out, const at::Tensor& y) {
    return F::nll_loss(out.flatten(0, 1), y.flatten());
  };
  planted.clip_norm = clip;
  return planted;
}

inline PlantedRun images() {
  using namespace torch::nn;
  PlantedRun planted;
  take_model(planted, Sequential(Conv2d(Conv2dOptions(3, 16, 3).padding(1)), BatchNorm2d(16), ReLU(), MaxPool2d(2),
                                 Conv2d(Conv2dOptions(16, 16, 3).padding(1)), BatchNorm2d(16), ReLU(),
                                 AdaptiveMaxPool2d(2), Flatten(), Linear(64, 5)));
  planted.optimizer =
      std::make_unique<torch::optim::AdamW>(planted.model->parameters(), torch::optim::AdamWOptions(1e-3));
  for (int i = 0; i < 4; ++i) planted.batches.push_back({torch::randn({32, 3, 16, 16}), torch::randint(0, 5, {32})});
  planted.criterion = [](const at::Tensor& out, const at::Tensor& y) { return cross_entropy(out.to(at::kFloat), y); };
  return planted;
}

/// A run by its name, and how many steps it has taken.
inline std::pair<std::function<PlantedRun()>, int> workload(const std::string& name) {
  static const std::map<std::string, Hard> hard{
      {"tiny gradients", {.factor = 1e-9}},
      {"gradients whose squares vanish", {.factor = 1e-24}},
      {"tiny gradients clipped", {.factor = 1e-6, .clip = 1e-7}},
      {"huge gradients", {.factor = 1e12}},
      {"huge gradients clipped", {.factor = 1e15, .clip = 0.25}},
      {"norm near the threshold", {.clip = 0.6}},
      {"very small eps", {.eps = 1e-16}},
      {"large eps", {.eps = 1e-2}},
      {"large learning rate", {.lr = 0.5}},
      {"amsgrad", {.clip = 0.3, .decay = 0.3, .amsgrad = true}},
      {"after a warm-up", {.warm = 200}},
      {"learned by heart", {.lr = 1e-2, .warm = 400}},
      {"relu", {.relu = true}},
  };
  if (name == "mlp") return {mlp, 4};
  if (name == "conv") return {conv, 4};
  if (name == "gpt") return {gpt, 4};
  if (name == "images") return {images, 1};
  if (name == "vocabulary of 2,000") return {[] { return language(2'000, 24, {10, 4}, 0.25, false); }, 1};
  if (name == "tied vocabulary") return {[] { return language(2'000, 16, {10, 4}, 0.1, true); }, 1};
  if (name == "few rows touched") return {[] { return language(4'000, 8, {3, 2}, 0, false, 1e-2); }, 1};
  return {[&one = hard.at(name)] { return small(one); }, hard.at(name).warm};
}

}  // namespace oxytorch::planted
