/// Memory for batches that is taken again when a batch is let go, so that a step neither allocates nor faults pages in.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

namespace oxytorch::data {

/// May be used by several threads; buffers may outlive it.
class BufferPool {
 public:
  /// At least `bytes` bytes, aligned to 64.
  std::shared_ptr<std::byte> take(std::size_t bytes);

 private:
  struct Free {
    std::mutex mutex;
    std::multimap<std::size_t, std::byte*> buffers;  // by size
    Free() = default;
    Free(const Free&) = delete;
    Free& operator=(const Free&) = delete;
    ~Free();
  };
  std::shared_ptr<Free> free_ = std::make_shared<Free>();
};

}  // namespace oxytorch::data
