/// A stream's samples in their order, or mixed within windows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "data/failure.h"
#include "oxytorch/data/stream.h"

namespace oxytorch::data {

/// A sample of a stream, or why there is none.
struct Drawn {
  std::int64_t index = 0;  ///< of the stream
  Sample sample;
  std::optional<Failure> failure;
};

/// One epoch of a stream. Windows follow one another, each in an order of its own, so that what a place of the epoch
/// holds depends on the seed, the epoch and the stream alone.
class StreamWindow {
 public:
  /// `window`: samples that are mixed; 1 leaves them as they come.
  StreamWindow(Stream& stream, std::int64_t window, std::uint64_t seed, std::int64_t epoch);
  /// Empty at the end of the epoch.
  std::optional<Drawn> next();

 private:
  std::optional<Drawn> read();
  Stream& stream_;
  std::int64_t window_;
  std::uint64_t seed_;
  std::int64_t epoch_, read_ = 0, windows_ = 0;
  int failed_ = 0;  // one after the other
  bool ended_ = false;
  std::vector<Drawn> held_;  // in the order in which they are given out
  std::size_t given_ = 0;
};

}  // namespace oxytorch::data
