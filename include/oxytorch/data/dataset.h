/// Samples that can be read in any order, from the formats in which people have them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

/// A fixed number of samples. Every method may be called by several threads at once.
class OXY_API Dataset {
 public:
  Dataset() = default;
  Dataset(const Dataset&) = delete;
  Dataset& operator=(const Dataset&) = delete;
  virtual ~Dataset();

  [[nodiscard]] virtual const Schema& schema() const noexcept = 0;
  [[nodiscard]] virtual std::int64_t size() const noexcept = 0;

  /// Reads one sample; values may point into the dataset's files, which they keep open.
  /// Errors: `Io` with file and offset where the sample is damaged or cannot be read, `OutOfRange` for an index
  /// that is not in [0, size).
  [[nodiscard]] virtual Sample read(std::int64_t index) const = 0;
  /// Whether `read_into` is there; every field is an array of known shape then.
  [[nodiscard]] virtual bool reads_into() const noexcept { return false; }
  /// Writes a sample where a batch has it: each field to memory of its bytes, aligned for its elements.
  /// Errors: as `read`; `NotSupported` where `reads_into` says no.
  virtual void read_into(std::int64_t index, const std::vector<std::byte*>& fields) const;

  /// Says where a sample is, for error messages: "train-0003.tar, offset 51200".
  [[nodiscard]] virtual std::string place(std::int64_t index) const = 0;

  /// 16 hexadecimal digits that differ where names, sizes or times of the files do. A resumed run compares them.
  [[nodiscard]] virtual std::string fingerprint() const = 0;

  /// Tells the operating system that a sample is going to be read soon. Does nothing by default.
  virtual void will_read(std::int64_t index) const;

  /// Whether read() may wait for a network: such reads are given threads of their own.
  [[nodiscard]] virtual bool remote() const noexcept { return false; }

  /// Word of the format: "npy", "webdataset", "mds".
  [[nodiscard]] virtual std::string format() const = 0;

  /// Names of the classes where the labels are indices into them; empty where they are not.
  [[nodiscard]] virtual std::vector<std::string> classes() const { return {}; }

  /// Samples of each dataset that concatenate() made this one of; its own size where it is none of those.
  [[nodiscard]] virtual std::vector<std::int64_t> part_sizes() const;
};

/// Opens a file, a folder or a URL. The format is found by content, and by the names in a folder:
/// a folder of class folders of images, WebDataset tar files (one, or "shard-{000..042}.tar", or a folder of them),
/// MDS, .npy, Megatron (.idx and .bin), JSONL, safetensors, .beton, TFRecord, LitData.
/// Errors: `NotFound` for what does not exist, `InvalidArgument` for what is none of these formats, `Io` for what is
/// damaged; each with the path and what was found.
OXY_API std::shared_ptr<const Dataset> open(const std::string& location);

/// Opens a file without a header: samples of one dtype and shape, one after the other.
OXY_API std::shared_ptr<const Dataset> open_raw(const std::string& location, DType dtype,
                                                std::vector<std::int64_t> shape);

/// Takes over an `ArrowArrayStream` of Arrow's C stream interface: tables of pyarrow, Hugging Face's datasets, polars.
/// What it holds is not copied. Columns of numbers, booleans, text, binary, lists of numbers, and structs with `bytes`
/// (images).
/// Errors: `NotSupported` for a column of another type, by name.
OXY_API std::shared_ptr<const Dataset> from_arrow(void* arrow_array_stream);

/// Several datasets as one, the samples of the first before those of the second; `mixed` draws from them by weight.
/// Errors: `InvalidArgument` where there are none, or where fields or classes are not those of the first.
OXY_API std::shared_ptr<const Dataset> concatenate(std::vector<std::shared_ptr<const Dataset>> parts);

/// Windows of `length + 1` tokens that overlap by one, as next-token training takes them: of a one-dimensional .npy, a
/// raw file, Megatron documents or MDS tokens, read as one long text in order. One field "tokens", I64 of length + 1.
OXY_API std::shared_ptr<const Dataset> token_windows(std::shared_ptr<const Dataset> tokens, std::int64_t length);

}  // namespace oxytorch::data
