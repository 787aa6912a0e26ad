/// The update of a device's step tail; see tail_kernels.h for what a kernel is.
#pragma once

#include <type_traits>

#include "kernels/device/rules.h"
#include "kernels/device/sums.h"

namespace oxytorch::kernels::device {

/// One chunk as the threads of a block see it: each pointer is that of the chunk's first element.
struct ChunkJob {
  void* param;
  void* grad;
  float* master;
  std::int8_t* low_bits;
  void* copy;
  void* state[3];
  std::uint16_t* scale[3];
  float* ema;
  const float* row_multipliers;  // of the tensor
  std::int64_t offset;
  std::int64_t row_length;
  int count;
  std::uint32_t stream;
  std::uint64_t seed;
  TailCoefficients coefficients;
  oxy_element type, grad_type, state_type, copy_type;
  bool zeroes, collects, stochastic;

  template <class Block>
  OXY_HOST_DEVICE ChunkJob(const Block& block, const ApplyArguments& a, const TailChunk& chunk,
                           const TailRecord& record, void* gradient) {
    const oxy_tail_tensor& tensor = record.tensor;
    offset = chunk.index * kChunk;
    count = static_cast<int>(offset + kChunk < tensor.numel ? kChunk : tensor.numel - offset);
    const auto part = [&](void* array, oxy_element of) -> void* {
      if (array == nullptr) return nullptr;
      return block.array(static_cast<unsigned char*>(array) + bytes_of(of, offset), bytes_of(of, count));
    };
    param = part(tensor.param, tensor.type);
    grad = part(gradient, tensor.grad_type);
    master = static_cast<float*>(part(tensor.master, OXY_F32));
    low_bits = static_cast<std::int8_t*>(part(tensor.low_bits, OXY_INT8));
    copy = part(tensor.copy, tensor.copy_type);
    ema = static_cast<float*>(part(tensor.ema, OXY_F32));
    OXY_UNROLL
    for (int k = 0; k < 3; ++k) {
      state[k] = part(tensor.state[k], tensor.state_type);
      scale[k] = nullptr;
      if (tensor.state_type == OXY_INT8 && state[k] != nullptr) {
        scale[k] = block.array(tensor.scale[k] + offset / kStateGroup, (count + kStateGroup - 1) / kStateGroup);
      }
    }
    row_multipliers =
        a.round.agc == 0 ? nullptr : block.array(a.tables.row_multipliers + record.first_row, tensor.rows);
    row_length = tensor.numel / tensor.rows;
    stream = tensor.stream;
    seed = a.round.seed;
    type = tensor.type;
    grad_type = tensor.grad_type;
    state_type = tensor.state_type;
    copy_type = tensor.copy_type;
    zeroes = (a.round.flags & OXY_TAIL_ZERO_GRAD) != 0;
    collects = (a.round.flags & OXY_TAIL_COLLECT) != 0;
    stochastic = (a.round.flags & OXY_TAIL_STOCHASTIC) != 0;
  }

  OXY_HOST_DEVICE void zero_four(int at, int left) const {
    if (grad_type == OXY_F32) {
      const float zero[4] = {};
      write_four(zero, left, static_cast<float*>(grad) + at);
    } else {
      const std::uint16_t zero[4] = {};
      write_four(zero, left, static_cast<std::uint16_t*>(grad) + at);
    }
  }

  // Where the processor cuts the last section of a chunk in two; `count` where it does not.
  OXY_HOST_DEVICE int split() const {
    const int left = count % static_cast<int>(kSection);
    const int unit = stochastic ? 128 : state_type == OXY_INT8 ? static_cast<int>(kStateGroup) : 16;
    const int whole = left / unit * unit;
    return left % 16 == 0 || whole == 0 ? count : count - left + whole;
  }
};

/// The update of the tensors of one family and layout; a block for each chunk.
///
/// A thread takes four neighbouring elements in each of 32 turns. In order of lanes, four threads share a section of
/// 512 and step through it by 16, so that a thread keeps its lanes of the statistics and its random blocks; elsewhere
/// the block steps by 512, which shares a short chunk among all threads.
template <Family kFamily, Layout kLayout>
struct Apply {
  static constexpr int kTurns = 32;
  static constexpr bool kPlain = kLayout == Layout::Plain;
  static constexpr bool kRandom = kLayout == Layout::Random;
  static constexpr bool kCoded = kLayout == Layout::Coded;
  // Turns whose loads are under way together.
  static constexpr int kTogether = kPlain || kCoded ? 2 : 1;
  static constexpr int kParts = static_cast<int>(kChunk / kSection) + 1;  // the last section may be in two

