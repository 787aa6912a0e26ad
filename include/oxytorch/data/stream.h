/// Samples that come one after the other, of which nobody knows how many there are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

/// A source of samples for a Loader, which calls it from one thread at a time.
class OXY_API Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream();

  [[nodiscard]] virtual const Schema& schema() const noexcept = 0;
  /// Goes to the first sample of an epoch.
  virtual void begin(std::int64_t epoch) = 0;
  /// The next sample; empty at the end of the epoch, where there is one. After an error it is asked for the next one.
  [[nodiscard]] virtual std::optional<Sample> next() = 0;
  /// 16 hexadecimal digits that differ where the samples do. A resumed run compares them.
  [[nodiscard]] virtual std::string fingerprint() const = 0;
};

}  // namespace oxytorch::data
