#include "oxytorch/trainer.h"
#include "oxytorch/monitor/training_report.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <exception>
#include <iomanip>
#include <sstream>

#include "generators/generators.h"
#include "optim/torch_versions.h"
#include "oxytorch/amp.h"
#include "oxytorch/clock.h"
#include "oxytorch/config_use.h"
#include "oxytorch/data/loader_settings.h"
#include "oxytorch/error.h"
#include "oxytorch/memory/batch_search.h"
#include "oxytorch/memory/manager.h"
#include "oxytorch/optim.h"
#include "oxytorch/optim/schedule.h"
#include "oxytorch/tune/training_step.h"
#include "trainer/check_optimizer.h"
#include "trainer/decisions.h"
#include "trainer/progress.h"
#include "trainer/stop_signals.h"
#include "tune/step_start.h"

namespace oxytorch {
namespace {

std::string quoted(const std::string& text) {
  std::ostringstream out;
  out << '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') out << '\\';
    out << (static_cast<unsigned char>(c) < 0x20 ? ' ' : c);
  }
  out << '"';
  return out.str();
}

double checked_clip(const PerformanceConfig& config, const torch::optim::Optimizer& optimizer,
                    const TrainerOptions& options = {}) {
  check_settings(config, ConfigUser::CppTrainer);
  for (const char* key : {"steps_planned", "tune_seconds", "remember"}) {
    OXY_CHECK(options.calibrate || !is_given(config, key), InvalidArgument, key, " = ", to_string(config.get(key)),
              " (", config.origin(key),
              "): calibrate = false tries nothing, and so it would have no effect. Leave out ", "one of them.");
  }
  return check_optimizer(config, optimizer);
}

/// For a trainer on a plan: without what the plan has decided.
PerformanceConfig beside(PerformanceConfig config) {
  OXY_CHECK(!is_given(config, "compile"), NotSupported, "compile = ", to_string(config.get("compile")), ": ",
            refusal("compile", ConfigUser::CppTrainer));
  for (const char* key : {"precision",     "channels_last",
                          "threads",       "flush_denormals",
                          "allocator",     "allocator_retain_limit",
                          "step_tail",     "optimizer_state",
                          "attention",     "memory_limit",
                          "goal",          "max_slowdown",
                          "max_growth",    "gradient_checkpointing",
                          "saved_tensors", "num_workers",
                          "prefetch",      "pin_memory",
                          "cache",         "deterministic",
                          "seed",          "steps_planned",
                          "tune_seconds"}) {
    config.unset(key);
  }
  return config;
}

std::unique_ptr<optim::Schedule> make_schedule(const PerformanceConfig& config, torch::optim::Optimizer& optimizer) {
  const auto kind = config.word("schedule");
  if (kind == "none") return nullptr;
  const auto steps = config.integer("max_steps").value_or(0);
  const auto warmup = config.integer("warmup_steps").value_or(0);
  const double least = config.number("min_lr_ratio");
  double peak = 0;
  optim::OneCycleOptions cycle;
  for (const auto& group : optimizer.param_groups()) {
    cycle.max_lrs.push_back(group.options().get_lr());
    peak = std::max(peak, cycle.max_lrs.back());
  }
  const double floor = least * peak;
  if (kind == "one_cycle") {
    cycle.total_steps = steps;
    // torch's own shape where nothing was asked for.
    if (warmup > 0) cycle.pct_start = static_cast<double>(warmup) / static_cast<double>(steps);
    if (least > 0) cycle.final_div_factor = 1 / (cycle.div_factor * least);
    return std::make_unique<optim::OneCycle>(optimizer, cycle);
  }
  if (warmup > 0) {
    const double start = 1.0 / static_cast<double>(warmup + 1);
    return std::make_unique<optim::WarmupCosine>(optimizer, warmup, steps, floor, start);
  }
  return std::make_unique<optim::CosineAnnealing>(optimizer, steps, floor);
}

/// The strategies that the saved run had found.
std::vector<std::string> found_in(torch::serialize::InputArchive& archive) {
  std::vector<std::string> found;
  if (c10::IValue names; archive.try_read("active", names)) {
    for (const auto& name : names.toListRef()) found.push_back(name.toStringRef());
    return found;
  }
  at::Tensor before;  // archives of before say what of three settings was on
  archive.read("decisions", before);
  if (before[0].item<int64_t>() == static_cast<int64_t>(at::kBFloat16)) found.emplace_back("bf16_autocast");
  if (before[1].item<int64_t>() != 0) found.emplace_back("channels_last");
  if (const auto math = before[2].item<int64_t>(); math != 0) {
    found.emplace_back(math == 2 ? "math_attention_bf16" : "math_attention");
  }
  return found;
}

}  // namespace

