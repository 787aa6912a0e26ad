// GPUConfig for Python, which lends torch.cuda's functions as the device's runtime.
#include "oxytorch/accelerator.h"

#include <pybind11/functional.h>

#include <memory>

#include "bindings.h"

namespace oxytorch::bindings {

using accelerator::Applied;
using accelerator::DeviceRuntime;
using accelerator::FieldReport;
using accelerator::GPUConfig;

void bind_accelerator(py::module_& m) {
  py::class_<FieldReport>(m, "FieldReport", "What became of one field.")
      .def_readonly("field", &FieldReport::field)
      .def_readonly("wanted", &FieldReport::wanted)
      .def_readonly("before", &FieldReport::before)
      .def_readonly("now", &FieldReport::now)
      .def_readonly("applied", &FieldReport::applied)
      .def_readonly("reason", &FieldReport::reason);
  py::class_<DeviceRuntime>(m, "DeviceRuntime", "Functions of the device's runtime.")
      .def(py::init<>())
      .def_readwrite("device_count", &DeviceRuntime::device_count)
      .def_readwrite("is_initialized", &DeviceRuntime::is_initialized)
      .def_readwrite("device_name", &DeviceRuntime::device_name)
      .def_readwrite("memory_fraction", &DeviceRuntime::memory_fraction)
      .def_readwrite("set_memory_fraction", &DeviceRuntime::set_memory_fraction)
      .def_readwrite("set_variable", &DeviceRuntime::set_variable);
  py::class_<Applied, std::shared_ptr<Applied>>(m, "Applied", "Active settings.")
      .def("report", &Applied::report)
      .def("active", &Applied::active)
      .def("revert", &Applied::revert);
  py::class_<GPUConfig>(m, "GPUConfig", "The native configuration; see oxytorch.GPUConfig.")
      .def(py::init<>())
      .def_readwrite("device", &GPUConfig::device)
      .def_readwrite("devices", &GPUConfig::devices)
      .def_readwrite("memory_fraction", &GPUConfig::memory_fraction)
      .def_readwrite("matmul_precision", &GPUConfig::matmul_precision)
      .def_readwrite("conv_precision", &GPUConfig::conv_precision)
      .def_readwrite("cpu_precision", &GPUConfig::cpu_precision)
      .def_readwrite("cudnn_benchmark", &GPUConfig::cudnn_benchmark)
      .def_readwrite("deterministic", &GPUConfig::deterministic)
      .def_readwrite("attention", &GPUConfig::attention)
      .def_readwrite("autocast_dtype", &GPUConfig::autocast_dtype)
      .def_readwrite("threads", &GPUConfig::threads)
      .def_readwrite("preset_name", &GPUConfig::preset_name)
      .def_readwrite("reasons", &GPUConfig::reasons)
      .def_static("preset", &GPUConfig::preset, py::arg("name"))
      .def_static("presets", &GPUConfig::presets)
      .def_static("parse_fraction", &GPUConfig::parse_fraction, py::arg("text"))
      .def("check", &GPUConfig::check)
      .def("explain", &GPUConfig::explain)
      .def(
          "apply",
          [](const GPUConfig& config, const DeviceRuntime& runtime) {
            // What Python dropped stays active, as torch's own setters do; only revert() takes it back.
            return std::shared_ptr<Applied>(new Applied(config.apply(runtime)), [](Applied* applied) {
              applied->keep();
              delete applied;
            });
          },
          py::arg("runtime"));
  m.def("set_float32_precision", &accelerator::set_float32_precision, py::arg("backend"), py::arg("operations"),
        py::arg("value"),
        "Sets torch's fp32_precision of operations (\"matmul\", \"conv\", \"rnn\") of \"cuda\" or \"mkldnn\", exactly "
        "undone.");
  m.def("to_text", &accelerator::to_text, py::arg("report"));
}

}  // namespace oxytorch::bindings
