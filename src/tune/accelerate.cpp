#include "oxytorch/tune/accelerate.h"

#include <c10/util/Type.h>
#include <torch/version.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <typeinfo>
#include <variant>

#include "oxytorch/config_use.h"
#include "oxytorch/error.h"
#include "oxytorch/host.h"
#include "oxytorch/logging.h"
#include "oxytorch/memory.h"
#include "oxytorch/spelling.h"
#include "oxytorch/tune/asked.h"
#include "oxytorch/tune/host.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/tuner.h"
#include "tune/digest.h"
#include "tune/plan.h"
#include "tune/run_workload.h"

namespace oxytorch {
namespace {

/// Module classes, shapes, dtypes, optimizer and shapes of the batches.
std::string structure(const tune::Run& run) {
  std::ostringstream text;
  const auto describe = [&](const at::Tensor& t) {
    if (t.defined()) text << t.sizes() << ' ' << t.scalar_type() << ' ' << t.device() << '\n';
  };
  text << run.model().name() << '\n';
  for (const auto& item : run.model().named_modules("", /*include_self=*/false)) {
    text << item.key() << ' ' << item.value()->name() << '\n';
  }
  for (const auto& item : run.model().named_parameters()) describe(item.value());
  for (const auto& item : run.model().named_buffers()) describe(item.value());
  text << c10::demangle(typeid(run.original()).name()) << ' ' << run.clip_norm() << '\n';
  for (const auto& group : run.original().param_groups()) text << group.params().size() << '\n';
  for (const auto& batch : run.batches()) {
    for (const auto& tensor : batch.tensors()) describe(tensor);
  }
  tune::Digest digest;
  digest.add("structure", std::string_view(text.str()));
  return digest.text();
}

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

/// Trials of the host pool find its pages again.
struct KeptPool {
  KeptPool() = default;
  KeptPool(const KeptPool&) = delete;
  KeptPool& operator=(const KeptPool&) = delete;
  ~KeptPool() { setting.revert(); }
  HostSetting setting = keep_host_pool();
};

/// Options with what a configuration says in the place of those that were left alone.
AccelerateOptions settled(AccelerateOptions options) {
  if (!options.config()) return options;
  const auto& config = *options.config();
  const AccelerateOptions untouched;
  OXY_CHECK(options.level() == untouched.level() || options.level() == config.level(), InvalidArgument, "level is ",
            in_quotes(options.level()), ", and that of config is ", in_quotes(config.level()), ". Give one of them.");
  OXY_CHECK(!is_given(config, "compile"), NotSupported, "compile = ", to_string(config.get("compile")), ": ",
            refusal("compile", ConfigUser::CppTrainer));
  OXY_CHECK(!is_given(config, "progress"), NotSupported, "progress = ", to_string(config.get("progress")),
            ": accelerate() shows none in C++. Leave it out, or use PerformanceOptimizer, whose trainer does.");
  check_settings(config, ConfigUser::Accelerate);
  options.level(config.level());
  if (options.steps_planned() == untouched.steps_planned()) {
    const auto length = config.integer("max_steps").value_or(0);
    const bool by_length = length > 0 && !is_given(config, "steps_planned");
    options.steps_planned(by_length ? length : config.integer("steps_planned").value_or(untouched.steps_planned()));
  }
  if (options.clip_norm() == 0) options.clip_norm(config.number("clip_norm"));
  if (options.budget() == 0) options.budget(config.number("tune_seconds"));
  if (options.seed() == 0) options.seed(static_cast<std::uint64_t>(config.integer("seed").value_or(0)));
  return options;
}

/// Settings that were named, as a text, for a certificate's key.
std::string named_text(const PerformanceConfig& config) {
  std::string text;
  for (const auto& field : PerformanceConfig::fields()) {
    if (tune::is_named(config, field.key)) text += ' ' + field.key + '=' + to_string(config.get(field.key));
  }
  return text;
}

void name_settings(const PerformanceConfig& config, tune::Run& run) {
  for (const auto& field : PerformanceConfig::fields()) {
    const auto value = config.get(field.key);
    const auto* const word = std::get_if<std::string>(&value);
    if (word != nullptr && tune::is_named(config, field.key)) run.asked.emplace(field.key, *word);
  }
  run.retain_limit = retain_limit_of(config);
}

/// What a certificate holds for.
tune::CertificateKey key_of(const tune::Run& run, const AccelerateOptions& options,
                            const std::vector<tune::RegisteredStrategy>& strategies) {
  std::string offered;
  for (const auto& strategy : strategies) {
    const auto& left_out = options.exclude();
    if (std::find(left_out.begin(), left_out.end(), strategy.name) == left_out.end()) offered += ' ' + strategy.name;
  }
  return {tune::hardware_key() + ", " + run.device().str(), TORCH_VERSION, structure(run),
          "C++, level " + options.level() + (options.loop() == "plan" ? "" : ", loop " + options.loop()) + ", steps " +
              std::to_string(options.steps_planned()) + ", strategies" + offered +
              (options.config() ? ", settings" + named_text(*options.config()) : "")};
}

}  // namespace

Plan accelerate(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                std::vector<Batch> batches, const AccelerateOptions& given) {
  const auto options = settled(given);
  OXY_CHECK(options.folder().empty() || options.remember(), InvalidArgument, "folder is ", in_quotes(options.folder()),
            ", and remember is false, so nothing would be stored there. Leave folder out, or set remember(true).");
  OXY_CHECK(options.loop() == "plan" || options.loop() == "yours", InvalidArgument, "loop is ",
            in_quotes(options.loop()), ", expected 'plan' or 'yours'.");
  for (const auto& name : options.exclude()) static_cast<void>(tune::find_strategy(name));
  auto strategies = wanted_strategies(options);
  tune::Asked asked;
  if (options.config()) asked = tune::asked_of(*options.config(), tune::offers_of(strategies), options.exclude());
  resolve_vector_math();
  auto run = std::make_unique<tune::Run>(model, optimizer, std::move(loss), std::move(batches), options.clip_norm());
  run->owns_loop = options.loop() == "plan";
  if (options.config()) name_settings(*options.config(), *run);
  NamedSettings named = options.config() ? NamedSettings(*options.config()) : NamedSettings();
  std::optional<tune::CertificateStore> store;
  if (options.remember()) store.emplace(options.folder());
  std::optional<tune::Certificate> certificate;
  auto widest = tune::Kind::Exact;
  {
    const KeptPool kept;
    tune::Snapshot snapshot(*run);
    auto key = key_of(*run, options, strategies);
    tune::RunWorkload workload(*run, snapshot, std::move(strategies), options.seed(), std::move(asked.skipped));
    tune::Tuner tuner(workload, std::move(key),
                      {.level = options.level(),
                       .steps_planned = options.steps_planned(),
                       .budget = options.budget(),
                       .seed = options.seed(),
                       .exclude = options.exclude(),
                       .required = std::move(asked.required)});
    certificate = tuner.tune(store ? &*store : nullptr);
    snapshot.prove();
    tuner.activate(*certificate);
    run->required = tuner.activate_required(*certificate);
    widest = tuner.widest(run->in_force());
  }
  give_back_host_memory();  // what references and snapshots took: the steps that follow do not need it
  if (const auto why = store ? store->try_put(*certificate) : ""; !why.empty()) {
    certificate->events.push_back("step 0: the plan is not stored, so the next run tunes again: " + why);
    log(LogLevel::Warn, "accelerate: " + certificate->events.back());
  }
  return Plan(std::make_unique<Plan::Impl>(std::move(run), std::move(*certificate), std::move(store), widest,
                                           options.seed(), std::move(named)));
}

}  // namespace oxytorch
