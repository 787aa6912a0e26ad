// Configuration, units, machine facts and statistics for Python.
#include "bindings.h"

#include <pybind11/typing.h>

#include <cmath>
#include <cstring>

#include "config_value.h"
#include "oxytorch/config.h"
#include "oxytorch/config_use.h"
#include "oxytorch/error.h"
#include "oxytorch/isa.h"
#include "oxytorch/load.h"
#include "oxytorch/statistics.h"
#include "oxytorch/system.h"
#include "oxytorch/units.h"

namespace oxytorch::bindings {

std::optional<ConfigValue> to_config_value(py::handle object) {
  PyObject* raw = object.ptr();
  const char* type = Py_TYPE(raw)->tp_name;
  if (object.is_none()) return std::string("none");
  if (PyBool_Check(raw) || std::strcmp(type, "numpy.bool") == 0 || std::strcmp(type, "numpy.bool_") == 0) {
    return PyObject_IsTrue(raw) == 1;
  }
  if (py::isinstance<py::str>(object)) return object.cast<std::string>();
  if (PyFloat_Check(raw)) return PyFloat_AS_DOUBLE(raw);
  if (PyIndex_Check(raw)) {
    const auto whole = py::reinterpret_steal<py::object>(PyNumber_Index(raw));
    if (whole) {
      int overflow = 0;
      const long long value = PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow);
      // Out of every field's range, whose message shows it.
      if (overflow != 0) return overflow > 0 ? INFINITY : -INFINITY;
      return static_cast<std::int64_t>(value);
    }
    PyErr_Clear();  // a tensor of floats has the method and refuses
  }
  if (PyNumber_Check(raw)) {
    const auto number = py::reinterpret_steal<py::object>(PyNumber_Float(raw));
    if (number) return PyFloat_AS_DOUBLE(number.ptr());
    PyErr_Clear();
  }
  return std::nullopt;
}

