/// The kernels of a device's step tail, one text for CUDA and for the emulated grid.
///
/// A kernel is a class with its Arguments, its Shared memory and `run(block, shared, arguments)`. It works in phases:
/// block.each(phase) calls `phase` for every thread, in any order, and every thread sees the writes of the phases
/// before; between two calls nothing lives on but shared memory. What stands outside of a phase is the same for all
/// threads of a block. Device memory is reached through block.array(address, count), which is the address itself on a
/// device. Blocks of one launch do not know of each other.
#pragma once

#include "kernels/device/apply.h"
#include "kernels/device/sums.h"
#include "kernels/device/tail_arguments.h"

namespace oxytorch::kernels::device {

struct NoShared {};

/// Writes words that came as arguments into the tables.
struct Upload {
  using Arguments = UploadArguments;
  using Shared = NoShared;
  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared&, const Arguments& a) {
    std::uint32_t* const to = block.array(a.to, a.words);
    block.each([&](std::uint32_t thread) {
      for (std::uint32_t i = thread; i < a.words; i += kThreads) to[i] = a.payload[i];
    });
  }
};

/// The chunk table; one block for each tensor.
struct Tabulate {
  using Arguments = TableArguments;
  using Shared = NoShared;
  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared&, const Arguments& a) {
    const TailRecord& record = read(block, a.tables.records + block.index);
    TailChunk* const chunks = block.array(a.tables.chunks + record.first_chunk, record.chunks);
    std::uint32_t* const epoch = block.array(a.tables.applied_epoch + block.index, 1);
    block.each([&](std::uint32_t thread) {
      for (std::uint32_t i = thread; i < record.chunks; i += kThreads) chunks[i] = {block.index, i};
      if (thread == 0) *epoch = 0;
    });
  }
};

/// Sums of squares of the gradients' chunks; a warp for each chunk.
struct Measure {
  static constexpr std::uint32_t kWarps = kThreads / 32;
  using Arguments = TableArguments;
  struct Shared {
    double lane[kWarps][32];
  };
  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared& shared, const Arguments& a) {
    const TailTables& tables = a.tables;
    const std::uint32_t first = block.index * kWarps;
    block.each([&](std::uint32_t thread) {
      const std::uint32_t i = first + thread / 32;
      if (i >= tables.chunk_count) return;
      const TailChunk chunk = read(block, tables.chunks + i);
      const oxy_tail_tensor& tensor = read(block, tables.records + chunk.tensor).tensor;
      const void* const grad = read(block, tables.grads + chunk.tensor);
      const std::int64_t begin = chunk.index * kChunk;
      const std::int64_t end = begin + kChunk < tensor.numel ? begin + kChunk : tensor.numel;
      shared.lane[thread / 32][thread % 32] =
          grad == nullptr ? 0.0 : lane_sum(block, grad, tensor.grad_type, begin, end, thread % 32);
    });
    block.each([&](std::uint32_t thread) {
      const std::uint32_t i = first + thread / 32;
      if (thread % 32 != 0 || i >= tables.chunk_count) return;
      *block.array(tables.chunk_sums + i, 1) = tree_of_32(shared.lane[thread / 32]);
    });
  }
};

/// Sums of the chunks of each gradient; a block for each tensor.
struct SumGradients {
  using Arguments = SumArguments;
  using Shared = RunTotal;
  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared& shared, const Arguments& a) {
    const TailRecord& record = read(block, a.tables.records + block.index);
    const bool present = read(block, a.tables.grads + block.index) != nullptr;
    add_runs(block, shared, a.tables.chunk_sums + record.first_chunk, present ? record.chunks : 0);
    double* const sum = block.array(a.sums + record.tensor.stream, 1);
    block.each([&](std::uint32_t thread) {
      if (thread == 0) *sum = shared.total;
    });
  }
};

