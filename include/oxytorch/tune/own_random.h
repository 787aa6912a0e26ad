/// OwnRandom: random numbers for one thread, drawn from a generator that no other thread sees.
#pragma once

#include <memory>

#include "oxytorch/api.h"

namespace oxytorch::tune {

/// While it lives, operators on the CPU that this thread calls without a generator draw from one of its own, which
/// starts where torch's default generator stands. The default one is only read, once and under its lock: a check may
/// run a model with dropout while other threads draw, and neither sees the other. Make and destroy it on the same
/// thread; not nested. Generators that are given explicitly, and other devices, are left alone.
///
/// Functions made by torch.compile see a changed thread and would be compiled anew: not for those.
class OXY_API OwnRandom {
 public:
  OwnRandom();
  ~OwnRandom();
  OwnRandom(const OwnRandom&) = delete;
  OwnRandom& operator=(const OwnRandom&) = delete;

  /// Lets the same numbers come once more.
  void rewind();
  /// Ends it before its destruction, which need not be on its thread then.
  void close() noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::tune
