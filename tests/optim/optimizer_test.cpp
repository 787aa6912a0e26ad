// The C++ optimizers against torch::optim's classes and plain compositions, and what a step promises.
#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

#include "optimizer_cases.h"
#include "oxytorch/isa.h"
#include "oxytorch/optim/schedule.h"

namespace {
std::atomic<std::int64_t> allocations{0};
}

#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

// Counts every allocation that C++ code in this program makes through operator new.
void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace oxytorch::optim::testing {
namespace {

using ::testing::HasSubstr;

template <class Case>
class EachOptimizer : public ::testing::Test {};
TYPED_TEST_SUITE(EachOptimizer, AllCases);

template <class Case>
class EachNativeOptimizer : public ::testing::Test {};
TYPED_TEST_SUITE(EachNativeOptimizer, NativeCases);

template <class Case>
class EachReplacedOptimizer : public ::testing::Test {};
TYPED_TEST_SUITE(EachReplacedOptimizer, PeerCases);

template <class Case>
void expect_follows(torch::Dtype dtype, double relative, double absolute) {
  Trial<Case> ours(dtype, kPlain);
  Tensors theirs = make_params<Case>(torch::kDouble);
  const StepFunction reference = make_reference<Case>(theirs);
  for (int i = 0; i < 8; ++i) {
    ours.step(i);
    set_grads(theirs, i);
    reference();
  }
  expect_close(ours.params, theirs, relative, absolute);
}

TYPED_TEST(EachOptimizer, FollowsAnFp64Reference) {
  // Muon's bf16 products round apart in a batch and alone, and round the more where fp32 and fp64 gradients differ.
  const double ortho = TypeParam::kMatricesOnly ? 1e-2 : 0;
  expect_follows<TypeParam>(torch::kDouble, 1e-12, 1e-12 + ortho);
  expect_follows<TypeParam>(torch::kFloat, 1e-5, 2e-6 + ortho);
}

TYPED_TEST(EachOptimizer, ComposedOfTorchOperatorsAgreesWithTheKernels) {
  const auto options = [](auto o) { return o.clip_norm(0.5).ema_decay(0.9).collect_stats(true); };
  Trial<TypeParam> native(torch::kFloat, options);
  Trial<TypeParam> composite(torch::kFloat, [&](auto o) { return options(o).force_composite(true); });
  native.steps(0, 5);
  composite.steps(0, 5);
  EXPECT_EQ(native.optimizer.tail().native(), !TypeParam::kMatricesOnly);
  EXPECT_FALSE(composite.optimizer.tail().native());
  expect_close(native.params, composite.params);
  expect_close(native.optimizer.ema_parameters(), composite.optimizer.ema_parameters());
  const TailStats &a = native.optimizer.tail_stats(), &b = composite.optimizer.tail_stats();
  expect_close({a.grad_norm, a.param_norms, a.update_norms}, {b.grad_norm, b.param_norms, b.update_norms}, 1e-4);
}

TYPED_TEST(EachOptimizer, AscendsWithMaximize) {
  using Options = typename TypeParam::Options;
  if constexpr (requires(Options o) { o.maximize(true); }) {
    Trial<TypeParam> up(torch::kFloat, [](auto o) { return o.maximize(true); });
    Trial<TypeParam> down(torch::kFloat, kPlain);
    for (int i = 0; i < 4; ++i) {
      set_grads(up.params, i, -1);
      up.optimizer.step();
      down.step(i);
    }
    expect_same_bits(up.params, down.params);
  }
}

TYPED_TEST(EachOptimizer, LeavesEveryByteOfAStepThatIsNotFinite) {
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    Trial<TypeParam> trial(format.dtype, [&](auto o) { return o.tail(format.tail); });
    trial.steps(0, 2);
    const Tensors before = trial.everything();
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      set_grads(trial.params, 2);
      trial.params.back().mutable_grad().view({-1})[3] = bad;
      trial.optimizer.step();
      expect_same_bits(trial.everything(), before);
      EXPECT_EQ(trial.optimizer.tail_stats().applied.template item<float>(), 0);
    }
    EXPECT_EQ(trial.optimizer.tail_stats().skipped.template item<std::int64_t>(), 2);
    trial.step(3);
    EXPECT_FALSE(same_bits(trial.params[1], before[1]));
  }
}

