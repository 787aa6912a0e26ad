#include "oxytorch/memory/meter.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "memory/aligned.h"
#include "memory/cpu_allocator.h"
#include "memory/device_bytes.h"
#include "memory/region_clock.h"
#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/system.h"
#include "oxytorch/units.h"

namespace oxytorch::memory {
namespace {

using Clock = std::chrono::steady_clock;

/// Names of regions and phases, by number, for the whole process. Never shrinks: a program has a fixed set of them.
class Names {
 public:
  int number(std::string_view name) {
    const std::lock_guard lock(mutex_);
    if (const auto found = numbers_.find(name); found != numbers_.end()) return found->second;
    const auto& kept = names_.emplace_back(name);
    return numbers_.emplace(kept, static_cast<int>(names_.size()) - 1).first->second;
  }
  std::vector<std::string> all() const {
    const std::lock_guard lock(mutex_);
    return {names_.begin(), names_.end()};
  }

 private:
  mutable std::mutex mutex_;
  std::deque<std::string> names_;
  std::map<std::string_view, int> numbers_;
};

Names& names() {
  static auto* all = new Names;
  return *all;
}

thread_local int region_of_thread = -1;

/// Which region the nodes of a graph were recorded in: of each thread that runs forward, the sequence numbers at which
/// the region changed.
class RegionsOfNodes {
 public:
  void changed(int region) {
    const auto next = at::sequence_number::peek();
    const std::lock_guard lock(mutex_);
    auto& changes = changes_[at::RecordFunction::currentThreadId()];
    if (!changes.empty() && changes.back().first == next) {
      changes.back().second = region;
    } else {
      changes.emplace_back(next, region);
    }
  }

  int region_of(const torch::autograd::Node& node) const {
    const std::lock_guard lock(mutex_);
    const auto thread = changes_.find(node.thread_id());
    if (thread == changes_.end()) return -1;
    const auto& changes = thread->second;
    const auto after = std::upper_bound(changes.begin(), changes.end(), node.sequence_nr(),
                                        [](std::uint64_t nr, const auto& change) { return nr < change.first; });
    return after == changes.begin() ? -1 : std::prev(after)->second;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::vector<std::pair<std::uint64_t, int>>> changes_;
};

/// Blocks as they come and go.
class Recorder final : public BlockObserver {
 public:
  Recorder(c10::Device device, bool sites) : sites_(sites), device_(device) {}

  void taken(const void* block, std::size_t bytes) override {
    // The traceback needs the GIL: before any lock of ours.
    auto traceback = sites_ ? torch::CapturedTraceback::gather(true, false, false) : nullptr;
    int region = region_of_thread;
    const auto node = torch::autograd::get_current_node();
    if (region < 0 && node) region = nodes.region_of(*node);
    add(block, static_cast<std::int64_t>(bytes), region, bool(node), std::move(traceback));
  }
  void released(const void* block, std::size_t bytes) override {
    add(block, -static_cast<std::int64_t>(bytes), region_of_thread, false, nullptr);
  }
  void mark(int region, bool begins, std::vector<std::uint64_t> addresses) {
    const bool in_backward = bool(torch::autograd::get_current_node());
    synchronize(device_);  // the time between marks is that of what was asked for between them
    const std::lock_guard lock(mutex_);
    marks_.push_back(
        {static_cast<std::int64_t>(events_.size()), now(), region, begins, in_backward, std::move(addresses)});
  }

  void add_overhead(int region, std::chrono::nanoseconds time) {
    const std::lock_guard lock(mutex_);
    overhead_ns_[region] += time.count();
  }

  Timeline timeline() const {
    Timeline found;
    found.names = names().all();
    std::vector<std::shared_ptr<torch::CapturedTraceback>> tracebacks;
    {
      const std::lock_guard lock(mutex_);
      found.events = events_;
      found.marks = marks_;
      found.overhead_ns.assign(overhead_ns_.begin(), overhead_ns_.end());
      tracebacks = tracebacks_;
    }
    if (tracebacks.empty()) return found;
    std::vector<torch::CapturedTraceback*> plain;
    for (const auto& each : tracebacks) plain.push_back(each.get());
    const auto symbols = torch::symbolize(plain);
    std::unordered_map<std::string, int> numbers;
    std::vector<int> number_of;
    for (const auto& frames : symbols.tracebacks) {
      std::string text;
      for (const auto index : frames) {
        const auto& frame = symbols.all_frames[index];
        text += (text.empty() ? "" : "\n") + frame.filename + ":" + std::to_string(frame.lineno) + " " + frame.funcname;
      }
      const auto [entry, is_new] = numbers.emplace(text, static_cast<int>(found.sites.size()));
      if (is_new) found.sites.push_back(text);
      number_of.push_back(entry->second);
    }
    for (auto& event : found.events) {
      if (event.site >= 0) event.site = number_of[static_cast<std::size_t>(event.site)];
    }
    return found;
  }

