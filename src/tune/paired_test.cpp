#include "oxytorch/tune/paired_test.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/random.h"
#include "tune/sign_test.h"
#include "tune/words.h"

namespace oxytorch::tune {
namespace {

constexpr std::uint64_t kOrderStream = 1;
/// Of the error allowed, what the first interim analysis may spend: with that of a trial, 2 of the 512 signs of nine
/// pairs. More would take no other outcome there, and the later interim analyses, to which a disturbed pair leads, need
/// the rest: each half of what is left, as most paired tests have time for one of them.
constexpr double kFirstShare = 0.46;
constexpr double kAnalysisGrowth = 1.5;
/// A challenger is much slower where each of its first three pairs took over this factor, or its first two over that,
/// or where the first over the last one has spent half of the budget.
constexpr double kMuchSlower = 1.1;
constexpr double kFarSlower = 1.25;
constexpr double kHopelesslySlower = 4;

void check(const PairedTestOptions& options) {
  OXY_CHECK(options.threshold > 0 && std::isfinite(options.threshold), InvalidArgument,
            "the threshold of a paired test must be a positive ratio, for example 1.01, not ", options.threshold, '.');
  OXY_CHECK(options.confidence > 0 && options.confidence < 1, InvalidArgument,
            "the confidence of a paired test must be between 0 and 1, for example 0.95, not ", options.confidence, '.');
  OXY_CHECK(options.false_accept > 0 && options.false_accept < 1, InvalidArgument,
            "false_accept must be between 0 and 1, for example 0.005, not ", options.false_accept, '.');
  OXY_CHECK(options.least_pairs >= 1 && options.least_pairs <= options.most_pairs && options.most_pairs <= 1000,
            InvalidArgument, "a paired test needs 1 <= least_pairs <= most_pairs <= 1000, not ", options.least_pairs,
            " and ", options.most_pairs, '.');
  OXY_CHECK(options.worth > 0 && std::isfinite(options.worth), InvalidArgument,
            "what a paired test is worth must be a positive ratio, for example 1.04, not ", options.worth, '.');
  for (const double seconds : {options.budget_seconds, options.most_seconds}) {
    OXY_CHECK(seconds >= 0, InvalidArgument, "the budget of a paired test must be at least 0 seconds, not ", seconds,
              '.');
  }
  OXY_CHECK(options.repay_steps >= 0 && std::isfinite(options.repay_steps), InvalidArgument,
            "the steps that repay a paired test must be at least 0, not ", options.repay_steps, '.');
}

/// Pairs after which the paired test may accept. The first is no earlier than the sign-flip test can reach its error.
std::vector<int> analyses_of(const PairedTestOptions& options) {
  const int reach = static_cast<int>(std::ceil(-std::log2(kFirstShare * options.false_accept)));
  std::vector<int> analyses;
  for (int analysis = std::max(options.least_pairs, reach); analysis < options.most_pairs;
       analysis = static_cast<int>(std::ceil(analysis * kAnalysisGrowth))) {
    analyses.push_back(analysis);
  }
  analyses.push_back(options.most_pairs);
  return analyses;
}

/// Upper quantile of the standard normal distribution for small tails; within 4.5e-4.
/// M. Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions", 26.2.23.
double normal_upper(double tail) {
  const double t = std::sqrt(-2 * std::log(tail));
  return t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
}

}  // namespace

struct PairedTest::Impl {
  PairedTestOptions options;
  std::vector<int> analyses;
  std::vector<double> incumbent;
  std::vector<double> challenger;
  std::vector<double> margins;  ///< log of each pair's speedup over the threshold
  double elapsed = 0;
  Decision decision = Decision::Open;
  double p_value = 1;
  std::string reason;

  explicit Impl(const PairedTestOptions& given) : options(given) {
    check(options);
    analyses = analyses_of(options);
  }

  [[nodiscard]] std::size_t pairs() const { return std::min(incumbent.size(), challenger.size()); }

  [[nodiscard]] Side turn() const {
    const bool swapped = (philox(options.seed, kOrderStream, pairs()).word[0] & 1U) != 0;
    const Side first = swapped ? Side::Challenger : Side::Incumbent;
    if (incumbent.size() == challenger.size()) return first;
    return swapped ? Side::Incumbent : Side::Challenger;
  }

