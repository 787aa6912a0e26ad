/// Datasets written anew, in the formats that this library reads fastest and others read too.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "oxytorch/data/dataset.h"
#include "oxytorch/data/image.h"

namespace oxytorch::data {

struct ConvertOptions {
  /// "mds" or "megatron"; empty: megatron where the samples are tokens alone (one field of integers), else mds.
  std::string format;
  std::int64_t shard_bytes = 64 << 20;  ///< of an MDS shard, uncompressed
  bool compress = false;                ///< MDS shards by zstd
  int shorter_side = 0;                 ///< to which larger images are shrunk; 0: all stay, what is not encoded as PNGs
  int quality = 90;                     ///< of the JPEGs that shrunk images become
  int threads = 0;                      ///< 0: as many as the process has cores
  /// Called after each piece with the samples that are written so far.
  std::function<void(std::int64_t)> progress;
};

struct Converted {
  std::string format;
  std::int64_t samples = 0, bytes = 0;
  std::int64_t resumed = 0;  ///< samples that an interrupted conversion had written before
};

/// Writes `dataset` into a folder, for MDS one behind an http, https or s3 URL too, whose server must take PUT
/// requests: up to four shards are on their way there while the next is made. Each shard of MDS appears whole and has
/// an XXH3 hash in the index, which comes last; an interrupted conversion to MDS goes on behind the last whole shard
/// when it is called again. The same dataset and options give the same bytes.
///
/// Errors: `InvalidArgument` for options or fields that the format cannot hold and for a folder that holds something
/// else, `InvalidState` where it holds a conversion of another dataset or with other options, `Io` where writing fails,
/// `NotSupported` for Megatron's format behind a URL.
OXY_API Converted convert(const Dataset& dataset, const std::string& folder, const ConvertOptions& options = {});

/// Writes documents of tokens one by one, in Megatron's format: `prefix`.bin as they come, `prefix`.idx at the end.
class OXY_API MegatronWriter {
 public:
  /// Errors: `InvalidArgument` for a dtype that the format does not have, or where files of that name exist.
  MegatronWriter(std::string prefix, DType dtype);
  /// Without finish() the files are removed.
  ~MegatronWriter();
  MegatronWriter(const MegatronWriter&) = delete;
  MegatronWriter& operator=(const MegatronWriter&) = delete;
  /// Adds one document: values of the writer's dtype, one after another.
  void add(std::span<const std::byte> tokens);
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  /// Writes the index. Bytes of both files.
  std::int64_t finish();

 private:
  std::string prefix_;
  DType dtype_;
  int file_ = -1;
  std::vector<std::int32_t> lengths_;
  std::int64_t bytes_ = 0;
};

/// An image as a JPEG of 4:2:0 subsampling.
OXY_API std::string encode_jpeg(const Pixels& pixels, int quality);

}  // namespace oxytorch::data