  std::atomic<int> phase{-1};
  RegionsOfNodes nodes;

 private:
  [[nodiscard]] std::int64_t now() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin_).count();
  }
  void add(const void* block, std::int64_t bytes, int region, bool in_backward,
           std::shared_ptr<torch::CapturedTraceback> traceback) {
    const std::lock_guard lock(mutex_);
    live_ += bytes;
    int site = -1;
    if (traceback != nullptr) {
      site = static_cast<int>(tracebacks_.size());
      tracebacks_.push_back(std::move(traceback));
    }
    events_.push_back(
        {now(), reinterpret_cast<std::uint64_t>(block), bytes, live_, phase.load(), region, site, in_backward});
  }

  const bool sites_;
  const c10::Device device_;
  const Clock::time_point begin_ = Clock::now();
  mutable std::mutex mutex_;
  std::int64_t live_ = 0;
  std::vector<BlockEvent> events_;
  std::vector<RegionMark> marks_;
  std::map<int, std::int64_t> overhead_ns_;
  std::vector<std::shared_ptr<torch::CapturedTraceback>> tracebacks_;
};

/// The one that records now, for regions. It outlives every region that saw it.
std::mutex recording_mutex;
std::shared_ptr<Recorder> recording;
std::atomic<bool> is_recording{false};

void enter(int region) {
  region_of_thread = region;
  if (!is_recording.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(recording_mutex);
  if (recording != nullptr) recording->nodes.changed(region);
}

void mark(int region, bool begins, std::vector<std::uint64_t> addresses) {
  const std::lock_guard lock(recording_mutex);
  if (recording != nullptr) recording->mark(region, begins, std::move(addresses));
}

std::vector<std::uint64_t> addresses_of(at::ArrayRef<at::Tensor> tensors) {
  std::vector<std::uint64_t> found;
  if (!is_recording.load(std::memory_order_relaxed)) return found;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage())
      found.push_back(reinterpret_cast<std::uint64_t>(tensor.storage().data()));
  }
  return found;
}

/// A watermark of what is live.
class Watermark {
 public:
  virtual ~Watermark() = default;
  virtual std::int64_t live() const = 0;
  virtual std::int64_t peak() const = 0;
  virtual void reset() = 0;
};

class CpuWatermark final : public Watermark {
 public:
  CpuWatermark() {
    const auto peak = tensor_bytes().begin_peak();
    OXY_CHECK(peak.has_value(), InvalidState, "32 meters and phases run already; stop some of them.");
    peak_ = *peak;
  }
  ~CpuWatermark() override { tensor_bytes().end_peak(peak_); }
  std::int64_t live() const override { return tensor_bytes().live(); }
  std::int64_t peak() const override { return tensor_bytes().peak(peak_); }
  void reset() override { tensor_bytes().reset_peak(peak_); }

 private:
  Counting counting_;
  int peak_ = 0;
};

class DeviceWatermark final : public Watermark {
 public:
  explicit DeviceWatermark(c10::Device device) : peak_(device) {}
  std::int64_t live() const override { return peak_.live(); }
  std::int64_t peak() const override { return peak_.peak(); }
  void reset() override { peak_.reset(); }

 private:
  DevicePeak peak_;
};

std::unique_ptr<Watermark> watermark(c10::Device device) {
  if (device.is_cpu()) return std::make_unique<CpuWatermark>();
  return std::make_unique<DeviceWatermark>(device);
}

using Origin = std::tuple<int, int, int>;

