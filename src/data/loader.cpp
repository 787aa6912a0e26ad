#include "oxytorch/data/loader.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <utility>

#include "data/buffer_pool.h"
#include "data/collation.h"
#include "data/file.h"
#include "data/loader_state.h"
#include "data/sample_entry.h"
#include "data/worker_threads.h"
#include "oxytorch/clock.h"
#include "oxytorch/error.h"
#include "oxytorch/system.h"

namespace oxytorch::data {
namespace {

constexpr double kTaskSeconds = 100e-6;  // of work that is worth a task of its own
constexpr double kSlowRead = 200e-6;     // seconds of a read from which on it pays to announce the next ones
constexpr int kReplacements = 16;        // samples that are tried in the place of a damaged one
constexpr int kReadsInFlight = 4;        // by thread, where reads wait for a network
constexpr std::int64_t kNeverUsed = std::numeric_limits<std::int64_t>::max();

LoaderOptions resolved(LoaderOptions options, std::int64_t samples) {
  OXY_CHECK(options.batch_size > 0, InvalidArgument, "batch_size is ", options.batch_size, ", expected at least 1.");
  OXY_CHECK(options.world_size > 0 && options.rank >= 0 && options.rank < options.world_size, InvalidArgument, "rank ",
            options.rank, " of world_size ", options.world_size, " is none: ranks are 0 to world_size - 1.");
  OXY_CHECK(options.threads >= 0 && options.threads <= 4096, InvalidArgument, "threads is ", options.threads,
            ", expected 0 (as many as there are cores) to 4096.");
  OXY_CHECK(options.prefetch >= 0, InvalidArgument, "prefetch is ", options.prefetch, ", expected at least 0.");
  if (options.threads == 0) options.threads = read_cores().usable;
  if (options.prefetch == 0) options.prefetch = 2 + options.threads / 2;
  if (!options.sampler) options.sampler = options.shuffle ? shuffled(samples) : sequential(samples);
  OXY_CHECK(
      options.image.dtype == DType::F32 || options.image.dtype == DType::BF16 || options.image.dtype == DType::F16,
      InvalidArgument, "images are normalized to float32, bfloat16 or float16, not to ", name(options.image.dtype),
      ".");
  for (const auto deviation : options.image.deviation) {
    OXY_CHECK(deviation > 0, InvalidArgument, "a standard deviation of images is ", deviation, ", expected above 0.");
  }
  return options;
}

std::shared_ptr<const Dataset> checked(std::shared_ptr<const Dataset> dataset) {
  OXY_CHECK(dataset != nullptr, InvalidArgument, "the loader was given no dataset.");
  return dataset;
}

/// What went wrong, as it is handed to another thread.
struct Failure {
  ErrorCode code;
  std::string text;
};

Failure failure_of(const std::exception& error, const std::string& before = "") {
  const auto* known = dynamic_cast<const Error*>(&error);
  return {known == nullptr ? ErrorCode::InvalidState : known->code(), before + error.what()};
}

/// One batch on its way.
struct PendingBatch {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0, index = 0;
  std::vector<std::int64_t> positions, samples;
  std::unique_ptr<Collation> collation;
  std::vector<std::optional<Failure>> failures;  // by row
  std::optional<Failure> uncollated;
  std::atomic<std::int64_t> left{0};  // rows
  std::atomic<bool> unwanted{false};
  std::vector<Column> columns;
  bool ready = false;  // under the loader's mutex
};

}  // namespace

std::string LoaderStats::bottleneck() const {
  std::string where;
  double most = 0;
  const auto consider = [&](const std::string& part, double seconds) {
    if (seconds > most) {
      most = seconds;
      where = part;
    }
  };
  consider("read", read_seconds);
  consider("collate", collate_seconds);
  for (const auto& [part, seconds] : stage_seconds) consider(part, seconds);
  return where;
}

struct Loader::Impl {
  using Work = std::shared_ptr<PendingBatch>;

