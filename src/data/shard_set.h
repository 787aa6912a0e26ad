/// Shards as MDS and LitData write them: u32 count, u32 offsets[count + 1], then the items.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/file.h"
#include "data/lazy_table.h"
#include "data/view_cache.h"
#include "oxytorch/data/dataset.h"

namespace oxytorch::data {

/// How a shard's file holds its items.
enum class Packing : std::uint8_t {
  Plain,   ///< as they are
  Whole,   ///< the whole shard is compressed by zstd
  Frames,  ///< LitData's compression_level="batch": runs of items are zstd frames, behind a table of their own
  Items,   ///< LitData's compression_level="sample": each item is a zstd frame
};

/// What an index says of a shard.
struct ShardInfo {
  std::string location;
  std::uint64_t items = 0;
  std::uint64_t bytes = 0;      ///< of the file, or of its content where it is compressed whole
  bool bytes_of_items = false;  ///< `bytes` may be without count and offsets, as LitData wrote it until 0.2.38
  Packing packing = Packing::Plain;
  std::string xxh3;  ///< XXH3-64 of the file where it is known; checked where the whole file is read anyway
};

/// The items of several shards as one sequence. Files are opened and checked on first use. Methods may be called by
/// several threads at once.
class ShardSet {
 public:
  /// `index` names the file that lists the shards, and the version of its content.
  ShardSet(std::vector<ShardInfo> shards, std::string index);

  [[nodiscard]] std::int64_t size() const noexcept { return first_.back(); }
  /// The bytes of an item.
  /// Errors: `OutOfRange`, or `Io` with shard and offset.
  [[nodiscard]] View item(std::int64_t index) const;
  /// The file that holds an item.
  [[nodiscard]] const std::string& location(std::int64_t index) const { return shards_[shard_of(index)].location; }
  /// Where the item's bytes are in the shard, decompressed where it is compressed; 0 before it was read.
  [[nodiscard]] std::uint64_t offset(std::int64_t index) const noexcept;

  /// Checks that a sample's arrays have the dtypes and numbers of dimensions that `schema` took from the first one.
  /// Errors: `NotSupported` with the place.
  void check_arrays(const Schema& schema, const Sample& sample, std::int64_t index) const;

  [[nodiscard]] std::string place(std::int64_t index) const;
  void will_read(std::int64_t index) const;
  /// Over the index, and the versions of local shards: asking for those of thousands of remote ones takes too long, and
  /// the index holds their sizes.
  [[nodiscard]] std::string fingerprint() const;
  [[nodiscard]] bool remote() const noexcept;

 private:
  struct Open {
    std::shared_ptr<const File> file;
    View offsets;  // u32[items + 1]; empty where the table is compressed too
    View frames;   // rows of the table of Frames
    std::uint64_t frame_items = 0;
  };

  [[nodiscard]] std::size_t shard_of(std::int64_t index) const;
  [[nodiscard]] const Open& opened(std::size_t shard) const;
  [[nodiscard]] std::unique_ptr<Open> open(const ShardInfo& shard) const;
  static void open_frames(const ShardInfo& shard, Open& open);
  [[nodiscard]] View whole(std::size_t shard) const;
  [[nodiscard]] View framed_item(std::size_t shard, std::uint64_t at) const;

  std::vector<ShardInfo> shards_;
  std::vector<std::int64_t> first_;  // of each shard, and the number of all
  std::string index_;
  mutable LazyTable<Open> open_;
  mutable ViewCache unpacked_;
};

/// A dataset whose samples are the items of shards.
class ShardDataset : public Dataset {
 public:
  ShardDataset(std::vector<ShardInfo> shards, const std::string& index) : shards_(std::move(shards), index) {}
  [[nodiscard]] const Schema& schema() const noexcept final { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept final { return shards_.size(); }
  [[nodiscard]] std::string place(std::int64_t index) const final { return shards_.place(index); }
  [[nodiscard]] std::string fingerprint() const final { return shards_.fingerprint(); }
  void will_read(std::int64_t index) const final { shards_.will_read(index); }
  [[nodiscard]] bool remote() const noexcept final { return shards_.remote(); }
  [[nodiscard]] Sample read(std::int64_t index) const final {
    auto sample = decode(index);
    shards_.check_arrays(schema_, sample, index);
    return sample;
  }

 protected:
  /// The values of an item, whose arrays are not compared with the schema yet.
  [[nodiscard]] virtual Sample decode(std::int64_t index) const = 0;

  Schema schema_;
  ShardSet shards_;
};

}  // namespace oxytorch::data
