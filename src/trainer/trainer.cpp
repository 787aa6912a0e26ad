#include "oxytorch/trainer.h"

#include <ATen/ops/_foreach_clone.h>
#include <ATen/ops/_foreach_copy.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <iomanip>
#include <sstream>

#include "optim/generators.h"
#include "oxytorch/amp.h"
#include "oxytorch/config_use.h"
#include "oxytorch/error.h"
#include "oxytorch/optim.h"
#include "oxytorch/optim/schedule.h"
#include "oxytorch/tune/host.h"
#include "oxytorch/tune/training_step.h"
#include "trainer/calibrate.h"
#include "trainer/check_optimizer.h"
#include "trainer/progress.h"
#include "trainer/stop_signals.h"
#include "tune/attention.h"
#include "tune/plan.h"

namespace oxytorch {
namespace {

constexpr double kPays = 0.97;      // a setting is kept where it takes less than this share of the time without it
constexpr double kDrift = 0.05;     // and moves the first loss by less than this
constexpr double kPatience = 10.0;  // seconds of one step above which nothing is measured

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

double checked_clip(const PerformanceConfig& config, const torch::optim::Optimizer& optimizer) {
  check_settings(config, ConfigUser::CppTrainer);
  return check_optimizer(config, optimizer);
}

/// For a trainer on a plan: without what the plan has decided.
PerformanceConfig beside(PerformanceConfig config) {
  OXY_CHECK(!is_given(config, "compile"), NotSupported, "compile = ", to_string(config.get("compile")), ": ",
            refusal("compile", ConfigUser::CppTrainer));
  for (const char* key :
       {"precision", "channels_last", "threads", "flush_denormals", "allocator", "allocator_retain_limit", "step_tail",
        "optimizer_state", "attention", "deterministic", "seed", "steps_planned", "tune_seconds"}) {
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

bool has_convolution(const torch::nn::Module& model) {
  const auto parameters = model.parameters();
  return std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) { return p.dim() == 4; });
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
  Impl(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss, PerformanceConfig c)
      : config(std::move(c)),
        own(std::make_unique<tune::TrainingStep>(model, optimizer, std::move(loss), checked_clip(config, optimizer))),
        engine(*own),
        tail(dynamic_cast<optim::TailOptimizer*>(&optimizer)) {
    resolve_vector_math();
    engine.keeps_gradients = false;
    if (!tail) engine.guard = NonFiniteGuard(optim::parse_nonfinite(config.word("nonfinite")));
    set_loop();
    if (const auto seed = config.integer("seed")) torch::manual_seed(static_cast<std::uint64_t>(*seed));
    host_settings();
    add_tail_line();
    add_nonfinite_line();
  }

  Impl(Plan::Impl& p, PerformanceConfig c)
      : config(beside(std::move(c))),
        plan(&p),
        engine(*p.run),
        tail(dynamic_cast<optim::TailOptimizer*>(&engine.original())),
        ready(true) {
    const double clip_norm = checked_clip(config, engine.original());  // 0 where the optimizer itself clips
    OXY_CHECK(clip_norm == 0 || clip_norm == engine.clip_norm(), InvalidArgument, "clip_norm = ", clip_norm,
              " was given to the trainer, and the step of its plan clips at ", engine.clip_norm(),
              " (0: not at all). Give it to accelerate(), whose trials then clip too.");
    // Looking at all gradients is no part of the step that was measured, unless it was asked for.
    if (!tail && config.source("nonfinite") != ConfigSource::Level) {
      engine.guard = NonFiniteGuard(optim::parse_nonfinite(config.word("nonfinite")));
    }
    set_loop();
    make_scaler();
    add_nonfinite_line();
    loop_lines = lines;
  }

  void add(SettingLine line) { lines.push_back(std::move(line)); }

  /// What belongs to the loop; what an optimizer of oxytorch::optim does itself is left to it.
  void set_loop() {
    const auto does = tail ? tail->tail().options() : optim::TailOptions();
    engine.accumulation = config.integer("accumulation_steps").value_or(1);
    engine.clip_value = does.clip_value > 0 ? 0 : config.number("clip_value");
    engine.average.clear();
    if (const double decay = config.number("ema_decay"); decay > 0 && does.ema_decay <= 0) engine.keep_average(decay);
    engine.schedule = make_schedule(config, engine.original());
    if (const auto patience = config.integer("early_stopping_patience").value_or(0); patience > 0) {
      stopping.emplace(EarlyStoppingOptions{.patience = patience,
                                            .min_delta = config.number("early_stopping_min_delta"),
                                            .minimize = config.word("early_stopping_mode") == "min",
                                            .restore_best = config.flag("early_stopping_restore_best")});
    }
  }

  void add_nonfinite_line() {
    const auto policy = tail ? tail->tail().options().nonfinite : engine.guard.policy();
    const std::string name = optim::name(policy);
    const char* state = policy == optim::NonFinite::Propagate ? "off" : "on";
    if (tail) {
      add({"nonfinite", state, name + ": the optimizer itself looks at the gradients.", "", {}});
    } else if (policy == optim::NonFinite::Propagate) {
      add({"nonfinite", state, "a gradient that is not finite is stepped with.", "", {}});
    } else {
      add({"nonfinite",
           state,
           name + ": the gradients are looked at before the optimizer steps.",
           "their norms, and one host read a step.",
           {}});
    }
  }

  void host_settings() {
    const auto keep = [this](HostSetting setting, const char* otherwise) {
      // A number of threads that stays as it is is torch's own choice.
      const bool on = setting.is_applied() || (setting.is_in_effect() && std::string_view(otherwise) != "off");
      add({setting.name(), on ? "on" : otherwise, setting.reason(), setting.cost(), {}});
      host.push_back(std::move(setting));
    };
    if (config.flag("deterministic")) keep(use_deterministic_algorithms(), "refused");
    if (config.word("allocator") != "system") {
      keep(tune_allocator(retain_limit_of(config)), "refused");
    } else {
      add({"allocator", "off", "the system's settings were asked for.", "", {}});
    }
    if (config.get("threads") == ConfigValue(std::string("keep"))) {
      add({"threads", "off", "torch's own number of intra-op threads was asked for.", "", {}});
    } else {
      const auto wanted = config.integer("threads");
      keep(size_threads(wanted ? std::optional<int>(static_cast<int>(*wanted)) : std::nullopt), "off");
    }
    if (config.word("flush_denormals") != "off") {
      keep(flush_denormals(), "refused");
    } else {
      add({"flush_denormals", "off", "denormal numbers keep their value.", "", {}});
    }
  }

  void add_tail_line() {
    if (tail) {
      add({"step_tail", "on", "the optimizer is one of oxytorch::optim.", "", {}});
    } else if (config.word("step_tail") == "off") {
      add({"step_tail", "off", "the optimizer steps as torch does.", "", {}});
    } else {
      add({"step_tail", "refused", "the optimizer is torch's own; oxytorch::optim::replace() takes it over.", "", {}});
    }
    if (config.word("optimizer_state") != "auto") {
      add({"optimizer_state",
           "refused",
           "a C++ optimizer's state is chosen where it is made: give its options state_dtype(...).",
           "",
           {}});
    }
  }

  /// Of a plan: its strategies as they stand now.
  void renew_lines() {
    if (plan == nullptr) return;
    lines.clear();
    for (const auto& entry : plan->certificate.entries) {
      const bool on = entry.standing == tune::Standing::Accepted;
      add({entry.strategy,
           on                                          ? "on"
           : entry.standing == tune::Standing::Skipped ? "off"
                                                       : "refused",
           std::string(tune::name(entry.standing)) + ": " + entry.reason, on ? entry.cost : "",
           entry.speedup ? std::optional(entry.speedup->mid) : std::nullopt});
    }
    for (const auto& setting : plan->named.all()) {
      add({setting.name(), setting.is_in_effect() ? "on" : "refused", setting.reason(), setting.cost(), {}});
    }
    lines.insert(lines.end(), loop_lines.begin(), loop_lines.end());
  }

  // -- settings of the step ------------------------------------------------------------------------------------------

  void set_precision(at::ScalarType wanted) {
    dtype = wanted;
    tune::TrainingStep::Scope autocast;
    if (dtype != at::kFloat) {
      autocast = [device = engine.device().type(), wanted] { return std::make_shared<amp::Autocast>(device, wanted); };
    }
    engine.scope("autocast", std::move(autocast));
  }

  void set_layout(bool on) {
    if (on == channels_last) return;
    const auto format = on ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    for (auto& parameter : engine.model().parameters()) {
      if (parameter.dim() == 4) parameter.set_data(parameter.data().contiguous(format));
    }
    channels_last = on;
    engine.inputs("channels_last", on ? tune::TrainingStep::Transform(tune::channels_last) : nullptr);
  }

  /// A tail that has stepped holds its parameters' memory, so their layout stays.
  [[nodiscard]] bool may_change_layout() const {
    return has_convolution(engine.model()) && !(tail && tail->tail_stats().grad_norm.defined());
  }

  void set_attention(bool math) {
    math_attention = math;
    tune::TrainingStep::Scope path;
    if (math) path = [this] { return std::make_shared<tune::MathAttention>(measured_math && dtype == at::kBFloat16); };
    engine.scope("attention", std::move(path));
  }

  void keep(const char* name, const std::string& what, const calibrate::Trial& trial,
            const std::function<void(bool)>& flip) {
    std::ostringstream took;
    took << std::setprecision(3) << "forward and backward take " << trial.without * 1e3 << " ms without and "
         << trial.with * 1e3 << " ms with it (" << trial.rounds << " pairs on the first batch).";
    const bool kept = trial.drift <= kDrift && trial.ratio() < kPays;
    flip(kept);
    const auto reason = trial.drift > kDrift ? what + " moved the first loss by more than 5%."
                        : kept               ? what + ": " + took.str()
                                             : what + " does not pay here: " + took.str();
    add({name, kept ? "on" : "refused", reason, kept ? "sums and products are rounded differently." : "",
         1 / trial.ratio()});
  }

  void first_step(const Batch* batch) {
    ready = true;
    const auto advice = amp::recommend_dtype(engine.device().type());
    const auto precision = config.word("precision");
    const bool try_bf16 = precision == "auto" && advice.dtype == at::kBFloat16;
    const bool try_layout = config.word("channels_last") == "auto" && may_change_layout();
    bool try_math = config.word("attention") == "auto";
    bool measure = batch && engine.device().is_cpu() && (try_bf16 || try_layout || try_math);
    if (measure) {
      calibrate::Escrow escrow(engine.model(), engine.parameters());
      const auto compute = [&] { return engine.loss(*batch); };
      measure = calibrate::once(escrow, compute).first <= kPatience;
      const auto decide = [&](const char* name, const char* what, const std::function<void(bool)>& flip) {
        keep(name, what, calibrate::compare(escrow, compute, flip), flip);
      };
      if (measure && try_bf16) {
        decide("precision", "bf16 autocast", [this](bool on) { set_precision(on ? at::kBFloat16 : at::kFloat); });
      }
      if (measure && try_layout) decide("channels_last", "channels_last", [this](bool on) { set_layout(on); });
      try_math = try_math && measure && tune::uses_flash(compute);
      measured_math = try_math;
      if (try_math) decide("attention", "the math path", [this](bool on) { set_attention(on); });
    }
    if (!(measure && try_bf16)) precision_by_rule(precision, advice);
    if (!(measure && try_layout)) layout_by_rule();
    if (!(measure && try_math)) attention_by_rule();
    make_scaler();
  }

  void precision_by_rule(const std::string& precision, const amp::DtypeAdvice& advice) {
    set_precision(precision == "auto"   ? advice.dtype
                  : precision == "bf16" ? at::kBFloat16
                  : precision == "fp16" ? at::kHalf
                                        : at::kFloat);
    const bool on = dtype != at::kFloat;
    if (precision == "auto") {
      add({"precision", on ? "on" : "refused", "not measured; by the hardware: " + advice.reason, "", {}});
    } else {
      const auto support = amp::hardware_support(engine.device().type(), dtype);
      add({"precision", on ? "on" : "off", precision + " was asked for.", support.native ? "" : support.reason, {}});
    }
  }

  void layout_by_rule() {
    const auto wanted = config.word("channels_last");
    const bool convolves = may_change_layout();
    set_layout(convolves && wanted != "off");
    if (wanted == "off") {
      add({"channels_last", "off", "the model's own layout was asked for.", "", {}});
    } else if (!convolves) {
      add({"channels_last",
           "refused",
           "the model has no 2-D convolution, or its optimizer has already stepped.",
           "",
           {}});
    } else {
      add({"channels_last", "on", "convolutions run best so; not measured.", "sums are rounded in another order.", {}});
    }
  }

  void attention_by_rule() {
    set_attention(config.word("attention") == "math");
    add({"attention",
         math_attention ? "on" : "off",
         math_attention ? "the math path was asked for." : "torch's own choice of kernel stands.",
         "",
         {}});
  }

  void make_scaler() {
    const auto wanted = config.word("grad_scaler");
    if (wanted == "on" || (wanted == "auto" && dtype == at::kHalf)) {
      amp::GradScalerOptions options;
      options.device = engine.device();
      engine.scaler = std::make_unique<amp::GradScaler>(options);
      add({"grad_scaler",
           "on",
           tail ? "unscale, check and skip happen inside the step tail."
                : "unscaled by torch's op, with one host read a step.",
           "",
           {}});
    } else {
      add({"grad_scaler", "off", "only float16 needs a loss scale.", "", {}});
    }
  }

  at::Tensor counted(at::Tensor loss) {
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
  std::unique_ptr<tune::TrainingStep> own;  // where there is no plan
  Plan::Impl* plan = nullptr;
  tune::TrainingStep& engine;
  optim::TailOptimizer* tail;  // the caller's optimizer, where it is one of oxytorch::optim
  std::optional<EarlyStopping> stopping;
  std::vector<HostSetting> host;
  std::vector<SettingLine> lines, loop_lines;
  int64_t batch_count = 0, epoch = 0;
  at::ScalarType dtype = at::kFloat;
  bool channels_last = false, math_attention = false, measured_math = false, ready = false, stopping_loaded = false;
  std::array<double, 3> seconds{};
};

Trainer::Trainer(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                 PerformanceConfig config)
    : impl_(std::make_unique<Impl>(model, optimizer, std::move(loss), std::move(config))) {}
Trainer::Trainer(Plan& plan, PerformanceConfig config)
    : impl_(std::make_unique<Impl>(*plan.impl_, std::move(config))) {}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

at::Tensor Trainer::step(const Batch& batch) {
  auto& self = *impl_;
  OXY_CHECK(self.engine.has_loss(), InvalidState,
            "this trainer has no loss function. Pass one, or step with a closure.");
  if (!self.ready) self.first_step(&batch);
  return self.counted(self.plan ? self.plan->step(batch) : self.engine.take(batch));
}

at::Tensor Trainer::step(const std::function<at::Tensor()>& closure) {
  if (!impl_->ready) impl_->first_step(nullptr);
  return impl_->counted(impl_->engine.take(closure));
}

bool Trainer::flush() { return impl_->engine.flush(); }

FitResult Trainer::run_fit(const Feed& feed, int64_t epochs, int64_t max_steps,
                           const std::function<double()>& validate) {
  auto& self = *impl_;
  if (max_steps == 0) max_steps = self.config.integer("max_steps").value_or(0);
  OXY_CHECK(epochs > 0 || max_steps > 0, InvalidArgument, "fit needs epochs or max_steps above 0.");
  FitResult result;
  auto& model = self.engine.model();
  const auto first = global_step();
  const auto all_steps = [&] { return max_steps > 0 && global_step() >= max_steps; };
  self.restart_early_stopping();
  StopSignals signals;
  ProgressLine line(self.config.word("progress"), max_steps);
  model.train();
  if (all_steps()) result.stop_reason = "max_steps";
  for (; (epochs == 0 || self.epoch < epochs) && result.stop_reason.empty(); ++self.epoch) {
    at::Tensor total;
    int64_t seen = 0;
    feed([&](const Batch& batch) {
      const auto loss = step(batch).to(at::kFloat);
      line.show(self.epoch, global_step(), loss);
      total = total.defined() ? total + loss : loss;
      ++seen;
      if (const char* name = StopSignals::received()) result.stop_reason = name;
      if (all_steps() && result.stop_reason.empty()) result.stop_reason = "max_steps";
      return result.stop_reason.empty();
    });
    OXY_CHECK(seen > 0, InvalidArgument, "the loader is empty: it yielded no batch.");
    if (!result.stop_reason.empty()) break;
    flush();
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
  auto own = at::_foreach_clone(parameters);
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
  archive.write("counters",
                torch::tensor({engine.taken(), self.batch_count, static_cast<int64_t>(self.ready), self.epoch}));
  archive.write("decisions", torch::tensor({static_cast<int64_t>(self.dtype), static_cast<int64_t>(self.channels_last),
                                            static_cast<int64_t>(self.math_attention) +
                                                static_cast<int64_t>(self.math_attention && self.measured_math)}));
  const auto generators = optim::generator_states(engine.device());
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
  const auto decisions = read("decisions");
  const auto counters = read("counters");
  if (counters[2].item<int64_t>() != 0 && self.plan == nullptr) {  // a plan has decided itself
    self.set_precision(static_cast<at::ScalarType>(decisions[0].item<int64_t>()));
    self.set_layout(decisions[1].item<int64_t>() != 0);
    self.measured_math = decisions[2].item<int64_t>() == 2;
    self.set_attention(decisions[2].item<int64_t>() != 0);
    const std::string why = "as the run that is continued here had decided.";
    self.add({"precision", self.dtype == at::kFloat ? "off" : "on", why, "", {}});
    self.add({"channels_last", self.channels_last ? "on" : "off", why, "", {}});
    self.add({"attention", self.math_attention ? "on" : "off", why, "", {}});
    if (!self.ready) self.make_scaler();
    self.ready = true;
  }
  torch::serialize::InputArchive model, optimizer;
  archive.read("model", model);
  engine.model().load(model);
  archive.read("optimizer", optimizer);
  engine.original().load(optimizer);
  engine.renew_replacement();
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
  engine.abandon();
  std::vector<at::Tensor> generators;
  for (at::Tensor state; archive.try_read("generator" + std::to_string(generators.size()), state);) {
    generators.push_back(state.cpu());
  }
  optim::set_generator_states(engine.device(), generators);
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
  out << "], \"timings\": {\"forward\": " << self.seconds[0] / count << ", \"backward\": " << self.seconds[1] / count
      << ", \"tail\": " << self.seconds[2] / count << "}, \"steps\": " << global_step()
      << ", \"batches\": " << self.batch_count << ", \"skipped\": " << self.skipped() << '}';
  return out.str();
}

void Trainer::revert() {
  for (auto setting = impl_->host.rbegin(); setting != impl_->host.rend(); ++setting) setting->revert();
}

}  // namespace oxytorch
