#include "tune/sources.h"

#include <atomic>
#include <chrono>
#include <ctime>
#include <random>
#include <utility>

#include "oxytorch/error.h"
#include "oxytorch/host.h"

namespace oxytorch::tune {
namespace {

std::atomic<const Sources*> given{nullptr};

/// The given source's answer, else the system's.
template <class Result, class System>
Result read(std::function<Result()> Sources::*source, const System& system) {
  const Sources* const now = given.load(std::memory_order_acquire);
  return now != nullptr && now->*source ? (now->*source)() : system();
}

}  // namespace

double seconds_now() {
  return read(&Sources::seconds, [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  });
}

double thread_seconds_now() {
  return read(&Sources::thread_seconds, [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  });
}

std::int64_t page_faults_now() {
  return read(&Sources::page_faults, [] { return static_cast<std::int64_t>(page_faults()); });
}

std::uint64_t fresh_bits() {
  return read(&Sources::bits, [] {
    std::random_device entropy;
    return std::uint64_t{entropy()} << 32 | entropy();
  });
}

ScopedSources::ScopedSources(Sources sources) : sources_(std::move(sources)) {
  const Sources* none = nullptr;
  OXY_CHECK(given.compare_exchange_strong(none, &sources_), InvalidState, "other sources are in place already.");
}

ScopedSources::~ScopedSources() { given = nullptr; }

}  // namespace oxytorch::tune
