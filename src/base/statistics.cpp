#include "oxytorch/statistics.h"

#include <algorithm>
#include <cmath>
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

void check(const BootstrapOptions& options) {
  OXY_CHECK(options.confidence > 0 && options.confidence < 1, InvalidArgument,
            "confidence must be between 0 and 1, for example 0.95, not ", options.confidence, ".");
  OXY_CHECK(options.resamples >= 1 && options.resamples <= 100'000'000, InvalidArgument,
            "resamples must be from 1 to 100000000, not ", options.resamples, ".");
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

}  // namespace oxytorch