TYPED_TEST(EachOptimizer, GivesTheSameBitsOnAnyThreadsAndInstructions) {
  const int threads = torch::get_num_threads();
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    Tensors first;
    for (const Isa isa : supported_isas()) {
      const ScopedIsa chosen(isa);
      for (const int count : {1, 2}) {
        torch::set_num_threads(count);
        Trial<TypeParam> trial(format.dtype, [&](auto o) { return o.tail(format.tail); });
        trial.steps(0, 3);
        if (first.empty()) first = trial.everything();
        SCOPED_TRACE(std::string(name(isa)) + ", threads " + std::to_string(count));
        expect_same_bits(trial.everything(), first);
      }
    }
  }
  torch::set_num_threads(threads);
}

TYPED_TEST(EachNativeOptimizer, AllocatesNothingOnTheStepPathAfterTheFirst) {
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    for (const bool skip : {false, true}) {
      Trial<TypeParam> trial(format.dtype, [&](auto o) { return o.tail(format.tail); });
      trial.step(0);
      if (skip) trial.params[0].mutable_grad()[0] = std::nan("");
      trial.optimizer.step();
      ASSERT_TRUE(trial.optimizer.tail().native());
      const std::int64_t before = allocations.load();
      for (int i = 0; i < 10; ++i) trial.optimizer.step();
      EXPECT_EQ(allocations.load() - before, 0) << (skip ? "skipped" : "taken") << " steps";
      EXPECT_EQ(trial.optimizer.tail_stats().skipped.template item<std::int64_t>(), skip ? 11 : 0);
    }
  }
}

TYPED_TEST(EachOptimizer, IsDrivenBySchedules) {
  Trial<TypeParam> scheduled(torch::kFloat, kPlain), by_hand(torch::kFloat, kPlain);
  CosineAnnealing schedule(scheduled.optimizer, 5, 1e-4);
  constexpr double kPi = 3.14159265358979323846;
  for (int i = 0; i < 5; ++i) {
    const double rate = 1e-4 + (1e-2 - 1e-4) * (1 + std::cos(kPi * i / 5)) / 2;
    EXPECT_NEAR(scheduled.optimizer.param_groups()[0].options().get_lr(), rate, 1e-15);
    by_hand.optimizer.param_groups()[0].options().set_lr(scheduled.optimizer.param_groups()[0].options().get_lr());
    scheduled.step(i);
    by_hand.step(i);
    schedule.step();
  }
  expect_same_bits(scheduled.params, by_hand.params);
}

TYPED_TEST(EachOptimizer, CyclesItsMomentumWithOneCycle) {
  using Options = typename TypeParam::Options;
  Trial<TypeParam> trial(torch::kFloat, kPlain);
  const OneCycleOptions cycle{.max_lr = 0.1, .total_steps = 10, .max_momentum = 0.97};
  auto& options = static_cast<Options&>(trial.optimizer.param_groups()[0].options());
  if constexpr (requires { options.betas(); }) {
    const OneCycle schedule(trial.optimizer, cycle);
    EXPECT_EQ(std::get<0>(options.betas()), 0.97);
  } else if constexpr (requires { options.momentum(); }) {
    const OneCycle schedule(trial.optimizer, cycle);
    EXPECT_EQ(options.momentum(), 0.97);
  } else {
    EXPECT_THAT(message_of([&] { const OneCycle schedule(trial.optimizer, cycle); }), HasSubstr("neither betas nor"));
  }
}

