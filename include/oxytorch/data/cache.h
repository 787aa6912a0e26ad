/// A cache in three tiers: memory, a folder of a local disk, a remote place.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

struct CacheOptions {
  std::string memory =
      "auto";              ///< "2GB", "30%" of what the process may use, "auto" (a quarter of what is available), "0"
  std::string disk = "0";  ///< of `folder`: "100GB", "30%" of the file system, "auto" (half of what is free), "0"
  std::string folder{};    ///< empty: data under $OXYTORCH_CACHE, $XDG_CACHE_HOME/oxytorch or ~/.cache/oxytorch
  std::string remote{};    ///< a URL prefix from which entries are read, and never written
  /// "next-use": of what is in, that goes which is used last again, by `next_use`; "lru" where no order is known.
  std::string policy = "next-use";
  double ttl_seconds = 0;  ///< 0: entries do not age
};

/// What a tier did so far.
struct TierStats {
  std::int64_t hits = 0, misses = 0, evictions = 0, damaged = 0, entries = 0, bytes = 0, limit = 0;
};
struct CacheStats {
  TierStats memory, disk, remote;
};

/// Entries by a key of up to 200 bytes. Every method may be called by several threads at once; the disk tier by several
/// processes too (an entry is written aside and renamed). Each entry carries an XXH3 checksum: one that does not match
/// is counted as damaged, removed and fetched anew, never delivered.
class OXY_API Cache {
 public:
  explicit Cache(const CacheOptions& options = {});
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  /// An entry; looked for in memory, then on the disk, then in the remote place. Counts as one draw.
  [[nodiscard]] std::optional<View> find(const std::string& key);
  /// Adds an entry, or moves one that was found in a lower tier up and says when it is used again. It is kept where
  /// that is soon enough. `next_use`: how many draws from now it is used again, the largest value for never;
  /// `priority`: with "lru", what is lower goes first. The disk tier is written by the thread that calls.
  void put(const std::string& key, const View& value, std::int64_t next_use, int priority = 0);
  [[nodiscard]] CacheStats stats() const;
  /// Removes all entries of this process from memory, and all files of the folder.
  void clear();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::data