double check_optimizer(const PerformanceConfig& config, const torch::optim::Optimizer& optimizer) {
  const auto* const tail = dynamic_cast<const optim::TailOptimizer*>(&optimizer);
  if (tail == nullptr) return config.number("clip_norm");
  const auto& own = tail->tail().options();
  check_own_tail(config, {own.clip_norm, own.clip_value, own.ema_decay, optim::name(own.nonfinite),
                          own.norm_in_backward, own.step_in_backward});
  return own.clip_norm > 0 ? 0 : config.number("clip_norm");
}

struct Trainer::Impl {
  Impl(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, PerformanceConfig c,
       const TrainerOptions& options)
      : config(std::move(c)),
        decisions(model, optimizer, std::move(loss), checked_clip(config, optimizer, options), config,
                  options.calibrate),
        engine(*decisions.plan().run),
        tail(dynamic_cast<optim::TailOptimizer*>(&optimizer)) {
    memory = options.memory;
    engine.keeps_gradients = false;
    if (!tail) engine.guard = NonFiniteGuard(optim::parse_nonfinite(config.word("nonfinite")));
    if (config.word("precision") == "fp16") {
      engine.scope("autocast",
                   [device = engine.device().type()] { return std::make_shared<amp::Autocast>(device, at::kHalf); });
    }
    set_loop();
    if (const auto seed = config.integer("seed")) torch::manual_seed(static_cast<std::uint64_t>(*seed));
  }

  Impl(Plan::Impl& plan, PerformanceConfig c)
      : config(beside(std::move(c))),
        decisions(plan, config),
        engine(*plan.run),
        tail(dynamic_cast<optim::TailOptimizer*>(&engine.original())) {
    const double clip_norm = checked_clip(config, engine.original());  // 0 where the optimizer itself clips
    OXY_CHECK(clip_norm == 0 || clip_norm == engine.clip_norm(), InvalidArgument, "clip_norm = ", clip_norm,
              " was given to the trainer, and the step of its plan clips at ", engine.clip_norm(),
              " (0: not at all). Give it to accelerate(), whose trials then clip too.");
    // Looking at all gradients is no part of the step that was measured, unless it was asked for.
    if (!tail && config.source("nonfinite") != ConfigSource::Level) {
      engine.guard = NonFiniteGuard(optim::parse_nonfinite(config.word("nonfinite")));
    }
    const bool was_fitted = engine.accumulation > 1;
    set_loop();
    if (engine.accumulation > 1 && !was_fitted) plan.fit_memory();  // with the gradients of earlier batches
  }

  /// A batch with its tensors where the model is; as it is where the model lies on several devices, and knows by
  /// itself.
  [[nodiscard]] Batch on_device(const Batch& batch) const {
    const auto device = engine.device();
    const auto is_there = [&](const at::Tensor& tensor) { return tensor.device() == device; };
    if (std::ranges::all_of(batch.tensors(), is_there)) return batch;
    if (!std::ranges::all_of(engine.model().parameters(), is_there)) return batch;
    return batch.map([&](const at::Tensor& tensor) { return tensor.to(device, /*non_blocking=*/true); });
  }

  /// Brings about what is of the loader, for as long as what it returns lives.
  std::unique_ptr<data::LoaderSettings> settings_on(data::TensorLoader* loader) {
    loader_lines.clear();
    if (loader == nullptr) {
      for (const char* key : {"num_workers", "prefetch", "pin_memory", "cache"}) {
        if (!is_given(config, key) || to_string(config.get(key)) == "'keep'") continue;
        loader_lines.push_back(
            {key, "refused", "batches do not come from an oxytorch::data::TensorLoader. Give it to what makes them."});
      }
      return nullptr;
    }
    const auto device = engine.device();
    const auto is_there = [&](const at::Tensor& parameter) { return parameter.device() == device; };
    const bool on_one = std::ranges::all_of(engine.model().parameters(), is_there);
    auto made = std::make_unique<data::LoaderSettings>(*loader, config, on_one ? std::optional(device) : std::nullopt);
    for (const auto& line : made->lines()) {
      loader_lines.push_back({line.name, line.is_in_effect ? "on" : "refused", line.reason, line.cost});
    }
    return made;
  }

