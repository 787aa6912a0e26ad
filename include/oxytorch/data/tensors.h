/// Values and batches of the data pipeline as tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/data.h"

namespace oxytorch::data {

/// The values as a tensor that shares their memory and keeps it alive; copied where they are not aligned to their
/// dtype. What a dataset's files hold must not be written to.
OXY_API at::Tensor to_tensor(const Value& value);
/// A tensor of the CPU as a value that shares its memory; made contiguous where it is not.
/// Errors: `InvalidType` for a dtype that values do not have, or another device.
OXY_API Value to_value(const at::Tensor& tensor);

using Tensors = std::map<std::string, at::Tensor>;

/// A batch whose arrays are tensors that share their memory. A field whose samples differ in length is one tensor, cut
/// by `Column::lengths`.
struct TensorBatch {
  Batch batch;                      ///< `Column::array` is empty everywhere
  std::vector<at::Tensor> tensors;  ///< by column; undefined where that is text
  [[nodiscard]] OXY_API Tensors by_name() const;
};

/// A loader as a range of batches of tensors, for range-based `for` and `Trainer::fit`. Each begin() begins an epoch:
/// the one that the loader is in where nothing of it was drawn or its state was loaded, else the next one.
///
/// For a device, batches are made in pinned memory, and each is copied there on a stream of its own while the one
/// before it is used, as soon as it is ready. Tensors belong to the stream that is in use when next() is called, and
/// are ready for it. A device without streams or events has them copied on the stream in use.
///
/// ```cpp
/// oxytorch::data::TensorLoader batches(oxytorch::data::open("train"), {.batch_size = 64, .shuffle = true}, at::kCUDA);
/// for (auto& batch : batches) train(batch.at("image"), batch.at("label"));
/// trainer.fit(batches, /*epochs=*/3);   // Batch::as<oxytorch::data::Tensors>()
/// ```
class OXY_API TensorLoader {
 public:
  /// Errors: those of Loader, and torch's for a device that this torch does not have.
  TensorLoader(std::shared_ptr<const Dataset> dataset, LoaderOptions options, std::optional<at::Device> device = {});
  TensorLoader(std::shared_ptr<Stream> stream, LoaderOptions options, std::optional<at::Device> device = {});
  ~TensorLoader();
  TensorLoader(const TensorLoader&) = delete;
  TensorLoader& operator=(const TensorLoader&) = delete;

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

  /// Where batches are put from now on; empty, or the CPU: they stay in the host's memory. The same batches follow.
  void set_device(std::optional<at::Device> device);
  [[nodiscard]] std::optional<at::Device> device() const;
  /// Takes `threads`, `prefetch`, `cache` and `strip_jpegs` of these options, in the middle of an epoch too. The same
  /// batches follow.
  void change(const LoaderOptions& options);
  /// As they were given, or changed; options() has what came of zeros.
  [[nodiscard]] const LoaderOptions& asked() const noexcept;
  [[nodiscard]] bool is_stream() const noexcept;
  /// What it reads; null of a stream.
  [[nodiscard]] const Dataset* dataset() const noexcept;
  /// Whether batches are made in memory that the device copies from at full speed.
  [[nodiscard]] bool is_pinned() const noexcept;
  /// Whether the next batch is on its way to the device, beside what the stream in use holds.
  [[nodiscard]] bool is_copying() const;

  /// As those of Loader. Where a batch is copied ahead, state() and epoch() are of the place before it.
  [[nodiscard]] std::optional<TensorBatch> next();
  [[nodiscard]] bool wait(double seconds);
  void set_epoch(std::int64_t epoch);
  [[nodiscard]] std::int64_t epoch() const;
  [[nodiscard]] std::int64_t size() const;
  [[nodiscard]] const Schema& schema() const noexcept;
  [[nodiscard]] const LoaderOptions& options() const noexcept;
  [[nodiscard]] std::string state() const;
  void load_state(const std::string& state);
  [[nodiscard]] LoaderStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::data