/// The verdict of a round; one block.
struct Judge {
  using Arguments = JudgeArguments;
  struct Shared {
    double tile[kThreads];
    double total;
    double scale;
  };
  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared& shared, const Arguments& a) {
    const std::uint32_t count = a.results.count;
    const double* const sums = block.array(a.sums, count);
    block.each([&](std::uint32_t thread) {
      if (thread == 0) shared.total = 0;
    });
    for (std::uint32_t begin = 0; begin < count; begin += kThreads) {
      block.each(
          [&](std::uint32_t thread) { shared.tile[thread] = begin + thread < count ? sums[begin + thread] : 0; });
      block.each([&](std::uint32_t thread) {
        if (thread != 0) return;
        for (std::uint32_t i = 0; i < kThreads && begin + i < count; ++i) shared.total += shared.tile[i];
      });
    }
    block.each([&](std::uint32_t thread) {
      if (thread == 0) shared.scale = decide(block, shared.total, a);
    });
    if (a.results.grad_norms == nullptr) return;
    float* const norms = block.array(a.results.grad_norms, count);
    block.each([&](std::uint32_t thread) {
      for (std::uint32_t i = thread; i < count; i += kThreads)
        norms[i] = static_cast<float>(sqrt(sums[i]) / shared.scale);
    });
  }

 private:
  template <class Block, class T>
  OXY_HOST_DEVICE static void write(const Block& block, T* to, T value) {
    if (to != nullptr) *block.array(to, 1) = value;
  }
  // Gives what the gradients are scaled by.
  template <class Block>
  OXY_HOST_DEVICE static double decide(const Block& block, double sum, const Arguments& a) {
    const TailRound& round = a.round;
    const auto value_of = [&](const float* at, double absent) {
      return at == nullptr ? absent : static_cast<double>(read(block, at));
    };
    const bool scaled = round.grad_scale != nullptr || round.found_inf != nullptr;
    const double scale = value_of(round.grad_scale, 1) * round.grad_divisor;
    const double norm = sqrt(sum) / scale;
    const bool finite = is_finite(sum) && is_finite(1.0 / scale);
    const bool told = value_of(round.found_inf, 0) != 0;
    const bool bad = told || (!finite && (scaled || (round.flags & OXY_TAIL_PROPAGATE) == 0));
    const bool skip = bad || value_of(round.skip, 0) != 0 ||
                      (round.norm_limit != nullptr && norm > static_cast<double>(read(block, round.norm_limit)));
    // Written so that a NaN norm, where it is let through, reaches every gradient as in torch.
    double clip = round.clip_norm > 0 ? round.clip_norm / (norm + 1e-6) : 1.0;
    if (clip > 1.0) clip = 1.0;
    *block.array(a.verdict, 1) = {clip / scale, 1.0 / scale, norm, skip ? 1.0 : 0.0};
    write(block, a.results.grad_norm, static_cast<float>(norm));
    write(block, a.results.found_inf, bad ? 1.0F : 0.0F);
    write(block, a.results.applied, skip ? 0.0F : 1.0F);
    if (bad) write(block, round.found_inf, 1.0F);
    if (skip && a.results.skipped != nullptr) *block.array(a.results.skipped, 1) += 1;
    return scale;
  }
};

/// Counts the step and takes the coefficients of each tensor; a thread for each.
struct Prepare {
  using Arguments = ApplyArguments;
  using Shared = NoShared;
  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared&, const Arguments& a) {
    const oxy_tail_verdict verdict = read(block, a.verdict);
    if (verdict.skip != 0) return;
    block.each([&](std::uint32_t thread) {
      const std::uint32_t i = block.index * kThreads + thread;
      if (i < a.tables.tensor_count) prepare(block, a, verdict, i);
    });
  }

 private:
  template <class Block>
  OXY_HOST_DEVICE static void prepare(const Block& block, const Arguments& a, const oxy_tail_verdict& verdict,
                                      std::uint32_t i) {
    if (read(block, a.tables.grads + i) == nullptr) return;
    const TailRecord& record = read(block, a.tables.records + i);
    const oxy_tail_group& group = read(block, a.tables.groups + record.tensor.group);
    float count = 0;
    if (record.tensor.step != nullptr) {
      float* const step = block.array(record.tensor.step, 1);
      *step = count = *step + 1.0F;
    }
    std::uint32_t* const epoch = block.array(a.tables.applied_epoch + i, 1);
    const bool first = record.tensor.first != 0 && *epoch != record.epoch;
    *epoch = record.epoch;
    TailCoefficients& c = *block.array(a.tables.coefficients + i, 1);
    c.value = coefficients_of(group, learning_rate(block, group), verdict.multiplier, a.round.clip_value,
                              a.round.ema_decay, static_cast<double>(count), first);
    c.first = first ? 1 : 0;
    c.nesterov = group.nesterov;
  }
  template <class Block>
  OXY_HOST_DEVICE static double learning_rate(const Block& block, const oxy_tail_group& group) {
    if (group.lr_tensor == nullptr) return group.lr;
    if (group.lr_type == OXY_F64) return read(block, static_cast<const double*>(group.lr_tensor));
    return static_cast<double>(read(block, static_cast<const float*>(group.lr_tensor)));
  }
};

