#include "oxytorch/data/cache.h"

#include <filesystem>
#include <limits>
#include <mutex>
#include <system_error>
#include <unordered_map>

#include "base/cache_folder.h"
#include "data/disk_tier.h"
#include "data/file.h"
#include "data/remote_file.h"
#include "oxytorch/clock.h"
#include "oxytorch/error.h"
#include "oxytorch/system.h"
#include "oxytorch/units.h"

namespace oxytorch::data {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

std::int64_t to_limit(std::uint64_t bytes) {
  return static_cast<std::int64_t>(std::min<std::uint64_t>(bytes, static_cast<std::uint64_t>(kNever)));
}

std::int64_t memory_limit_of(const std::string& text) {
  const auto memory = read_memory();
  const auto whole = memory.limit.value_or(memory.physical.value_or(0));
  return to_limit(Size::parse(text).resolve(whole, memory.available.value_or(whole) / 4));
}

std::int64_t disk_limit_of(const std::string& text, const std::string& folder) {
  const auto size = Size::parse(text);
  const bool known = size.kind() == Size::Kind::Bytes;
  if (known && size.resolve(0) == 0) return 0;
  OXY_CHECK(!folder.empty(), InvalidArgument, "the cache is to keep ", text,
            " on a disk, and there is no folder for it: give one, or set OXYTORCH_CACHE to one.");
  if (known) return to_limit(size.resolve(0));
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const auto space = std::filesystem::space(folder, error);
  OXY_CHECK(!error, Io, "the folder of the cache, ", folder, ", cannot be read: ", error.message(), ".");
  return to_limit(size.resolve(space.capacity, space.available / 2));
}

std::string folder_of(const CacheOptions& options) {
  if (!options.folder.empty()) return options.folder;
  const auto kept = cache_folder();
  return kept.empty() ? "" : kept + "/data";
}

}  // namespace

struct Cache::Impl {
  explicit Impl(const CacheOptions& given)
      : options(given), least_recent(given.policy == "lru"), memory(memory_limit_of(given.memory)) {
    OXY_CHECK(least_recent || options.policy == "next-use", InvalidArgument, "the policy of the cache is '",
              options.policy, "', expected next-use or lru.");
    OXY_CHECK(options.ttl_seconds >= 0, InvalidArgument, "the ttl of the cache is ", options.ttl_seconds,
              ", expected at least 0.");
    OXY_CHECK(options.remote.empty() || is_remote(options.remote), InvalidArgument,
              "the remote place of the cache is '", options.remote, "', expected an http, https or s3 URL.");
    const auto folder = folder_of(options);
    if (const auto limit = disk_limit_of(options.disk, folder); limit > 0)
      disk.emplace(folder, limit, options.ttl_seconds);
  }

  struct Entry {
    View value;
    double written = 0;
  };

  /// The larger, the sooner an entry goes.
  std::int64_t cost(std::int64_t next_use, int priority) const {
    if (!least_recent) return next_use > kNever - draws ? kNever : draws + next_use;
    return -(static_cast<std::int64_t>(priority) * (std::int64_t{1} << 40)) - draws;
  }

  std::optional<View> in_memory(const std::string& key) {
    const std::lock_guard lock(mutex);
    ++draws;
    const auto found = entries.find(key);
    const bool aged = found != entries.end() && options.ttl_seconds > 0 &&
                      monotonic_seconds() - found->second.written > options.ttl_seconds;
    if (aged) {
      memory.erase(key);
      entries.erase(found);
    }
    if (aged || found == entries.end()) {
      ++stats.misses;
      return std::nullopt;
    }
    ++stats.hits;
    return found->second.value;
  }

  std::optional<View> in_remote(const std::string& key) {
    std::optional<View> value;
    const auto object = fetch_whole(join(options.remote, entry_name(key)));
    if (object) {
      auto owner = std::make_shared<const std::string>(*object);
      const auto bytes = std::as_bytes(std::span(*owner));
      value = checked_entry(key, {bytes, std::move(owner)});
    }
    const std::lock_guard lock(mutex);
    ++(value ? remote_stats.hits : remote_stats.misses);
    if (object && !value) ++remote_stats.damaged;
    return value;
  }

  CacheOptions options;
  bool least_recent;
  mutable std::mutex mutex;
  std::int64_t draws = 0;
  EvictionOrder memory;
  std::unordered_map<std::string, Entry> entries;
  TierStats stats, remote_stats;
  std::optional<DiskTier> disk;
};

Cache::Cache(const CacheOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Cache::~Cache() = default;

std::optional<View> Cache::find(const std::string& key) {
  if (auto value = impl_->in_memory(key)) return value;
  if (impl_->disk) {
    if (auto value = impl_->disk->find(key)) return value;
  }
  if (impl_->options.remote.empty()) return std::nullopt;
  return impl_->in_remote(key);
}

void Cache::put(const std::string& key, const View& value, std::int64_t next_use, int priority) {
  auto& self = *impl_;
  std::int64_t cost = 0;
  {
    const std::lock_guard lock(self.mutex);
    cost = self.cost(next_use, priority);
    const auto held = self.entries.find(key);
    if (held != self.entries.end()) return self.memory.set_cost(key, cost);
    const auto bytes = static_cast<std::int64_t>(value.bytes.size() + key.size());
    if (const auto gone = self.memory.add(key, bytes, cost)) {
      for (const auto& victim : *gone) self.entries.erase(victim);
      self.stats.evictions += static_cast<std::int64_t>(gone->size());
      self.entries[key] = {value, monotonic_seconds()};
    }
  }
  if (self.disk) self.disk->put(key, value, cost);
}

CacheStats Cache::stats() const {
  CacheStats found;
  {
    const std::lock_guard lock(impl_->mutex);
    found.memory = impl_->stats;
    found.memory.entries = impl_->memory.entries();
    found.memory.bytes = impl_->memory.bytes();
    found.memory.limit = impl_->memory.limit();
    found.remote = impl_->remote_stats;
  }
  if (impl_->disk) found.disk = impl_->disk->stats();
  return found;
}

void Cache::clear() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->entries.clear();
    impl_->memory.clear();
  }
  if (impl_->disk) impl_->disk->clear();
}

}  // namespace oxytorch::data
