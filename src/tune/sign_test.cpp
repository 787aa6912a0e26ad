#include "tune/sign_test.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "oxytorch/statistics.h"

namespace oxytorch::tune {
namespace {

/// Twice the rank of each magnitude, so that shared ranks are whole; the greater half of them counts alike.
std::vector<std::size_t> scores_of(std::span<const double> values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto size = [&](std::size_t i) { return std::abs(values[i]); };
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return size(a) < size(b); });
  std::vector<std::size_t> ranks(values.size());
  for (std::size_t from = 0; from < order.size();) {
    std::size_t to = from + 1;
    while (to < order.size() && size(order[to]) == size(order[from])) ++to;
    for (std::size_t i = from; i < to; ++i) {
      ranks[order[i]] = std::min(from + 1 + to, order.size() + 1);  // from + 1 + to: twice the mean of from + 1 ... to
    }
    from = to;
  }
  return ranks;
}

}  // namespace

double sign_flip_p_value(std::span<const double> differences) {
  const std::vector<std::size_t> scores = scores_of(differences);
  std::vector<double> share{1};  // of the flips, by their sum of positive ranks
  std::size_t seen = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (differences[i] == 0) continue;
    if (differences[i] > 0) seen += scores[i];
    std::vector<double> next(share.size() + scores[i]);
    for (std::size_t sum = 0; sum < share.size(); ++sum) {
      next[sum] += share[sum] / 2;
      next[sum + scores[i]] += share[sum] / 2;
    }
    share = std::move(next);
  }
  return std::accumulate(share.begin() + static_cast<std::ptrdiff_t>(seen), share.end(), 0.0);
}

double center_of(std::span<const double> differences) {
  std::vector<double> means;
  means.reserve(differences.size() * (differences.size() + 1) / 2);
  for (std::size_t i = 0; i < differences.size(); ++i) {
    for (std::size_t j = i; j < differences.size(); ++j) means.push_back(std::midpoint(differences[i], differences[j]));
  }
  return median(means);
}

}  // namespace oxytorch::tune
