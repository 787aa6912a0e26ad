#include "oxytorch/tune/host.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/system.h"

namespace oxytorch {
namespace {

/// True where this thread takes denormals as zero: half the smallest normal number is then nothing.
bool this_thread_flushes() {
  volatile float tiny = 1.17549435e-38F;
  volatile float half = 0.5F;
  volatile float result = tiny * half;
  return result == 0.0F;
}

/// Runs `function(thread)` once on each intra-op thread, the caller being thread 0.
template <class Function>
void on_each_thread(const Function& function) {
  const int threads = at::get_num_threads();
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) function(static_cast<size_t>(i));
  });
}

}  // namespace

FlushState flush_state() {
  std::atomic<int> flushing{0};
  on_each_thread([&](size_t) { flushing += this_thread_flushes() ? 1 : 0; });
  return {flushing.load(), at::get_num_threads()};
}

HostSetting flush_denormals() {
  constexpr const char* kName = "flush_denormals";
  if (at::in_parallel_region()) {
    return HostSetting::refused(kName,
                                "called inside a parallel region, from where the other threads are out of reach.");
  }
  const auto before = flush_state();
  if (before.flushing == before.threads) {
    return HostSetting::refused(kName, "all " + std::to_string(before.threads) + " threads flush denormals already.");
  }
  auto previous = std::make_shared<std::vector<char>>(static_cast<size_t>(before.threads));
  on_each_thread([&](size_t thread) {
    (*previous)[thread] = this_thread_flushes() ? 1 : 0;
    at::globalContext().setFlushDenormal(true);
  });
  const auto after = flush_state();
  if (after.flushing != after.threads) {
    return HostSetting::refused(kName, "this processor cannot flush denormals: " + std::to_string(after.flushing) +
                                           " of " + std::to_string(after.threads) + " threads do.");
  }
  return HostSetting::applied(
      kName, "denormal numbers are taken as zero on all " + std::to_string(after.threads) + " intra-op threads.",
      "numbers below 1.2e-38 become zero.", [previous] {
        on_each_thread([&](size_t thread) {
          at::globalContext().setFlushDenormal(thread < previous->size() && (*previous)[thread] != 0);
        });
      });
}

HostSetting size_threads(std::optional<int> threads) {
  constexpr const char* kName = "threads";
  OXY_CHECK(!threads || *threads >= 1, InvalidArgument, "threads is ", threads.value_or(0), ", expected at least 1.");
  const int now = at::get_num_threads();
  const int usable = std::max(1, read_cores().usable_physical);
  if (!threads) {
    for (const char* variable : {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}) {
      const char* value = std::getenv(variable);
      if (value && *value && now <= usable) {
        return HostSetting::refused(
            kName, std::to_string(now) + " intra-op threads: unchanged, " + variable + "=" + value + " asks for them.");
      }
    }
  }
  const int wanted = std::min(threads.value_or(usable), usable);
  if (now == wanted) {
    return HostSetting::refused(kName, std::to_string(now) + " intra-op threads: unchanged, this process may use " +
                                           std::to_string(usable) + " cores.");
  }
  at::set_num_threads(wanted);
  return HostSetting::applied(kName,
                              std::to_string(now) + " -> " + std::to_string(wanted) +
                                  " intra-op threads: this process may use " + std::to_string(usable) + " cores.",
                              "the order of some reductions changes with the number of threads.",
                              [now] { at::set_num_threads(now); });
}

}  // namespace oxytorch