TYPED_TEST(EachReplacedOptimizer, CarriesOnWhereTorchStood) {
  using Case = TypeParam;
  Tensors a = make_params<Case>(torch::kDouble), b = make_params<Case>(torch::kDouble);
  const auto optimizer_for = [](const Tensors& p) {
    const auto options = Case::set(typename Case::TheirOptions(0.5));
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Tensors(p.begin(), p.begin() + 2));
    groups.emplace_back(Tensors(p.begin() + 2, p.end()));
    return std::make_unique<typename Case::Theirs>(groups, options);
  };
  const auto old = optimizer_for(a), other = optimizer_for(b);
  // A schedule may bring a rate to what the class's constructor would give.
  for (auto* one : {old.get(), other.get()}) {
    one->param_groups()[1].options().set_lr(typename Case::Options().lr());
  }
  const auto both = [&](torch::optim::Optimizer& mine, int from, int to) {
    for (int i = from; i < to; ++i) {
      set_grads(a, i);
      set_grads(b, i);
      mine.step();
      other->step();
    }
  };
  both(*old, 0, 3);
  const std::unique_ptr<TailOptimizer> made = replace(*old);
  EXPECT_NE(dynamic_cast<typename Case::Ours*>(made.get()), nullptr);
  EXPECT_EQ(made->param_groups()[1].options().get_lr(), typename Case::Options().lr());
  both(*made, 3, 7);
  expect_close(a, b, 1e-12, 1e-12);
  EXPECT_EQ(replace(*other, {.clip_norm = 2})->tail().options().clip_norm, 2);
}

TEST(Replace, RefusesOtherClassesByName) {
  Tensors params = make_params<SGDCase>();
  const torch::optim::LBFGS lbfgs(params);
  EXPECT_THAT(message_of([&] { replace(lbfgs); }), HasSubstr("no replacement for torch::optim::LBFGS"));
  const AdamW ours(params);
  EXPECT_THAT(message_of([&] { replace(ours); }), HasSubstr("no replacement for oxytorch::optim::AdamW"));
  const torch::optim::AdamW theirs(params);
  EXPECT_THAT(message_of([&] { replace(theirs, {.clip_norm = -1}); }), HasSubstr("clip_norm is -1"));
}

TEST(Replace, StateGoesBackToTheOptimizerThatWasReplacedAlone) {
  const auto params = make_params<AdamWCase>();
  torch::optim::AdamW theirs(params);
  const auto ours = replace(theirs);
  auto others = params, more = params;
  others[1] = others[1].detach().clone().requires_grad_();
  more.push_back(at::zeros({3}).requires_grad_());
  for (const auto& [wrong, place] : {std::pair(others, 1), std::pair(more, static_cast<int>(params.size()))}) {
    torch::optim::AdamW other(wrong);
    EXPECT_THAT(message_of([&] { hand_back(*ours, other); }),
                HasSubstr("parameter " + std::to_string(place) + " is not the same in both optimizers"));
  }
}