  /// What belongs to the loop; what an optimizer of oxytorch::optim does itself is left to it.
  void set_loop() {
    const auto does = tail ? tail->tail().options() : optim::TailOptions();
    engine.accumulation = config.integer("accumulation_steps").value_or(1);
    engine.clip_value = does.clip_value > 0 ? 0 : config.number("clip_value");
    engine.average.clear();
    if (const double decay = config.number("ema_decay"); decay > 0 && does.ema_decay <= 0) engine.keep_average(decay);
    engine.schedule = make_schedule(config, engine.original());
    const auto scaler = config.word("grad_scaler");
    if (scaler == "on" || (scaler == "auto" && config.word("precision") == "fp16")) {
      amp::GradScalerOptions options;
      options.device = engine.device();
      engine.scaler = std::make_unique<amp::GradScaler>(options);
    }
    if (const auto patience = config.integer("early_stopping_patience").value_or(0); patience > 0) {
      stopping.emplace(EarlyStoppingOptions{.patience = patience,
                                            .min_delta = config.number("early_stopping_min_delta"),
                                            .minimize = config.word("early_stopping_mode") == "min",
                                            .restore_best = config.flag("early_stopping_restore_best")});
    }
  }

  [[nodiscard]] SettingLine nonfinite_line() const {
    const auto policy = tail ? tail->tail().options().nonfinite : engine.guard.policy();
    const std::string name = optim::name(policy);
    const char* state = policy == optim::NonFinite::Propagate ? "off" : "on";
    if (tail) return {"nonfinite", state, name + ": the optimizer itself looks at the gradients."};
    if (policy == optim::NonFinite::Propagate) {
      return {"nonfinite", state, "a gradient that is not finite is stepped with."};
    }
    return {"nonfinite", state, name + ": the gradients are looked at before the optimizer steps.",
            "their norms, and one host read a step."};
  }

  [[nodiscard]] SettingLine scaler_line() const {
    if (!engine.scaler) return {"grad_scaler", "off", "only float16 needs a loss scale."};
    const bool inside = dynamic_cast<optim::TailOptimizer*>(&engine.optimizer()) != nullptr;
    return {"grad_scaler", "on",
            inside ? "unscale, check and skip happen inside the step tail."
                   : "unscaled by torch's op, with one host read a step."};
  }

  void renew_lines() {
    lines = decisions.lines();
    lines.push_back(nonfinite_line());
    lines.push_back(scaler_line());
    lines.insert(lines.end(), loader_lines.begin(), loader_lines.end());
    if (memory != nullptr) lines.push_back({"memory", "on", memory->use().text() + '.'});
  }

  at::Tensor counted(at::Tensor loss) {
    if (memory != nullptr && engine.waiting() == 0) memory->step();
    if (++batch_count > 1) {
      for (size_t i = 0; i < seconds.size(); ++i) seconds[i] += engine.seconds()[i];
    }
    return loss;
  }

  /// Steps left out because a gradient was not finite. Reads the device.
  [[nodiscard]] int64_t skipped() const {
    if (!tail) return engine.guard.skipped();
    const auto& skipped = tail->tail_stats().skipped;
    return skipped.defined() ? skipped.item<int64_t>() : 0;
  }

  void restart_early_stopping() {
    if (stopping && !std::exchange(stopping_loaded, false)) stopping.emplace(stopping->options());
  }

  PerformanceConfig config;
  Decisions decisions;
  tune::TrainingStep& engine;
  optim::TailOptimizer* tail;  // the caller's optimizer, where it is one of oxytorch::optim
  std::optional<EarlyStopping> stopping;
  MemoryManager* memory = nullptr;
  std::vector<SettingLine> lines, loader_lines;  // the latter of the last fit
  int64_t batch_count = 0, epoch = 0;
  bool stopping_loaded = false;
  double waited = 0;         // for batches, in fit
  std::string loader_state;  // where the loader of a fit that was broken off stood
  std::array<double, 3> seconds{};
};

Trainer::Trainer(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                 PerformanceConfig config, TrainerOptions options)
    : impl_(std::make_unique<Impl>(model, optimizer, std::move(loss), std::move(config), options)) {}
Trainer::Trainer(Plan& plan, PerformanceConfig config, MemoryManager* memory) {
  const auto& run = *plan.impl_->run;
  OXY_CHECK(run.models().size() == 1 && run.slots().size() == 1, InvalidArgument, "the plan is of ",
            run.models().size(), " models and ", run.slots().size(),
            " optimizers, and a Trainer takes one of each. Keep a loop of your own, and call plan.step(batch) in it.");
  impl_ = std::make_unique<Impl>(*plan.impl_, std::move(config));
  impl_->memory = memory;
}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

