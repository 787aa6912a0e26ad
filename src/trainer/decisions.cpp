#include "trainer/decisions.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "oxytorch/amp.h"
#include "oxytorch/config_use.h"
#include "oxytorch/logging.h"
#include "oxytorch/optim/optimizer.h"
#include "oxytorch/trainer/report_lines.h"
#include "oxytorch/tune/strategy.h"
#include "tune/names.h"
#include "tune/run_workload.h"

namespace oxytorch {
namespace {

using tune::holds;

std::vector<std::string> names_of_group(const std::string& group) {
  std::vector<std::string> names;
  for (const auto& strategy : tune::strategies()) {
    if (strategy.traits.group == group) names.push_back(strategy.name);
  }
  return names;
}

/// Makes one more active, where `ask` only if it says that it applies; why it is not, empty where it is.
std::string put(tune::Run& run, const std::string& name, bool ask) {
  try {
    auto& strategy = run.strategy(name);
    if (ask) {
      if (const auto answer = strategy.applies(run); !answer.holds) return answer.reason;
    }
    auto names = run.active();
    names.push_back(name);
    run.set_active(names);
    strategy.settle_in(run);
  } catch (const c10::Error& error) {  // whatever it throws, the run goes on without it
    return name + ": " + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return name + ": " + error.what();
  }
  return "";
}

Batch copied(const Batch& batch) {
  return batch.map([](const at::Tensor& t) { return t.detach().clone().requires_grad_(t.requires_grad()); });
}

bool has_hook(const at::Tensor& parameter) {
  namespace impl = torch::autograd::impl;
  return impl::get_autograd_meta(parameter) != nullptr && impl::post_acc_grad_hooks(parameter) != nullptr;
}

SettingLine line_of(const HostSetting& setting) {
  return {setting.name(), setting.is_in_effect() ? "on" : "refused", setting.reason(), setting.cost()};
}

}  // namespace

Decisions::Decisions(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, double clip_norm,
                     const PerformanceConfig& config, bool calibrate)
    : config_(config),
      calibrate_(calibrate),
      own_(plan_of_own(model, optimizer, std::move(loss), clip_norm, config)),
      plan_(*own_),
      untried_("it is decided at the first batch.") {
  auto& run = *plan_.run;
  plan_.certificate.level = config.level();
  plan_.checkpointing = checkpointing_of(config);
  plan_.can_repeat = true;
  plan_.saved_tensors = memory::parse_saved_format(config.word("saved_tensors"));
  plan_.max_slowdown = config.number("max_slowdown");
  fits_memory_ = plan_.checkpointing != "off";
  name_settings(config, tune::AskedBy::Trainer, run);
  const auto offers = tune::offers_of(tune::strategies());
  asked_ = tune::asked_of(config, offers, {}, tune::AskedBy::Trainer);
  tune::activate(
      asked_, config, offers, [&](const auto& name) { return holds(run.active(), name); },
      [&](const auto& name) { return put(run, name, /*ask=*/true); });
  run.required = run.active();
}

std::unique_ptr<Plan::Impl> Decisions::plan_of_own(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                                   LossFunction loss, double clip_norm,
                                                   const PerformanceConfig& config) {
  auto run = std::make_unique<tune::Run>(model, optimizer, std::move(loss), std::vector<Batch>(), clip_norm);
  Plan::Impl::take_back_of({model});
  std::optional<tune::CertificateStore> store;
  if (config.flag("remember")) store.emplace();
  return std::make_unique<Plan::Impl>(std::move(run), NamedSettings(config, tune::AskedBy::Trainer), std::move(store));
}

Decisions::Decisions(Plan::Impl& plan, const PerformanceConfig& config)
    : config_(config), plan_(plan), are_made_(true) {}

void Decisions::begin(const Batch* batch) {
  if (!are_made_) decide(batch);
  if (fits_memory_) fit_memory(batch);
  fits_memory_ = false;
}

void Decisions::decide(const Batch* batch) {
  auto& run = *plan_.run;
  const auto& parameters = run.parameters();
  untried_ = hindrance({.calibrate = calibrate_,
                        .is_closure = batch == nullptr,
                        .has_hooks = std::any_of(parameters.begin(), parameters.end(), has_hook)});
  if (!untried_.empty()) {
    are_made_ = true;
    return;
  }
  // The verifier's references are the optimizer as given, so what is named of it joins once tuning is over.
  const auto offers = tune::offers_of(tune::strategies());
  const auto named = run.required;
  const auto late = names_of_group("optimizer");
  std::erase_if(run.required, [&](const auto& name) { return holds(late, name); });
  try {
    run.set_active({});
    run.set_batches({copied(*batch)});
    auto options = tune::tuning_of_trainer(config_, steps, offers);
    std::vector<std::string> names;
    for (const auto& offer : offers) names.push_back(offer.name);
    auto key = tune::decided_by(config_, names, options.steps_planned, tune::AskedBy::Trainer);
    plan_.tune({.strategies = tune::strategies(),
                .skipped = asked_.skipped,
                .options = std::move(options),
                .key = std::move(key)});
  } catch (...) {
    run.set_batches({});
    run.required = named;
    plan_.withdraw();
    throw;
  }
  const auto found = run.beside_required();
  run.set_batches({});
  run.required = named;
  run.set_active(found);
  untried_ = "nothing of it applies here.";
  are_made_ = true;
  fits_memory_ = fits_memory_ && std::any_of(named.begin(), named.end(), [&](auto& name) { return holds(late, name); });
}

/// Where tuning has not done so for the step as it is now.
void Decisions::fit_memory(const Batch* batch, const std::string& why, bool tighter) {
  if (batch == nullptr) {
    plan_.named.add(HostSetting::refused("gradient_checkpointing", tune::closures_unplanned()));
    return;
  }
  auto& run = *plan_.run;
  const auto kept = run.batches();
  run.set_batches({copied(*batch)});
  try {
    plan_.fit_memory(why, tighter);
  } catch (...) {
    run.set_batches(kept);
    throw;
  }
  run.set_batches(kept);
}

bool Decisions::can_repeat() const {
  if (plan_.checkpointing == "off" || plan_.run->accumulation > 1 || plan_.run->parts() > 1) return false;
  const auto& settings = plan_.named.all();
  return std::any_of(settings.begin(), settings.end(),
                     [](const auto& s) { return s.name() == "gradient_checkpointing" && s.is_in_effect(); });
}

void Decisions::fit_again(const Batch& batch, const std::string& why, int fits) {
  const auto anew = tune::fitted_anew(plan_.run->taken() + 1);
  log(LogLevel::Warn, anew + why, "trainer");
  fit_memory(&batch, anew, /*tighter=*/fits > 0);
}

// -- continued runs ---------------------------------------------------------------------------------------------------

void Decisions::while_as_given(const std::function<void()>& load) {
  auto& run = *plan_.run;
  if (!own_) {
    load();
    run.renew_replacement();
    return;
  }
  const auto named = std::exchange(run.required, {});
  try {
    plan_.withdraw();
    load();
  } catch (...) {
    run.required = named;
    run.set_active({});
    throw;
  }
  run.required = named;
  run.set_active({});
}

void Decisions::resume(const std::vector<std::string>& found) {
  if (!own_) return;
  auto& run = *plan_.run;
  not_resumed_.clear();
  for (const auto& name : found) {
    if (holds(run.required, name)) continue;
    if (auto why = put(run, name, /*ask=*/false); !why.empty()) not_resumed_.push_back(std::move(why));
  }
  untried_ = "the run that is continued here had none of it.";
  are_made_ = true;
}

void Decisions::revert() {
  if (own_) plan_.revert();
}

// -- report -----------------------------------------------------------------------------------------------------------

std::vector<SettingLine> Decisions::lines() const {
  if (!own_) return lines_of_plan();
  const auto& run = *plan_.run;
  auto active = run.required;
  for (auto& name : plan_.found()) active.push_back(std::move(name));
  tune::SettingLines made_of{.config = config_,
                             .certificate = plan_.certificate,
                             .offers = tune::offers_of(tune::strategies()),
                             .refused = asked_.refused,
                             .active = std::move(active),
                             .required = run.required,
                             .untried = untried_};
  const auto precision = config_.word("precision");
  if (precision == "bf16" || precision == "fp16") {
    const auto dtype = precision == "bf16" ? at::kBFloat16 : at::kHalf;
    const auto support = amp::hardware_support(run.device().type(), dtype);
    if (!support.native) made_of.slow = support.reason;
  }
  std::vector<SettingLine> host, lines;
  for (const auto& setting : plan_.named.all()) host.push_back(line_of(setting));
  for (const char* key : {"allocator", "threads", "flush_denormals", "precision", "channels_last", "attention"}) {
    const auto applied = std::find_if(host.begin(), host.end(), [&](const auto& line) { return line.name == key; });
    if (applied == host.end()) {
      lines.push_back(made_of.of(key));
    } else {
      lines.push_back(std::move(*applied));
      host.erase(applied);
    }
  }
  for (const auto& more : {of_optimizer(made_of), host, made_of.beside_settings()}) {
    lines.insert(lines.end(), more.begin(), more.end());
  }
  for (const auto& why : not_resumed_) lines.push_back({"decisions", "refused", why});
  return lines;
}

std::vector<SettingLine> Decisions::of_optimizer(const tune::SettingLines& made_of) const {
  const auto& run = *plan_.run;
  SteppingOptimizer stepping{.active = run.active()};
  if (const auto* const tail = dynamic_cast<const optim::TailOptimizer*>(&run.optimizer())) {
    stepping.is_own = tail == &run.original();
    stepping.replaces = !stepping.is_own;
    stepping.state = optim::name(tail->tail().options().state_dtype);
  }
  return lines_of_optimizer(made_of, stepping);
}

/// Its strategies as they stand now.
std::vector<SettingLine> Decisions::lines_of_plan() const {
  std::vector<SettingLine> lines;
  for (const auto& entry : plan_.certificate.entries) {
    const bool on = entry.status == tune::Status::Accepted;
    lines.push_back({entry.strategy,
                     on                                      ? "on"
                     : entry.status == tune::Status::Skipped ? "off"
                                                             : "refused",
                     std::string(tune::name(entry.status)) + ": " + entry.reason, on ? entry.cost : "",
                     entry.speedup ? std::optional(entry.speedup->mid) : std::nullopt});
  }
  for (const auto& setting : plan_.named.all()) lines.push_back(line_of(setting));
  return lines;
}

}  // namespace oxytorch
