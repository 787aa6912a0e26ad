// Every planted fault is caught under its claim, every healthy strategy passes, and the run is left as it was: the C++
// half of tests/tune/planted_faults, with the faults of that book that a step in C++ can have.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "oxytorch/amp.h"
#include "oxytorch/random.h"
#include "oxytorch/tune/strategy.h"
#include "planted_runs.h"

namespace oxytorch::planted {
namespace {

using tune::Kind;

PlantedRun* current = nullptr;  // that strategies are made for

/// What a fault is given: the run, whether it acts now, and what it leaves for later.
struct Site {
  PlantedRun& planted;
  Acts acts;
  std::vector<std::function<void()>> undo = {};

  [[nodiscard]] bool now() const { return acts(planted.taken, planted.under_way); }
};
using Plant = std::function<void(Site&)>;

struct Case {
  std::string name, on;
  Kind kind;
  Acts acts;
  Plant plant;
};

struct Planted : tune::Strategy {
  Planted(Acts a, Plant p) : acts(std::move(a)), plant(std::move(p)) {}
  void apply(tune::Run& run) override {
    auto& planted = *current;
    planted.taken = 0;
    site.emplace(Site{planted, acts});
    plant(*site);
    run.replace_optimizer([&](torch::optim::Optimizer& own) {
      return tune::Replacement{std::make_unique<PlantedOptimizer>(own, planted), [] {}, planted.reach.clips};
    });
  }
  void revert(tune::Run& run) override {
    run.replace_optimizer({});
    run.scope("planted", {});
    run.inputs("planted", {});
    site->planted.reach = {};
    for (auto undo = site->undo.rbegin(); undo != site->undo.rend(); ++undo) (*undo)();
    site.reset();
  }
  Acts acts;
  Plant plant;
  std::optional<Site> site;
};

// -- when -------------------------------------------------------------------------------------------------------------

Acts always() {
  return [](int, const Batch&) { return true; };
}
Acts from(int step) {  // from 0
  return [step](int taken, const Batch&) { return taken >= step; };
}
Acts each(int period) {
  return [period](int taken, const Batch&) { return (taken + 1) % period == 0; };
}
Acts within(int first, int last) {  // from 1
  return [first, last](int taken, const Batch&) { return first <= taken + 1 && taken + 1 <= last; };
}
Acts by_chance(double share) {  // as a race between threads acts: the same in one step
  struct Lot {
    PhiloxStream random{7};
    int step = -1;
    bool drawn = false;
  };
  return [share, lot = std::make_shared<Lot>()](int taken, const Batch&) {
    if (std::exchange(lot->step, taken) != taken) lot->drawn = lot->random.uniform_double() < share;
    return lot->drawn;
  };
}
Acts on_bright() {
  return [](int, const Batch& b) { return b.input.to(at::kFloat).mean().item<double>() > 0; };
}
Acts on_even_token() {
  return [](int, const Batch& b) { return b.input.flatten()[0].item<std::int64_t>() % 2 == 0; };
}
Acts on_large_value() {
  return [](int, const Batch& b) { return b.input.abs().max().item<double>() > 3.2; };
}

// -- what: gradients --------------------------------------------------------------------------------------------------

using Change = std::function<at::Tensor(const at::Tensor& grad)>;

void hook(Site& site, std::size_t index, Change change) {
  const auto p = site.planted.parameter(index);
  const auto made = p.register_hook(
      [&site, change = std::move(change)](const at::Tensor& grad) { return site.now() ? change(grad) : grad; });
  site.undo.emplace_back([p, made] { p.remove_hook(made); });
}
Plant gradient_of(std::size_t index, Change change) {
  return [=](Site& site) { hook(site, index, change); };
}
Plant all_gradients(const Change& change) {
  return [=](Site& site) {
    for (std::size_t i = 0; i < site.planted.run->parameters().size(); ++i) hook(site, i, change);
  };
}
/// With what the step before had: in its place, or added to it.
Plant with_last(std::optional<std::size_t> index, bool added = false) {
  return [=](Site& site) {
    for (std::size_t i = 0; i < site.planted.run->parameters().size(); ++i) {
      if (index && *index != i) continue;
      const auto p = site.planted.parameter(i);
      const auto last = std::make_shared<at::Tensor>();
      const auto made = p.register_hook([&site, added, last](const at::Tensor& grad) {
        const auto before = std::exchange(*last, grad.detach().clone());
        if (!before.defined() || !site.now()) return grad;
        return added ? *last = grad + before : before;
      });
      site.undo.emplace_back([p, made] { p.remove_hook(made); });
    }
  };
}
at::Tensor zero(const at::Tensor& g) { return at::zeros_like(g); }
at::Tensor flip(const at::Tensor& g) { return -g; }
at::Tensor narrow(const at::Tensor& g) { return g.to(at::kBFloat16).to(g.scalar_type()); }
Change larger(double part) {
  return [part](const at::Tensor& g) { return g * (1 + part); };
}
Change without_last_rows(std::int64_t share) {  // what the last of so many threads has computed is lost
  return [share](const at::Tensor& g) {
    auto lost = g.clone();
    lost.narrow(0, g.size(0) - g.size(0) / share, g.size(0) / share).zero_();
    return lost;
  };
}

/// `value` with the gradient of `other`.
at::Tensor learns_from(const at::Tensor& value, const at::Tensor& other) {
  return value.detach() + (other - other.detach());
}
/// The right loss, with the gradient of a mean over pieces that are weighted otherwise.
Plant pieces(std::int64_t count, std::function<double(std::int64_t rows, std::int64_t all)> weight, int dropped = 0) {
  return [=](Site& site) {
    site.planted.reach.loss = [=, &site](const Batch& b) {
      const auto value = site.planted.plain_loss(b);
      if (!site.now()) return value;
      at::Tensor sum = at::zeros({}, value.options());
      const auto x = b.input.chunk(count), y = b.target.chunk(count);
      for (std::size_t i = 0; i + static_cast<std::size_t>(dropped) < x.size(); ++i) {
        sum = sum + site.planted.plain_loss({x[i], y[i]}) * weight(x[i].size(0), b.input.size(0));
      }
      return learns_from(value, sum);
    };
  };
}
double by_rows(std::int64_t rows, std::int64_t all) { return static_cast<double>(rows) / static_cast<double>(all); }

// -- what: batches, model, update -------------------------------------------------------------------------------------

Plant batches(std::function<Batch(const Batch&)> change) {
  return [change = std::move(change)](Site& site) {
    site.planted.run->inputs("planted", [&site, change](const Batch& b) {
      site.planted.under_way = b;
      return site.now() ? change(b) : b;
    });
  };
}
Batch flipped(const Batch& b) { return {b.input.flip(0), b.target.flip(0)}; }
Batch shifted_labels(const Batch& b) { return {b.input, b.target.roll(1, 0)}; }
std::function<Batch(const Batch&)> first_rows(std::int64_t less) {
  return [less](const Batch& b) {
    const auto rows = b.input.size(0) - less;
    return Batch{b.input.narrow(0, 0, rows), b.target.narrow(0, 0, rows)};
  };
}

Plant under_autocast(Plant inner) {  // what a fault hides behind
  return [inner = std::move(inner)](Site& site) {
    site.planted.run->scope("planted", [] { return std::make_shared<amp::Autocast>(at::kCPU, at::kBFloat16); });
    inner(site);
  };
}

using Step = std::function<void(Site& site, torch::optim::Optimizer& own)>;
Plant update(Step step) {
  return [step = std::move(step)](Site& site) {
    site.planted.reach.step = [&site, step](torch::optim::Optimizer& own) {
      if (site.now()) {
        step(site, own);
      } else {
        own.step();
      }
    };
  };
}
void skipped(Site& /*site*/, torch::optim::Optimizer& /*own*/) {}
void twice(Site& /*site*/, torch::optim::Optimizer& own) {
  own.step();
  own.step();
}
/// The update under options that are put back.
template <class Options, class Set>
Step with_options(Set set) {
  return [set](Site& /*site*/, torch::optim::Optimizer& own) {
    std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> before;
    for (auto& group : own.param_groups()) {
      before.push_back(group.options().clone());
      set(static_cast<Options&>(group.options()));
    }
    own.step();
    for (std::size_t g = 0; g < before.size(); ++g) own.param_groups()[g].set_options(std::move(before[g]));
  };
}
Step rate(double factor) {
  return with_options<torch::optim::OptimizerOptions>([=](auto& o) { o.set_lr(factor * o.get_lr()); });
}
template <class Set>
Step adamw(Set set) {
  return with_options<torch::optim::AdamWOptions>(set);
}
template <class State>
State& state_of(torch::optim::Optimizer& own, const at::Tensor& p) {
  return static_cast<State&>(*own.state().at(p.unsafeGetTensorImpl()));
}
using AdamWState = torch::optim::AdamWParamState;
Step averages_reset(std::size_t index) {
  return [index](Site& site, torch::optim::Optimizer& own) {
    const at::NoGradGuard no_grad;
    state_of<AdamWState>(own, site.planted.parameter(index)).exp_avg().zero_();
    own.step();
  };
}
void one_bit(Site& site, torch::optim::Optimizer& own) {
  own.step();
  auto* const first = site.planted.parameter(0).data_ptr<float>();
  *first = std::nextafter(*first, 9.0F);
}
void weights_in_bfloat16(Site& site, torch::optim::Optimizer& own) {
  own.step();
  const at::NoGradGuard no_grad;
  for (auto p : site.planted.run->parameters()) p.copy_(narrow(p));
}
void without_bias_correction(Site& site, torch::optim::Optimizer& own) {
  const auto& first = state_of<AdamWState>(own, site.planted.parameter(0));
  const auto taken = first.step();
  for (const auto& p : site.planted.run->parameters()) state_of<AdamWState>(own, p).step(1'000'000);
  own.step();
  for (const auto& p : site.planted.run->parameters()) state_of<AdamWState>(own, p).step(taken + 1);
}
void momentum_in_bfloat16(Site& site, torch::optim::Optimizer& own) {
  own.step();
  for (const auto& p : site.planted.run->parameters()) {
    auto& buffer = state_of<torch::optim::SGDParamState>(own, p).momentum_buffer();
    buffer.copy_(narrow(buffer));
  }
}

/// The fault clips by itself.
Plant clipped_by(Step step) {
  return [inner = update(std::move(step))](Site& site) {
    site.planted.reach.clips = true;
    inner(site);
  };
}
double doubled_when(const Site& site) { return site.now() ? 1.0 : 0.5; }
Plant clip_doubled() {
  return [](Site& site) {
    site.planted.reach.clips = true;
    site.planted.reach.step = [&site](torch::optim::Optimizer& own) {
      torch::nn::utils::clip_grad_norm_(site.planted.run->parameters(), doubled_when(site));
      own.step();
    };
  };
}
void clipped_too_late(Site& site, torch::optim::Optimizer& own) {
  own.step();
  torch::nn::utils::clip_grad_norm_(site.planted.run->parameters(), 0.5);
}
void clipped_each(Site& site, torch::optim::Optimizer& own) {
  for (const auto& p : site.planted.run->parameters()) torch::nn::utils::clip_grad_norm_(p, 0.5);
  own.step();
}

// -- what: the model --------------------------------------------------------------------------------------------------

template <class Module>
Module& part(Site& site, std::size_t index) {  // the modules begin with the model itself
  return *site.planted.model->modules(/*include_self=*/false)[index]->as<Module>();
}
AttentionImpl& attention(Site& site) { return *site.planted.model->as<AttentionImpl>(); }

/// Sets a field before each forward where the fault acts, and back after the loss.
template <class Set>
Plant while_acting(Set set) {
  return [set](Site& site) {
    site.planted.reach.model = [&site, set](const at::Tensor& x) {
      set(site, site.now());
      return site.planted.forward(x);
    };
    site.undo.emplace_back([&site, set] { set(site, false); });
  };
}
Plant not_causal() {
  return while_acting([](Site& site, bool acts) { attention(site).causal = !acts; });
}
Plant frozen() {
  return while_acting([](Site& site, bool acts) { at::Tensor(site.planted.parameter(0)).requires_grad_(!acts); });
}
Plant norm_momentum(double value) {
  return while_acting([value](Site& site, bool acts) {
    part<torch::nn::BatchNorm1dImpl>(site, 1).options.momentum(acts ? value : 0.1);
  });
}
Plant norm_in_eval_mode() {
  return while_acting([](Site& site, bool acts) { part<torch::nn::BatchNorm2dImpl>(site, 1).train(!acts); });
}
Plant dropout_rate(double value) {
  return while_acting([value](Site& site, bool acts) { attention(site).drop->options.p(acts ? value : 0.1); });
}
Plant own_masks(double value) {
  return while_acting([value](Site& site, bool acts) {
    attention(site).own_rate = acts ? std::optional<double>(value) : std::nullopt;
  });
}
Plant branch_detached() {
  return while_acting([](Site& site, bool acts) { attention(site).detached = acts; });
}
Plant weights_untied() {
  return [](Site& site) {
    attention(site).untied = attention(site).table->weight.detach().clone().requires_grad_();
    site.undo.emplace_back([&site] { attention(site).untied.reset(); });
  };
}
Plant weights_stale() {
  return [](Site& site) {
    attention(site).stale_up = attention(site).up->weight.detach().clone();
    site.undo.emplace_back([&site] { attention(site).stale_up.reset(); });
  };
}
Plant outputs(std::function<at::Tensor(const at::Tensor&)> change) {
  return [change = std::move(change)](Site& site) {
    site.planted.reach.outputs = [&site, change](const at::Tensor& out) { return site.now() ? change(out) : out; };
  };
}
/// The last layer of the perceptron in bfloat16: its inputs, weights and outputs.
Plant last_layer_narrow() {
  return [](Site& site) {
    site.planted.reach.model = [&site](const at::Tensor& x) {
      if (!site.now()) return site.planted.forward(x);
      const auto modules = site.planted.model->modules(/*include_self=*/false);
      auto y = x;
      for (std::size_t i = 0; i < 5; ++i) {
        if (auto* linear = modules[i]->as<torch::nn::LinearImpl>()) {
          y = linear->forward(y);
        } else if (auto* norm = modules[i]->as<torch::nn::BatchNorm1dImpl>()) {
          y = norm->forward(y);
        } else {
          y = y.tanh();
        }
      }
      const auto& last = *modules[5]->as<torch::nn::LinearImpl>();
      return at::linear(y.to(at::kBFloat16), last.weight.to(at::kBFloat16), last.bias.to(at::kBFloat16)).to(at::kFloat);
    };
  };
}
Plant loss_narrow() {
  return [](Site& site) {
    site.planted.reach.loss = [&site](const Batch& b) {
      return site.planted.plain_loss(b).to(at::kBFloat16).to(at::kFloat);
    };
  };
}
Plant buffers_still() {
  return [](Site& site) {
    site.planted.reach.model = [&site](const at::Tensor& x) {
      std::vector<at::Tensor> before;
      for (const auto& b : site.planted.model->buffers()) before.push_back(b.detach().clone());
      auto out = site.planted.forward(x);
      if (site.now()) {
        const at::NoGradGuard no_grad;
        const auto buffers = site.planted.model->buffers();
        for (std::size_t i = 0; i < before.size(); ++i) at::Tensor(buffers[i]).set_data(before[i]);
      }
      return out;
    };
  };
}
at::Tensor scrambled(const at::Tensor& x) { return x.permute({0, 2, 3, 1}).reshape(x.sizes()); }

// -- what: random numbers ---------------------------------------------------------------------------------------------

/// Forward from another state of the generator, which then goes on from where it was.
at::Tensor from_state(Site& site, const at::Tensor& x, const std::function<void(at::Generator&)>& set) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto held = generator.get_state();
  set(generator);
  auto out = site.planted.forward(x);
  generator.set_state(held);
  return out;
}
Plant same_mask(bool moving) {
  return [moving](Site& site) {
    site.planted.reach.model = [&site, moving](const at::Tensor& x) {
      if (moving || !site.now()) {
        const auto out = site.planted.forward(x);
        if (!site.now()) return out;
      }
      return from_state(site, x, [](at::Generator& g) { g.set_current_seed(7); });
    };
  };
}
Plant mask_of_before() {
  return [](Site& site) {
    site.planted.reach.model = [&site,
                                last = at::detail::getDefaultCPUGenerator().get_state()](const at::Tensor& x) mutable {
      const auto before = std::exchange(last, at::detail::getDefaultCPUGenerator().get_state());
      const auto out = site.planted.forward(x);
      return site.now() ? from_state(site, x, [&](at::Generator& g) { g.set_state(before); }) : out;
    };
  };
}
Plant another_mask_in_backward() {
  return [](Site& site) {
    site.planted.reach.model = [&site](const at::Tensor& x) {
      const auto out = site.planted.forward(x);
      return learns_from(out, site.planted.forward(x));
    };
  };
}
Plant number_too_many() {
  return [](Site& site) {
    site.planted.reach.after_loss = [&site] {
      if (site.now()) static_cast<void>(torch::rand({1}));
    };
  };
}

// -- the book ---------------------------------------------------------------------------------------------------------

const Kind kExact = Kind::Exact, kTolerance = Kind::Tolerance, kPrecision = Kind::Precision, kTrade = Kind::Trade;

std::vector<Case> faults() {
  using Options = torch::optim::AdamWOptions;
  const auto autocast = under_autocast;
  const auto equal_thirds = [](std::int64_t, std::int64_t) { return 1.0 / 3; };
  const auto swapped = [](Options& o) { o.betas({std::get<1>(o.betas()), std::get<0>(o.betas())}); };
  return {
      // Gradients.
      {"stale gradients", "mlp", kTolerance, from(2), with_last({})},
      {"stale gradient of one layer", "gpt", kPrecision, from(1), autocast(with_last(7))},
      {"wrong divisor of accumulation", "gpt", kTolerance, always(), all_gradients(larger(1))},
      {"accumulation divides by one more", "conv", kPrecision, always(), autocast(all_gradients(larger(-1.0 / 17)))},
      {"micro-batches weighted equally", "gpt", kTolerance, always(), pieces(3, equal_thirds)},
      {"last micro-batch dropped", "gpt", kTolerance, from(2), pieces(4, by_rows, 1)},
      {"remainder dropped", "mlp", kTolerance, always(), batches(first_rows(3))},
      {"last row dropped", "conv", kPrecision, from(3), autocast(batches(first_rows(1)))},
      {"labels shifted by one row", "mlp", kTolerance, always(), batches(shifted_labels)},
      {"one layer transposed", "gpt", kTolerance, always(),
       gradient_of(5, [](const at::Tensor& g) { return g.t().contiguous(); })},
      {"gradient of one layer zeroed", "gpt", kPrecision, from(2), autocast(gradient_of(2, zero))},
      {"frozen layer", "mlp", kTolerance, from(1), frozen()},
      {"sign of one bias", "conv", kTolerance, from(3), gradient_of(9, flip)},
      {"gradients not zeroed", "mlp", kTolerance, from(2), with_last({}, true)},
      {"gradients through bfloat16", "conv", kTolerance, always(), all_gradients(narrow)},
      {"clip threshold doubled", "mlp", kTolerance, always(), clip_doubled()},
      {"clipped after the step", "mlp", kTolerance, always(), clipped_by(clipped_too_late)},
      {"clipped each by itself", "mlp", kTolerance, always(), clipped_by(clipped_each)},
      // The update.
      {"learning rate 1 percent high", "mlp", kTolerance, always(), update(rate(1.01))},
      {"learning rate 1 percent high later", "gpt", kPrecision, from(3), autocast(update(rate(1.01)))},
      {"learning rate 1 percent high as a trade", "conv", kTrade, always(), update(rate(1.01))},
      {"betas swapped", "gpt", kTolerance, always(), update(adamw(swapped))},
      {"epsilon 1e-6", "mlp", kTolerance, always(), update(adamw([](Options& o) { o.eps(1e-6); }))},
      {"no weight decay", "mlp", kTolerance, always(), update(adamw([](Options& o) { o.weight_decay(0); }))},
      {"weight decay for all groups", "mlp", kPrecision, always(),
       autocast(update(adamw([](Options& o) { o.weight_decay(0.1); })))},
      {"bias correction missing", "gpt", kTolerance, always(), update(without_bias_correction)},
      {"nesterov forgotten", "conv", kTolerance, always(),
       update(with_options<torch::optim::SGDOptions>([](auto& o) { o.nesterov(false); }))},
      {"momentum in bfloat16", "conv", kTolerance, always(), update(momentum_in_bfloat16)},
      {"master weights lost", "gpt", kPrecision, always(), autocast(update(weights_in_bfloat16))},
      {"every fifth update twice", "conv", kTolerance, each(5), update(twice)},
      {"updates skipped", "mlp", kPrecision, from(4), autocast(update(skipped))},
      {"state of one parameter reset", "gpt", kTolerance, from(3), update(averages_reset(8))},
      {"state lost on the way in", "gpt", kTrade, always(),
       [](Site& site) {
         const at::NoGradGuard no_grad;
         for (const auto& p : site.planted.run->parameters()) {
           state_of<AdamWState>(site.planted.run->original(), p).exp_avg().zero_();
         }
       }},
      // The model.
      {"batch norm's momentum", "mlp", kTolerance, always(), norm_momentum(0.11)},
      {"batch norm in eval mode", "conv", kTolerance, always(), norm_in_eval_mode()},
      {"last layer in bfloat16", "mlp", kTolerance, always(), last_layer_narrow()},
      {"loss in bfloat16", "gpt", kPrecision, always(), autocast(loss_narrow())},
      {"causal mask forgotten", "gpt", kTolerance, always(), not_causal()},
      {"causal mask forgotten in bfloat16", "gpt", kPrecision, always(), autocast(not_causal())},
      {"tied weights untied", "gpt", kTolerance, always(), weights_untied()},
      {"stale weights in a compiled function", "gpt", kTolerance, always(), weights_stale()},
      {"layout that scrambles channels", "conv", kTolerance, always(),
       batches([](const Batch& b) { return Batch{scrambled(b.input), b.target}; })},
      {"gradient stopped in a branch", "gpt", kTolerance, always(), branch_detached()},
      // Random numbers.
      {"the same mask each step", "gpt", kTolerance, always(), same_mask(false)},
      {"the same mask behind a moving generator", "gpt", kPrecision, from(1), autocast(same_mask(true))},
      {"seeded when switched on", "gpt", kTolerance, always(), [](Site&) { torch::manual_seed(123); }},
      {"mask of another rate", "gpt", kTolerance, always(), dropout_rate(0.15)},
      {"own masks of another rate", "gpt", kTolerance, always(), own_masks(0.15)},
      {"dropout switched off", "gpt", kPrecision, always(),
       autocast(while_acting([](Site& s, bool acts) { attention(s).drop->train(!acts); }))},
      {"another mask in backward", "gpt", kTolerance, always(), another_mask_in_backward()},
      // Bits, and steps that fail late.
      {"one bit of one weight", "conv", kExact, from(3), update(one_bit)},
      {"a random number too many", "gpt", kExact, always(), number_too_many()},
      {"sums in another order", "conv", kExact, always(), batches(flipped)},
      {"NaN from a late step on", "mlp", kTolerance, from(2),
       outputs([](const at::Tensor& out) { return out * std::numeric_limits<double>::quiet_NaN(); })},
      // Each so many steps.
      {"a layer zeroed each 5th step", "mlp", kTolerance, each(5), gradient_of(2, zero)},
      {"a layer zeroed each 7th step", "conv", kTolerance, each(7), gradient_of(4, zero)},
      {"a layer zeroed each 10th step", "gpt", kTolerance, each(10), gradient_of(3, zero)},
      {"a bias zeroed each 3rd step in bfloat16", "gpt", kPrecision, each(3), autocast(gradient_of(6, zero))},
      {"a layer zeroed each 5th step in bfloat16", "conv", kPrecision, each(5), autocast(gradient_of(0, zero))},
      {"all flipped each 6th step", "mlp", kPrecision, each(6), autocast(all_gradients(flip))},
      {"stale each 4th step", "conv", kTolerance, each(4), with_last({})},
      {"stale each 9th step in bfloat16", "mlp", kPrecision, each(9), autocast(with_last({}))},
      {"a piece dropped each 5th step", "gpt", kTolerance, each(5), pieces(4, by_rows, 1)},
      {"gradients 5 percent large each 4th step", "conv", kPrecision, each(4), autocast(all_gradients(larger(0.05)))},
      {"a layer through bfloat16 each 3rd step", "mlp", kTolerance, each(3), last_layer_narrow()},
      {"learning rate 1 percent high each 5th step", "gpt", kPrecision, each(5), autocast(update(rate(1.01)))},
      {"clip doubled each 3rd step", "mlp", kTolerance, each(3), clip_doubled()},
      {"update skipped each 8th step", "conv", kTolerance, each(8), update(skipped)},
      {"state reset each 6th step", "mlp", kTolerance, each(6), update(averages_reset(2))},
      {"one bit each 7th step", "mlp", kExact, each(7), update(one_bit)},
      {"another order each 5th step", "gpt", kExact, each(5), batches(flipped)},
      // In a window.
      {"all flipped in steps 2 to 6", "mlp", kTolerance, within(2, 6), all_gradients(flip)},
      {"all flipped in steps 2 to 6 in bfloat16", "gpt", kPrecision, within(2, 6), autocast(all_gradients(flip))},
      {"1.9 percent wrong in step 7", "mlp", kTolerance, within(7, 7), all_gradients(larger(0.019))},
      {"1.9 percent wrong in step 7 beside kinks", "conv", kTolerance, within(7, 7), all_gradients(larger(0.019))},
      {"1.9 percent wrong in one layer in step 7", "conv", kTolerance, within(7, 7), gradient_of(4, larger(0.019))},
      {"0.1 percent wrong in step 4", "gpt", kTolerance, within(4, 4), all_gradients(larger(0.001))},
      {"zeroed in step 11", "conv", kTolerance, within(11, 11), gradient_of(8, zero)},
      {"learning rate 1 percent high in step 5", "conv", kTolerance, within(5, 5), update(rate(1.01))},
      {"two updates in step 6", "gpt", kTolerance, within(6, 6), update(twice)},
      {"buffers stand still in steps 3 and 4", "conv", kPrecision, within(3, 4), autocast(buffers_still())},
      {"labels shifted in step 5", "mlp", kPrecision, within(5, 5), autocast(batches(shifted_labels))},
      {"frozen in steps 4 to 6", "mlp", kTolerance, within(4, 6), frozen()},
      {"zeroed from step 14 on", "mlp", kTolerance, within(14, 99), gradient_of(2, zero)},
      {"flipped from step 18 on in bfloat16", "gpt", kPrecision, within(18, 99), autocast(gradient_of(3, flip))},
      {"not causal in step 8", "gpt", kTolerance, within(8, 8), not_causal()},
      {"one bit in step 15", "conv", kExact, within(15, 15), update(one_bit)},
      {"a random number too many in step 9", "gpt", kExact, within(9, 9), number_too_many()},
      // On some data.
      {"zeroed on bright batches", "mlp", kTolerance, on_bright(), gradient_of(0, zero)},
      {"larger on bright batches in bfloat16", "conv", kPrecision, on_bright(), autocast(all_gradients(larger(0.06)))},
      {"flipped where the first token is even", "gpt", kTolerance, on_even_token(), gradient_of(3, flip)},
      {"last row dropped where a value is large", "conv", kTolerance, on_large_value(), batches(first_rows(1))},
      {"saturates on bright batches", "mlp", kTolerance, on_bright(),
       outputs([](const at::Tensor& out) { return out.clamp(-0.5, 0.5); })},
      {"mask of the step before on some batches", "gpt", kTolerance, on_even_token(), mask_of_before()},
      // By chance, as a race does, and on some threads.
      {"a layer lost in a race", "mlp", kTolerance, by_chance(0.3), gradient_of(2, zero)},
      {"an update lost in a race", "conv", kPrecision, by_chance(0.25), autocast(update(skipped))},
      {"a stale gradient in a race", "gpt", kTolerance, by_chance(0.3), with_last({})},
      {"rows of the last of 8 threads each 4th step", "mlp", kTolerance, each(4), gradient_of(0, without_last_rows(8))},
      {"rows of the last of 4 threads by chance", "gpt", kPrecision, by_chance(0.3),
       autocast(gradient_of(4, without_last_rows(4)))},
      {"rank 0 does not divide each 5th step", "mlp", kTolerance, each(5), all_gradients(larger(1))},
  };
}

/// What must pass: a planted one, or a strategy of the library by its name.
struct Healthy {
  std::string name, on;
  Kind kind;
  Plant plant = {};
};

std::vector<Healthy> healthy() {
  const auto nothing = [](Site&) {};
  const auto autocast = under_autocast(nothing);
  const auto reordered = batches(flipped);
  std::vector<Healthy> all{
      {"nothing", "mlp", kExact, nothing},
      {"nothing", "gpt", kExact, nothing},
      {"nothing", "conv", kTolerance, nothing},
      {"rows in another order", "conv", kTolerance, reordered},
      {"masks drawn in another way", "gpt", kTolerance, own_masks(0.1)},
      {"two micro-batches", "gpt", kTolerance,
       [](Site& site) {
         site.planted.run->set_micro_batches(2);
         site.undo.emplace_back([&site] { site.planted.run->set_micro_batches(1); });
       }},
      {"channels_last", "conv", kTolerance},
      {"nothing", "huge gradients clipped", kTolerance, nothing},
  };
  for (const char* on :
       {"mlp", "conv", "gpt", "tiny gradients", "tiny gradients clipped", "huge gradients", "huge gradients clipped",
        "after a warm-up", "relu", "images", "vocabulary of 2,000", "tied vocabulary"}) {
    all.push_back({"bfloat16 autocast", on, kPrecision, autocast});
  }
  for (const char* on : {"norm near the threshold", "large learning rate", "learned by heart", "relu", "images"}) {
    all.push_back({"rows in another order", on, kTolerance, reordered});
  }
  for (const char* on :
       {"mlp", "conv", "gpt", "tiny gradients", "gradients whose squares vanish", "tiny gradients clipped",
        "huge gradients", "huge gradients clipped", "norm near the threshold", "very small eps", "large eps",
        "large learning rate", "amsgrad", "after a warm-up", "learned by heart", "vocabulary of 2,000",
        "tied vocabulary", "few rows touched"}) {
    all.push_back({"step_tail", on, kTolerance});
  }
  return all;
}

// -- the tests --------------------------------------------------------------------------------------------------------

class PlantedTest : public testing::Test {
 protected:
  void SetUp() override {
    threads_ = at::get_num_threads();
    at::set_num_threads(1);  // models so small only wait for a second thread
  }
  void TearDown() override {
    planted_.reset();
    current = nullptr;
    at::set_num_threads(threads_);
  }
  void begin(const std::string& name) {
    torch::manual_seed(1);
    const auto [make, warm] = workload(name);
    planted_ = std::make_unique<PlantedRun>(make());
    planted_->start(warm);
    current = planted_.get();
  }
  /// The verifier's ruling on what is active then; the run is left as it was.
  tune::Ruling ruling(const std::string& strategy, Kind kind) {
    auto& run = *planted_->run;
    run.set_active({strategy});
    auto found = planted_->verifier->check(kind);
    EXPECT_EQ(run.active(), std::vector<std::string>{strategy}) << "it is left active";
    run.set_active({});
    planted_->snapshot->restore();
    EXPECT_NO_THROW(planted_->snapshot->prove());
    return found;
  }
  static std::string registered(const std::string& name, Kind kind, const Acts& acts, const Plant& plant) {
    tune::register_strategy({name, kind, {}, [acts, plant] { return std::make_unique<Planted>(acts, plant); }});
    return name;
  }

