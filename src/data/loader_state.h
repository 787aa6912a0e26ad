/// Where a loader is, as text.
#pragma once

#include <cstdint>
#include <string>

#include "oxytorch/api.h"

namespace oxytorch::data {

struct LoaderState {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  std::int64_t batches = 0;    ///< of the epoch
  std::int64_t samples = 0;    ///< of the epoch, drawn by all processes
  std::int64_t batch = 0;      ///< what one of all processes may hold: samples, or sizes
  std::string dataset, order;  ///< fingerprints
};

/// At most 256 bytes.
OXY_API std::string write_loader_state(const LoaderState& state);
/// Errors: `InvalidArgument` for text that is no state.
OXY_API LoaderState read_loader_state(const std::string& text);

}  // namespace oxytorch::data
