#include "data/buffer_pool.h"

#include <new>

namespace oxytorch::data {
namespace {

constexpr std::align_val_t kBufferAlignment{64};
constexpr std::size_t kKeptBuffers = 64;  // more are given back

}  // namespace

BufferPool::Free::~Free() {
  for (const auto& [size, data] : buffers) ::operator delete(data, kBufferAlignment);
}

std::shared_ptr<std::byte> BufferPool::take(std::size_t bytes) {
  std::size_t size = bytes;
  std::byte* data = nullptr;
  {
    const std::lock_guard lock(free_->mutex);
    // One that is a quarter larger serves as well: the last batch of an epoch is smaller than the others.
    const auto found = free_->buffers.lower_bound(bytes);
    if (found != free_->buffers.end() && found->first <= bytes + bytes / 4) {
      size = found->first;
      data = found->second;
      free_->buffers.erase(found);
    }
  }
  if (data == nullptr) data = static_cast<std::byte*>(::operator new(size, kBufferAlignment));
  return {data, [size, free = free_](std::byte* returned) {
            const std::lock_guard lock(free->mutex);
            if (free->buffers.size() >= kKeptBuffers) {
              const auto oldest = free->buffers.begin();
              ::operator delete(oldest->second, kBufferAlignment);
              free->buffers.erase(oldest);
            }
            free->buffers.emplace(size, returned);
          }};
}

}  // namespace oxytorch::data
