#include "oxytorch/tune/guard.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "oxytorch/error.h"
#include "oxytorch/random.h"
#include "tune/words.h"

namespace oxytorch::tune {
namespace {

/// Probability, over all checks of a run, that changes which are worth nothing and cost nothing are taken back. The
/// j-th check may spend 1 / (j (j + 1)) of it.
constexpr double kFalseRollBack = 0.006;
constexpr int kMostDoublings = 4;
/// A check that sees a loss goes on up to so many times its pairs, so that one bad moment does not decide.
constexpr int kLongestCheck = 4;
constexpr double kGapGrowth = 1.5;   // of the mean gap between two comparisons
constexpr double kComparing = 0.01;  // of the run, for comparisons that take long
constexpr double kComparingAtFirst = 0.1;
constexpr double kLatest = 0.1;  // weight of the last step in the mean of their times
/// 1 - p of a softmax in float32 is off by 3e-8, which is 4 % of a loss of 7e-7 and 20 % of its gradients; in 16 bits a
/// loss of 2e-6 may be 4e-5. So rounding sets one batch's figures apart once a model has learnt it by heart.
constexpr double kSmallLoss = 1e-2;    // below it, of the largest loss compared and at least of 1, a distance is of it
constexpr double kRoundedLoss = 1e-4;  // below it, of the largest loss compared, gradients say nothing

void check(const GuardOptions& options) {
  OXY_CHECK(options.first_check >= 0 && options.check_every >= 1, InvalidArgument,
            "a guard needs first_check >= 0 and check_every >= 1, not ", options.first_check, " and ",
            options.check_every, '.');
  OXY_CHECK(options.pairs >= 1 && options.pairs <= 250, InvalidArgument,
            "the pairs of a check must be from 1 to 250, not ", options.pairs, '.');
  OXY_CHECK(options.threshold > 0 && std::isfinite(options.threshold), InvalidArgument,
            "the threshold of a guard must be a positive ratio, for example 0.99, not ", options.threshold, '.');
  OXY_CHECK(options.compare_every >= 1, InvalidArgument, "compare_every must be at least 1, not ",
            options.compare_every, '.');
  for (const double tolerance : {options.loss_tolerance, options.gradient_tolerance, options.factor_tolerance}) {
    OXY_CHECK(!std::isnan(tolerance), InvalidArgument, "a tolerance of a guard must not be NaN.");
  }
}

}  // namespace

void GuardOptions::allow(Kind kind) {
  const bool exact = kind == Kind::Exact, reduced = kind >= Kind::Precision;
  loss_tolerance = exact ? 0 : reduced ? 0.05 : 1e-3;
  gradient_tolerance = exact ? 0 : reduced ? 0.5 : 0.1;
  factor_tolerance = exact ? 0 : reduced ? 0.1 : 0.005;
}

struct Guard::Impl {
  GuardOptions options;
  std::int64_t step = 0;
  std::int64_t next_check;
  std::int64_t next_comparison = 0;
  double gap;               ///< the mean of the next one between comparisons
  double largest_loss = 0;  ///< that was compared
  int checks = 0;
  std::uint64_t comparisons = 0;
  bool compare = false;      ///< the losses are to be compared before anything else
  bool was_due = false;      ///< by the schedule
  double step_seconds = 0;   ///< with the changes, a running mean
  double compare_every = 0;  ///< the option, or more where comparing takes long
  bool rolled_back = false;
  bool announce = false;                  ///< RollBack is the next answer
  std::optional<PairedTest> paired_test;  ///< the check under way: is a step without the changes faster?
  std::optional<Action> pending;
  std::string reason;

  explicit Impl(const GuardOptions& given)
      : options(given), next_check(given.first_check), gap(static_cast<double>(given.first_check) / 2) {
    check(options);
    compare_every = static_cast<double>(options.compare_every);
    draw_comparison(0, 2);
  }

  /// The next comparison is `least` to `most` times the mean gap from here.
  void draw_comparison(double least, double most) {
    const double share = least + (most - least) * uniform_float(philox(options.seed, 1, comparisons++).word[0]);
    next_comparison = step + std::max<std::int64_t>(1, std::llround(share * gap));
    gap = std::min(std::max(gap, 1.0) * kGapGrowth, compare_every);
  }

  void begin_check() {
    ++checks;
    PairedTestOptions paired_test_options;
    paired_test_options.threshold = 1 / options.threshold;
    paired_test_options.false_accept = kFalseRollBack / (static_cast<double>(checks) * (checks + 1));
    paired_test_options.least_pairs = options.pairs;
    paired_test_options.most_pairs = options.pairs * kLongestCheck;
    paired_test_options.seed = philox(options.seed, 0, static_cast<std::uint64_t>(checks)).word[0];
    paired_test.emplace(paired_test_options);
  }

  void end_check() {
    const PairedTestResult result = paired_test->result();
    paired_test.reset();
    const Interval ratio = result.speedup;  // with over without
    const Interval speedup{1 / ratio.high, 1 / ratio.mid, 1 / ratio.low, ratio.confidence};
    const std::string figures =
        interval_text(speedup) + " over " + std::to_string(result.pairs) + " pairs at step " + std::to_string(step);
    if (result.decision == Decision::Accept) {
      return roll_back("The changes stopped paying: " + figures + ", under " + ratio_text(options.threshold) + ".");
    }
    reason = "The changes still pay: " + figures + ".";
    if (speedup.high < 1) reason = "The changes are not shown to cost time: " + figures + ".";
    next_check = step + (options.check_every << std::min(checks - 1, kMostDoublings));
  }

