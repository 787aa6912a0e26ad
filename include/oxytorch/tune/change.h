/// How far a tensor's change is from what it should be, in one pass over memory, a slice at a time.
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

struct Element {
  double before, after, wanted;
  double moved() const { return wanted - before; }
  double off() const { return after - wanted; }
};

struct Sums {
  double change[kLanes] = {};
  double error[kLanes] = {};
  double along[kLanes] = {};
  double most[kLanes] = {};

  void add(std::size_t lane, const Element& one) {
    const double moved = one.moved(), off = one.off();
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

/// Measures a vector's change that comes in slices, in order. About `sample` elements, evenly spread, are counted in
/// units of the last place; where one's error is above `element` times the size, all are, and each slice is given once
/// more. Not finite values leave figures that are not finite. T: float or double.
template <class T>
class ChangeMeter {
 public:
  ChangeMeter(std::size_t count, double element, std::size_t sample)
      : count_(count), element_(element), every_(std::max<std::size_t>(1, count / std::max<std::size_t>(1, sample))) {
    OXY_CHECK(count > 0, InvalidArgument, "a change is measured of at least one element, not of none.");
    picked_.reserve(count / every_ + 1);
  }

  /// Of vectors of one length; an empty `before` stands for zeros. Beyond `count` elements a second look begins, which
  /// changes nothing unless `stands_out`.
  void add(std::span<const T> before, std::span<const T> after, std::span<const double> wanted) {
    const std::size_t size = after.size(), known = seen_ % count_;
    OXY_CHECK(wanted.size() == size && (before.empty() || before.size() == size), InvalidArgument,
              "a change is measured of vectors of one length, not of ", before.size(), ", ", size, " and ",
              wanted.size(), " elements.");
    OXY_CHECK(known + size <= count_ && seen_ + size <= 2 * count_, InvalidArgument, "a change of ", count_,
              " elements is measured at most twice; ", seen_, " and ", size, " more were given.");
    const auto one = [&](std::size_t i) {
      return Element{before.empty() ? 0.0 : static_cast<double>(before[i]), static_cast<double>(after[i]), wanted[i]};
    };
    if (seen_ < count_) {
      std::size_t i = 0;
      for (; i + change::kLanes <= size; i += change::kLanes) {
        for (std::size_t lane = 0; lane < change::kLanes; ++lane) sums_.add(lane, one(i + lane));
      }
      for (; i < size; ++i) sums_.add(0, one(i));
      for (std::size_t k = (every_ - known % every_) % every_; k < size; k += every_) picked_.push_back(one(k));
      seen_ += size;
      if (seen_ == count_) sum_up();
    } else {
      for (std::size_t i = 0; stands_out_ && i < size; ++i) look(one(i));
      seen_ += size;
    }
  }

  /// Whether the slices are to be given once more: known after the last of them.
  bool stands_out() const { return stands_out_; }

  Change found() const {
    OXY_CHECK(seen_ == (stands_out_ ? 2 : 1) * count_ || seen_ == 2 * count_, InvalidState, "of ", count_, " elements ",
              seen_, " were given", stands_out_ ? "; one stands out, so all are to be given twice." : ".");
    Change found = whole_;
    const double taken = looked_.taken;
    found.worst = looked_.worst;
    found.unit = std::sqrt(looked_.units / taken);
    found.ratio = looked_.ratios / taken;
    found.upwards = looked_.up;
    found.outwards = looked_.out / taken;
    found.bias_error =
        taken > 1 ? std::sqrt(looked_.spread / (taken - 1) / taken) : std::numeric_limits<double>::infinity();
    return found;
  }

 private:
  using Element = change::Element;

  struct Looked {
    double taken = 0, units = 0, ratios = 0, up = 0, out = 0, spread = 0, worst = 0;  // up: the mean so far
  };

  void sum_up() {
    const auto n = static_cast<double>(count_);
    const double square = change::total(sums_.change), errors = change::total(sums_.error);
    whole_.error = std::sqrt(errors / n);
    whole_.size = std::sqrt(square / n);
    whole_.slope = square > 0 ? change::total(sums_.along) / square : 0;
    const double most = *std::max_element(std::begin(sums_.most), std::end(sums_.most));
    stands_out_ = every_ > 1 && (!std::isfinite(errors) || !(most <= element_ * whole_.size));
    if (!stands_out_) {
      for (const Element& one : picked_) look(one);
    }
    picked_ = {};
  }

  void look(const Element& one) {
    const double unit = change::unit_of<T>(one.after), moved = one.moved(), off = one.off();
    const double place = (off - whole_.slope * moved) / unit;
    const double share = std::abs(off) / (4 * unit + element_ * (std::abs(moved) + whole_.size));
    if (!std::isnan(looked_.worst) && !(share <= looked_.worst)) looked_.worst = share;
    looked_.taken += 1;
    looked_.units += unit * unit;
    looked_.ratios += std::abs(moved) / unit;
    const double step = place - looked_.up;  // mean and spread in one pass, as Welford
    looked_.up += step / looked_.taken;
    looked_.spread += step * (place - looked_.up);
    looked_.out += one.after > 0 ? place : one.after < 0 ? -place : 0;
  }

  std::size_t count_;
  double element_;
  std::size_t every_;
  std::size_t seen_ = 0;
  bool stands_out_ = false;
  change::Sums sums_;
  std::vector<Element> picked_;
  Change whole_;
  Looked looked_;
};

}  // namespace oxytorch::tune