namespace {

using Values = std::vector<double>;
using Ends = std::tuple<double, double, double, double>;
using Facts = py::typing::Dict<py::str, py::object>;
using PythonStatistic = py::typing::Callable<double(py::typing::List<py::float_>)>;

const char* name_of(ConfigSource source) {
  switch (source) {
    case ConfigSource::Level: return "level";
    case ConfigSource::File: return "file";
    case ConfigSource::Caller: break;
  }
  return "caller";
}

ConfigSource source_named(const std::string& text) {
  if (text == "file") return ConfigSource::File;
  OXY_CHECK(text == "caller", InvalidArgument, "unknown source '", text, "'; use 'file' or 'caller'.");
  return ConfigSource::Caller;
}

void bind_config(py::module_& m) {
  py::class_<PerformanceConfig>(m, "PerformanceConfig", "The native configuration; see oxytorch.PerformanceConfig.")
      .def(py::init<std::string_view>(), py::arg("level"))
      .def(py::init<const PerformanceConfig&>(), py::arg("other"))
      .def_static("from_json", &PerformanceConfig::from_json, py::arg("text"), py::arg("origin") = "JSON text")
      .def_static("from_yaml", &PerformanceConfig::from_yaml, py::arg("text"), py::arg("origin") = "YAML text")
      .def_static("from_file", &PerformanceConfig::from_file, py::arg("path"), release_gil())
      .def("to_json", &PerformanceConfig::to_json)
      .def("to_yaml", &PerformanceConfig::to_yaml)
      .def("save", &PerformanceConfig::save, py::arg("path"), release_gil())
      .def(
          "set",
          [](PerformanceConfig& config, const std::string& key, const py::object& value, const std::string& source,
             const std::string& origin) {
            const auto known = to_config_value(value);
            OXY_CHECK(known, InvalidType, "setting '", PerformanceConfig::field(key).key, "' must be ",
                      PerformanceConfig::field(key).allowed(), ", not a ", Py_TYPE(value.ptr())->tp_name, '.');
            config.set(key, *known, source_named(source), origin);
          },
          py::arg("key"), py::arg("value"), py::arg("source") = "caller", py::arg("origin") = "")
      .def("unset", &PerformanceConfig::unset, py::arg("key"))
      .def("get", &PerformanceConfig::get, py::arg("key"))
      .def(
          "source", [](const PerformanceConfig& config, const std::string& key) { return name_of(config.source(key)); },
          py::arg("key"))
      .def("origin", &PerformanceConfig::origin, py::arg("key"))
      .def("explain", &PerformanceConfig::explain)
      .def(
          "equals", [](const PerformanceConfig& a, const PerformanceConfig& b) { return a == b; }, py::arg("other"))
      .def_static("keys",
                  [] {
                    std::vector<std::string> keys;
                    for (const ConfigField& field : PerformanceConfig::fields()) keys.push_back(field.key);
                    return keys;
                  })
      .def_static("words",
                  [] {
                    std::vector<std::pair<std::string, std::string>> words;
                    for (const ConfigWord& word : PerformanceConfig::words()) words.emplace_back(word.word, word.key);
                    return words;
                  })
      .def_static("sections", &PerformanceConfig::sections)
      .def_static(
          "check_names", [](const std::vector<std::string>& names) { PerformanceConfig::check_names(names); },
          py::arg("names"))
      .def_static("key_of", &PerformanceConfig::key_of, py::arg("name"))
      .def_static(
          "describe",
          [](const std::string& key) {
            const ConfigField& field = PerformanceConfig::field(key);
            return Facts(py::arg("key") = field.key, py::arg("allowed") = field.allowed(),
                         py::arg("basic") = field.basic, py::arg("advanced") = field.advanced,
                         py::arg("ultra") = field.ultra, py::arg("reason") = field.reason);
          },
          py::arg("key"));
  m.def("checkpointing_of", &checkpointing_of, py::arg("config"),
        "What gradient_checkpointing comes to, of which goal = memory is a part.");
  m.def(
      "setting_refusal",
      [](const std::string& key, const std::string& user) { return refusal(key, parse_config_user(user)); },
      py::arg("key"), py::arg("user"));
  m.def(
      "check_settings",
      [](const PerformanceConfig& config, const std::string& user) { check_settings(config, parse_config_user(user)); },
      py::arg("config"), py::arg("user"));
  m.def(
      "check_own_tail",
      [](const PerformanceConfig& config, double clip_norm, double clip_value, double ema_decay,
         const std::string& nonfinite, bool norm_in_backward, bool step_in_backward) {
        check_own_tail(config, {clip_norm, clip_value, ema_decay, nonfinite, norm_in_backward, step_in_backward});
      },
      py::arg("config"), py::kw_only(), py::arg("clip_norm"), py::arg("clip_value"), py::arg("ema_decay"),
      py::arg("nonfinite"), py::arg("norm_in_backward"), py::arg("step_in_backward"));
  m.def("is_given", &is_given, py::arg("config"), py::arg("key"));
}

std::uint64_t parse_size(const std::string& text, std::optional<std::uint64_t> total) {
  const Size size = Size::parse(text);
  OXY_CHECK(size.kind() == Size::Kind::Bytes || total, InvalidArgument, "size '", size.to_string(),
            "' depends on a total; pass total=, for example that of system_info()['memory']['limit'].");
  return size.resolve(total.value_or(0));
}

void bind_units(py::module_& m) {
  m.def("parse_size", &parse_size, py::arg("text"), py::arg("total") = py::none());
  m.def(
      "format_size",
      [](std::uint64_t bytes, bool exact) { return exact ? Size::bytes(bytes).to_string() : format_size(bytes); },
      py::arg("bytes"), py::arg("exact") = false);
  m.def("format_duration", &format_duration, py::arg("seconds"));
}

void bind_system(py::module_& m) {
  m.def(
      "cores",
      [](const std::string& root) {
        const CoreInfo info = read_cores(root);
        return Facts(py::arg("logical") = info.logical, py::arg("physical") = info.physical,
                     py::arg("affinity") = info.affinity, py::arg("quota") = info.quota,
                     py::arg("usable") = info.usable, py::arg("usable_physical") = info.usable_physical,
                     py::arg("one_a_core") = info.one_a_core, py::arg("last_level_caches") = info.last_level_caches);
      },
      py::arg("root") = "/");
  m.def(
      "memory",
      [](const std::string& root) {
        const MemoryInfo info = read_memory(root);
        return Facts(py::arg("physical") = info.physical, py::arg("cgroup_limit") = info.cgroup_limit,
                     py::arg("limit") = info.limit, py::arg("available") = info.available,
                     py::arg("resident") = info.resident, py::arg("peak_resident") = info.peak_resident);
      },
      py::arg("root") = "/");
  m.def(
      "neighbours",
      [] {
        std::optional<Neighbours> found;
        {
          const py::gil_scoped_release free;
          found = read_neighbours();
        }
        if (!found) found.emplace();
        py::typing::List<Facts> processes;
        for (const Neighbour& one : found->processes) {
          processes.append(Facts(py::arg("pid") = one.pid,
                                 py::arg("name") = py::bytes(one.name).attr("decode")("utf-8", "replace"),
                                 py::arg("cores") = one.cores, py::arg("threads") = one.threads));
        }
        return Facts(py::arg("cores") = found->cores, py::arg("of") = found->of,
                     py::arg("share_cores") = found->share_cores(), py::arg("said") = found->said(),
                     py::arg("processes") = processes);
      },
      "Looks for a quarter of a second.");
  m.def(
      "set_neighbours",
      [](std::optional<double> cores, int of) {
        if (!cores) return set_neighbours(std::nullopt);
        set_neighbours(Neighbours{
            *cores, of, *cores > 0 ? std::vector<Neighbour>{{77, "python3", *cores, 4}} : std::vector<Neighbour>{}});
      },
      py::arg("cores"), py::arg("of") = 2, "What neighbours() says from now on; None: what is so. For tests.");
  m.def("processor_name", &processor_name, py::arg("root") = "/");
  m.def("cpu_features", [] {
    const CpuFeatures& cpu = cpu_features();
    return Facts(py::arg("f16c") = cpu.f16c, py::arg("fma") = cpu.fma, py::arg("avx2") = cpu.avx2,
                 py::arg("avx512f") = cpu.avx512f, py::arg("avx512bw") = cpu.avx512bw,
                 py::arg("avx512dq") = cpu.avx512dq, py::arg("avx512vl") = cpu.avx512vl,
                 py::arg("avx512_vnni") = cpu.avx512_vnni, py::arg("avx512_bf16") = cpu.avx512_bf16,
                 py::arg("avx512_fp16") = cpu.avx512_fp16, py::arg("amx_tile") = cpu.amx_tile,
                 py::arg("amx_bf16") = cpu.amx_bf16, py::arg("amx_fp16") = cpu.amx_fp16,
                 py::arg("native_bf16") = cpu.has_native_bf16(), py::arg("native_fp16") = cpu.has_native_fp16());
  });
  m.def("active_isa", [] { return std::string(name(active_isa())); });
  m.def("supported_isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : supported_isas()) names.emplace_back(name(isa));
    return names;
  });
}

