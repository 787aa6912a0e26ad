// The host report, the topology and the hardware table for Python.
#include <pybind11/typing.h>

#include <map>

#include "config_value.h"
#include "oxytorch/error.h"
#include "oxytorch/machine.h"

namespace oxytorch::bindings {
namespace {

using Facts = py::typing::Dict<py::str, py::object>;

Facts to_facts(const machine::HostRow& row) {
  return Facts(py::arg("area") = row.area, py::arg("what") = row.what, py::arg("where") = row.where,
               py::arg("value") = row.value, py::arg("verdict") = machine::name(row.verdict),
               py::arg("suggestion") = row.suggestion, py::arg("why") = row.why, py::arg("command") = row.command,
               py::arg("needs_root") = row.needs_root);
}

void bind_host_report(py::module_& m) {
  m.def(
      "host_report",
      [](const std::string& data_directory, const std::string& root) {
        std::vector<machine::HostRow> rows;
        {
          const py::gil_scoped_release free;
          rows = machine::host_report({.root = root, .data_directory = data_directory});
        }
        py::typing::List<Facts> list;
        for (const machine::HostRow& row : rows) list.append(to_facts(row));
        return list;
      },
      py::arg("data_directory") = "", py::arg("root") = "/");
  m.def(
      "host_report_text",
      [](const std::string& data_directory, const std::string& root) {
        return machine::to_text(machine::host_report({.root = root, .data_directory = data_directory}));
      },
      py::arg("data_directory") = "", py::arg("root") = "/", release_gil());
}

Facts to_facts(const machine::Hardware& one) {
  return Facts(py::arg("name") = one.name, py::arg("maker") = one.maker, py::arg("memory_bytes") = one.memory_bytes,
               py::arg("memory_bytes_per_s") = one.memory_bytes_per_s, py::arg("peak_ops_per_s") = one.peak_ops_per_s,
               py::arg("link") = one.link, py::arg("link_bytes_per_s") = one.link_bytes_per_s,
               py::arg("watts") = one.watts, py::arg("source") = one.source);
}

Facts to_facts(const machine::CpuClass& one) {
  return Facts(py::arg("name") = one.name, py::arg("ops_per_cycle") = one.ops_per_cycle,
               py::arg("source") = one.source);
}

void bind_hardware(py::module_& m) {
  m.def("hardware_table", [] {
    py::typing::List<Facts> list;
    for (const machine::Hardware& one : machine::hardware_table()) list.append(to_facts(one));
    return list;
  });
  m.def(
      "find_hardware",
      [](const std::string& name) {
        const machine::HardwareMatch match = machine::find_hardware(name);
        return std::make_pair(match.hardware ? std::optional(to_facts(*match.hardware)) : std::nullopt, match.reason);
      },
      py::arg("name"));
  m.def("cpu_class", []() -> std::optional<Facts> {
    const machine::CpuClass* found = machine::cpu_class();
    return found ? std::optional(to_facts(*found)) : std::nullopt;
  });
}

void bind_topology(py::module_& m) {
  using machine::TopologyConfig;
  py::class_<TopologyConfig>(m, "TopologyConfig", "The native topology; see oxytorch.TopologyConfig.")
      .def(py::init<>())
      .def(py::init<const TopologyConfig&>(), py::arg("other"))
      .def_static("from_json", &TopologyConfig::from_json, py::arg("text"), py::arg("origin") = "JSON text")
      .def_static("from_yaml", &TopologyConfig::from_yaml, py::arg("text"), py::arg("origin") = "YAML text")
      .def_static("from_file", &TopologyConfig::from_file, py::arg("path"), release_gil())
      .def_static(
          "detect",
          [](const std::string& root, std::optional<std::map<std::string, std::string>> environment) {
            return TopologyConfig::detect({root, std::move(environment), std::nullopt});
          },
          py::arg("root") = "/", py::arg("environment") = py::none(), release_gil())
      .def(
          "set",
          [](TopologyConfig& config, const std::string& key, const py::object& value, const std::string& origin) {
            const auto known = to_config_value(value);
            OXY_CHECK(known, InvalidType, "topology key '", key, "' cannot be a ", Py_TYPE(value.ptr())->tp_name,
                      "; give a number or a text.");
            config.set(key, *known, origin);
          },
          py::arg("key"), py::arg("value"), py::arg("origin") = "caller")
      .def("get", &TopologyConfig::get, py::arg("key"))
      .def("origin", &TopologyConfig::origin, py::arg("key"))
      .def("check", &TopologyConfig::check)
      .def("to_json", &TopologyConfig::to_json)
      .def("explain", &TopologyConfig::explain)
      .def("total_accelerators", &TopologyConfig::total_accelerators)
      .def("total_accelerator_memory", &TopologyConfig::total_accelerator_memory)
      .def("bisection_bytes_per_s", &TopologyConfig::bisection_bytes_per_s)
      .def("network_bytes_per_s_per_accelerator", &TopologyConfig::network_bytes_per_s_per_accelerator)
      .def("host_memory_per_accelerator", &TopologyConfig::host_memory_per_accelerator)
      .def("cores_per_accelerator", &TopologyConfig::cores_per_accelerator)
      .def(
          "equals", [](const TopologyConfig& a, const TopologyConfig& b) { return a == b; }, py::arg("other"))
      .def_static("keys", [] {
        std::vector<std::string> keys;
        for (const machine::TopologyField& field : TopologyConfig::fields()) keys.push_back(field.key);
        return keys;
      });
}

}  // namespace

void bind_machine(py::module_& m) {
  bind_host_report(m);
  bind_hardware(m);
  bind_topology(m);
}

}  // namespace oxytorch::bindings
