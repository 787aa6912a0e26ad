// The backend `hpu`: Gaudi cards. Two halves that know nothing of each other meet here: the management library of the
// cards (hlml.h), and the torch device `hpu` of this process (torch_device.cpp), a library of its own that is opened
// only where torch is loaded already. So this library loads anywhere.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "backends/hpu/sampler.h"
#include "backends/last_error.h"
#include "oxytorch/backend.h"

namespace oxytorch::backend::hpu {
namespace {

namespace fs = std::filesystem;

constexpr std::int32_t kScore = 80;
constexpr const char* kTorchLibrary = "liboxytorch-hpu-torch.so";

// Texts of a table live as long as the process.
const char* keep(std::string text) {
  static auto* const mutex = new std::mutex();
  static auto* const kept = new std::set<std::string>();
  const std::lock_guard lock(*mutex);
  return kept->insert(std::move(text)).first->c_str();
}

// Nothing may be thrown across the border (C6).
template <class Call>
oxy_status guarded(Call call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return fail(OXY_OUT_OF_MEMORY, "no host memory left for the hpu backend");
  } catch (const std::exception& error) {
    return fail(OXY_INTERNAL, "the hpu backend failed: %s", error.what());
  }
}

// ---- the torch half

struct TorchHalf {
  const oxy_backend* table = nullptr;
  std::string why;  // there is none
};

TorchHalf open_torch_half() {
  void* torch = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch == nullptr) return {nullptr, "torch is not loaded in this process"};
  dlclose(torch);
  Dl_info here{};
  dladdr(reinterpret_cast<void*>(&open_torch_half), &here);
  const fs::path path = fs::path(here.dli_fname == nullptr ? "" : here.dli_fname).parent_path() / kTorchLibrary;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* const reason = dlerror();
    return {nullptr, std::string("the torch half of this backend cannot be opened: ") +
                         (reason == nullptr ? "the loader gives no reason" : reason)};
  }
  const auto entry = reinterpret_cast<oxy_backend_entry_fn>(dlsym(library, OXY_BACKEND_ENTRY));
  if (entry == nullptr) return {nullptr, path.string() + " exports no " OXY_BACKEND_ENTRY};
  return {entry(OXY_BACKEND_API_VERSION), {}};
}

// Asked again while it is not there: torch may come later.
TorchHalf torch_half() {
  static auto* const mutex = new std::mutex();
  static auto* const found = new TorchHalf();
  const std::lock_guard lock(*mutex);
  if (found->table == nullptr) *found = open_torch_half();
  return *found;
}

// ---- which card is this process's

int number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return -1;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return *end == '\0' && value >= 0 && value < 1 << 16 ? static_cast<int>(value) : -1;
}

// The bridge keeps the device file of its card open.
int open_minor() {
  constexpr std::string_view kDevice = "/dev/accel/accel";
  std::error_code failed;
  for (fs::directory_iterator entry("/proc/self/fd", failed), end; !failed && entry != end; entry.increment(failed)) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry->path(), gone).string();
    if (gone || !target.starts_with(kDevice)) continue;
    char* after = nullptr;
    const long minor = std::strtol(target.c_str() + kDevice.size(), &after, 10);
    if (*after == '\0' && after != target.c_str() + kDevice.size()) return static_cast<int>(minor);
  }
  return -1;
}

// One card a process. Null where it cannot be told which.
const Card* own_card(const Snapshot& snapshot) {
  const auto with = [&snapshot](int Card::*field, int value) -> const Card* {
    const auto found = std::find_if(snapshot.cards.begin(), snapshot.cards.end(),
                                    [&](const Card& card) { return value >= 0 && card.*field == value; });
    return found == snapshot.cards.end() ? nullptr : &*found;
  };
  for (const char* variable : {"HLS_MODULE_ID", "HABANA_VISIBLE_MODULES"}) {
    if (const Card* card = with(&Card::module, number_in(variable)); card != nullptr) return card;
  }
  if (const Card* card = with(&Card::minor, open_minor()); card != nullptr) return card;
  return snapshot.cards.size() == 1 ? &snapshot.cards.front() : nullptr;
}

std::string cards_sentence(const Snapshot& snapshot) {
  if (!snapshot.problem.empty()) return snapshot.problem;
  const std::size_t count = snapshot.cards.size();
  return "libhlml.so sees " + std::to_string(count) + (count == 1 ? " card" : " cards");
}

