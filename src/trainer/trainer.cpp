#include "oxytorch/trainer.h"

#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_clone.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>

#include "optim/generators.h"
#include "oxytorch/amp.h"
#include "oxytorch/clock.h"
#include "oxytorch/config_use.h"
#include "oxytorch/error.h"
#include "oxytorch/optim.h"
#include "oxytorch/optim/schedule.h"
#include "oxytorch/system.h"
#include "oxytorch/trainer/nonfinite.h"
#include "oxytorch/tune/host.h"
#include "trainer/calibrate.h"
#include "trainer/progress.h"
#include "trainer/stop_signals.h"
#include "tune/attention.h"

namespace oxytorch {
namespace {

using Clock = std::chrono::steady_clock;

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

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

bool has_convolution(const torch::nn::Module& model) {
  const auto parameters = model.parameters();
  return std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) { return p.dim() == 4; });
}

}  // namespace

struct Trainer::Impl {
  Impl(torch::nn::Module& m, torch::optim::Optimizer& o, LossFunction l, PerformanceConfig c)
      : model(m),
        optimizer(o),
        loss(std::move(l)),
        config(std::move(c)),
        guard(optim::parse_nonfinite(config.word("nonfinite"))),
        parameters(parameters_of(o)) {
    resolve_vector_math();
    tail = dynamic_cast<optim::TailOptimizer*>(&optimizer);
    OXY_CHECK(!parameters.empty(), InvalidArgument, "the optimizer has no parameters. Pass model->parameters().");
    device = parameters.front().device();
    accumulate = config.integer("accumulation_steps").value_or(1);
    clip_norm = config.number("clip_norm");
    clip_value = config.number("clip_value");
    ema_decay = config.number("ema_decay");
    check_settings(config, ConfigUser::CppTrainer);
    if (tail) leave_to_the_tail();
    if (ema_decay > 0) {
      at::NoGradGuard no_grad;
      ema = at::_foreach_clone(parameters);
    }
    make_schedule();
    if (const auto seed = config.integer("seed")) torch::manual_seed(static_cast<std::uint64_t>(*seed));
    host_settings();
    add_tail_line();
    add_nonfinite_line();
    if (const auto patience = config.integer("early_stopping_patience").value_or(0); patience > 0) {
      stopping.emplace(EarlyStoppingOptions{.patience = patience,
                                            .min_delta = config.number("early_stopping_min_delta"),
                                            .minimize = config.word("early_stopping_mode") == "min",
                                            .restore_best = config.flag("early_stopping_restore_best")});
    }
  }

  void add(SettingLine line) { lines.push_back(std::move(line)); }

  /// Refuses what contradicts the options of an optimizer of oxytorch::optim; what it does itself is left to it.
  void leave_to_the_tail() {
    const auto& own = tail->tail().options();
    check_own_tail(config, {own.clip_norm, own.clip_value, own.ema_decay, optim::name(own.nonfinite),
                            own.norm_in_backward, own.step_in_backward});
    if (own.clip_norm > 0) clip_norm = 0;
    if (own.clip_value > 0) clip_value = 0;
    if (own.ema_decay > 0) ema_decay = 0;
  }