at::Tensor Trainer::step(const Batch& batch) {
  auto& self = *impl_;
  OXY_CHECK(self.engine.has_loss(), InvalidState,
            "this trainer has no loss function. Pass one, or step with a closure.");
  const auto here = self.on_device(batch);
  if (self.decisions.await_batch()) self.decisions.begin(&here);
  if (!self.decisions.can_repeat()) return self.counted(self.decisions.plan().step(here));
  const tune::StepStart start(self.engine);
  for (int fits = 0;; ++fits) {
    std::string why;
    try {
      return self.counted(self.decisions.plan().step(here));
    } catch (const std::exception& error) {
      if (self.engine.update_begun() || !is_out_of_memory(error)) throw;
      start.restore();
      if (!self.decisions.may_fit_again(fits)) throw;
      const auto* const torchs = dynamic_cast<const c10::Error*>(&error);
      why = torchs == nullptr ? error.what() : torchs->what_without_backtrace();
    }
    self.decisions.fit_again(here, why, fits);
  }
}

at::Tensor Trainer::step(const std::function<at::Tensor()>& closure) {
  if (impl_->decisions.await_batch()) impl_->decisions.begin(nullptr);
  return impl_->counted(impl_->engine.take(closure));
}

bool Trainer::flush() { return impl_->engine.flush(); }

FitResult Trainer::run_fit(const Feed& feed, const Position& position, int64_t length, int64_t epochs,
                           int64_t max_steps, const std::function<double()>& validate) {
  auto& self = *impl_;
  if (max_steps == 0) max_steps = self.config.integer("max_steps").value_or(0);
  OXY_CHECK(epochs > 0 || max_steps > 0, InvalidArgument, "fit needs epochs or max_steps above 0.");
  FitResult result;
  auto& model = self.engine.model();
  const auto first = global_step();
  const auto all_steps = [&] { return max_steps > 0 && global_step() >= max_steps; };
  const auto windows = (length + self.engine.accumulation - 1) / self.engine.accumulation;
  const auto by_epochs = epochs * windows;
  self.decisions.steps =
      by_epochs > 0 && max_steps > 0 ? std::min(by_epochs, max_steps) : std::max(by_epochs, max_steps);
  self.restart_early_stopping();
  const auto on_loader = self.settings_on(position.loader);
  StopSignals signals;
  ProgressLine line(self.config.word("progress"), max_steps);
  model.train();
  if (all_steps()) result.stop_reason = "max_steps";
  for (; (epochs == 0 || self.epoch < epochs) && result.stop_reason.empty(); ++self.epoch) {
    at::Tensor total;
    int64_t seen = 0;
    const bool goes_on = position.load && !self.loader_state.empty();
    if (goes_on) {
      position.load(self.loader_state);
    } else if (position.set_epoch) {
      position.set_epoch(self.epoch);
    }
    self.loader_state.clear();
    double waiting = monotonic_seconds();
    feed([&](const Batch& batch) {
      // The first batch of a run starts threads and files, as the first step is left out of the others' times.
      if (self.batch_count > 0) self.waited += monotonic_seconds() - waiting;
      const auto loss = step(batch).to(at::kFloat);
      line.show(self.epoch, global_step(), loss);
      total = total.defined() ? total + loss : loss;
      ++seen;
      if (const char* name = StopSignals::received()) result.stop_reason = name;
      if (all_steps() && result.stop_reason.empty()) result.stop_reason = "max_steps";
      waiting = monotonic_seconds();
      return result.stop_reason.empty();
    });
    OXY_CHECK(seen > 0 || goes_on, InvalidArgument, "the loader is empty: it yielded no batch.");
    if (!result.stop_reason.empty()) {
      if (position.state) self.loader_state = position.state();
      break;
    }
    flush();
    if (seen == 0) continue;  // it had ended with its last batch
    result.losses.push_back(total.item<double>() / static_cast<double>(seen));
    if (validate) result.validations.push_back(validate());
    model.train();
    const double metric = validate ? result.validations.back() : result.losses.back();
    if (self.stopping && self.stopping->step(metric, &model)) {
      result.stop_reason = "early_stopping";
    } else if (all_steps()) {
      result.stop_reason = "max_steps";
    }
  }
  if (self.stopping && StopSignals::received() == nullptr) self.stopping->restore(model);
  if (result.stop_reason.empty()) result.stop_reason = "epochs";
  result.steps = global_step() - first;
  return result;
}

