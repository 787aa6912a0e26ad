#include "oxytorch/amp.h"

#include "bindings.h"

namespace oxytorch::bindings {

void bind_amp(py::module_& m) {
  m.def(
      "recommend_dtype",
      [](const std::string& device) {
        auto advice = amp::recommend_dtype(at::Device(device).type());
        return std::make_tuple(advice.dtype, advice.reason);
      },
      py::arg("device"), "The dtype in which matrix products run best on a device, and why.");
  m.def(
      "hardware_support",
      [](const std::string& device, at::ScalarType dtype) {
        auto support = amp::hardware_support(at::Device(device).type(), dtype);
        return std::make_tuple(support.native, support.reason);
      },
      py::arg("device"), py::arg("dtype"), "Whether a device multiplies a dtype natively, and why.");
}

}  // namespace oxytorch::bindings
