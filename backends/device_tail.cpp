#include "backends/device_tail.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>
#include <vector>

#include "backends/last_error.h"
#include "kernels/device/elements.h"

namespace oxytorch::backend {
namespace {

namespace device = kernels::device;
using device::TailKernel;

constexpr std::uint64_t kAlignment = 64;

std::uint32_t blocks_for(std::uint64_t work, std::uint32_t each) {
  return static_cast<std::uint32_t>((work + each - 1) / each);
}

oxy_status refuse_argument(const char* call, const char* what) {
  return fail(OXY_INVALID_ARGUMENT, "%s: %s", call, what);
}

// What a tensor must be when its tail is made, and stay.
oxy_status check_shape(const oxy_tail_tensor& t, std::uint32_t index) {
  if (t.numel < 0) {
    return fail(OXY_INVALID_ARGUMENT, "tensor %u of the step tail has %" PRId64 " elements; a count cannot be negative",
                index, t.numel);
  }
  if (t.numel > 0 && (t.rows <= 0 || t.numel % t.rows != 0)) {
    return fail(OXY_INVALID_ARGUMENT,
                "tensor %u of the step tail has %" PRId64 " rows, which do not divide its %" PRId64
                " elements; give 1 or a divisor",
                index, t.rows, t.numel);
  }
  for (const oxy_element type : {t.type, t.grad_type, t.copy_type}) {
    if (type > OXY_F16) {
      return fail(OXY_INVALID_ARGUMENT,
                  "tensor %u of the step tail names type %u for its parameter, gradient or copy; it must be OXY_F32, "
                  "OXY_BF16 or OXY_F16",
                  index, type);
    }
  }
  if (t.state_type > OXY_INT8) {
    return fail(OXY_INVALID_ARGUMENT, "tensor %u of the step tail names type %u for its state; there is no such type",
                index, t.state_type);
  }
  if (t.low_bits != nullptr && t.type != OXY_BF16) {
    return fail(OXY_INVALID_ARGUMENT,
                "tensor %u of the step tail has low_bits but is not OXY_BF16; only such a parameter has them", index);
  }
  return OXY_OK;
}

bool is_aligned(const void* pointer, std::size_t width) {
  return reinterpret_cast<std::uintptr_t>(pointer) % width == 0;
}
std::size_t width_of(oxy_element type) { return static_cast<std::size_t>(device::bytes_of(type, 1)); }

bool needs_state(oxy_tail_rule rule, int index) {
  switch (rule) {
    case OXY_RULE_ADAMW:
    case OXY_RULE_ADAM: return index < 2;
    case OXY_RULE_LION: return index == 0;
    case OXY_RULE_ADAGRAD:
    case OXY_RULE_RMSPROP: return index == 1;
    default: return false;
  }
}

// What the kernels will read and write of a tensor that takes part.
oxy_status check_pointers(const oxy_tail_tensor& t, std::uint32_t index, const oxy_tail_group& group) {
  if (t.grad == nullptr || t.numel == 0) return OXY_OK;
  if (t.param == nullptr) {
    return fail(OXY_INVALID_ARGUMENT, "tensor %u of the step tail has a gradient but no parameter", index);
  }
  for (int k = 0; k < 3; ++k) {
    if (t.state[k] == nullptr && needs_state(group.rule, k)) {
      return fail(OXY_INVALID_ARGUMENT, "tensor %u of the step tail lacks state[%d], which rule %u keeps", index, k,
                  group.rule);
    }
    if (t.state[k] != nullptr && t.state_type == OXY_INT8 && t.scale[k] == nullptr) {
      return fail(OXY_INVALID_ARGUMENT, "tensor %u of the step tail has 8-bit state[%d] without its scales", index, k);
    }
  }
  const bool aligned = is_aligned(t.param, width_of(t.type)) && is_aligned(t.grad, width_of(t.grad_type)) &&
                       is_aligned(t.master, 4) && is_aligned(t.ema, 4) && is_aligned(t.step, 4) &&
                       is_aligned(t.copy, width_of(t.copy_type)) &&
                       std::all_of(std::begin(t.state), std::end(t.state),
                                   [&](const void* state) { return is_aligned(state, width_of(t.state_type)); });
  return aligned ? OXY_OK
                 : fail(OXY_INVALID_ARGUMENT,
                        "tensor %u of the step tail has an address that is no multiple of its element's size", index);
}

oxy_status check_group(const oxy_tail_group& group, std::uint32_t index) {
  if (group.rule > OXY_RULE_RMSPROP) {
    return fail(OXY_INVALID_ARGUMENT, "group %u of the step tail names rule %u; there is no such rule", index,
                group.rule);
  }
  if (group.lr_tensor != nullptr && group.lr_type != OXY_F32 && group.lr_type != OXY_F64) {
    return fail(OXY_INVALID_ARGUMENT,
                "group %u of the step tail has a learning-rate tensor of type %u; it must be OXY_F32 or OXY_F64", index,
                group.lr_type);
  }
  return OXY_OK;
}

oxy_status check_settings(const oxy_tail_settings* settings, const char* call) {
  if (settings == nullptr) return refuse_argument(call, "settings is NULL");
  if (settings->size < sizeof(*settings)) {
    return fail(OXY_INVALID_ARGUMENT, "%s: settings has size %u, version 1 has %zu", call, settings->size,
                sizeof(*settings));
  }
  return OXY_OK;
}

oxy_status check_results(const oxy_tail_results* results, const char* call) {
  if (results == nullptr) return refuse_argument(call, "results is NULL");
  if (results->size < sizeof(*results)) {
    return fail(OXY_INVALID_ARGUMENT, "%s: results has size %u, version 1 has %zu", call, results->size,
                sizeof(*results));
  }
  return OXY_OK;
}

device::Family family_of(oxy_tail_rule rule) {
  switch (rule) {
    case OXY_RULE_SGD: return device::Family::Sgd;
    case OXY_RULE_LION: return device::Family::Lion;
    case OXY_RULE_ADAGRAD: return device::Family::Adagrad;
    case OXY_RULE_RMSPROP: return device::Family::RmsProp;
    default: return device::Family::Adam;
  }
}

device::Layout layout_of(const oxy_tail_tensor& t) {
  const bool has_state = std::any_of(std::begin(t.state), std::end(t.state), [](void* s) { return s != nullptr; });
  if (has_state && t.state_type == OXY_INT8) return device::Layout::Coded;
  const bool plain =
      t.type == OXY_F32 && t.grad_type == OXY_F32 && t.master == nullptr && (!has_state || t.state_type == OXY_F32);
  return plain ? device::Layout::Plain : device::Layout::Narrow;
}

device::TailRound round_of(const oxy_tail_settings& s) {
  return {s.flags,     0,      s.grad_divisor, s.clip_norm, s.clip_value, s.agc,       s.agc_eps,
          s.ema_decay, s.seed, s.grad_scale,   s.found_inf, s.skip,       s.norm_limit};
}

}  // namespace
}  // namespace oxytorch::backend

