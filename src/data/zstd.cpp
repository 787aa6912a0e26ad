#include "data/zstd.h"

#include <zstd.h>

#include <algorithm>
#include <memory>

#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

using ZstdContext = std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)>;

/// One a thread: making one costs more than decompressing a small item.
ZSTD_DCtx& zstd_context() {
  thread_local const ZstdContext context(ZSTD_createDCtx(), ZSTD_freeDCtx);
  OXY_CHECK(context != nullptr, OutOfMemory, "there is no memory left for a zstd decompressor.");
  ZSTD_DCtx_reset(context.get(), ZSTD_reset_session_only);
  return *context;
}

}  // namespace

View unzstd(std::span<const std::byte> compressed, std::uint64_t most, const std::string& location) {
  auto& context = zstd_context();
  // A byte more shows content that is too long. Data rarely shrinks by more than 32: only then is it copied as the
  // buffer grows.
  const std::uint64_t limit = std::max(most, most + 1);
  std::uint64_t capacity = std::min<std::uint64_t>(limit, compressed.size() * 32 + 4096), size = 0;
  auto content = std::make_shared_for_overwrite<std::byte[]>(capacity);
  ZSTD_inBuffer in{compressed.data(), compressed.size(), 0};
  std::size_t missing = 0;
  while (true) {
    ZSTD_outBuffer out{content.get(), capacity, size};
    missing = ZSTD_decompressStream(&context, &out, &in);
    OXY_CHECK(!ZSTD_isError(missing), Io, location, " is damaged: zstd says '", ZSTD_getErrorName(missing), "'.");
    size = out.pos;
    OXY_CHECK(size <= most, Io, location, " is damaged: it decompresses to more than the ", most, " bytes expected.");
    if (size == capacity) {
      const auto larger = std::min(limit, capacity * 2);
      auto moved = std::make_shared_for_overwrite<std::byte[]>(larger);
      std::copy_n(content.get(), size, moved.get());
      content = std::move(moved);
      capacity = larger;
    } else if (in.pos == in.size) {
      break;
    }
  }
  OXY_CHECK(missing == 0, Io, location, " is truncated: its zstd data end within a frame.");
  const auto* bytes = content.get();
  return {{bytes, size}, std::move(content)};
}

}  // namespace oxytorch::data
