#include "oxytorch/tune/accelerate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/host.h"
#include "oxytorch/load.h"
#include "oxytorch/logging.h"
#include "oxytorch/optim.h"
#include "oxytorch/tune/escrow.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/verify.h"

namespace oxytorch {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using tune::Kind;
using tune::Replacement;
using tune::Run;
using tune::Standing;
using tune::Strategy;

// -- a model with all that a step may write: tied weights, buffers, dropout -------------------------------------------

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    encode = register_module("encode", torch::nn::Linear(12, 12));
    norm = register_module("norm", torch::nn::BatchNorm1d(12));
    drop = register_module("drop", torch::nn::Dropout(0.2));
    head = register_module("head", torch::nn::Linear(12, 3));
    decode = register_parameter("decode", encode->weight);
  }
  at::Tensor forward(const at::Tensor& x) {
    return head(torch::relu(torch::linear(drop(torch::relu(norm(encode(x)))), decode.t())));
  }
  torch::nn::Linear encode{nullptr}, head{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout drop{nullptr};
  at::Tensor decode;
};
TORCH_MODULE(Tied);

Tied make_model() {
  torch::manual_seed(0);
  return Tied();
}

std::vector<Batch> make_batches(int count = 4, std::int64_t size = 16) {
  torch::manual_seed(3);
  std::vector<Batch> batches;
  for (int i = 0; i < count; ++i) batches.push_back({torch::randn({size, 12}), torch::randint(0, 3, {size})});
  return batches;
}

std::vector<at::Tensor> distinct(const Tied& model) {
  std::vector<at::Tensor> all;
  for (const auto& p : model->parameters()) {
    if (std::none_of(all.begin(), all.end(), [&](const auto& q) { return q.is_same(p); })) all.push_back(p);
  }
  return all;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, const Tied& model) {
  const auto parameters = distinct(model);
  if (name == "AdamW") return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-2));
  if (name == "Adam") return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-2));
  if (name == "SGD") {
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(1e-2).momentum(0.9));
  }
  if (name == "RMSprop") {
    return std::make_unique<torch::optim::RMSprop>(parameters, torch::optim::RMSpropOptions(1e-3).momentum(0.9));
  }
  if (name == "Adagrad") return std::make_unique<torch::optim::Adagrad>(parameters);
  return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions(1e-2).ema_decay(0.9));
}

const std::vector<std::string> kOptimizers = {"AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "oxytorch"};

/// Everything that must be as before, as bytes and values of the test's own.
struct State {
  std::vector<at::Tensor> tensors;
  std::string optimizer;
  bool operator==(const State& other) const {
    if (tensors.size() != other.tensors.size() || optimizer != other.optimizer) return false;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].defined() != other.tensors[i].defined()) return false;
      if (tensors[i].defined() && !at::equal(tensors[i], other.tensors[i])) return false;
    }
    return true;
  }
};

State state_of(const Tied& model, const torch::optim::Optimizer& optimizer) {
  State state;
  const auto add = [&](const at::Tensor& t) { state.tensors.push_back(t.defined() ? t.detach().clone() : t); };
  for (const auto& p : model->parameters()) {
    add(p);
    add(p.grad());
  }
  for (const auto& b : model->buffers()) add(b);
  add(at::detail::getDefaultCPUGenerator().get_state());
  add(torch::tensor(model->is_training()));
  std::size_t index = 0;
  if (const auto* tail = dynamic_cast<const optim::TailOptimizer*>(&optimizer)) {
    for (; index < tail->tail().param_count(); ++index) {
      const auto& s = tail->tail().state(index);
      for (const auto& t : {s.step, s.moments[0], s.moments[1], s.ema}) add(t);
    }
  }
  std::ostringstream text;
  for (const auto& group : optimizer.param_groups()) {
    text << group.options().get_lr() << '\n';
    for (const auto& p : group.params()) {
      const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      torch::serialize::OutputArchive archive;
      found->second->serialize(archive);
      archive.save_to(text);
    }
  }
  state.optimizer = text.str();
  return state;
}