TEST(TailOptimizer, ClipsAveragesAndReportsLikeTheSeparatePieces) {
  Tensors a = make_params<AdamWCase>(), b = make_params<AdamWCase>();
  AdamW ours(a, AdamWOptions(1e-2).clip_norm(0.5).ema_decay(0.9).copy_dtype(at::kBFloat16));
  torch::optim::AdamW theirs(b, torch::optim::AdamWOptions(1e-2));
  Tensors average;
  for (const auto& p : b) average.push_back(p.detach().clone());
  for (int i = 0; i < 5; ++i) {
    set_grads(a, i);
    set_grads(b, i);
    const double norm = torch::nn::utils::clip_grad_norm_(b, 0.5);
    theirs.step();
    for (std::size_t k = 0; k < b.size(); ++k) average[k].lerp_(b[k].detach(), 0.1);
    ours.step();
    EXPECT_NEAR(ours.tail_stats().grad_norm.item<double>(), norm, 1e-4 * norm);
  }
  expect_close(a, b);
  expect_close(ours.ema_parameters(), average);
  for (std::size_t k = 0; k < a.size(); ++k) EXPECT_TRUE(same_bits(ours.copies()[k], a[k].to(at::kBFloat16))) << k;
  const auto kept = a[1].detach().clone();
  ours.apply_ema();
  EXPECT_TRUE(torch::allclose(a[1], average[1], 1e-5, 1e-6));
  EXPECT_THROW(ours.step(), Error);
  EXPECT_THAT(message_of([&] {
                std::stringstream stream;
                torch::save(ours, stream);
                torch::load(ours, stream);
              }),
              HasSubstr("restore_parameters()"));
  ours.restore_parameters();
  EXPECT_TRUE(torch::equal(a[1], kept));
  std::stringstream stream;
  torch::save(ours, stream);
  torch::load(ours, stream);
  EXPECT_NO_THROW(ours.step());
  AdamW without(make_params<AdamWCase>());
  EXPECT_THAT(message_of([&] { without.apply_ema(); }), HasSubstr("set ema_decay"));
}

TEST(TailOptimizer, GivesTheSameBitsForAnyThreadCount) {
  const int before = at::get_num_threads();
  std::vector<at::Tensor> first;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    torch::manual_seed(4);
    Tensors mine{torch::randn({700, 600}).requires_grad_(), torch::randn({3000}).requires_grad_()}, theirs;
    for (const auto& p : mine) theirs.push_back(p.detach().clone().requires_grad_());
    AdamW ours(mine, AdamWOptions(1e-2).clip_norm(0.5));
    torch::optim::AdamW plain(theirs, torch::optim::AdamWOptions(1e-2));
    for (int i = 0; i < 3; ++i) {
      set_grads(mine, i);
      set_grads(theirs, i);
      ours.step();
      torch::nn::utils::clip_grad_norm_(theirs, 0.5);
      plain.step();
    }
    expect_close(mine, theirs);
    if (first.empty()) first = mine;
    for (std::size_t k = 0; k < mine.size(); ++k) EXPECT_TRUE(same_bits(mine[k], first[k])) << threads;
  }
  at::set_num_threads(before);
}

std::vector<torch::optim::OptimizerParamGroup> two_groups(const Tensors& p, auto options) {
  std::vector<torch::optim::OptimizerParamGroup> result;
  result.emplace_back(Tensors(p.begin(), p.begin() + 2), std::make_unique<decltype(options)>(options));
  result.emplace_back(Tensors(p.begin() + 2, p.end()));
  return result;
}

TEST(TailOptimizer, GroupsTakeTheirOwnOptionsAndRatesChange) {
  Tensors a = make_params<AdamWCase>(), b = make_params<AdamWCase>();
  AdamW ours(two_groups(a, AdamWOptions(0.05)), AdamWOptions(1e-2).weight_decay(0.2));
  // What a group does not say is the optimizer's; before torch 2.10 it was the class's, so here torch's is told.
  torch::optim::AdamW theirs(two_groups(b, torch::optim::AdamWOptions(0.05).weight_decay(0.2)),
                             torch::optim::AdamWOptions(1e-2).weight_decay(0.2));
  for (std::size_t i = 0; i < 2; ++i) {
    const auto& mine = static_cast<const AdamWOptions&>(ours.param_groups()[i].options());
    const auto& torchs = static_cast<const torch::optim::AdamWOptions&>(theirs.param_groups()[i].options());
    EXPECT_EQ(mine.lr(), torchs.lr()) << i;
    EXPECT_EQ(mine.weight_decay(), torchs.weight_decay()) << i;
  }
  for (int i = 0; i < 6; ++i) {
    for (auto& group : ours.param_groups()) group.options().set_lr(group.options().get_lr() * 0.9);
    for (auto& group : theirs.param_groups()) group.options().set_lr(group.options().get_lr() * 0.9);
    set_grads(a, i);
    set_grads(b, i);
    ours.step();
    theirs.step();
  }
  expect_close(a, b);
}

