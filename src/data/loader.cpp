#include "oxytorch/data/loader.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "data/buffer_pool.h"
#include "data/collation.h"
#include "data/epoch_cut.h"
#include "data/failure.h"
#include "data/file.h"
#include "data/loader_state.h"
#include "data/next_use.h"
#include "data/sample_entry.h"
#include "data/stream_window.h"
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

LoaderOptions resolved(LoaderOptions options, const Dataset* dataset) {
  OXY_CHECK(options.batch_size > 0, InvalidArgument, "batch_size is ", options.batch_size, ", expected at least 1.");
  OXY_CHECK(options.world_size > 0 && options.rank >= 0 && options.rank < options.world_size, InvalidArgument, "rank ",
            options.rank, " of world_size ", options.world_size, " is none: ranks are 0 to world_size - 1.");
  OXY_CHECK(options.threads >= 0 && options.threads <= 4096, InvalidArgument, "threads is ", options.threads,
            ", expected 0 (as many as there are cores) to 4096.");
  OXY_CHECK(options.prefetch >= 0, InvalidArgument, "prefetch is ", options.prefetch, ", expected at least 0.");
  if (options.threads == 0) options.threads = read_cores().usable;
  if (options.prefetch == 0) options.prefetch = 2 + options.threads / 2;
  OXY_CHECK(!options.batch_sizer || options.batch_size == 1, InvalidArgument, "batch_size is ", options.batch_size,
            " beside a batch_sizer, which decides how many samples a batch has; give one of them.");
  if (dataset == nullptr) {
    const auto* absent = options.sampler                        ? "sampler"
                         : options.batch_sizer                  ? "batch_sizer"
                         : options.cache                        ? "cache"
                         : options.on_error == OnError::Replace ? "sample to take in the place of a damaged one"
                                                                : nullptr;
    OXY_CHECK(absent == nullptr, InvalidArgument, "there is no ", absent,
              " for a stream: its samples have no numbers, and come one after the other.");
    OXY_CHECK(options.shuffle_window > 0, InvalidArgument, "shuffle_window is ", options.shuffle_window,
              ", expected at least 1.");
  } else if (!options.sampler) {
    options.sampler = options.shuffle ? shuffled(dataset->size()) : sequential(dataset->size());
  }
  OXY_CHECK(
      options.image.dtype == DType::F32 || options.image.dtype == DType::BF16 || options.image.dtype == DType::F16,
      InvalidArgument, "images are normalized to float32, bfloat16 or float16, not to ", name(options.image.dtype),
      ".");
  for (const auto deviation : options.image.deviation) {
    OXY_CHECK(deviation > 0, InvalidArgument, "a standard deviation of images is ", deviation, ", expected above 0.");
  }
  return options;
}

template <class Source>
std::shared_ptr<Source> checked(std::shared_ptr<Source> source) {
  OXY_CHECK(source != nullptr, InvalidArgument, "the loader was given nothing to read.");
  return source;
}

/// A place in the stream of batches, before one of them.
struct Place {
  std::int64_t epoch = 0;
  std::int64_t index = 0;     // of the batch
  std::int64_t position = 0;  // samples of the epoch that all processes have drawn before
  bool operator==(const Place&) const = default;
};

/// One batch on its way.
struct PendingBatch {
  std::uint64_t seed = 0;
  Place place;
  std::int64_t end = 0;  // position of the next batch
  std::vector<std::int64_t> positions, samples;
  std::vector<CachedSample> drawn;  // of a stream
  std::vector<std::optional<Failure>> not_drawn;
  std::unique_ptr<Collation> collation;
  std::vector<std::optional<Failure>> failures;  // by row
  std::optional<Failure> uncollated;
  std::atomic<std::int64_t> left{0};  // rows
  std::atomic<bool> unwanted{false};
  std::vector<Column> columns;
  bool ready = false;   // under the loader's mutex
  bool is_end = false;  // of a stream's epoch, in the place of a batch
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

  Impl(std::shared_ptr<const Dataset> given, std::shared_ptr<Stream> flow, LoaderOptions asked)
      : dataset(std::move(given)),
        stream(std::move(flow)),
        schema(dataset ? dataset->schema() : stream->schema()),
        options(resolved(std::move(asked), dataset.get())),
        roles(roles_of(schema, options)),
        fingerprint(dataset ? dataset->fingerprint() : stream->fingerprint()) {
    const auto is_fixed = [](Role role) { return role == Role::Fixed; };
    if (dataset) {
      cut.emplace(options, dataset->size());
      if (options.cache) next_use.emplace(options, dataset->size());
      reads_into = dataset->reads_into() && options.stages.empty() && !options.cache &&
                   std::all_of(roles.begin(), roles.end(), is_fixed);
    }
    image_field = std::find(roles.begin(), roles.end(), Role::Pixels) - roles.begin();
    if (image_field == static_cast<std::int64_t>(roles.size())) image_field = -1;
    options.allocate = [given = options.allocate, pool = std::make_shared<BufferPool>()](std::size_t bytes) {
      auto memory = given ? given(bytes) : nullptr;
      return memory ? memory : pool->take(bytes);
    };
    workers = std::make_unique<WorkerThreads>(options.threads);
    if (dataset && dataset->remote()) io = std::make_unique<WorkerThreads>(kReadsInFlight * options.threads);
    for (const auto& stage : options.stages) stats.stage_seconds.emplace_back(stage->name(), 0.0);
  }