// -- planted strategies: each takes away a delay, so that only its numbers speak against it ---------------------------

bool delayed = true;
int bad_calls = 0;

struct NoDelay : Strategy {
  void apply(Run& /*run*/) override { delayed = false; }
  void revert(Run& /*run*/) override { delayed = true; }
};

struct Null : Strategy {
  void apply(Run& /*run*/) override {}
  void revert(Run& /*run*/) override {}
};

struct Lie : NoDelay {  // another rounding, called exact
  void apply(Run& run) override {
    NoDelay::apply(run);
    run.inputs("lie", [](const Batch& b) { return Batch{b.input * (1 + 1e-6), b.target}; });
  }
  void revert(Run& run) override {
    run.inputs("lie", {});
    NoDelay::revert(run);
  }
};

struct Throws : Strategy {
  void apply(Run& /*run*/) override { throw std::runtime_error("it was planted"); }
  void revert(Run& /*run*/) override {}
};

struct ThrowsLater : NoDelay {  // in the middle of a step
  void apply(Run& run) override {
    NoDelay::apply(run);
    run.inputs("later", [this](const Batch& b) {
      if (++calls > 9) throw std::runtime_error("it was planted in a step");
      return b;
    });
  }
  void revert(Run& run) override {
    run.inputs("later", {});
    NoDelay::revert(run);
  }
  int calls = 0;
};

struct LeavesDirt : Strategy {  // changes weights, and says nothing
  void apply(Run& run) override {
    const torch::NoGradGuard no_grad;
    auto first = run.parameters().front();
    first.add_(1);
    throw std::runtime_error("after a change");
  }
  void revert(Run& /*run*/) override {}
};

/// Steps the user's optimizer in a way of its own.
struct WrongOptimizer : torch::optim::Optimizer {
  explicit WrongOptimizer(torch::optim::Optimizer& o) : Optimizer(copied(o), o.defaults().clone()), own(o) {}
  static std::vector<torch::optim::OptimizerParamGroup> copied(torch::optim::Optimizer& o) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const auto& g : o.param_groups()) groups.emplace_back(g.params(), g.options().clone());
    return groups;
  }
  torch::optim::Optimizer& own;
};

struct FasterRate : WrongOptimizer {
  using WrongOptimizer::WrongOptimizer;
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    for (auto& group : own.param_groups()) group.options().set_lr(group.options().get_lr() * 1.01);
    own.step();
    for (auto& group : own.param_groups()) group.options().set_lr(group.options().get_lr() / 1.01);
    return {};
  }
};

struct SlowUpdate : WrongOptimizer {
  using WrongOptimizer::WrongOptimizer;
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return own.step();
  }
};

struct StaleGradients : WrongOptimizer {
  using WrongOptimizer::WrongOptimizer;
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    std::vector<at::Tensor> fresh;
    for (auto& group : own.param_groups()) {
      for (auto& p : group.params()) {
        fresh.push_back(p.grad().clone());
        if (last.size() >= fresh.size()) p.mutable_grad() = last[fresh.size() - 1];
      }
    }
    own.step();
    last = fresh;
    return {};
  }
  std::vector<at::Tensor> last;
};

template <class Wrong>
struct Wrongly : NoDelay {
  void apply(Run& run) override {
    NoDelay::apply(run);
    run.replace_optimizer(
        [](torch::optim::Optimizer& original) { return Replacement{std::make_unique<Wrong>(original), [] {}, false}; });
  }
  void revert(Run& run) override {
    run.replace_optimizer({});
    NoDelay::revert(run);
  }
};

struct Drifts : NoDelay {  // right while it is tried, wrong later
  void apply(Run& run) override {
    NoDelay::apply(run);
    run.inputs("drift", [](const Batch& b) { return bad_calls > 0 ? Batch{b.input * 1.5, b.target} : b; });
  }
  void revert(Run& run) override {
    run.inputs("drift", {});
    NoDelay::revert(run);
  }
};

