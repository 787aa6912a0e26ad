/// Learning-rate schedules for any `torch::optim::Optimizer`, equal to those of `torch.optim.lr_scheduler`.
///
/// A schedule is made after the optimizer, sets the first learning rates at once and is stepped after each
/// `optimizer.step()`. It borrows the optimizer, which must outlive it. The arithmetic is torch's own, recursion
/// included, in double: the values agree with Python's to one unit in the last place. Not for use from several threads.
///
/// The number is the host's. Where an oxytorch::optim optimizer keeps its rates as tensors too
/// (TailOptimizer::use_lr_tensors), a schedule writes them in place, without a host read, so a captured graph follows.
///
/// Errors: InvalidArgument for a bad setting, InvalidState for a step past the end or after a group was added.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::optim {

/// What a schedule saves: a name and one value a parameter group, or a single value.
using ScheduleState = std::map<std::string, std::vector<double>>;

/// What all schedules share. The learning rates at construction are the base rates.
class OXY_API Schedule {
 public:
  virtual ~Schedule();
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  /// Sets the learning rates of the next step. Call once after each step of the optimizer.
  virtual void step();

  /// The learning rates set last, one a group.
  [[nodiscard]] std::vector<double> last_lr() const;
  /// Steps taken; 0 after construction.
  [[nodiscard]] int64_t last_epoch() const noexcept { return last_epoch_; }

  /// The whole state, hyperparameters excluded. Loading it also sets the optimizer's learning rates (and momenta).
  [[nodiscard]] virtual ScheduleState state_dict() const;
  /// Throws InvalidArgument where a value is missing or the number of groups differs.
  virtual void load_state_dict(const ScheduleState& state);

 protected:
  explicit Schedule(torch::optim::Optimizer& optimizer);
  /// Learning rate of group `group` at `last_epoch_`, given its current rate.
  [[nodiscard]] virtual double rate(size_t group, double current) const = 0;
  /// Learning rate of group `group` where another schedule hands over to this one.
  [[nodiscard]] virtual double first_rate(size_t group) const;
  /// Called once by each constructor: last_epoch_ becomes 0 and the first rates are set.
  void start();
  /// Begins anew from the base rates, as part of a Sequential.
  virtual void restart();
  void apply();
  /// Sets the rate of each group, and its tensor where the optimizer keeps one.
  void set_rates(const std::function<double(size_t group, double current)>& rate);
  friend class Sequential;

  torch::optim::Optimizer& optimizer_;
  std::vector<double> base_lrs_;
  int64_t last_epoch_ = -1;
};

/// `lr *= gamma` every `step_size` steps: torch's StepLR.
class OXY_API Step : public Schedule {
 public:
  Step(torch::optim::Optimizer& optimizer, int64_t step_size, double gamma = 0.1);

 protected:
  [[nodiscard]] double rate(size_t group, double current) const override;

 private:
  int64_t step_size_;
  double gamma_;
};

/// From `start_factor` to `end_factor` times the base rate over `total_iters` steps: torch's LinearLR.
class OXY_API Linear : public Schedule {
 public:
  explicit Linear(torch::optim::Optimizer& optimizer, double start_factor = 1.0 / 3, double end_factor = 1.0,
                  int64_t total_iters = 5);

 protected:
  [[nodiscard]] double rate(size_t group, double current) const override;

 private:
  double start_factor_;
  double end_factor_;
  int64_t total_iters_;
};

/// To zero as `(1 - t / total_iters) ** power`: torch's PolynomialLR.
class OXY_API Polynomial : public Schedule {
 public:
  explicit Polynomial(torch::optim::Optimizer& optimizer, int64_t total_iters = 5, double power = 1.0);

 protected:
  [[nodiscard]] double rate(size_t group, double current) const override;

 private:
  int64_t total_iters_;
  double power_;
};

/// Half a cosine from the base rate to `eta_min` in `t_max` steps, and back: torch's CosineAnnealingLR.
class OXY_API CosineAnnealing : public Schedule {
 public:
  CosineAnnealing(torch::optim::Optimizer& optimizer, int64_t t_max, double eta_min = 0.0);

 protected:
  [[nodiscard]] double rate(size_t group, double current) const override;
  [[nodiscard]] double first_rate(size_t group) const override;

 private:
  int64_t t_max_;
  double eta_min_;
};

/// Linear warm-up, then a cosine to `eta_min` at `total_steps`. The same as torch's
/// `SequentialLR([LinearLR(start_factor, 1, warmup_steps), CosineAnnealingLR(total_steps - warmup_steps, eta_min)],
/// milestones=[warmup_steps])`.
class OXY_API WarmupCosine : public Schedule {
 public:
  WarmupCosine(torch::optim::Optimizer& optimizer, int64_t warmup_steps, int64_t total_steps, double eta_min = 0.0,
               double start_factor = 1.0 / 3);

