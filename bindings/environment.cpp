// The registry of environment variables, its judge and the presets for Python.
#include "oxytorch/environment.h"

#include "bindings.h"

#include <pybind11/typing.h>

namespace oxytorch::bindings {
namespace {

using Facts = py::typing::Dict<py::str, py::object>;
using Variables = std::map<std::string, std::string>;

// Environments may hold any bytes; Python's own reading of them is surrogateescape.
py::str text(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<py::ssize_t>(bytes.size()), "surrogateescape"));
}

std::string bytes(const py::str& unicode) {
  const auto encoded =
      py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(unicode.ptr(), "utf-8", "surrogateescape"));
  if (!encoded) throw py::error_already_set();
  return encoded;
}

Facts facts(const environment::Setting& setting) {
  return Facts(py::arg("name") = setting.name, py::arg("family") = environment::name(setting.family),
               py::arg("component") = setting.component, py::arg("kind") = environment::name(setting.kind),
               py::arg("low") = setting.low, py::arg("high") = setting.high, py::arg("choices") = setting.choices,
               py::arg("grammar") = setting.grammar, py::arg("allowed") = setting.allowed(),
               py::arg("default") = setting.standard, py::arg("since") = setting.since,
               py::arg("until") = setting.until, py::arg("deprecated") = setting.deprecated,
               py::arg("replacement") = setting.replacement, py::arg("what") = setting.what,
               py::arg("evidence") = setting.evidence);
}

Facts facts(const environment::EnvironmentIssue& issue) {
  return Facts(py::arg("verdict") = environment::name(issue.verdict),
               py::arg("severity") = environment::name(issue.severity), py::arg("name") = text(issue.name),
               py::arg("value") = text(issue.value), py::arg("message") = text(issue.message),
               py::arg("other") = issue.other, py::arg("replacement") = issue.replacement,
               py::arg("evidence") = issue.evidence, py::arg("file") = text(issue.file), py::arg("line") = issue.line);
}

py::typing::List<Facts> all_facts(const std::vector<environment::EnvironmentIssue>& issues) {
  py::typing::List<Facts> list;
  for (const auto& issue : issues) list.append(facts(issue));
  return list;
}

}  // namespace

void bind_environment(py::module_& m) {
  py::class_<environment::Context>(m, "Context")
      .def(py::init<>())
      .def_readwrite("backend", &environment::Context::backend)
      .def_readwrite("versions", &environment::Context::versions)
      .def_readwrite("cores", &environment::Context::cores)
      .def_readwrite("efa", &environment::Context::efa)
      .def_readwrite("compile", &environment::Context::compile)
      .def_readwrite("determinism", &environment::Context::determinism)
      .def_readwrite("openmp", &environment::Context::openmp)
      .def_readwrite("fine", &environment::Context::fine)
      .def_readwrite("neighbours", &environment::Context::neighbours);
  m.def("settings", [] {
    py::typing::List<Facts> list;
    for (const auto& setting : environment::settings()) list.append(facts(setting));
    return list;
  });
  m.def(
      "lint",
      [](const py::typing::Dict<py::str, py::str>& variables, const environment::Context& context) {
        Variables read;
        for (const auto& [name, value] : variables) {
          read[bytes(py::cast<py::str>(name))] = bytes(py::cast<py::str>(value));
        }
        return all_facts(environment::lint(read, context));
      },
      py::arg("variables"), py::arg("context"));
  m.def(
      "lint_script",
      [](const py::str& script, const py::str& file, const environment::Context& context) {
        return all_facts(environment::lint(environment::read_script(bytes(script), bytes(file)), context));
      },
      py::arg("script"), py::arg("file"), py::arg("context"));
  m.def(
      "read_script",
      [](const py::str& script) {
        py::typing::List<Facts> list;
        for (const auto& one : environment::read_script(bytes(script))) {
          list.append(Facts(py::arg("name") = text(one.name), py::arg("value") = text(one.value),
                            py::arg("exact") = one.exact, py::arg("removed") = one.removed,
                            py::arg("scope") = one.scope, py::arg("line") = one.line));
        }
        return list;
      },
      py::arg("script"));
  m.def(
      "preset",
      [](const std::string& goal, const std::string& device, int cores, int processes, bool efa, bool jemalloc,
         const std::string& recipe_cache) {
        const environment::Preset made =
            environment::preset(goal, device, {cores, processes, efa, jemalloc, recipe_cache});
        py::typing::List<Facts> list;
        for (const auto& one : made.settings) {
          list.append(Facts(py::arg("name") = one.name, py::arg("value") = one.value, py::arg("reason") = one.reason,
                            py::arg("evidence") = one.evidence));
        }
        return Facts(py::arg("goal") = made.goal, py::arg("device") = made.device, py::arg("advice") = made.advice,
                     py::arg("settings") = list, py::arg("shell") = environment::shell_text(made));
      },
      py::arg("goal"), py::arg("device"), py::arg("cores"), py::arg("processes"), py::arg("efa"), py::arg("jemalloc"),
      py::arg("recipe_cache"));
}

}  // namespace oxytorch::bindings
