#include "oxytorch/memory/parked.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/whole_file.h"
#include "memory/nameless_file.h"

namespace oxytorch::memory {
namespace {

constexpr std::size_t kShelvedBytes = 4096;
constexpr std::size_t kShelfBytes = 4 * kParkedBytes;

// Mappings of files in use: their first bytes, and how many.
struct Files {
  std::mutex mutex;
  std::map<const char*, std::size_t> all;
};
Files& files() {
  static auto* const made = new Files;  // outlives tensors of other static objects
  return *made;
}

bool is_on_disk(const std::string& folder) {
  struct statfs found {};
  const bool in_memory =
      statfs(folder.c_str(), &found) == 0 && (found.f_type == TMPFS_MAGIC || found.f_type == RAMFS_MAGIC);
  return !in_memory && access(folder.c_str(), W_OK) == 0;
}

// Linux maps a large page of a file at once where that lies within 2 MiB of addresses, and else each 4 KiB of it.
void* mapped(int file, std::size_t size) {
  constexpr std::uintptr_t aligned = 2 << 20;
  void* const reserved = mmap(nullptr, size + aligned, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return reserved;
  const auto first = reinterpret_cast<std::uintptr_t>(reserved);
  auto* const wanted = static_cast<char*>(reserved) + (aligned - first % aligned) % aligned;
  munmap(reserved, size + aligned);
  return mmap(wanted, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);  // there, or elsewhere if that is taken now
}

// A file without a name, in memory. It goes with the last tensor on it.
class Mapping {
 public:
  // Null where the folder cannot hold it.
  static std::shared_ptr<Mapping> make(const std::string& folder, std::size_t size) {
    const int file = nameless_file(folder, "parked");
    if (file < 0) return nullptr;
    void* memory = MAP_FAILED;
    // Writing to a mapping cannot fail for want of space then.
    if (posix_fallocate(file, 0, static_cast<off_t>(size)) == 0) {
      memory = mapped(file, size);
    }
    if (memory != MAP_FAILED) return std::shared_ptr<Mapping>(new Mapping(static_cast<char*>(memory), size, file));
    close(file);
    return nullptr;
  }
  ~Mapping() {
    auto& known = files();
    {
      const std::lock_guard lock(known.mutex);
      known.all.erase(memory_);
    }
    munmap(memory_, size_);
    close_file();
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Memory for so many bytes behind those that were taken; null where it is full. A child of fork takes none: its
  // parent would take the same.
  char* take(std::size_t bytes) {
    const auto begin = (used_ + kAligned - 1) / kAligned * kAligned;
    if (owner_ != getpid() || begin > size_ || size_ - begin < bytes) return nullptr;
    used_ = begin + bytes;
    return memory_ + begin;
  }
  // Writes to the file: pages that are not read are not resident.
  [[nodiscard]] bool write(const char* memory, const void* content, std::size_t bytes) const {
    return lseek(file_, memory - memory_, SEEK_SET) >= 0 && write_all(file_, content, bytes) == 0;
  }
  // Once nothing more is written.
  void close_file() {
    if (file_ >= 0) close(file_);
    file_ = -1;
  }

 private:
  static constexpr std::size_t kAligned = 64;
  Mapping(char* memory, std::size_t size, int file) : memory_(memory), size_(size), file_(file), owner_(getpid()) {
    auto& known = files();
    const std::lock_guard lock(known.mutex);
    known.all.emplace(memory, size);
  }

  char* memory_;
  std::size_t size_, used_ = 0;
  int file_;
  pid_t owner_;
};

// What small tensors share.
struct Shelf {
  std::mutex mutex;
  std::string folder;
  std::weak_ptr<Mapping> mapping;
};
Shelf& shelf() {
  static auto* const made = new Shelf;
  return *made;
}

// The bytes of a tensor's memory that are in a file; none where they are in no file.
std::pair<char*, std::size_t> bytes_in_file(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) return {};
  const auto* const memory = static_cast<const char*>(tensor.storage().data());
  auto& known = files();
  const std::lock_guard lock(known.mutex);
  const auto after = known.all.upper_bound(memory);
  if (memory == nullptr || after == known.all.begin()) return {};
  const auto& [begin, size] = *std::prev(after);
  if (memory >= begin + size) return {};
  return {const_cast<char*>(memory), tensor.storage().nbytes()};
}

bool may_be_parked(const at::Tensor& tensor, std::size_t least) {
  const bool plain = tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
                     tensor.has_storage() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg();
  return plain && tensor.nbytes() >= least;
}

struct Place {
  std::shared_ptr<Mapping> mapping;
  char* memory = nullptr;  // null where the folder cannot hold it
};

// Space for that many bytes, with what `content` holds where it is given.
Place place_of_its_own(const std::string& folder, std::size_t bytes, const void* content) {
  Place place{Mapping::make(folder, bytes)};
  if (!place.mapping) return place;
  auto* const memory = place.mapping->take(bytes);
  if (content == nullptr || place.mapping->write(memory, content, bytes)) place.memory = memory;
  place.mapping->close_file();
  return place;
}

Place place_on_shelf(const std::string& folder, std::size_t bytes, const void* content) {
  auto& ours = shelf();
  const std::lock_guard lock(ours.mutex);
  Place place;
  place.mapping = ours.folder == folder ? ours.mapping.lock() : nullptr;
  auto* memory = place.mapping ? place.mapping->take(bytes) : nullptr;
  if (memory == nullptr) {
    if (place.mapping) place.mapping->close_file();
    place.mapping = Mapping::make(folder, kShelfBytes);
    if (!place.mapping) return place;
    ours.folder = folder;
    ours.mapping = place.mapping;
    memory = place.mapping->take(bytes);
  }
  if (content == nullptr || place.mapping->write(memory, content, bytes)) place.memory = memory;
  return place;
}

// A copy in a file; undefined where none of the folders can hold it.
at::Tensor in_file(const at::Tensor& tensor, const std::vector<std::string>& folders) {
  const auto bytes = tensor.nbytes();
  const bool dense = tensor.is_contiguous();
  const auto* const content = dense ? tensor.const_data_ptr() : nullptr;
  const auto like = at::empty_like(tensor, tensor.options().device(at::kMeta));  // the layout that a clone has
  for (const auto& folder : folders) {
    auto [mapping, memory] = (bytes < kParkedBytes ? place_on_shelf : place_of_its_own)(folder, bytes, content);
    if (memory == nullptr) continue;
    const auto end = [kept = std::move(mapping)](void*) mutable { kept.reset(); };
    auto made = at::from_blob(memory, like.sizes(), like.strides(), end, tensor.options());
    if (!dense) {
      made.copy_(tensor);
      rest(made);
    }
    return made;
  }
  return {};
}

}  // namespace

std::vector<std::string> parking_folders() {
  const char* const named = std::getenv("TMPDIR");
  const bool is_named = named != nullptr && *named != '\0';
  std::vector<std::string> folders = {"/var/tmp", is_named ? named : "/tmp"};
  if (is_named && is_on_disk(folders.back())) std::swap(folders.front(), folders.back());
  return folders;
}

at::Tensor park(const at::Tensor& tensor, const std::vector<std::string>& folders) {
  const auto given = tensor.detach();
  if (!may_be_parked(given, kShelvedBytes)) return given.clone();
  auto made = in_file(given, folders);
  return made.defined() ? made : given.clone();
}

bool is_parked(const at::Tensor& tensor) { return bytes_in_file(tensor).first != nullptr; }

bool move_to_file(at::Tensor& tensor) {
  if (!may_be_parked(tensor, kParkedBytes) || is_parked(tensor)) return false;
  auto made = in_file(tensor.detach(), parking_folders());
  if (made.defined()) tensor.set_data(made);
  return made.defined();
}

bool move_to_memory(at::Tensor& tensor) {
  if (!is_parked(tensor)) return false;
  tensor.set_data(tensor.detach().clone());
  return true;
}

namespace {

// Of whole pages: those of a neighbour are read back when they are asked for.
void advise(const at::Tensor& tensor, int advice) {
  const auto [memory, bytes] = bytes_in_file(tensor);
  if (memory == nullptr) return;
  const auto before = reinterpret_cast<std::uintptr_t>(memory) % static_cast<std::uintptr_t>(getpagesize());
  madvise(memory - before, bytes + before, advice);
}

}  // namespace

void rest(const at::Tensor& tensor) { advise(tensor, MADV_DONTNEED); }

void rest_all() {
  auto& known = files();
  const std::lock_guard lock(known.mutex);
  for (const auto& [memory, size] : known.all) madvise(const_cast<char*>(memory), size, MADV_DONTNEED);
}

void read_ahead(const at::Tensor& tensor) { advise(tensor, MADV_WILLNEED); }

void populate(const at::Tensor& tensor) {
#ifndef MADV_POPULATE_WRITE
  constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif
  advise(tensor, MADV_POPULATE_WRITE);
}

std::vector<std::size_t> parked_parts(const std::vector<std::size_t>& bytes) {
  constexpr std::size_t kParts = 16, kLeast = std::size_t{4} << 20, kMost = std::size_t{64} << 20;
  const auto all = std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
  const auto most = std::clamp(all / kParts, kLeast, kMost);
  std::vector<std::size_t> parts;
  std::size_t left = 0;
  for (const auto size : bytes) {
    if (size > left || parts.empty()) {
      parts.push_back(0);
      left = most;
    }
    ++parts.back();
    left -= std::min(size, left);
  }
  return parts;
}

}  // namespace oxytorch::memory