int64_t Trainer::global_step() const noexcept { return impl_->engine.taken(); }
int64_t Trainer::epoch() const noexcept { return impl_->epoch; }
int64_t Trainer::batches() const noexcept { return impl_->batch_count; }
const std::vector<SettingLine>& Trainer::settings() const {
  impl_->renew_lines();
  return impl_->lines;
}

std::shared_ptr<void> Trainer::ema_weights() {
  auto& self = *impl_;
  const auto& average = self.engine.average;
  const auto& parameters = self.engine.parameters();
  at::NoGradGuard no_grad;
  if (average.empty()) {
    OXY_CHECK(self.tail, InvalidState, "no average is kept. Set ema_decay, for example 0.999.");
    self.tail->apply_ema();
    return {nullptr, [tail = self.tail](void*) { tail->restore_parameters(); }};
  }
  auto own = foreach_clone(parameters);
  at::_foreach_copy_(parameters, average);
  return {nullptr, [parameters, own = std::move(own)](void*) {
            at::NoGradGuard quiet;
            at::_foreach_copy_(parameters, own);
          }};
}

void Trainer::save(torch::serialize::OutputArchive& archive) const {
  const auto& self = *impl_;
  const auto& engine = self.engine;
  torch::serialize::OutputArchive model, optimizer;
  engine.model().save(model);
  self.engine.hand_back();
  engine.original().save(optimizer);
  archive.write("model", model);
  archive.write("optimizer", optimizer);
  archive.write("counters", torch::tensor({engine.taken(), self.batch_count,
                                           static_cast<int64_t>(self.decisions.are_made()), self.epoch}));
  c10::List<std::string> found;
  for (const auto& name : self.decisions.found()) found.push_back(name);
  archive.write("active", c10::IValue(std::move(found)));
  archive.write("loader", c10::IValue(self.loader_state));
  const auto generators = generators::states(engine.device());
  for (size_t i = 0; i < generators.size(); ++i) archive.write("generator" + std::to_string(i), generators[i]);
  archive.write("ema_count", torch::tensor(static_cast<int64_t>(engine.average.size())));
  for (size_t i = 0; i < engine.average.size(); ++i) archive.write("ema" + std::to_string(i), engine.average[i]);
  if (engine.schedule) {
    for (const auto& [name, values] : engine.schedule->state_dict()) {
      archive.write("schedule." + name, torch::tensor(values, at::kDouble));
    }
  }
  if (self.stopping) {
    torch::serialize::OutputArchive stopping;
    self.stopping->save(stopping);
    archive.write("early_stopping", stopping);
  }
  if (engine.scaler) {
    for (const auto& [name, value] : engine.scaler->state_dict()) {
      archive.write("scaler." + name, torch::tensor(value, at::kDouble));
    }
  }
}

void Trainer::load(torch::serialize::InputArchive& archive) {
  auto& self = *impl_;
  auto& engine = self.engine;
  const auto read = [&archive](const std::string& name) {
    at::Tensor value;
    archive.read(name, value);
    return value;
  };
  const auto counters = read("counters");
  self.decisions.while_as_given([&] {
    torch::serialize::InputArchive model, optimizer;
    archive.read("model", model);
    engine.model().load(model);
    archive.read("optimizer", optimizer);
    engine.original().load(optimizer);
  });
  if (counters[2].item<int64_t>() != 0) self.decisions.resume(found_in(archive));
  OXY_CHECK(read("ema_count").item<int64_t>() == static_cast<int64_t>(engine.average.size()), InvalidArgument,
            "the archive has another number of averaged weights. Load it with the same ema_decay setting.");
  for (size_t i = 0; i < engine.average.size(); ++i) engine.average[i].copy_(read("ema" + std::to_string(i)));
  if (engine.schedule) {
    auto state = engine.schedule->state_dict();
    for (auto& [name, values] : state) {
      const auto saved = read("schedule." + name);
      values.assign(saved.data_ptr<double>(), saved.data_ptr<double>() + saved.numel());
    }
    engine.schedule->load_state_dict(state);
  }
  if (engine.scaler) {
    auto state = engine.scaler->state_dict();
    for (auto& [name, value] : state) value = read("scaler." + name).item<double>();
    engine.scaler->load_state_dict(state);
  }
  torch::serialize::InputArchive stopping;
  if (self.stopping && archive.try_read("early_stopping", stopping)) {
    self.stopping->load(stopping);
    self.stopping_loaded = true;
  }
  engine.set_taken(counters[0].item<int64_t>());
  self.batch_count = counters[1].item<int64_t>();
  self.epoch = counters.numel() > 3 ? counters[3].item<int64_t>() : 0;  // archives of before have no epochs
  c10::IValue loader;
  self.loader_state = archive.try_read("loader", loader) ? loader.toStringRef() : "";  // not of archives of before
  engine.abandon();
  std::vector<at::Tensor> generators;
  for (;;) {
    at::Tensor state;  // a new one each time: an archive reads into the tensor that it is given
    if (!archive.try_read("generator" + std::to_string(generators.size()), state)) break;
    generators.push_back(state.cpu());
  }
  generators::set_states(engine.device(), generators);
}