  ~Impl() {
    forget();
    io.reset();  // what it reads goes to the others
    workers.reset();
  }

  [[nodiscard]] std::int64_t of_all_processes() const {
    return cut ? cut->of_all_processes() : options.batch_size * options.world_size;
  }
  /// Fingerprint of what decides the order; once, since it reads the sizes of all samples where a batch_sizer has them.
  [[nodiscard]] const std::string& order() {
    if (known_order.empty()) {
      known_order = cut ? cut->fingerprint()
                        : fingerprint_of({"stream", std::to_string(options.shuffle ? options.shuffle_window : 1)});
    }
    return known_order;
  }

  void check_process() const {
    OXY_CHECK(
        ::getpid() == maker, InvalidState,
        "this loader was made before the process forked, and its threads are in the parent. Make it in the child.");
  }

  // -- scheduling
  // -------------------------------------------------------------------------------------------------------

  void fill() {
    if (stream) {
      if (!reader.joinable()) {
        stops = false;
        reader = std::thread([this, from = here, seed = options.seed] { draw_epoch(from, seed); });
      }
      return;
    }
    while (static_cast<int>(queue.size()) < options.prefetch) {
      const auto part = cut->part(ahead.epoch, options.seed, ahead.position);
      if (!part) {
        if (ahead.position == 0) return;  // an epoch has no batch
        ahead = {ahead.epoch + 1, 0, 0};
        continue;
      }
      queue.push_back(schedule(ahead, *part));
      ahead = {ahead.epoch, ahead.index + 1, part->end};
    }
  }

  Work schedule(const Place& place, const EpochCut::Part& part) {
    auto work = std::make_shared<PendingBatch>();
    work->seed = options.seed;
    work->place = place;
    work->end = part.end;
    const auto size = options.sampler->size();
    for (auto position = part.first; position < part.last; ++position) {
      work->positions.push_back(position % size);
      const auto sample = options.sampler->at(position % size, static_cast<std::uint64_t>(place.epoch), options.seed);
      OXY_CHECK(sample >= 0 && sample < dataset->size(), OutOfRange, "the sampler drew sample ", sample,
                " of a dataset of ", dataset->size(), ".");
      work->samples.push_back(sample);
      if (slow_reads && !io) dataset->will_read(sample);
    }
    begin(work);
    return work;
  }

  /// Hands the rows of a batch to the threads.
  void begin(const Work& work) {
    const auto rows = static_cast<std::int64_t>(work->samples.size());
    work->collation = std::make_unique<Collation>(schema, roles, options, options.allocate, rows);
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
  }

  // -- a stream
  // ---------------------------------------------------------------------------------------------------------

