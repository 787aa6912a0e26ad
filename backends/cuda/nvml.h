/// What NVIDIA's management library tells about a card: sampled once a second by a thread of its own, so that nobody
/// who asks waits for it. The library is opened at run time; without it, or without a function, values are NaN.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace oxytorch::backend::cuda {

struct NvmlCounter {
  const char* name;
  const char* unit;
};

/// Names and units in the order of a sample.
std::span<const NvmlCounter> nvml_counters();

/// The newest sample of the card on that PCI bus id; all NaN until there is one. The first call starts the sampling.
/// `values` has a place for each counter. True once the library says that the card is gone.
bool nvml_sample(const std::string& bus_id, std::span<double> values);

/// Bytes a second over the card's PCI Express link at its best, one way; 0 where that is unknown.
std::uint64_t nvml_link_bytes_per_s(const std::string& bus_id);

/// What NVML had to say for itself, for example that it is missing.
const std::string& nvml_status();

}  // namespace oxytorch::backend::cuda