/// The tables of one tail. Host copies say what the device holds.
struct oxy_tail_s {
  std::unique_ptr<oxytorch::backend::TailDevice> way;
  std::vector<oxytorch::kernels::device::TailRecord> records;
  std::vector<void*> grads;
  std::vector<oxy_tail_group> groups;
  oxytorch::kernels::device::TailTables tables{};
  std::vector<void*> owned;    // device memory
  std::uint64_t segments = 0;  // of rows within chunks
  std::uint32_t places = 0;    // one more than the largest stream
  std::uint32_t group_room = 0;
  bool configured = false;
};

namespace oxytorch::backend {
namespace {

// Lays arrays out in one allocation.
class Layouter {
 public:
  template <class T>
  void add(T*& array, std::uint64_t count) {
    parts_.push_back({reinterpret_cast<void**>(&array), bytes_});
    bytes_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }
  oxy_status allocate(oxy_tail_s& tail) {
    if (bytes_ == 0) return OXY_OK;
    tail.owned.reserve(tail.owned.size() + 1);
    void* base = nullptr;
    if (const oxy_status status = tail.way->allocate(bytes_, &base); status != OXY_OK) return status;
    tail.owned.push_back(base);
    for (const Part& part : parts_) *part.array = static_cast<unsigned char*>(base) + part.offset;
    return OXY_OK;
  }