  Impl(std::shared_ptr<const Dataset> given, LoaderOptions asked)
      : dataset(checked(std::move(given))),
        options(resolved(std::move(asked), dataset->size())),
        roles(roles_of(dataset->schema(), options)),
        sharding{options.batch_size, options.rank, options.world_size, options.drop_last},
        batches(options.sampler->size() == 0 ? 0 : sharding.batches(options.sampler->size())),
        fingerprint(dataset->fingerprint()) {
    const auto is_fixed = [](Role role) { return role == Role::Fixed; };
    reads_into = dataset->reads_into() && options.stages.empty() && !options.cache &&
                 std::all_of(roles.begin(), roles.end(), is_fixed);
    image_field = std::find(roles.begin(), roles.end(), Role::Pixels) - roles.begin();
    if (image_field == static_cast<std::int64_t>(roles.size())) image_field = -1;
    if (!options.allocate) {
      options.allocate = [pool = std::make_shared<BufferPool>()](std::size_t bytes) { return pool->take(bytes); };
    }
    workers = std::make_unique<WorkerThreads>(options.threads);
    if (dataset->remote()) io = std::make_unique<WorkerThreads>(kReadsInFlight * options.threads);
    for (const auto& stage : options.stages) stats.stage_seconds.emplace_back(stage->name(), 0.0);
  }

  ~Impl() {
    forget();
    io.reset();  // what it reads goes to the others
    workers.reset();
  }

  void check_process() const {
    OXY_CHECK(
        ::getpid() == maker, InvalidState,
        "this loader was made before the process forked, and its threads are in the parent. Make it in the child.");
  }

  // -- scheduling
  // -------------------------------------------------------------------------------------------------------

  void fill() {
    while (batches > 0 && static_cast<int>(queue.size()) < options.prefetch) {
      queue.push_back(schedule(next_epoch, next_index));
      if (++next_index == batches) {
        ++next_epoch;
        next_index = 0;
      }
    }
  }

  Work schedule(std::int64_t epoch, std::int64_t index) {
    auto work = std::make_shared<PendingBatch>();
    work->seed = options.seed;
    work->epoch = epoch;
    work->index = index;
    const auto size = options.sampler->size();
    std::int64_t first = 0, last = 0;
    sharding.range(size, index, first, last);
    for (auto position = first; position < last; ++position) {
      work->positions.push_back(position % size);
      const auto sample = options.sampler->at(position % size, static_cast<std::uint64_t>(epoch), options.seed);
      OXY_CHECK(sample >= 0 && sample < dataset->size(), OutOfRange, "the sampler drew sample ", sample,
                " of a dataset of ", dataset->size(), ".");
      work->samples.push_back(sample);
      if (slow_reads && !io) dataset->will_read(sample);
    }
    const auto rows = last - first;
    work->collation = std::make_unique<Collation>(dataset->schema(), roles, options, options.allocate, rows);
    work->failures.resize(static_cast<std::size_t>(rows));
    work->left = rows;
    const auto chunk =
        io ? 1 : std::clamp<std::int64_t>(static_cast<std::int64_t>(kTaskSeconds / sample_seconds), 1, rows);
    for (std::int64_t begin = 0; begin < rows; begin += chunk) {
      const auto end = std::min(begin + chunk, rows);
      if (io) {
        io->add([this, work, begin] { read_then_process(work, begin); });
      } else {
        workers->add([this, work, begin, end] { process(work, begin, end); });
      }
    }
    return work;
  }

  void read_then_process(const Work& work, std::int64_t row) {
    auto read = std::make_shared<CachedSample>();
    std::optional<Failure> failed;
    if (!work->unwanted) {
      try {
        *read = read_sample(work, row);
      } catch (const std::exception& error) {
        failed = failure_of(error);
      }
    }
    workers->add([this, work, row, read, failed] { process(work, row, row + 1, read.get(), failed); });
  }

  // -- samples
  // ----------------------------------------------------------------------------------------------------------

