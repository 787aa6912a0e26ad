#include "oxytorch/optim/schedule.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <optional>
#include <utility>

#include "oxytorch/error.h"
#include "oxytorch/optim/optimizers.h"

namespace oxytorch::optim {
namespace {

constexpr double kPi = std::numbers::pi;

using Options = torch::optim::OptimizerOptions;

/// Sets `momentum`, or the first of `betas`, if the options are a T.
template <class T>
bool set_inertia_of(Options& options, double value) {
  auto* typed = dynamic_cast<T*>(&options);
  if (typed == nullptr) return false;
  if constexpr (requires { typed->betas(); }) {
    typed->betas(std::make_tuple(value, std::get<1>(typed->betas())));
  } else {
    typed->momentum(value);
  }
  return true;
}

template <class... T>
bool set_inertia_of_any(Options& options, double value) {
  return (set_inertia_of<T>(options, value) || ...);
}

/// Sets what OneCycle cycles beside the rate; false where the group has neither betas nor a momentum.
bool set_inertia(Options& options, double value) {
  return set_inertia_of_any<AdamWOptions, AdamOptions, SGDOptions, LionOptions, RMSpropOptions, MuonOptions,
                            torch::optim::AdamWOptions, torch::optim::AdamOptions, torch::optim::SGDOptions,
                            torch::optim::RMSpropOptions>(options, value);
}

const std::vector<double>& entry(const ScheduleState& state, const char* name, size_t count) {
  const auto found = state.find(name);
  OXY_CHECK(found != state.end(), InvalidArgument, "schedule state has no '", name,
            "'. Pass what state_dict() returned.");
  OXY_CHECK(found->second.size() == count, InvalidArgument, "schedule state '", name, "' has ", found->second.size(),
            " values, expected ", count, ". Load it into an optimizer with the same parameter groups.");
  return found->second;
}

}  // namespace

Schedule::Schedule(torch::optim::Optimizer& optimizer) : optimizer_(optimizer), base_lrs_(last_lr()) {}

Schedule::~Schedule() = default;

std::vector<double> Schedule::last_lr() const {
  std::vector<double> rates;
  for (const auto& group : optimizer_.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void Schedule::start() {
  last_epoch_ = 0;
  apply();
}

void Schedule::step() {
  OXY_CHECK(optimizer_.param_groups().size() == base_lrs_.size(), InvalidState, "the optimizer has ",
            optimizer_.param_groups().size(), " parameter groups, but had ", base_lrs_.size(),
            " when the schedule was made. Make the schedule after the last add_param_group().");
  ++last_epoch_;
  apply();
}

void Schedule::restart() {
  last_epoch_ = 0;
  set_rates([this](size_t group, double) { return first_rate(group); });
}

void Schedule::apply() {
  set_rates([this](size_t group, double current) { return rate(group, current); });
}

double Schedule::first_rate(size_t group) const { return rate(group, base_lrs_[group]); }

void Schedule::set_rates(const std::function<double(size_t, double)>& rate) {
  auto& groups = optimizer_.param_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    auto& options = groups[i].options();
    options.set_lr(rate(i, options.get_lr()));
  }
  if (auto* tail = dynamic_cast<TailOptimizer*>(&optimizer_)) tail->sync_lr();
}

ScheduleState Schedule::state_dict() const {
  return {{"last_epoch", {static_cast<double>(last_epoch_)}}, {"base_lrs", base_lrs_}, {"last_lr", last_lr()}};
}

void Schedule::load_state_dict(const ScheduleState& state) {
  const auto groups = base_lrs_.size();
  const auto& epoch = entry(state, "last_epoch", 1);
  const auto& base = entry(state, "base_lrs", groups);
  const auto& rates = entry(state, "last_lr", groups);
  last_epoch_ = static_cast<int64_t>(epoch[0]);
  base_lrs_ = base;
  set_rates([&rates](size_t group, double) { return rates[group]; });
}

Step::Step(torch::optim::Optimizer& optimizer, int64_t step_size, double gamma)
    : Schedule(optimizer), step_size_(step_size), gamma_(gamma) {
  OXY_CHECK(step_size > 0, InvalidArgument, "step_size is ", step_size, ", expected at least 1.");
  start();
}

double Step::rate(size_t, double current) const {
  return last_epoch_ == 0 || last_epoch_ % step_size_ != 0 ? current : current * gamma_;
}

namespace {
double linear_rate(int64_t t, double current, double start, double end, int64_t total) {
  if (t == 0) return current * start;
  if (t > total) return current;
  return current *
         (1.0 + (end - start) / (static_cast<double>(total) * start + static_cast<double>(t - 1) * (end - start)));
}

double cosine_rate(int64_t t, double current, double base, double eta_min, int64_t t_max) {
  if (t == 0) return current;
  const auto period = static_cast<double>(t_max);
  if ((t - 1 - t_max) % (2 * t_max) == 0) return current + (base - eta_min) * (1 - std::cos(kPi / period)) / 2;
  return (1 + std::cos(kPi * static_cast<double>(t) / period)) /
             (1 + std::cos(kPi * static_cast<double>(t - 1) / period)) * (current - eta_min) +
         eta_min;
}
}  // namespace

Linear::Linear(torch::optim::Optimizer& optimizer, double start_factor, double end_factor, int64_t total_iters)
    : Schedule(optimizer), start_factor_(start_factor), end_factor_(end_factor), total_iters_(total_iters) {
  OXY_CHECK(start_factor > 0 && start_factor <= 1, InvalidArgument, "start_factor is ", start_factor,
            ", expected above 0 and at most 1.");
  OXY_CHECK(end_factor >= 0 && end_factor <= 1, InvalidArgument, "end_factor is ", end_factor, ", expected 0 to 1.");
  OXY_CHECK(total_iters > 0, InvalidArgument, "total_iters is ", total_iters, ", expected at least 1.");
  start();
}

double Linear::rate(size_t, double current) const {
  return linear_rate(last_epoch_, current, start_factor_, end_factor_, total_iters_);
}

Polynomial::Polynomial(torch::optim::Optimizer& optimizer, int64_t total_iters, double power)
    : Schedule(optimizer), total_iters_(total_iters), power_(power) {
  OXY_CHECK(total_iters > 0, InvalidArgument, "total_iters is ", total_iters, ", expected at least 1.");
  start();
}

double Polynomial::rate(size_t, double current) const {
  if (last_epoch_ == 0 || last_epoch_ > total_iters_) return current;
  const auto total = static_cast<double>(total_iters_);
  const auto t = static_cast<double>(last_epoch_);
  return current * std::pow((1.0 - t / total) / (1.0 - (t - 1) / total), power_);
}

CosineAnnealing::CosineAnnealing(torch::optim::Optimizer& optimizer, int64_t t_max, double eta_min)
    : Schedule(optimizer), t_max_(t_max), eta_min_(eta_min) {
  OXY_CHECK(t_max > 0, InvalidArgument, "t_max is ", t_max, ", expected at least 1.");
  start();
}

double CosineAnnealing::rate(size_t group, double current) const {
  return cosine_rate(last_epoch_, current, base_lrs_[group], eta_min_, t_max_);
}

double CosineAnnealing::first_rate(size_t group) const {
  return eta_min_ + (base_lrs_[group] - eta_min_) * (1 + std::cos(0.0)) / 2;
}

Sequential::Sequential(torch::optim::Optimizer& optimizer, const std::vector<Make>& parts,
                       std::vector<int64_t> milestones)
    : Schedule(optimizer), milestones_(std::move(milestones)) {
  OXY_CHECK(!parts.empty() && milestones_.size() + 1 == parts.size(), InvalidArgument, "there are ", parts.size(),
            " schedules and ", milestones_.size(), " milestones, expected one milestone between each two.");
  for (size_t i = 0; i < milestones_.size(); ++i) {
    OXY_CHECK(milestones_[i] > (i == 0 ? 0 : milestones_[i - 1]), InvalidArgument, "milestone ", i, " is ",
              milestones_[i], ", expected above ", i == 0 ? 0 : milestones_[i - 1], ".");
  }
  // As in torch the run begins at the initial rate of the last OneCycle among the parts, where there is one.
  auto initial = base_lrs_;
  const auto rewind = [&] { set_rates([&initial](size_t group, double) { return initial[group]; }); };
  for (const auto& make : parts) {
    rewind();
    parts_.push_back(make(optimizer));
    OXY_CHECK(parts_.back() && !dynamic_cast<Plateau*>(parts_.back().get()), InvalidArgument, "schedule ",
              parts_.size() - 1, parts_.back() ? " is a Plateau, which needs a metric." : " is null.");
    if (dynamic_cast<OneCycle*>(parts_.back().get())) initial = parts_.back()->base_lrs_;
  }
  rewind();
  parts_.front()->start();
  last_epoch_ = 0;
}

double Sequential::rate(size_t, double current) const { return current; }

void Sequential::step() {
  ++last_epoch_;
  const auto place = std::upper_bound(milestones_.begin(), milestones_.end(), last_epoch_) - milestones_.begin();
  auto& part = *parts_[static_cast<size_t>(place)];
  if (place > 0 && milestones_[static_cast<size_t>(place - 1)] == last_epoch_) {
    part.restart();
  } else {
    part.step();
  }
}

ScheduleState Sequential::state_dict() const {
  auto state = Schedule::state_dict();
  for (size_t i = 0; i < parts_.size(); ++i) {
    for (auto& [name, values] : parts_[i]->state_dict()) state[std::to_string(i) + '.' + name] = values;
  }
  return state;
}

void Sequential::load_state_dict(const ScheduleState& state) {
  const auto before = state_dict();
  try {
    for (size_t i = 0; i < parts_.size(); ++i) {
      const auto prefix = std::to_string(i) + '.';
      ScheduleState own;
      for (const auto& [name, values] : state) {
        if (name.starts_with(prefix)) own[name.substr(prefix.size())] = values;
      }
      parts_[i]->load_state_dict(own);
    }
    Schedule::load_state_dict(state);
  } catch (const Error&) {
    load_state_dict(before);
    throw;
  }
}

WarmupCosine::WarmupCosine(torch::optim::Optimizer& optimizer, int64_t warmup_steps, int64_t total_steps,
                           double eta_min, double start_factor)
    : Schedule(optimizer),
      warmup_steps_(warmup_steps),
      cosine_steps_(total_steps - warmup_steps),
      eta_min_(eta_min),
      start_factor_(start_factor) {
  OXY_CHECK(warmup_steps >= 0 && total_steps > warmup_steps, InvalidArgument, "warmup_steps is ", warmup_steps,
            " and total_steps ", total_steps, ", expected 0 <= warmup_steps < total_steps.");
  OXY_CHECK(start_factor > 0 && start_factor <= 1, InvalidArgument, "start_factor is ", start_factor,
            ", expected above 0 and at most 1.");
  start();
}

double WarmupCosine::rate(size_t group, double current) const {
  if (last_epoch_ < warmup_steps_) return linear_rate(last_epoch_, current, start_factor_, 1.0, warmup_steps_);
  // torch sets the closed form where the second schedule takes over, and recurses from there.
  if (last_epoch_ == warmup_steps_) return eta_min_ + (base_lrs_[group] - eta_min_) * (1 + std::cos(0.0)) / 2;
  return cosine_rate(last_epoch_ - warmup_steps_, current, base_lrs_[group], eta_min_, cosine_steps_);
}

OneCycle::OneCycle(torch::optim::Optimizer& optimizer, OneCycleOptions options)
    : Schedule(optimizer), options_(std::move(options)) {
  auto& groups = optimizer_.param_groups();
  auto& o = options_;
  OXY_CHECK(o.total_steps > 0, InvalidArgument, "total_steps is ", o.total_steps, ", expected at least 1.");
  OXY_CHECK(o.pct_start >= 0 && o.pct_start <= 1, InvalidArgument, "pct_start is ", o.pct_start, ", expected 0 to 1.");
  if (o.max_lrs.empty()) o.max_lrs.assign(groups.size(), o.max_lr);
  OXY_CHECK(o.max_lrs.size() == groups.size(), InvalidArgument, "max_lrs has ", o.max_lrs.size(),
            " values, expected one for each of the ", groups.size(), " parameter groups.");
  for (const double peak : o.max_lrs) {
    OXY_CHECK(peak > 0, InvalidArgument, "max_lr is ", peak, ", expected above 0.");
    peak_.push_back(peak);
    initial_.push_back(peak / o.div_factor);
    floor_.push_back(initial_.back() / o.final_div_factor);
  }
  base_lrs_ = initial_;
  const auto total = static_cast<double>(o.total_steps);
  const double rise = o.pct_start * total - 1;
  if (o.three_phase) {
    phases_ = {
        {rise, 0, 1, true, false}, {2 * o.pct_start * total - 2, 1, 0, false, true}, {total - 1, 0, 2, true, true}};
  } else {
    phases_ = {{rise, 0, 1, true, false}, {total - 1, 1, 2, false, true}};
  }
  if (o.cycle_momentum) {
    for (auto& group : groups) {
      OXY_CHECK(set_inertia(group.options(), o.max_momentum), InvalidArgument,
                "the optimizer has neither betas nor a momentum to cycle. Set cycle_momentum = false.");
    }
  }
  start();
  set_momenta();
}

std::pair<const OneCycle::Phase*, double> OneCycle::where() const {
  const auto t = static_cast<double>(last_epoch_);
  double begin = 0;
  for (size_t i = 0; i < phases_.size(); ++i) {
    const auto& phase = phases_[i];
    if (t <= phase.end_step || i + 1 == phases_.size()) return {&phase, (t - begin) / (phase.end_step - begin)};
    begin = phase.end_step;
  }
  OXY_ASSERT(false, "a cycle has no phase.");
}

double OneCycle::anneal(double start, double end, double share) const {
  if (!options_.cosine) return (end - start) * share + start;
  return end + (start - end) / 2.0 * (std::cos(kPi * share) + 1);
}

double OneCycle::rate(size_t group, double) const {
  const auto [phase, share] = where();
  const double points[] = {initial_[group], peak_[group], floor_[group]};
  return anneal(points[phase->start_lr], points[phase->end_lr], share);
}

void OneCycle::set_momenta() {
  if (!options_.cycle_momentum) return;
  const auto [phase, share] = where();
  const auto inertia = [this](bool high) { return high ? options_.max_momentum : options_.base_momentum; };
  const double value = anneal(inertia(phase->start_high), inertia(phase->end_high), share);
  for (auto& group : optimizer_.param_groups()) set_inertia(group.options(), value);
}

void OneCycle::restart() {
  Schedule::restart();
  set_momenta();
}

void OneCycle::step() {
  OXY_CHECK(last_epoch_ < options_.total_steps, InvalidState, "OneCycle was asked for step ", last_epoch_ + 1,
            " of a cycle of ", options_.total_steps, ". Make total_steps the number of optimizer steps of the run.");
  Schedule::step();
  set_momenta();
}

ScheduleState OneCycle::state_dict() const {
  auto state = Schedule::state_dict();
  state["max_lrs"] = peak_;
  state["min_lrs"] = floor_;
  return state;
}

void OneCycle::load_state_dict(const ScheduleState& state) {
  const auto& peak = entry(state, "max_lrs", base_lrs_.size());
  const auto& floor = entry(state, "min_lrs", base_lrs_.size());
  Schedule::load_state_dict(state);
  peak_ = peak;
  floor_ = floor;
  initial_ = base_lrs_;
  set_momenta();
}

Plateau::Plateau(torch::optim::Optimizer& optimizer, PlateauOptions options)
    : Schedule(optimizer),
      options_(options),
      best_(options.minimize ? std::numeric_limits<double>::infinity() : -std::numeric_limits<double>::infinity()) {
  OXY_CHECK(options.factor < 1, InvalidArgument, "factor is ", options.factor, ", expected below 1.");
  last_epoch_ = 0;
}

bool Plateau::better(double metric) const {
  const double threshold = options_.threshold;
  if (options_.minimize) return metric < (options_.relative ? best_ * (1.0 - threshold) : best_ - threshold);
  return metric > (options_.relative ? best_ * (threshold + 1.0) : best_ + threshold);
}

void Plateau::step() {
  OXY_CHECK(false, InvalidState, "Plateau::step() needs the metric. Call step(metric), usually once an epoch.");
}

void Plateau::step(double metric) {
  ++last_epoch_;
  if (better(metric)) {
    best_ = metric;
    bad_epochs_ = 0;
  } else {
    ++bad_epochs_;
  }
  if (cooldown_left_ > 0) {
    --cooldown_left_;
    bad_epochs_ = 0;
  }
  if (bad_epochs_ > options_.patience) {
    apply();
    cooldown_left_ = options_.cooldown;
    bad_epochs_ = 0;
  }
}

double Plateau::rate(size_t, double current) const {
  const double reduced = std::max(current * options_.factor, options_.min_lr);
  return current - reduced > options_.eps ? reduced : current;
}

ScheduleState Plateau::state_dict() const {
  auto state = Schedule::state_dict();
  state["best"] = {best_};
  state["num_bad_epochs"] = {static_cast<double>(bad_epochs_)};
  state["cooldown_counter"] = {static_cast<double>(cooldown_left_)};
  return state;
}

void Plateau::load_state_dict(const ScheduleState& state) {
  const double best = entry(state, "best", 1)[0];
  const double bad = entry(state, "num_bad_epochs", 1)[0];
  const double cooldown = entry(state, "cooldown_counter", 1)[0];
  Schedule::load_state_dict(state);
  best_ = best;
  bad_epochs_ = static_cast<int64_t>(bad);
  cooldown_left_ = static_cast<int64_t>(cooldown);
}

}  // namespace oxytorch::optim