 private:
  struct Part {
    void** array;
    std::uint64_t offset;
  };
  std::vector<Part> parts_;
  std::uint64_t bytes_ = 0;
};

template <class Arguments>
oxy_status launch(oxy_tail_s& tail, TailKernel kernel, std::uint64_t blocks, const Arguments& arguments,
                  oxy_queue queue) {
  if (blocks == 0) return OXY_OK;
  return tail.way->launch(kernel, static_cast<std::uint32_t>(blocks), &arguments, sizeof(arguments), queue);
}

oxy_status upload(oxy_tail_s& tail, oxy_queue queue, void* to, const void* from, std::uint64_t bytes) {
  device::UploadArguments arguments;
  for (std::uint64_t done = 0; done < bytes; done += device::kUploadBytes) {
    const std::uint64_t part = std::min<std::uint64_t>(device::kUploadBytes, bytes - done);
    arguments.to = reinterpret_cast<std::uint32_t*>(static_cast<unsigned char*>(to) + done);
    arguments.words = static_cast<std::uint32_t>(part / 4);
    std::memcpy(arguments.payload, static_cast<const unsigned char*>(from) + done, part);
    if (const oxy_status status = launch(tail, TailKernel::Upload, 1, arguments, queue); status != OXY_OK) {
      return status;
    }
  }
  return OXY_OK;
}

// Makes the device's array equal to `now`, of which `held` is on the device: each run of elements that differ.
template <class T>
oxy_status follow(oxy_tail_s& tail, oxy_queue queue, T* array, std::vector<T>& held, const std::vector<T>& now,
                  bool all) {
  static_assert(sizeof(T) % 4 == 0);
  const auto same = [&](std::size_t i) { return !all && std::memcmp(&held[i], &now[i], sizeof(T)) == 0; };
  for (std::size_t i = 0; i < now.size();) {
    if (same(i)) {
      ++i;
      continue;
    }
    std::size_t end = i + 1;
    while (end < now.size() && !same(end)) ++end;
    if (const oxy_status status = upload(tail, queue, array + i, &now[i], (end - i) * sizeof(T)); status != OXY_OK) {
      return status;
    }
    std::memcpy(&held[i], &now[i], (end - i) * sizeof(T));
    i = end;
  }
  return OXY_OK;
}

// Memory that only adaptive clipping needs.
oxy_status make_rows(oxy_tail_s& tail) {
  if (tail.tables.row_multipliers != nullptr) return OXY_OK;
  Layouter memory;
  memory.add(tail.tables.segment_grad_sums, tail.segments);
  memory.add(tail.tables.segment_weight_sums, tail.segments);
  memory.add(tail.tables.row_multipliers, tail.tables.rows);
  return memory.allocate(tail);
}

oxy_status make_groups(oxy_tail_s& tail, std::uint32_t count) {
  if (count <= tail.group_room) return OXY_OK;
  // The former array stays until the tail goes: work that is under way may read it.
  Layouter memory;
  memory.add(tail.tables.groups, count);
  if (const oxy_status status = memory.allocate(tail); status != OXY_OK) return status;
  tail.group_room = count;
  tail.groups.clear();
  return OXY_OK;
}

oxy_status fill_tables(oxy_tail_s& tail, const oxy_tail_tensor* tensors, std::uint32_t count) {
  device::TailTables& tables = tail.tables;
  std::uint64_t chunks = 0;
  std::uint32_t groups = 0;
  tail.records.resize(count);
  tail.grads.assign(count, nullptr);
  for (std::uint32_t i = 0; i < count; ++i) {
    const oxy_tail_tensor& t = tensors[i];
    if (const oxy_status status = check_shape(t, i); status != OXY_OK) return status;
    device::TailRecord& record = tail.records[i];
    std::memset(static_cast<void*>(&record), 0, sizeof(record));
    record.tensor = t;
    record.tensor.grad = nullptr;
    record.first_chunk = static_cast<std::uint32_t>(chunks);
    record.chunks = static_cast<std::uint32_t>((t.numel + device::kChunk - 1) / device::kChunk);
    record.first_row = tables.rows;
    chunks += record.chunks;
    tables.rows += t.numel == 0 ? 0 : static_cast<std::uint64_t>(t.rows);
    groups = std::max(groups, t.group + 1);
  }
  if (chunks > INT32_MAX) {
    return fail(OXY_INVALID_ARGUMENT,
                "the tensors of the step tail have %" PRIu64 " chunks, over what one launch takes", chunks);
  }
  tables.tensor_count = count;
  tables.chunk_count = static_cast<std::uint32_t>(chunks);
  tail.segments = tables.rows + chunks;
  Layouter memory;
  memory.add(tables.records, count);
  memory.add(tables.grads, count);
  memory.add(tables.chunks, chunks);
  memory.add(tables.coefficients, count);
  memory.add(tables.applied_epoch, count);
  memory.add(tables.chunk_sums, chunks);
  memory.add(tables.chunk_param_sums, chunks);
  if (const oxy_status status = memory.allocate(tail); status != OXY_OK) return status;
  if (const oxy_status status = make_groups(tail, groups); status != OXY_OK) return status;
  if (const oxy_status status =
          upload(tail, nullptr, tables.records, tail.records.data(), count * sizeof(device::TailRecord));
      status != OXY_OK) {
    return status;
  }
  return launch(tail, TailKernel::Tabulate, count, device::TableArguments{tables}, nullptr);
}

oxy_status release(oxy_tail_s& tail) {
  oxy_status first = OXY_OK;
  for (void* memory : tail.owned) {
    const oxy_status status = tail.way->free(memory);
    if (first == OXY_OK) first = status;
  }
  tail.owned.clear();
  return first;
}

oxy_status check_fixed(const oxy_tail_tensor& was, const oxy_tail_tensor& is, std::uint32_t index) {
  if (is.numel != was.numel || is.rows != was.rows || is.type != was.type || is.state_type != was.state_type ||
      is.copy_type != was.copy_type) {
    return fail(OXY_INVALID_ARGUMENT,
                "tensor %u of the step tail has other sizes or types than when the tail was made (%" PRId64
                " elements then, %" PRId64 " now); make a new one",
                index, was.numel, is.numel);
  }
  return OXY_OK;
}

// The record that `now` asks for.
device::TailRecord renewed(const device::TailRecord& was, const oxy_tail_tensor& now, const oxy_tail_group& group,
                           bool configured) {
  device::TailRecord record = was;
  record.tensor = now;
  record.tensor.grad = nullptr;
  // A new buffer, or the first sight of it: what `first` says counts from here on.
  if (!configured || now.state[0] != was.tensor.state[0]) {
    ++record.epoch;
  } else {
    record.tensor.first = was.tensor.first;
  }
  record.family = family_of(group.rule);
  record.layout = layout_of(now);
  return record;
}

// The families and layouts that take part, as bits of apply_kernel().
std::uint32_t variants(const oxy_tail_s& tail, std::uint32_t flags) {
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < tail.records.size(); ++i) {
    if (tail.grads[i] == nullptr || tail.records[i].chunks == 0) continue;
    const auto kernel = device::apply_kernel(tail.records[i].family, device::layout_in(tail.records[i].layout, flags));
    bits |= 1U << (static_cast<std::uint32_t>(kernel) - static_cast<std::uint32_t>(TailKernel::ApplyAdamPlain));
  }
  return bits;
}

// Nothing may be thrown across the border (C6).
template <class Call>
oxy_status guarded(Call call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return fail(OXY_OUT_OF_MEMORY, "no host memory left for the tables of a step tail");
  } catch (const std::exception& error) {
    return fail(OXY_INTERNAL, "the step tail failed: %s", error.what());
  }
}

}  // namespace

