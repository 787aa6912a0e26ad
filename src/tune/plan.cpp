#include "tune/plan.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/version.h>

#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <typeinfo>
#include <utility>
#include <variant>

#include "memory/device_bytes.h"
#include "oxytorch/config_use.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"
#include "oxytorch/memory.h"
#include "oxytorch/system.h"
#include "oxytorch/tune/apart.h"
#include "oxytorch/tune/host.h"
#include "oxytorch/tune/own_random.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/units.h"
#include "tune/digest.h"
#include "tune/fit_run.h"
#include "tune/run_workload.h"
#include "tune/sources.h"
#include "tune/step_start.h"

namespace oxytorch {
namespace {

/// One batch's loss and gradients, with or without.
struct Seen {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

/// Module classes, shapes, dtypes, optimizers, losses and shapes of the batches.
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
  for (const auto& slot : run.slots()) {
    const auto& optimizer = slot.original();
    text << c10::demangle(typeid(optimizer).name()) << ' ' << run.clip_norm() << '\n';
    for (const auto& group : optimizer.param_groups()) text << group.params().size() << '\n';
  }
  if (run.slots().size() > 1) text << run.parts() << " losses\n";
  for (const auto& batch : run.batches()) {
    for (const auto& tensor : batch.tensors()) describe(tensor);
  }
  tune::Digest digest;
  digest.add("structure", std::string_view(text.str()));
  return digest.text();
}

/// What allocator_retain_limit says, in bytes; empty where it is left to the allocator.
std::optional<std::uint64_t> retain_limit_of(const PerformanceConfig& config) {
  if (config.is_auto("allocator_retain_limit")) return std::nullopt;
  return config.size("allocator_retain_limit").resolve(read_memory().limit.value_or(0));
}

std::mutex last_plans_lock;

}  // namespace

NamedSettings::NamedSettings(const PerformanceConfig& config, tune::AskedBy by) : NamedSettings() {
  const auto named = [&](const char* key, const char* word) {
    return tune::is_named(config, key, by) && config.get(key) == ConfigValue(std::string(word));
  };
  if (!config.is_auto("memory_limit")) {
    add(memory::set_limit(config.size("memory_limit").resolve(read_memory().limit.value_or(0))));
  }
  if (config.flag("deterministic")) add(use_deterministic_algorithms());
  const auto threads = config.integer("threads");
  if (threads && tune::is_named(config, "threads", by)) add(size_threads(static_cast<int>(*threads)));
  if (named("flush_denormals", "on")) add(flush_denormals());
  if (named("allocator", "retain")) add(tune_allocator(retain_limit_of(config)));
}

void NamedSettings::add(HostSetting setting) {
  if (!setting.is_in_effect()) {
    log(LogLevel::Warn, "accelerate: " + setting.name() + " was asked for and is left out: " + setting.reason(),
        "tune");
  }
  settings_.push_back(std::move(setting));
}

void NamedSettings::take_back(std::string_view name) {
  for (auto& setting : settings_) {
    if (setting.name() == name) setting.revert();
  }
  std::erase_if(settings_, [&](const HostSetting& setting) { return setting.name() == name; });
}

void NamedSettings::revert() {
  for (; !settings_.empty(); settings_.pop_back()) settings_.back().revert();
}

void name_settings(const PerformanceConfig& config, tune::AskedBy by, tune::Run& run) {
  for (const auto& field : PerformanceConfig::fields()) {
    const auto value = config.get(field.key);
    const auto* const word = std::get_if<std::string>(&value);
    if (word != nullptr && tune::is_named(config, field.key, by)) run.asked.emplace(field.key, *word);
  }
  run.retain_limit = retain_limit_of(config);
}

Plan::Impl::Impl(std::unique_ptr<tune::Run> r, NamedSettings n, std::optional<tune::CertificateStore> s)
    : named(std::move(n)), run(std::move(r)), store(std::move(s)) {
  const std::lock_guard lock(last_plans_lock);
  for (torch::nn::Module& model : run->models()) last_plans()[&model] = this;
}

std::map<const torch::nn::Module*, Plan::Impl*>& Plan::Impl::last_plans() {
  static auto* const plans = new std::map<const torch::nn::Module*, Impl*>;  // outlives plans that are static
  return *plans;
}

Plan::Impl::~Impl() {
  const std::lock_guard lock(last_plans_lock);
  std::erase_if(last_plans(), [&](const auto& each) { return each.second == this; });
}

void Plan::Impl::take_back_of(const Models& models) {
  for (torch::nn::Module& model : models) {
    Impl* last = nullptr;
    {
      const std::lock_guard lock(last_plans_lock);
      if (const auto found = last_plans().find(&model); found != last_plans().end()) last = found->second;
    }
    if (last != nullptr) last->revert();
  }
}

void Plan::Impl::fit_memory(const std::string& why, bool tighter) {
  constexpr const char* kSetting = "gradient_checkpointing";
  if (checkpointing == "off") return;
  tune::FitTarget target;
  if (tighter && fitted) target.most = tune::tighter_budget(fitted->measured_peak());
  named.take_back(kSetting);
  recomputes.reset();
  fitted.reset();
  if (auto refusal = memory::timeline_refusal(run->device()); !refusal.empty()) {
    return named.add(HostSetting::refused(kSetting, std::move(refusal)));
  }
  target.formats.push_back(saved_tensors);
  target.can_repeat = can_repeat;
  if (checkpointing == "least") {
    target.max_slowdown = max_slowdown;
  } else if (checkpointing != "auto") {
    target.budget = memory::budget_bytes(checkpointing, run->device());
  }
  auto made = tune::fit_run(*run, target);
  OXY_CHECK(made || !target.budget, InvalidArgument, kSetting, " = '", checkpointing, "': ", tune::kNoBlocks);
  if (!made) return named.add(HostSetting::refused(kSetting, tune::kNoBlocks));
  auto plan = std::make_shared<MemoryPlan>(*std::move(made));
  const auto& found = fitted.emplace(plan->figures());
  recomputes = plan->is_active();
  named.add(plan->is_active()
                ? HostSetting::applied(kSetting, why + found.summary(), found.cost(), [plan] { plan->revert(); })
                : HostSetting::unchanged(kSetting, why + found.summary()));
}

void Plan::Impl::tune(Trials trials) {
  const bool is_least = checkpointing == "least";
  if (!is_least) fit_memory();  // what trials take is to be within the budget too
  goal = trials.options.goal;
  const auto seed = trials.options.seed;
  const double allowed = trials.options.max_slowdown;
  tune::WatchOptions watching;
  {
    const tune::PeakBytes peak(*run);
    tune::Snapshot snapshot(*run);
    tune::CertificateKey key{tune::hardware_key() + ", " + run->device().str(), TORCH_VERSION, structure(*run),
                             "C++, level " + trials.options.level + "; " + trials.key};
    tune::RunWorkload workload(*run, snapshot, std::move(trials.strategies), seed, std::move(trials.skipped), &peak);
    tune::Tuner tuner(workload, std::move(key), std::move(trials.options));
    auto found = tuner.tune(store ? &*store : nullptr);
    snapshot.prove();
    tuner.activate(found);
    watching.names = run->beside_required();
    if (const auto why = store ? store->try_put(found) : ""; !why.empty()) {  // without what settings ask for beside it
      found.events.push_back("step 0: the plan is not stored, so the next run tunes again: " + why);
      log(LogLevel::Warn, "accelerate: " + found.events.back(), "tune");
    }
    const auto added = tuner.activate_required(found);
    run->required.insert(run->required.end(), added.begin(), added.end());
    watching.kind = tuner.widest(run->active());
    certificate = std::move(found);
  }
  run->settle();
  if (is_least) max_slowdown = tune::slowdown_left(certificate, allowed);
  if (is_least || !run->active().empty()) fit_memory();  // they may have made the step another one
  give_back_host_memory();  // what references and snapshots took: the steps that follow do not need it
  if (watching.names.empty()) return;
  watching.drawn_by = seed ^ tune::fresh_bits();  // what is active cannot know which steps are compared
  watch.emplace(*this, certificate, store ? &*store : nullptr, watching);
}

std::vector<std::string> Plan::Impl::found() const {
  return watch && !watch->over() ? watch->names() : run->beside_required();
}

void Plan::Impl::withdraw() {
  watch.reset();
  run->set_active({});
}

void Plan::Impl::revert() {
  run->required.clear();
  withdraw();
  named.revert();
  recomputes.reset();
}

at::Tensor Plan::Impl::step(const Batch& given) {
  // What is compared is a window of batches, which begins and ends with all of its strategies or none.
  if (run->waiting() == 0) {
    batch = &given;
    watched = watch && watch->before();
    window_seconds = 0;
  }
  if (!watched || !watch) return run->take(given);
  const bool waited = watch->checks() || run->device().is_cpu();
  if (waited) memory::synchronize(run->device());
  const double began = tune::seconds_now();
  auto loss = run->take(given);
  if (waited) memory::synchronize(run->device());
  window_seconds += tune::seconds_now() - began;
  if (run->waiting() == 0) {
    watch->after(window_seconds);
    watched = false;  // the next window may begin with a closure, unseen
  }
  if (waited && !std::isfinite(loss.item<double>())) watch->doubt();
  return loss;
}

void Plan::Impl::update(std::size_t part) {
  run->update(part);
  if (!watch || part + 1 < run->parts()) return;
  if (watch->checks() || run->device().is_cpu()) memory::synchronize(run->device());
  if (updated) watch->after(tune::seconds_now() - *updated);
  batch = &run->batches()[updates++ % run->batches().size()];  // the loop keeps its own to itself
  updated.reset();
  if (watch->before()) updated = tune::seconds_now();
}

tune::BothWays Plan::Impl::compare(const std::vector<std::string>& first) {
  const double began = tune::seconds_now();
  // On the CPU other threads may draw from torch's generator meanwhile: the check draws from one of its own.
  const bool on_cpu = run->device().is_cpu();
  // Pieces draw masks for other rows, an update in backward keeps no gradients; and what gradients and a copy of the
  // run take is beyond a budget of memory.
  const bool budget = has_budget();
  const bool only_losses = run->micro_batches() > 1 || run->updates_in_backward() || budget;
  std::optional<tune::OwnRandom> random;
  if (on_cpu) random.emplace();
  const auto held = [](auto&& start, const auto& take) {
    try {
      Seen found = take();
      start.restore();
      return found;
    } catch (...) {
      start.restore();
      throw;
    }
  };
  const auto loss = [&] {
    const at::NoGradGuard no_grad;
    return Seen{run->losses(*batch).item<double>(), {}};
  };
  const auto whole = [&] {
    Seen found;
    const auto sum = run->backward(*batch, [&](std::size_t part) {
      for (const auto& p : run->parameters(part)) {
        found.gradients.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
      }
    });
    found.loss = sum.item<double>();
    return found;
  };
  const auto seen = [&] {
    const bool generators = !on_cpu;
    return only_losses ? held(tune::StepStart(*run, generators), loss) : held(tune::Snapshot(*run, generators), whole);
  };
  if (!first.empty()) run->set_active(first);
  auto with = seen();  // as it stands: what is active goes on, and is not put on anew for this
  // What acts on the update alone shows in no loss, and taken back it would take its memory.
  std::vector<std::string> kept;
  for (const auto& name : budget ? run->active() : kept) {
    if (tune::acts_on_update(tune::find_strategy(name).traits.group)) kept.push_back(name);
  }
  run->set_active(kept);
  if (random) random->rewind();
  auto without = seen();
  auto apart = tune::gradients_apart(with.gradients, without.gradients);
  with.gradients.clear();
  without.gradients.clear();
  give_back_host_memory();  // a heap or pool that keeps memory would hold the copies' from now on
  return {with.loss, without.loss, apart, tune::seconds_now() - began};
}

Plan::Plan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;

at::Tensor Plan::step(const Batch& batch) { return impl_->step(batch); }
at::Tensor Plan::loss(const Batch& batch, std::size_t number) { return impl_->run->loss(batch, number); }
std::shared_ptr<void> Plan::scope() const { return impl_->run->enter(); }
void Plan::update(std::size_t number) { impl_->update(number); }
std::vector<std::string> Plan::accepted() const {
  const bool active = impl_->watch && !impl_->watch->over();
  return active ? impl_->certificate.accepted() : impl_->run->required;
}
const tune::Certificate& Plan::certificate() const noexcept { return impl_->certificate; }
std::string Plan::report() const { return impl_->certificate.to_text(); }
torch::optim::Optimizer& Plan::optimizer(std::size_t number) const {
  return impl_->run->slots().at(number).optimizer();
}
void Plan::hand_back() { impl_->run->hand_back(); }

Interval Plan::speedup() const {
  const auto& found = impl_->certificate.speedup;
  return found && !accepted().empty() ? *found : Interval{1, 1, 1, 1};
}

void Plan::revert() { impl_->revert(); }

}  // namespace oxytorch
