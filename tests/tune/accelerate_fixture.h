/// A small model with all that a step may write, strategies whose effect on time and numbers is known, and a clock that
/// makes it certain: no verdict depends on who else uses the machine.
#pragma once

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device/remove_folder.h"
#include "oxytorch/load.h"
#include "oxytorch/optim.h"
#include "oxytorch/random.h"
#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/strategy.h"
#include "tune/sources.h"

namespace oxytorch::accelerate_tests {

using tune::Kind;
using tune::Replacement;
using tune::Run;
using tune::Strategy;

/// A folder of a test's own in the place of what OXYTORCH_CACHE said; not there at first, and gone at the end.
class CacheFolder {
 public:
  CacheFolder() : path_(std::filesystem::path(testing::TempDir()) / "oxytorch_cache") {
    if (const char* before = std::getenv("OXYTORCH_CACHE")) before_ = before;
    remove_folder(path_);
    ::setenv("OXYTORCH_CACHE", path_.c_str(), 1);
  }
  CacheFolder(const CacheFolder&) = delete;
  CacheFolder& operator=(const CacheFolder&) = delete;
  ~CacheFolder() {
    before_ ? ::setenv("OXYTORCH_CACHE", before_->c_str(), 1) : ::unsetenv("OXYTORCH_CACHE");
    remove_folder(path_);
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::optional<std::string> before_;
};

// -- the clock --------------------------------------------------------------------------------------------------------

/// Seconds that pass only where a step says so, with a jitter of 1 % that is the same in each run.
struct Clock {
  double now = 0;
  std::int64_t faults = 0;
  PhiloxStream jitter{7};
  void pass(double seconds) { now += seconds * (1 + 0.01 * (jitter.uniform_double() - 0.5)); }
  /// All that tuning reads; what it draws is the same in each run too.
  tune::Sources sources() {
    const auto read = [this] { return now += 1e-9; };  // so that nothing takes no time at all
    return {.seconds = read,
            .thread_seconds = read,
            .page_faults = [this] { return faults; },
            .bits = [drawn = PhiloxStream(11)]() mutable { return drawn.next64(); }};
  }
};

/// What each step of the losses below takes, in parts that a strategy can take away.
struct Costs {
  double rest = 0.01;
  double delay = 0.01;      ///< of delayed_loss(), while `delayed`
  double update = 0;        ///< goes with the update that torch does
  double allocator = 0;     ///< goes with torch's own allocator
  std::int64_t faults = 0;  ///< page faults
};

inline Clock clock;
inline Costs costs;
inline bool delayed = true;
inline int bad_calls = 0;
inline c10::Allocator* torchs_allocator = nullptr;

inline void pass_step() {
  clock.faults += costs.faults;
  clock.pass(costs.rest + costs.update + (c10::GetCPUAllocator() == torchs_allocator ? costs.allocator : 0));
}

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

inline Tied make_model() {
  torch::manual_seed(0);
  return Tied();
}

inline std::vector<Batch> make_batches(int count = 4, std::int64_t size = 16) {
  torch::manual_seed(3);
  std::vector<Batch> batches;
  for (int i = 0; i < count; ++i) batches.push_back({torch::randn({size, 12}), torch::randint(0, 3, {size})});
  return batches;
}

inline std::vector<at::Tensor> distinct(const Tied& model) {
  std::vector<at::Tensor> all;
  for (const auto& p : model->parameters()) {
    if (std::none_of(all.begin(), all.end(), [&](const auto& q) { return q.is_same(p); })) all.push_back(p);
  }
  return all;
}

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, const Tied& model) {
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

inline const std::vector<std::string> kOptimizers = {"AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "oxytorch"};

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

inline State state_of(const Tied& model, const torch::optim::Optimizer& optimizer) {
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
    clock.pass(0.005);
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

struct PayingTail : Strategy {  // the library's own, where the update that torch does has a cost
  tune::Applicability applies(Run& run) override { return run.strategy("step_tail").applies(run); }
  void apply(Run& run) override {
    run.strategy("step_tail").apply(run);
    before = std::exchange(costs.update, 0);
  }
  void revert(Run& run) override {
    run.strategy("step_tail").revert(run);
    costs.update = before;
  }
  double before = 0;
};

inline void plant() {
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
    tune::register_strategy<PayingTail>("paying_tail", Kind::Tolerance);
    for (int i = 0; i < 12; ++i) tune::register_strategy<Null>("null_" + std::to_string(i), Kind::Exact);
    return true;
  }();
  static_cast<void>(once);
  torchs_allocator = c10::GetCPUAllocator();
  clock = {};
  costs = {};
  delayed = true;
  bad_calls = 0;
}

inline LossFunction loss_of(Tied model) {
  return [model = std::move(model)](const Batch& batch) mutable {
    pass_step();
    return torch::nn::functional::cross_entropy(model->forward(batch.input), batch.target);
  };
}

/// Takes twice as long while `delayed`.
inline LossFunction delayed_loss(Tied model) {
  return [inner = loss_of(std::move(model))](const Batch& batch) {
    if (delayed) clock.pass(costs.delay);
    return inner(batch);
  };
}

inline AccelerateOptions only(std::vector<std::string> strategies) {
  return AccelerateOptions().strategies(std::move(strategies)).remember(false).tune_seconds(20);
}

inline const tune::CertificateEntry& entry(const Plan& plan, const std::string& name) {
  for (const auto& e : plan.certificate().entries) {
    if (e.strategy == name) return e;
  }
  throw std::runtime_error("no entry " + name);
}

class AccelerateTest : public testing::Test {
 protected:
  void SetUp() override {
    plant();
    sources_.emplace(clock.sources());
    set_load_source([wall = 0.0]() mutable { return LoadSample{.wall = wall += 1}; });  // a quiet machine
  }
  void TearDown() override {
    set_load_source({});
    sources_.reset();
  }

 private:
  std::optional<tune::ScopedSources> sources_;
};

}  // namespace oxytorch::accelerate_tests