std::vector<PeakPart> parts(const Timeline& timeline, std::size_t events) {
  std::unordered_map<std::uint64_t, const BlockEvent*> live;
  for (std::size_t i = 0; i < events; ++i) {
    const auto& event = timeline.events[i];
    if (event.bytes >= 0) {
      live[event.address] = &event;
    } else {
      live.erase(event.address);
    }
  }
  std::map<Origin, PeakPart> by_origin;
  const auto text = [](const std::vector<std::string>& texts, int index) {
    return index < 0 ? std::string() : texts[static_cast<std::size_t>(index)];
  };
  for (const auto& [address, event] : live) {
    auto& part = by_origin[{event->phase, event->region, event->site}];
    if (part.blocks++ == 0) {
      part.phase = text(timeline.names, event->phase);
      part.region = text(timeline.names, event->region);
      part.site = text(timeline.sites, event->site);
    }
    part.bytes += event->bytes;
  }
  std::vector<PeakPart> found;
  for (auto& [origin, part] : by_origin) found.push_back(std::move(part));
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  return found;
}

std::string signed_size(std::int64_t bytes) {
  if (bytes >= 0) return format_size(static_cast<std::uint64_t>(bytes));
  auto text = format_size(static_cast<std::uint64_t>(-bytes));
  text.insert(text.begin(), '-');
  return text;
}

}  // namespace

Region::Region(std::string_view name, at::ArrayRef<at::Tensor> inputs) : previous_(region_of_thread) {
  enter(names().number(name));
  if (is_recording.load(std::memory_order_relaxed)) mark(region_of_thread, true, addresses_of(inputs));
}

Region::~Region() {
  if (is_recording.load(std::memory_order_relaxed)) mark(region_of_thread, false, std::move(outputs_));
  enter(previous_);
}

void Region::outputs(at::ArrayRef<at::Tensor> tensors) { outputs_ = addresses_of(tensors); }

RegionClock::RegionClock(int region) : region_(is_recording.load(std::memory_order_relaxed) ? region : -1) {
  if (region_ >= 0) began_ = std::chrono::steady_clock::now();
}

RegionClock::~RegionClock() {
  if (region_ < 0) return;
  const auto time = std::chrono::steady_clock::now() - began_;
  const std::lock_guard lock(recording_mutex);
  if (recording != nullptr) recording->add_overhead(region_, time);
}

int RegionClock::region() { return region_of_thread; }

struct Meter::Inside {
  explicit Inside(const MeterOptions& options) : device(options.device), has_timeline(options.timeline) {
    OXY_CHECK(!options.sites || options.timeline, InvalidArgument, "sites are part of a timeline; set timeline too.");
    mark = watermark(device);
    if (options.timeline) {
      recorder = std::make_shared<Recorder>(device, options.sites);
      const std::lock_guard lock(recording_mutex);
      const bool is_free = recording == nullptr && (!device.is_cpu() || tensor_bytes().observe(recorder.get()));
      OXY_CHECK(is_free, InvalidState, "another meter records a timeline; stop it first.");
      if (!device.is_cpu()) blocks = std::make_unique<DeviceBlocks>(device, *recorder);
      recording = recorder;
      is_recording = true;
      recorder->nodes.changed(region_of_thread);
    }
    begin = mark->live();
    begin_taken = static_cast<std::int64_t>(tensor_bytes().taken());
    mark->reset();
  }
  ~Inside() { stop(); }

  void stop() {
    if (mark == nullptr) return;
    last_live = live();
    last_peak = peak();
    last_taken = taken();
    if (recorder != nullptr) {
      // Waits for threads that are inside, which may wait for the GIL: bindings release it.
      if (device.is_cpu()) tensor_bytes().unobserve();
      blocks = nullptr;
      const std::lock_guard lock(recording_mutex);
      recording = nullptr;
      is_recording = false;
    }
    mark = nullptr;
  }

  std::int64_t live() const { return mark == nullptr ? last_live : mark->live() - begin; }
  std::int64_t peak() const { return mark == nullptr ? last_peak : mark->peak() - begin; }
  std::int64_t taken() const {
    return mark == nullptr ? last_taken : static_cast<std::int64_t>(tensor_bytes().taken()) - begin_taken;
  }
  Timeline timeline() const {
    OXY_CHECK(recorder != nullptr, InvalidState, "this meter records no timeline; make it with timeline set.");
    return recorder->timeline();
  }

  c10::Device device;
  bool has_timeline;
  std::unique_ptr<Watermark> mark;  // none once stopped
  std::shared_ptr<Recorder> recorder;
  std::unique_ptr<DeviceBlocks> blocks;  // of a device whose blocks are recorded
  std::int64_t begin = 0, begin_taken = 0;
  std::int64_t last_live = 0, last_peak = 0, last_taken = 0;
  std::vector<PhaseUse> phases;
};