TEST(TailOptimizer, TakesAGroupInTheMiddleOfTraining) {
  Tensors a = make_params<RMSpropCase>(), b = make_params<RMSpropCase>();
  const Tensors late_a(a.begin() + 4, a.end()), late_b(b.begin() + 4, b.end());
  RMSprop ours(Tensors(a.begin(), a.begin() + 4), RMSpropOptions(1e-2).momentum(0.9));
  torch::optim::RMSprop theirs(Tensors(b.begin(), b.begin() + 4), torch::optim::RMSpropOptions(1e-2).momentum(0.9));
  for (int i = 0; i < 6; ++i) {
    if (i == 3) {
      ours.add_param_group({late_a, std::make_unique<RMSpropOptions>(0.05)});
      theirs.add_param_group(
          {late_b, std::make_unique<torch::optim::RMSpropOptions>(torch::optim::RMSpropOptions(0.05).momentum(0.9))});
    }
    set_grads(a, i);
    set_grads(b, i);
    ours.step();
    theirs.step();
  }
  expect_close(a, b);
  EXPECT_THAT(message_of([&] { ours.add_param_group({{a[0]}}); }), HasSubstr("was given twice"));
  EXPECT_EQ(ours.param_groups().size(), 2);
}

TEST(TailOptimizer, DividesByTheScaleAndReportsInf) {
  Tensors a = make_params<AdamWCase>(), b = make_params<AdamWCase>();
  AdamW scaled(a, AdamWOptions(1e-2)), plain(b, AdamWOptions(1e-2));
  const auto scale = torch::full({}, 1024.0F);
  auto found = torch::zeros({});
  set_grads(a, 1, 1024);
  set_grads(b, 1);
  scaled.set_grad_scale(scale, found);
  scaled.step();
  plain.step();
  expect_close(a, b);
  EXPECT_EQ(found.item<float>(), 0);
  a[4].mutable_grad()[4999] = std::numeric_limits<float>::infinity();
  const auto kept = a[4].detach().clone();
  scaled.set_grad_scale(scale, found);
  scaled.step();
  EXPECT_EQ(found.item<float>(), 1);
  EXPECT_TRUE(torch::equal(a[4], kept));
}

