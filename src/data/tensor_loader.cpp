#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <exception>
#include <utility>

#include "data/side_stream.h"
#include "oxytorch/data/tensors.h"

namespace oxytorch::data {
namespace {

/// Whether memory that `device` copies from at full speed can be had.
bool has_pinned_memory(at::Device device) {
  if (at::getAccelerator(/*checked=*/false) != device.type()) return false;
  try {
    return at::empty({1}, at::TensorOptions().dtype(at::kByte).pinned_memory(true)).defined();
  } catch (const c10::Error&) {
    return false;  // torch has no question for it
  }
}

std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) {
  const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  const auto memory = std::make_shared<at::Tensor>(at::empty({static_cast<std::int64_t>(bytes)}, options));
  return {memory, static_cast<std::byte*>(memory->data_ptr())};
}

/// A stream beside the one in use; empty where the device has no streams, or no events to tell them apart.
std::unique_ptr<detail::SideStream> side_stream_of(at::Device device) {
  try {
    auto made = std::make_unique<detail::SideStream>(device);
    if (!made->is_beside()) return {};
    const detail::SideStream::Scope probe(*made);
    return made;
  } catch (const c10::Error&) {
    return {};  // torch has no question for it
  }
}

TensorBatch on_host(Batch batch) {
  TensorBatch made{std::move(batch), {}};
  for (auto& column : made.batch.columns) {
    const bool is_array = column.kind == Kind::Array || column.kind == Kind::Image;
    made.tensors.push_back(is_array ? to_tensor(column.array) : at::Tensor());
    column.array = {};
  }
  return made;
}

/// A copy and its host's side, which is read until the second event is reached.
struct Copying {
  c10::Event begun, done;
  std::vector<at::Tensor> source;
};

/// A place of the stream of batches, and what came of drawing there.
struct Drawn {
  std::string state;
  std::int64_t epoch = 0;
  std::optional<TensorBatch> batch;
  std::optional<Copying> copying;
  bool is_placed = false;  // where it is wanted
  std::exception_ptr error;
};

}  // namespace

Tensors TensorBatch::by_name() const {
  Tensors found;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined()) found.emplace(batch.columns[i].name, tensors[i]);
  }
  return found;
}

struct TensorLoader::Impl {
  Impl(std::shared_ptr<const Dataset> from, std::shared_ptr<Stream> flow, LoaderOptions options)
      : dataset(std::move(from)), stream(std::move(flow)), asked(std::move(options)) {
    if (!asked.allocate) {
      asked.allocate = [pins = pins](std::size_t bytes) { return *pins ? pinned_memory(bytes) : nullptr; };
    }
    loader = made(asked);
  }

  ~Impl() {
    drop();
    for (auto& each : copying) {
      try {
        each.done.synchronize();
      } catch (const c10::Error&) {
        // The device's driver ended before the loader, and its copies with it.
      }
    }
  }

  [[nodiscard]] std::unique_ptr<Loader> made(const LoaderOptions& options) const {
    return stream ? std::make_unique<Loader>(stream, options) : std::make_unique<Loader>(dataset, options);
  }

  void change(const LoaderOptions& options) {
    auto next = asked;
    next.threads = options.threads;
    next.prefetch = options.prefetch;
    next.cache = options.cache;
    next.strip_jpegs = options.strip_jpegs;
    auto another = made(next);
    another->load_state(ahead ? ahead->state : loader->state());
    drop();
    loader = std::move(another);
    asked = std::move(next);
  }

  void set_device(std::optional<at::Device> to) {
    const bool on_host = !to || to->is_cpu();
    if (!on_host && !to->has_index()) to = c10::impl::VirtualGuardImpl(to->type()).getDevice();
    if (to == device) return;
    if (ahead) take_back(*ahead);
    device = to;
    side = on_host ? nullptr : side_stream_of(*device);
    *pins = !on_host && has_pinned_memory(*device);
    if (ahead) ahead->is_placed = is_placed(*ahead);
  }