  [[nodiscard]] double error_at(std::size_t analysis) const {
    if (analyses.size() == 1) return options.false_accept;
    if (analysis == 0) return kFirstShare * options.false_accept;
    const std::size_t halvings = std::min(analysis, analyses.size() - 2);
    return std::ldexp((1 - kFirstShare) * options.false_accept, -static_cast<int>(halvings));
  }

  /// Where no interim analysis can follow, for want of time, it has the error of those that are not to come. Time that
  /// depends on the figures would spend it twice.
  [[nodiscard]] double error_left_at(std::size_t analysis) const {
    double error = options.false_accept;
    for (std::size_t before = 0; before < analysis; ++before) error -= error_at(before);
    return error;
  }

  [[nodiscard]] Interval interval() const {
    const std::size_t n = pairs();
    if (n == 0) return {0, 0, 0, options.confidence};
    return paired_ratio_interval(std::span(incumbent).first(n), std::span(challenger).first(n),
                                 {options.confidence, 2000, options.seed});
  }

  void end(Decision how, std::string why) {
    decision = how;
    reason = std::move(why);
  }

  /// "1.534x (1.490 to 1.581) over 9 pairs, p = 0.002".
  [[nodiscard]] std::string figures(const Interval& speedup) const {
    std::string text = interval_text(speedup);
    text.append(" over ").append(std::to_string(pairs())).append(pairs() == 1 ? " pair" : " pairs");
    if (p_value < 1) text.append(", p = ").append(monitor::format_number(p_value, 2));
    return text;
  }

  /// True where even good luck in the pairs left would not carry the test at the last interim analysis: the margin is
  /// put at the upper end of what these pairs leave open, and the pairs to come are let deviate upwards once more.
  [[nodiscard]] bool hopeless() const {
    const auto n = static_cast<double>(margins.size());
    if (margins.size() == 1) {
      const bool takes_the_budget = options.budget_seconds > 0 && 2 * elapsed >= options.budget_seconds;
      return takes_the_budget && margins.front() < -std::log(kHopelesslySlower);
    }
    if (margins.size() < 4) {
      const double slower = margins.size() == 2 ? kFarSlower : kMuchSlower;
      return *std::max_element(margins.begin(), margins.end()) < -std::log(slower);
    }
    if (margins.size() < static_cast<std::size_t>(options.patience)) return false;
    const double center = std::max(center_of(margins), median(margins));
    // 1.4826 makes it the standard deviation of normal values; the rest corrects for few of them.
    const double spread = std::max(1.4826 * median_absolute_deviation(margins) * n / (n - 0.8), 1e-6);
    const double last = options.most_pairs;
    const double optimistic = center + 2 * spread / std::sqrt(n);
    if (optimistic < std::log(options.worth / options.threshold)) return true;
    const double reached = (n * center + (last - n) * optimistic) / (spread * std::sqrt(last));
    return reached + std::sqrt((last - n) / last) < normal_upper(error_at(analyses.size() - 1));
  }

  /// Whether the pairs before the next interim analysis cost less than the challenger, as it looks now, would save.
  [[nodiscard]] bool repays(std::size_t next_analysis) const {
    const std::size_t n = pairs();
    const double one = median(std::span(incumbent).first(n));
    const double other = median(std::span(challenger).first(n));
    const auto more = static_cast<double>(analyses[next_analysis]) - static_cast<double>(n);
    return more * (one + other) < options.repay_steps * (one - other);
  }

