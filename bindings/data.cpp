// Datasets, stages and the loader. Worker threads take the GIL for Python's own datasets and stages, so that whatever
// waits for them does not hold it.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "data_bindings.h"
#include "oxytorch/data.h"
#include "oxytorch/data/loader_settings.h"
#include "oxytorch/data/tensors.h"
#include "oxytorch/data/tune.h"
#include "oxytorch/error.h"

namespace oxytorch::bindings {

using namespace data;

DType dtype_named(const std::string& text) {
  for (int i = 0; i <= static_cast<int>(DType::Bool); ++i) {
    if (text == name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  throw py::value_error("dtype is '" + text + "', expected a numpy name such as uint16, int64, float32 or bfloat16.");
}

namespace {

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::Array: return "array";
    case Kind::Image: return "image";
    case Kind::Text: return "text";
    case Kind::Bytes: return "bytes";
  }
  return "";
}

Kind kind_of(const std::string& text) {
  for (const auto kind : {Kind::Array, Kind::Image, Kind::Text, Kind::Bytes}) {
    if (text == kind_name(kind)) return kind;
  }
  throw py::value_error("kind is '" + text + "', expected array, image, text or bytes.");
}

py::object text_of(Kind kind, std::string_view bytes) {
  if (kind == Kind::Text)
    return py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<py::ssize_t>(bytes.size()), "replace"));
  return py::bytes(bytes.data(), bytes.size());
}

py::object to_python(const Field& field, const Value& value) {
  const bool encoded = field.kind == Kind::Image && value.shape.size() != 3;
  if (field.kind == Kind::Text || field.kind == Kind::Bytes || encoded) return text_of(field.kind, value.data.text());
  return py::cast(to_tensor(value));
}

/// Text and bytes are copied; tensors are shared.
Value from_python(const py::handle& object) {
  if (py::isinstance<py::str>(object) || py::isinstance<py::bytes>(object)) return own(object.cast<std::string>());
  if (THPVariable_Check(object.ptr())) return to_value(object.cast<at::Tensor>());
  throw py::type_error("a sample's field is a " + std::string(py::str(py::type::of(object).attr("__name__"))) +
                       ", expected a tensor, text or bytes.");
}

/// A Python object that C++ keeps and lets go on any thread.
std::shared_ptr<py::object> kept(py::object object) {
  return {new py::object(std::move(object)), [](py::object* each) {
            const py::gil_scoped_acquire acquired;
            delete each;
          }};
}

/// Runs Python on a worker thread; what it raises becomes an Error, whose text has type and place.
template <typename Function>
auto in_python(const Function& function) {
  const py::gil_scoped_acquire acquired;
  try {
    return function();
  } catch (const py::error_already_set& error) {
    throw Error(ErrorCode::InvalidState, error.what());
  }
}

/// Samples that a Python object makes: `read(index)` gives a tuple in the order of the schema.
class PythonDataset final : public Dataset {
 public:
  PythonDataset(Schema schema, std::int64_t size, py::object read, std::string fingerprint)
      : schema_(std::move(schema)), size_(size), read_(kept(std::move(read))), fingerprint_(std::move(fingerprint)) {}
  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return size_; }
  [[nodiscard]] Sample read(std::int64_t index) const override {
    return in_python([&] {
      Sample sample;
      for (const auto& value : (*read_)(index)) sample.push_back(from_python(value));
      OXY_CHECK(sample.size() == schema_.fields.size(), InvalidArgument, "sample ", index, " has ", sample.size(),
                " fields, and the first one ", schema_.fields.size(), ".");
      return sample;
    });
  }
  [[nodiscard]] std::string place(std::int64_t index) const override {
    return "dataset[" + std::to_string(index) + "]";
  }
  [[nodiscard]] std::string fingerprint() const override { return fingerprint_; }
  [[nodiscard]] std::string format() const override { return "python"; }

 private:
  Schema schema_;
  std::int64_t size_;
  std::shared_ptr<py::object> read_;
  std::string fingerprint_;
};

