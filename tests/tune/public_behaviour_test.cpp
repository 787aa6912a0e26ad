// What is called exact shows in nothing that a user of the model may read: each exact strategy, by every reader.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/tune/run.h"
#include "oxytorch/tune/strategy.h"

namespace oxytorch {
namespace {

using tune::Kind;
namespace nn = torch::nn;

/// Layers in a row; every activation is kept, as feature extraction does.
struct TapsImpl : nn::Cloneable<TapsImpl> {
  TapsImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
  void reset() override {
    layers = register_module(
        "layers", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::ReLU(),
                                 nn::MaxPool2d(2), nn::Dropout(0.3), nn::Conv2d(nn::Conv2dOptions(8, 8, 3).padding(1)),
                                 nn::GroupNorm(2, 8), nn::ReLU(), nn::Flatten(), nn::Linear(128, 16),
                                 nn::BatchNorm1d(16), nn::Hardtanh(), nn::Linear(16, 4)));
  }
  std::vector<at::Tensor> taps(const at::Tensor& x) {
    std::vector<at::Tensor> found{x};
    for (auto& layer : *layers) found.push_back(layer.forward(found.back()));
    return found;
  }
  at::Tensor forward(const at::Tensor& x) { return taps(x).back(); }
  nn::Sequential layers{nullptr};
};
TORCH_MODULE(Taps);

/// Each activation is used twice, before and after its nonlinearity; first and last weight are one.
struct TwiceImpl : nn::Cloneable<TwiceImpl> {
  TwiceImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
  void reset() override {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)));
    norm = register_module("norm", nn::BatchNorm2d(4));
    drop = register_module("drop", nn::Dropout(0.3));
    head = register_module("head", nn::Linear(4, 4));
  }
  std::vector<at::Tensor> taps(const at::Tensor& x) {
    const auto a = norm(first(x));
    const auto b = at::relu(a) + a;
    const auto c = drop(at::max_pool2d(b, 2)) + at::avg_pool2d(b, 2);
    const auto d = torch::linear(head(c.mean({2, 3})), head->weight.t());
    return {x, a, b, c, d};
  }
  at::Tensor forward(const at::Tensor& x) { return taps(x).back(); }
  nn::Conv2d first{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Dropout drop{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Twice);

std::unique_ptr<torch::optim::Optimizer> make_optimizer(int which, const std::vector<at::Tensor>& params) {
  if (which == 0) {
    return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(1e-2).amsgrad(true));
  }
  return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true));
}

/// Takes steps of a run in every way that a user may read it, and keeps the very tensors that it was given.
template <class Model>
class Readings {
 public:
  explicit Readings(int which) {
    torch::manual_seed(1);
    model = Model();
    optimizer = make_optimizer(which, model->parameters());
    for (int i = 0; i < 2; ++i) batches.push_back({torch::randn({6, 3, 8, 8}), torch::randint(4, {6})});
    run = std::make_unique<tune::Run>(*model, *optimizer, supervised(model, nn::CrossEntropyLoss()), batches);
    run->step(batches[0]);  // state is there, as in the middle of a run
  }

  /// All readings; what was given out is read at the end, so that later overwriting shows.
  std::vector<std::pair<std::string, std::string>> everything() {
    torch::manual_seed(5);
    keep("loss of a step of the run", run->step(batches[0]));
    step("first", batches[0], /*hooks=*/false);
    step("with hooks", batches[1], /*hooks=*/true);
    penalty(batches[1]);
    modes(batches[0]);
    keep("loss of a later step of the run", run->step(batches[1]));
    copies(batches[1]);
    step("after copies", batches[0], /*hooks=*/true);
    for (const auto& item : model->named_parameters()) keep("parameter " + item.key(), item.value());
    for (const auto& item : model->named_parameters()) keep("gradient of " + item.key(), item.value().grad());
    for (const auto& item : model->named_buffers()) keep("buffer " + item.key(), item.value());
    keep("random state", at::detail::getDefaultCPUGenerator().get_state());
    std::vector<std::pair<std::string, std::string>> found;
    for (const auto& [name, tensor] : kept) found.emplace_back(name, frozen(tensor));
    found.emplace_back("optimizer", saved(*optimizer));
    return found;
  }

