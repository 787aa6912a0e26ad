#include "oxytorch/data/batch_sizer.h"

#include <algorithm>

#include "oxytorch/error.h"

namespace oxytorch::data {

BatchFill::BatchFill(const BatchLimit& limit) : limit_(limit) {
  OXY_CHECK(limit.most > 0, InvalidArgument, "a batch may hold ", limit.most, ", expected a limit of at least 1.");
  OXY_CHECK(limit.max_samples > 0, InvalidArgument, "a batch may have ", limit.max_samples,
            " samples, expected at least 1.");
}

bool BatchFill::add(std::int64_t size) {
  OXY_CHECK(size >= 0, InvalidArgument, "a sample has a size of ", size, "; sizes are not negative.");
  OXY_CHECK(size <= limit_.most, InvalidArgument, "a sample has a size of ", size, ", more than the ", limit_.most,
            " that a batch may hold; raise the limit, or cut the sample.");
  const auto longest = std::max(longest_, size);
  // Of sizes from 0 to the limit, compared without a product that could overflow.
  const bool fits =
      limit_.padded ? longest == 0 || samples_ + 1 <= limit_.most / longest : size <= limit_.most - total_;
  const bool begins = samples_ > 0 && (!fits || samples_ == limit_.max_samples);
  if (begins) samples_ = total_ = longest_ = 0;
  ++samples_;
  total_ += size;
  longest_ = std::max(longest_, size);
  return begins;
}

bool BatchFill::is_full() const noexcept {
  if (samples_ == limit_.max_samples) return true;
  return limit_.padded ? samples_ + 1 > limit_.most / std::max<std::int64_t>(longest_, 1) : total_ == limit_.most;
}

}  // namespace oxytorch::data
