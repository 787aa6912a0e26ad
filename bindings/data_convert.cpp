// Datasets written anew: MDS shards, and tokens in Megatron's format.
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "data_bindings.h"
#include "oxytorch/data.h"
#include "oxytorch/error.h"

namespace oxytorch::bindings {

using namespace data;

namespace {

// Lists of a tokenizer are long: their numbers are read where they lie.
std::int64_t token_at(PyObject* item) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;  // -1 too where it does not fit
}

template <class T>
void add_documents(MegatronWriter& writer, const py::iterable& documents, std::int64_t first,
                   std::optional<std::int64_t> end) {
  constexpr std::int64_t kMost = std::numeric_limits<T>::max();
  std::vector<T> tokens;
  const auto push = [&](std::int64_t value) {
    OXY_CHECK(value >= 0 && value <= kMost, InvalidArgument, "a token of text ", first, " does not fit ",
              name(writer.dtype()), ": tokens must be 0 to ", kMost, ".");
    tokens.push_back(static_cast<T>(value));
  };
  for (const py::handle document : documents) {
    const auto items = py::reinterpret_steal<py::object>(
        PySequence_Fast(document.ptr(), "the tokens of a text are a sequence of integers"));
    if (!items) throw py::error_already_set();
    const auto count = PySequence_Fast_GET_SIZE(items.ptr());
    tokens.clear();
    for (Py_ssize_t i = 0; i < count; ++i) push(token_at(PySequence_Fast_GET_ITEM(items.ptr(), i)));
    if (end) push(*end);
    writer.add(std::as_bytes(std::span(tokens)));
    ++first;
  }
}

}  // namespace

void bind_data_convert(py::module_& m) {
  py::class_<Converted>(m, "Converted", "What was written.")
      .def(py::init([](std::string format, std::int64_t samples, std::int64_t bytes) {
             return Converted{std::move(format), samples, bytes, 0};
           }),
           py::arg("format"), py::arg("samples"), py::arg("bytes"))
      .def_readonly("format", &Converted::format)
      .def_readonly("samples", &Converted::samples)
      .def_readonly("bytes", &Converted::bytes)
      .def_readonly("resumed", &Converted::resumed, "Samples that an interrupted conversion had written before.");
  m.def(
      "convert",
      [](const Dataset& dataset, const std::string& folder, std::string format, std::int64_t shard_bytes, bool compress,
         int shorter_side, int quality, int threads, const std::optional<py::function>& progress) {
        ConvertOptions options{.format = std::move(format),
                               .shard_bytes = shard_bytes,
                               .compress = compress,
                               .shorter_side = shorter_side,
                               .quality = quality,
                               .threads = threads,
                               .progress = [&progress](std::int64_t samples) {
                                 const py::gil_scoped_acquire acquired;
                                 if (PyErr_CheckSignals() != 0) throw py::error_already_set();
                                 if (progress) (*progress)(samples);
                               }};
        const GilReleased released;
        return convert(dataset, folder, options);
      },
      py::arg("dataset"), py::arg("folder"), py::arg("format"), py::arg("shard_bytes"), py::arg("compress"),
      py::arg("shorter_side"), py::arg("quality"), py::arg("threads"), py::arg("progress"));
  py::class_<MegatronWriter>(m, "MegatronWriter", "Writes documents of tokens one by one.")
      .def(py::init([](std::string prefix, const std::string& dtype) {
             return std::make_unique<MegatronWriter>(std::move(prefix), dtype_named(dtype));
           }),
           py::arg("prefix"), py::arg("dtype"))
      .def(
          "add",
          [](MegatronWriter& writer, const py::iterable& documents, std::int64_t first,
             std::optional<std::int64_t> end) {
            if (writer.dtype() == DType::U16) return add_documents<std::uint16_t>(writer, documents, first, end);
            add_documents<std::int32_t>(writer, documents, first, end);
          },
          py::arg("documents"), py::arg("first"), py::arg("end"),
          "Sequences of token numbers, the first of which has the number `first` in errors, with `end` after each.")
      .def("finish", &MegatronWriter::finish, release_gil());
}

}  // namespace oxytorch::bindings