 protected:
  [[nodiscard]] double rate(size_t group, double current) const override;

 private:
  int64_t warmup_steps_;
  int64_t cosine_steps_;
  double eta_min_;
  double start_factor_;
};

/// One schedule after another, such as a warm-up and any other: torch's SequentialLR.
///
/// ```cpp
/// Sequential schedule(optimizer,
///                     {[](auto& o) { return std::make_unique<Linear>(o, 0.01, 1.0, 100); },
///                      [](auto& o) { return std::make_unique<Polynomial>(o, 900, 2.0); }},
///                     /*milestones=*/{100});
/// ```
class OXY_API Sequential : public Schedule {
 public:
  using Make = std::function<std::unique_ptr<Schedule>(torch::optim::Optimizer&)>;
  /// `parts` make the schedules, each from the optimizer's present rates; part i + 1 takes over at step
  /// `milestones[i]`, which increase. A Plateau, which needs a metric, is refused.
  Sequential(torch::optim::Optimizer& optimizer, const std::vector<Make>& parts, std::vector<int64_t> milestones);
  void step() override;
  /// That of each part follows with its place before the name, as in "1.last_epoch".
  [[nodiscard]] ScheduleState state_dict() const override;
  void load_state_dict(const ScheduleState& state) override;

 protected:
  [[nodiscard]] double rate(size_t group, double current) const override;

 private:
  std::vector<std::unique_ptr<Schedule>> parts_;
  std::vector<int64_t> milestones_;
};

/// Settings of OneCycle, named and defaulted as in torch's OneCycleLR.
struct OneCycleOptions {
  double max_lr = 0;        ///< peak rate of every group; required unless max_lrs is given
  int64_t total_steps = 0;  ///< length of the cycle in steps; required
  double pct_start = 0.3;   ///< share of the cycle that rises
  bool cosine = true;       ///< false: straight lines
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25.0;
  double final_div_factor = 1e4;
  bool three_phase = false;
  std::vector<double> max_lrs = {};  ///< peak rate by group, instead of max_lr
};

/// torch's OneCycleLR; momentum (SGD, RMSprop) or beta1 (Adam, AdamW) runs opposite to the rate where
/// `cycle_momentum` is set. Its step number total_steps throws InvalidState after the last one, as torch does.
class OXY_API OneCycle : public Schedule {
 public:
  OneCycle(torch::optim::Optimizer& optimizer, OneCycleOptions options);
  void step() override;
  [[nodiscard]] ScheduleState state_dict() const override;
  void load_state_dict(const ScheduleState& state) override;

 protected:
  [[nodiscard]] double rate(size_t group, double current) const override;
  void restart() override;

 private:
  struct Phase {
    double end_step;
    int start_lr, end_lr;
    bool start_high, end_high;
  };
  /// Which phase the current step is in, and how far through it.
  [[nodiscard]] std::pair<const Phase*, double> where() const;
  [[nodiscard]] double anneal(double start, double end, double share) const;
  void set_momenta();

  OneCycleOptions options_;
  std::vector<Phase> phases_;
  std::vector<double> initial_, peak_, floor_;
};

/// Settings of Plateau, named and defaulted as in torch's ReduceLROnPlateau.
struct PlateauOptions {
  bool minimize = true;  ///< false: the metric is to grow
  double factor = 0.1;
  int64_t patience = 10;
  double threshold = 1e-4;
  bool relative = true;  ///< false: threshold is absolute
  int64_t cooldown = 0;
  double min_lr = 0;
  double eps = 1e-8;
};

/// Cuts the rate when a metric stops improving: torch's ReduceLROnPlateau. The metric is a number on the host, so this
/// schedule belongs where one is read anyway: after an evaluation, not on the step path.
class OXY_API Plateau : public Schedule {
 public:
  explicit Plateau(torch::optim::Optimizer& optimizer, PlateauOptions options = {});
  /// Reports the metric, usually once an epoch. A NaN counts as no improvement.
  void step(double metric);
  /// Throws InvalidState: a plateau needs a metric.
  void step() override;
  [[nodiscard]] ScheduleState state_dict() const override;
  void load_state_dict(const ScheduleState& state) override;
  [[nodiscard]] double best() const noexcept { return best_; }
  [[nodiscard]] int64_t bad_epochs() const noexcept { return bad_epochs_; }

 protected:
  [[nodiscard]] double rate(size_t group, double current) const override;

 private:
  [[nodiscard]] bool better(double metric) const;
  PlateauOptions options_;
  double best_;
  int64_t bad_epochs_ = 0;
  int64_t cooldown_left_ = 0;
};

}  // namespace oxytorch::optim