oxy_status create_tail(std::unique_ptr<TailDevice> device, const oxy_tail_tensor* tensors, std::uint32_t count,
                       oxy_tail* tail) {
  if (tail == nullptr) return refuse_argument("tail_create", "needs somewhere to write the tail, got NULL");
  *tail = nullptr;
  if (tensors == nullptr && count > 0) return refuse_argument("tail_create", "tensors is NULL");
  return guarded([&]() -> oxy_status {
    auto made = std::make_unique<oxy_tail_s>();
    made->way = std::move(device);
    const oxy_status status = fill_tables(*made, tensors, count);
    if (status != OXY_OK) {
      release(*made);
      return status;
    }
    *tail = made.release();
    return OXY_OK;
  });
}

oxy_status destroy_tail(oxy_tail tail) {
  if (tail == nullptr) return refuse_argument("tail_destroy", "tail is NULL");
  const std::unique_ptr<oxy_tail_s> owned(tail);
  return guarded([&]() -> oxy_status { return release(*owned); });
}

oxy_status configure_tail(oxy_tail tail, oxy_queue queue, const oxy_tail_tensor* tensors, std::uint32_t count,
                          const oxy_tail_group* groups, std::uint32_t group_count) {
  if (tail == nullptr) return refuse_argument("tail_configure", "tail is NULL");
  if (count != tail->tables.tensor_count) {
    return fail(OXY_INVALID_ARGUMENT, "tail_configure: %u tensors for a step tail that was made for %u", count,
                tail->tables.tensor_count);
  }
  if ((tensors == nullptr && count > 0) || (groups == nullptr && group_count > 0)) {
    return refuse_argument("tail_configure", "tensors or groups is NULL");
  }
  return guarded([&]() -> oxy_status {
    for (std::uint32_t i = 0; i < group_count; ++i) {
      if (const oxy_status status = check_group(groups[i], i); status != OXY_OK) return status;
    }
    std::vector<device::TailRecord> records(count);
    std::vector<void*> grads(count);
    std::uint32_t places = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      const oxy_tail_tensor& t = tensors[i];
      if (t.group >= group_count) {
        return fail(OXY_INVALID_ARGUMENT, "tensor %u of the step tail names group %u of %u", i, t.group, group_count);
      }
      oxy_status status = check_shape(t, i);
      if (status == OXY_OK) status = check_fixed(tail->records[i].tensor, t, i);
      if (status == OXY_OK) status = check_pointers(t, i, groups[t.group]);
      if (status != OXY_OK) return status;
      records[i] = renewed(tail->records[i], t, groups[t.group], tail->configured);
      grads[i] = t.grad;
      places = std::max(places, t.stream + 1);
    }
    const std::vector<oxy_tail_group> wanted(groups, groups + group_count);
    oxy_status status = make_groups(*tail, group_count);
    // What a failure leaves half written is written again.
    const bool all = !std::exchange(tail->configured, false);
    const bool other_groups = tail->groups.size() != wanted.size();
    tail->groups.resize(wanted.size());
    tail->tables.group_count = group_count;
    tail->places = places;
    if (status == OXY_OK) status = follow(*tail, queue, tail->tables.groups, tail->groups, wanted, all || other_groups);
    if (status == OXY_OK) status = follow(*tail, queue, tail->tables.records, tail->records, records, all);
    if (status == OXY_OK) status = follow(*tail, queue, tail->tables.grads, tail->grads, grads, all);
    tail->configured = status == OXY_OK;
    return status;
  });
}