Meter::Meter(const MeterOptions& options) : inside_(std::make_shared<Inside>(options)) {}
Meter::~Meter() { stop(); }
void Meter::stop() { inside_->stop(); }
std::int64_t Meter::live_bytes() const { return inside_->live(); }
std::int64_t Meter::peak_bytes() const { return inside_->peak(); }
std::int64_t Meter::allocations() const { return inside_->taken(); }
std::vector<PhaseUse> Meter::phases() const { return inside_->phases; }
Timeline Meter::timeline() const { return inside_->timeline(); }

void Meter::reset_peak() {
  OXY_CHECK(inside_->mark != nullptr, InvalidState, "this meter is stopped; make a new one.");
  inside_->mark->reset();
}

std::vector<PeakPart> Meter::peak_parts() const {
  const auto timeline = inside_->timeline();
  const auto highest = std::max_element(timeline.events.begin(), timeline.events.end(),
                                        [](const auto& a, const auto& b) { return a.live_bytes < b.live_bytes; });
  if (highest == timeline.events.end() || highest->live_bytes <= 0) return {};
  return parts(timeline, static_cast<std::size_t>(highest - timeline.events.begin()) + 1);
}

std::vector<LivePart> Meter::live_parts() const {
  const auto timeline = inside_->timeline();
  return parts(timeline, timeline.events.size());
}

std::string Meter::table(std::size_t most_parts) const {
  auto text = "Peak " + signed_size(peak_bytes()) + ", live " + signed_size(live_bytes()) + ", of " +
              inside_->device.str() + " tensors made since the meter began.\n";
  if (!inside_->phases.empty()) {
    std::vector<std::vector<std::string>> rows{{"phase", "begins with", "peak", "ends with"}};
    for (const auto& phase : inside_->phases) {
      rows.push_back(
          {phase.name, signed_size(phase.begin_bytes), signed_size(phase.peak_bytes), signed_size(phase.end_bytes)});
    }
    text += '\n' + aligned(std::move(rows), 1);
  }
  if (!inside_->has_timeline) return text;
  const auto found = peak_parts();
  std::vector<std::vector<std::string>> rows{{"made in", "region", "call", "blocks", "at the peak"}};
  std::int64_t rest = 0, rest_blocks = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto& part = found[i];
    if (i >= most_parts) {
      rest += part.bytes;
      rest_blocks += part.blocks;
      continue;
    }
    rows.push_back({part.phase.empty() ? "-" : part.phase, part.region.empty() ? "-" : part.region,
                    part.site.empty() ? "-" : part.site.substr(0, part.site.find('\n')), std::to_string(part.blocks),
                    signed_size(part.bytes)});
  }
  if (rest_blocks > 0) rows.push_back({"others", "", "", std::to_string(rest_blocks), signed_size(rest)});
  return found.empty() ? text : text + '\n' + aligned(std::move(rows), 3);
}

