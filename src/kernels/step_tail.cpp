#include "oxytorch/kernels/step_tail.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/step_tail_table.h"
#include "oxytorch/error.h"

namespace oxytorch::kernels {
namespace {

// What a chunk costs beside its elements, in elements: a call and a cold start of the streams.
constexpr std::int64_t kChunkOverhead = 256;

std::int64_t bytes_of(ElementType type, std::int64_t numel) {
  switch (type) {
    case ElementType::F32: return 4 * numel;
    case ElementType::Int8: return numel + 2 * state_groups(numel);
    default: return 2 * numel;
  }
}

const void* element_at(const void* array, ElementType type, std::int64_t index) {
  return static_cast<const unsigned char*>(array) + bytes_of(type, index);
}

std::int64_t chunks_of(std::int64_t numel) { return (numel + StepTailPlan::kChunk - 1) / StepTailPlan::kChunk; }

// Sums of chunks in runs of kRun, and the runs in order: what a device adds in parallel.
double add_in_runs(std::span<const double> of_chunks) {
  constexpr std::size_t kRun = StepTailPlan::kRun;
  double total = 0;
  for (std::size_t begin = 0; begin < of_chunks.size(); begin += kRun) {
    double run = 0;
    for (const double sum : of_chunks.subspan(begin, std::min(kRun, of_chunks.size() - begin))) run += sum;
    total += run;
  }
  return total;
}

// How many threads are of use for work of `cost` elements.
int slices_for(std::int64_t cost, const Parallel& parallel) {
  const std::int64_t useful = std::max<std::int64_t>(1, cost / std::max<std::int64_t>(1, parallel.grain));
  return static_cast<int>(std::clamp<std::int64_t>(parallel.run == nullptr ? 1 : parallel.threads, 1, useful));
}

void run_slices(const Parallel& parallel, int slices, void (*task)(void*, int), void* context) {
  slices == 1 ? task(context, 0) : parallel.run(parallel.pool, slices, task, context);
}

void check_types(const TailTensor& tensor, std::size_t index) {
  OXY_CHECK(tensor.numel >= 0, InvalidArgument, "tensor ", index, " of the step tail has ", tensor.numel,
            " elements; a count cannot be negative.");
  OXY_CHECK(tensor.numel == 0 || (tensor.rows > 0 && tensor.numel % tensor.rows == 0), InvalidArgument, "tensor ",
            index, " of the step tail has ", tensor.rows, " rows, which do not divide its ", tensor.numel,
            " elements; give 1 or a divisor.");
  for (const ElementType type : {tensor.type, tensor.grad_type, tensor.copy_type}) {
    OXY_CHECK(type != ElementType::Int8, InvalidType, "tensor ", index,
              " of the step tail names Int8 for its parameter, gradient or copy; that type is for state alone.");
  }
  OXY_CHECK(tensor.low_bits == nullptr || tensor.type == ElementType::BF16, InvalidType, "tensor ", index,
            " of the step tail has low_bits but is not BF16; only a BF16 parameter has them.");
}

}  // namespace

std::int64_t step_bytes(const TailTensor& tensor, const TailSettings& settings, bool measured) noexcept {
  const std::int64_t param = bytes_of(tensor.type, tensor.numel);
  const std::int64_t grad = bytes_of(tensor.grad_type, tensor.numel);
  std::int64_t weights = 2 * param;
  if (tensor.low_bits != nullptr) weights += 2 * tensor.numel;
  if (tensor.master != nullptr) weights = 8 * tensor.numel + param;
  std::int64_t bytes = weights + grad;
  for (const TailState& state : tensor.state) {
    if (state.data != nullptr) bytes += 2 * bytes_of(tensor.state_type, tensor.numel);
  }
  if (tensor.ema != nullptr) bytes += 8 * tensor.numel;
  if (tensor.copy != nullptr) bytes += bytes_of(tensor.copy_type, tensor.numel);
  if (measured) bytes += grad;
  if (settings.agc != 0) bytes += grad + (tensor.master != nullptr ? 4 * tensor.numel : weights / 2);
  if (settings.zero_grad) bytes += grad;
  return bytes;
}

double sum_squares(const void* data, ElementType type, std::int64_t numel, const Parallel& parallel) {
  OXY_CHECK(type != ElementType::Int8, InvalidType,
            "sum_squares() was given Int8, which has no value without a scale.");
  struct Run {
    const KernelTable& table;
    const void* data;
    ElementType type;
    std::int64_t numel;
    int slices;
    std::vector<double> sums;
    void slice(int index) {
      const auto chunks = static_cast<std::int64_t>(sums.size());
      for (std::int64_t i = chunks * index / slices; i < chunks * (index + 1) / slices; ++i) {
        const std::int64_t offset = i * StepTailPlan::kChunk;
        sums[static_cast<std::size_t>(i)] =
            table.sum_squares(element_at(data, type, offset), type, std::min(StepTailPlan::kChunk, numel - offset));
      }
    }
  };
  Run run{kernel_table(active_isa()),
          data,
          type,
          numel,
          slices_for(numel, parallel),
          std::vector<double>(static_cast<std::size_t>(chunks_of(numel)))};
  run_slices(parallel, run.slices, [](void* context, int index) { static_cast<Run*>(context)->slice(index); }, &run);
  return add_in_runs(run.sums);
}

struct StepTailPlan::Impl {
  struct Chunk {
    std::uint32_t tensor;
    std::int64_t offset;
    std::int64_t count;
  };