  CachedSample read_sample(const Work& work, std::int64_t row) {
    const auto sample = work->samples[static_cast<std::size_t>(row)];
    const auto fields = dataset->schema().fields.size();
    if (!options.cache) return {dataset->read(sample), {}};
    const auto key = fingerprint + (options.strip_jpegs ? "s" : "r") + std::to_string(sample);
    const auto again = next_use(sample, *work, work->positions[static_cast<std::size_t>(row)]);
    if (const auto entry = options.cache->find(key)) {
      if (auto found = unpack_sample(*entry, fields)) {
        options.cache->put(key, *entry, again);
        return *std::move(found);
      }
    }
    CachedSample read{dataset->read(sample), {}};
    std::string stripped;
    if (options.strip_jpegs && image_field >= 0) {
      stripped = strip_jpeg(read.sample[static_cast<std::size_t>(image_field)].data.bytes);
    }
    auto packed = std::make_shared<const std::string>(pack_sample(read.sample, image_field, stripped));
    const View entry{std::as_bytes(std::span(*packed)), packed};
    options.cache->put(key, entry, again);
    if (stripped.empty()) return read;
    // Decoded from the coefficients, whose entropy coding was undone just now.
    auto found = unpack_sample(entry, fields);
    OXY_ASSERT(found.has_value(), "a sample that was packed cannot be unpacked.");
    return *std::move(found);
  }

  /// How many draws of this process after this one the sample is drawn again.
  [[nodiscard]] std::int64_t next_use(std::int64_t sample, const PendingBatch& work, std::int64_t position) const {
    const auto size = options.sampler->size();
    const auto next = options.sampler->next(sample, 0, static_cast<std::uint64_t>(work.epoch) + 1, work.seed);
    return next < 0 ? kNeverUsed : (size - position + next) / options.world_size;
  }

  void apply(const Work& work, std::int64_t row, std::int64_t sample, CachedSample read, std::vector<double>& seconds) {
    Item item;
    item.index = sample;
    item.schema = &dataset->schema();
    item.sample = std::move(read.sample);
    for (std::size_t field = 0; field < roles.size(); ++field) {
      const auto& value = item.sample[field];
      if (roles[field] == Role::Pixels) item.image = image_of(value, read.stripped);
      if (roles[field] == Role::Mask) item.masks.push_back(image_of(value, {}).pixels(1));
      if (roles[field] == Role::Boxes) {
        item.boxes.resize(static_cast<std::size_t>(value.shape[0]));
        if (!item.boxes.empty()) std::memcpy(item.boxes.data(), value.data.bytes.data(), value.data.bytes.size());
        for (std::int64_t i = 0; i < value.shape[0]; ++i) item.box_ids.push_back(i);
      }
    }
    auto random = sample_random(work->seed, static_cast<std::uint64_t>(work->epoch),
                                work->positions[static_cast<std::size_t>(row)]);
    auto began = monotonic_seconds();
    for (std::size_t i = 0; i < options.stages.size(); ++i) {
      try {
        options.stages[i]->apply(item, random);
      } catch (const std::exception& error) {
        const auto failed = failure_of(error, "stage " + options.stages[i]->name() + ": ");
        throw Error(failed.code, failed.text);
      }
      const auto ended = monotonic_seconds();
      seconds[2 + i] += ended - began;
      began = ended;
    }
    work->collation->add(row, item);
    seconds[1] += monotonic_seconds() - began;
  }

  /// One row, whatever becomes of it.
  void make_row(const Work& work, std::int64_t row, const CachedSample* read, const std::optional<Failure>& failed,
                std::vector<double>& seconds, std::vector<std::byte*>& places) {
    const auto at = static_cast<std::size_t>(row);
    const int tries = options.on_error == OnError::Replace ? 1 + kReplacements : 1;
    for (int attempt = 0; attempt < tries; ++attempt) {
      auto& sample = work->samples[at];
      if (attempt > 0) sample = (sample + 1) % dataset->size();
      try {
        if (attempt == 0 && failed) throw Error(failed->code, failed->text);
        if (reads_into && read == nullptr) {
          work->collation->places(row, places);
          dataset->read_into(sample, places);
          return;
        }
        const auto began = monotonic_seconds();
        auto found = attempt == 0 && read != nullptr ? *read : read_sample(work, row);
        seconds[0] += monotonic_seconds() - began;
        apply(work, row, sample, std::move(found), seconds);
        return;
      } catch (const std::exception& error) {
        work->failures[at] =
            failure_of(error, "sample " + std::to_string(sample) + " (" + dataset->place(sample) + "): ");
      }
    }
    work->collation->drop(row);
  }