oxy_status measure_tail(oxy_tail tail, oxy_queue queue, double* sums) {
  if (tail == nullptr) return refuse_argument("tail_measure", "tail is NULL");
  if (!tail->configured) return fail(OXY_INVALID_STATE, "tail_measure before tail_configure");
  if (tail->tables.tensor_count == 0) return OXY_OK;
  if (sums == nullptr) return refuse_argument("tail_measure", "sums is NULL");
  constexpr std::uint32_t kWarps = device::kThreads / 32;
  const oxy_status status = launch(*tail, TailKernel::Measure, blocks_for(tail->tables.chunk_count, kWarps),
                                   device::TableArguments{tail->tables}, queue);
  if (status != OXY_OK) return status;
  return launch(*tail, TailKernel::SumGradients, tail->tables.tensor_count, device::SumArguments{tail->tables, sums},
                queue);
}

oxy_status judge_tail(oxy_tail tail, oxy_queue queue, const double* sums, const oxy_tail_settings* settings,
                      const oxy_tail_results* results, oxy_tail_verdict* verdict) {
  if (tail == nullptr) return refuse_argument("tail_judge", "tail is NULL");
  if (const oxy_status status = check_settings(settings, "tail_judge"); status != OXY_OK) return status;
  if (const oxy_status status = check_results(results, "tail_judge"); status != OXY_OK) return status;
  if (verdict == nullptr) return refuse_argument("tail_judge", "verdict is NULL");
  if (sums == nullptr && results->count > 0) return refuse_argument("tail_judge", "sums is NULL");
  if (!(settings->grad_divisor > 0) || !std::isfinite(settings->grad_divisor)) {
    return fail(OXY_INVALID_ARGUMENT, "tail_judge: grad_divisor is %g; give a finite number above 0",
                settings->grad_divisor);
  }
  return launch(*tail, TailKernel::Judge, 1, device::JudgeArguments{sums, round_of(*settings), *results, verdict},
                queue);
}