  void judge() {
    const auto n = static_cast<int>(pairs());
    const auto analysis = std::find(analyses.begin(), analyses.end(), n);
    if (analysis != analyses.end()) {
      p_value = sign_flip_p_value(margins);
      const Interval speedup = interval();
      const bool out_of_time = options.budget_seconds > 0 && elapsed >= options.budget_seconds;
      const auto index = static_cast<std::size_t>(analysis - analyses.begin());
      const bool fixed_time = options.repay_steps == 0;
      if (speedup.low > options.threshold &&
          p_value <= (out_of_time && fixed_time ? error_left_at(index) : error_at(index))) {
        return end(Decision::Accept, figures(speedup) + ": faster.");
      }
      if (n == analyses.back() || (out_of_time && !repays(index + 1))) {
        std::string why = figures(speedup) + ": not shown to be faster than " + ratio_text(options.threshold);
        return end(Decision::Reject, why + (n == analyses.back() ? "." : " within the time given to it."));
      }
    }
    if (options.most_seconds > 0 && elapsed >= options.most_seconds) {
      return end(Decision::Reject, figures(interval()) + ": stopped, as tuning has taken what it may of this run.");
    }
    if (hopeless()) {
      const Interval speedup = interval();
      std::string why = figures(speedup);
      const double wanted = std::max(options.worth, options.threshold);
      why += speedup.high < 1 ? ": slower." : ": not going to be faster than " + ratio_text(wanted) + ".";
      end(Decision::Reject, std::move(why));
    }
  }
};

PairedTestOptions PairedTestOptions::conclusion(std::uint64_t seed) {
  return {.threshold = 1, .false_accept = 0.04, .least_pairs = 6, .most_pairs = 20, .seed = seed};
}

PairedTestOptions PairedTestOptions::agreement() {
  return {.threshold = 1, .false_accept = 0.3, .least_pairs = 5, .patience = 8};
}

PairedTestOptions PairedTestOptions::member(std::uint64_t seed) {
  return {.threshold = 1, .false_accept = 0.04, .least_pairs = 5, .most_pairs = 5, .seed = seed};
}

PairedTestOptions PairedTestOptions::canary(std::uint64_t seed) { return {.most_pairs = 9, .seed = seed}; }

void PairedTestOptions::loosen(const PairedTestOptions& other) {
  threshold = std::min(threshold, other.threshold);
  false_accept = std::max(false_accept, other.false_accept);
  least_pairs = std::min(least_pairs, other.least_pairs);
  patience = std::max(patience, other.patience);
}

PairedTest::PairedTest(PairedTestOptions options) : impl_(std::make_unique<Impl>(options)) {}
PairedTest::~PairedTest() = default;
PairedTest::PairedTest(PairedTest&&) noexcept = default;
PairedTest& PairedTest::operator=(PairedTest&&) noexcept = default;

std::optional<Side> PairedTest::next() const {
  if (impl_->decision != Decision::Open) return std::nullopt;
  return impl_->turn();
}

void PairedTest::record(Side side, double seconds) {
  OXY_CHECK(impl_->decision == Decision::Open, InvalidArgument, "the paired test has ended (", impl_->reason,
            "); begin another one.");
  const char* names[] = {"incumbent", "challenger"};
  OXY_CHECK(side == impl_->turn(), InvalidArgument, "a time of the ", names[side == Side::Challenger],
            " was recorded, but next() named the ", names[side == Side::Incumbent], '.');
  OXY_CHECK(seconds > 0 && std::isfinite(seconds), InvalidArgument, "the time of a step must be positive, not ",
            seconds, " s.");
  (side == Side::Incumbent ? impl_->incumbent : impl_->challenger).push_back(seconds);
  impl_->elapsed += seconds;
  if (impl_->incumbent.size() != impl_->challenger.size()) return;
  impl_->margins.push_back(std::log(impl_->incumbent.back() / impl_->challenger.back() / impl_->options.threshold));
  impl_->judge();
}

void PairedTest::abandon(std::string reason) {
  if (impl_->decision == Decision::Open) impl_->end(Decision::Reject, std::move(reason));
}

PairedTestResult PairedTest::result() const {
  PairedTestResult result;
  result.decision = impl_->decision;
  result.speedup = impl_->interval();
  result.pairs = static_cast<int>(impl_->pairs());
  if (result.pairs > 0) {
    result.incumbent = median(std::span(impl_->incumbent).first(impl_->pairs()));
    result.challenger = median(std::span(impl_->challenger).first(impl_->pairs()));
  }
  result.p_value = impl_->p_value;
  result.reason = impl_->decision == Decision::Open ? "still measuring" : impl_->reason;
  return result;
}

}  // namespace oxytorch::tune
