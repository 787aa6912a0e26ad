/// What the files of the fake torch device share; see torch_device.h.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>

#include "oxytorch/backend/device.h"

namespace oxytorch::test {

/// The kind of device this process has, chosen once when the library is loaded.
struct Kind {
  std::string name;  ///< of the torch device
  c10::DeviceType type = c10::DeviceType::CPU;
  c10::DispatchKey key = c10::DispatchKey::CPU;
  c10::DispatchKey autocast = c10::DispatchKey::AutocastCPU;
  std::set<std::string> quirks;
  [[nodiscard]] bool has(const char* quirk) const { return quirks.contains(quirk); }
};
const Kind& kind();

const std::vector<backend::Device>& devices();
inline const backend::Device& backend_of(c10::Device device) {
  return devices().at(static_cast<std::size_t>(device.index()));
}

c10::Allocator& memory();
void resize_storage(const c10::Storage& storage, std::size_t bytes);
/// Where the storage lies in host memory, for code that plays the device.
void* played(const c10::Storage& storage);

/// The processor's generator behind the device's own; the default one of `index` where `given` is undefined.
at::Generator processor_generator(const at::Generator& given, c10::DeviceIndex index);

/// The current queue of the device, and what must live until it has caught up.
oxy_queue current_queue(c10::DeviceIndex index);
void hold(c10::DeviceIndex index, const at::Tensor& tensor);
/// Waits for the work of every stream of the device, if there is any.
void catch_up(c10::DeviceIndex index);
/// The same of the stream in use alone.
void catch_up_with_stream(c10::DeviceIndex index);

/// Counted by operators; read through torch.ops.oxytorch_device.
struct Counts {
  std::atomic<std::int64_t> reads{0};
  std::mutex mutex;                          // of the rest
  std::unordered_set<std::size_t> programs;  // one per operator, shapes and dtypes: what a graph compiler compiles
  std::set<std::string> unsupported;         // operators that the device leaves to the CPU
  std::map<std::string, std::int64_t> fallbacks;
};
Counts& counts();

void register_operators(std::vector<torch::Library>& libraries);
void register_autocast(std::vector<torch::Library>& libraries);

}  // namespace oxytorch::test
