#include "oxytorch/memory/host_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "oxytorch/error.h"
#include "oxytorch/units.h"

namespace oxytorch {
namespace {

constexpr uintptr_t round_down(uintptr_t value, uintptr_t unit) { return value / unit * unit; }
constexpr uintptr_t round_up(uintptr_t value, uintptr_t unit) { return round_down(value + unit - 1, unit); }

/// The next of the 64 steps of its power of two.
constexpr size_t rounded_size(size_t bytes) {
  const size_t size = std::max(bytes, HostPool::kSmallest);
  return round_up(size, std::bit_floor(size) / 64);
}

}  // namespace

/// Stands in front of its bytes. Of a block in use only the first three fields mean something.
struct alignas(HostPool::kAlignment) HostPool::Block {
  Block* before;  // the neighbour at lower addresses
  size_t size;    // bytes that follow this header
  bool is_free;
  Block* next_free;
  Block* previous_free;

  [[nodiscard]] uintptr_t begin() const noexcept { return reinterpret_cast<uintptr_t>(this); }
  [[nodiscard]] uintptr_t end() const noexcept { return begin() + sizeof(Block) + size; }
  [[nodiscard]] Block* after() const noexcept { return reinterpret_cast<Block*>(end()); }
};

HostPool::HostPool(uint64_t capacity, uint64_t retain_limit) : capacity_(round_up(capacity, kHugePage)) {
  static_assert(sizeof(Block) == kAlignment);
  void* mapping =
      mmap(nullptr, capacity_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  OXY_CHECK(mapping != MAP_FAILED, OutOfMemory, "the kernel refuses ", format_size(capacity_),
            " of addresses: ", std::strerror(errno), "; look at ulimit -v.");
  mapping_ = reinterpret_cast<uintptr_t>(mapping);
  base_ = top_ = round_up(mapping_, kHugePage);
  huge_ = madvise(reinterpret_cast<void*>(base_), capacity_, MADV_HUGEPAGE) == 0;
  touched_.resize(capacity_ / kHugePage);
  stats_.limit_bytes = give_back_above_ = retain_limit;
}

HostPool::~HostPool() { munmap(reinterpret_cast<void*>(mapping_), capacity_ + kHugePage); }

HostPool::Block* HostPool::block_of(void* memory) noexcept { return static_cast<Block*>(memory) - 1; }

int HostPool::index_of(size_t size) noexcept {
  const int power = std::bit_width(size) - 1;
  return (power - kFirstPower) * kSteps + static_cast<int>((size >> (power - 6)) & (kSteps - 1));
}

void* HostPool::allocate(size_t bytes) noexcept {
  if (bytes > capacity_) return nullptr;
  const size_t size = rounded_size(bytes);
  std::lock_guard lock(mutex_);
  Block* block = find(size);
  ++(block ? stats_.hits : stats_.misses);
  if (block) {
    remove(block);
    split(block, size);
  } else if (block = extend(size); !block) {
    return nullptr;
  }
  block->is_free = false;
  touch(block->begin(), block->end());
  live_ += sizeof(Block) + block->size;
  stats_.peak_bytes = std::max(stats_.peak_bytes, live_);
  return block + 1;
}

void HostPool::release(void* memory) noexcept {
  Block* block = block_of(memory);
  std::lock_guard lock(mutex_);
  live_ -= sizeof(Block) + block->size;
  if (block != last_ && block->after()->is_free) {
    Block* after = block->after();
    remove(after);
    block->size += sizeof(Block) + after->size;
    if (after == last_) last_ = block;
  }
  if (block->before && block->before->is_free) {
    Block* before = block->before;
    remove(before);
    before->size += sizeof(Block) + block->size;
    if (block == last_) last_ = before;
    block = before;
  }
  if (block != last_) block->after()->before = block;
  insert(block);
  if (retained() <= stats_.limit_bytes) give_back_above_ = stats_.limit_bytes;
  if (retained() > give_back_above_) give_back(stats_.limit_bytes);
}

/// A free block of at least `size` bytes, which is the least size of its list; nullptr where there is none.
HostPool::Block* HostPool::find(size_t size) noexcept {
  const int index = index_of(size);
  const int power = index / kSteps;
  const uint64_t steps = steps_[power] & (~uint64_t{0} << (index % kSteps));
  if (steps) return free_[power * kSteps + std::countr_zero(steps)];
  const uint64_t powers = powers_ & (~uint64_t{0} << (power + 1));
  if (!powers) return nullptr;
  const int higher = std::countr_zero(powers);
  return free_[higher * kSteps + std::countr_zero(steps_[higher])];
}

/// A block at the top of what was used so far, which takes in the last one where that is free.
HostPool::Block* HostPool::extend(size_t size) noexcept {
  const bool grows = last_ && last_->is_free;
  auto* block = grows ? last_ : reinterpret_cast<Block*>(top_);
  if (block->begin() + sizeof(Block) + size > base_ + capacity_) return nullptr;
  if (grows) {
    remove(block);
  } else {
    block->before = last_;
    last_ = block;
  }
  block->size = size;
  top_ = block->end();
  return block;
}

void HostPool::insert(Block* block) noexcept {
  const int index = index_of(block->size);
  block->is_free = true;
  block->previous_free = nullptr;
  block->next_free = free_[index];
  if (block->next_free) block->next_free->previous_free = block;
  free_[index] = block;
  steps_[index / kSteps] |= uint64_t{1} << (index % kSteps);
  powers_ |= uint64_t{1} << (index / kSteps);
}

void HostPool::remove(Block* block) noexcept {
  if (block->next_free) block->next_free->previous_free = block->previous_free;
  if (block->previous_free) {
    block->previous_free->next_free = block->next_free;
    return;
  }
  const int index = index_of(block->size);
  free_[index] = block->next_free;
  if (free_[index]) return;
  steps_[index / kSteps] &= ~(uint64_t{1} << (index % kSteps));
  if (!steps_[index / kSteps]) powers_ &= ~(uint64_t{1} << (index / kSteps));
}

/// Leaves `size` bytes to the block and makes the rest, where it is worth a block, a free one.
void HostPool::split(Block* block, size_t size) noexcept {
  if (block->size - size < sizeof(Block) + kSmallest) return;
  auto* rest = reinterpret_cast<Block*>(block->begin() + sizeof(Block) + size);
  rest->before = block;
  rest->size = block->size - size - sizeof(Block);
  block->size = size;
  if (block == last_) {
    last_ = rest;
  } else {
    rest->after()->before = rest;
  }
  touch(rest->begin(), rest->begin() + sizeof(Block));
  insert(rest);
}

void HostPool::touch(uintptr_t begin, uintptr_t end) noexcept {
  const auto last = (end - 1 - base_) / kHugePage;
  for (auto page = (begin - base_) / kHugePage; page <= last; ++page)
    touched_pages_ += !std::exchange(touched_[page], 1);
}

/// Gives whole free pages back, from the top, until no more than `target` bytes are retained.
void HostPool::give_back(uint64_t target) noexcept {
  for (Block* block = last_; block && retained() > target; block = block->before) {
    if (!block->is_free) continue;
    const uintptr_t begin = round_up(block->begin() + sizeof(Block), kHugePage);
    const uintptr_t end = block == last_ ? round_up(top_, kHugePage) : round_down(block->end(), kHugePage);
    if (begin >= end) continue;
    const auto pages = touched_.begin() + static_cast<ptrdiff_t>((begin - base_) / kHugePage);
    const auto count = static_cast<ptrdiff_t>((end - begin) / kHugePage);
    const auto resident = static_cast<uint64_t>(std::count(pages, pages + count, 1));
    if (resident == 0 || madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED) != 0) continue;
    std::fill(pages, pages + count, 0);
    touched_pages_ -= resident;
    stats_.returned_bytes += resident * kHugePage;
  }
  // Where pages are held by blocks in use, looking again at each release would find nothing.
  give_back_above_ = std::max(stats_.limit_bytes, retained() + retained() / 8);
}

void HostPool::set_retain_limit(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  stats_.limit_bytes = give_back_above_ = bytes;
  if (retained() > bytes) give_back(bytes);
}

HostPoolStats HostPool::stats() const {
  std::lock_guard lock(mutex_);
  auto stats = stats_;
  stats.live_bytes = live_;
  stats.retained_bytes = retained();
  return stats;
}

uint64_t HostPool::huge_page_bytes() const {
  std::ifstream file("/proc/self/smaps");
  uint64_t bytes = 0;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin < base_ + capacity_ && end > base_;
    } else if (inside && line.starts_with("AnonHugePages:")) {
      bytes += std::stoull(line.substr(14)) << 10;
    }
  }
  return bytes;
}

void HostPool::before_fork() noexcept {
  mutex_.lock();
  give_back(0);
}

}  // namespace oxytorch
