#include "bindings.h"

#include <string>
#include <vector>

#include "oxytorch/backend/registry.h"
#include "oxytorch/backend/sim.h"

namespace oxytorch::bindings {
namespace {

py::dict as_dict(const backend::BackendInfo& info) {
  py::list devices;
  for (const backend::DeviceInfo& device : info.devices) {
    py::dict entry;
    entry["name"] = device.name;
    entry["architecture"] = device.architecture;
    entry["torch_device"] = device.torch_device.empty() ? py::object(py::none()) : py::str(device.torch_device);
    entry["memory_bytes"] = device.memory_bytes;
    devices.append(entry);
  }
  py::dict entry;
  entry["name"] = info.name;
  entry["score"] = info.score;
  entry["reason"] = info.reason;
  entry["devices"] = devices;
  entry["description"] = info.description;
  entry["origin"] = info.origin;
  return entry;
}

}  // namespace

void bind_backend(py::module_& m) {
  m.def(
      "available_backends",
      [] {
        std::vector<backend::BackendInfo> all;
        {
          py::gil_scoped_release release;
          all = backend::available_backends();
        }
        py::list list;
        for (const backend::BackendInfo& info : all) list.append(as_dict(info));
        return list;
      },
      "Every backend, best score first: list of dict.");
  m.def(
      "load",
      [](const std::string& path) {
        const backend::Backend* loaded = nullptr;
        {
          py::gil_scoped_release release;
          loaded = &backend::Registry::instance().load(path);
        }
        return loaded->name();
      },
      py::arg("path"), "Loads one backend library and gives its name.");
  m.def("best", [] { return backend::best().name(); }, release_gil(), "Name of the backend with the best score.");
  m.def(
      "problems",
      [] {
        std::vector<std::pair<std::string, std::string>> problems;
        for (const backend::Problem& problem : backend::Registry::instance().problems()) {
          problems.emplace_back(problem.path, problem.reason);
        }
        return problems;
      },
      "Libraries that discovery refused: list of (path, reason).");
  m.def(
      "configure_sim",
      [](const std::string& settings) { backend::configure_sim(backend::parse_sim_options(settings)); },
      py::arg("settings"), release_gil(), "Sets the simulated devices, in the words of OXYTORCH_SIM.");
}

}  // namespace oxytorch::bindings