  std::vector<TailTensor> tensors;
  std::vector<Chunk> chunks;
  std::vector<std::int64_t> cost;        // running sum of the chunks' costs, one more than chunks
  std::vector<std::size_t> first_chunk;  // of each tensor, one more than tensors
  std::vector<double> chunk_sum;         // pass one; also update sums of pass two
  std::vector<double> chunk_param_sum;
  std::vector<double> grad_sums, param_sums, update_sums;
  std::vector<Coefficients> coefficients;  // of each tensor

  // Adaptive clipping. A segment is what a chunk holds of a row.
  std::vector<std::size_t> first_segment;  // of each chunk, one more than chunks
  std::vector<std::size_t> first_row;      // of each tensor, one more than tensors
  std::vector<double> segment_grad_sum, segment_weight_sum;
  std::vector<float> row_multipliers;

  // Arguments of the pass that is running, so that the parallel call carries one pointer.
  const KernelTable* table = nullptr;
  std::span<const TailGroup> groups;
  const TailSettings* settings = nullptr;
  std::span<const double> known;
  int slices = 1;

  // The chunks of slice `index` out of `slices`, of about equal cost.
  [[nodiscard]] std::pair<std::size_t, std::size_t> slice(int index) const {
    const auto boundary = [this](int i) {
      if (i == 0) return std::size_t{0};
      if (i == slices) return chunks.size();
      const std::int64_t target = cost.back() * i / slices;
      return static_cast<std::size_t>(std::lower_bound(cost.begin(), cost.end(), target) - cost.begin());
    };
    return {boundary(index), std::max(boundary(index), boundary(index + 1))};
  }

  void run(const Parallel& parallel, void (*task)(Impl&, std::size_t chunk), bool backwards = false) {
    struct Call {
      Impl& plan;
      void (*task)(Impl&, std::size_t);
      bool backwards;
    } call{*this, task, backwards};
    slices = slices_for(cost.back(), parallel);
    const auto run_slice = [](void* context, int index) {
      const Call& c = *static_cast<Call*>(context);
      const auto [begin, end] = c.plan.slice(index);
      for (std::size_t i = begin; i < end; ++i) {
        const std::size_t chunk = c.backwards ? begin + end - 1 - i : i;
        if (c.plan.tensors[c.plan.chunks[chunk].tensor].grad != nullptr) c.task(c.plan, chunk);
      }
    };
    run_slices(parallel, slices, run_slice, &call);
  }

  [[nodiscard]] bool is_known(std::size_t tensor) const { return !known.empty() && !(known[tensor] < 0); }

  static void measure_chunk(Impl& self, std::size_t i) {
    const Chunk& chunk = self.chunks[i];
    const TailTensor& tensor = self.tensors[chunk.tensor];
    if (self.is_known(chunk.tensor)) return;
    self.chunk_sum[i] =
        self.table->sum_squares(element_at(tensor.grad, tensor.grad_type, chunk.offset), tensor.grad_type, chunk.count);
  }

