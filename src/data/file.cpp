#include "data/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <system_error>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/whole_file.h"
#include "data/remote_file.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

std::string said(int error) { return std::generic_category().message(error); }

/// A mapping that goes with the last view of it.
struct Mapping {
  std::byte* data = nullptr;
  std::size_t size = 0;
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (data != nullptr) ::munmap(data, size);
  }
};

/// A descriptor that is closed with its scope.
struct Descriptor {
  int number;
  explicit Descriptor(const std::string& path) : number(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (number >= 0) return;
    OXY_CHECK(errno != ENOENT, NotFound, path, " does not exist.");
    OXY_CHECK(false, Io, path, " cannot be opened: ", said(errno), ".");
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { ::close(number); }
};

constexpr std::uint64_t kNear = 16 << 20;    // bytes between reads that are of one stream, of several threads too
constexpr std::uint64_t kPieces = 64 << 10;  // from which on a read here and there is announced
constexpr unsigned kLookedAt = 16;           // reads at first, and one in as many then

class LocalFile final : public File {
 public:
  explicit LocalFile(std::string path) : path_(std::move(path)) {
    const Descriptor descriptor(path_);
    struct stat status {};
    OXY_CHECK(::fstat(descriptor.number, &status) == 0, Io, path_, " cannot be read: ", said(errno), ".");
    OXY_CHECK(S_ISREG(status.st_mode), InvalidArgument, path_, " is no regular file.");
    if (status.st_size > 0) {
      mapping_->size = static_cast<std::size_t>(status.st_size);
      void* data = ::mmap(nullptr, mapping_->size, PROT_READ, MAP_SHARED, descriptor.number, 0);
      OXY_CHECK(data != MAP_FAILED, Io, path_, " cannot be read: ", said(errno), ".");
      mapping_->data = static_cast<std::byte*>(data);
    }
    version_ = std::to_string(status.st_size) + "-" + std::to_string(status.st_mtim.tv_sec) + "." +
               std::to_string(status.st_mtim.tv_nsec);
  }

  [[nodiscard]] const std::string& location() const noexcept override { return path_; }
  [[nodiscard]] std::uint64_t size() const noexcept override { return mapping_->size; }
  [[nodiscard]] std::string version() const override { return version_; }

  [[nodiscard]] View view(std::uint64_t offset, std::uint64_t length) const override {
    OXY_CHECK(offset <= size() && length <= size() - offset, Io, path_, " is truncated or damaged: it has ", size(),
              " bytes, and bytes ", offset, " to ", offset + length, " are asked for.");
    follow(offset);
    if (length >= kPieces && is_random_.load(std::memory_order_relaxed)) will_view(offset, length);
    return {{mapping_->data + offset, length}, mapping_};
  }

  void will_view(std::uint64_t offset, std::uint64_t length) const override {
    static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (offset >= size()) return;
    const auto first = offset / page * page;
    ::madvise(mapping_->data + first, std::min(offset + length, size()) - first, MADV_WILLNEED);
  }

 private:
  /// Has the kernel read ahead where reads follow each other, and not where they are here and there: it would read up
  /// to megabytes around each of the first hundred pages that it does not have.
  void follow(std::uint64_t offset) const {
    if (size() < 2 * kNear) return;
    const auto seen = seen_.load(std::memory_order_relaxed);
    thread_local unsigned reads = 0;
    if (seen == kLookedAt && ++reads % kLookedAt != 0) return;
    if (seen < kLookedAt) seen_.store(seen + 1, std::memory_order_relaxed);
    const auto before = last_.exchange(offset, std::memory_order_relaxed);
    const bool is_near = (offset > before ? offset - before : before - offset) < kNear;
    const int jumps = std::clamp(jumps_.load(std::memory_order_relaxed) + (is_near ? -1 : 1), 0, 3);
    jumps_.store(jumps, std::memory_order_relaxed);
    if (jumps >= 2 && !is_random_.exchange(true)) ::madvise(mapping_->data, size(), MADV_RANDOM);
    if (jumps == 0 && is_random_.exchange(false)) ::madvise(mapping_->data, size(), MADV_NORMAL);
  }

  std::string path_, version_;
  std::shared_ptr<Mapping> mapping_ = std::make_shared<Mapping>();
  mutable std::atomic<unsigned> seen_{0};
  mutable std::atomic<std::uint64_t> last_{0};  // where the last read that was looked at began
  mutable std::atomic<int> jumps_{0};           // of the last reads, more or less
  mutable std::atomic<bool> is_random_{false};
};

}  // namespace

File::~File() = default;

void File::will_view(std::uint64_t, std::uint64_t) const {}

std::string local_path(const std::string& location) {
  return location.starts_with("file://") ? location.substr(7) : location;
}

