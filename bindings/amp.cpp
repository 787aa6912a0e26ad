#include "oxytorch/amp.h"

#include "bindings.h"
#include "scope.h"

namespace oxytorch::bindings {
namespace {

struct Autocast : amp::Autocast {
  Autocast(const std::string& device, at::ScalarType dtype) : amp::Autocast(at::Device(device).type(), dtype) {}
};

}  // namespace

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
  bind_scope<Autocast, std::string, at::ScalarType>(m, "Autocast",
                                                    "torch.autocast of a device and a dtype while it is entered.",
                                                    py::arg("device"), py::arg("dtype"));
}

}  // namespace oxytorch::bindings
