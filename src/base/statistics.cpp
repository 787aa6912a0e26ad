#include "oxytorch/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "oxytorch/error.h"
#include "oxytorch/random.h"

namespace oxytorch {
namespace {

void check(std::span<const double> values, const char* what) {
  OXY_CHECK(!values.empty(), InvalidArgument, what, " of no values; give at least one.");
  for (std::size_t i = 0; i < values.size(); ++i) {
    OXY_CHECK(!std::isnan(values[i]), InvalidArgument, what, ": value ", i, " of ", values.size(), " is NaN.");
  }
}

/// A. Neumaier's compensated sum, 1974.
double sum(std::span<const double> values) {
  double total = 0;
  double lost = 0;
  for (const double value : values) {
    const double next = total + value;
    lost += std::abs(total) >= std::abs(value) ? (total - next) + value : (value - next) + total;
    total = next;
  }
  return std::isfinite(total) ? total + lost : total;
}

/// Reorders `values`.
double quantile_in_place(std::vector<double>& values, double q) {
  const double place = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const double share = place - static_cast<double>(below);
  const auto low = values.begin() + static_cast<std::ptrdiff_t>(below);
  std::nth_element(values.begin(), low, values.end());
  if (share == 0 || below + 1 == values.size()) return *low;
  const double high = *std::min_element(low + 1, values.end());
  return *low == high ? high : *low + (high - *low) * share;  // equal infinities would give NaN
}

/// Reorders `values`; the mean of the two in the middle, as numpy's median.
double median_in_place(std::vector<double>& values) {
  const std::size_t half = values.size() / 2;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(half);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  const double low = *std::max_element(values.begin(), middle);
  return low == *middle ? low : std::midpoint(low, *middle);
}

void check_confidence(double confidence) {
  OXY_CHECK(confidence > 0 && confidence < 1, InvalidArgument,
            "confidence must be between 0 and 1, for example 0.95, not ", confidence, ".");
}

void check(const BootstrapOptions& options) {
  check_confidence(options.confidence);
  OXY_CHECK(options.resamples >= 1 && options.resamples <= 100'000'000, InvalidArgument,
            "resamples must be from 1 to 100000000, not ", options.resamples, ".");
}

/// Regularised incomplete beta function for x below its mean: the continued fraction of DLMF 8.17.22, by W. J. Lentz's
/// method.
double incomplete_beta(double a, double b, double x) {
  const double front =
      std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log1p(-x)) / a;
  constexpr double kTiny = 1e-300;
  const auto away_from_zero = [](double value) { return std::abs(value) < kTiny ? kTiny : value; };
  double c = 1;
  double d = 1 / away_from_zero(1 - (a + b) * x / (a + 1));
  double fraction = d;
  for (int m = 1; m < 10'000; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    double change = 1;
    for (const double term : {even, odd}) {
      d = 1 / away_from_zero(1 + term * d);
      c = away_from_zero(1 + term / c);
      change = c * d;
      fraction *= change;
    }
    if (std::abs(change - 1) < 1e-15) break;
  }
  return front * fraction;
}

/// Probability that Student's t is above `t` >= 0.
double student_t_tail(double t, double degrees) {
  const double square = t * t;
  const double x = degrees / (degrees + square);
  // The fraction converges fast below the mean; above it the complement does.
  const bool below = x < (degrees / 2 + 1) / (degrees / 2 + 2.5);
  const double both = below ? incomplete_beta(degrees / 2, 0.5, x)
                            : 1 - (square == 0 ? 0 : incomplete_beta(0.5, degrees / 2, square / (degrees + square)));
  return both / 2;
}

template <class F>
Interval bootstrap(std::span<const double> values, double mid, const BootstrapOptions& options, F statistic) {
  std::vector<double> estimates(static_cast<std::size_t>(options.resamples));
  std::vector<double> sample(values.size());
  PhiloxStream random(options.seed);
  for (double& estimate : estimates) {
    for (double& value : sample) value = values[random.below(values.size())];
    estimate = statistic(sample);
    OXY_CHECK(!std::isnan(estimate), InvalidArgument, "the statistic of a resample is NaN.");
  }
  const double tail = (1 - options.confidence) / 2;
  return {quantile_in_place(estimates, tail), mid, quantile_in_place(estimates, 1 - tail), options.confidence};
}

}  // namespace

double mean(std::span<const double> values) {
  check(values, "mean");
  return sum(values) / static_cast<double>(values.size());
}

double stddev(std::span<const double> values) {
  check(values, "stddev");
  if (values.size() == 1) return 0;
  const double center = mean(values);
  std::vector<double> squares(values.size());
  std::transform(values.begin(), values.end(), squares.begin(),
                 [center](double value) { return (value - center) * (value - center); });
  return std::sqrt(sum(squares) / static_cast<double>(values.size() - 1));
}