  using Arguments = ApplyArguments;
  // The scale of 8-bit state needs all 32 elements of a group: two turns of four threads.
  struct Codes {
    float value[3][8][kThreads];
    std::uint32_t largest[3][kThreads];
    float squares[2][4][kThreads];
  };
  struct NoCodes {};
  struct Shared {
    float part[2][kParts][16];
    double lane[2][16];
    std::conditional_t<kCoded, Codes, NoCodes> codes;
  };

  template <class Block>
  OXY_HOST_DEVICE static void run(const Block& block, Shared& shared, const Arguments& a) {
    const TailChunk chunk = read(block, a.tables.chunks + block.index);
    const TailRecord& record = read(block, a.tables.records + chunk.tensor);
    void* const grad = read(block, a.tables.grads + chunk.tensor);
    if (grad == nullptr || record.family != kFamily || layout_in(record.layout, a.round.flags) != kLayout) return;
    ChunkJob job(block, a, chunk, record, grad);
    if (read(block, a.verdict).skip != 0) return zero(block, job);
    job.coefficients = read(block, a.tables.coefficients + chunk.tensor);
    update(block, shared, job);
    if (!job.collects) return;
    add_parts(block, shared, job);
    double* const sums[2] = {block.array(a.tables.chunk_param_sums + block.index, 1),
                             block.array(a.tables.chunk_sums + block.index, 1)};
    block.each([&](std::uint32_t thread) {
      if (thread < 2) *sums[thread] = tree_of_16(shared.lane[thread]);
    });
  }

 private:
  struct Turn {
    int at;
    int left;  // elements from `at` to the end of the chunk; none: nothing to do
    float weight[4];
    float before[4];
    float grad[4];
    ElementState state[4];
  };
  struct Order {
    int first, step;
    OXY_HOST_DEVICE Order(const ChunkJob& job, std::uint32_t thread) {
      const auto t = static_cast<int>(thread);
      const bool by_lanes = kRandom || kCoded || job.collects;
      first = by_lanes ? t / 4 * static_cast<int>(kSection) + t % 4 * 4 : t * 4;
      step = by_lanes ? 16 : static_cast<int>(kThreads) * 4;
    }
  };
  struct Squares {
    float at[2][4] = {};
    OXY_HOST_DEVICE void add(const Turn& t) {
      OXY_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (j >= t.left) break;
        const float change = t.weight[j] - t.before[j];
        at[0][j] = fma(t.weight[j], t.weight[j], at[0][j]);
        at[1][j] = fma(change, change, at[1][j]);
      }
    }
    // Ends a part of the thread's section.
    OXY_HOST_DEVICE void put(Shared& shared, std::uint32_t part, std::uint32_t thread) {
      for (std::uint32_t j = 0; j < 4; ++j) {
        shared.part[0][part][thread % 4 * 4 + j] = at[0][j];
        shared.part[1][part][thread % 4 * 4 + j] = at[1][j];
        at[0][j] = at[1][j] = 0;
      }
    }
  };
  // Random bits of the operands of one thread.
  struct Random {
    RandomFour param;
    RandomFour state[3];
  };

  OXY_HOST_DEVICE static StatePresence presence(const ChunkJob& job) {
    return {{keeps_state(kFamily, 0) && job.state[0] != nullptr, keeps_state(kFamily, 1) && job.state[1] != nullptr,
             keeps_state(kFamily, 2) && job.state[2] != nullptr}};
  }
  OXY_HOST_DEVICE static bool rounds_param_randomly(const ChunkJob& job) {
    return job.stochastic && job.type == OXY_BF16 && job.master == nullptr;
  }
  OXY_HOST_DEVICE static std::uint32_t counter(const ChunkJob& job, int at) {
    return static_cast<std::uint32_t>((job.offset + at) / 128 * 16 + at % 16);
  }

  template <class Block>
  OXY_HOST_DEVICE static void zero(const Block& block, const ChunkJob& job) {
    if (!job.zeroes) return;
    block.each([&](std::uint32_t thread) {
      for (int at = static_cast<int>(thread) * 4; at < job.count; at += static_cast<int>(kThreads) * 4) {
        job.zero_four(at, job.count - at);
      }
    });
  }

  template <class Block>
  OXY_HOST_DEVICE static void update(const Block& block, Shared& shared, const ChunkJob& job) {
    if constexpr (kCoded) {
      for (int turn = 0; turn < kTurns; turn += 2) {
        block.each([&](std::uint32_t thread) { update_coded(shared, job, thread, turn); });
        block.each([&](std::uint32_t thread) { encode(shared, job, thread, turn); });
      }
      block.each([&](std::uint32_t thread) {
        if (!job.collects) return;
        Squares squares = kept(shared, thread);
        finish(shared, squares, job, thread);
      });
    } else {
      block.each([&](std::uint32_t thread) { update_thread(shared, job, thread); });
    }
  }