/// Sums of what each chunk holds of each row, of gradient and weight; a block for each chunk, a warp for each row.
/// The segment of row r in chunk i has the place r + i among those of its tensor: either grows with each segment.
struct MeasureRows {
  static constexpr std::uint32_t kWarps = kThreads / 32;
  using Arguments = ApplyArguments;
  struct Shared {
    double lane[2][kWarps][32];
  };
  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared& shared, const Arguments& a) {
    if (read(block, a.verdict).skip != 0) return;
    const TailChunk chunk = read(block, a.tables.chunks + block.index);
    const TailRecord& record = read(block, a.tables.records + chunk.tensor);
    const oxy_tail_tensor& tensor = record.tensor;
    const void* const grad = read(block, a.tables.grads + chunk.tensor);
    if (grad == nullptr) return;
    const std::int64_t length = tensor.numel / tensor.rows;
    const std::int64_t begin = chunk.index * kChunk;
    const std::int64_t end = begin + kChunk < tensor.numel ? begin + kChunk : tensor.numel;
    const std::int64_t last = (end - 1) / length;
    for (std::int64_t row = begin / length; row <= last; row += kWarps) {
      block.each([&](std::uint32_t thread) {
        const std::int64_t own = row + thread / 32;
        if (own > last) return;
        const std::int64_t from = own * length > begin ? own * length : begin;
        const std::int64_t to = (own + 1) * length < end ? (own + 1) * length : end;
        shared.lane[0][thread / 32][thread % 32] = lane_sum(block, grad, tensor.grad_type, from, to, thread % 32);
        shared.lane[1][thread / 32][thread % 32] = weight_lane_sum(block, tensor, from, to, thread % 32);
      });
      block.each([&](std::uint32_t thread) {
        const std::int64_t own = row + thread / 32;
        if (thread % 32 > 1 || own > last) return;
        double* const sums = thread % 32 == 0 ? a.tables.segment_grad_sums : a.tables.segment_weight_sums;
        const auto place = static_cast<std::uint64_t>(own) + chunk.index + record.first_row + record.first_chunk;
        *block.array(sums + place, 1) = tree_of_32(shared.lane[thread % 32][thread / 32]);
      });
    }
  }
};

/// What each row's gradient is multiplied by; a thread for each row.
struct LimitRows {
  using Arguments = ApplyArguments;
  using Shared = NoShared;
  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared&, const Arguments& a) {
    const oxy_tail_verdict verdict = read(block, a.verdict);
    if (verdict.skip != 0) return;
    block.each([&](std::uint32_t thread) {
      const std::uint64_t row = std::uint64_t{block.index} * kThreads + thread;
      if (row < a.tables.rows) limit_row(block, a, verdict.multiplier, row);
    });
  }

 private:
  // The tensor that `row` of all rows belongs to: the last that begins at or before it, and is not empty.
  template <class Block>
  OXY_HOST_DEVICE static std::uint32_t owner(const Block& block, const TailTables& tables, std::uint64_t row) {
    std::uint32_t low = 0;
    std::uint32_t high = tables.tensor_count - 1;
    while (low < high) {
      const std::uint32_t middle = (low + high + 1) / 2;
      if (read(block, tables.records + middle).first_row <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
  template <class Block>
  OXY_HOST_DEVICE static void limit_row(const Block& block, const Arguments& a, double multiplier, std::uint64_t row) {
    const std::uint32_t owner_index = owner(block, a.tables, row);
    const TailRecord& record = read(block, a.tables.records + owner_index);
    const oxy_tail_tensor& tensor = record.tensor;
    if (read(block, a.tables.grads + owner_index) == nullptr || tensor.numel == 0) return;
    const std::int64_t length = tensor.numel / tensor.rows;
    const auto own = static_cast<std::int64_t>(row - record.first_row);
    const std::int64_t chunk = own * length / kChunk;
    const std::int64_t touched = ((own + 1) * length - 1) / kChunk - chunk + 1;
    const auto place = static_cast<std::uint64_t>(own + chunk) + record.first_row + record.first_chunk;
    const double* const grads = block.array(a.tables.segment_grad_sums + place, touched);
    const double* const weights = block.array(a.tables.segment_weight_sums + place, touched);
    double grad = 0;
    double weight = 0;
    for (std::int64_t k = 0; k < touched; ++k) {
      grad += grads[k];
      weight += weights[k];
    }
    const double norm = sqrt(grad) * (multiplier < 0 ? -multiplier : multiplier);
    const double weight_norm = sqrt(weight);
    const double most = a.round.agc * (weight_norm < a.round.agc_eps ? a.round.agc_eps : weight_norm);
    *block.array(a.tables.row_multipliers + row, 1) =
        norm > most ? static_cast<float>(most / (norm < 1e-6 ? 1e-6 : norm)) : 1.0F;
  }
};

/// Norms of weights and updates; a block for each tensor.
struct Collect {
  using Arguments = ApplyArguments;
  using Shared = RunTotal;
  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared& shared, const Arguments& a) {
    if (read(block, a.verdict).skip != 0 || read(block, a.tables.grads + block.index) == nullptr) return;
    const TailRecord& record = read(block, a.tables.records + block.index);
    write(block, shared, a.tables.chunk_param_sums, record, a.param_norms);
    write(block, shared, a.tables.chunk_sums, record, a.update_norms);
  }

 private:
  template <class Block>
  OXY_HOST_DEVICE static void write(const Block& block, Shared& shared, const double* sums, const TailRecord& record,
                                    float* norms) {
    if (norms == nullptr) return;
    add_runs(block, shared, sums + record.first_chunk, record.chunks);
    float* const norm = block.array(norms + record.tensor.stream, 1);
    block.each([&](std::uint32_t thread) {
      if (thread == 0) *norm = static_cast<float>(sqrt(shared.total));
    });
  }
};

}  // namespace oxytorch::kernels::device
