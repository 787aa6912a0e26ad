/// Statistics of measurements: robust summaries, bootstrap intervals, and intervals over process starts.
///
/// Every function is pure and deterministic (a seed fixes the resamples) and throws Error(InvalidArgument) for an
/// empty input or one with a NaN.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch {

OXY_API double mean(std::span<const double> values);
/// Sample standard deviation (n - 1 in the denominator); 0 for one value.
OXY_API double stddev(std::span<const double> values);
OXY_API double median(std::span<const double> values);
/// The value below which a share `q` in [0, 1] lies, by linear interpolation between neighbours (numpy's default;
/// R. J. Hyndman, Y. Fan, "Sample quantiles in statistical packages", 1996, type 7).
OXY_API double quantile(std::span<const double> values, double q);
/// Median absolute deviation from the median, not scaled.
OXY_API double median_absolute_deviation(std::span<const double> values);

/// An estimate with the interval that holds the true value in `confidence` of repeated experiments.
struct Interval {
  double low;
  double mid;
  double high;
  double confidence;
  [[nodiscard]] bool contains(double value) const noexcept { return low <= value && value <= high; }
  bool operator==(const Interval&) const = default;
};

struct BootstrapOptions {
  double confidence = 0.95;       ///< in (0, 1)
  std::int64_t resamples = 2000;  ///< at least 1
  std::uint64_t seed = 0;
};

using Statistic = std::function<double(std::span<const double>)>;

/// Percentile bootstrap (B. Efron, 1979) of any statistic; `mid` is the statistic of the values themselves.
/// Small samples cover a little less than promised: a 95% interval of the median of 5 to 25 normal values holds the
/// true one in 92 to 95% of experiments (measured over 4,000), of 50 or more in 95%.
OXY_API Interval bootstrap_interval(std::span<const double> values, const Statistic& statistic,
                                    const BootstrapOptions& options = {});

/// bootstrap_interval of the median.
OXY_API Interval median_interval(std::span<const double> values, const BootstrapOptions& options = {});

/// For two contenders measured in the same rounds: the median over rounds of numerator[i] / denominator[i], resampled
/// by whole rounds, so that what both felt (a busy machine) cancels. Denominators must not be 0.
OXY_API Interval paired_ratio_interval(std::span<const double> numerators, std::span<const double> denominators,
                                       const BootstrapOptions& options = {});

/// The value below which Student's t with `degrees` > 0 of freedom lies with probability `p` in (0, 1).
OXY_API double student_t_quantile(double p, double degrees);

/// Interval of a positive figure from independent process starts, one value a start (for example the median of its
/// turns): Student's t on logarithms. `mid` is the geometric mean. Turns of one process are more alike than those of
/// two, and a bootstrap of two to four starts covers 56 to 86% instead of 95%; t covers at any number from two on where
/// logarithms of starts are normal. One start says nothing of the spread between starts: low and high are then NaN.
OXY_API Interval starts_interval(std::span<const double> starts, double confidence = 0.95);

/// Interval of the geometric mean over subjects (workloads), each with its own starts as in starts_interval. Each
/// variance is widened by its own t (K. S. Banerjee, 1960), which covers at least `confidence` whatever the
/// variances are; Welch's approximation falls to 90% where a subject with few starts has most of the variance.
OXY_API Interval geometric_mean_interval(std::span<const std::vector<double>> subjects, double confidence = 0.95);

}  // namespace oxytorch