  void roll_back(std::string why) {
    reason = std::move(why);
    rolled_back = announce = true;
    compare = false;
    paired_test.reset();
  }

  Action decide(bool timed) {
    if (announce) {
      announce = false;
      return Action::RollBack;
    }
    if (rolled_back) return Action::Run;
    if (!paired_test && step >= next_comparison && options.loss_tolerance >= 0) {
      compare = was_due = true;
    }
    if (compare) return Action::CompareLosses;
    if (!timed) paired_test.reset();
    if (timed && !paired_test && step >= next_check) begin_check();
    if (!paired_test) return Action::Run;
    return paired_test->next() == Side::Challenger ? Action::RunWithout : Action::Run;
  }
};

Guard::Guard(GuardOptions options) : impl_(std::make_unique<Impl>(options)) {}
Guard::~Guard() = default;
Guard::Guard(Guard&&) noexcept = default;
Guard& Guard::operator=(Guard&&) noexcept = default;

Action Guard::before(bool timed) {
  impl_->pending = impl_->decide(timed);
  return *impl_->pending;
}

void Guard::after(double seconds) {
  OXY_CHECK(impl_->pending, InvalidState, "after() without before(); ask before each step how to take it.");
  OXY_CHECK(*impl_->pending != Action::CompareLosses, InvalidState,
            "the losses are to be compared; call compared() and ask before() again.");
  OXY_CHECK(seconds > 0 && std::isfinite(seconds), InvalidArgument, "the time of a step must be positive, not ",
            seconds, " s.");
  const Action taken = *std::exchange(impl_->pending, std::nullopt);
  ++impl_->step;
  double& mean = impl_->step_seconds;
  if (taken == Action::Run) mean = mean > 0 ? mean + kLatest * (seconds - mean) : seconds;
  if (!impl_->paired_test) return;
  impl_->paired_test->record(taken == Action::RunWithout ? Side::Challenger : Side::Incumbent, seconds);
  if (!impl_->paired_test->next()) impl_->end_check();
}

bool Guard::doubts(const Apart& gradients) const {
  const auto& options = impl_->options;
  return options.gradient_tolerance > 0 && std::isfinite(gradients.gradient) &&
         (gradients.gradient > options.gradient_tolerance || gradients.factor > options.factor_tolerance);
}

void Guard::compared(double with, double without, const Apart& gradients, const Apart& usual, double seconds) {
  OXY_CHECK(impl_->compare, InvalidState, "no losses are to be compared; before() says when.");
  impl_->compare = false;
  impl_->pending.reset();
  if (impl_->step_seconds > 0) {
    const double steps = seconds / impl_->step_seconds;
    impl_->compare_every = std::max(static_cast<double>(impl_->options.compare_every), steps / kComparing);
    impl_->gap = std::max(impl_->gap, steps / kComparingAtFirst);
  }
  if (std::exchange(impl_->was_due, false)) impl_->draw_comparison(0.5, 1.5);
  if (!std::isfinite(without)) {
    impl_->reason = "The loss is not finite without the changes either: it is the run's own.";
    return;
  }
  const auto& options = impl_->options;
  const std::string at = " at step " + std::to_string(impl_->step);
  const auto refuse = [&](const std::string& what, double tolerance) {
    impl_->roll_back(what + ", further apart than " + monitor::format_number(std::max(tolerance, 0.0)) + " allows.");
  };
  double& largest = impl_->largest_loss;
  largest = std::max(largest, std::abs(without));
  const double scale = std::max(std::abs(without), kSmallLoss * std::max(largest, 1.0));
  const double distance = with == without ? 0 : std::abs(with - without) / scale;
  if (!(distance <= std::max(options.loss_tolerance, 0.0))) {
    return refuse("The losses of one batch" + at + " are " + monitor::format_number(with, 9) +
                      " with the changes and " + monitor::format_number(without, 9) + " without",
                  options.loss_tolerance);
  }
  if (std::abs(without) < kRoundedLoss * largest && options.gradient_tolerance > 0) return;
  const auto allowed = [](double tolerance, double noise) {
    return std::max({tolerance, kOfUsual * (std::isfinite(noise) ? noise : 0), 0.0});
  };
  const double most = allowed(options.gradient_tolerance, usual.gradient);
  if (!(gradients.gradient <= most)) {
    return refuse("A gradient of one batch" + at + " is off by " + monitor::format_number(gradients.gradient) +
                      " of its size with the changes",
                  most);
  }
  const double most_factor = allowed(options.factor_tolerance, usual.factor);
  if (!(gradients.factor <= most_factor)) {
    refuse("All gradients of one batch" + at + " are larger or smaller by " + monitor::format_number(gradients.factor) +
               " with the changes",
           most_factor);
  }
}

void Guard::suspicious() {
  if (!impl_->rolled_back) impl_->compare = true;
}

bool Guard::is_timing() const noexcept { return impl_->paired_test.has_value(); }
const std::string& Guard::reason() const noexcept { return impl_->reason; }
std::int64_t Guard::step() const noexcept { return impl_->step; }

}  // namespace oxytorch::tune
