/// Values and batches of the data pipeline as tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <string>

#include "oxytorch/data.h"

namespace oxytorch::data {

/// The values as a tensor that shares their memory and keeps it alive; copied where they are not aligned to their
/// dtype. What a dataset's files hold must not be written to.
OXY_API at::Tensor to_tensor(const Value& value);
/// A tensor of the CPU as a value that shares its memory; made contiguous where it is not.
/// Errors: `InvalidType` for a dtype that values do not have, or another device.
OXY_API Value to_value(const at::Tensor& tensor);

/// The columns of a batch that are arrays, by name. A field whose samples differ in length is one tensor, cut by
/// `Column::lengths`.
OXY_API std::map<std::string, at::Tensor> to_tensors(const Batch& batch);

/// A loader as a range of batches of tensors, for range-based `for` and `Trainer::fit`. Each begin() begins an epoch:
/// the one that the loader is in where nothing of it was drawn or its state was loaded, else the next one.
///
/// ```cpp
/// oxytorch::data::TensorLoader batches(oxytorch::data::open("train"), {.batch_size = 64, .shuffle = true});
/// for (auto& batch : batches) train(batch.at("image"), batch.at("label"));
/// trainer.fit(batches, /*epochs=*/3);   // Batch::as<oxytorch::data::Tensors>()
/// ```
using Tensors = std::map<std::string, at::Tensor>;

class OXY_API TensorLoader : public Loader {
 public:
  using Loader::Loader;

  class Iterator {
   public:
    using value_type = Tensors;
    using difference_type = std::ptrdiff_t;
    Iterator() = default;
    explicit Iterator(TensorLoader& loader) : loader_(&loader) { ++*this; }
    Tensors& operator*() const { return *batch_; }
    OXY_API Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t /*end*/) const { return !batch_; }

   private:
    TensorLoader* loader_ = nullptr;
    mutable std::optional<Tensors> batch_;
  };

  Iterator begin();
  static std::default_sentinel_t end() { return {}; }

  void set_epoch(std::int64_t epoch);
  void load_state(const std::string& state);

 private:
  bool left_off_ = false;  // a loop ended before its epoch did
};

}  // namespace oxytorch::data
