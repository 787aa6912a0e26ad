#include "oxytorch/tune/accelerate.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <optional>

#include "base/spelling.h"
#include "oxytorch/config_use.h"
#include "oxytorch/error.h"
#include "oxytorch/tune/asked.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/tuner.h"
#include "tune/plan.h"
#include "tune/run_workload.h"

namespace oxytorch {
namespace {

std::vector<tune::RegisteredStrategy> wanted_strategies(const AccelerateOptions& options) {
  if (options.strategies().empty()) return tune::strategies();
  std::vector<tune::RegisteredStrategy> wanted;
  for (const auto& name : options.strategies()) {
    OXY_CHECK(std::count(options.strategies().begin(), options.strategies().end(), name) == 1, InvalidArgument,
              "strategies names ", in_quotes(name), " more than once. Name each strategy once.");
    wanted.push_back(tune::find_strategy(name));
  }
  return wanted;
}

/// Options with what a configuration says in the place of those that were left alone.
AccelerateOptions settled(AccelerateOptions options) {
  if (!options.config()) return options.level().empty() ? options.level("advanced") : options;
  if (!options.level().empty()) options.config()->set("level", options.level());
  const auto& config = *options.config();
  const AccelerateOptions untouched;
  OXY_CHECK(!is_given(config, "compile"), NotSupported, "compile = ", to_string(config.get("compile")), ": ",
            refusal("compile", ConfigUser::CppTrainer));
  OXY_CHECK(!is_given(config, "progress"), NotSupported, "progress = ", to_string(config.get("progress")),
            ": accelerate() shows none in C++. Leave it out, or use PerformanceOptimizer, whose trainer does.");
  check_settings(config, ConfigUser::Accelerate);
  options.level(config.level());
  if (options.steps_planned() == untouched.steps_planned()) options.steps_planned(tune::planned_steps(config));
  if (options.clip_norm() == 0) options.clip_norm(config.number("clip_norm"));
  if (options.tune_seconds() == 0) options.tune_seconds(config.number("tune_seconds"));
  if (!config.flag("remember")) options.remember(false);
  if (options.seed() == 0) options.seed(static_cast<std::uint64_t>(config.integer("seed").value_or(0)));
  return options;
}

/// What decides which strategies are kept.
std::string key_of(const AccelerateOptions& options, const std::vector<tune::RegisteredStrategy>& strategies) {
  std::vector<std::string> offered;
  for (const auto& strategy : strategies) {
    const auto& left_out = options.exclude();
    if (std::find(left_out.begin(), left_out.end(), strategy.name) == left_out.end()) offered.push_back(strategy.name);
  }
  return "loop " + options.loop() + "; " +
         tune::decided_by(options.config().value_or(PerformanceConfig()), offered, options.steps_planned());
}

}  // namespace

Plan accelerate(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                std::vector<Batch> batches, const AccelerateOptions& options) {
  OXY_CHECK(loss, InvalidArgument, "there is no loss function. Pass one, for example supervised(model, criterion).");
  return accelerate(Models{model}, Optimizers{optimizer}, {std::move(loss)}, std::move(batches), options);
}

Plan accelerate(const Models& models, const Optimizers& optimizers, std::vector<LossFunction> losses,
                std::vector<Batch> batches, const AccelerateOptions& given) {
  const auto options = settled(given);
  OXY_CHECK(options.folder().empty() || options.remember(), InvalidArgument, "folder is ", in_quotes(options.folder()),
            ", and remember is false, so nothing would be stored there. Leave folder out, or set remember(true).");
  OXY_CHECK(options.loop() == "plan" || options.loop() == "yours", InvalidArgument, "loop is ",
            in_quotes(options.loop()), ", expected 'plan' or 'yours'.");
  for (const auto& name : options.exclude()) static_cast<void>(tune::find_strategy(name));
  OXY_CHECK(!losses.empty(), InvalidArgument, "there is no loss function. Pass one, or one for each optimizer.");
  OXY_CHECK(!batches.empty(), InvalidArgument, "there is no batch. Pass some of the run's own, four to eight.");
  auto strategies = wanted_strategies(options);
  tune::Asked asked;
  if (options.config()) asked = tune::asked_of(*options.config(), tune::offers_of(strategies), options.exclude());
  Plan::Impl::take_back_of(models);
  auto run =
      std::make_unique<tune::Run>(models, optimizers, std::move(losses), std::move(batches), options.clip_norm());
  run->owns_loop = options.loop() == "plan";
  if (options.config()) {
    name_settings(*options.config(), tune::AskedBy::Loop, *run);
    run->accumulation = options.config()->integer("accumulation_steps").value_or(1);
    OXY_CHECK(run->accumulation == 1 || run->parts() == 1, InvalidArgument, "accumulation_steps is ", run->accumulation,
              ", and a step of several losses is of one batch. Leave it out.");
  }
  std::optional<tune::CertificateStore> store;
  if (options.remember()) store.emplace(options.folder());
  auto plan = std::make_unique<Plan::Impl>(
      std::move(run), options.config() ? NamedSettings(*options.config()) : NamedSettings(), std::move(store));
  tune::TunerOptions tuning{.level = options.level(),
                            .steps_planned = options.steps_planned(),
                            .tune_seconds = options.tune_seconds(),
                            .seed = options.seed(),
                            .exclude = options.exclude(),
                            .required = std::move(asked.required)};
  if (options.config()) {
    plan->checkpointing = checkpointing_of(*options.config());
    plan->saved_tensors = memory::parse_saved_format(options.config()->word("saved_tensors"));
    tune::set_goal(*options.config(), tuning);
  }
  auto key = key_of(options, strategies);
  plan->tune({.strategies = std::move(strategies),
              .skipped = std::move(asked.skipped),
              .options = std::move(tuning),
              .key = std::move(key)});
  return Plan(std::move(plan));
}

}  // namespace oxytorch