/// Samples that Python gives one after the other: `begin(epoch)` goes to the first, `next()` gives a list in the order
/// of the schema, and None at the end.
class PythonStream final : public Stream {
 public:
  PythonStream(Schema schema, py::object begin, py::object next, std::string fingerprint)
      : schema_(std::move(schema)),
        begin_(kept(std::move(begin))),
        next_(kept(std::move(next))),
        fingerprint_(std::move(fingerprint)) {}
  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  void begin(std::int64_t epoch) override {
    in_python([&] { (*begin_)(epoch); });
  }
  [[nodiscard]] std::optional<Sample> next() override {
    return in_python([&]() -> std::optional<Sample> {
      const py::object values = (*next_)();
      if (values.is_none()) return std::nullopt;
      Sample sample;
      for (const auto& value : values) sample.push_back(from_python(value));
      return sample;
    });
  }
  [[nodiscard]] std::string fingerprint() const override { return fingerprint_; }

 private:
  Schema schema_;
  std::shared_ptr<py::object> begin_, next_;
  std::string fingerprint_;
};

at::Tensor tensor_of(const Pixels& pixels) {
  return at::from_blob(
      pixels.data.get(), {pixels.height, pixels.width, pixels.channels}, [data = pixels.data](void*) {}, at::kByte);
}

Pixels pixels_of(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.dim() == 3 && tensor.scalar_type() == at::kByte, "an image is ", tensor.scalar_type(),
                    " of ", tensor.sizes(), ", expected uint8 of [height, width, channels].");
  const auto whole = std::make_shared<at::Tensor>(tensor.cpu().contiguous());
  const auto extent = [&](int dimension) { return static_cast<int>(whole->size(dimension)); };
  return {extent(1), extent(0), extent(2), {whole, whole->mutable_data_ptr<std::uint8_t>()}};
}

/// A stage that calls function(sample: dict) -> dict.
StagePtr function_stage(const std::string& stage_name, py::object function) {
  return stage(stage_name, [held = kept(std::move(function))](Item& item, PhiloxStream&) {
    in_python([&] {
      py::dict sample;
      std::int64_t image = -1;
      const auto& fields = item.schema->fields;
      for (std::size_t i = 0; i < fields.size(); ++i) {
        if (fields[i].kind == Kind::Image && image < 0) {
          image = static_cast<std::int64_t>(i);
          sample[fields[i].name.c_str()] = tensor_of(item.image.pixels());
        } else {
          sample[fields[i].name.c_str()] = to_python(fields[i], item.sample[i]);
        }
      }
      const auto made = (*held)(sample);
      OXY_CHECK(py::isinstance<py::dict>(made), InvalidType, "the function gave no dict of the sample's fields.");
      for (std::size_t i = 0; i < fields.size(); ++i) {
        const auto& field = fields[i].name;
        OXY_CHECK(made.contains(field), InvalidArgument, "the function's dict lacks the field '", field, "'.");
        const py::object value = made[field.c_str()];
        if (static_cast<std::int64_t>(i) == image) {
          item.image = LazyImage(pixels_of(value.cast<at::Tensor>().clone()));  // stages behind it write to it
        } else {
          item.sample[i] = from_python(value);
        }
      }
    });
  });
}

py::object column_to_python(const Column& column, const at::Tensor& whole) {
  if (column.kind == Kind::Text || column.kind == Kind::Bytes) {
    py::list texts(column.texts.size());
    for (std::size_t i = 0; i < column.texts.size(); ++i) texts[i] = text_of(column.kind, column.texts[i]);
    return texts;
  }
  if (column.lengths.empty()) return py::cast(whole);
  py::list parts;
  std::int64_t at = 0;
  for (const auto length : column.lengths) {
    parts.append(whole.narrow(0, at, length));
    at += length;
  }
  return parts;
}

