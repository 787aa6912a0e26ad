/// How far a tensor's change is from what it should be, in one pass over memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <span>
#include <vector>

#include "oxytorch/error.h"

namespace oxytorch::tune {

/// Root mean squares `error` and `size` are of all elements; the rest is of a sample in units of the last place.
struct Change {
  double error = 0;       ///< of after - wanted
  double size = 0;        ///< of wanted - before
  double unit = 0;        ///< of the distance from `after` to the next number of its type
  double slope = 0;       ///< error along the change, relative to it: 0.01 where a learning rate is 1 % too high
  double worst = 0;       ///< of one element: its error over 4 units and the share `element` of change and size
  double upwards = 0;     ///< mean error in units, the part along the change taken out
  double outwards = 0;    ///< the same, from zero
  double bias_error = 0;  ///< standard error of those means; infinite for one element
  double ratio = 0;       ///< mean size of the change in units
};

namespace change {

constexpr std::size_t kLanes = 8;  // sums in a row, so that they need not wait for each other

struct Sums {
  double change[kLanes] = {};
  double error[kLanes] = {};
  double along[kLanes] = {};
  double most[kLanes] = {};

  void add(std::size_t lane, double moved, double off) {
    change[lane] += moved * moved;
    error[lane] += off * off;
    along[lane] += off * moved;
    most[lane] = std::max(most[lane], std::abs(off));
  }
};

inline double total(const double (&lanes)[kLanes]) {
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

/// Distance to the next number of T.
template <class T>
double unit_of(double value) {
  const double size = std::max(std::abs(value), static_cast<double>(std::numeric_limits<T>::min()));
  if (!std::isfinite(size)) return std::numeric_limits<T>::epsilon();
  const auto power = std::bit_cast<double>(std::bit_cast<std::uint64_t>(size) & 0x7FF0000000000000U);
  return power * std::numeric_limits<T>::epsilon();
}

}  // namespace change

/// Of vectors of one length, not empty; an empty `before` stands for zeros. About `sample` elements, evenly spread, are
/// counted in units of the last place, or all where one's error is above `element` times the size. Not finite values
/// leave figures that are not finite. T: float or double.
template <class T>
Change measure_change(std::span<const T> before, std::span<const T> after, std::span<const double> wanted,
                      double element, std::size_t sample) {
  const std::size_t count = after.size();
  OXY_CHECK(count > 0 && wanted.size() == count && (before.empty() || before.size() == count), InvalidArgument,
            "a change is measured of vectors of one length above 0, not of ", before.size(), ", ", count, " and ",
            wanted.size(), " elements.");
  const auto start = [&](std::size_t i) { return before.empty() ? 0.0 : static_cast<double>(before[i]); };
  const auto off = [&](std::size_t i) { return static_cast<double>(after[i]) - wanted[i]; };
  change::Sums sums;
  std::size_t i = 0;
  for (; i + change::kLanes <= count; i += change::kLanes) {
    for (std::size_t lane = 0; lane < change::kLanes; ++lane) {
      sums.add(lane, wanted[i + lane] - start(i + lane), off(i + lane));
    }
  }
  for (; i < count; ++i) sums.add(0, wanted[i] - start(i), off(i));

  const auto n = static_cast<double>(count);
  const double square = change::total(sums.change), errors = change::total(sums.error);
  Change found;
  found.error = std::sqrt(errors / n);
  found.size = std::sqrt(square / n);
  found.slope = square > 0 ? change::total(sums.along) / square : 0;
  const double most = *std::max_element(std::begin(sums.most), std::end(sums.most));
  const bool stands_out = !std::isfinite(errors) || !(most <= element * found.size);
  const std::size_t every = stands_out ? 1 : std::max<std::size_t>(1, count / std::max<std::size_t>(1, sample));

  std::vector<double> places;
  places.reserve(count / every + 1);
  double units = 0, ratios = 0, up = 0, out = 0;
  for (std::size_t k = 0; k < count; k += every) {
    const double value = static_cast<double>(after[k]), moved = wanted[k] - start(k), error = off(k);
    const double unit = change::unit_of<T>(value);
    const double place = (error - found.slope * moved) / unit;
    const double share = std::abs(error) / (4 * unit + element * (std::abs(moved) + found.size));
    if (!std::isnan(found.worst) && !(share <= found.worst)) found.worst = share;
    places.push_back(place);
    units += unit * unit;
    ratios += std::abs(moved) / unit;
    up += place;
    out += value > 0 ? place : value < 0 ? -place : 0;
  }
  const auto taken = static_cast<double>(places.size());
  found.unit = std::sqrt(units / taken);
  found.ratio = ratios / taken;
  found.upwards = up / taken;
  found.outwards = out / taken;
  double spread = 0;
  for (const double place : places) spread += (place - found.upwards) * (place - found.upwards);
  found.bias_error =
      places.size() > 1 ? std::sqrt(spread / (taken - 1) / taken) : std::numeric_limits<double>::infinity();
  return found;
}

}  // namespace oxytorch::tune
