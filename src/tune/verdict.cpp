#include "oxytorch/tune/verdict.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <limits>
#include <numeric>
#include <utility>

#include "oxytorch/random.h"

namespace oxytorch::tune {
namespace {

constexpr std::int64_t kFew = 500;
constexpr double kLuck = 10;
constexpr double kCancels = 10;  // times the allowance where the step as given has nothing but rounding
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kTiny = 1e-300;

constexpr double kArithmetic = 5e-5;  // of the change: an optimizer that rounds beta to float32 is off by 1e-5
constexpr double kSlope = 2e-4;
constexpr double kElement = 1e-3;
constexpr double kBias = 0.15;  // of a unit in the last place

constexpr double kSure = 4.5;  // standard errors
constexpr double kQuotient = 0.01, kQuotientReduced = 0.06;
constexpr double kBandOfFirst = 1e-3;  // of the loss that the run began with
constexpr double kBandLeast = 0.01;    // of the loss: the band reaches so far at least beyond the losses seen

constexpr int kDrawn = 4, kWide = 2;

/// As printf.
[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double variance_of(const std::vector<double>& values) {
  const double mean = mean_of(values);
  double sum = 0;
  for (const double value : values) sum += (value - mean) * (value - mean);
  return sum / std::max(1.0, static_cast<double>(values.size()) - 1);
}

const TensorError* named(const std::vector<TensorError>& all, const std::string& name) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
  return found == all.end() ? nullptr : &*found;
}

/// Mean bias on one side, its standard error and the mean ratio of changes, over all elements.
struct Pooled {
  double mean = 0, error = 0, ratio = 0;
};

Pooled pooled(const std::vector<const NamedChange*>& changes, bool outwards) {
  Pooled found;
  double count = 0, square = 0;
  for (const auto* one : changes) {
    if (!std::isfinite(one->change.bias_error)) continue;  // of one element
    const double bias = outwards ? one->change.outwards : one->change.upwards;
    const auto weight = static_cast<double>(one->count);
    count += weight;
    found.mean += bias * weight;
    found.ratio += one->change.ratio * weight;
    square += std::pow(one->change.bias_error * weight, 2);
  }
  const double total = std::max(count, 1.0);
  return {found.mean / total, std::sqrt(square) / total, found.ratio / total};
}

/// Differs by so much in the mean, with this standard error.
std::pair<double, double> apart(const std::vector<double>& found, const std::vector<double>& usual) {
  const double error = std::sqrt((variance_of(found) + variance_of(usual)) / static_cast<double>(found.size()));
  return {mean_of(found) - mean_of(usual), std::max(error, kTiny)};
}

}  // namespace

double ValueErrors::worst() const noexcept {
  double most = 0;
  for (const auto& one : gradients) most = std::max(most, one.error / std::max({one.size, whole, kTiny}));
  return most;
}

std::vector<Excess> values_beyond(const ValueErrors& found, const ValueErrors& usual, const Allowance& allowance) {
  std::vector<Excess> excess;
  for (const auto& words : found.wrong) excess.push_back({words, kInfinity});
  const double size = std::max(found.loss_size, 1e-12);
  if (!(found.loss <= kTimes * usual.loss + allowance.loss * size)) {
    excess.push_back({text("the loss is off by %.2g", found.loss / size), found.loss / size});
  }
  if (!(std::abs(found.slope) <= kTimes * std::abs(usual.slope) + allowance.slope)) {
    excess.push_back({text("gradients are %.4f times what they should be", 1 + found.slope), std::abs(found.slope)});
  }
  const auto hold = [&](const char* kind, const auto& mine, const auto& theirs, double share, double anyway) {
    for (const auto& one : mine) {
      const auto* const known = named(theirs, one.name);
      const double base = known == nullptr ? 0 : known->error;
      const double times = one.count <= kFew ? kLuck : kTimes;
      // A sum that cancels to zero is rounding of the order of its terms, and how much depends on their order: a bias
      // before a batch normalisation, which torch sums one row after the other where it is channels_last.
      const double cancels = base >= one.size ? kCancels : 1;
      if (one.error <= times * base + share * one.size + cancels * anyway) continue;
      const double relative = one.error / std::max(one.size, kTiny);
      excess.push_back(
          {"the " + std::string(kind) + ' ' + one.name +
               text(" is off by %.2g of its size, %.2g as given", relative, base / std::max(one.size, kTiny)),
           relative});
    }
  };
  hold("gradient of", found.gradients, usual.gradients, allowance.tensor, allowance.whole * found.whole);
  hold("buffer", found.buffers, usual.buffers, allowance.buffer, 0);
  return excess;
}

UpdateFaults update_faults(std::span<const NamedChange> found, std::span<const NamedChange> base,
                           const std::map<std::string, double>& clipping, bool loose_state) {
  UpdateFaults faults;
  const NamedChange nothing;
  const auto of_base = [&](const std::string& name) -> const NamedChange& {
    const auto known = std::find_if(base.begin(), base.end(), [&](const auto& one) { return one.name == name; });
    return known == base.end() ? nothing : *known;
  };
  std::vector<const NamedChange*> own, usual;
  for (const auto& one : found) {
    const auto& theirs = of_base(one.name);
    if (!one.state) {
      own.push_back(&one);
      usual.push_back(&theirs);
    } else if (loose_state) {
      continue;
    }
    const std::string what = (one.state ? "optimizer state " : "") + one.name;
    const auto& change = one.change;
    const auto moved = clipping.find(one.name);
    const double clips = moved == clipping.end() ? 0 : moved->second;
    const double allowed = kTimes * theirs.change.error + change.unit + kArithmetic * change.size + clips;
    if (!(change.error <= allowed)) {
      faults.words.push_back("the update of " + what + text(" is off by %.2g of its size", one.relative()));
    }
    double slack = kTimes * std::abs(theirs.change.slope) + kSlope + clips / std::max(change.size, kTiny);
    slack += 6 * change.unit / std::max(change.size * std::sqrt(std::max<double>(one.count, 1)), kTiny);
    if (!(std::abs(change.slope) <= slack)) {
      faults.words.push_back("the update of " + what + text(" is %.4f times what it should be", 1 + change.slope));
    }
    const double most = std::max(1.0, kTimes * theirs.change.worst) + clips / std::max(kElement * change.size, kTiny);
    if (!(change.worst <= most)) {
      faults.words.push_back("an element of the update of " + what +
                             text(" is off by %.2g times what is allowed", change.worst));
    }
    if (change.error != 0) faults.worst = std::max(faults.worst, change.error / std::max(allowed, kTiny));
  }
  // Rounding errors have mean zero; of all parameters together, so that little is seen.
  for (const bool outwards : {false, true}) {
    const auto mine = pooled(own, outwards), theirs = pooled(usual, outwards);
    const double slack = 8 * mine.error + kBias + 5e-7 * mine.ratio;
    // The step as given may be biased itself; one that is less so is no fault.
    if (own.empty() || !std::isfinite(theirs.mean)) continue;
    if (std::min(theirs.mean, 0.0) - slack <= mine.mean && mine.mean <= std::max(theirs.mean, 0.0) + slack) continue;
    faults.words.push_back(text("rounding is biased: %+.2f of the last place %s in the mean, %+.2f as given", mine.mean,
                                outwards ? "outwards from zero" : "upwards", theirs.mean));
  }
  return faults;
}

std::string draws_fault(const Draws& found, const Draws& usual) {
  const auto different = [](const std::vector<double>& values) {
    return std::set<double>(values.begin(), values.end()).size();
  };
  const auto mine = different(found.losses), theirs = different(usual.losses);
  if (theirs > 2 && 2 * mine < theirs) {
    return text("random numbers repeat: %zu different losses in %zu draws of one batch", mine, found.losses.size());
  }
  const auto [shift, error] = apart(found.losses, usual.losses);
  if (std::abs(shift) > kSure * error + 1e-6 * std::abs(mean_of(usual.losses))) {
    return text("with random numbers the loss is %+.3g in the mean, %.1f standard errors", shift,
                std::abs(shift) / error);
  }
  if (!found.spreads.empty() && !usual.spreads.empty()) {
    const auto [wider, unsure] = apart(found.spreads, usual.spreads);
    if (std::abs(wider) > kSure * unsure) {
      return text("random numbers make the %s' variance %.2f times what it is as given", found.spread_of,
                  mean_of(found.spreads) / std::max(mean_of(usual.spreads), kTiny));
    }
  }
  return "";
}

std::string generators_fault(const std::string& start, const std::vector<std::string>& found,
                             const std::vector<std::string>& usual) {
  std::string mine = start, theirs = start;
  for (std::size_t i = 0; i < std::min(found.size(), usual.size()); ++i) {
    const std::string step = "step " + std::to_string(i + 1) + ": ";
    if (usual[i] != theirs && found[i] == mine) {
      return step + "the random generators stand still, so random numbers repeat or are not drawn";
    }
    if (usual[i] == theirs && found[i] != mine) {
      return step + "random numbers are drawn where the step as given draws none";
    }
    mine = found[i];
    theirs = usual[i];
  }
  return "";
}

double quotient_allowance(Kind kind, double usual) {
  return kTimes * usual + (kind == Kind::Tolerance ? kQuotient : kQuotientReduced);
}

Band band_of(std::span<const double> ends, std::optional<double> reduced) {
  const auto [low, high] = std::minmax_element(ends.begin(), ends.end());
  const double middle = std::accumulate(ends.begin(), ends.end(), 0.0) / static_cast<double>(ends.size());
  const double least = kBandLeast * std::abs(middle);
  const double margin = *high - *low + least;
  const double there = reduced.value_or(middle);
  return {std::min(*low - margin, there - least), std::max(*high + margin, there + least)};
}

bool in_any_band(double end, double usual, double first) {
  return std::abs(end - usual) <= std::max(0.5 * kBandLeast * std::abs(usual), kBandOfFirst * std::abs(first));
}

std::string end_fault(const RunEnd& run, std::map<std::string, double>& evidence) {
  evidence["end_loss"] = run.end;
  evidence["given_loss"] = run.usual;
  if (in_any_band(run.end, run.usual, run.first)) return "";
  const auto ends = run.as_given();
  auto band = band_of(ends);
  if (run.reduced && !band.holds(run.end)) band = band_of(ends, run.reduced());
  evidence["band_low"] = band.low;
  evidence["band_high"] = band.high;
  if (band.holds(run.end)) return "";
  return text("after %d steps the loss is %.4g, outside of %.4g to %.4g that seeds span", run.steps, run.end, band.low,
              band.high);
}

ComparedSteps draw_steps(int count, int dense, std::uint64_t drawn_by) {
  PhiloxStream random(drawn_by);
  const auto some_of = [&](std::vector<int> all, int wanted) {
    const auto most = std::min(static_cast<std::size_t>(wanted), all.size());
    for (std::size_t i = 0; i < most; ++i) {  // the first of a shuffle
      const auto left = static_cast<double>(all.size() - i);
      std::swap(all[i], all[i + static_cast<std::size_t>(random.uniform_double() * left)]);
    }
    all.resize(most);
    std::sort(all.begin(), all.end());
    return all;
  };
  const auto range = [](int from, int to) {
    std::vector<int> all(static_cast<std::size_t>(std::max(0, to - from)));
    std::iota(all.begin(), all.end(), from);
    return all;
  };
  dense = std::min(count, dense);
  ComparedSteps found{count, range(0, dense), {0}};
  if (count > dense) {
    for (const int step : some_of(range(dense, count - 1), kDrawn - 1)) found.compared.push_back(step);
    found.compared.push_back(count - 1);
  }
  for (const int step : some_of({found.compared.begin() + 1, found.compared.end()}, kWide)) found.wide.insert(step);
  return found;
}

}  // namespace oxytorch::tune
