#include "oxytorch/memory/manager.h"

#include <algorithm>
#include <array>
#include <utility>

#include "memory/cpu_allocator.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"
#include "oxytorch/memory.h"
#include "oxytorch/system.h"
#include "oxytorch/units.h"

namespace oxytorch {
namespace {

constexpr std::size_t kEvents = 100;
constexpr double kRearm = 0.95;  // of a level's share, below which it can be reached anew

std::string percent(double share) { return std::to_string(static_cast<int>(100 * share + 0.5)) + " %"; }

void check(const MemoryConfig& config) {
  const auto share = [](const char* name, double value) {
    OXY_CHECK(value > 0, InvalidArgument, name, " is ", value, ", expected a share above 0, such as 0.8.");
  };
  share("warn_at", config.warn_at());
  share("critical_at", config.critical_at());
  share("clean_at", config.clean_at());
  OXY_CHECK(config.warn_at() <= config.critical_at(), InvalidArgument, "warn_at is ", config.warn_at(),
            ", above critical_at, which is ", config.critical_at(), ". A warning comes first.");
  OXY_CHECK(config.clean_every() >= 0, InvalidArgument, "clean_every is ", config.clean_every(),
            ", expected steps, or 0 for no clean-up by their number.");
  OXY_CHECK(config.check_every() >= 1, InvalidArgument, "check_every is ", config.check_every(),
            ", expected at least 1 step.");
}

}  // namespace

double MemoryUse::share() const noexcept {
  return allowed == 0 ? 0 : static_cast<double>(resident) / static_cast<double>(allowed);
}

std::string MemoryUse::text() const {
  return format_size(resident) + " resident of " + format_size(allowed) + " (" + percent(share()) + "), " +
         format_size(peak) + " at the peak, " + format_size(kept) + " of it free and kept";
}

struct MemoryManager::Inside {
  struct Armed {
    MemoryLevel level;
    Callback callback;
    bool fired = false;
  };

  explicit Inside(const MemoryConfig& given) : config(given) {
    oxytorch::check(config);
    if (!config.cache_limit().empty())
      cache_limit = static_cast<std::uint64_t>(memory::budget_bytes(config.cache_limit()));
    if (config.limit().empty()) return;
    limit = memory::set_limit(static_cast<std::uint64_t>(memory::budget_bytes(config.limit())));
    OXY_CHECK(limit->is_in_effect(), NotSupported, "limit = ", config.limit(), ": ", limit->reason());
  }
  ~Inside() { revert(); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  void revert() {
    if (limit) limit->revert();
  }
  [[nodiscard]] double share_of(MemoryLevel wanted) const {
    return wanted == MemoryLevel::Critical  ? config.critical_at()
           : wanted == MemoryLevel::Warning ? config.warn_at()
                                            : 0;
  }
  void note(const std::string& text) {
    if (events.size() == kEvents) events.erase(events.begin());
    events.push_back("step " + std::to_string(steps) + ": " + text);
  }
  std::uint64_t clean(const std::string& why) {
    const auto before = memory::resident_bytes();
    for (const auto& release : releases) release();
    give_back_host_memory();
    const auto after = memory::resident_bytes();
    const auto less = before > after ? before - after : 0;
    bytes_cleaned += less;
    ++clean_ups;
    cleaned_at = steps;
    note(why + ": " + format_size(less) + " given back.");
    return less;
  }

  MemoryConfig config;
  std::optional<HostSetting> limit;
  std::optional<std::uint64_t> cache_limit;
  std::vector<Armed> callbacks;
  std::vector<std::function<void()>> releases;
  MemoryLevel level = MemoryLevel::Normal;
  std::int64_t steps = 0, clean_ups = 0, cleaned_at = 0;
  std::uint64_t bytes_cleaned = 0;
  std::vector<std::string> events;
};

MemoryManager::MemoryManager(const MemoryConfig& config) : inside_(std::make_unique<Inside>(config)) {}
MemoryManager::~MemoryManager() = default;
MemoryManager::MemoryManager(MemoryManager&&) noexcept = default;
MemoryManager& MemoryManager::operator=(MemoryManager&&) noexcept = default;

MemoryUse MemoryManager::use() const {
  const auto memory = read_memory();
  MemoryUse found;
  found.resident = memory.resident.value_or(0);
  found.peak = memory.peak_resident.value_or(found.resident);
  found.available = memory.available.value_or(0);
  found.allowed = found.resident + found.available;
  if (const auto limit = memory::limit()) found.allowed = std::min(found.allowed, *limit);
  found.kept = std::min(found.resident, host_pool_stats().retained_bytes + allocator_retained_bytes().value_or(0));
  found.tensors = memory::tensor_bytes().live();
  return found;
}

void MemoryManager::on(MemoryLevel level, Callback callback) {
  OXY_CHECK(callback, InvalidArgument, "there is no callback to call at this level.");
  inside_->callbacks.push_back({level, std::move(callback)});
}

void MemoryManager::on_clean(std::function<void()> release) {
  OXY_CHECK(release, InvalidArgument, "there is no function to call in a clean-up.");
  inside_->releases.push_back(std::move(release));
}

std::uint64_t MemoryManager::clean() { return inside_->clean("clean-up"); }

void MemoryManager::revert() { inside_->revert(); }

void MemoryManager::step() {
  auto& self = *inside_;
  ++self.steps;
  const auto every = self.config.clean_every();
  if (every > 0 && self.steps - self.cleaned_at >= every) {
    self.clean("clean-up after " + std::to_string(every) + " steps");
  }
  if (self.steps % self.config.check_every() == 0) check();
}

MemoryLevel MemoryManager::check() {
  auto& self = *inside_;
  auto now = use();
  if (self.cache_limit && now.kept > *self.cache_limit) {
    self.clean(format_size(now.kept) + " are kept free, above cache_limit");
    now = use();
  }
  if (now.share() >= self.config.clean_at()) {
    self.clean(percent(now.share()) + " in use, above clean_at");
    now = use();
  }
  const auto share = now.share();
  const auto before = self.level;
  self.level = share >= self.config.critical_at() ? MemoryLevel::Critical
               : share >= self.config.warn_at()   ? MemoryLevel::Warning
                                                  : MemoryLevel::Normal;
  if (self.level > before) {
    self.note(now.text() + '.');
    log(LogLevel::Warn, "memory: " + now.text(), "memory");
  }
  for (std::size_t i = 0; i < self.callbacks.size(); ++i) {  // one may add another
    const auto wanted = self.share_of(self.callbacks[i].level);
    if (share < kRearm * wanted) self.callbacks[i].fired = false;
    if (share < wanted || std::exchange(self.callbacks[i].fired, true)) continue;
    const auto callback = self.callbacks[i].callback;
    callback(now);
  }
  return self.level;
}

MemoryLevel MemoryManager::level() const noexcept { return inside_->level; }
std::int64_t MemoryManager::steps() const noexcept { return inside_->steps; }
std::int64_t MemoryManager::clean_ups() const noexcept { return inside_->clean_ups; }
std::uint64_t MemoryManager::bytes_cleaned() const noexcept { return inside_->bytes_cleaned; }
const std::vector<std::string>& MemoryManager::events() const noexcept { return inside_->events; }

std::string MemoryManager::report() const {
  const auto& self = *inside_;
  std::string text = use().text() + ".\n" + std::to_string(self.steps) + " steps, " + std::to_string(self.clean_ups) +
                     " clean-ups, " + format_size(self.bytes_cleaned) + " given back.\n";
  for (const auto& event : self.events) text += event + '\n';
  return text;
}

}  // namespace oxytorch