void plant() {
  static const bool once = [] {
    tune::register_strategy<NoDelay>("no_delay", Kind::Exact);
    tune::register_strategy<Lie>("lie", Kind::Exact);
    tune::register_strategy<Throws>("throws", Kind::Exact);
    tune::register_strategy<ThrowsLater>("throws_later", Kind::Exact);
    tune::register_strategy<LeavesDirt>("leaves_dirt", Kind::Exact);
    tune::register_strategy<Wrongly<FasterRate>>("faster_rate", Kind::Tolerance);
    tune::register_strategy<Wrongly<StaleGradients>>("stale_gradients", Kind::Tolerance);
    tune::register_strategy<Wrongly<SlowUpdate>>("slow_update", Kind::Exact, {.group = "optimizer"});
    tune::register_strategy<Drifts>("drifts", Kind::Exact);
    for (int i = 0; i < 12; ++i) tune::register_strategy<Null>("null_" + std::to_string(i), Kind::Exact);
    return true;
  }();
  static_cast<void>(once);
  delayed = true;
  bad_calls = 0;
}

LossFunction delayed_loss(Tied model) {
  return [model = std::move(model)](const Batch& batch) mutable {
    if (delayed) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return torch::nn::functional::cross_entropy(model->forward(batch.input), batch.target);
  };
}

LossFunction loss_of(const Tied& model) { return supervised(model, torch::nn::CrossEntropyLoss()); }

AccelerateOptions only(std::vector<std::string> strategies) {
  return AccelerateOptions().strategies(std::move(strategies)).remember(false).budget(20);
}

const tune::CertificateEntry& entry(const Plan& plan, const std::string& name) {
  for (const auto& e : plan.certificate().entries) {
    if (e.strategy == name) return e;
  }
  throw std::runtime_error("no entry " + name);
}

class AccelerateTest : public testing::Test {
 protected:
  void SetUp() override {
    plant();
    set_load_source([wall = 0.0]() mutable { return LoadSample{.wall = wall += 1}; });  // a quiet machine
  }
  void TearDown() override { set_load_source({}); }
};

TEST_F(AccelerateTest, KeepsWhatPaysAndRefusesALie) {
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  const auto batches = make_batches();
  const auto before = state_of(model, *optimizer);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"throws", "lie", "no_delay"}));
  EXPECT_THAT(plan.accepted(), ElementsAre("no_delay"));
  EXPECT_GT(plan.speedup().low, 1);
  EXPECT_EQ(entry(plan, "lie").standing, Standing::Refused) << entry(plan, "lie").reason;
  EXPECT_EQ(entry(plan, "throws").standing, Standing::Failed);
  EXPECT_THAT(entry(plan, "throws").reason, HasSubstr("it was planted"));
  EXPECT_THAT(plan.report(), HasSubstr("no_delay"));
  EXPECT_FALSE(delayed);
  plan.revert();
  EXPECT_TRUE(delayed);
  EXPECT_THAT(plan.accepted(), IsEmpty());
  EXPECT_TRUE(state_of(model, *optimizer) == before);
}

TEST_F(AccelerateTest, RefusesAWrongLearningRateAndStaleGradients) {
  for (const char* optimizer_name : {"AdamW", "SGD", "oxytorch"}) {
    auto model = make_model();
    auto optimizer = make_optimizer(optimizer_name, model);
    const auto batches = make_batches();
    auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"faster_rate", "stale_gradients"}));
    EXPECT_THAT(plan.accepted(), IsEmpty()) << optimizer_name;
    EXPECT_EQ(entry(plan, "faster_rate").standing, Standing::Refused) << entry(plan, "faster_rate").reason;
    EXPECT_THAT(entry(plan, "faster_rate").reason, HasSubstr("update"));
    EXPECT_EQ(entry(plan, "stale_gradients").standing, Standing::Refused) << entry(plan, "stale_gradients").reason;
  }
}