  std::unique_ptr<PlantedRun> planted_;

 private:
  int threads_ = 1;
};

class PlantedFaultsTest : public PlantedTest, public testing::WithParamInterface<const char*> {};

TEST_P(PlantedFaultsTest, AreCaughtUnderTheirClaim) {
  begin(GetParam());
  for (const auto& fault : faults()) {
    if (fault.on != GetParam()) continue;
    SCOPED_TRACE(fault.name);
    const auto found = ruling(registered("fault: " + fault.name, fault.kind, fault.acts, fault.plant), fault.kind);
    EXPECT_FALSE(found.held) << found.reason;
    EXPECT_NE(found.reason, "");
  }
}
INSTANTIATE_TEST_SUITE_P(Workloads, PlantedFaultsTest, testing::Values("mlp", "conv", "gpt"),
                         [](const auto& one) { return std::string(one.param); });

TEST_F(PlantedTest, HealthyStrategiesPass) {
  for (const auto& one : healthy()) {
    SCOPED_TRACE(one.name + " on " + one.on);
    begin(one.on);
    const auto name =
        one.plant ? registered("healthy: " + one.name + " on " + one.on, one.kind, always(), one.plant) : one.name;
    const auto found = ruling(name, one.kind);
    EXPECT_TRUE(found.held) << found.reason;
  }
}

TEST_F(PlantedTest, ThereAreEnoughOfThem) {
  EXPECT_GE(faults().size(), 100U);
  EXPECT_GE(healthy().size(), 40U);
}

}  // namespace
}  // namespace oxytorch::planted