  void add_nonfinite_line() {
    const auto policy = tail ? tail->tail().options().nonfinite : guard.policy();
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
      keep(tune_allocator(config.is_auto("allocator_retain_limit") ? std::nullopt
                                                                   : std::optional<uint64_t>(retain_limit())),
           "refused");
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

  [[nodiscard]] uint64_t retain_limit() const {
    return config.size("allocator_retain_limit").resolve(read_memory().limit.value_or(0));
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

  void make_schedule() {
    const auto kind = config.word("schedule");
    if (kind == "none") return;
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
      schedule = std::make_unique<optim::OneCycle>(optimizer, cycle);
    } else if (warmup > 0) {
      const double start = 1.0 / static_cast<double>(warmup + 1);
      schedule = std::make_unique<optim::WarmupCosine>(optimizer, warmup, steps, floor, start);
    } else {
      schedule = std::make_unique<optim::CosineAnnealing>(optimizer, steps, floor);
    }
  }

  // -- settings of the step ------------------------------------------------------------------------------------------

  void set_bf16(bool on) { dtype = on ? at::kBFloat16 : at::kFloat; }

  void set_layout(bool on) {
    if (on == channels_last) return;
    const auto format = on ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    for (auto& parameter : model.parameters()) {
      if (parameter.dim() == 4) parameter.set_data(parameter.data().contiguous(format));
    }
    channels_last = on;
  }

  /// A tail that has stepped holds its parameters' memory, so their layout stays.
  [[nodiscard]] bool may_change_layout() const {
    return has_convolution(model) && !(tail && tail->tail_stats().grad_norm.defined());
  }

  void set_attention(bool math) { math_attention = math; }

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
    const auto advice = amp::recommend_dtype(device.type());
    const auto precision = config.word("precision");
    const bool try_bf16 = precision == "auto" && advice.dtype == at::kBFloat16;
    const bool try_layout = config.word("channels_last") == "auto" && may_change_layout();
    bool try_math = config.word("attention") == "auto";
    bool measure = batch && device.is_cpu() && (try_bf16 || try_layout || try_math);
    if (measure) {
      calibrate::Escrow escrow(model, parameters);
      const auto compute = [&] { return forward([&] { return loss(*batch); }); };
      measure = calibrate::once(escrow, compute).first <= kPatience;
      const auto decide = [&](const char* name, const char* what, const std::function<void(bool)>& flip) {
        keep(name, what, calibrate::compare(escrow, compute, flip), flip);
      };
      if (measure && try_bf16) decide("precision", "bf16 autocast", [this](bool on) { set_bf16(on); });
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
    dtype = precision == "auto"   ? advice.dtype
            : precision == "bf16" ? at::kBFloat16
            : precision == "fp16" ? at::kHalf
                                  : at::kFloat;
    const bool on = dtype != at::kFloat;
    if (precision == "auto") {
      add({"precision", on ? "on" : "refused", "not measured; by the hardware: " + advice.reason, "", {}});
    } else {
      const auto support = amp::hardware_support(device.type(), dtype);
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
    math_attention = config.word("attention") == "math";
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
      options.device = device;
      scaler = std::make_unique<amp::GradScaler>(options);
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

  // -- the step ------------------------------------------------------------------------------------------------------

  template <class Function>
  at::Tensor forward(const Function& compute) {
    std::optional<tune::MathAttention> attention;
    if (math_attention) attention.emplace(/*reduced=*/measured_math && dtype == at::kBFloat16);
    if (dtype == at::kFloat) return compute();
    amp::Autocast guard(device.type(), dtype);
    return compute();
  }

  template <class Function>
  at::Tensor step(const Function& compute) {
    const auto start = Clock::now();
    at::Tensor value;
    double forward_end = 0, backward_end = 0;
    try {
      value = forward(compute);
      OXY_CHECK(value.defined() && value.numel() == 1, InvalidArgument, "the loss ",
                value.defined() ? "is not a scalar" : "is undefined", ". Return one number, for example a mean.");
      forward_end = seconds_since(start);
      auto scaled = accumulate == 1 ? value : value / static_cast<double>(accumulate);
      if (scaler) scaled = scaler->scale(scaled);
      {
        std::optional<optim::AccumulateGuard> more_to_come;
        if (tail && micro + 1 < accumulate) more_to_come.emplace(*tail);
        scaled.backward();
      }
      backward_end = seconds_since(start);
      if (++micro >= accumulate) apply();
    } catch (...) {
      abandon();
      throw;
    }
    if (++batch_count > 1) {
      seconds[0] += forward_end;
      seconds[1] += backward_end - forward_end;
      seconds[2] += seconds_since(start) - backward_end;
    }
    return value.detach();
  }

  void apply() {
    at::NoGradGuard no_grad;
    if (admitted()) update();
    for (auto& parameter : parameters) parameter.mutable_grad().reset();
    micro = 0;
    ++step_count;
    if (schedule) schedule->step();
  }

  /// The gradients that there are.
  [[nodiscard]] std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> found;
    for (const auto& parameter : parameters) {
      if (parameter.grad().defined()) found.push_back(parameter.grad());
    }
    return found;
  }

  /// Under a scale, what is not finite is skipped by the scaler's own rule; a tail looks itself.
  [[nodiscard]] bool admitted() {
    if (tail || scaler || guard.policy() == optim::NonFinite::Propagate) return true;
    return guard.admits(gradients());
  }

  void update() {
    // The losses were divided by the whole window; an unfinished one has had a share of it.
    const double share = static_cast<double>(micro) / static_cast<double>(accumulate);
    const bool clips = clip_norm > 0 || clip_value > 0;
    const bool tail_divides = tail && !clips;
    std::vector<at::Tensor> found;
    if ((share != 1 && !tail_divides) || clips) found = gradients();
    if (share != 1 && tail_divides) tail->set_grad_divisor(share);
    if (share != 1 && !tail_divides && !found.empty()) at::_foreach_mul_(found, 1 / share);
    if (clips && !found.empty()) {
      for (at::Tensor& gradient : found) {
        if (!gradient.is_sparse()) continue;
        gradient.set_data(gradient.coalesce());  // a row that comes twice is clipped as the one that it is
        gradient = gradient._values();
      }
      if (scaler) scaler->unscale_(optimizer);
      if (clip_value > 0) {
        at::_foreach_clamp_min_(found, -clip_value);
        at::_foreach_clamp_max_(found, clip_value);
      }
      if (clip_norm > 0) {
        const auto norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(found)));
        at::_foreach_mul_(found, (clip_norm / (norm + 1e-6)).clamp_max(1.0));
      }
    }
    if (scaler) {
      scaler->step(optimizer);
      scaler->update();
    } else {
      optimizer.step();
    }
    if (share != 1 && tail_divides) tail->set_grad_divisor(1);
    if (!ema.empty()) at::_foreach_lerp_(ema, parameters, 1 - ema_decay);
  }