TEST(TailOptimizer, RefusesBadOptionsByNameAndValue) {
  const double nan = std::nan("");
  Tensors params = make_params<SGDCase>(), matrices = make_params<MuonCase>();
  const auto refuses = [&]<class O>(O options, const char* text, bool in_groups = true) {
    const auto make = [&](const O& defaults, const O* group) {
      Tensors& given = std::is_same_v<O, MuonOptions> ? matrices : params;
      std::vector<torch::optim::OptimizerParamGroup> groups;
      if (group == nullptr) {
        groups.emplace_back(given);
      } else {
        groups.emplace_back(given, std::make_unique<O>(*group));
      }
      if constexpr (std::is_same_v<O, AdamWOptions>) AdamW(groups, defaults);
      if constexpr (std::is_same_v<O, AdamOptions>) Adam(groups, defaults);
      if constexpr (std::is_same_v<O, SGDOptions>) SGD(groups, defaults);
      if constexpr (std::is_same_v<O, LionOptions>) Lion(groups, defaults);
      if constexpr (std::is_same_v<O, AdagradOptions>) Adagrad(groups, defaults);
      if constexpr (std::is_same_v<O, RMSpropOptions>) RMSprop(groups, defaults);
      if constexpr (std::is_same_v<O, MuonOptions>) Muon(groups, defaults);
    };
    EXPECT_THAT(message_of([&] { make(options, nullptr); }), HasSubstr(text));
    // Hyperparameters are read in groups too; options of the whole tail are not.
    if (in_groups && std::string(text).find(" = ") != std::string::npos) {
      EXPECT_THAT(message_of([&] { make(O(), &options); }), HasSubstr(text)) << "in a group";
    }
  };
  const auto hyperparameters = [&]<class O>(O) {
    refuses(O(-1), "lr = -1");
    refuses(O().lr(nan), "lr = nan");
    refuses(O().weight_decay(-0.5), "weight_decay = -0.5");
    if constexpr (requires(O o) { o.eps(0.1); }) refuses(O().eps(-1e-8), "eps = -1e-08");
    if constexpr (requires(O o) { o.momentum(0.1); }) refuses(O().momentum(-0.9), "momentum = -0.9");
    if constexpr (requires(O o) { o.betas(); }) {
      refuses(O().betas({1.0, 0.9}), "betas[0] = 1");
      refuses(O().betas({0.9, -0.25}), "betas[1] = -0.25");
    }
    refuses(O().clip_norm(-2), "clip_norm is -2");
    refuses(O().clip_norm(nan), "clip_norm is nan");
    refuses(O().clip_value(-3), "clip_value is -3");
    refuses(O().agc(-4), "agc is -4");
    refuses(O().agc_eps(0), "agc_eps is 0");
    refuses(O().clip_norm(1).clip_value(2), "more than one kind of clipping is set (clip_norm 1, clip_value 2");
    refuses(O().ema_decay(1), "ema_decay is 1");
    refuses(O().ema_decay(-0.1), "ema_decay is -0.1");
    refuses(O().copy_dtype(at::kDouble), "copy_dtype is Double");
    refuses(O().norm_in_backward(true).step_in_backward(true), "exclude each other");
    refuses(O().step_in_backward(true).clip_norm(1), "clip_norm = 1", false);
    refuses(O().step_in_backward(true), "nonfinite = \"skip\"", false);
  };
  hyperparameters(AdamWOptions());
  hyperparameters(AdamOptions());
  hyperparameters(SGDOptions());
  hyperparameters(LionOptions());
  hyperparameters(AdagradOptions());
  hyperparameters(RMSpropOptions());
  hyperparameters(MuonOptions());
  refuses(SGDOptions(0.1).nesterov(true), "momentum is 0");
  refuses(SGDOptions(0.1).nesterov(true).momentum(0.9).dampening(0.5), "dampening 0.5");
  refuses(SGDOptions().dampening(nan), "dampening = nan");
  refuses(AdagradOptions().lr_decay(-1), "lr_decay = -1");
  refuses(AdagradOptions().initial_accumulator_value(-2), "initial_accumulator_value = -2");
  refuses(RMSpropOptions().alpha(-0.5), "alpha = -0.5");
  refuses(MuonOptions().ns_steps(100), "ns_steps = 100");
  refuses(MuonOptions().step_in_backward(true).nonfinite(NonFinite::Propagate), "not served for Muon");
  EXPECT_THAT(message_of([&] { Muon opt(params); }), HasSubstr("Give other parameters to AdamW"));
}

TEST(TailOptimizer, RefusesBadRatesAtTheStepAndOptionsOfAnotherClass) {
  Tensors params = make_params<SGDCase>();
  AdamW opt(params, AdamWOptions(0.1));
  set_grads(params, 0);
  opt.param_groups()[0].options().set_lr(std::nan(""));
  EXPECT_THAT(message_of([&] { opt.step(); }), HasSubstr("lr = nan"));
  opt.param_groups()[0].set_options(std::make_unique<torch::optim::AdamWOptions>());
  EXPECT_THAT(message_of([&] { opt.step(); }),
              HasSubstr("torch::optim::AdamWOptions; this optimizer takes oxytorch::"));
  EXPECT_THAT(message_of([&] { SGD(two_groups(params, AdamWOptions())); }), HasSubstr("oxytorch::optim::AdamWOptions"));
}

}  // namespace
}  // namespace oxytorch::optim::testing