TEST_F(AccelerateTest, DoesNotTryAnUpdateThatIsSlowerByItself) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), make_batches(), only({"slow_update"}));
  EXPECT_THAT(plan.accepted(), IsEmpty());
  EXPECT_EQ(entry(plan, "slow_update").pairs, 0);
  EXPECT_THAT(entry(plan, "slow_update").reason, HasSubstr("Its update by itself"));
}

TEST_F(AccelerateTest, LeavesOutWhatThrowsOrChangesWeights) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto batches = make_batches();
  const auto before = state_of(model, *optimizer);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"throws_later", "leaves_dirt"}));
  EXPECT_EQ(entry(plan, "throws_later").standing, Standing::Failed);
  EXPECT_EQ(entry(plan, "leaves_dirt").standing, Standing::Failed);
  EXPECT_TRUE(state_of(model, *optimizer) == before);
}

TEST_F(AccelerateTest, RestoresEverythingWhereverTheStepThrows) {
  for (const auto& name : kOptimizers) {
    for (const int point : {1, 2, 3, 9, 17, 30, 50}) {
      auto model = make_model();
      auto optimizer = make_optimizer(name, model);
      const auto batches = make_batches();
      tune::Run plain(*model, *optimizer, loss_of(model), batches);
      for (int i = 0; i < 2; ++i) plain.step(batches[0]);  // there is state to lose
      const auto before = state_of(model, *optimizer);
      int calls = 0;
      const auto loss = [&, inner = delayed_loss(model)](const Batch& batch) {
        if (++calls >= point) throw std::runtime_error("the data ran out");
        return inner(batch);
      };
      bool thrown = false;
      try {
        accelerate(*model, *optimizer, loss, batches, only({"no_delay", "step_tail"}));
      } catch (const std::runtime_error&) {
        thrown = true;
      }
      EXPECT_EQ(thrown, calls >= point) << name << ", call " << point;
      // On a busy machine both candidates may be given up before the last of the points.
      EXPECT_TRUE(thrown || point == 50) << name << ", call " << point;
      if (!thrown) continue;
      EXPECT_TRUE(state_of(model, *optimizer) == before) << name << ", throwing at call " << point;
      EXPECT_TRUE(delayed);
    }
  }
}

TEST_F(AccelerateTest, LetsPassWhatIsNoException) {
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  const auto batches = make_batches();
  const auto before = state_of(model, *optimizer);
  int calls = 0;
  const auto loss = [&, inner = delayed_loss(model)](const Batch& batch) {
    if (++calls >= 30) throw 42;
    return inner(batch);
  };
  EXPECT_THROW(accelerate(*model, *optimizer, loss, batches, only({"no_delay", "step_tail"})), int);
  EXPECT_TRUE(state_of(model, *optimizer) == before);
}

TEST_F(AccelerateTest, BasicTrainsToTheSameBits) {
  for (const auto& name : kOptimizers) {
    const auto batches = make_batches();
    auto reference = make_model();
    auto plain_optimizer = make_optimizer(name, reference);
    tune::Run plain(*reference, *plain_optimizer, loss_of(reference), batches, 1.0);
    auto model = make_model();
    auto optimizer = make_optimizer(name, model);
    torch::manual_seed(7);
    for (int i = 0; i < 12; ++i) plain.step(batches[static_cast<std::size_t>(i) % 4]);
    torch::manual_seed(7);
    auto plan = accelerate(*model, *optimizer, loss_of(model), batches,
                           AccelerateOptions().level("basic").remember(false).budget(1).clip_norm(1.0).exclude(
                               {"throws", "throws_later", "leaves_dirt", "drifts"}));
    for (int i = 0; i < 12; ++i) plan.step(batches[static_cast<std::size_t>(i) % 4]);
    plan.revert();
    EXPECT_TRUE(state_of(model, *optimizer) == state_of(reference, *plain_optimizer)) << name;
  }
}

