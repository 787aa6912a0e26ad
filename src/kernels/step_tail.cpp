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
// Below this much work a second thread costs more than it brings.
constexpr std::int64_t kMinimumPerThread = 24 * 1024;

std::int64_t size_of(ElementType type) { return type == ElementType::F32 ? 4 : 2; }

template <class T>
T* advance(T* pointer, std::int64_t bytes) {
  return pointer == nullptr ? nullptr : reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(pointer) + bytes);
}
void* advance(void* pointer, std::int64_t bytes) { return advance(static_cast<unsigned char*>(pointer), bytes); }

}  // namespace

std::int64_t step_bytes(const TailTensor& tensor, const TailSettings& settings, bool measured) noexcept {
  const std::int64_t element = size_of(tensor.type);
  std::int64_t bytes = 3 * element;  // parameter read and written, gradient read
  for (const void* state : {tensor.state0, tensor.state1, tensor.state2}) {
    if (state != nullptr) bytes += 2 * size_of(tensor.state_type);
  }
  if (tensor.ema != nullptr) bytes += 8;
  if (measured) bytes += element;
  if (settings.zero_grad) bytes += element;
  return bytes * tensor.numel;
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
  bool collected = false;

  // Arguments of the pass that is running, so that the parallel call carries one pointer.
  const KernelTable* table = nullptr;
  std::span<const TailGroup> groups;
  const TailSettings* settings = nullptr;
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

  void run(const Parallel& parallel, void (*task)(void*, int)) {
    const std::int64_t useful = std::max<std::int64_t>(1, cost.back() / kMinimumPerThread);
    slices = static_cast<int>(std::min<std::int64_t>(parallel.run == nullptr ? 1 : parallel.threads, useful));
    if (slices <= 1) {
      slices = 1;
      task(this, 0);
    } else {
      parallel.run(parallel.pool, slices, task, this);
    }
  }

  static void measure_slice(void* context, int index) {
    auto& self = *static_cast<Impl*>(context);
    const auto [begin, end] = self.slice(index);
    for (std::size_t i = begin; i < end; ++i) {
      const Chunk& chunk = self.chunks[i];
      const TailTensor& tensor = self.tensors[chunk.tensor];
      self.chunk_sum[i] = tensor.grad == nullptr
                              ? 0.0
                              : self.table->sum_squares(advance(tensor.grad, chunk.offset * size_of(tensor.type)),
                                                        tensor.type, chunk.count);
    }
  }

  // From the end: what pass one read last is still in the cache.
  static void apply_slice(void* context, int index) {
    auto& self = *static_cast<Impl*>(context);
    const auto [begin, end] = self.slice(index);
    for (std::size_t i = end; i-- > begin;) {
      const Chunk& chunk = self.chunks[i];
      const TailTensor& tensor = self.tensors[chunk.tensor];
      if (tensor.grad == nullptr) continue;
      const TailGroup& group = self.groups[tensor.group];
      const std::int64_t at = chunk.offset * size_of(tensor.type);
      const std::int64_t state_at = chunk.offset * size_of(tensor.state_type);
      const bool collect = self.settings->collect;
      self.table->update({advance(tensor.param, at), advance(tensor.grad, at), advance(tensor.state0, state_at),
                          advance(tensor.state1, state_at), advance(tensor.state2, state_at),
                          tensor.ema == nullptr ? nullptr : tensor.ema + chunk.offset, chunk.count,
                          &self.coefficients[chunk.tensor], group.rule, tensor.type, tensor.state_type, group.nesterov,
                          self.settings->zero_grad, collect ? &self.chunk_param_sum[i] : nullptr,
                          collect ? &self.chunk_sum[i] : nullptr});
    }
  }

  static void zero_slice(void* context, int index) {
    auto& self = *static_cast<Impl*>(context);
    const auto [begin, end] = self.slice(index);
    for (std::size_t i = begin; i < end; ++i) {
      const Chunk& chunk = self.chunks[i];
      const TailTensor& tensor = self.tensors[chunk.tensor];
      const std::int64_t element = size_of(tensor.type);
      if (tensor.grad != nullptr) {
        std::memset(advance(tensor.grad, chunk.offset * element), 0, static_cast<std::size_t>(chunk.count * element));
      }
    }
  }

  void sum_by_tensor(const std::vector<double>& of_chunks, std::vector<double>& of_tensors) const {
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      double sum = 0;
      if (tensors[t].grad != nullptr) {
        for (std::size_t i = first_chunk[t]; i < first_chunk[t + 1]; ++i) sum += of_chunks[i];
      }
      of_tensors[t] = sum;
    }
  }

  static Coefficients coefficients_of(const TailGroup& group, const TailSettings& settings, double step, bool first) {
    Coefficients c{};
    c.grad_multiplier = static_cast<float>(group.maximize ? -settings.grad_multiplier : settings.grad_multiplier);
    c.weight_decay = static_cast<float>(group.weight_decay);
    c.ema_weight = static_cast<float>(1.0 - settings.ema_decay);
    if (group.rule == Rule::Sgd) {
      c.step_size = static_cast<float>(group.lr);
      c.momentum = static_cast<float>(group.momentum);
      c.one_minus_dampening = first ? 1.0F : static_cast<float>(1.0 - group.dampening);
      return c;
    }
    c.decay = static_cast<float>(group.lr * group.weight_decay);
    c.one_minus_beta1 = static_cast<float>(1.0 - group.beta1);
    c.beta2 = static_cast<float>(group.beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - group.beta2);
    c.eps = static_cast<float>(group.eps);
    c.step_size = static_cast<float>(group.lr / (1.0 - std::pow(group.beta1, step)));
    c.inv_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(group.beta2, step)));
    return c;
  }
};

