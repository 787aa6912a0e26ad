#include "oxytorch/ops/packed_weights.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/kept_panels.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;

constexpr std::int64_t kCompared = 64;  // elements, spread over the weight

// Elements of a weight as they are, to see writes that its version does not tell.
std::vector<std::byte> sample_of(const Tensor& weight) {
  const std::int64_t rows = weight.size(0), columns = weight.size(1), count = weight.numel();
  const auto size = static_cast<std::size_t>(weight.element_size());
  const auto* from = static_cast<const std::byte*>(weight.const_data_ptr());
  const std::int64_t taken = std::min(count, kCompared);
  std::vector<std::byte> sample(static_cast<std::size_t>(taken) * size);
  for (std::int64_t i = 0; i < taken; ++i) {
    const std::int64_t element = taken == 1 ? 0 : (count - 1) * i / (taken - 1);
    const std::int64_t at = element / columns % rows * weight.stride(0) + element % columns * weight.stride(1);
    std::memcpy(sample.data() + static_cast<std::size_t>(i) * size, from + at * static_cast<std::int64_t>(size), size);
  }
  return sample;
}

// What tells one weight from another, of those that live.
using Key = std::tuple<const void*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, at::ScalarType, PackedFor>;
Key key_of(const Tensor& weight, PackedFor products) {
  return {weight.const_data_ptr(), weight.size(0),       weight.size(1), weight.stride(0),
          weight.stride(1),        weight.scalar_type(), products};
}

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // another weight may come to lie where a freed one was
  std::uint32_t version = 0;
  std::vector<std::byte> sample;
  Tensor panels;
};

struct Registry {
  std::atomic<int> users = 0;
  std::mutex mutex;
  std::map<Key, Entry> entries;

  void forget() {
    std::map<Key, Entry> gone;  // freed once the lock is
    const std::lock_guard lock(mutex);
    gone.swap(entries);
  }
};
Registry& registry() {
  static auto* all = new Registry();  // tensors may outlive what ends with the process
  return *all;
}

c10::weak_intrusive_ptr<c10::StorageImpl> storage_of(const Tensor& weight) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(weight.storage().getWeakStorageImpl());
}

}  // namespace

bool keeps_panels(const Tensor& weight) {
  return registry().users.load(std::memory_order_relaxed) > 0 && !weight.is_inference();
}

Tensor kept_panels(const Tensor& weight, PackedFor products) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.entries.find(key_of(weight, products));
  if (found == all.entries.end()) return {};
  const Entry& entry = found->second;
  const bool same =
      entry.storage == storage_of(weight) && entry.version == weight._version() && entry.sample == sample_of(weight);
  return same ? entry.panels : Tensor();
}

void keep_panels(const Tensor& weight, PackedFor products, Tensor panels) {
  Entry entry{storage_of(weight), static_cast<std::uint32_t>(weight._version()), sample_of(weight), std::move(panels)};
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  if (all.users.load(std::memory_order_relaxed) == 0) return;
  std::erase_if(all.entries, [](const auto& one) { return one.second.storage.expired(); });
  all.entries.insert_or_assign(key_of(weight, products), std::move(entry));
}

PackedWeights::PackedWeights() { ++registry().users; }

PackedWeights::~PackedWeights() {
  if (--registry().users == 0) registry().forget();
}

void PackedWeights::clear() noexcept { registry().forget(); }

std::int64_t PackedWeights::bytes() noexcept {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::int64_t sum = 0;
  for (const auto& [key, entry] : all.entries) {
    if (!entry.storage.expired()) sum += static_cast<std::int64_t>(entry.panels.nbytes());
  }
  return sum;
}

}  // namespace oxytorch::ops