  /// Rows [begin, end) of a batch; who is the last one finishes it.
  void process(const Work& work, std::int64_t begin, std::int64_t end, const CachedSample* read = nullptr,
               const std::optional<Failure>& failed = {}) {
    std::vector<double> seconds(2 + options.stages.size());
    const auto began = monotonic_seconds();
    std::vector<std::byte*> places;
    for (auto row = begin; row < end && !work->unwanted; ++row) make_row(work, row, read, failed, seconds, places);
    const auto taken = monotonic_seconds() - began;
    if (reads_into && read == nullptr) seconds[0] = taken;  // a clock for each row would be a good part of it
    const bool last = (work->left -= end - begin) == 0;
    if (last && !work->unwanted) {
      const auto collating = monotonic_seconds();
      try {
        finish(*work);
      } catch (const std::exception& error) {
        work->uncollated = failure_of(error);
      }
      seconds[1] += monotonic_seconds() - collating;
    }
    const std::lock_guard lock(mutex);
    stats.read_seconds += seconds[0];
    stats.collate_seconds += seconds[1];
    for (std::size_t i = 0; i < options.stages.size(); ++i) stats.stage_seconds[i].second += seconds[2 + i];
    const auto rows = static_cast<double>(end - begin);
    // A moving average over about eight tasks.
    sample_seconds = std::max(1e-7, 0.875 * sample_seconds + 0.125 * taken / rows);
    read_seconds = 0.875 * read_seconds + 0.125 * seconds[0] / rows;
    slow_reads = read_seconds > kSlowRead;
    if (last) {
      work->ready = true;
      changed.notify_all();
    }
  }

  void finish(PendingBatch& work) {
    work.columns = work.collation->finish();
    if (options.batch_stages.empty() || work.columns.empty()) return;
    Batch batch{.columns = std::move(work.columns), .size = 0, .epoch = work.epoch, .index = work.index, .samples = {}};
    batch.size = static_cast<std::int64_t>(work.collation->kept().size());
    // Apart from the numbers of samples, whose positions begin at 0.
    auto random = sample_random(work.seed, static_cast<std::uint64_t>(work.epoch), -1 - work.index);
    for (const auto& stage : options.batch_stages) {
      try {
        stage->apply(batch, random);
      } catch (const std::exception& error) {
        const auto failed = failure_of(error, "stage " + stage->name() + ": ");
        throw Error(failed.code, failed.text);
      }
    }
    work.columns = std::move(batch.columns);
  }

  // -- the consumer's side
  // ----------------------------------------------------------------------------------------------

  bool wait(double seconds) {
    check_process();
    if (batches == 0 || index == batches) return true;
    fill();
    const auto began = monotonic_seconds();
    std::unique_lock lock(mutex);
    const auto& front = *queue.front();
    const bool ready =
        changed.wait_for(lock, std::chrono::duration<double>(std::max(seconds, 0.0)), [&] { return front.ready; });
    stats.wait_seconds += monotonic_seconds() - began;
    return ready;
  }

  std::optional<Batch> next() {
    for (;;) {
      if (batches == 0 || index == batches) {
        check_process();
        ++epoch;
        index = 0;
        if (batches == 0) next_epoch = epoch;
        return std::nullopt;
      }
      while (!wait(3600)) {
      }
      const auto work = std::move(queue.front());
      queue.pop_front();
      ++index;
      fill();
      const auto failed = std::find_if(work->failures.begin(), work->failures.end(),
                                       [](const auto& failure) { return failure.has_value(); });
      const bool whole = work->collation->kept().size() == work->samples.size();
      const bool raises = options.on_error == OnError::Raise || (options.on_error == OnError::Replace && !whole);
      {
        const std::lock_guard lock(mutex);
        stats.skipped +=
            std::count_if(failed, work->failures.end(), [](const auto& failure) { return failure.has_value(); });
      }
      if (failed != work->failures.end() && raises) throw Error((*failed)->code, (*failed)->text);
      if (work->uncollated) throw Error(work->uncollated->code, work->uncollated->text);
      if (work->collation->kept().empty()) continue;  // each of its samples was skipped
      Batch batch{
          .columns = std::move(work->columns), .size = 0, .epoch = work->epoch, .index = work->index, .samples = {}};
      for (const auto row : work->collation->kept())
        batch.samples.push_back(work->samples[static_cast<std::size_t>(row)]);
      batch.size = static_cast<std::int64_t>(batch.samples.size());
      const std::lock_guard lock(mutex);
      ++stats.batches;
      stats.samples += batch.size;
      return batch;
    }
  }