std::shared_ptr<const File> open_file(const std::string& location) {
  if (is_remote(location)) return open_remote_file(location);
  return std::make_shared<LocalFile>(local_path(location));
}

std::optional<std::string> read_if_there(const std::string& location) {
  if (is_remote(location)) return fetch_whole(location);
  if (!exists(location)) return std::nullopt;
  return std::string(read_whole_file(location).text());
}

void write_location(const std::string& location, std::string_view content) {
  if (is_remote(location)) return put_whole(location, content);
  write_whole_file(local_path(location), {content});
}

View read_whole_file(const std::string& location) {
  if (is_remote(location)) {
    const auto content = fetch_whole(location);
    OXY_CHECK(content, NotFound, location, " does not exist.");
    return own(*content).data;
  }
  const auto path = local_path(location);
  const Descriptor descriptor(path);
  struct stat status {};
  OXY_CHECK(::fstat(descriptor.number, &status) == 0, Io, path, " cannot be read: ", said(errno), ".");
  OXY_CHECK(S_ISREG(status.st_mode), InvalidArgument, path, " is no regular file.");
  const auto size = static_cast<std::size_t>(status.st_size);
  auto content = std::make_shared_for_overwrite<std::byte[]>(size);
  for (std::size_t at = 0; at < size;) {
    const auto read = ::read(descriptor.number, content.get() + at, size - at);
    if (read < 0 && errno == EINTR) continue;
    OXY_CHECK(read >= 0, Io, path, " cannot be read: ", said(errno), ".");
    OXY_CHECK(read > 0, Io, path, " became shorter while it was read: it ends at ", at, " of ", size, " bytes.");
    at += static_cast<std::size_t>(read);
  }
  const auto* bytes = content.get();
  return {{bytes, size}, std::move(content)};
}

bool is_folder(const std::string& location) {
  if (is_remote(location)) return location.ends_with('/');
  std::error_code error;
  return std::filesystem::is_directory(local_path(location), error);
}

bool exists(const std::string& location) {
  if (is_remote(location)) return remote_exists(location);
  std::error_code error;
  return std::filesystem::exists(local_path(location), error);
}

std::vector<std::string> list_folder(const std::string& location) {
  if (is_remote(location)) return list_remote_folder(location);
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(local_path(location), error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    names.push_back(it->path().filename().string() + (it->is_directory(ignored) ? "/" : ""));
  }
  OXY_CHECK(!error, Io, location, " cannot be listed: ", error.message(), ".");
  std::sort(names.begin(), names.end());
  return names;
}

std::string join(const std::string& folder, const std::string& name) {
  return folder.empty() || folder.ends_with('/') ? folder + name : folder + "/" + name;
}

std::string base_name(const std::string& location) { return location.substr(location.rfind('/') + 1); }

std::vector<std::string> expand_braces(const std::string& location) {
  const auto open = location.find('{');
  if (open == std::string::npos) return {location};
  const auto close = location.find('}', open), dots = location.find("..", open);
  const auto problem = [&] {
    OXY_CHECK(false, InvalidArgument, "the braces of '", location, "' must be a range such as {000..042}.");
  };
  if (close == std::string::npos || dots == std::string::npos || dots > close) problem();
  const std::string low = location.substr(open + 1, dots - open - 1),
                    high = location.substr(dots + 2, close - dots - 2);
  std::uint32_t first = 0, last = 0;
  const auto number = [](const std::string& text, std::uint32_t& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size();
  };
  if (!number(low, first) || !number(high, last) || first > last) problem();
  constexpr std::size_t kMost = 1'000'000;
  std::vector<std::string> found;
  for (std::uint64_t i = first; i <= last; ++i) {
    OXY_CHECK(found.size() < kMost, InvalidArgument, "the braces of '", location, "' name more than ", kMost,
              " files; give a folder, or ranges that are smaller.");
    auto digits = std::to_string(i);
    if (digits.size() < low.size()) digits.insert(0, low.size() - digits.size(), '0');
    for (auto& whole : expand_braces(location.substr(0, open) + digits + location.substr(close + 1))) {
      found.push_back(std::move(whole));
    }
  }
  return found;
}

std::string fingerprint_of(const std::vector<std::string>& parts) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (const auto& part : parts) {
    const std::uint64_t size = part.size();
    XXH3_64bits_update(&state, &size, sizeof(size));
    XXH3_64bits_update(&state, part.data(), part.size());
  }
  const auto hash = XXH3_64bits_digest(&state);
  std::string text(16, '0');
  for (int i = 0; i < 16; ++i) text[static_cast<std::size_t>(i)] = "0123456789abcdef"[hash >> (60 - 4 * i) & 15];
  return text;
}

}  // namespace oxytorch::data