  Model model{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<Batch> batches;
  std::unique_ptr<tune::Run> run;

 private:
  void keep(const std::string& name, const at::Tensor& tensor) { kept.emplace_back(name, tensor); }

  /// One step of the user's own, which reads and trains each activation.
  void step(const std::string& name, const Batch& batch, bool hooks) {
    optimizer->zero_grad();
    const auto taps = model->taps(batch.input);
    auto loss = nn::functional::cross_entropy(taps.back(), batch.target);
    for (std::size_t i = 0; i < taps.size(); ++i) {
      const auto what = "activation " + std::to_string(i) + ", " + name;
      keep(what, taps[i]);
      if (!taps[i].requires_grad()) continue;
      taps[i].retain_grad();
      loss = loss + taps[i].square().mean();
      if (!hooks) continue;
      taps[i].register_hook([this, what](const at::Tensor& grad) { keep("gradient hook of " + what, grad); });
      taps[i].grad_fn()->add_post_hook(std::make_unique<Post>(
          [this, what](const torch::autograd::variable_list& in, const torch::autograd::variable_list& out) {
            for (const auto& t : in) keep("from the node of " + what, t);
            for (const auto& t : out) keep("to the node of " + what, t);
          }));
      keep("name of " + what, torch::tensor(static_cast<std::int64_t>(hash_of(taps[i].grad_fn()->name()))));
    }
    loss.backward();
    keep("loss, " + name, loss);
    for (const auto& tap : taps) {
      if (tap.requires_grad()) keep("retained gradient, " + name, tap.grad());
    }
    run->optimizer().step();
  }

  struct Post : torch::autograd::FunctionPostHook {
    using Function = std::function<void(const torch::autograd::variable_list&, const torch::autograd::variable_list&)>;
    explicit Post(Function f) : function(std::move(f)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list& inputs) override {
      function(inputs, outputs);
      return outputs;
    }
    Function function;
  };

  static std::size_t hash_of(const std::string& text) { return std::hash<std::string>()(text) >> 1; }

  /// Gradients of gradients, as a gradient penalty takes them.
  void penalty(const Batch& batch) {
    optimizer->zero_grad();
    const auto loss = nn::functional::cross_entropy(model->forward(batch.input), batch.target);
    at::Tensor sum = torch::zeros({});
    for (const auto& grad : torch::autograd::grad({loss}, model->parameters(), {}, /*retain_graph=*/std::nullopt,
                                                  /*create_graph=*/true)) {
      sum = sum + grad.square().sum();
    }
    sum.backward();
    for (const auto& p : model->parameters()) keep("gradient penalty", p.grad());
  }

  void modes(const Batch& batch) {
    model->eval();
    keep("evaluation", model->forward(batch.input));
    {
      const torch::NoGradGuard no_grad;
      for (const auto& tap : model->taps(batch.input)) keep("evaluation without gradients", tap);
    }
    {
      const c10::InferenceMode inference;
      keep("inference", model->forward(batch.input).clone());
    }
    step("of evaluation mode", batch, /*hooks=*/true);
    model->train();
    step("back in training", batch, /*hooks=*/false);
  }

  void copies(const Batch& batch) {
    std::stringstream stream;
    torch::save(model, stream);
    Model loaded;
    torch::load(loaded, stream);
    const auto cloned = std::dynamic_pointer_cast<typename Model::ContainedType>(model->clone());
    for (const auto& twin : {loaded.ptr(), cloned}) {
      torch::manual_seed(8);
      keep("output of a copy", twin->forward(batch.input));
      for (const auto& item : twin->named_parameters()) keep("copy of " + item.key(), item.value());
      for (const auto& item : twin->named_buffers()) keep("copy of " + item.key(), item.value());
    }
  }

  static std::string saved(torch::optim::Optimizer& of) {
    std::string all;
    for (const auto& group : of.param_groups()) {
      for (const auto& p : group.params()) {
        const auto found = of.state().find(p.unsafeGetTensorImpl());
        if (found == of.state().end()) continue;
        torch::serialize::OutputArchive archive;
        found->second->serialize(archive);
        std::ostringstream text;
        archive.save_to(text);
        all += text.str();
      }
    }
    return all;
  }

  /// Values, layout and what autograd says of it, comparable by ==.
  static std::string frozen(const at::Tensor& tensor) {
    if (!tensor.defined()) return "undefined";
    std::ostringstream text;
    text << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.requires_grad() << tensor.is_leaf();
    const auto plain = tensor.detach().contiguous();
    text.write(static_cast<const char*>(plain.const_data_ptr()), static_cast<std::streamsize>(plain.nbytes()));
    return text.str();
  }

  std::vector<std::pair<std::string, at::Tensor>> kept;
};

/// The first reading in which a run with the strategy differs from one without; "does not apply" where it does not.
template <class Model>
std::string difference(const std::string& strategy, int optimizer) {
  Readings<Model> plain(optimizer), mine(optimizer);
  if (!mine.run->strategy(strategy).applies(*mine.run).holds) return "does not apply";
  mine.run->set_active({strategy});
  const auto found = mine.everything();
  mine.run->set_active({});
  const auto wanted = plain.everything();
  for (std::size_t i = 0; i < std::min(found.size(), wanted.size()); ++i) {
    if (found[i] != wanted[i]) return wanted[i].first;
  }
  return found.size() == wanted.size() ? "" : "another number of readings was taken";
}

std::vector<std::string> exact_strategies() {
  std::vector<std::string> names;
  for (const auto& strategy : tune::strategies()) {
    if (strategy.kind == Kind::Exact) names.push_back(strategy.name);
  }
  return names;
}

class PublicBehaviourTest : public testing::TestWithParam<std::string> {};

TEST_P(PublicBehaviourTest, AnExactStrategyShowsNowhere) {
  int applied = 0;
  for (const int optimizer : {0, 1}) {
    for (const auto& found : {difference<Taps>(GetParam(), optimizer), difference<Twice>(GetParam(), optimizer)}) {
      if (found == "does not apply") continue;
      ++applied;
      EXPECT_EQ(found, "") << "optimizer " << optimizer;
    }
  }
  // Several caches, and windows of several batches.
  const bool wants_more = GetParam() == "pinned_threads" || GetParam() == "packed_weights";
  EXPECT_TRUE(applied == 4 || wants_more) << applied;
}

INSTANTIATE_TEST_SUITE_P(Exact, PublicBehaviourTest, testing::ValuesIn(exact_strategies()),
                         [](const auto& each) { return each.param; });

/// Right in training, and seen by readers: activations are written over.
struct Overwrites : tune::Strategy {
  void apply(tune::Run& run) override { set(run, true); }
  void revert(tune::Run& run) override { set(run, false); }
  static void set(tune::Run& run, bool inplace) {
    for (const auto& module : run.model().modules()) {
      if (auto* const relu = module->as<nn::ReLU>()) relu->options.inplace(inplace);
    }
  }
};

TEST(PublicBehaviourReadersTest, TheySeeWhatIsWrittenOver) {
  tune::register_strategy<Overwrites>("overwrites", Kind::Exact);
  EXPECT_THAT(difference<Taps>("overwrites", 0), testing::HasSubstr("activation 2"));
}

}  // namespace
}  // namespace oxytorch
