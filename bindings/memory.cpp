#include "oxytorch/memory.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"

namespace oxytorch::bindings {
namespace {

using Count = std::optional<std::int64_t>;

void bind_batch_search(py::module_& m) {
  py::class_<BatchTrial>(m, "BatchTrial", "One batch size, as it ran.")
      .def(py::init([](std::int64_t size, bool fits, std::optional<std::uint64_t> peak_bytes,
                       std::optional<double> step_seconds, std::string reason) {
             return BatchTrial{size, fits, peak_bytes, step_seconds, std::move(reason)};
           }),
           py::arg("size"), py::arg("fits"), py::arg("peak_bytes"), py::arg("step_seconds"), py::arg("reason"))
      .def_readonly("size", &BatchTrial::size, "Samples in the batch.")
      .def_readonly("fits", &BatchTrial::fits, "Whether its steps ran within the limit, headroom left.")
      .def_readonly("peak_bytes", &BatchTrial::peak_bytes,
                    "Most memory in use during the steps; None where they ran out of it.")
      .def_readonly("step_seconds", &BatchTrial::step_seconds,
                    "Median of the steps after the first; None where they ran out of memory.")
      .def_readonly("reason", &BatchTrial::reason, "Why it does not fit; empty where it does.")
      .def_property_readonly("samples_per_second", &BatchTrial::samples_per_second, "0 where it did not run.");
  py::class_<BatchPlan>(m, "BatchPlan", "What batch sizes take and give. Every size in it has been run.")
      .def(py::init([](std::int64_t largest, std::int64_t fastest, std::vector<BatchTrial> trials,
                       std::uint64_t limit_bytes, double headroom, Count samples, Count current) {
             return BatchPlan{largest, fastest, std::move(trials), limit_bytes, headroom, samples, current};
           }),
           py::arg("largest"), py::arg("fastest"), py::arg("trials"), py::arg("limit_bytes"), py::arg("headroom"),
           py::arg("samples") = std::nullopt, py::arg("current") = std::nullopt)
      .def_readonly("largest", &BatchPlan::largest, "The largest size that ran within the limit with headroom left.")
      .def_readonly("fastest", &BatchPlan::fastest, "The smallest size within 2 % of the most samples a second.")
      .def_readonly("trials", &BatchPlan::trials, "By size.")
      .def_readonly("limit_bytes", &BatchPlan::limit_bytes)
      .def_readonly("headroom", &BatchPlan::headroom, "Share of the limit that is left free.")
      .def_readonly("samples", &BatchPlan::samples, "In an epoch, where given.")
      .def_readonly("current", &BatchPlan::current, "The batch size of today, where given.")
      .def("split", &BatchPlan::split, py::arg("batch"),
           "Return (samples a piece, pieces) that make up exactly `batch` with the fewest pieces that fit.\n\n"
           "Accumulating gradients over the pieces keeps the batch, and so the updates, as they are. ValueError for a "
           "batch under 1.")
      .def("table", &BatchPlan::table, "Return the sizes as a table, and what another batch size does to convergence.");
  const BatchSearchOptions defaults;
  py::class_<BatchSearch>(m, "BatchSearch", "Which batch sizes to run; see oxytorch/memory/batch_search.h.")
      .def(py::init([](std::uint64_t limit, std::uint64_t base, std::int64_t start, std::int64_t most,
                       std::int64_t multiple, double headroom, double resolution, bool curve) {
             return BatchSearch({start, most, multiple, headroom, resolution, curve}, limit, base);
           }),
           py::arg("limit"), py::arg("base"), py::kw_only(), py::arg("start") = defaults.start,
           py::arg("most") = defaults.most, py::arg("multiple") = defaults.multiple,
           py::arg("headroom") = defaults.headroom, py::arg("resolution") = defaults.resolution,
           py::arg("curve") = defaults.curve)
      .def("next", &BatchSearch::next, "The size to run next; None where the search is over.")
      .def(
          "ran",
          [](BatchSearch& search, std::uint64_t peak, const std::vector<double>& seconds) {
            search.ran(peak, seconds);
          },
          py::arg("peak_bytes"), py::arg("step_seconds"))
      .def("ran_out", &BatchSearch::ran_out, py::arg("why"))
      .def("plan", &BatchSearch::plan, py::arg("samples"), py::arg("current"));
  m.def("says_out_of_memory", &says_out_of_memory, py::arg("message"),
        "Whether an error says that there was no memory.");
  m.def("cap_host_memory", &cap_host_memory, py::arg("limit"),
        "Has allocations fail that would take this process beyond so many resident bytes, until reverted.");
  m.def("most_resident", &most_resident, py::arg("take"),
        "The most bytes of this process that are in memory while `take` runs; None where the kernel does not tell.");
  m.def("reset_host_peak", &reset_host_peak, "Begins the peak of resident memory anew.");
}

void bind_pack_saved_tensors(py::module_& m) {
  using memory::PackedReport;
  using memory::PackSavedTensors;
  py::class_<PackedReport>(m, "PackedReport", "What was packed since the object was made, each memory once.")
      .def_readonly("tensors", &PackedReport::tensors)
      .def_readonly("bytes", &PackedReport::bytes, "As torch keeps them.")
      .def_readonly("packed_bytes", &PackedReport::packed_bytes, "In memory.")
      .def_readonly("file_bytes", &PackedReport::file_bytes)
      .def_readonly("relative_error", &PackedReport::relative_error,
                    "Root of the sum of squared errors over that of squared values, of all that was rounded.")
      .def("text", &PackedReport::text, "Return it in a sentence.");
  using Scopes = std::vector<std::unique_ptr<PackSavedTensors::Scope>>;
  static thread_local Scopes open;  // of all objects, the innermost last
  py::class_<PackSavedTensors>(m, "PackSavedTensors", "Packs what operators save while it is entered.")
      .def(py::init([](const std::string& format, const std::string& folder, std::size_t least) {
             return std::make_unique<PackSavedTensors>(memory::parse_saved_format(format), folder, least);
           }),
           py::arg("format"), py::arg("folder"), py::arg("least"))
      .def("__enter__",
           [](py::object self) {
             open.push_back(std::make_unique<PackSavedTensors::Scope>(self.cast<PackSavedTensors&>()));
             return self;
           })
      .def(
          "__exit__",
          [](PackSavedTensors&, const py::object&, const py::object&, const py::object&) {
            OXY_CHECK(!open.empty(), InvalidState, "PackSavedTensors is left on a thread that has not entered it.");
            open.pop_back();
          },
          py::arg("kind"), py::arg("error"), py::arg("trace"))
      .def_static("others_keep", &PackSavedTensors::others_keep,
                  "Whether hooks or a checkpoint keep what is saved on this thread.")
      .def("report", &PackSavedTensors::report);
}

void bind_parked(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  m.attr("packed_bytes") = memory::kPackedBytes;
  m.attr("parked_bytes") = memory::kParkedBytes;
  m.def("parking_folders", &memory::parking_folders, "Where files of parked tensors are made, the first that can be.");
  m.def("park", &memory::park, py::arg("tensor"), py::arg("folders"), Released(),
        "Return a copy in a file without a name; see oxytorch/memory/parked.h.");
  m.def("is_parked", &memory::is_parked, py::arg("tensor"), "Whether a tensor's memory is such a file.");
  m.def("move_to_file", &memory::move_to_file, py::arg("tensor"), Released(),
        "Move a tensor's own memory to a file; False where it stays.");
  m.def("move_to_memory", &memory::move_to_memory, py::arg("tensor"), Released(),
        "Move a parked tensor's own memory back; False where it stays.");
  m.def("rest", &memory::rest, py::arg("tensor"), Released(), "Let go of the pages of a parked tensor.");
  m.def("rest_all", &memory::rest_all, Released(), "Let go of the pages of all parked tensors.");
  m.def("read_ahead", &memory::read_ahead, py::arg("tensor"), Released(),
        "Have the pages of a parked tensor read from the disk meanwhile.");
  m.def("parked_parts", &memory::parked_parts, py::arg("bytes"),
        "How many of some tensors each part takes where a part at a time is in memory.");
  m.def("populate", &memory::populate, py::arg("tensor"), Released(),
        "Map the pages of a parked tensor at once, to be written.");
}

}  // namespace

void bind_memory(py::module_& m) {
  bind_batch_search(m);
  bind_pack_saved_tensors(m);
  bind_parked(m);
  py::class_<HostPoolStats>(m, "HostPoolStats", "Bytes and counts of the pool of host memory.")
      .def_readonly("live_bytes", &HostPoolStats::live_bytes)
      .def_readonly("peak_bytes", &HostPoolStats::peak_bytes)
      .def_readonly("retained_bytes", &HostPoolStats::retained_bytes)
      .def_readonly("limit_bytes", &HostPoolStats::limit_bytes)
      .def_readonly("hits", &HostPoolStats::hits)
      .def_readonly("misses", &HostPoolStats::misses)
      .def_readonly("returned_bytes", &HostPoolStats::returned_bytes);
  m.attr("pooled_bytes") = kPooledBytes;
  m.def("use_host_pool", &use_host_pool, py::arg("retain_limit") = std::nullopt, release_gil(),
        "Puts the pool under torch's CPU tensors.");
  m.def("give_back_host_memory", &give_back_host_memory, release_gil(),
        "Gives free memory of the pool and of glibc's heap back to the kernel, whatever their settings.");
  m.def("host_pool_stats", &host_pool_stats, "Of the process's pool; zeros where it was never in use.");
  m.def("host_pool_huge_page_bytes", &host_pool_huge_page_bytes, release_gil(), "Bytes on huge pages now.");
}

}  // namespace oxytorch::bindings