std::string Trainer::report() const {
  auto& self = *impl_;
  self.renew_lines();
  std::ostringstream out;
  out << "Oxytorch trainer, level " << self.config.level() << '\n' << std::fixed << std::setprecision(2);
  std::size_t width = 16;
  for (const auto& line : self.lines) width = std::max(width, line.name.size() + 2);
  for (const auto& line : self.lines) {
    out << std::left << std::setw(static_cast<int>(width)) << line.name << std::setw(9) << line.state;
    if (line.gain) out << *line.gain << "x  ";
    out << line.reason << (line.cost.empty() ? "" : " Cost: " + line.cost) << '\n';
  }
  if (self.batch_count > 1) {
    const auto count = static_cast<double>(self.batch_count - 1);
    const std::array<const char*, 3> names{"forward", "backward", "tail"};
    out << std::setprecision(3) << "time of a step:";
    if (self.waited > 0) out << " data " << self.waited / count * 1e3 << " ms";
    for (size_t i = 0; i < names.size(); ++i) out << ' ' << names[i] << ' ' << self.seconds[i] / count * 1e3 << " ms";
    out << '\n';
  }
  out << "steps " << global_step() << ", batches " << self.batch_count;
  if (const auto skipped = self.skipped(); skipped > 0) out << ", skipped " << skipped;
  out << '\n';
  return out.str();
}

std::string Trainer::report_json() const {
  auto& self = *impl_;
  self.renew_lines();
  std::ostringstream out;
  out << "{\"level\": " << quoted(self.config.level()) << ", \"settings\": [";
  for (size_t i = 0; i < self.lines.size(); ++i) {
    const auto& line = self.lines[i];
    out << (i ? ", " : "") << "{\"name\": " << quoted(line.name) << ", \"state\": " << quoted(line.state)
        << ", \"reason\": " << quoted(line.reason) << ", \"cost\": " << quoted(line.cost) << ", \"gain\": ";
    if (line.gain) {
      out << *line.gain;
    } else {
      out << "null";
    }
    out << '}';
  }
  const double count = std::max<double>(1, static_cast<double>(self.batch_count - 1));
  out << "], \"timings\": {\"data\": " << self.waited / count << ", \"forward\": " << self.seconds[0] / count
      << ", \"backward\": " << self.seconds[1] / count << ", \"tail\": " << self.seconds[2] / count
      << "}, \"steps\": " << global_step() << ", \"batches\": " << self.batch_count
      << ", \"skipped\": " << self.skipped() << '}';
  return out.str();
}

monitor::Report Trainer::report_page() const {
  auto& self = *impl_;
  self.renew_lines();
  monitor::TrainingFigures figures;
  if (self.batch_count > 1) {
    const auto count = static_cast<double>(self.batch_count - 1);
    const std::array<std::pair<const char*, double>, 4> phases{{{"data", self.waited},
                                                                {"forward", self.seconds[0]},
                                                                {"backward", self.seconds[1]},
                                                                {"tail", self.seconds[2]}}};
    double whole = 0;
    for (const auto& [name, seconds] : phases) {
      if (seconds > 0) figures.timings.emplace_back(name, seconds / count);
      whole += seconds / count;
    }
    figures.timings.emplace_back("step", whole);
  }
  figures.counters = {{"steps", static_cast<double>(global_step())},
                      {"batches", static_cast<double>(self.batch_count)}};
  if (const auto skipped = self.skipped(); skipped > 0) {
    figures.counters.emplace_back("skipped", static_cast<double>(skipped));
  }
  auto page = monitor::training_report(self.config.level(), self.lines, figures);
  if (const auto& fitted = self.decisions.fitted()) page.append(fitted->report());
  return page;
}

void Trainer::revert() { impl_->decisions.revert(); }

}  // namespace oxytorch
