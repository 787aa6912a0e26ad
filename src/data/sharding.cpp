#include <algorithm>

#include "oxytorch/data/order.h"

namespace oxytorch::data {
namespace {

std::int64_t divided_up(std::int64_t value, std::int64_t by) { return value / by + (value % by != 0); }

/// Samples of all processes in a batch; 0 where the numbers are not those of a sharding.
std::int64_t global_batch(const Sharding& sharding) {
  std::int64_t size = 0;
  if (sharding.batch < 1 || sharding.world < 1 || __builtin_mul_overflow(sharding.batch, sharding.world, &size))
    return 0;
  return size;
}

}  // namespace

std::int64_t Sharding::batches(std::int64_t samples) const noexcept {
  const std::int64_t all = global_batch(*this);
  if (all == 0 || samples <= 0) return 0;
  return drop_last ? samples / all : divided_up(samples, all);
}

void Sharding::range(std::int64_t samples, std::int64_t batch_index, std::int64_t& first,
                     std::int64_t& last) const noexcept {
  first = last = 0;
  if (batch_index < 0 || batch_index >= batches(samples)) return;
  const std::int64_t begin = batch_index * global_batch(*this);
  const std::int64_t each = std::min(batch, divided_up(samples - begin, world));
  first = begin + rank * each;
  last = first + each;
}

}  // namespace oxytorch::data
