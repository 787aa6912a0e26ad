/// How tensors were made, for those that take less time to make again than they are worth in memory.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

namespace oxytorch::memory {

struct Content;

/// Whether a tensor is a view of a storage and no more: not sparse or quantised, not of a subclass or inside vmap.
[[nodiscard]] bool is_dense(const at::Tensor& tensor);

/// How a tensor shows a content. Of a dense one.
struct View {
  View(std::shared_ptr<Content> content, const at::Tensor& tensor);
  /// The tensor, over a storage that holds the content.
  [[nodiscard]] at::Tensor over(const c10::Storage& storage) const;

  std::shared_ptr<Content> content;
  at::DimVector sizes, strides;
  std::int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;
};

/// One call of an operator whose results depend on its arguments alone.
struct Recipe {
  using Argument = std::variant<c10::IValue, View, std::vector<View>>;
  c10::OperatorHandle handle;
  c10::SmallVector<Argument, 4> arguments{};
  bool is_inplace = false;  ///< the first argument becomes the result
};

/// Elements of zero and one other value, bit patterns of floating-point numbers, as a bit for each.
class TwoValues {
 public:
  /// Empty where there is a third value.
  static std::optional<TwoValues> pack(const c10::Storage& storage, std::size_t element_bytes);
  [[nodiscard]] c10::Storage unpack() const;
  [[nodiscard]] std::size_t bytes() const { return bits_.nbytes(); }  ///< that it takes

 private:
  at::Tensor bits_;
  std::size_t bytes_ = 0, element_bytes_ = 0;
  std::uint64_t value_ = 0;
};

/// Memory that holds a content.
struct Kept {
  c10::Storage storage;
  std::optional<TwoValues> packed;  ///< in place of `storage`
};

/// What a storage holds from one change of it to the next.
struct Content {
  explicit Content(const at::Tensor& tensor);

  /// Whether the storage has not been written to since, as far as torch tells.
  [[nodiscard]] bool is_unchanged() const { return version_counter.current_version() == version; }
  /// The content: what holds it, or made anew. Error(InvalidState) where what it is made of was changed since.
  [[nodiscard]] c10::Storage get();

  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::VariableVersion version_counter;
  std::uint32_t version;
  std::size_t bytes, element_bytes;
  std::weak_ptr<Kept> kept;
  std::shared_ptr<const Recipe> recipe;        ///< none: it cannot be made again
  std::size_t result = 0;                      ///< of the recipe's
  std::size_t length = 0;                      ///< of the longest chain of recipes up to it
  bool is_parameter = false;                   ///< it lives anyway
  bool has_two_values = false;                 ///< may have: zero and another one
  bool is_called = false;                      ///< the operator that makes it has not ended
  bool is_dropped = false;                     ///< it is made again whenever it is asked for
  std::vector<std::shared_ptr<Kept>> made_of;  ///< of a dropped one, what it takes
  std::size_t savers = 0;                      ///< nodes that saved it and have not asked for it yet
  c10::Storage made_again;                     ///< for those of them that come later

 private:
  [[nodiscard]] c10::Storage make() const;
};

}  // namespace oxytorch::memory
