/// A backend whose native step tail is the processor's own engine, for a torch device over `sim`: what a step hands to
/// the kernels of a device, and what it does when they refuse, without a card.
#pragma once

#include <cstdint>

#include "oxytorch/backend.h"

namespace oxytorch::test {

/// What the backend is to do, and what was asked of it.
struct Played {
  bool wraps = true;         ///< takes torch's streams
  bool serves = true;        ///< tail_create; otherwise OXY_NOT_SUPPORTED
  bool fails = false;        ///< tail_measure gives OXY_DEVICE_ERROR
  std::int64_t created = 0;  ///< tails
  std::int64_t configured = 0;
  std::int64_t live = 0;  ///< tails that were not destroyed
  std::int64_t rounds = 0;
};
Played& played();

/// Registered as the backend of the torch device `type`.
void register_played(const char* type);

}  // namespace oxytorch::test
