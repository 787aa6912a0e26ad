#include "data/disk_tier.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/whole_file.h"
#include "data/file.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kEntryMagic = 0x3145484341434F58;  // "XOCACHE1"
constexpr std::size_t kLongestKey = 200;

struct EntryHead {
  std::uint64_t magic = kEntryMagic, key_bytes = 0, bytes = 0, checksum = 0;
};

std::string hex_of(std::uint64_t number) {
  std::string text(16, '0');
  for (int i = 15; i >= 0; --i, number >>= 4) text[static_cast<std::size_t>(i)] = "0123456789abcdef"[number & 15];
  return text;
}

/// A name as entry_name() makes them.
bool is_entry_name(const std::string& name) {
  return name.size() == 37 && name[2] == '/' && name.ends_with(".oxe") &&
         std::all_of(name.begin() + 3, name.end() - 4, [](unsigned char c) { return std::isxdigit(c) != 0; });
}

}  // namespace

std::string entry_name(const std::string& key) {
  const auto hash = XXH3_128bits(key.data(), key.size());
  const auto hex = hex_of(hash.high64) + hex_of(hash.low64);
  return hex.substr(0, 2) + "/" + hex.substr(2) + ".oxe";
}

std::string entry_head(const std::string& key, std::string_view bytes) {
  const EntryHead head{kEntryMagic, key.size(), bytes.size(), XXH3_64bits(bytes.data(), bytes.size())};
  std::string text(reinterpret_cast<const char*>(&head), sizeof(head));
  return text + key;
}

std::optional<View> checked_entry(const std::string& key, const View& file) {
  EntryHead head;
  if (file.bytes.size() < sizeof(head)) return std::nullopt;
  std::memcpy(&head, file.bytes.data(), sizeof(head));
  const auto rest = file.bytes.subspan(sizeof(head));
  if (head.magic != kEntryMagic || head.key_bytes != key.size() || rest.size() < key.size() ||
      head.bytes != rest.size() - key.size() || std::memcmp(rest.data(), key.data(), key.size()) != 0) {
    return std::nullopt;
  }
  const auto bytes = rest.subspan(key.size());
  if (XXH3_64bits(bytes.data(), bytes.size()) != head.checksum) return std::nullopt;
  return View{bytes, file.owner};
}

DiskTier::DiskTier(std::string folder, std::int64_t limit, double ttl_seconds)
    : folder_(std::move(folder)), ttl_(ttl_seconds), order_(limit) {
  std::error_code error;
  fs::create_directories(folder_, error);
  OXY_CHECK(!error, Io, "the folder of the cache, ", folder_, ", cannot be made: ", error.message(), ".");
  std::vector<std::pair<fs::file_time_type, std::pair<std::string, std::int64_t>>> found;
  for (fs::recursive_directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    const auto name = fs::relative(it->path(), folder_, error).string();
    std::error_code gone;  // by another process
    if (!is_entry_name(name)) continue;
    const auto size = it->file_size(gone);
    const auto time = it->last_write_time(gone);
    if (!gone) found.emplace_back(time, std::pair(name, static_cast<std::int64_t>(size)));
  }
  OXY_CHECK(!error, Io, "the folder of the cache, ", folder_, ", cannot be read: ", error.message(), ".");
  std::sort(found.rbegin(), found.rend());  // the newest first, which are kept
  std::int64_t age = std::numeric_limits<std::int64_t>::max() / 2;
  for (const auto& [time, entry] : found) {
    if (!order_.add(entry.first, entry.second, age++)) remove(entry.first);
  }
}

void DiskTier::remove(const std::string& name) {
  std::error_code ignored;  // it may be gone
  fs::remove(fs::path(folder_) / name, ignored);
}

std::optional<View> DiskTier::find(const std::string& key) {
  const auto name = entry_name(key);
  const auto path = (fs::path(folder_) / name).string();
  std::error_code error;
  const auto written = fs::last_write_time(path, error);
  std::optional<View> found;
  bool damaged = false;
  const bool aged =
      !error && ttl_ > 0 && std::chrono::duration<double>(fs::file_time_type::clock::now() - written).count() > ttl_;
  if (!error && !aged) {
    try {
      const auto file = open_file(path);
      found = checked_entry(key, file->view(0, file->size()));
      damaged = !found;
    } catch (const Error&) {  // it went meanwhile
    }
  }
  const std::lock_guard lock(mutex_);
  ++(found ? stats_.hits : stats_.misses);
  if (damaged) ++stats_.damaged;
  if (damaged || aged) {
    remove(name);
    order_.erase(name);
  }
  return found;
}

void DiskTier::put(const std::string& key, const View& value, std::int64_t cost) {
  const auto name = entry_name(key);
  const auto head = entry_head(key, value.text());
  {
    const std::lock_guard lock(mutex_);
    if (order_.holds(name)) return order_.set_cost(name, cost);
    const auto gone = order_.add(name, static_cast<std::int64_t>(head.size() + value.bytes.size()), cost);
    if (!gone) return;
    for (const auto& victim : *gone) remove(victim);
    stats_.evictions += static_cast<std::int64_t>(gone->size());
  }
  const auto path = fs::path(folder_) / name;
  try {
    std::error_code error;
    fs::create_directories(path.parent_path(), error);
    // Its checksum tells an entry that a failure of the machine cut.
    write_whole_file(path.string(), {head, value.text()}, Flush::No);
  } catch (const Error&) {  // a full disk: the sample is read again where it came from
    const std::lock_guard lock(mutex_);
    order_.erase(name);
  }
}

TierStats DiskTier::stats() const {
  const std::lock_guard lock(mutex_);
  auto stats = stats_;
  stats.entries = order_.entries();
  stats.bytes = order_.bytes();
  stats.limit = order_.limit();
  return stats;
}

void DiskTier::clear() {
  const std::lock_guard lock(mutex_);
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    const auto name = fs::relative(it->path(), folder_, error).string();
    if (is_entry_name(name)) remove(name);
  }
  order_.clear();
}

}  // namespace oxytorch::data