TEST_F(AccelerateTest, AcceptsNoStrategyThatDoesNothing) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  std::vector<std::string> nulls;
  for (int i = 0; i < 12; ++i) nulls.push_back("null_" + std::to_string(i));
  auto plan = accelerate(*model, *optimizer, loss_of(model), make_batches(), only(nulls).budget(20));
  // At most 1 in 100 is accepted: two of twelve are far outside of that.
  EXPECT_LE(plan.accepted().size(), 1U);
}

TEST_F(AccelerateTest, WithNothingAcceptedTheProcessHasItsHeapAgain) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto given = heap_mmap_threshold();
  auto plan = accelerate(*model, *optimizer, loss_of(model), make_batches(), only({"allocator", "keep_heap"}));
  for (const auto& name : plan.accepted()) EXPECT_EQ(entry(plan, name).standing, Standing::Accepted);
  EXPECT_THAT(plan.report(), testing::Not(HasSubstr("Memory: ")));
  plan.revert();
  EXPECT_EQ(heap_mmap_threshold(), given);
  auto allocator = tune_allocator();
  EXPECT_TRUE(allocator.is_applied() || !given) << "a setting of the plan is left: " << allocator.reason();
  allocator.revert();
}

TEST_F(AccelerateTest, TakesBackWhatDriftsDuringTheRun) {
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  const auto batches = make_batches();
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"drifts"}));
  ASSERT_THAT(plan.accepted(), ElementsAre("drifts"));
  bad_calls = 1;
  for (int i = 0; i < 60; ++i) plan.step(batches[0]);
  EXPECT_THAT(plan.accepted(), IsEmpty());
  EXPECT_EQ(entry(plan, "drifts").standing, Standing::RolledBack);
  EXPECT_THAT(plan.certificate().events, Contains(HasSubstr("rolled back")));
  EXPECT_TRUE(delayed);
}

TEST_F(AccelerateTest, AChecksRandomNumbersAreItsOwn) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto batches = make_batches();
  std::vector<std::int64_t> drawn;
  bool listening = false;
  LossFunction inner = delayed_loss(model);
  // Another thread draws in the middle of each step, as one that loads data does.
  auto plan = accelerate(
      *model, *optimizer,
      [&](const Batch& batch) {
        auto loss = inner(batch);
        if (!listening) return loss;
        std::thread([&] { drawn.push_back(torch::randint(INT64_MAX, {1}, at::kLong).item<std::int64_t>()); }).join();
        return loss + 0 * inner(batch);
      },
      batches, only({"no_delay"}));
  ASSERT_THAT(plan.accepted(), ElementsAre("no_delay"));
  torch::manual_seed(5);
  listening = true;
  for (int i = 0; i < 60; ++i) plan.step(batches[0]);
  EXPECT_EQ(drawn.size(), 62);  // two in the check
  std::sort(drawn.begin(), drawn.end());
  EXPECT_EQ(std::adjacent_find(drawn.begin(), drawn.end()), drawn.end());
  EXPECT_THAT(plan.accepted(), ElementsAre("no_delay"));
}

TEST_F(AccelerateTest, RemembersAndChecksBeforeItTrusts) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "oxytorch_accelerate_test";
  std::filesystem::remove_all(folder);
  const auto options = only({"no_delay"}).remember(true).folder(folder.string());
  const auto batches = make_batches();
  for (const bool again : {false, true}) {
    auto model = make_model();
    auto optimizer = make_optimizer("AdamW", model);
    auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, options);
    EXPECT_THAT(plan.accepted(), ElementsAre("no_delay"));
    if (again) {
      EXPECT_THAT(plan.certificate().events, Contains(HasSubstr("reused")));
    } else {
      EXPECT_THAT(plan.certificate().events, IsEmpty());
    }
  }
  std::filesystem::remove_all(folder);
}