std::atomic<bool> lost{false};

// Once lost, lost for the rest of the process.
bool own_card_lost(const Snapshot& snapshot) {
  const Card* const card = lost ? nullptr : own_card(snapshot);
  if (card != nullptr && card->lost) lost = true;
  return lost;
}

// ---- the table

struct Readiness {
  const oxy_backend* torch = nullptr;  // null: unusable
  std::string reason;
};

Readiness readiness() {
  if (forked()) return {nullptr, "this process was forked from one that used the hpu backend"};
  const TorchHalf half = torch_half();
  const std::shared_ptr<const Snapshot> facts = Sampler::instance().facts();
  if (half.table == nullptr) return {nullptr, half.why + "; " + cards_sentence(*facts)};
  const char* reason = nullptr;
  if (half.table->score(&reason, nullptr) == 0) {
    return {nullptr, std::string(reason) + "; " + cards_sentence(*facts)};
  }
  if (own_card_lost(*facts)) return {nullptr, "the Gaudi card of this process is lost"};
  return {half.table, std::string(reason) + "; " + cards_sentence(*facts)};
}

// The torch half once it has its device; it never goes again.
const oxy_backend* usable_torch() {
  static std::atomic<const oxy_backend*> known{nullptr};
  const oxy_backend* torch = known.load(std::memory_order_acquire);
  if (torch != nullptr) return torch;
  torch = torch_half().table;
  const char* reason = nullptr;
  if (torch == nullptr || torch->score(&reason, nullptr) == 0) return nullptr;
  known.store(torch, std::memory_order_release);
  return torch;
}

// What every call but score asks first (F2, F4).
oxy_status ready(std::int32_t index, const oxy_backend*& torch, bool lost_too = false) {
  torch = forked() ? nullptr : usable_torch();
  if (torch == nullptr) return fail(OXY_INVALID_STATE, "%s", readiness().reason.c_str());
  if (index != 0) {
    return fail(OXY_INVALID_ARGUMENT, "there is no hpu device %d; a process has one HPU, number 0", index);
  }
  return lost && !lost_too ? fail(OXY_DEVICE_LOST, "the Gaudi card of this process is lost") : OXY_OK;
}

// Torch does not say why work failed; the card may.
oxy_status relay(const oxy_backend& torch, oxy_status status) {
  if (status == OXY_OK || status == OXY_NOT_READY) return status;
  if (status == OXY_DEVICE_ERROR && own_card_lost(*Sampler::instance().sample())) status = OXY_DEVICE_LOST;
  return fail(status, "%s", torch.last_error());
}

std::int32_t score(const char** reason, std::int32_t* devices) {
  const char* text = "the hpu backend failed while it looked for cards";
  bool usable = false;
  guarded([&]() -> oxy_status {
    const Readiness now = readiness();
    text = keep(now.reason);
    usable = now.torch != nullptr;
    return OXY_OK;
  });
  if (reason != nullptr) *reason = text;
  if (devices != nullptr) *devices = usable ? 1 : 0;
  return usable ? kScore : 0;
}

double value_of(const Card* card, const char* meter) {
  if (card == nullptr) return std::nan("");
  for (std::size_t i = 0; i < card->values.size(); ++i) {
    if (std::strcmp(meters()[i].name, meter) == 0) return card->values[i];
  }
  return std::nan("");
}

oxy_status device_properties(std::int32_t index, oxy_device_properties* properties) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    if (const oxy_status status = ready(index, torch); status != OXY_OK) return status;
    if (const oxy_status status = torch->device_properties(index, properties); status != OXY_OK) {
      return relay(*torch, status);
    }
    const std::shared_ptr<const Snapshot> facts = Sampler::instance().facts();
    const Card* const card = own_card(*facts);
    if (card != nullptr && !card->name.empty()) properties->name = keep(card->name);
    if (properties->memory_bytes == 0 && facts->problem.empty()) {
      const std::shared_ptr<const Snapshot> sample = Sampler::instance().sample();
      const double total = value_of(own_card(*sample), "memory_total");
      if (!std::isnan(total)) properties->memory_bytes = static_cast<std::uint64_t>(total);
    }
    return OXY_OK;
  });
}