  static void measure_rows(Impl& self, std::size_t i) {
    const Chunk& chunk = self.chunks[i];
    const std::size_t segment = self.first_segment[i];
    self.table->row_sums(self.tensors[chunk.tensor], chunk.offset, chunk.count, &self.segment_grad_sum[segment],
                         &self.segment_weight_sum[segment]);
  }

  static void apply_chunk(Impl& self, std::size_t i) {
    const Chunk& chunk = self.chunks[i];
    const TailTensor& tensor = self.tensors[chunk.tensor];
    const TailGroup& group = self.groups[tensor.group];
    const TailSettings& settings = *self.settings;
    self.table->update({tensor, chunk.offset, chunk.count, self.coefficients[chunk.tensor], group.rule, group.nesterov,
                        settings.zero_grad, settings.stochastic, settings.seed,
                        settings.agc == 0 ? nullptr : &self.row_multipliers[self.first_row[chunk.tensor]],
                        settings.collect ? &self.chunk_param_sum[i] : nullptr,
                        settings.collect ? &self.chunk_sum[i] : nullptr});
  }

  static void zero_chunk(Impl& self, std::size_t i) {
    const Chunk& chunk = self.chunks[i];
    const TailTensor& tensor = self.tensors[chunk.tensor];
    std::memset(const_cast<void*>(element_at(tensor.grad, tensor.grad_type, chunk.offset)), 0,
                static_cast<std::size_t>(bytes_of(tensor.grad_type, chunk.count)));
  }

  // Row norms and from them what each row's gradient is multiplied by.
  void limit_rows(const Parallel& parallel) {
    segment_grad_sum.resize(first_segment.back());
    segment_weight_sum.resize(first_segment.back());
    row_multipliers.resize(first_row.back());
    run(parallel, measure_rows);
    const double multiplier = std::abs(settings->grad_multiplier);
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t].grad == nullptr || tensors[t].numel == 0) continue;
      const std::int64_t length = tensors[t].numel / tensors[t].rows;
      std::size_t segment = first_segment[first_chunk[t]];
      for (std::int64_t row = 0; row < tensors[t].rows; ++row) {
        // A row has a segment in each chunk that it touches.
        const std::int64_t touched = ((row + 1) * length - 1) / kChunk - row * length / kChunk + 1;
        double grad = 0;
        double weight = 0;
        for (std::int64_t k = 0; k < touched; ++k, ++segment) {
          grad += segment_grad_sum[segment];
          weight += segment_weight_sum[segment];
        }
        const double norm = std::sqrt(grad) * multiplier;
        const double most = settings->agc * std::max(std::sqrt(weight), settings->agc_eps);
        row_multipliers[first_row[t] + static_cast<std::size_t>(row)] =
            norm > most ? static_cast<float>(most / std::max(norm, 1e-6)) : 1.0F;
      }
    }
  }

  void sum_by_tensor(const std::vector<double>& of_chunks, std::vector<double>& of_tensors) const {
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      double sum = 0;
      if (tensors[t].grad != nullptr && is_known(t)) {
        sum = known[t];
      } else if (tensors[t].grad != nullptr) {
        sum = add_in_runs(std::span(of_chunks).subspan(first_chunk[t], first_chunk[t + 1] - first_chunk[t]));
      }
      of_tensors[t] = sum;
    }
  }
};