  void abandon() {
    for (auto& parameter : parameters) parameter.mutable_grad().reset();
    if (scaler) scaler->abandon();
    if (tail && micro != 0) tail->set_grad_divisor(1);
    micro = 0;
  }

  /// Steps left out because a gradient was not finite. Reads the device.
  [[nodiscard]] int64_t skipped() const {
    if (!tail) return guard.skipped();
    const auto& skipped = tail->tail_stats().skipped;
    return skipped.defined() ? skipped.item<int64_t>() : 0;
  }

  void restart_early_stopping() {
    if (stopping && !std::exchange(stopping_loaded, false)) stopping.emplace(stopping->options());
  }

  torch::nn::Module& model;
  torch::optim::Optimizer& optimizer;
  optim::TailOptimizer* tail = nullptr;
  LossFunction loss;
  PerformanceConfig config;
  NonFiniteGuard guard;
  std::vector<at::Tensor> parameters;
  at::Device device = at::kCPU;
  std::vector<at::Tensor> ema;
  std::unique_ptr<optim::Schedule> schedule;
  std::unique_ptr<amp::GradScaler> scaler;
  std::optional<EarlyStopping> stopping;
  std::vector<HostSetting> host;
  std::vector<SettingLine> lines;
  int64_t accumulate = 1, micro = 0, step_count = 0, batch_count = 0, epoch = 0;
  double clip_norm = 0, clip_value = 0, ema_decay = 0;
  at::ScalarType dtype = at::kFloat;
  bool channels_last = false, math_attention = false, measured_math = false, ready = false, stopping_loaded = false;
  std::array<double, 3> seconds{};
};

Trainer::Trainer(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                 PerformanceConfig config)
    : impl_(std::make_unique<Impl>(model, optimizer, std::move(loss), std::move(config))) {}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

at::Tensor Trainer::step(const Batch& batch) {
  OXY_CHECK(impl_->loss, InvalidState, "this trainer has no loss function. Pass one, or step with a closure.");
  if (!impl_->ready) impl_->first_step(&batch);
  if (!impl_->channels_last || batch.input.dim() != 4) return impl_->step([&] { return impl_->loss(batch); });
  return impl_->step(
      [&] { return impl_->loss({batch.input.contiguous(at::MemoryFormat::ChannelsLast), batch.target}); });
}