  /// Lets go of what was made ahead.
  void forget() {
    for (const auto& work : queue) work->unwanted = true;
    queue.clear();
  }

  void go_to(std::int64_t to_epoch, std::int64_t to_index) {
    check_process();
    if (to_epoch == epoch && to_index == index) return;
    forget();
    next_epoch = epoch = to_epoch;
    next_index = index = to_index;
    if (batches > 0 && next_index >= batches) {
      ++next_epoch;
      next_index = 0;
    }
  }

  std::shared_ptr<const Dataset> dataset;
  LoaderOptions options;
  std::vector<Role> roles;
  Sharding sharding;
  std::int64_t batches;
  std::string fingerprint;
  std::int64_t image_field = -1;
  bool reads_into = false;  // samples go from the dataset to the batch's memory
  const pid_t maker = ::getpid();

  // Of the thread that consumes.
  std::int64_t epoch = 0, index = 0;            // of the next batch to give out
  std::int64_t next_epoch = 0, next_index = 0;  // of the next batch to begin
  std::deque<Work> queue;

  std::mutex mutex;
  std::condition_variable changed;
  LoaderStats stats;
  std::atomic<double> sample_seconds{50e-6};  // a guess until the first is measured
  double read_seconds = 0;
  std::atomic<bool> slow_reads{false};

  std::unique_ptr<WorkerThreads> workers, io;  // those of `io` wait for a network
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options)
    : impl_(std::make_unique<Impl>(std::move(dataset), std::move(options))) {}

Loader::~Loader() {
  // A forked child has none of the threads that would end.
  if (::getpid() != impl_->maker) static_cast<void>(impl_.release());
}

std::optional<Batch> Loader::next() { return impl_->next(); }
bool Loader::wait(double seconds) { return impl_->wait(seconds); }

void Loader::set_epoch(std::int64_t epoch) {
  OXY_CHECK(epoch >= 0, InvalidArgument, "epoch is ", epoch, ", expected at least 0.");
  impl_->go_to(epoch, 0);
}

std::int64_t Loader::epoch() const noexcept { return impl_->epoch; }
std::int64_t Loader::size() const noexcept { return impl_->batches; }
const Dataset& Loader::dataset() const noexcept { return *impl_->dataset; }
const LoaderOptions& Loader::options() const noexcept { return impl_->options; }

std::string Loader::state() const {
  const auto& self = *impl_;
  const auto global = self.options.batch_size * self.options.world_size;
  return write_loader_state({.seed = self.options.seed,
                             .epoch = self.epoch,
                             .samples = self.index * global,
                             .batch = global,
                             .dataset = self.fingerprint,
                             .order = self.options.sampler->fingerprint()});
}

void Loader::load_state(const std::string& text) {
  auto& self = *impl_;
  const auto state = read_loader_state(text);
  const auto global = self.options.batch_size * self.options.world_size;
  OXY_CHECK(state.dataset == self.fingerprint, InvalidState,
            "the state of the loader is of another dataset, or its files have changed since: its fingerprint is ",
            state.dataset, ", and that of this one ", self.fingerprint, ".");
  OXY_CHECK(state.order == self.options.sampler->fingerprint(), InvalidState,
            "the state of the loader is of another sampler: give this one shuffle, weights and lengths as they were.");
  OXY_CHECK(state.batch == global, InvalidState, "the state of the loader is of batches of ", state.batch,
            " samples over all processes, and this loader makes batches of ", self.options.batch_size, " on ",
            self.options.world_size, " processes.");
  OXY_CHECK(state.samples / global <= self.batches, InvalidArgument, "the state of the loader is at sample ",
            state.samples, " of an epoch of ", self.options.sampler->size(), ".");
  self.forget();
  self.options.seed = state.seed;
  self.epoch = self.index = -1;  // so that it goes there whatever it was
  self.go_to(state.epoch, state.samples / global);
}

LoaderStats Loader::stats() const {
  const std::lock_guard lock(impl_->mutex);
  auto stats = impl_->stats;
  if (impl_->options.cache) stats.cache = impl_->options.cache->stats();
  return stats;
}

}  // namespace oxytorch::data
