#include "oxytorch/optim/stability.h"

#include "bindings.h"

namespace oxytorch::bindings {

using optim::Spike;
using optim::SpikeDetector;
using optim::SpikeOptions;

void bind_optim_stability(py::module_& m) {
  py::class_<Spike>(m, "Spike", "One step in which loss or gradient norm was a spike.")
      .def_readonly("step", &Spike::step)
      .def_readonly("loss", &Spike::loss)
      .def_readonly("grad_norm", &Spike::grad_norm)
      .def_readonly("loss_value", &Spike::loss_value)
      .def_readonly("loss_limit", &Spike::loss_limit)
      .def_readonly("grad_norm_value", &Spike::grad_norm_value)
      .def_readonly("grad_norm_limit", &Spike::grad_norm_limit);
  py::class_<SpikeDetector>(m, "SpikeDetector", "Judges loss and gradient norm on the device; see oxytorch.optim.")
      .def(py::init([](const std::string& device, std::int64_t window, double threshold, double floor,
                       std::int64_t warmup, std::int64_t patience, bool force_composite) {
             return std::make_unique<SpikeDetector>(
                 SpikeOptions{window, threshold, floor, warmup, patience, force_composite}, at::Device(device));
           }),
           py::arg("device"), py::kw_only(), py::arg("window"), py::arg("threshold"), py::arg("floor"),
           py::arg("warmup"), py::arg("patience"), py::arg("force_composite") = false)
      .def(
          "judge",
          [](SpikeDetector& self, const std::optional<at::Tensor>& loss) { self.judge(loss.value_or(at::Tensor())); },
          py::arg("loss"), release_gil())
      .def("record", &SpikeDetector::record, py::arg("step"), py::arg("grad_norm"), py::arg("scaled"), release_gil())
      .def("arrived", &SpikeDetector::arrived, py::arg("wait"), release_gil())
      .def("drain", &SpikeDetector::drain, release_gil())
      .def("state", &SpikeDetector::state)
      .def_property_readonly("loss_flag", &SpikeDetector::loss_flag)
      .def_property_readonly("norm_limit", &SpikeDetector::norm_limit)
      .def_property_readonly("loss_limit", &SpikeDetector::loss_limit);
}

}  // namespace oxytorch::bindings
