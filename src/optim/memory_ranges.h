/// Which memory tensors lie in, to tell what an update writes from what another one reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace oxytorch::optim {

using Range = std::pair<std::uintptr_t, std::uintptr_t>;  ///< begin and end

/// From a tensor's first element to its last, with the gaps between them. Empty for a tensor without elements, for a
/// sparse one, and where there is no address, as on the device "meta".
inline Range range_of(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.numel() == 0 || !tensor.has_storage()) return {0, 0};
  const auto start = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  if (start == 0) return {0, 0};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {start, start + static_cast<std::size_t>(last + 1) * tensor.element_size()};
}

inline bool meet(const Range& a, const Range& b) { return a.first < b.second && b.first < a.second; }

/// The memory that some tensors lie in.
class Memory {
 public:
  void clear() { ranges_.clear(); }
  void add(const Range& range) {
    if (range.first != range.second) ranges_.push_back(range);
  }
  void add(const at::Tensor& tensor) {
    if (tensor.defined()) add(range_of(tensor));
  }
  /// To be called when all are added. True where two of them have memory in common.
  bool finish() {
    std::sort(ranges_.begin(), ranges_.end());
    std::size_t apart = 0;
    for (const Range& range : ranges_) {
      if (apart == 0 || ranges_[apart - 1].second <= range.first) {
        ranges_[apart++] = range;
      } else {
        ranges_[apart - 1].second = std::max(ranges_[apart - 1].second, range.second);
      }
    }
    const bool common = apart != ranges_.size();
    ranges_.resize(apart);
    return common;
  }
  /// Whether some element of the tensor may lie there.
  [[nodiscard]] bool has(const at::Tensor& tensor) const {
    const Range its = range_of(tensor);
    const auto found = std::upper_bound(ranges_.begin(), ranges_.end(), its.first,
                                        [](std::uintptr_t at, const Range& range) { return at < range.second; });
    return found != ranges_.end() && meet(*found, its);
  }

 private:
  std::vector<Range> ranges_;  // after finish() sorted and apart
};

}  // namespace oxytorch::optim