  /// Whether it is where it is wanted before anything is done.
  [[nodiscard]] bool is_placed(const Drawn& drawn) const { return !drawn.batch || !device || device->is_cpu(); }

  Drawn draw() {
    Drawn drawn;
    if (device && !device->is_cpu()) {  // it may wait there
      drawn.state = loader->state();
      drawn.epoch = loader->epoch();
    }
    try {
      if (auto batch = loader->next()) drawn.batch = on_host(*std::move(batch));
    } catch (...) {
      drawn.error = std::current_exception();
    }
    drawn.is_placed = is_placed(drawn);
    return drawn;
  }

  /// Puts a batch where it is wanted, or begins to; where that throws, it is as before.
  //
  // Memory is taken on the stream in use and returns to it: what used it before has ended when the copy begins, and
  // what uses it next comes behind the copy.
  void place(Drawn& drawn) {
    const c10::DeviceGuard on(*device);
    auto& tensors = drawn.batch->tensors;
    std::vector<at::Tensor> there(tensors.size());
    for (std::size_t i = 0; i < there.size(); ++i) {
      if (!tensors[i].defined()) continue;
      there[i] = side ? at::empty(tensors[i].sizes(), tensors[i].options().device(*device))
                      : tensors[i].to(*device, /*non_blocking=*/true);
    }
    if (side) {
      const detail::SideStream::Scope scope(*side);
      c10::Event begun = side->mark(c10::EventFlag::BACKEND_DEFAULT);
      for (std::size_t i = 0; i < there.size(); ++i) {
        if (there[i].defined()) there[i].copy_(tensors[i], /*non_blocking=*/true);
      }
      drawn.copying.emplace(std::move(begun), side->mark(c10::EventFlag::BACKEND_DEFAULT), std::move(tensors));
    }
    tensors = std::move(there);
    drawn.is_placed = true;
  }

  /// Has the stream in use wait for the copy, whose source is kept until it is done.
  void settle(Drawn& drawn) {
    if (!drawn.copying) return;
    side->follow(drawn.copying->done);
    copying.push_back(*std::move(drawn.copying));
    drawn.copying.reset();
  }

  /// Has a batch that was to be on a device in the host's memory again.
  void take_back(Drawn& drawn) {
    if (!drawn.copying) return;
    drawn.batch->tensors = drawn.copying->source;
    settle(drawn);
  }

  /// Lets go of the host's side of copies that are done, and counts them.
  void release() {
    for (; !copying.empty() && copying.front().done.query(); copying.pop_front()) {
      const auto& copy = copying.front();
      if (!is_timed) continue;
      try {
        copy_seconds = copy_seconds + copy.begun.elapsedTime(copy.done) / 1e3;
      } catch (const c10::Error&) {
        is_timed = false;  // torch has no question for it
        continue;
      }
      for (const auto& tensor : copy.source) {
        if (tensor.defined()) copied_bytes += static_cast<std::int64_t>(tensor.nbytes());
      }
    }
  }

  std::optional<TensorBatch> next() {
    release();
    if (!ahead) ahead = draw();
    if (!ahead->is_placed) place(*ahead);  // it waits for the next call where there is no memory for it
    Drawn drawn = *std::exchange(ahead, {});
    settle(drawn);
    if (drawn.error) std::rethrow_exception(drawn.error);
    if (drawn.batch && side && loader->wait(0)) {
      ahead = draw();
      try {
        if (!ahead->is_placed) place(*ahead);
      } catch (const c10::OutOfMemoryError&) {
        // There is no memory for two batches: it is copied when the one before it was let go of.
      }
    }
    return std::move(drawn.batch);
  }

  void drop() {
    if (ahead) settle(*ahead);
    ahead.reset();
  }
  void set_epoch(std::int64_t epoch) {
    drop();
    loader->set_epoch(epoch);
  }
  void load_state(const std::string& state) {
    loader->load_state(state);
    drop();
  }