// The allocator's word where it gives one, else the card's.
oxy_status memory_info(std::int32_t index, oxy_memory_info* info) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    if (const oxy_status status = ready(index, torch); status != OXY_OK) return status;
    const oxy_status status = torch->memory_info(index, info);
    if (status != OXY_OK || info->total_bytes != 0) return relay(*torch, status);
    const std::shared_ptr<const Snapshot> sample = Sampler::instance().sample();
    const Card* const card = own_card(*sample);
    const double total = value_of(card, "memory_total"), free = value_of(card, "memory_free");
    if (std::isnan(total) || std::isnan(free)) {
      return fail(OXY_NOT_SUPPORTED,
                  "nothing here tells the HPU's memory: torch's allocator does not, and %s; ask torch.hpu.memory_stats",
                  !sample->problem.empty() ? sample->problem.c_str()
                  : card == nullptr        ? "which card is this process's cannot be told (set HLS_MODULE_ID)"
                                           : "libhlml.so does not either");
    }
    info->total_bytes = static_cast<std::uint64_t>(total);
    info->free_bytes = static_cast<std::uint64_t>(std::min(free, total));
    return OXY_OK;
  });
}

// Those of the torch half, then the meters that this libhlml.so has. What is not known now is NaN.
oxy_status counters(std::int32_t index, oxy_counter* table, std::uint32_t capacity, std::uint32_t* count) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    if (const oxy_status status = ready(index, torch); status != OXY_OK) return status;
    if (const oxy_status status = torch->counters(index, table, capacity, count); status != OXY_OK) {
      return relay(*torch, status);
    }
    const std::shared_ptr<const Snapshot> sample = Sampler::instance().sample();
    const Card* const card = own_card(*sample);
    for (std::size_t i = 0; i < sample->present.size(); ++i) {
      if (!sample->present[i]) continue;
      if (*count < capacity) table[*count] = {meters()[i].name, meters()[i].unit, value_of(card, meters()[i].name)};
      ++*count;
    }
    return OXY_OK;
  });
}

oxy_status alloc(std::int32_t index, oxy_memory kind, std::uint64_t bytes, void** memory) {
  return guarded([&]() -> oxy_status {
    if (memory == nullptr) return fail(OXY_INVALID_ARGUMENT, "alloc needs somewhere to write the pointer, got NULL");
    *memory = nullptr;
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(index, torch);
    return status != OXY_OK ? status : relay(*torch, torch->alloc(index, kind, bytes, memory));
  });
}

oxy_status free_memory(std::int32_t index, void* memory) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(index, torch, true);
    return status != OXY_OK ? status : relay(*torch, torch->free(index, memory));
  });
}

oxy_status copy_async(std::int32_t index, oxy_queue queue, void* to, const void* from, std::uint64_t bytes,
                      oxy_copy kind) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(index, torch);
    return status != OXY_OK ? status : relay(*torch, torch->copy_async(index, queue, to, from, bytes, kind));
  });
}

oxy_status fill_async(std::int32_t index, oxy_queue queue, void* to, std::uint8_t value, std::uint64_t bytes) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(index, torch);
    return status != OXY_OK ? status : relay(*torch, torch->fill_async(index, queue, to, value, bytes));
  });
}

oxy_status queue_create(std::int32_t index, const oxy_queue_options* options, oxy_queue* queue) {
  return guarded([&]() -> oxy_status {
    if (queue == nullptr)
      return fail(OXY_INVALID_ARGUMENT, "queue_create needs somewhere to write the queue, got NULL");
    *queue = nullptr;
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(index, torch);
    return status != OXY_OK ? status : relay(*torch, torch->queue_create(index, options, queue));
  });
}

oxy_status queue_destroy(oxy_queue queue) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(0, torch, true);
    return status != OXY_OK ? status : relay(*torch, torch->queue_destroy(queue));
  });
}

oxy_status event_record(oxy_queue queue, oxy_event* event) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(0, torch);
    return status != OXY_OK ? status : relay(*torch, torch->event_record(queue, event));
  });
}

oxy_status event_wait(oxy_queue queue, oxy_event event, std::uint64_t timeout_ns, std::uint64_t* time_ns) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(0, torch);
    return status != OXY_OK ? status : relay(*torch, torch->event_wait(queue, event, timeout_ns, time_ns));
  });
}

