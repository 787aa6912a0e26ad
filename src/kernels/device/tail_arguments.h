/// The kernels of the step tail on a device: their names, and the arguments that a launch hands over by value.
///
/// Host and device read the same structures. Everything in them is plain data; pointers are device memory. The tables
/// that a tail keeps on the device (TailTables) are made and kept up to date by backends/device_tail.h.
#pragma once

#include <cstdint>

#include "kernels/device/coefficients.h"
#include "oxytorch/backend_kernels.h"

namespace oxytorch::kernels::device {

/// Elements of a chunk, of a section of it and of a run of chunks: they decide the order of summation and are those of
/// the processor's engine.
inline constexpr std::int64_t kChunk = 16384;
inline constexpr std::int64_t kSection = 512;
inline constexpr std::uint32_t kRun = 128;

/// Threads of a block of any of the kernels.
inline constexpr std::uint32_t kThreads = 128;

/// Rules that share a kernel; Adam serves AdamW too.
enum class Family : std::uint8_t { Adam, Sgd, Lion, Adagrad, RmsProp };

/// What a tensor's elements are made of. Plain: fp32 all through. Narrow: 16 bits, masters or low bits somewhere.
/// Random: the same, rounded stochastically. Coded: 8-bit state, rounded either way.
enum class Layout : std::uint8_t { Plain, Narrow, Random, Coded };
inline constexpr std::uint32_t kLayouts = 4;

/// Every kernel: X(id, symbol, class...), in the order of the ids. The classes are in tail_kernels.h.
#define OXY_TAIL_APPLY_KERNELS(X, family, name)                                             \
  X(Apply##family##Plain, oxy_tail_##name##_plain, Apply<Family::family, Layout::Plain>)    \
  X(Apply##family##Narrow, oxy_tail_##name##_narrow, Apply<Family::family, Layout::Narrow>) \
  X(Apply##family##Random, oxy_tail_##name##_random, Apply<Family::family, Layout::Random>) \
  X(Apply##family##Coded, oxy_tail_##name##_coded, Apply<Family::family, Layout::Coded>)
#define OXY_TAIL_KERNELS(X)                             \
  X(Upload, oxy_tail_upload, Upload)                    \
  X(Tabulate, oxy_tail_tabulate, Tabulate)              \
  X(Measure, oxy_tail_measure, Measure)                 \
  X(SumGradients, oxy_tail_sum_gradients, SumGradients) \
  X(Judge, oxy_tail_judge, Judge)                       \
  X(Prepare, oxy_tail_prepare, Prepare)                 \
  X(MeasureRows, oxy_tail_measure_rows, MeasureRows)    \
  X(LimitRows, oxy_tail_limit_rows, LimitRows)          \
  X(Collect, oxy_tail_collect, Collect)                 \
  OXY_TAIL_APPLY_KERNELS(X, Adam, adam)                 \
  OXY_TAIL_APPLY_KERNELS(X, Sgd, sgd)                   \
  OXY_TAIL_APPLY_KERNELS(X, Lion, lion)                 \
  OXY_TAIL_APPLY_KERNELS(X, Adagrad, adagrad)           \
  OXY_TAIL_APPLY_KERNELS(X, RmsProp, rmsprop)

enum class TailKernel : std::uint32_t {
#define OXY_TAIL_KERNEL_ID(id, symbol, ...) id,
  OXY_TAIL_KERNELS(OXY_TAIL_KERNEL_ID)
#undef OXY_TAIL_KERNEL_ID
      kCount
};

/// Names of the extern "C" functions, indexed by TailKernel.
inline constexpr const char* kTailKernelSymbols[] = {
#define OXY_TAIL_KERNEL_NAME(id, symbol, ...) #symbol,
    OXY_TAIL_KERNELS(OXY_TAIL_KERNEL_NAME)
#undef OXY_TAIL_KERNEL_NAME
};

constexpr TailKernel apply_kernel(Family family, Layout layout) {
  return static_cast<TailKernel>(static_cast<std::uint32_t>(TailKernel::ApplyAdamPlain) +
                                 static_cast<std::uint32_t>(family) * kLayouts + static_cast<std::uint32_t>(layout));
}

/// The layout in which a tensor is worked on in a round of these flags.
OXY_HOST_DEVICE constexpr Layout layout_in(Layout layout, std::uint32_t flags) {
  return layout == Layout::Narrow && (flags & OXY_TAIL_STOCHASTIC) != 0 ? Layout::Random : layout;
}

/// One parameter as the kernels see it.
struct TailRecord {
  oxy_tail_tensor tensor;  // but its gradient, which is in TailTables::grads
  std::uint32_t first_chunk;
  std::uint32_t chunks;
  std::uint64_t first_row;  // of all tensors
  std::uint32_t epoch;      // tensor.first holds until a round of this epoch was applied
  Family family;
  Layout layout;  // but for Random, which depends on the round
  std::uint8_t reserved[2];
};

struct TailChunk {
  std::uint32_t tensor;
  std::uint32_t index;  // within the tensor
};

/// Of one tensor in one round.
struct TailCoefficients {
  Coefficients value;
  std::uint8_t first;  // Sgd: the buffer is not yet filled
  std::uint8_t nesterov;
  std::uint8_t reserved[2];
};

/// What a tail keeps in device memory.
struct TailTables {
  TailRecord* records;
  void** grads;  // of each tensor
  oxy_tail_group* groups;
  TailChunk* chunks;
  TailCoefficients* coefficients;  // of each tensor
  std::uint32_t* applied_epoch;    // of each tensor
  double* chunk_sums;              // of squares of gradients, then of updates
  double* chunk_param_sums;
  double* segment_grad_sums;  // of rows within a chunk; these three with adaptive clipping alone
  double* segment_weight_sums;
  float* row_multipliers;
  std::uint64_t rows;
  std::uint32_t tensor_count;
  std::uint32_t chunk_count;
  std::uint32_t group_count;
  std::uint32_t reserved;
};

/// Bytes of tables that one launch writes.
inline constexpr std::uint32_t kUploadBytes = 3840;

struct UploadArguments {
  std::uint32_t* to;
  std::uint32_t words;
  std::uint32_t reserved;
  std::uint32_t payload[kUploadBytes / 4];
};

struct TableArguments {
  TailTables tables;
};

struct SumArguments {
  TailTables tables;
  double* sums;
};

/// oxy_tail_settings without its size.
struct TailRound {
  std::uint32_t flags;
  std::uint32_t reserved;
  double grad_divisor;
  double clip_norm;
  double clip_value;
  double agc;
  double agc_eps;
  double ema_decay;
  std::uint64_t seed;
  const float* grad_scale;
  float* found_inf;
  const float* skip;
  const float* norm_limit;
};

struct JudgeArguments {
  const double* sums;
  TailRound round;
  oxy_tail_results results;
  oxy_tail_verdict* verdict;
};

/// Of everything that follows the verdict.
struct ApplyArguments {
  TailTables tables;
  TailRound round;
  const oxy_tail_verdict* verdict;
  float* param_norms;
  float* update_norms;
};

static_assert(sizeof(UploadArguments) <= 4096, "what any device takes as arguments of a launch");

}  // namespace oxytorch::kernels::device