  std::shared_ptr<std::atomic<bool>> pins =
      std::make_shared<std::atomic<bool>>(false);  // threads of the loader read it
  const std::shared_ptr<const Dataset> dataset;    // or
  const std::shared_ptr<Stream> stream;
  LoaderOptions asked;
  std::unique_ptr<Loader> loader;
  std::optional<at::Device> device;
  std::unique_ptr<detail::SideStream> side;
  std::optional<Drawn> ahead;
  std::deque<Copying> copying;                // of batches that were given out
  bool is_timed = true;                       // the device's events tell seconds
  std::atomic<std::int64_t> copied_bytes{0};  // any thread may ask for statistics
  std::atomic<double> copy_seconds{0};
  bool left_off = false;  // a loop ended before its epoch did
  const pid_t maker = ::getpid();
};

TensorLoader::TensorLoader(std::shared_ptr<const Dataset> dataset, LoaderOptions options,
                           std::optional<at::Device> device)
    : impl_(std::make_unique<Impl>(std::move(dataset), nullptr, std::move(options))) {
  set_device(device);
}
TensorLoader::TensorLoader(std::shared_ptr<Stream> stream, LoaderOptions options, std::optional<at::Device> device)
    : impl_(std::make_unique<Impl>(nullptr, std::move(stream), std::move(options))) {
  set_device(device);
}
TensorLoader::~TensorLoader() {
  // A forked child has no thread of the loader and no device.
  if (::getpid() != impl_->maker) static_cast<void>(impl_.release());
}

TensorLoader::Iterator& TensorLoader::Iterator::operator++() {
  batch_.reset();  // its memory may serve the next one
  const auto batch = loader_->next();
  loader_->impl_->left_off = batch.has_value();
  batch_ = batch ? std::optional(batch->by_name()) : std::nullopt;
  return *this;
}

TensorLoader::Iterator TensorLoader::begin() {
  if (impl_->left_off) set_epoch(epoch() + 1);
  return Iterator(*this);
}

void TensorLoader::set_device(std::optional<at::Device> device) { impl_->set_device(device); }
std::optional<at::Device> TensorLoader::device() const { return impl_->device; }
void TensorLoader::change(const LoaderOptions& options) { impl_->change(options); }
const LoaderOptions& TensorLoader::asked() const noexcept { return impl_->asked; }
bool TensorLoader::is_stream() const noexcept { return impl_->stream != nullptr; }
const Dataset* TensorLoader::dataset() const noexcept { return impl_->dataset.get(); }
bool TensorLoader::is_pinned() const noexcept { return *impl_->pins; }
bool TensorLoader::is_copying() const { return impl_->ahead && impl_->ahead->copying; }
std::optional<TensorBatch> TensorLoader::next() { return impl_->next(); }
bool TensorLoader::wait(double seconds) { return impl_->ahead.has_value() || impl_->loader->wait(seconds); }
void TensorLoader::set_epoch(std::int64_t epoch) {
  impl_->set_epoch(epoch);
  impl_->left_off = false;
}
std::int64_t TensorLoader::epoch() const { return impl_->ahead ? impl_->ahead->epoch : impl_->loader->epoch(); }
std::int64_t TensorLoader::size() const { return impl_->loader->size(); }
const Schema& TensorLoader::schema() const noexcept { return impl_->loader->schema(); }
const LoaderOptions& TensorLoader::options() const noexcept { return impl_->loader->options(); }
std::string TensorLoader::state() const { return impl_->ahead ? impl_->ahead->state : impl_->loader->state(); }
void TensorLoader::load_state(const std::string& state) {
  impl_->load_state(state);
  impl_->left_off = false;
}
LoaderStats TensorLoader::stats() const {
  auto stats = impl_->loader->stats();
  stats.copied_bytes = impl_->copied_bytes;
  stats.copy_seconds = impl_->copy_seconds;
  return stats;
}

}  // namespace oxytorch::data