oxy_status event_destroy(oxy_event event) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(0, torch, true);
    return status != OXY_OK ? status : relay(*torch, torch->event_destroy(event));
  });
}

oxy_status synchronize(std::int32_t index, oxy_queue queue) {
  return guarded([&]() -> oxy_status {
    const oxy_backend* torch = nullptr;
    const oxy_status status = ready(index, torch);
    return status != OXY_OK ? status : relay(*torch, torch->synchronize(index, queue));
  });
}

const char* last_error() { return last_error_text; }

constexpr oxy_backend kTable{
    .size = sizeof(oxy_backend),
    .api_version = OXY_BACKEND_API_VERSION,
    .name = "hpu",
    .description =
        "An Intel Gaudi card, through torch's device `hpu` and libhlml.so; never run on a card by its makers.",
    .kernels = nullptr,
    .score = score,
    .device_properties = device_properties,
    .memory_info = memory_info,
    .counters = counters,
    .alloc = alloc,
    .free = free_memory,
    .copy_async = copy_async,
    .fill_async = fill_async,
    .queue_create = queue_create,
    .queue_destroy = queue_destroy,
    .event_record = event_record,
    .event_wait = event_wait,
    .event_destroy = event_destroy,
    .synchronize = synchronize,
    .last_error = last_error,
};

// ---- every card, for people and for Python

// A text as JSON writes it.
struct Quoted {
  std::string_view text;
  friend std::ostream& operator<<(std::ostream& out, const Quoted& quoted) {
    constexpr const char* kHex = "0123456789abcdef";
    out << '"';
    for (const char c : quoted.text) {
      const auto code = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\' || code < 0x20) {
        out << "\\u00" << kHex[code / 16] << kHex[code % 16];
      } else {
        out << c;
      }
    }
    return out << '"';
  }
};

void write(std::ostream& out, const Card& card) {
  out << "{\"name\":" << Quoted{card.name} << ",\"uuid\":" << Quoted{card.uuid} << ",\"serial\":" << Quoted{card.serial}
      << ",\"minor\":" << card.minor << ",\"module\":" << card.module << ",\"lost\":" << (card.lost ? "true" : "false")
      << ",\"values\":{";
  const char* comma = "";
  for (std::size_t i = 0; i < card.values.size(); ++i) {
    if (std::isnan(card.values[i])) continue;
    out << std::exchange(comma, ",") << Quoted{meters()[i].name} << ':' << card.values[i];
  }
  out << "},\"unknown\":{";
  comma = "";
  for (const auto& [meter, why] : card.unknown) out << std::exchange(comma, ",") << Quoted{meter} << ':' << Quoted{why};
  out << "}}";
}

std::string report() {
  const std::shared_ptr<const Snapshot> sample = Sampler::instance().sample();
  const Card* const own = own_card(*sample);
  std::ostringstream out;
  out.precision(17);
  out << "{\"library\":" << Quoted{sample->library} << ",\"hlml\":" << Quoted{sample->hlml}
      << ",\"driver\":" << Quoted{sample->driver} << ",\"problem\":" << Quoted{sample->problem}
      << ",\"own\":" << (own == nullptr ? -1 : own - sample->cards.data()) << ",\"units\":{";
  const char* comma = "";
  for (const Meter& meter : meters())
    out << std::exchange(comma, ",") << Quoted{meter.name} << ':' << Quoted{meter.unit};
  out << "},\"cards\":[";
  comma = "";
  for (const Card& card : sample->cards) {
    out << std::exchange(comma, ",");
    write(out, card);
  }
  out << "]}";
  return out.str();
}

}  // namespace
}  // namespace oxytorch::backend::hpu

OXY_BACKEND_EXPORT const oxy_backend* oxy_backend_entry(uint32_t) { return &oxytorch::backend::hpu::kTable; }

// Writes what `libhlml.so` tells of every card as JSON, up to `capacity` bytes with the final zero; gives the bytes
// that the whole text needs, 0 where it cannot be made.
OXY_BACKEND_EXPORT uint64_t oxy_hpu_report(char* text, uint64_t capacity) {
  try {
    const std::string all = oxytorch::backend::hpu::report();
    if (text != nullptr && capacity > 0) std::snprintf(text, capacity, "%s", all.c_str());
    return all.size() + 1;
  } catch (const std::exception&) {
    return 0;
  }
}
