/// Entries of the cache as files of a folder, which processes share.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "data/eviction_order.h"
#include "oxytorch/data/cache.h"

namespace oxytorch::data {

/// The name of an entry's file, and of its object in a remote place: two folders of a byte, then the rest of an XXH3
/// hash.
std::string entry_name(const std::string& key);
/// What stands before an entry's bytes: magic, version, sizes, checksum, key.
OXY_API std::string entry_head(const std::string& key, std::string_view bytes);
/// The bytes of an entry with its head; empty where they are damaged or another key's.
OXY_API std::optional<View> checked_entry(const std::string& key, const View& file);

/// May be used by several threads, and its folder by several processes.
class DiskTier {
 public:
  /// Takes over what the folder holds, the oldest first to go.
  /// Errors: `Io` where the folder cannot be made or read.
  DiskTier(std::string folder, std::int64_t limit, double ttl_seconds);
  std::optional<View> find(const std::string& key);
  void put(const std::string& key, const View& value, std::int64_t cost);
  [[nodiscard]] TierStats stats() const;
  void clear();

 private:
  void remove(const std::string& name);
  std::string folder_;
  double ttl_;
  mutable std::mutex mutex_;
  EvictionOrder order_;  // by name of the file
  TierStats stats_;
};

}  // namespace oxytorch::data
