// The host report, the topology and the hardware table for Python.
#include <pybind11/typing.h>

#include "bindings.h"
#include "oxytorch/machine/host_report.h"

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
          rows = machine::host_report({root, data_directory});
        }
        py::typing::List<Facts> list;
        for (const machine::HostRow& row : rows) list.append(to_facts(row));
        return list;
      },
      py::arg("data_directory") = "", py::arg("root") = "/");
  m.def(
      "host_report_text",
      [](const std::string& data_directory, const std::string& root) {
        return machine::to_text(machine::host_report({root, data_directory}));
      },
      py::arg("data_directory") = "", py::arg("root") = "/", release_gil());
}

}  // namespace

void bind_machine(py::module_& m) { bind_host_report(m); }

}  // namespace oxytorch::bindings
