#include "oxytorch/memory/batch_forecast.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/size_text.h"
#include "oxytorch/error.h"

namespace oxytorch {
namespace {

constexpr std::int64_t kSmaller = 16, kMost = 32;  // a batch that is run has a 16th of the samples, so many at the most

std::vector<std::int64_t> live_of(const memory::Timeline& timeline) {
  std::vector<std::int64_t> found{0};
  for (const auto& event : timeline.events) found.push_back(event.live_bytes);
  return found;
}

bool same_order(const memory::Timeline& one, const memory::Timeline& other) {
  return std::equal(one.events.begin(), one.events.end(), other.events.begin(), other.events.end(),
                    [](const auto& a, const auto& b) { return (a.bytes < 0) == (b.bytes < 0); });
}

}  // namespace

bool BatchForecast::fits() const noexcept {
  return static_cast<double>(bytes) <= (1 - headroom) * static_cast<double>(available);
}

std::string BatchForecast::text() const {
  char share[32];
  std::snprintf(share, sizeof share, "%.0f%%", 100 * headroom);
  auto text = "A step with " + std::to_string(size) + " samples will take " + size_text(bytes) + " of the " +
              size_text(available) + " that this process may still take, " + share + " of which stay free: it " +
              (fits() ? "fits." : "does not fit.");
  if (!is_regular) {
    text += " Steps with " + std::to_string(measured.first) + " and " + std::to_string(measured.second) +
            " samples do not take the same tensors, so that this is the line through their peaks, and may be low.";
  }
  return text;
}

BatchReplay::BatchReplay(std::int64_t size, std::int64_t available, double headroom)
    : size_(size), available_(available), headroom_(headroom) {
  OXY_CHECK(size >= 1, InvalidArgument, "size is ", size, ", expected at least 1 sample.");
  OXY_CHECK(headroom >= 0 && headroom < 1, InvalidArgument, "headroom is ", headroom,
            ", expected at least 0 and under 1.");
  // Operators treat a single sample apart, or refuse it (batch normalisation).
  const auto less = std::min(std::max<std::int64_t>(std::min<std::int64_t>(size, 2), size / kSmaller), kMost);
  sizes_ = {less, std::min(2 * less, size)};
}

BatchForecast BatchReplay::forecast(std::int64_t kept, const memory::Timeline& smaller,
                                    const memory::Timeline& larger) const {
  const bool is_regular = same_order(smaller, larger);
  auto less = live_of(smaller), more = live_of(larger);
  if (!is_regular) {
    less = {*std::max_element(less.begin(), less.end())};
    more = {*std::max_element(more.begin(), more.end())};
  }
  // Wide enough for any number of samples: bytes by samples may go beyond 64 bits.
  const auto further = static_cast<long double>(size_ - sizes_.first);
  const auto apart = static_cast<long double>(std::max<std::int64_t>(sizes_.second - sizes_.first, 1));
  long double peak = 0;
  for (std::size_t i = 0; i < less.size(); ++i) {
    const auto grown = static_cast<long double>(more[i] - less[i]) * further / apart;
    peak = std::max(peak, static_cast<long double>(less[i]) + std::floor(grown));
  }
  constexpr auto kLargest = 0x1p62L;
  const auto bytes = static_cast<std::int64_t>(std::min(static_cast<long double>(kept) + peak, kLargest));
  return {size_, bytes, available_, headroom_, sizes_, is_regular};
}

}  // namespace oxytorch