namespace {

/// What each step left, of a meter whose phases "0", "1" and so on were one step each.
std::vector<LivePart> left_by_each(const std::vector<LivePart>& parts, int steps) {
  struct Left {
    LivePart sum;
    int steps = 0;
  };
  std::map<std::pair<std::string, std::string>, Left> by_origin;
  const auto last = std::to_string(steps - 1);  // whose leftovers the next step may have replaced
  for (const auto& part : parts) {
    if (part.phase.empty() || part.phase == last) continue;
    auto& left = by_origin[{part.region, part.site}];
    left.sum.bytes += part.bytes;
    left.sum.blocks += part.blocks;
    ++left.steps;
  }
  std::vector<LivePart> found;
  for (auto& [origin, left] : by_origin) {
    if (left.steps < steps - 1) continue;  // once, as a cache does
    left.sum.region = origin.first;
    left.sum.site = origin.second;
    left.sum.bytes /= left.steps;
    left.sum.blocks /= left.steps;
    found.push_back(std::move(left.sum));
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  return found;
}

}  // namespace

struct Phase::Inside {
  std::shared_ptr<Meter::Inside> meter;
  std::unique_ptr<Watermark> mark;
  std::string name;
  std::int64_t begin = 0;
  int previous = -1;
  Clock::time_point since = Clock::now();
};

Phase::Phase(Meter& meter, std::string name) : inside_(std::make_unique<Inside>()) {
  auto& of = *meter.inside_;
  OXY_CHECK(of.mark != nullptr, InvalidState, "the meter is stopped; make a new one for phase '", name, "'.");
  inside_->meter = meter.inside_;
  inside_->mark = watermark(of.device);
  inside_->begin = inside_->mark->live();
  if (of.recorder != nullptr) inside_->previous = of.recorder->phase.exchange(names().number(name));
  inside_->name = std::move(name);
}

Phase::~Phase() {
  auto& of = *inside_->meter;
  if (of.recorder != nullptr) of.recorder->phase = inside_->previous;
  of.phases.push_back({inside_->name, inside_->begin - of.begin, inside_->mark->peak() - of.begin,
                       inside_->mark->live() - of.begin,
                       std::chrono::duration<double>(Clock::now() - inside_->since).count()});
}

std::vector<LivePart> leaks(const std::function<void()>& step, int steps, bool sites, c10::Device device) {
  constexpr int kWarmUp = 2;  // which make optimizer state and caches
  OXY_CHECK(steps >= 3, InvalidArgument, "steps is ", steps, ", expected at least 3: fewer do not tell what grows.");
  for (int i = 0; i < kWarmUp; ++i) step();
  Meter meter({.device = device, .timeline = true, .sites = sites});
  for (int i = 0; i < steps; ++i) {
    const Phase phase(meter, std::to_string(i));
    step();
  }
  return left_by_each(meter.live_parts(), steps);
}

bool can_count(c10::Device device) {
  return device.is_cpu() ? allocator_refusal().empty() : statistics_of(device) != nullptr;
}

std::string timeline_refusal(c10::Device device) {
  return device.is_cpu() ? allocator_refusal() : DeviceBlocks::refusal(device);
}

std::uint64_t resident_bytes() { return read_memory().resident.value_or(0); }

HostSetting set_limit(std::uint64_t bytes) {
  constexpr const char* kName = "memory_limit";
  if (const auto refusal = allocator_refusal(); !refusal.empty()) return HostSetting::refused(kName, refusal);
  give_back_host_memory();
  const auto resident = read_memory().resident;
  if (!resident) return HostSetting::refused(kName, "the kernel does not tell what this process has in memory.");
  OXY_CHECK(bytes >= *resident, InvalidArgument, "a memory limit of ", format_size(bytes),
            " is below what this process has in memory already, ", format_size(*resident), ". Set a higher one.");
  auto counting = std::make_shared<Counting>();
  add_limit(bytes);
  return HostSetting::applied(
      kName, "a CPU tensor that would take this process past " + format_size(bytes) + " raises an out-of-memory error.",
      "each tensor's memory is counted: 100 to 200 ns.", [counting, bytes]() mutable {
        lift_limit(bytes);
        counting.reset();
      });
}

std::optional<std::uint64_t> limit() { return process_limit(); }

LimitPaused::LimitPaused() { pause_limits(); }
LimitPaused::~LimitPaused() { resume_limits(); }

CountingPaused::CountingPaused() { pause_counting(); }
CountingPaused::~CountingPaused() { resume_counting(); }

std::int64_t available_bytes(c10::Device device) {
  constexpr double kShare = 0.9;  // the rest is for what the meter does not see
  std::uint64_t left = 0;
  if (device.is_cpu()) {
    give_back_host_memory();
    const auto memory = read_memory();
    OXY_CHECK(memory.available && memory.resident, NotSupported,
              "the kernel does not tell how much memory is left. Give a budget in bytes, such as '900MiB'.");
    left = *memory.available;
    if (const auto most = process_limit())
      left = std::min(left, *most > *memory.resident ? *most - *memory.resident : 0);
  } else {
    left = memory_of(device).available;
  }
  return static_cast<std::int64_t>(kShare * static_cast<double>(left));
}

std::int64_t budget_bytes(std::string_view text, c10::Device device) {
  const auto size = Size::parse(text);
  std::uint64_t total = 0;  // a size in bytes is none of it
  if (size.kind() != Size::Kind::Bytes) {
    total = device.is_cpu() ? read_memory().limit.value_or(0) : memory_of(device).total;
  }
  return static_cast<std::int64_t>(size.resolve(total));
}

std::int64_t available_bytes(std::uint64_t limit, c10::Device device) {
  const auto available = available_bytes(device);
  const auto taken = device.is_cpu() ? resident_bytes() : memory_of(device).taken;
  return std::min(available, static_cast<std::int64_t>(limit > taken ? limit - taken : 0));
}

}  // namespace oxytorch::memory