double median(std::span<const double> values) {
  check(values, "median");
  std::vector<double> copy(values.begin(), values.end());
  return median_in_place(copy);
}

double quantile(std::span<const double> values, double q) {
  check(values, "quantile");
  OXY_CHECK(q >= 0 && q <= 1, InvalidArgument, "q must be from 0 to 1, not ", q, ".");
  std::vector<double> copy(values.begin(), values.end());
  return quantile_in_place(copy, q);
}

double median_absolute_deviation(std::span<const double> values) {
  check(values, "median_absolute_deviation");
  std::vector<double> copy(values.begin(), values.end());
  const double center = median_in_place(copy);
  for (double& value : copy) value = value == center ? 0 : std::abs(value - center);
  return median_in_place(copy);
}

Interval bootstrap_interval(std::span<const double> values, const Statistic& statistic,
                            const BootstrapOptions& options) {
  check(values, "bootstrap_interval");
  check(options);
  OXY_CHECK(statistic != nullptr, InvalidArgument, "bootstrap_interval needs a statistic.");
  return bootstrap(values, statistic(values), options,
                   [&](const std::vector<double>& sample) { return statistic(sample); });
}

Interval median_interval(std::span<const double> values, const BootstrapOptions& options) {
  check(values, "median_interval");
  check(options);
  return bootstrap(values, median(values), options,
                   [](std::vector<double>& sample) { return median_in_place(sample); });
}

Interval paired_ratio_interval(std::span<const double> numerators, std::span<const double> denominators,
                               const BootstrapOptions& options) {
  OXY_CHECK(numerators.size() == denominators.size(), InvalidArgument,
            "paired_ratio_interval needs one numerator and one denominator a round, not ", numerators.size(), " and ",
            denominators.size(), ".");
  check(numerators, "paired_ratio_interval (numerators)");
  check(denominators, "paired_ratio_interval (denominators)");
  std::vector<double> ratios(numerators.size());
  for (std::size_t i = 0; i < ratios.size(); ++i) {
    OXY_CHECK(denominators[i] != 0, InvalidArgument, "paired_ratio_interval: denominator ", i, " is 0.");
    ratios[i] = numerators[i] / denominators[i];
  }
  return median_interval(ratios, options);
}

double student_t_quantile(double p, double degrees) {
  OXY_CHECK(p > 0 && p < 1, InvalidArgument, "p must be between 0 and 1, not ", p, ".");
  OXY_CHECK(degrees > 0, InvalidArgument, "degrees of freedom must be positive, not ", degrees, ".");
  if (p == 0.5) return 0;
  const double tail = std::min(p, 1 - p);
  double low = 0;
  double high = 1;
  while (student_t_tail(high, degrees) > tail && high < 1e300) high *= 2;
  while (true) {  // Bisection: it ends where no number lies between, and nothing here is in a hurry.
    const double middle = std::midpoint(low, high);
    if (middle == low || middle == high) break;
    (student_t_tail(middle, degrees) > tail ? low : high) = middle;
  }
  return p < 0.5 ? -high : high;
}

Interval starts_interval(std::span<const double> starts, double confidence) {
  const std::vector<double> copy(starts.begin(), starts.end());
  return geometric_mean_interval({&copy, 1}, confidence);
}

Interval geometric_mean_interval(std::span<const std::vector<double>> subjects, double confidence) {
  check_confidence(confidence);
  OXY_CHECK(!subjects.empty(), InvalidArgument, "geometric_mean_interval of no subjects; give at least one.");
  double middle = 0;
  double width = 0;  // squared
  for (const auto& starts : subjects) {
    check(starts, "an interval over starts");
    std::vector<double> logs;
    for (const double value : starts) {
      OXY_CHECK(value > 0 && std::isfinite(value), InvalidArgument,
                "an interval over starts needs positive finite values, not ", value, ".");
      logs.push_back(std::log(value));
    }
    middle += mean(logs);
    const auto count = static_cast<double>(logs.size());
    const double error = stddev(logs) / std::sqrt(count);
    const double t = logs.size() > 1 ? student_t_quantile((1 + confidence) / 2, count - 1)
                                     : std::numeric_limits<double>::quiet_NaN();
    width += t * t * error * error;
  }
  const auto count = static_cast<double>(subjects.size());
  middle /= count;
  const double half = std::sqrt(width) / count;
  return {std::exp(middle - half), std::exp(middle), std::exp(middle + half), confidence};
}

}  // namespace oxytorch