py::dict batch_to_python(const TensorBatch& drawn) {
  py::dict found;
  const auto& columns = drawn.batch.columns;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    found[columns[i].name.c_str()] = column_to_python(columns[i], drawn.tensors[i]);
  }
  return found;
}

/// The next batch as a dict; None at the end of an epoch. Ctrl-C is looked for while it waits.
py::object next_batch(TensorLoader& loader) {
  constexpr double kLook = 0.1;  // seconds
  for (bool ready = false; !ready;) {
    {
      const GilReleased released;
      ready = loader.wait(kLook);
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  std::optional<TensorBatch> drawn;
  {
    const GilReleased released;
    drawn = loader.next();
  }
  if (!drawn) return py::none();
  return batch_to_python(*drawn);
}

/// Measures without the GIL. What `step`, `progress` or Ctrl-C raises ends it, and is raised as it was.
LoaderTuning tune_loader(TensorLoader& loader, double seconds, const py::object& step, const std::string& memory,
                         const std::string& disk, const std::string& folder, const py::object& progress) {
  TuneOptions options{.seconds = seconds, .memory = memory, .disk = disk, .folder = folder};
  options.step = [&](const TensorBatch& batch) {
    const py::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!step.is_none()) step(batch_to_python(batch));
  };
  options.progress = [&](const std::string& line) {
    const py::gil_scoped_acquire acquired;
    if (!progress.is_none()) progress(line);
  };
  const GilReleased released;
  return data::tune(loader, options);
}

/// Made and let go without the GIL: a loader's threads are waited for, and may wait for it to read a sample.
template <typename Object, typename... Arguments>
std::shared_ptr<Object> without_gil(Arguments&&... arguments) {
  const GilReleased released;
  return {new Object(std::forward<Arguments>(arguments)...), [](Object* each) {
            const GilReleased released;
            delete each;
          }};
}

py::dict stats_of(const TensorLoader& loader) {
  const auto stats = loader.stats();
  py::dict stages;
  for (const auto& [stage, seconds] : stats.stage_seconds) stages[stage.c_str()] = seconds;
  py::dict found;
  found["batches"] = stats.batches;
  found["samples"] = stats.samples;
  found["skipped"] = stats.skipped;
  found["wait_seconds"] = stats.wait_seconds;
  found["read_seconds"] = stats.read_seconds;
  found["stage_seconds"] = stages;
  found["collate_seconds"] = stats.collate_seconds;
  found["bottleneck"] = stats.bottleneck();
  if (stats.copied_bytes > 0) {
    found["copied_bytes"] = stats.copied_bytes;
    found["copy_seconds"] = stats.copy_seconds;
  }
  if (stats.cache) found["cache"] = py::cast(*stats.cache);
  return found;
}

void bind_datasets(py::module_& m) {
  py::class_<Field>(m, "Field", "One named field of each sample.")
      .def(py::init([](std::string field, const std::string& kind, const std::string& dtype,
                       std::vector<std::int64_t> shape) {
             return Field{std::move(field), kind_of(kind), dtype_named(dtype), std::move(shape)};
           }),
           py::arg("name"), py::arg("kind") = "array", py::arg("dtype") = "uint8",
           py::arg("shape") = std::vector<std::int64_t>())
      .def_readonly("name", &Field::name)
      .def_property_readonly(
          "kind", [](const Field& field) { return kind_name(field.kind); }, "array, image, text or bytes.")
      .def_property_readonly(
          "dtype", [](const Field& field) { return data::name(field.dtype); }, "As numpy names it.")
      .def_readonly("shape", &Field::shape, "Of an array; -1 where a dimension differs between samples.")
      .def("__repr__", [](const Field& field) {
        return "Field(" + field.name + ", " + kind_name(field.kind) +
               (field.kind == Kind::Array ? std::string(", ") + data::name(field.dtype) : "") + ")";
      });
  py::class_<Dataset, std::shared_ptr<Dataset>>(m, "Dataset", "Samples that can be read in any order.")
      .def("__len__", &Dataset::size)
      .def("__getitem__",
           [](const Dataset& dataset, std::int64_t index) {
             const auto wanted = index < 0 ? index + dataset.size() : index;
             if (wanted < 0 || wanted >= dataset.size())
               throw py::index_error("sample " + std::to_string(index) + " of " + std::to_string(dataset.size()));
             Sample sample;
             {
               const GilReleased released;
               sample = dataset.read(wanted);
             }
             py::dict found;
             const auto& fields = dataset.schema().fields;
             for (std::size_t i = 0; i < fields.size(); ++i)
               found[fields[i].name.c_str()] = to_python(fields[i], sample[i]);
             return found;
           })
      .def_property_readonly("schema", [](const Dataset& dataset) { return dataset.schema().fields; })
      .def_property_readonly("format", &Dataset::format)
      .def_property_readonly("classes", &Dataset::classes)
      .def_property_readonly("fingerprint", &Dataset::fingerprint)
      .def_property_readonly("part_sizes", &Dataset::part_sizes)
      .def("place", &Dataset::place, py::arg("index"));
  m.def(
      "open", [](const std::string& location) { return std::const_pointer_cast<Dataset>(open(location)); },
      py::arg("location"), release_gil());
  m.def(
      "concatenate",
      [](const std::vector<std::shared_ptr<Dataset>>& parts) {
        return std::const_pointer_cast<Dataset>(concatenate({parts.begin(), parts.end()}));
      },
      py::arg("parts"));
  m.def(
      "open_raw",
      [](const std::string& location, const std::string& dtype, std::vector<std::int64_t> shape) {
        return std::const_pointer_cast<Dataset>(open_raw(location, dtype_named(dtype), std::move(shape)));
      },
      py::arg("location"), py::arg("dtype"), py::arg("shape"));
  m.def(
      "from_arrow",
      [](const py::capsule& stream) {
        OXY_CHECK(std::string_view(stream.name()) == "arrow_array_stream", InvalidType, "the capsule is '",
                  stream.name(), "', expected an arrow_array_stream.");
        return std::const_pointer_cast<Dataset>(from_arrow(stream.get_pointer()));
      },
      py::arg("stream"));
  m.def(
      "token_windows",
      [](std::shared_ptr<Dataset> tokens, std::int64_t length) {
        return std::const_pointer_cast<Dataset>(token_windows(std::move(tokens), length));
      },
      py::arg("tokens"), py::arg("length"), release_gil());
  m.def(
      "python_dataset",
      [](std::vector<Field> fields, std::int64_t size, py::object read,
         std::string fingerprint) -> std::shared_ptr<Dataset> {
        return std::make_shared<PythonDataset>(Schema{std::move(fields)}, size, std::move(read),
                                               std::move(fingerprint));
      },
      py::arg("fields"), py::arg("size"), py::arg("read"), py::arg("fingerprint"));
  py::class_<Stream, std::shared_ptr<Stream>>(m, "Stream", "Samples that come one after the other.");
  m.def(
      "python_stream",
      [](std::vector<Field> fields, py::object begin, py::object next,
         std::string fingerprint) -> std::shared_ptr<Stream> {
        return std::make_shared<PythonStream>(Schema{std::move(fields)}, std::move(begin), std::move(next),
                                              std::move(fingerprint));
      },
      py::arg("fields"), py::arg("begin"), py::arg("next"), py::arg("fingerprint"));
}

void bind_stages(py::module_& m) {
  py::class_<Stage, std::shared_ptr<Stage>>(m, "Stage", "One step for one sample.")
      .def_property_readonly("name", &Stage::name)
      .def(
          "__call__",
          [](const Stage& self, const at::Tensor& image, std::uint64_t seed, std::uint64_t epoch, std::int64_t sample) {
            const GilReleased released;
            Item item;
            item.image = LazyImage(pixels_of(image.clone()));
            auto random = sample_random(seed, epoch, sample);
            self.apply(item, random);
            return tensor_of(item.image.pixels());
          },
          py::arg("image"), py::arg("seed") = 0, py::arg("epoch") = 0, py::arg("sample") = 0)
      .def("__repr__", &Stage::name);
  const auto shared = [](StagePtr made) { return std::const_pointer_cast<Stage>(std::move(made)); };
  m.def(
      "random_resized_crop",
      [=](int width, int height, std::pair<double, double> scale, std::pair<double, double> ratio) {
        return shared(random_resized_crop(width, height, scale.first, scale.second, ratio.first, ratio.second));
      },
      py::arg("width"), py::arg("height"), py::arg("scale"), py::arg("ratio"));
  m.def("resize_shorter", [=](int side) { return shared(data::resize(side)); }, py::arg("side"));
  m.def(
      "resize_to", [=](int width, int height) { return shared(data::resize(width, height)); }, py::arg("width"),
      py::arg("height"));
  m.def(
      "center_crop", [=](int width, int height) { return shared(data::center_crop(width, height)); }, py::arg("width"),
      py::arg("height"));
  m.def("horizontal_flip", [=](double p) { return shared(data::horizontal_flip(p)); }, py::arg("probability"));
  m.def(
      "color_jitter",
      [=](double brightness, double contrast, double saturation, double hue) {
        return shared(data::color_jitter(brightness, contrast, saturation, hue));
      },
      py::arg("brightness"), py::arg("contrast"), py::arg("saturation"), py::arg("hue"));
  m.def(
      "rand_augment", [=](int count, int magnitude) { return shared(rand_augment(count, magnitude)); },
      py::arg("count"), py::arg("magnitude"));
  py::class_<BatchStage, std::shared_ptr<BatchStage>>(m, "BatchStage", "One step for one batch.")
      .def_property_readonly("name", &BatchStage::name)
      .def("__repr__", &BatchStage::name);
  const auto of_batch = [](BatchStagePtr made) { return std::const_pointer_cast<BatchStage>(std::move(made)); };
  m.def(
      "mix_up",
      [=](double alpha, std::int64_t classes, std::string image, std::string label) {
        return of_batch(mix_up(alpha, classes, {std::move(image), std::move(label)}));
      },
      py::arg("alpha"), py::arg("classes"), py::arg("image"), py::arg("label"));
  m.def(
      "cut_mix",
      [=](double alpha, std::int64_t classes, std::string image, std::string label) {
        return of_batch(cut_mix(alpha, classes, {std::move(image), std::move(label)}));
      },
      py::arg("alpha"), py::arg("classes"), py::arg("image"), py::arg("label"));
  m.def(
      "function_stage",
      [=](const std::string& stage_name, py::object function) {
        return shared(function_stage(stage_name, std::move(function)));
      },
      py::arg("name"), py::arg("function"));
  m.def(
      "decode_image",
      [](const std::string& encoded, int channels, std::optional<std::array<int, 4>> crop) {
        const GilReleased released;
        std::optional<Box> box;
        if (crop) box = Box{(*crop)[0], (*crop)[1], (*crop)[2], (*crop)[3]};
        return tensor_of(decode_image(std::as_bytes(std::span(encoded)), channels, box));
      },
      py::arg("encoded"), py::arg("channels") = 3, py::arg("crop") = py::none());
  m.def(
      "encode_jpeg",
      [](const at::Tensor& image, int quality) {
        std::string encoded;
        {
          const GilReleased released;
          encoded = encode_jpeg(pixels_of(image), quality);
        }
        return py::bytes(encoded);
      },
      py::arg("image"), py::arg("quality") = 90);
  m.def(
      "resize",
      [](const at::Tensor& image, int width, int height) {
        const GilReleased released;
        return tensor_of(resize_pixels(pixels_of(image), width, height));
      },
      py::arg("image"), py::arg("width"), py::arg("height"));
}

void bind_samplers(py::module_& m) {
  py::class_<Sampler, std::shared_ptr<Sampler>>(m, "Sampler", "Draws samples, an epoch at a time.")
      .def("__len__", &Sampler::size)
      .def("at", &Sampler::at, py::arg("position"), py::arg("epoch") = 0, py::arg("seed") = 0)
      .def_property_readonly("fingerprint", &Sampler::fingerprint);
  const auto shared = [](std::shared_ptr<const Sampler> made) {
    return std::const_pointer_cast<Sampler>(std::move(made));
  };
  m.def("sequential", [=](std::int64_t size) { return shared(sequential(size)); }, py::arg("size"));
  m.def("shuffled", [=](std::int64_t size) { return shared(shuffled(size)); }, py::arg("size"));
  m.def(
      "shuffled_blocks",
      [=](std::int64_t size, std::int64_t block, std::int64_t window) {
        return shared(shuffled_blocks(size, block, window));
      },
      py::arg("size"), py::arg("block"), py::arg("window"));
  m.def(
      "weighted",
      [=](const std::vector<double>& weights, std::int64_t draws) { return shared(weighted(weights, draws)); },
      py::arg("weights"), py::arg("draws"));
  m.def(
      "mixed",
      [=](const std::vector<std::int64_t>& sizes, const std::vector<double>& weights, std::int64_t draws) {
        return shared(mixed(sizes, weights, draws));
      },
      py::arg("sizes"), py::arg("weights"), py::arg("draws"));
  m.def(
      "bucketed",
      [=](std::vector<std::int32_t> lengths, std::int64_t batch, std::int64_t window) {
        return shared(bucketed(std::move(lengths), batch, window));
      },
      py::arg("lengths"), py::arg("batch"), py::arg("window"));
}

void bind_cache(py::module_& m) {
  py::class_<TierStats>(m, "TierStats", "What a tier of a cache did so far.")
      .def_readonly("hits", &TierStats::hits)
      .def_readonly("misses", &TierStats::misses)
      .def_readonly("evictions", &TierStats::evictions)
      .def_readonly("damaged", &TierStats::damaged)
      .def_readonly("entries", &TierStats::entries)
      .def_readonly("bytes", &TierStats::bytes)
      .def_readonly("limit", &TierStats::limit);
  py::class_<CacheStats>(m, "CacheStats")
      .def_readonly("memory", &CacheStats::memory)
      .def_readonly("disk", &CacheStats::disk)
      .def_readonly("remote", &CacheStats::remote);
  py::class_<Cache, std::shared_ptr<Cache>>(m, "Cache",
                                            "Samples as they are read, in memory, on a disk and in a remote place.")
      .def(py::init([](std::string memory, std::string disk, std::string folder, std::string remote, std::string policy,
                       double ttl) {
             return std::make_shared<Cache>(CacheOptions{.memory = std::move(memory),
                                                         .disk = std::move(disk),
                                                         .folder = std::move(folder),
                                                         .remote = std::move(remote),
                                                         .policy = std::move(policy),
                                                         .ttl_seconds = ttl});
           }),
           py::arg("memory") = "auto", py::arg("disk") = "0", py::arg("folder") = "", py::arg("remote") = "",
           py::arg("policy") = "next-use", py::arg("ttl") = 0.0)
      .def("stats", &Cache::stats, release_gil())
      .def("clear", &Cache::clear, release_gil());
}

void bind_loader(py::module_& m) {
  py::class_<LoaderOptions>(m, "LoaderOptions")
      .def(py::init<>())
      .def_readwrite("batch_size", &LoaderOptions::batch_size)
      .def(
          "set_batch_sizer",
          [](LoaderOptions& options, std::vector<std::int64_t> sizes, std::int64_t most, bool padded,
             std::int64_t max_samples) {
            options.batch_sizer = BatchSizer{std::move(sizes), {most, padded, max_samples}};
          },
          py::arg("sizes"), py::arg("most"), py::arg("padded"), py::arg("max_samples"))
      .def("set_stages",
           [](LoaderOptions& options, const std::vector<std::shared_ptr<Stage>>& stages) {
             options.stages.assign(stages.begin(), stages.end());
           })
      .def("set_batch_stages",
           [](LoaderOptions& options, const std::vector<std::shared_ptr<BatchStage>>& stages) {
             options.batch_stages.assign(stages.begin(), stages.end());
           })
      .def_readwrite("boxes", &LoaderOptions::boxes)
      .def_readwrite("masks", &LoaderOptions::masks)
      .def_readwrite("per_box", &LoaderOptions::per_box)
      .def_readwrite("pad", &LoaderOptions::pad)
      .def("set_sampler",
           [](LoaderOptions& options, std::shared_ptr<Sampler> sampler) { options.sampler = std::move(sampler); })
      .def_readwrite("shuffle", &LoaderOptions::shuffle)
      .def_readwrite("shuffle_window", &LoaderOptions::shuffle_window)
      .def_readwrite("seed", &LoaderOptions::seed)
      .def_readwrite("rank", &LoaderOptions::rank)
      .def_readwrite("world_size", &LoaderOptions::world_size)
      .def_readwrite("drop_last", &LoaderOptions::drop_last)
      .def_readwrite("threads", &LoaderOptions::threads)
      .def_readwrite("prefetch", &LoaderOptions::prefetch)
      .def_readwrite("cache", &LoaderOptions::cache)
      .def_readwrite("strip_jpegs", &LoaderOptions::strip_jpegs)
      .def(
          "normalize",
          [](LoaderOptions& options, std::array<float, 3> mean, std::array<float, 3> deviation,
             const std::string& dtype) {
            options.image.normalize = true;
            options.image.mean = mean;
            options.image.deviation = deviation;
            options.image.dtype = dtype_named(dtype);
          },
          py::arg("mean"), py::arg("std"), py::arg("dtype"))
      .def("set_channels_last", [](LoaderOptions& options, bool on) { options.image.channels_last = on; })
      .def("set_on_error", [](LoaderOptions& options, const std::string& policy) {
        if (policy == "raise")
          options.on_error = OnError::Raise;
        else if (policy == "skip")
          options.on_error = OnError::Skip;
        else if (policy == "replace")
          options.on_error = OnError::Replace;
        else
          throw py::value_error("on_error is '" + policy + "', expected raise, skip or replace.");
      });
  py::class_<BatchFill>(m, "BatchFill", "Fills batches up to a limit, sample by sample.")
      .def(py::init([](std::int64_t most, bool padded, std::int64_t max_samples) {
             return BatchFill({most, padded, max_samples});
           }),
           py::arg("most"), py::arg("padded"), py::arg("max_samples"))
      .def("add", &BatchFill::add, py::arg("size"), "Take a sample; whether it begins the next batch.");
  py::class_<TensorLoader, std::shared_ptr<TensorLoader>>(m, "Loader", "Makes batches ahead with threads.")
      .def(py::init([](std::shared_ptr<Dataset> dataset, LoaderOptions options, std::optional<at::Device> device) {
             return without_gil<TensorLoader>(std::move(dataset), std::move(options), device);
           }),
           py::arg("dataset"), py::arg("options"), py::arg("device"))
      .def(py::init([](std::shared_ptr<Stream> stream, LoaderOptions options, std::optional<at::Device> device) {
             return without_gil<TensorLoader>(std::move(stream), std::move(options), device);
           }),
           py::arg("stream"), py::arg("options"), py::arg("device"))
      .def_property_readonly("size", &TensorLoader::size, "Batches in this epoch; -1 of a stream.")
      .def("next", &next_batch)
      .def("set_epoch", &TensorLoader::set_epoch, py::arg("epoch"), release_gil())
      .def_property_readonly("epoch", &TensorLoader::epoch)
      .def("change", &TensorLoader::change, py::arg("options"), release_gil(),
           "Take threads, prefetch and cache of these options.")
      .def_property_readonly("is_stream", &TensorLoader::is_stream)
      .def("set_device", &TensorLoader::set_device, py::arg("device"), release_gil())
      .def_property_readonly("device", &TensorLoader::device)
      .def_property_readonly("is_pinned", &TensorLoader::is_pinned, "Whether batches are made in pinned memory.")
      .def_property_readonly("is_copying", &TensorLoader::is_copying,
                             "Whether the next batch is on its way to the device.")
      .def_property_readonly("threads", [](const TensorLoader& loader) { return loader.options().threads; })
      .def_property_readonly("prefetch", [](const TensorLoader& loader) { return loader.options().prefetch; })
      .def("state", &TensorLoader::state)
      .def("load_state", &TensorLoader::load_state, py::arg("state"), release_gil())
      .def("stats", &stats_of);
  py::class_<LoaderTrial>(m, "LoaderTrial", "A setting of a loader that was tried.")
      .def(py::init([](std::string setting, std::optional<double> speed, std::optional<double> ratio,
                       std::string note) { return LoaderTrial{std::move(setting), speed, ratio, std::move(note)}; }),
           py::arg("setting"), py::arg("batches_per_second") = py::none(), py::arg("ratio") = py::none(),
           py::arg("note") = "")
      .def_readonly("setting", &LoaderTrial::setting)
      .def_readonly("batches_per_second", &LoaderTrial::batches_per_second, "The median; None: it was not measured.")
      .def_readonly("ratio", &LoaderTrial::ratio, "Of its speed and that of the loader as given.")
      .def_readonly("note", &LoaderTrial::note, "Why it was left out, that it was taken, or what it costs.")
      .def("__str__", &LoaderTrial::text);
  py::class_<LoaderTuning>(m, "LoaderTuning", "What tune() found and set.")
      .def_readonly("trials", &LoaderTuning::trials)
      .def_readonly("threads", &LoaderTuning::threads)
      .def_readonly("prefetch", &LoaderTuning::prefetch)
      .def_readonly("cache", &LoaderTuning::cache)
      .def_readonly("bottleneck", &LoaderTuning::bottleneck);
  m.def("tune", &tune_loader, py::arg("loader"), py::arg("seconds"), py::arg("step"), py::arg("memory"),
        py::arg("disk"), py::arg("folder"), py::arg("progress"),
        "Find threads, batches ahead and a cache by measuring, and set them.");
  py::class_<LoaderSettings::Line>(m, "LoaderSettingsLine", "What became of a setting.")
      .def_readonly("name", &LoaderSettings::Line::name)
      .def_readonly("is_in_effect", &LoaderSettings::Line::is_in_effect)
      .def_readonly("reason", &LoaderSettings::Line::reason)
      .def_readonly("cost", &LoaderSettings::Line::cost);
  py::class_<LoaderSettings, std::shared_ptr<LoaderSettings>>(m, "LoaderSettings",
                                                              "Settings of a run, brought about on its loader.")
      .def(py::init([](TensorLoader& loader, const PerformanceConfig& config, std::optional<at::Device> device) {
             return without_gil<LoaderSettings>(loader, config, device);
           }),
           py::arg("loader"), py::arg("config"), py::arg("device"), py::keep_alive<1, 2>())
      .def_property_readonly("lines", &LoaderSettings::lines)
      .def("revert", &LoaderSettings::revert, release_gil());
}

}  // namespace

void bind_data(py::module_& m) {
  bind_datasets(m);
  bind_stages(m);
  bind_samplers(m);
  bind_data_convert(m);
  bind_cache(m);
  bind_loader(m);
}

}  // namespace oxytorch::bindings
