#include "oxytorch/tune/host.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/acos_cpu_dispatch.h>
#include <ATen/ops/asin_cpu_dispatch.h>
#include <ATen/ops/atan_cpu_dispatch.h>
#include <ATen/ops/cos_cpu_dispatch.h>
#include <ATen/ops/erf_cpu_dispatch.h>
#include <ATen/ops/erfc_cpu_dispatch.h>
#include <ATen/ops/erfinv_cpu_dispatch.h>
#include <ATen/ops/exp_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/log10_cpu_dispatch.h>
#include <ATen/ops/log2_cpu_dispatch.h>
#include <ATen/ops/log_cpu_dispatch.h>
#include <ATen/ops/sin_cpu_dispatch.h>
#include <ATen/ops/sqrt_cpu_dispatch.h>
#include <ATen/ops/tan_cpu_dispatch.h>
#include <ATen/ops/tanh_cpu_dispatch.h>
#include <ATen/ops/trunc_cpu_dispatch.h>
#include <c10/util/Exception.h>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/error.h"
#include "oxytorch/logging.h"
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

constexpr const char* kInsideRegion = "called inside a parallel region, from where the other threads are out of reach.";

using UnaryOut = at::Tensor& (*)(at::Tensor&, const at::Tensor&);

/// What ATen/cpu/vml.h hands to MKL.
constexpr std::array<std::pair<const char*, UnaryOut>, 16> kVectorMath{{
    {"acos", at::cpu::acos_out},
    {"asin", at::cpu::asin_out},
    {"atan", at::cpu::atan_out},
    {"cos", at::cpu::cos_out},
    {"erf", at::cpu::erf_out},
    {"erfc", at::cpu::erfc_out},
    {"erfinv", at::cpu::erfinv_out},
    {"exp", at::cpu::exp_out},
    {"log", at::cpu::log_out},
    {"log10", at::cpu::log10_out},
    {"log2", at::cpu::log2_out},
    {"sin", at::cpu::sin_out},
    {"sqrt", at::cpu::sqrt_out},
    {"tan", at::cpu::tan_out},
    {"tanh", at::cpu::tanh_out},
    {"trunc", at::cpu::trunc_out},
}};

/// Past the dispatcher: no mode or autograd of the caller sees it. Too few elements for a second thread.
template <class Scalar>
void call_each(at::ScalarType type, std::vector<std::string>& called) {
  std::array<Scalar, 16> given{}, made{};
  given.fill(Scalar{0.5});
  const at::Tensor from = at::from_blob(given.data(), {16}, type);
  at::Tensor to = at::from_blob(made.data(), {16}, type);
  for (const auto& [name, function] : kVectorMath) {
    function(to, from);
    called.push_back(std::string(name) + (type == at::kFloat ? ".float32" : ".float64"));
  }
}

}  // namespace

const std::vector<std::string>& resolve_vector_math() {
  static const std::vector<std::string> resolved = [] {
    std::vector<std::string> called;
    call_each<float>(at::kFloat, called);
    call_each<double>(at::kDouble, called);
    return called;
  }();
  return resolved;
}

FlushState flush_state() {
  std::atomic<int> flushing{0};
  on_each_thread([&](size_t) { flushing += this_thread_flushes() ? 1 : 0; });
  return {flushing.load(), at::get_num_threads()};
}

void set_flush_denormals(bool flush) {
  on_each_thread([&](size_t /*thread*/) { at::globalContext().setFlushDenormal(flush); });
}

HostSetting flush_denormals() {
  constexpr const char* kName = "flush_denormals";
  if (at::in_parallel_region()) return HostSetting::refused(kName, kInsideRegion);
  const auto before = flush_state();
  if (before.flushing == before.threads) {
    return HostSetting::unchanged(kName, "all " + std::to_string(before.threads) + " threads flush denormals already.");
  }
  auto previous = std::make_shared<std::vector<char>>(static_cast<size_t>(before.threads));
  on_each_thread([&](size_t thread) { (*previous)[thread] = this_thread_flushes() ? 1 : 0; });
  set_flush_denormals(true);
  const auto after = flush_state();
  if (after.flushing != after.threads) {
    return HostSetting::refused(kName, "this processor cannot flush denormals: " + std::to_string(after.flushing) +
                                           " of " + std::to_string(after.threads) + " threads do.");
  }
  return HostSetting::applied(
      kName, "denormal numbers are taken as zero on all " + std::to_string(after.threads) + " intra-op threads.",
      "numbers below 1.2e-38 become zero.", [previous] {
        // Fewer threads may be asked for by now: the workers that wait meanwhile get their mode back too.
        const int now = at::get_num_threads();
        const int most = std::max(now, static_cast<int>(previous->size()));
        if (most != now) at::set_num_threads(most);
        on_each_thread([&](size_t thread) {
          at::globalContext().setFlushDenormal(thread < previous->size() && (*previous)[thread] != 0);
        });
        if (most != now) at::set_num_threads(now);
      });
}