TEST_F(AccelerateTest, AFolderThatCannotBeWrittenCostsNoPlan) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "oxytorch_accelerate_no_folder";
  std::ofstream(folder) << "a file in its place";
  const auto batches = make_batches();
  std::vector<std::string> said;
  const LogSink before = set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  {
    auto model = make_model();
    auto optimizer = make_optimizer("AdamW", model);
    auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches,
                           only({"drifts"}).remember(true).folder(folder.string()));
    EXPECT_THAT(plan.accepted(), ElementsAre("drifts"));
    EXPECT_THAT(plan.certificate().events, ElementsAre(HasSubstr("not stored")));
    EXPECT_THAT(plan.certificate().events, ElementsAre(HasSubstr(folder.string())));
    EXPECT_THAT(plan.report(), HasSubstr("not stored"));
    EXPECT_THAT(said, Contains(HasSubstr("not stored")));
    // Nor does one that cannot be deleted once it does not hold any more.
    std::filesystem::remove(folder);
    std::filesystem::create_directories(folder / (plan.certificate().key.digest() + ".json") / "full");
    bad_calls = 1;
    for (int i = 0; i < 60; ++i) plan.step(batches[0]);
    EXPECT_THAT(plan.accepted(), IsEmpty());
    EXPECT_THAT(plan.certificate().events, Contains(HasSubstr("could not be deleted")));
  }
  set_log_sink(before);
  std::filesystem::remove_all(folder);
}

TEST_F(AccelerateTest, NothingThatWasMeasuredBesideOtherProgramsIsRemembered) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "oxytorch_accelerate_busy";
  std::filesystem::remove_all(folder);
  set_load_source([wall = 0.0]() mutable {
    wall += 1;
    return LoadSample{.wall = wall, .busy = 2 * wall, .waited = 0.5 * wall, .cores = 2};
  });
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), make_batches(),
                         only({"no_delay"}).remember(true).folder(folder.string()));
  EXPECT_THAT(plan.certificate().disturbance, HasSubstr("other programs used 2.0 of its 2 cores"));
  EXPECT_THAT(plan.report(), HasSubstr("The machine was busy"));
  EXPECT_FALSE(tune::CertificateStore(folder.string()).find(plan.certificate().key).has_value());
  std::filesystem::remove_all(folder);
}

TEST_F(AccelerateTest, WorksWithoutOptions) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "oxytorch_accelerate_zero";
  ::setenv("OXYTORCH_CACHE", folder.c_str(), 1);
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  const auto batches = make_batches();
  auto plan = accelerate(*model, *optimizer, loss_of(model), batches);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(std::isfinite(plan.step(batches[0]).item<double>()));
  EXPECT_FALSE(plan.report().empty());
  ::unsetenv("OXYTORCH_CACHE");
  std::filesystem::remove_all(folder);
}

TEST_F(AccelerateTest, SaysWhatCannotBeMeant) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto batches = make_batches();
  EXPECT_THROW(accelerate(*model, *optimizer, loss_of(model), batches, only({"no_dela"})), Error);
  EXPECT_THROW(accelerate(*model, *optimizer, loss_of(model), batches, AccelerateOptions().level("bold")), Error);
  EXPECT_THROW(accelerate(*model, *optimizer, loss_of(model), batches, AccelerateOptions().steps_planned(0)), Error);
  EXPECT_THROW(accelerate(*model, *optimizer, loss_of(model), {}), Error);
  EXPECT_THROW(accelerate(*model, *optimizer, {}, batches), Error);
  EXPECT_THROW(tune::register_strategy<NoDelay>("no_delay", Kind::Exact), Error);
}

