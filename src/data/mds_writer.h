/// Shards of MosaicML's streaming format (MDS), as streaming's MDSWriter lays them out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

/// A column: the format has them sorted by name.
struct MdsColumn {
  std::size_t field = 0;  ///< of the schema
  std::string name, encoding;
  std::int64_t size = -1;  ///< bytes of each value; -1 where they differ
};

/// The columns of a schema. `first`: a sample, by which encoded images are told apart.
/// Errors: `InvalidArgument` for a field that MDS cannot hold.
std::vector<MdsColumn> mds_columns(const Schema& schema, const Sample& first);

/// One shard in memory.
class MdsShard {
 public:
  explicit MdsShard(const std::vector<MdsColumn>& columns);
  /// Errors: `InvalidArgument` where a value is not as its column has it.
  void add(const Schema& schema, const Sample& sample);
  [[nodiscard]] std::int64_t samples() const noexcept { return static_cast<std::int64_t>(ends_.size()); }
  [[nodiscard]] std::int64_t bytes() const noexcept;
  /// Writes "shard.NNNNN.mds" (with ".zstd" where compressed) into a folder; what index.json says of it, as JSON.
  std::string write(const std::string& folder, std::int64_t number, bool compress);

 private:
  std::vector<MdsColumn> columns_;
  std::string config_, data_;
  std::vector<std::uint32_t> ends_;
};

}  // namespace oxytorch::data