Ends ends(const Interval& interval) { return {interval.low, interval.mid, interval.high, interval.confidence}; }

void bind_statistics(py::module_& m) {
  m.def("mean", [](const Values& values) { return mean(values); }, py::arg("values"), release_gil());
  m.def("stddev", [](const Values& values) { return stddev(values); }, py::arg("values"), release_gil());
  m.def("median", [](const Values& values) { return median(values); }, py::arg("values"), release_gil());
  m.def(
      "quantile", [](const Values& values, double q) { return quantile(values, q); }, py::arg("values"), py::arg("q"),
      release_gil());
  m.def(
      "median_absolute_deviation", [](const Values& values) { return median_absolute_deviation(values); },
      py::arg("values"), release_gil());
  m.def(
      "median_interval",
      [](const Values& values, double confidence, std::int64_t resamples, std::uint64_t seed) {
        return ends(median_interval(values, {confidence, resamples, seed}));
      },
      py::arg("values"), py::arg("confidence"), py::arg("resamples"), py::arg("seed"), release_gil());
  m.def(
      "paired_ratio_interval",
      [](const Values& numerators, const Values& denominators, double confidence, std::int64_t resamples,
         std::uint64_t seed) {
        return ends(paired_ratio_interval(numerators, denominators, {confidence, resamples, seed}));
      },
      py::arg("numerators"), py::arg("denominators"), py::arg("confidence"), py::arg("resamples"), py::arg("seed"),
      release_gil());
  m.def("student_t_quantile", &student_t_quantile, py::arg("p"), py::arg("degrees"), release_gil());
  m.def(
      "starts_interval",
      [](const Values& starts, double confidence) { return ends(starts_interval(starts, confidence)); },
      py::arg("starts"), py::arg("confidence"), release_gil());
  m.def(
      "geometric_mean_interval",
      [](const std::vector<Values>& subjects, double confidence) {
        return ends(geometric_mean_interval(subjects, confidence));
      },
      py::arg("subjects"), py::arg("confidence"), release_gil());
  // Holds the GIL: the statistic is a Python function.
  m.def(
      "bootstrap_interval",
      [](const Values& values, const PythonStatistic& statistic, double confidence, std::int64_t resamples,
         std::uint64_t seed) {
        return ends(bootstrap_interval(values,
                                       [&](std::span<const double> sample) {
                                         return statistic(Values(sample.begin(), sample.end())).cast<double>();
                                       },
                                       {confidence, resamples, seed}));
      },
      py::arg("values"), py::arg("statistic"), py::arg("confidence"), py::arg("resamples"), py::arg("seed"));
}

}  // namespace

void bind_base(py::module_& m) {
  bind_config(m);
  bind_units(m);
  bind_system(m);
  bind_statistics(m);
}

}  // namespace oxytorch::bindings
