#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "bindings.h"
#include "oxytorch/error.h"
#include "oxytorch/memory/manager.h"

namespace oxytorch::bindings {
namespace {

constexpr std::pair<const char*, MemoryLevel> kLevels[] = {
    {"normal", MemoryLevel::Normal}, {"warning", MemoryLevel::Warning}, {"critical", MemoryLevel::Critical}};

MemoryLevel level_of(const std::string& name) {
  for (const auto& [word, level] : kLevels) {
    if (name == word) return level;
  }
  OXY_CHECK(false, InvalidArgument, "there is no level '", name, "'; there are 'normal', 'warning' and 'critical'.");
}

std::string name_of(MemoryLevel level) { return kLevels[static_cast<std::size_t>(level)].first; }

}  // namespace

void bind_memory_manager(py::module_& m) {
  py::class_<MemoryUse>(m, "MemoryUse", "Bytes of this process, as the kernel tells them.")
      .def_readonly("resident", &MemoryUse::resident, "Now.")
      .def_readonly("peak", &MemoryUse::peak, "The most that was resident.")
      .def_readonly("allowed", &MemoryUse::allowed,
                    "The lowest limit that is set, or what the process can reach: resident and available.")
      .def_readonly("available", &MemoryUse::available, "Of the machine or container, still.")
      .def_readonly("kept", &MemoryUse::kept, "Free, and kept by allocators for reuse.")
      .def_readonly("tensors", &MemoryUse::tensors,
                    "In CPU tensors that were made while they were counted: under a limit or a Meter.")
      .def_property_readonly("share", &MemoryUse::share, "resident over allowed.")
      .def("__str__", &MemoryUse::text)
      .def("__repr__", [](const MemoryUse& use) { return "MemoryUse(" + use.text() + ")"; });
  const MemoryConfig defaults;
  py::class_<MemoryManager>(m, "MemoryManager", "Memory of a run; see oxytorch/memory/manager.h.")
      .def(py::init([](const std::string& limit, double warn_at, double critical_at, double clean_at,
                       std::int64_t clean_every, const std::string& cache_limit, std::int64_t check_every) {
             return MemoryManager(MemoryConfig()
                                      .limit(limit)
                                      .warn_at(warn_at)
                                      .critical_at(critical_at)
                                      .clean_at(clean_at)
                                      .clean_every(clean_every)
                                      .cache_limit(cache_limit)
                                      .check_every(check_every));
           }),
           py::kw_only(), py::arg("limit") = defaults.limit(), py::arg("warn_at") = defaults.warn_at(),
           py::arg("critical_at") = defaults.critical_at(), py::arg("clean_at") = defaults.clean_at(),
           py::arg("clean_every") = defaults.clean_every(), py::arg("cache_limit") = defaults.cache_limit(),
           py::arg("check_every") = defaults.check_every())
      .def("use", &MemoryManager::use)
      .def(
          "on",
          [](MemoryManager& manager, const std::string& level, MemoryManager::Callback callback) {
            manager.on(level_of(level), std::move(callback));
          },
          py::arg("level"), py::arg("callback"))
      .def("on_clean", &MemoryManager::on_clean, py::arg("release"))
      .def("clean", &MemoryManager::clean)
      .def("revert", &MemoryManager::revert)
      .def("step", &MemoryManager::step)
      .def("check", [](MemoryManager& manager) { return name_of(manager.check()); })
      .def_property_readonly("level", [](const MemoryManager& manager) { return name_of(manager.level()); })
      .def_property_readonly("steps", &MemoryManager::steps)
      .def_property_readonly("clean_ups", &MemoryManager::clean_ups)
      .def_property_readonly("bytes_cleaned", &MemoryManager::bytes_cleaned)
      .def_property_readonly("events", &MemoryManager::events)
      .def("report", &MemoryManager::report);
}

}  // namespace oxytorch::bindings