at::Tensor Trainer::step(const std::function<at::Tensor()>& closure) {
  if (!impl_->ready) impl_->first_step(nullptr);
  return impl_->step(closure);
}

bool Trainer::flush() {
  if (impl_->micro == 0) return false;
  try {
    impl_->apply();
  } catch (...) {
    impl_->abandon();
    throw;
  }
  return true;
}

FitResult Trainer::run_fit(const Feed& feed, int64_t epochs, int64_t max_steps,
                           const std::function<double()>& validate) {
  auto& self = *impl_;
  if (max_steps == 0) max_steps = self.config.integer("max_steps").value_or(0);
  OXY_CHECK(epochs > 0 || max_steps > 0, InvalidArgument, "fit needs epochs or max_steps above 0.");
  FitResult result;
  const auto first = self.step_count;
  const auto all_steps = [&] { return max_steps > 0 && self.step_count >= max_steps; };
  self.restart_early_stopping();
  StopSignals signals;
  ProgressLine line(self.config.word("progress"), max_steps);
  self.model.train();
  if (all_steps()) result.stop_reason = "max_steps";
  for (; (epochs == 0 || self.epoch < epochs) && result.stop_reason.empty(); ++self.epoch) {
    at::Tensor total;
    int64_t seen = 0;
    feed([&](const Batch& batch) {
      const auto loss = step(batch).to(at::kFloat);
      line.show(self.epoch, self.step_count, loss);
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
    self.model.train();
    const double metric = validate ? result.validations.back() : result.losses.back();
    if (self.stopping && self.stopping->step(metric, &self.model)) {
      result.stop_reason = "early_stopping";
    } else if (all_steps()) {
      result.stop_reason = "max_steps";
    }
  }
  if (self.stopping && StopSignals::received() == nullptr) self.stopping->restore(self.model);
  if (result.stop_reason.empty()) result.stop_reason = "epochs";
  result.steps = self.step_count - first;
  return result;
}

int64_t Trainer::global_step() const noexcept { return impl_->step_count; }
int64_t Trainer::epoch() const noexcept { return impl_->epoch; }
int64_t Trainer::batches() const noexcept { return impl_->batch_count; }
const std::vector<SettingLine>& Trainer::settings() const noexcept { return impl_->lines; }

std::shared_ptr<void> Trainer::ema_weights() {
  auto& self = *impl_;
  at::NoGradGuard no_grad;
  if (self.ema.empty()) {
    OXY_CHECK(self.tail, InvalidState, "no average is kept. Set ema_decay, for example 0.999.");
    self.tail->apply_ema();
    return {nullptr, [tail = self.tail](void*) { tail->restore_parameters(); }};
  }
  auto own = at::_foreach_clone(self.parameters);
  at::_foreach_copy_(self.parameters, self.ema);
  return {nullptr, [parameters = self.parameters, own = std::move(own)](void*) {
            at::NoGradGuard quiet;
            at::_foreach_copy_(parameters, own);
          }};
}

void Trainer::save(torch::serialize::OutputArchive& archive) const {
  const auto& self = *impl_;
  torch::serialize::OutputArchive model, optimizer;
  self.model.save(model);
  self.optimizer.save(optimizer);
  archive.write("model", model);
  archive.write("optimizer", optimizer);
  archive.write("counters",
                torch::tensor({self.step_count, self.batch_count, static_cast<int64_t>(self.ready), self.epoch}));
  archive.write("decisions", torch::tensor({static_cast<int64_t>(self.dtype), static_cast<int64_t>(self.channels_last),
                                            static_cast<int64_t>(self.math_attention) +
                                                static_cast<int64_t>(self.math_attention && self.measured_math)}));
  const auto generators = optim::generator_states(self.device);
  for (size_t i = 0; i < generators.size(); ++i) archive.write("generator" + std::to_string(i), generators[i]);
  archive.write("ema_count", torch::tensor(static_cast<int64_t>(self.ema.size())));
  for (size_t i = 0; i < self.ema.size(); ++i) archive.write("ema" + std::to_string(i), self.ema[i]);
  if (self.schedule) {
    for (const auto& [name, values] : self.schedule->state_dict()) {
      archive.write("schedule." + name, torch::tensor(values, at::kDouble));
    }
  }
  if (self.stopping) {
    torch::serialize::OutputArchive stopping;
    self.stopping->save(stopping);
    archive.write("early_stopping", stopping);
  }
  if (self.scaler) {
    for (const auto& [name, value] : self.scaler->state_dict()) {
      archive.write("scaler." + name, torch::tensor(value, at::kDouble));
    }
  }
}

void Trainer::load(torch::serialize::InputArchive& archive) {
  auto& self = *impl_;
  const auto read = [&archive](const std::string& name) {
    at::Tensor value;
    archive.read(name, value);
    return value;
  };
  const auto decisions = read("decisions");
  const auto counters = read("counters");
  if (counters[2].item<int64_t>() != 0) {
    self.dtype = static_cast<at::ScalarType>(decisions[0].item<int64_t>());
    self.set_layout(decisions[1].item<int64_t>() != 0);
    self.math_attention = decisions[2].item<int64_t>() != 0;
    self.measured_math = decisions[2].item<int64_t>() == 2;
    const std::string why = "as the run that is continued here had decided.";
    self.add({"precision", self.dtype == at::kFloat ? "off" : "on", why, "", {}});
    self.add({"channels_last", self.channels_last ? "on" : "off", why, "", {}});
    self.add({"attention", self.math_attention ? "on" : "off", why, "", {}});
    if (!self.ready) self.make_scaler();
    self.ready = true;
  }
  torch::serialize::InputArchive model, optimizer;
  archive.read("model", model);
  self.model.load(model);
  archive.read("optimizer", optimizer);
  self.optimizer.load(optimizer);
  OXY_CHECK(read("ema_count").item<int64_t>() == static_cast<int64_t>(self.ema.size()), InvalidArgument,
            "the archive has another number of averaged weights. Load it with the same ema_decay setting.");
  for (size_t i = 0; i < self.ema.size(); ++i) self.ema[i].copy_(read("ema" + std::to_string(i)));
  if (self.schedule) {
    auto state = self.schedule->state_dict();
    for (auto& [name, values] : state) {
      const auto saved = read("schedule." + name);
      values.assign(saved.data_ptr<double>(), saved.data_ptr<double>() + saved.numel());
    }
    self.schedule->load_state_dict(state);
  }
  if (self.scaler) {
    auto state = self.scaler->state_dict();
    for (auto& [name, value] : state) value = read("scaler." + name).item<double>();
    self.scaler->load_state_dict(state);
  }
  torch::serialize::InputArchive stopping;
  if (self.stopping && archive.try_read("early_stopping", stopping)) {
    self.stopping->load(stopping);
    self.stopping_loaded = true;
  }
  self.step_count = counters[0].item<int64_t>();
  self.batch_count = counters[1].item<int64_t>();
  self.epoch = counters.numel() > 3 ? counters[3].item<int64_t>() : 0;  // archives of before have no epochs
  self.abandon();
  std::vector<at::Tensor> generators;
  for (at::Tensor state; archive.try_read("generator" + std::to_string(generators.size()), state);) {
    generators.push_back(state.cpu());
  }
  optim::set_generator_states(self.device, generators);
}

std::string Trainer::report() const {
  const auto& self = *impl_;
  std::ostringstream out;
  out << "Oxytorch trainer, level " << self.config.level() << '\n' << std::fixed << std::setprecision(2);
  for (const auto& line : self.lines) {
    out << std::left << std::setw(16) << line.name << std::setw(9) << line.state;
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
  out << "steps " << self.step_count << ", batches " << self.batch_count;
  if (const auto skipped = self.skipped(); skipped > 0) out << ", skipped " << skipped;
  out << '\n';
  return out.str();
}

std::string Trainer::report_json() const {
  const auto& self = *impl_;
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
      << ", \"tail\": " << self.seconds[2] / count << "}, \"steps\": " << self.step_count
      << ", \"batches\": " << self.batch_count << ", \"skipped\": " << self.skipped() << '}';
  return out.str();
}

void Trainer::revert() {
  for (auto setting = impl_->host.rbegin(); setting != impl_->host.rend(); ++setting) setting->revert();
}

}  // namespace oxytorch
