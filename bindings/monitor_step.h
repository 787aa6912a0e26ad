/// The Python objects of the step path, written against the C API: a `with` over one of them costs some tens of
/// nanoseconds, where a pybind11 method costs some hundreds.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "bindings.h"
#include "oxytorch/monitor.h"

namespace oxytorch::bindings {

/// Device values of steps, kept until a drain reads them. The GIL guards it.
class PendingTensors {
 public:
  static constexpr std::size_t kCapacity = std::size_t{1} << 16;

  /// Keeps a copy made on the value's device, in stream order, so that later changes in place do not show.
  void push(std::uint64_t step, monitor::ScalarId id, const at::Tensor& value);
  /// Reads everything pushed so far, waiting for the device. Called without the GIL.
  void collect(std::vector<monitor::LateScalar>& values);
  /// Values that gave way to newer ones.
  [[nodiscard]] std::uint64_t lost() const noexcept { return lost_; }

 private:
  struct Entry {
    std::uint64_t step = 0;
    monitor::ScalarId id{};
    at::Tensor value;
    c10::Stream stream;
  };
  std::deque<Entry> entries_;
  std::uint64_t lost_ = 0;
};

/// A monitor as Python holds it. `pending` outlives the monitor's drains.
struct BoundMonitor {
  BoundMonitor(const monitor::MonitorOptions& options, std::vector<std::shared_ptr<monitor::Sink>> sinks);
  ~BoundMonitor();
  std::shared_ptr<PendingTensors> pending = std::make_shared<PendingTensors>();
  std::unique_ptr<monitor::PerformanceMonitor> monitor;
};

/// Adds the types Step, Phase and Scalar to the module.
void add_step_types(py::module_& m);
/// Each holds the monitor alive.
py::object make_step(const std::shared_ptr<BoundMonitor>& monitor);
py::object make_phase(const std::shared_ptr<BoundMonitor>& monitor, const std::string& name);
py::object make_scalar(const std::shared_ptr<BoundMonitor>& monitor, const std::string& name);

/// None: as the terminal allows.
monitor::TextStyle text_style(std::optional<bool> unicode);
void bind_report(py::module_& m);

}  // namespace oxytorch::bindings