  /// Whether there is place for one more; false where nobody wants it.
  bool waits_for_place() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return stops || static_cast<int>(queue.size()) < options.prefetch; });
    return !stops;
  }
  void push(Work work) {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }

  /// What the thread of a stream does: it draws the batches of an epoch, from `place` on.
  void draw_epoch(Place place, std::uint64_t seed) {
    auto ended = std::make_shared<PendingBatch>();
    ended->is_end = ended->ready = true;
    try {
      StreamWindow samples(*stream, options.shuffle ? options.shuffle_window : 1, seed, place.epoch);
      for (std::int64_t i = 0; i < place.position && !stops; ++i) {
        if (!samples.next()) break;  // another stream than that of the state, which the fingerprint did not tell
      }
      while (waits_for_place()) {
        std::vector<Drawn> drawn;
        const auto all = of_all_processes();
        const auto began = monotonic_seconds();
        while (static_cast<std::int64_t>(drawn.size()) < all && !stops) {
          auto one = samples.next();
          if (!one) break;
          drawn.push_back(*std::move(one));
        }
        {
          const std::lock_guard lock(mutex);
          stats.read_seconds += monotonic_seconds() - began;
        }
        const auto count = static_cast<std::int64_t>(drawn.size());
        std::int64_t first = 0, last = 0;
        Sharding{options.batch_size, options.rank, options.world_size, options.drop_last}.range(count, 0, first, last);
        if (stops || first == last) break;
        push(batch_of(drawn, place, first, last, seed));
        place = {place.epoch, place.index + 1, place.position + all};
        if (count < all) break;
      }
    } catch (const std::exception& error) {
      ended->uncollated = failure_of(error, "the stream of epoch " + std::to_string(place.epoch) + ": ");
    }
    push(std::move(ended));
  }

  Work batch_of(const std::vector<Drawn>& drawn, const Place& place, std::int64_t first, std::int64_t last,
                std::uint64_t seed) {
    auto work = std::make_shared<PendingBatch>();
    work->seed = seed;
    work->place = place;
    work->end = place.position + of_all_processes();
    const auto count = static_cast<std::int64_t>(drawn.size());
    std::vector<std::optional<Failure>> failures;
    for (auto i = first; i < last; ++i) {
      const auto& one = drawn[static_cast<std::size_t>(i % count)];
      work->positions.push_back(place.position + i % count);
      work->samples.push_back(one.index);
      work->drawn.push_back({one.sample, {}});
      failures.push_back(one.failure);
    }
    work->not_drawn = std::move(failures);
    begin(work);
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
    const auto fields = schema.fields.size();
    if (!options.cache) return {dataset->read(sample), {}};
    const auto key = fingerprint + (options.strip_jpegs ? "s" : "r") + std::to_string(sample);
    const Draw draw{static_cast<std::uint64_t>(work->place.epoch), work->positions[static_cast<std::size_t>(row)]};
    const auto again = next_use->draws_until(sample, draw, work->seed);
    if (const auto entry = options.cache->find(key)) {
      if (auto found = unpack_sample(*entry, fields)) {
        options.cache->put(key, *entry, again);
        return *std::move(found);
      }
    }
    CachedSample read{dataset->read(sample), {}};
    std::string stripped;
    if (options.strip_jpegs && image_field >= 0) {
      const auto& image = read.sample[static_cast<std::size_t>(image_field)];
      if (image.shape.size() != 3) stripped = strip_jpeg(image.data.bytes);
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

  void apply(const Work& work, std::int64_t row, std::int64_t sample, CachedSample read, std::vector<double>& seconds) {
    Item item;
    item.index = sample;
    item.schema = &schema;
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
    auto random = sample_random(work->seed, static_cast<std::uint64_t>(work->place.epoch),
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
            failure_of(error, "sample " + std::to_string(sample) + " (" +
                                  (dataset ? dataset->place(sample) : std::string("of the stream")) + "): ");
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
    for (auto row = begin; row < end && !work->unwanted; ++row) {
      const auto at = static_cast<std::size_t>(row);
      if (stream) {
        make_row(work, row, &work->drawn[at], work->not_drawn[at], seconds, places);
      } else {
        make_row(work, row, read, failed, seconds, places);
      }
    }
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
    Batch batch{.columns = std::move(work.columns),
                .size = 0,
                .epoch = work.place.epoch,
                .index = work.place.index,
                .samples = {}};
    batch.size = static_cast<std::int64_t>(work.collation->kept().size());
    // Apart from the numbers of samples, whose positions begin at 0.
    auto random = sample_random(work.seed, static_cast<std::uint64_t>(work.place.epoch), -1 - work.place.index);
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

  /// Whether no batch of this epoch is left; of a stream nobody knows before its end has come.
  [[nodiscard]] bool is_over() const { return !stream && (queue.empty() || queue.front()->place.epoch != here.epoch); }

  bool wait(double seconds) {
    check_process();
    fill();
    if (is_over()) return true;
    const auto began = monotonic_seconds();
    std::unique_lock lock(mutex);
    const auto is_ready = [&] { return !queue.empty() && queue.front()->ready; };
    // Whole batches of small samples take less than waking a thread. Only what runs no code of a user's is done here.
    for (bool helps = reads_into; helps && !is_ready();) {
      lock.unlock();
      helps = workers->help();
      lock.lock();
    }
    const bool ready = changed.wait_for(lock, std::chrono::duration<double>(std::max(seconds, 0.0)), is_ready);
    stats.wait_seconds += monotonic_seconds() - began;
    return ready;
  }

  void begin_next_epoch() {
    here = {here.epoch + 1, 0, 0};
    if (stream) {
      reader.join();
      reader = {};
    } else if (queue.empty()) {
      ahead = here;
    }
  }

  std::optional<Batch> next() {
    for (;;) {
      while (!wait(3600)) {
      }
      if (is_over()) {
        begin_next_epoch();
        return std::nullopt;
      }
      Work work;
      {
        const std::lock_guard lock(mutex);
        work = std::move(queue.front());
        queue.pop_front();
        changed.notify_all();  // the thread of a stream waits for its place
      }
      if (work->is_end) {
        begin_next_epoch();
        if (work->uncollated) throw Error(work->uncollated->code, work->uncollated->text);
        return std::nullopt;
      }
      here = {here.epoch, here.index + 1, work->end};
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
      Batch batch{.columns = std::move(work->columns),
                  .size = 0,
                  .epoch = work->place.epoch,
                  .index = work->place.index,
                  .samples = {}};
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
    if (reader.joinable()) {
      {
        const std::lock_guard lock(mutex);
        stops = true;
        changed.notify_all();
      }
      reader.join();
    }
    for (const auto& work : queue) work->unwanted = true;
    queue.clear();
  }

  void go_to(const Place& to) {
    check_process();
    if (to == here) return;
    forget();
    here = ahead = to;
  }

  std::shared_ptr<const Dataset> dataset;  // or
  std::shared_ptr<Stream> stream;
  const Schema& schema;
  LoaderOptions options;
  std::vector<Role> roles;
  std::string fingerprint;
  std::optional<EpochCut> cut;      // of a dataset
  std::optional<NextUse> next_use;  // of one with a cache
  std::int64_t image_field = -1;
  bool reads_into = false;  // samples go from the dataset to the batch's memory
  const pid_t maker = ::getpid();

  // Of the thread that consumes.
  std::string known_order;
  Place here;              // before the next batch to give out
  Place ahead;             // before the next batch to begin
  std::deque<Work> queue;  // the thread of a stream adds to it, under the mutex

  std::mutex mutex;
  std::condition_variable changed;
  LoaderStats stats;
  std::atomic<double> sample_seconds{50e-6};  // a guess until the first is measured
  double read_seconds = 0;
  std::atomic<bool> slow_reads{false};

  std::thread reader;  // of a stream, for an epoch
  std::atomic<bool> stops{false};

  std::unique_ptr<WorkerThreads> workers, io;  // those of `io` wait for a network
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options)
    : impl_(std::make_unique<Impl>(checked(std::move(dataset)), nullptr, std::move(options))) {}
Loader::Loader(std::shared_ptr<Stream> stream, LoaderOptions options)
    : impl_(std::make_unique<Impl>(nullptr, checked(std::move(stream)), std::move(options))) {}

Loader::~Loader() {
  // A forked child has none of the threads that would end.
  if (::getpid() != impl_->maker) static_cast<void>(impl_.release());
}

std::optional<Batch> Loader::next() { return impl_->next(); }
bool Loader::wait(double seconds) { return impl_->wait(seconds); }

void Loader::set_epoch(std::int64_t epoch) {
  OXY_CHECK(epoch >= 0, InvalidArgument, "epoch is ", epoch, ", expected at least 0.");
  impl_->go_to({epoch, 0, 0});
}

std::int64_t Loader::epoch() const noexcept { return impl_->here.epoch; }
std::int64_t Loader::size() const {
  return impl_->cut ? impl_->cut->batches(impl_->here.epoch, impl_->options.seed) : -1;
}
const Schema& Loader::schema() const noexcept { return impl_->schema; }
const LoaderOptions& Loader::options() const noexcept { return impl_->options; }

std::string Loader::state() const {
  auto& self = *impl_;
  return write_loader_state({.seed = self.options.seed,
                             .epoch = self.here.epoch,
                             .batches = self.here.index,
                             .samples = self.here.position,
                             .batch = self.of_all_processes(),
                             .dataset = self.fingerprint,
                             .order = self.order()});
}

void Loader::load_state(const std::string& text) {
  auto& self = *impl_;
  const auto state = read_loader_state(text);
  OXY_CHECK(state.dataset == self.fingerprint, InvalidState,
            "the state of the loader is of another dataset, or its files have changed since: its fingerprint is ",
            state.dataset, ", and that of this one ", self.fingerprint, ".");
  OXY_CHECK(state.order == self.order(), InvalidState,
            "the state of the loader is of another order: give this one shuffle, weights, lengths and sizes as they "
            "were.");
  OXY_CHECK(state.batch == self.of_all_processes(), InvalidState, "the state of the loader is of batches of ",
            state.batch, " over all processes, and this loader makes batches of ",
            self.of_all_processes() / self.options.world_size, " on ", self.options.world_size, " processes.");
  if (self.cut) {
    const auto size = self.options.sampler->size();
    OXY_CHECK(state.samples - state.batch < size || state.samples == 0, InvalidArgument,
              "the state of the loader is at sample ", state.samples, " of an epoch of ", size, ".");
  }
  self.check_process();
  self.forget();
  self.options.seed = state.seed;
  self.here = self.ahead = {state.epoch, state.batches, state.samples};
}

LoaderStats Loader::stats() const {
  const std::lock_guard lock(impl_->mutex);
  auto stats = impl_->stats;
  if (impl_->options.cache) stats.cache = impl_->options.cache->stats();
  return stats;
}

}  // namespace oxytorch::data