HostSetting use_deterministic_algorithms() {
  static std::mutex mutex;
  static int users = 0;
  static bool before = false, before_warns = false;
  auto& context = at::globalContext();
  const std::lock_guard lock(mutex);
  if (users++ == 0) {
    before = context.deterministicAlgorithms();
    before_warns = context.deterministicAlgorithmsWarnOnly();
  }
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  return HostSetting::applied("deterministic", "operations without a deterministic version raise.",
                              "deterministic algorithms can be slower.", [&context] {
                                const std::lock_guard held(mutex);
                                const bool ours =
                                    context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
                                if (--users == 0 && ours) context.setDeterministicAlgorithms(before, before_warns);
                              });
}

#if defined(__linux__)

HostSetting pin_threads() {
  constexpr const char* kName = "pinned_threads";
  if (at::in_parallel_region()) return HostSetting::refused(kName, kInsideRegion);
  const auto threads = static_cast<std::size_t>(at::get_num_threads());
  if (threads == 1) return HostSetting::refused(kName, "there is one intra-op thread.");
  for (const char* variable : {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}) {
    if (const char* value = std::getenv(variable); value != nullptr && *value != '\0') {
      return HostSetting::refused(kName, std::string(variable) + "=" + value + " already places the threads.");
    }
  }
  const std::vector<int> places = read_cores().one_a_core;
  if (places.size() < threads) {
    return HostSetting::refused(kName, std::to_string(threads) + " intra-op threads, and " +
                                           std::to_string(places.size()) + " cores of this process are known.");
  }
  struct Before {
    cpu_set_t mask{};
    bool pinned = false;
  };
  auto before = std::make_shared<std::vector<Before>>(threads);
  const auto undo = [before] {
    on_each_thread([&](std::size_t thread) {
      if (thread >= before->size() || !(*before)[thread].pinned) return;
      pthread_setaffinity_np(pthread_self(), sizeof(cpu_set_t), &(*before)[thread].mask);
    });
  };
  std::atomic<std::size_t> pinned{0};
  on_each_thread([&](std::size_t thread) {
    if (thread == 0) return;
    Before& own = (*before)[thread];
    cpu_set_t place;
    CPU_ZERO(&place);
    CPU_SET(places[thread], &place);
    own.pinned = pthread_getaffinity_np(pthread_self(), sizeof own.mask, &own.mask) == 0 &&
                 pthread_setaffinity_np(pthread_self(), sizeof place, &place) == 0;
    pinned += own.pinned ? 1 : 0;
  });
  if (pinned + 1 != threads) {
    undo();
    return HostSetting::refused(kName, "the system let " + std::to_string(pinned) + " of " +
                                           std::to_string(threads - 1) + " workers be placed.");
  }
  return HostSetting::applied(kName, std::to_string(pinned) + " intra-op workers stay on a core of their own each.",
                              "what else runs on those cores has to move.", undo);
}

#else

HostSetting pin_threads() {
  return HostSetting::refused("pinned_threads", "this system is not Linux; its threads are not placed from here.");
}

#endif

HostSetting size_threads(std::optional<int> threads) {
  constexpr const char* kName = "threads";
  OXY_CHECK(!threads || *threads >= 1, InvalidArgument, "threads is ", threads.value_or(0), ", expected at least 1.");
  const int now = at::get_num_threads();
  const int usable = std::max(1, read_cores().usable_physical);
  if (!threads) {
    for (const char* variable : {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}) {
      const char* value = std::getenv(variable);
      if (value && *value && now <= usable) {
        return HostSetting::unchanged(
            kName, std::to_string(now) + " intra-op threads: unchanged, " + variable + "=" + value + " asks for them.");
      }
    }
  }
  const int wanted = std::min(threads.value_or(usable), usable);
  const std::string asked =
      threads.value_or(0) > usable ? std::to_string(*threads) + " were asked for, and " : std::string();
  if (now == wanted) {
    return HostSetting::unchanged(kName, std::to_string(now) + " intra-op threads: unchanged, " + asked +
                                             "this process may use " + std::to_string(usable) + " cores.");
  }
  at::set_num_threads(wanted);
  return HostSetting::applied(kName,
                              std::to_string(now) + " -> " + std::to_string(wanted) + " intra-op threads: " + asked +
                                  "this process may use " + std::to_string(usable) + " cores.",
                              "the order of some reductions changes with the number of threads.",
                              [now] { at::set_num_threads(now); });
}

HostSetting size_interop_threads(int threads) {
  constexpr const char* kName = "interop_threads";
  OXY_CHECK(threads > 0, InvalidArgument, "interop_threads is ", threads, "; use 1 or more.");
  const int before = at::get_num_interop_threads();
  const std::string number = std::to_string(threads);
  if (before == threads) return HostSetting::unchanged(kName, "torch has " + number + " inter-op threads already.");
  try {
    at::set_num_interop_threads(threads);
  } catch (const c10::Error&) {
    return HostSetting::refused(kName, number + " were asked for, and torch keeps " + std::to_string(before) +
                                           ": it takes their number once in a process, before it has run operators "
                                           "beside each other. Set it before that.");
  }
  return HostSetting::applied(kName, "torch runs up to " + number + " operators beside each other.",
                              "the number stays for the whole process.", [number] {
                                log(LogLevel::Warn,
                                    "interop_threads stays " + number +
                                        ": torch takes the number once in a process. Start a new one for another.",
                                    "tune");
                              });
}

}  // namespace oxytorch