StepTailPlan::StepTailPlan(std::span<const TailTensor> tensors) : impl_(std::make_unique<Impl>()) {
  Impl& plan = *impl_;
  plan.tensors.assign(tensors.begin(), tensors.end());
  plan.cost.push_back(0);
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    OXY_CHECK(tensors[t].numel >= 0, InvalidArgument, "tensor ", t, " of the step tail has ", tensors[t].numel,
              " elements; a count cannot be negative.");
    plan.first_chunk.push_back(plan.chunks.size());
    for (std::int64_t offset = 0; offset < tensors[t].numel; offset += kChunk) {
      const std::int64_t count = std::min(kChunk, tensors[t].numel - offset);
      plan.chunks.push_back({static_cast<std::uint32_t>(t), offset, count});
      plan.cost.push_back(plan.cost.back() + count + kChunkOverhead);
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

double StepTailPlan::measure(const Parallel& parallel) {
  impl_->table = &kernel_table(active_isa());
  impl_->run(parallel, Impl::measure_slice);
  impl_->sum_by_tensor(impl_->chunk_sum, impl_->grad_sums);
  double total = 0;
  for (double sum : impl_->grad_sums) total += sum;
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
        same ? plan.coefficients[previous] : Impl::coefficients_of(groups[tensor.group], settings, step, tensor.first);
    previous = t;
    previous_step = step;
  }
  plan.table = &kernel_table(active_isa());
  plan.groups = groups;
  plan.settings = &settings;
  plan.run(parallel, Impl::apply_slice);
  for (TailTensor& tensor : plan.tensors) {
    if (tensor.grad != nullptr) tensor.first = false;
  }
  if (settings.collect) {
    plan.sum_by_tensor(plan.chunk_param_sum, plan.param_sums);
    plan.sum_by_tensor(plan.chunk_sum, plan.update_sums);
  }
}

void StepTailPlan::zero_gradients(const Parallel& parallel) { impl_->run(parallel, Impl::zero_slice); }

std::span<const double> StepTailPlan::grad_sum_squares() const noexcept { return impl_->grad_sums; }
std::span<const double> StepTailPlan::param_sum_squares() const noexcept { return impl_->param_sums; }
std::span<const double> StepTailPlan::update_sum_squares() const noexcept { return impl_->update_sums; }

}  // namespace oxytorch::kernels
