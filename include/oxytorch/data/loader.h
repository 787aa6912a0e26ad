/// Batches of a dataset, made ahead by threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/data/batch_sizer.h"
#include "oxytorch/data/cache.h"
#include "oxytorch/data/dataset.h"
#include "oxytorch/data/order.h"
#include "oxytorch/data/stage.h"
#include "oxytorch/data/stream.h"

namespace oxytorch::data {

/// What happens at a sample that cannot be read or decoded.
enum class OnError : std::uint8_t { Raise, Skip, Replace };

/// One field of a batch: an array with the samples in its first dimension, or a string for each sample.
struct Column {
  std::string name;
  Value array;  ///< empty where the column is text
  std::vector<std::int64_t>
      lengths;  ///< of a field whose first dimension varies: `array` has the samples one after another
  std::vector<std::string> texts;
  Kind kind = Kind::Array;  ///< Text and Bytes have `texts`
};

struct Batch {
  std::vector<Column> columns;
  std::int64_t size = 0;  ///< samples
  std::int64_t epoch = 0;
  std::int64_t index = 0;             ///< of the batch in the epoch
  std::vector<std::int64_t> samples;  ///< indices of the dataset
};

/// One step for one batch, after its samples were put together. Called by several threads at once, each with a batch of
/// its own; randomness only from `random`, which belongs to seed, epoch and batch.
class OXY_API BatchStage {
 public:
  BatchStage() = default;
  BatchStage(const BatchStage&) = delete;
  BatchStage& operator=(const BatchStage&) = delete;
  virtual ~BatchStage();
  [[nodiscard]] virtual std::string name() const = 0;
  virtual void apply(Batch& batch, PhiloxStream& random) const = 0;
};
using BatchStagePtr = std::shared_ptr<const BatchStage>;

struct LoaderOptions {
  std::int64_t batch_size = 1;  ///< of this process
  /// In the place of `batch_size`: batches of as many samples as fit under a limit, so they differ in size. Processes
  /// take such batches in turn; where an epoch ends before each has one more, the last ones repeat the last batch.
  std::optional<BatchSizer> batch_sizer{};
  std::vector<StagePtr> stages{};
  std::vector<BatchStagePtr> batch_stages{};  ///< in order, after the samples are put together
  ImageOutput image{};
  std::string boxes{};  ///< a field of F32 [n, 4], x0 y0 x1 y1 in pixels, that moves with the image
  std::vector<std::string>
      masks{};  ///< fields of kind Image that move with the image: one channel, no values in between
  std::vector<std::string> per_box{};  ///< fields with a row for each box, such as classes: rows of dropped boxes go
  /// Fields that differ in their first dimension and are to be filled up with a value to the longest of a batch.
  std::vector<std::pair<std::string, double>> pad{};
  std::shared_ptr<const Sampler> sampler{};  ///< empty: shuffled() or sequential(), by `shuffle`
  bool shuffle = false;
  std::int64_t shuffle_window = 4096;  ///< samples of a stream that `shuffle` mixes at a time, and holds
  std::uint64_t seed = 0;
  std::int64_t rank = 0, world_size = 1;
  bool drop_last = false;
  int threads = 0;                 ///< 0: as many as the process has cores
  int prefetch = 0;                ///< batches ahead; 0: two, and one more for each two threads
  std::shared_ptr<Cache> cache{};  ///< of samples as they are read
  bool strip_jpegs = false;        ///< whether the cache keeps coefficients in the place of JPEGs
  OnError on_error = OnError::Raise;
  /// Memory for columns, aligned to 64 bytes. Without it, and where it gives none: the loader's own, which it takes
  /// again when a batch is let go.
  std::function<std::shared_ptr<std::byte>(std::size_t)> allocate{};
};

/// Where the time of a loader goes; seconds are of all threads.
struct LoaderStats {
  std::int64_t batches = 0, samples = 0, skipped = 0;
  double wait_seconds = 0;  ///< that next() and wait() waited for a batch
  double read_seconds = 0, collate_seconds = 0;
  std::vector<std::pair<std::string, double>>
      stage_seconds;  ///< by stage, decoding included where the stage asked for it
  std::optional<CacheStats> cache;
  /// Copies to a device that were done when next() was called last, by the device's clock; 0 where it tells no time.
  std::int64_t copied_bytes = 0;
  double copy_seconds = 0;
  /// Where most of the threads' time goes: "read", "collate" or a stage's name; empty before the first batch.
  [[nodiscard]] OXY_API std::string bottleneck() const;
};

/// Makes batches ahead with threads of its own. One thread at a time may call next(); the stream depends on dataset,
/// sampler, seed and global batch size alone, not on threads, prefetch or cache. What is random about a sample is drawn
/// from seed, epoch and position in the epoch.
///
/// Of a stream, a thread of its own draws samples in order, and every process draws all of them and keeps its part. It
/// resumes by drawing what was drawn. There is no cache, sampler, batch_sizer or OnError::Replace for one. A forked
/// child has none of the threads: there every call throws `InvalidState`.
class OXY_API Loader {
 public:
  Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options);
  Loader(std::shared_ptr<Stream> stream, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The next batch of the epoch; empty at its end, and then the next call begins the next epoch.
  /// Errors: what reading or a stage threw, with the stage, the sample and the file; the loader goes on behind
  /// it.
  [[nodiscard]] std::optional<Batch> next();
  /// Waits, at the most that long, until next() has not to wait; whether that is so.
  [[nodiscard]] bool wait(double seconds);
  /// Begins an epoch anew.
  void set_epoch(std::int64_t epoch);
  [[nodiscard]] std::int64_t epoch() const noexcept;
  /// Batches in this epoch; -1 for a stream, which has no known end. With a batch_sizer it goes through the order of
  /// the epoch, and epochs may differ.
  [[nodiscard]] std::int64_t size() const;
  [[nodiscard]] const Schema& schema() const noexcept;
  [[nodiscard]] const LoaderOptions& options() const noexcept;

  /// At most 256 bytes of text: seed, epoch, samples drawn, fingerprints of the dataset and of the sampler.
  [[nodiscard]] std::string state() const;
  /// Goes on where a loader with this state was; rank, world size and threads may differ, the global batch size must
  /// not.
  /// Errors: `InvalidArgument` for text that is no state, `InvalidState` where dataset, sampler or global batch size
  /// are others, which it names.
  void load_state(const std::string& text);
  [[nodiscard]] LoaderStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oxytorch::data