StepTailPlan::StepTailPlan(std::span<const TailTensor> tensors) : impl_(std::make_unique<Impl>()) {
  Impl& plan = *impl_;
  plan.tensors.assign(tensors.begin(), tensors.end());
  plan.cost.push_back(0);
  plan.first_segment.push_back(0);
  plan.first_row.push_back(0);
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    check_types(tensors[t], t);
    plan.first_chunk.push_back(plan.chunks.size());
    plan.first_row.push_back(plan.first_row.back() + static_cast<std::size_t>(tensors[t].rows));
    const std::int64_t length = tensors[t].numel / std::max<std::int64_t>(tensors[t].rows, 1);
    for (std::int64_t offset = 0; offset < tensors[t].numel; offset += kChunk) {
      const std::int64_t count = std::min(kChunk, tensors[t].numel - offset);
      const std::int64_t segments = (offset + count - 1) / length - offset / length + 1;
      plan.chunks.push_back({static_cast<std::uint32_t>(t), offset, count});
      plan.cost.push_back(plan.cost.back() + count + kChunkOverhead);
      plan.first_segment.push_back(plan.first_segment.back() + static_cast<std::size_t>(segments));
    }
  }
  plan.first_chunk.push_back(plan.chunks.size());
  plan.chunk_sum.resize(plan.chunks.size());
  plan.chunk_param_sum.resize(plan.chunks.size());
  plan.grad_sums.resize(tensors.size());
  plan.param_sums.resize(tensors.size());
  plan.update_sums.resize(tensors.size());
  plan.coefficients.resize(tensors.size());
}

StepTailPlan::~StepTailPlan() = default;
StepTailPlan::StepTailPlan(StepTailPlan&&) noexcept = default;
StepTailPlan& StepTailPlan::operator=(StepTailPlan&&) noexcept = default;

std::span<TailTensor> StepTailPlan::tensors() noexcept { return impl_->tensors; }

double StepTailPlan::measure(const Parallel& parallel, std::span<const double> known) {
  Impl& plan = *impl_;
  OXY_ASSERT(known.empty() || known.size() == plan.tensors.size(), known.size(), " known sums for ",
             plan.tensors.size(), " tensors");
  plan.known = known;
  bool all_known = true;
  for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
    all_known = all_known && (plan.tensors[t].grad == nullptr || plan.is_known(t));
  }
  plan.table = &kernel_table(active_isa());
  if (!all_known) plan.run(parallel, Impl::measure_chunk);
  plan.sum_by_tensor(plan.chunk_sum, plan.grad_sums);
  plan.known = {};
  double total = 0;
  for (double sum : plan.grad_sums) total += sum;
  return total;
}

void StepTailPlan::apply(std::span<const TailGroup> groups, const TailSettings& settings, const Parallel& parallel) {
  Impl& plan = *impl_;
  std::size_t previous = plan.tensors.size();
  double previous_step = -1;
  for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
    TailTensor& tensor = plan.tensors[t];
    if (tensor.grad == nullptr) continue;
    OXY_ASSERT(tensor.group < groups.size(), "tensor ", t, " names group ", tensor.group, " of ", groups.size());
    if (tensor.step != nullptr) *tensor.step += 1.0F;
    const double step = tensor.step == nullptr ? 0.0 : static_cast<double>(*tensor.step);
    // Parameters of a group mostly stand at the same step: two powers for all of them, not for each.
    const bool same = previous < plan.tensors.size() && plan.tensors[previous].group == tensor.group &&
                      previous_step == step && !tensor.first && !plan.tensors[previous].first;
    plan.coefficients[t] =
        same ? plan.coefficients[previous]
             : device::coefficients_of(groups[tensor.group], groups[tensor.group].lr, settings.grad_multiplier,
                                       settings.clip_value, settings.ema_decay, step, tensor.first);
    previous = t;
    previous_step = step;
  }
  plan.table = &kernel_table(active_isa());
  plan.groups = groups;
  plan.settings = &settings;
  if (settings.agc != 0) plan.limit_rows(parallel);
  // From the end: what pass one read last is still in the cache.
  plan.run(parallel, Impl::apply_chunk, true);
  for (TailTensor& tensor : plan.tensors) {
    if (tensor.grad != nullptr) tensor.first = false;
  }
  if (settings.collect) {
    plan.sum_by_tensor(plan.chunk_param_sum, plan.param_sums);
    plan.sum_by_tensor(plan.chunk_sum, plan.update_sums);
  }
}

void StepTailPlan::zero_gradients(const Parallel& parallel) { impl_->run(parallel, Impl::zero_chunk); }

std::span<const double> StepTailPlan::grad_sum_squares() const noexcept { return impl_->grad_sums; }
std::span<const double> StepTailPlan::param_sum_squares() const noexcept { return impl_->param_sums; }
std::span<const double> StepTailPlan::update_sum_squares() const noexcept { return impl_->update_sums; }

}  // namespace oxytorch::kernels