// -- the parts --------------------------------------------------------------------------------------------------------

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
      run.bring(i / 3 == 1 ? std::vector<std::string>{"step_tail"} : std::vector<std::string>{});
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
      if (name != "oxytorch") run.bring({"step_tail"});
      run.bring({"physical_cores"});
      run.bring({});
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
  tune::Escrow escrow(run);
  const auto weight = model->parameters()[0];
  const auto* const memory = weight.const_data_ptr();
  for (const auto& names : std::vector<std::vector<std::string>>{{"channels_last"}, {"step_tail", "channels_last"}}) {
    run.bring(names);
    EXPECT_TRUE(weight.is_contiguous(at::MemoryFormat::ChannelsLast));
    run.step(batches[0]);
    run.bring({});
    EXPECT_EQ(weight.const_data_ptr(), memory);
    EXPECT_TRUE(weight.is_contiguous());
    EXPECT_NE(escrow.digest(), escrow.held());
    escrow.restore();
    EXPECT_NO_THROW(escrow.prove());
  }
  tune::Verifier verifier(run, escrow);
  run.bring({"channels_last", "step_tail"});
  const auto ruling = verifier.check(Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  EXPECT_EQ(run.in_force().size(), 2U);
}

TEST_F(AccelerateTest, TheRefereePassesWhatIsRightAndSaysWhatIsNot) {
  for (const auto& name : kOptimizers) {
    const auto batches = make_batches();
    auto model = make_model();
    auto optimizer = make_optimizer(name, model);
    tune::Run run(*model, *optimizer, loss_of(model), batches, 0.5);
    run.step(batches[0]);
    tune::Escrow escrow(run);
    tune::Verifier verifier(run, escrow);
    EXPECT_TRUE(verifier.check(Kind::Exact).held) << name;
    EXPECT_TRUE(verifier.check(Kind::Tolerance).held) << name << verifier.check(Kind::Tolerance).reason;
    if (name != "oxytorch") {
      run.bring({"step_tail"});
      const auto ruling = verifier.check(Kind::Tolerance);
      EXPECT_TRUE(ruling.held) << name << ": " << ruling.reason;
      run.bring({});
    }
    run.bring({"bf16_autocast"});
    EXPECT_FALSE(verifier.check(Kind::Tolerance).held) << name;
    const auto ruling = verifier.check(Kind::Precision);
    EXPECT_TRUE(ruling.held) << name << ": " << ruling.reason;
    run.bring({});
    EXPECT_NO_THROW(escrow.prove());
  }
}

/// Makes backward wrong in some steps.
struct WrongBackward : Strategy {
  void apply(Run& /*run*/) override { wrong = true; }
  void revert(Run& /*run*/) override { wrong = false; }
  static inline bool wrong = false;
};

TEST_F(AccelerateTest, TheRefereeSeesFaultsOfSomeStepsAlone) {
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
    tune::Escrow escrow(run);
    tune::Verifier verifier(run, escrow);
    EXPECT_TRUE(verifier.check(Kind::Tolerance).held) << verifier.check(Kind::Tolerance).reason;
    run.bring({"wrong_backward"});
    const auto ruling = verifier.check(Kind::Tolerance);
    EXPECT_FALSE(ruling.held) << one.name;
    EXPECT_THAT(ruling.reason, HasSubstr("step ")) << one.name;
    EXPECT_EQ(ruling.evidence.count("drawn_by"), 1U);
  }
}

TEST_F(AccelerateTest, TheRefereeTakesTorchsOwnNormForWhatItIs) {
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
  tune::Escrow escrow(run);
  tune::Verifier verifier(run, escrow, {.steps = 2, .span = 0, .trajectory = 2});
  const auto nothing = verifier.check(Kind::Tolerance);
  EXPECT_TRUE(nothing.held) << nothing.reason;
  run.bring({"step_tail"});
  const auto ruling = verifier.check(Kind::Tolerance);
  EXPECT_TRUE(ruling.held) << ruling.reason;
  run.bring({});
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

TEST_F(AccelerateTest, TheRefereeSeesAFactorOnGradientsUnderBf16) {
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
  tune::Escrow escrow(run);
  tune::Verifier verifier(run, escrow);
  tune::register_strategy<Factor>("factor", Kind::Precision);
  run.bring({"factor"});
  const auto ruling = verifier.check(Kind::Precision);
  EXPECT_FALSE(ruling.held);
  EXPECT_THAT(ruling.reason, HasSubstr("gradient"));
}

}  // namespace
}  // namespace oxytorch