oxy_status apply_tail(oxy_tail tail, oxy_queue queue, const oxy_tail_verdict* verdict,
                      const oxy_tail_settings* settings, const oxy_tail_results* results) {
  if (tail == nullptr) return refuse_argument("tail_apply", "tail is NULL");
  if (!tail->configured) return fail(OXY_INVALID_STATE, "tail_apply before tail_configure");
  if (verdict == nullptr) return refuse_argument("tail_apply", "verdict is NULL");
  if (const oxy_status status = check_settings(settings, "tail_apply"); status != OXY_OK) return status;
  if (const oxy_status status = check_results(results, "tail_apply"); status != OXY_OK) return status;
  const bool collects = (settings->flags & OXY_TAIL_COLLECT) != 0;
  const bool writes_norms = results->param_norms != nullptr || results->update_norms != nullptr;
  if (collects && writes_norms && results->count < tail->places) {
    return fail(OXY_INVALID_ARGUMENT, "tail_apply: results have %u places, the largest stream is %u", results->count,
                tail->places - 1);
  }
  return guarded([&]() -> oxy_status {
    if (settings->agc != 0) {
      if (const oxy_status status = make_rows(*tail); status != OXY_OK) return status;
    }
    const device::ApplyArguments arguments{tail->tables, round_of(*settings), verdict, results->param_norms,
                                           results->update_norms};
    const auto run = [&](TailKernel kernel, std::uint64_t blocks) {
      return launch(*tail, kernel, blocks, arguments, queue);
    };
    oxy_status status = run(TailKernel::Prepare, blocks_for(tail->tables.tensor_count, device::kThreads));
    if (settings->agc != 0) {
      if (status == OXY_OK) status = run(TailKernel::MeasureRows, tail->tables.chunk_count);
      if (status == OXY_OK) status = run(TailKernel::LimitRows, blocks_for(tail->tables.rows, device::kThreads));
    }
    const std::uint32_t present = variants(*tail, settings->flags);
    for (std::uint32_t i = 0; present >> i != 0; ++i) {
      if ((present >> i & 1) == 0 || status != OXY_OK) continue;
      status = run(static_cast<TailKernel>(static_cast<std::uint32_t>(TailKernel::ApplyAdamPlain) + i),
                   tail->tables.chunk_count);
    }
    if (status == OXY_OK && collects && writes_norms) status = run(TailKernel::Collect, tail->tables.tensor_count);
    return status;
  });
}

}  // namespace oxytorch::backend