  OXY_HOST_DEVICE static void update_thread(Shared& shared, const ChunkJob& job, std::uint32_t thread) {
    const Order order(job, thread);
    const StatePresence has = presence(job);
    const int split = job.split();
    Squares squares;
    [[maybe_unused]] Random random;
    for (int turn = 0; turn < kTurns && order.first + turn * order.step < job.count; turn += kTogether) {
      Turn turns[kTogether];
      OXY_UNROLL
      for (int k = 0; k < kTogether; ++k) {
        turns[k].at = order.first + (turn + k) * order.step;
        turns[k].left = job.count - turns[k].at;
        load(job, has, turns[k]);
      }
      OXY_UNROLL
      for (int k = 0; k < kTogether; ++k) {
        Turn& t = turns[k];
        if (t.left <= 0) continue;
        advance(job, has, t);
        if constexpr (kRandom) {
          if (turn % 8 == 0) fill(job, has, t.at, random);
          store_weights(job, t,
                        [&](int j) { return rounds_param_randomly(job) ? random.param.piece(j, turn % 8) : kNearest; });
          store_states(job, has, t, [&](int s, int j) {
            return job.state_type == OXY_BF16 ? random.state[s].piece(j, turn % 8) : kNearest;
          });
        } else {
          store_weights(job, t, [](int) { return kNearest; });
          store_states(job, has, t, [](int, int) { return kNearest; });
        }
        store_rest(job, t);
        if (!job.collects) continue;
        if (t.at == split + static_cast<int>(thread) % 4 * 4) squares.put(shared, thread / 4, thread);
        squares.add(t);
      }
    }
    if (job.collects) finish(shared, squares, job, thread);
  }

  OXY_HOST_DEVICE static void fill(const ChunkJob& job, const StatePresence& has, int at, Random& random) {
    const std::uint32_t step = job.coefficients.value.step;
    if (rounds_param_randomly(job)) {
      random.param.fill(job.seed, job.stream, RoundingOperand::Param, step, counter(job, at));
    }
    OXY_UNROLL
    for (int k = 0; k < 3; ++k) {
      if (has.at[k] && job.state_type == OXY_BF16) {
        random.state[k].fill(job.seed, job.stream, static_cast<RoundingOperand>(k + 1), step, counter(job, at));
      }
    }
  }

  OXY_HOST_DEVICE static void load(const ChunkJob& job, const StatePresence& has, Turn& t) {
    if (t.left <= 0) return;
    if constexpr (kPlain) {
      read_four(static_cast<const float*>(job.param) + t.at, t.left, t.weight);
      read_four(static_cast<const float*>(job.grad) + t.at, t.left, t.grad);
    } else {
      load_weights(job, t);
      load_four(job.grad, job.grad_type, t.at, t.left, t.grad);
    }
    OXY_UNROLL
    for (int k = 0; k < 3; ++k) {
      if (!has.at[k]) continue;
      float values[4];
      load_state(job, k, t, values);
      for (int j = 0; j < 4; ++j) t.state[j].at[k] = values[j];
    }
  }
  OXY_HOST_DEVICE static void load_weights(const ChunkJob& job, Turn& t) {
    if (job.master != nullptr) return read_four(job.master + t.at, t.left, t.weight);
    if (job.low_bits == nullptr) return load_four(job.param, job.type, t.at, t.left, t.weight);
    std::uint16_t high[4];
    std::int8_t low[4];
    read_four(static_cast<const std::uint16_t*>(job.param) + t.at, t.left, high);
    read_four(job.low_bits + t.at, t.left, low);
    for (int j = 0; j < 4; ++j) t.weight[j] = join_weight(high[j], low[j]);
  }
  OXY_HOST_DEVICE static void load_state(const ChunkJob& job, int k, const Turn& t, float* values) {
    if constexpr (kPlain) {
      read_four(static_cast<const float*>(job.state[k]) + t.at, t.left, values);
    } else if constexpr (kCoded) {
      std::uint8_t codes[4];
      read_four(static_cast<const std::uint8_t*>(job.state[k]) + t.at, t.left, codes);
      const float scale = from_bf16(job.scale[k][t.at / kStateGroup]);
      for (int j = 0; j < 4; ++j) {
        values[j] = state_code(kFamily, k) == StateCode::Signed ? decode_code<StateCode::Signed>(codes[j], scale)
                                                                : decode_code<StateCode::Unsigned>(codes[j], scale);
      }
    } else {
      load_four(job.state[k], job.state_type, t.at, t.left, values);
    }
  }

  // The gradient's way to the rule, and the rule.
  OXY_HOST_DEVICE static void advance(const ChunkJob& job, const StatePresence& has, Turn& t) {
    const Coefficients& c = job.coefficients.value;
    for (float& grad : t.grad) grad *= c.grad_multiplier;
    if (job.row_multipliers != nullptr) {
      std::int64_t row = (job.offset + t.at) / job.row_length;
      std::int64_t next = (row + 1) * job.row_length - job.offset - t.at;
      OXY_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (j >= t.left) break;
        if (j == next) {
          ++row;
          next += job.row_length;
        }
        t.grad[j] *= job.row_multipliers[row];
      }
    }
    OXY_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (c.clip_value != 0) t.grad[j] = limit(t.grad[j], c.clip_value);
      t.before[j] = t.weight[j];
      t.weight[j] = updated<kFamily>(job.coefficients.value, t.weight[j], t.grad[j], PresentState(t.state[j], has),
                                     job.coefficients.first != 0, job.coefficients.nesterov != 0);
    }
  }

  template <class Piece>
  OXY_HOST_DEVICE static void store_weights(const ChunkJob& job, Turn& t, Piece&& piece) {
    if constexpr (kPlain) return write_four(t.weight, t.left, static_cast<float*>(job.param) + t.at);
    if (job.master != nullptr) {
      write_four(t.weight, t.left, job.master + t.at);
      return store_four(t.weight, job.param, job.type, t.at, t.left);
    }
    // From here on the weights are as they were stored.
    if (job.low_bits == nullptr) return store_four(t.weight, job.param, job.type, t.at, t.left, piece, t.weight);
    std::uint16_t high[4];
    std::int8_t low[4];
    for (int j = 0; j < 4; ++j) {
      split_weight(t.weight[j], piece(j), &high[j], &low[j]);
      t.weight[j] = join_weight(high[j], low[j]);
    }
    write_four(high, t.left, static_cast<std::uint16_t*>(job.param) + t.at);
    write_four(low, t.left, job.low_bits + t.at);
  }

  template <class Piece>
  OXY_HOST_DEVICE static void store_states(const ChunkJob& job, const StatePresence& has, const Turn& t,
                                           Piece&& piece) {
    OXY_UNROLL
    for (int k = 0; k < 3; ++k) {
      if (!has.at[k]) continue;
      const float values[4] = {t.state[0].at[k], t.state[1].at[k], t.state[2].at[k], t.state[3].at[k]};
      if constexpr (kPlain) {
        write_four(values, t.left, static_cast<float*>(job.state[k]) + t.at);
      } else {
        store_four(values, job.state[k], job.state_type, t.at, t.left, [&](int j) { return piece(k, j); }, nullptr);
      }
    }
  }

  OXY_HOST_DEVICE static void store_rest(const ChunkJob& job, const Turn& t) {
    if (job.copy != nullptr) store_four(t.weight, job.copy, job.copy_type, t.at, t.left);
    if (job.ema != nullptr) {
      float ema[4];
      read_four(job.ema + t.at, t.left, ema);
      for (int j = 0; j < 4; ++j) ema[j] = lerp(ema[j], t.weight[j], job.coefficients.value.ema_weight);
      write_four(ema, t.left, job.ema + t.at);
    }
    if (job.zeroes) job.zero_four(t.at, t.left);
  }

  // ---- 8-bit state: two turns, then the codes

  OXY_HOST_DEVICE static Squares kept(const Shared& shared, std::uint32_t thread) {
    Squares squares;
    for (int i = 0; i < 8; ++i) squares.at[i / 4][i % 4] = shared.codes.squares[i / 4][i % 4][thread];
    return squares;
  }

  OXY_HOST_DEVICE static void update_coded(Shared& shared, const ChunkJob& job, std::uint32_t thread, int turn) {
    const Order order(job, thread);
    const StatePresence has = presence(job);
    Squares squares;
    if (turn != 0) squares = kept(shared, thread);
    std::uint32_t largest[3] = {};
    RandomFour random;
    if (rounds_param_randomly(job)) {
      random.fill(job.seed, job.stream, RoundingOperand::Param, job.coefficients.value.step,
                  counter(job, order.first + turn * order.step));
    }
    Turn turns[2];
    OXY_UNROLL
    for (int i = 0; i < 2; ++i) {
      turns[i].at = order.first + (turn + i) * order.step;
      turns[i].left = job.count - turns[i].at;
      load(job, has, turns[i]);
    }
    OXY_UNROLL
    for (int i = 0; i < 2; ++i) {
      Turn& t = turns[i];
      if (t.left <= 0) continue;
      advance(job, has, t);
      store_weights(job, t,
                    [&](int j) { return rounds_param_randomly(job) ? random.piece(j, (turn + i) % 8) : kNearest; });
      store_rest(job, t);
      OXY_UNROLL
      for (int k = 0; k < 3; ++k) {
        if (!has.at[k]) continue;
        OXY_UNROLL
        for (int j = 0; j < 4; ++j) {
          if (j >= t.left) break;
          const std::uint32_t magnitude = bits_of(t.state[j].at[k]) & 0x7FFFFFFF;
          largest[k] = largest[k] < magnitude ? magnitude : largest[k];
          shared.codes.value[k][i * 4 + j][thread] = t.state[j].at[k];
        }
      }
      if (!job.collects) continue;
      if (t.at == job.split() + static_cast<int>(thread) % 4 * 4) squares.put(shared, thread / 4, thread);
      squares.add(t);
    }
    for (int k = 0; k < 3; ++k) shared.codes.largest[k][thread] = largest[k];
    for (int i = 0; i < 8; ++i) shared.codes.squares[i / 4][i % 4][thread] = squares.at[i / 4][i % 4];
  }

  OXY_HOST_DEVICE static void encode(const Shared& shared, const ChunkJob& job, std::uint32_t thread, int turn) {
    const Order order(job, thread);
    const StatePresence has = presence(job);
    OXY_UNROLL
    for (int k = 0; k < 3; ++k) {
      if (!has.at[k] || order.first + turn * order.step >= job.count) continue;
      std::uint32_t largest = 0;
      for (std::uint32_t i = 0; i < 4; ++i) {
        const std::uint32_t of = shared.codes.largest[k][thread / 4 * 4 + i];
        largest = largest < of ? of : largest;
      }
      const GroupScale scale = group_scale(largest);
      if (thread % 4 == 0) job.scale[k][(order.first + turn * order.step) / kStateGroup] = scale.bits;
      RandomFour random;
      if (job.stochastic) {
        random.fill(job.seed, job.stream, static_cast<RoundingOperand>(k + 1), job.coefficients.value.step,
                    counter(job, order.first + turn * order.step));
      }
      OXY_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int at = order.first + (turn + i) * order.step;
        if (at >= job.count) break;
        std::uint8_t codes[4];
        for (int j = 0; j < 4; ++j) {
          const float value = shared.codes.value[k][i * 4 + j][thread];
          const std::uint32_t piece = job.stochastic ? random.piece(j, (turn + i) % 8) : kNearest;
          codes[j] = state_code(kFamily, k) == StateCode::Signed
                         ? encode_code<StateCode::Signed>(value, scale.inverse, piece)
                         : encode_code<StateCode::Unsigned>(value, scale.inverse, piece);
        }
        write_four(codes, job.count - at, static_cast<std::uint8_t*>(job.state[k]) + at);
      }
    }
  }

  // ---- statistics

  // The last part of the thread's section; a section that was cut has put its first part already.
  OXY_HOST_DEVICE static void finish(Shared& shared, Squares& squares, const ChunkJob& job, std::uint32_t thread) {
    const int section = static_cast<int>(thread / 4) * static_cast<int>(kSection);
    if (section >= job.count) return;
    const int split = job.split();
    const bool cut = split < job.count && split > section && split < section + static_cast<int>(kSection);
    // Threads whose lanes have nothing behind the cut never met it.
    if (cut && split + static_cast<int>(thread) % 4 * 4 >= job.count) squares.put(shared, thread / 4, thread);
    squares.put(shared, thread / 4 + (cut ? 1 : 0), thread);
  }

  template <class Block>
  OXY_HOST_DEVICE static void add_parts(const Block& block, Shared& shared, const ChunkJob& job) {
    const int sections = (job.count + static_cast<int>(kSection) - 1) / static_cast<int>(kSection);
    const int parts = sections + (job.split() < job.count ? 1 : 0);
    block.each([&](std::uint32_t thread) {
      if (thread >= 32) return;
      double sum = 0;
      for (int i = 0; i < parts; ++i) sum += static_cast<double>(shared.part[thread / 16][i][thread % 16]);
      shared.lane[thread / 16][thread % 16] = sum;
    });
  }
};

}  // namespace oxytorch::kernels::device
