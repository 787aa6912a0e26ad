#include "tune/strategies.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/types.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>

#include "generators/generators.h"
#include "oxytorch/accelerator.h"
#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/host.h"
#include "oxytorch/memory.h"
#include "oxytorch/ops/packed_weights.h"
#include "oxytorch/system.h"
#include "oxytorch/tune/deferred_gates.h"
#include "oxytorch/tune/deferred_logits.h"
#include "oxytorch/tune/deferred_norms.h"
#include "oxytorch/tune/deferred_scores.h"
#include "oxytorch/tune/deferred_sums.h"
#include "oxytorch/tune/host.h"
#include "oxytorch/tune/operators.h"
#include "oxytorch/tune/run.h"
#include "tune/attention.h"
#include "tune/observe.h"
#include "tune/optimizer_state.h"

namespace oxytorch::tune {
namespace {

/// A forward to look at, which leaves buffers and generators as they were.
auto forward_of(Run& run) {
  return [&run] {
    const auto generators = generators::states(run.device());
    const auto buffers = run.model().buffers();
    std::vector<at::Tensor> held;
    for (const auto& buffer : buffers) held.push_back(buffer.clone());
    auto loss = run.losses(run.batches().front());
    for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(held[i]);
    generators::set_states(run.device(), generators);
    return loss;
  };
}

/// Of a run without batches nothing is known: it may call any operator.
bool may_call(Run& run, const std::vector<std::string_view>& names) {
  return run.batches().empty() || calls(forward_of(run), names);
}

// -- the host ---------------------------------------------------------------------------------------------------------

/// A setting of the process that is made anew each time.
template <HostSetting (*Make)(const Run&)>
struct HostStrategy : Strategy {
  Applicability applies(Run& run) override { return on_cpu(run); }
  void apply(Run& run) override {
    auto made = Make(run);
    OXY_CHECK(made.is_applied(), NotSupported, made.reason());
    setting = std::move(made);
  }
  void revert(Run& /*run*/) override { setting->revert(); }
  std::optional<HostSetting> setting;
};

HostSetting tuned_allocator(const Run& run) { return tune_allocator(run.retain_limit); }
HostSetting kept_heap(const Run& run) { return keep_heap(run.retain_limit); }
HostSetting host_pool(const Run& /*run*/) { return use_host_pool(); }
HostSetting flushed_denormals(const Run& /*run*/) { return flush_denormals(); }
HostSetting pinned_threads(const Run& /*run*/) { return pin_threads(); }

bool near_denormal(const at::Tensor& values) {
  if (!values.defined() || !values.is_floating_point() || values.numel() == 0) return false;
  const auto size = (values.is_sparse() ? values._values() : values).detach().abs();
  return size.gt(0).logical_and(size.lt(1e-30)).any().item<bool>();
}

struct FlushDenormals : HostStrategy<flushed_denormals> {
  Applicability applies(Run& run) override {
    if (auto here = on_cpu(run); !here.holds) return here;
    bool near = false;
    for (const auto& slot : run.slots()) {
      each_state_tensor(slot.original(),
                        [&](const at::Tensor&, at::Tensor& value) { near = near || near_denormal(value); });
    }
    for (const auto& parameter : run.parameters()) near = near || near_denormal(parameter.grad());
    if (near) return true;
    return "neither gradients nor the optimizer's state hold numbers near the denormal ones.";
  }
};

template <int (*Wanted)()>
struct Threads : Strategy {
  Applicability applies(Run& run) override {
    if (auto here = on_cpu(run); !here.holds) return here;
    if (Wanted() != at::get_num_threads()) return true;
    return "torch has " + std::to_string(Wanted()) + " intra-op threads already.";
  }
  void apply(Run& /*run*/) override {
    before = at::get_num_threads();
    at::set_num_threads(Wanted());
  }
  void revert(Run& /*run*/) override { at::set_num_threads(before); }
  int before = 1;
};

/// Within one cache of the last level, a thread that moves loses little.
struct PinnedThreads : HostStrategy<pinned_threads> {
  Applicability applies(Run& run) override {
    if (auto here = on_cpu(run); !here.holds) return here;
    if (at::get_num_threads() > 1 && read_cores().last_level_caches > 1) return true;
    return "the threads share one cache of the last level.";
  }
};

int physical_cores() { return std::max(1, read_cores().usable_physical); }
int one() { return 1; }

void install_any(NativeOperators& operators, const std::vector<std::string>& names) {
  std::string reasons;
  for (const auto& report : operators.install(names)) reasons += " " + report.name + ": " + report.reason;
  OXY_CHECK(!operators.installed().empty(), NotSupported, "no operator could be installed:", reasons);
}

/// Those with torch's bits, or those that are named, where the model calls what they serve.
struct Operators : Strategy {
  Applicability applies(Run& run) override {
    if (auto here = on_cpu(run); !here.holds) return here;
    if (may_call(run, served)) return true;
    return missing;
  }
  void apply(Run& /*run*/) override { install_any(operators, names); }
  void revert(Run& /*run*/) override { operators.uninstall(); }
  std::vector<std::string> names;
  std::vector<std::string_view> served = {"max_pool2d_with_indices", "native_batch_norm", "bernoulli_"};
  std::string missing = "the model has neither max pooling nor batch normalisation nor dropout";
  NativeOperators operators;
};

/// Pooling, normalization, dropout and embeddings with torch's bits.
struct ExactOperators : Operators {
  ExactOperators() { missing += ", and too few embeddings."; }
  Applicability applies(Run& run) override {
    auto answer = Operators::applies(run);
    if (answer.holds || !run.device().is_cpu()) return answer;
    std::int64_t all = 0, embedded = 0;
    for (const auto& parameter : run.parameters()) all += parameter.numel();
    for (const auto& module : run.model().modules()) {
      const auto* table = module->as<torch::nn::Embedding>();
      if (table != nullptr && !table->options.sparse() && table->weight.requires_grad()) {
        embedded += table->weight.numel();
      }
    }
    if (NativeOperators::is_worth_a_trial(embedded, all, run.accumulation > 1)) return true;
    return answer;
  }
};

/// Those that are named, where the model has a weight that they serve.
struct WeightOperators : Operators {
  Applicability applies(Run& run) override {
    if (auto here = on_cpu(run); !here.holds) return here;
    const auto& all = run.parameters();
    if (std::any_of(all.begin(), all.end(), serves)) return true;
    return missing;
  }
  bool (*serves)(const at::Tensor& weight) = nullptr;
};

struct NativeConvolution : WeightOperators {
  NativeConvolution() {
    names = {"convolution"};
    serves = [](const at::Tensor& weight) { return NativeOperators::serves_convolution(weight.sizes().vec()); };
    missing = "no weight of a convolution of images has enough channels.";
  }
};

struct NativeLstm : Operators {
  NativeLstm() {
    names = {"lstm"};
    served = {"mkldnn_rnn_layer"};
    missing = "the model calls no LSTM of oneDNN's.";
  }
};

struct NativeGru : Operators {
  NativeGru() {
    names = {"gru"};
    served = {"aten::gru"};
    missing = "the model has no GRU.";
  }
};

struct NativeActivation : Operators {
  NativeActivation() {
    names = {"gelu", "silu"};
    served = {"gelu", "silu", "silu_"};
    missing = "the model calls neither GELU nor SiLU.";
  }
};

struct NativeLinear : WeightOperators {
  NativeLinear() {
    names = {"linear"};
    serves = [](const at::Tensor& weight) { return weight.dim() == 2; };
    missing = "the model has no weight of a linear layer.";
  }
};

/// Weights that are laid out once for all batches whose gradients are accumulated.
struct PackedWeights : Strategy {
  Applicability applies(Run& run) override {
    if (run.accumulation > 1) return true;
    return "each step is of one batch: its weights are packed once in any case.";
  }
  void apply(Run& /*run*/) override { kept.emplace(); }
  void revert(Run& /*run*/) override { kept.reset(); }
  std::optional<ops::PackedWeights> kept;
};

/// What backward needs, in less memory.
template <memory::SavedFormat Format>
struct Saved : Strategy {
  Applicability applies(Run& run) override { return on_cpu(run); }
  void apply(Run& run) override {
    packed.emplace(Format);
    run.scope("saved tensors", [this]() -> std::shared_ptr<void> {
      if (memory::PackSavedTensors::others_keep()) return nullptr;  // hooks of the user's own
      return std::make_shared<memory::PackSavedTensors::Scope>(*packed);
    });
  }
  void revert(Run& run) override {
    run.scope("saved tensors", {});
    packed.reset();
  }
  std::optional<memory::PackSavedTensors> packed;
};

/// Layers that leave their results to what follows them, while the model is called. `Kind`: DeferredLogits or the like.
template <class Kind>
struct Deferring : Strategy {
  explicit Deferring(const char* scope_name) : scope_name(scope_name) {}
  void apply(Run& run) override {
    make(kind, run);
    run.scope(scope_name, [] { return std::make_shared<typename Kind::Scope>(); });
  }
  void revert(Run& run) override {
    run.scope(scope_name, {});
    kind.reset();
  }
  /// Whether a loss of this run's has any of what `count` counts.
  [[nodiscard]] static bool has_any(Run& run, std::int64_t (*count)()) {
    std::optional<Kind> tried;
    make(tried, run);
    const auto before = count();
    {
      const typename Kind::Scope scope;
      forward_of(run)();
    }
    return count() > before;
  }
  static void make(std::optional<Kind>& kind, const Run& run) {
    if constexpr (std::is_constructible_v<Kind, at::Device>) {
      kind.emplace(run.device());
    } else {
      kind.emplace();
    }
  }
  const char* scope_name;
  std::optional<Kind> kind;
};

/// Attention as torch is asked for it, by operators on the CPU, and as a model writes it out, on any device served.
struct NativeAttention : Deferring<DeferredScores> {
  NativeAttention() : Deferring("scores") {}
  Applicability applies(Run& run) override {
    const at::Device device = run.device();
    if (!DeferredScores::serves(device)) return "there is no such kernel on " + device.str() + ".";
    if (device.is_cpu() && may_call(run, {"flash_attention"})) return true;
    // Which is composed of others, or written out, is not in a name.
    NativeOperators tried;
    if (device.is_cpu()) static_cast<void>(tried.install({"composed_attention"}));
    const auto found = [] { return NativeOperators::composed_attentions() + DeferredScores::joined(); };
    if (run.batches().empty() || has_any(run, found)) return true;
    return "the model neither calls nor writes out attention that the kernel takes.";
  }
  void apply(Run& run) override {
    if (run.device().is_cpu()) install_any(operators, {"flash_attention", "composed_attention"});
    Deferring::apply(run);
  }
  void revert(Run& run) override {
    Deferring::revert(run);
    operators.uninstall();
  }
  NativeOperators operators;
};

/// The last linear layer and its cross entropy as one.
struct NativeCrossEntropy : Deferring<DeferredLogits> {
  NativeCrossEntropy() : Deferring("logits") {}
  Applicability applies(Run& run) override {
    if (!DeferredLogits::serves(run.device())) return "there is no such kernel on " + run.device().str() + ".";
    // Nothing of an optimizer in C++ says that it is about to change the weights.
    if (!run.owns_loop) return "the program's own loop may read logits after the optimizer's step.";
    if (run.batches().empty() || has_any(run, &DeferredLogits::losses)) return true;
    return "no cross entropy of class indices takes what a linear layer of 256 or more classes gives, alone.";
  }
};

/// Batch normalization, what is added to it, ReLU and max pooling as one.
struct NativeBatchNorm : Deferring<DeferredNorms> {
  NativeBatchNorm() : Deferring("norms") {}
  Applicability applies(Run& run) override {
    if (auto here = on_cpu(run); !here.holds) return here;
    if (may_call(run, {"batch_norm"})) return true;
    return "the model calls no batch normalization.";
  }
};

/// Dropout, the residual and the normalization of their sum as one.
struct NativeLayerNorm : Deferring<DeferredSums> {
  NativeLayerNorm() : Deferring("sums") {}
  Applicability applies(Run& run) override {
    const at::Device device = run.device();
    if (!DeferredSums::serves(device)) return "there is no such kernel on " + device.str() + ".";
    if (device.is_cpu() && may_call(run, {"layer_norm", "rms_norm"})) return true;
    if (run.batches().empty() || has_any(run, &DeferredSums::written)) return true;
    return device.is_cpu()
               ? "the model calls neither layer nor RMS normalization."
               : "the model writes out no RMS normalization, and others are torch's on " + device.str() + ".";
  }
};

/// SiLU or GELU and the product with it as one.
struct NativeGate : Deferring<DeferredGates> {
  NativeGate() : Deferring("gates") {}
  Applicability applies(Run& run) override {
    if (auto here = on_cpu(run); !here.holds) return here;
    if (run.batches().empty() || has_any(run, &DeferredGates::joined)) return true;
    return "the model multiplies nothing by a SiLU or GELU.";
  }
};

// -- layout and precision ---------------------------------------------------------------------------------------------

struct ChannelsLast : Strategy {
  Applicability applies(Run& run) override {
    const auto all = run.model().parameters();
    if (std::none_of(all.begin(), all.end(), [](const at::Tensor& p) { return p.dim() == 4; })) {
      return "the model has no 2-D convolution.";
    }
    return true;
  }
  void apply(Run& run) override {
    for (auto& parameter : run.model().parameters()) {
      const bool seen = std::any_of(own.begin(), own.end(), [&](auto& o) { return o.first.is_same(parameter); });
      if (parameter.dim() != 4 || seen) continue;
      own.emplace_back(parameter, parameter.variable_data());
      parameter.set_data(parameter.variable_data().contiguous(at::MemoryFormat::ChannelsLast));
    }
    follow(run);
    run.inputs("channels_last", channels_last);
  }
  // The weights go back to the memory that they came from, where others may look at them.
  void revert(Run& run) override {
    run.inputs("channels_last", {});
    for (auto& [parameter, data] : own) {
      data.copy_(parameter.variable_data());
      parameter.set_data(data);
    }
    own.clear();
    follow(run);
  }

  // The optimizers' averages lie as their weights do.
  static void follow(Run& run) {
    run.hand_back();
    for (const auto& slot : run.slots()) {
      each_state_tensor(slot.original(), [](const at::Tensor& param, at::Tensor& value) {
        if (!value.is_sparse() && value.sizes() == param.sizes() && value.strides() != param.strides()) {
          value = at::empty_like(param, value.options()).copy_(value);
        }
      });
    }
    run.renew_replacement();
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> own;
};

struct Bf16Autocast : Strategy {
  Applicability applies(Run& run) override {
    if (at::autocast::is_autocast_enabled(run.device().type())) return "autocast is on already.";
    const auto& all = run.parameters();
    if (std::none_of(all.begin(), all.end(), [](const at::Tensor& p) { return p.scalar_type() == at::kFloat; })) {
      return "no parameter is float32.";
    }
    const auto support = amp::hardware_support(run.device().type(), at::kBFloat16);
    const auto asked = run.asked.find("precision");
    if (support.native || (asked != run.asked.end() && asked->second == "bf16")) return true;
    return support.reason;
  }
  void apply(Run& run) override {
    run.scope("autocast",
              [device = run.device().type()] { return std::make_shared<amp::Autocast>(device, at::kBFloat16); });
  }
  void revert(Run& run) override { run.scope("autocast", {}); }
};

template <bool Reduced>
struct Attention : Strategy {
  Applicability applies(Run& run) override {
    if (auto here = on_cpu(run); !here.holds) return here;
    if (may_call(run, {"flash_attention"})) return true;
    return "the model calls no flash attention.";
  }
  void apply(Run& run) override {
    run.scope("attention", [] { return std::make_shared<MathAttention>(Reduced); });
  }
  void revert(Run& run) override { run.scope("attention", {}); }
};

/// A batch in pieces that fit the caches, gradients averaged over them: the same batch size for the optimizer.
template <int Pieces>
struct Split : Strategy {
  Applicability applies(Run& run) override {
    if (run.parts() > 1) return "there are several losses, of which one may use what another made of the whole batch";
    for (const auto& module : run.model().modules()) {
      const bool looks_at_all = module->as<torch::nn::BatchNorm1d>() != nullptr ||
                                module->as<torch::nn::BatchNorm2d>() != nullptr ||
                                module->as<torch::nn::BatchNorm3d>() != nullptr;
      if (looks_at_all && module->is_training()) return "batch normalisation looks at the whole batch";
    }
    for (const auto& batch : run.batches()) {
      if (rows(batch) % Pieces == 0 && rows(batch) > 0) continue;
      return "batches of " + std::to_string(rows(batch)) + " cannot be cut into " + std::to_string(Pieces) +
             " equal pieces";
    }
    return true;
  }
  void apply(Run& run) override { run.set_micro_batches(Pieces); }
  void revert(Run& run) override { run.set_micro_batches(1); }
};

// -- CUDA -------------------------------------------------------------------------------------------------------------

Applicability on_cuda(const Run& run) {
  if (run.device().is_cuda()) return true;
  return "the model is not on a CUDA device.";
}

HostSetting tf32(const Run& /*run*/) {
  return accelerator::set_float32_precision("cuda", {"matmul", "conv", "rnn"}, "tf32");
}

struct Tf32 : HostStrategy<tf32> {
  Applicability applies(Run& run) override { return on_cuda(run); }
};

struct CudnnBenchmark : Strategy {
  Applicability applies(Run& run) override { return on_cuda(run); }
  void apply(Run& /*run*/) override {
    before = at::globalContext().benchmarkCuDNN();
    at::globalContext().setBenchmarkCuDNN(true);
  }
  void revert(Run& /*run*/) override { at::globalContext().setBenchmarkCuDNN(before); }
  bool before = false;
};

}  // namespace

Applicability on_cpu(const Run& run) {
  if (run.device().is_cpu()) return true;
  return "the model is on " + run.device().str() + ".";
}

std::vector<RegisteredStrategy> own_strategies() {
  using enum Kind;
  const std::vector<std::string> faster = {"allocator", "host_pool", "bf16_autocast", "channels_last", "step_tail"};
  const StrategyTraits split{.group = "split", .interacts = faster, .max_speedup = 1.5, .needs_loop = true};
  using memory::SavedFormat;
  const std::string squares = "memory grows with the square of the sequence length.";
  std::vector<RegisteredStrategy> all{
      registered<HostStrategy<tuned_allocator>>(
          "allocator", Exact,
          {.group = "host_memory",
           .interacts = {"host_pool"},
           .settle = 2,
           .cost = "resident memory stays at its peak, at most half of what was available "
                   "beside what is in use.",
           .expected_speedup = 1.1}),
      registered<HostStrategy<kept_heap>>(
          "keep_heap", Exact,
          {.group = "host_memory",
           .interacts = {"host_pool"},
           .part_of = {"allocator"},
           .settle = 2,
           .cost = "resident memory stays at its peak, at most half of what was available beside what is in use.",
           .expected_speedup = 1.08}),
      registered<HostStrategy<host_pool>>(
          "host_pool", Exact,
          {.interacts = {"allocator"},
           .settle = 2,
           .cost = "resident memory stays at its peak; free pages above half of what was "
                   "available are given back.",
           .expected_speedup = 1.3}),
      registered<ExactOperators>("native_operators", Exact, {.max_speedup = 2, .expected_speedup = 1.2}),
      registered<Bf16Autocast>("bf16_autocast", Precision,
                               {.group = "precision",
                                .interacts = {"channels_last", "allocator", "host_pool"},
                                .cost = "products are rounded to bfloat16; weights and their gradients stay float32.",
                                .max_speedup = 8,
                                .expected_speedup = 2}),
      registered<ChannelsLast>(
          "channels_last", Tolerance,
          {.group = "layout",
           .interacts = {"bf16_autocast", "allocator", "host_pool"},
           .cost = "a second copy of the convolutions' weights is kept while it may be taken back.",
           .expected_speedup = 1.4}),
      registered<NativeAttention>(
          "native_attention", Tolerance,
          {.group = "attention",
           .interacts = {"bf16_autocast", "allocator", "host_pool"},
           .cost = "attention of other models in this process takes this kernel too; the memory "
                   "of scores cannot be read directly in the model (data_ptr).",
           .max_speedup = 6,
           .expected_speedup = 1.4}),
      registered<NativeConvolution>("native_convolution", Tolerance,
                                    {.requires_ = {"bf16_autocast"},
                                     .interacts = {"channels_last", "allocator", "host_pool"},
                                     .settle = 2,  // other blocks of memory
                                     .cost = "convolutions of other models in this process take this kernel too.",
                                     .max_speedup = 2,
                                     .expected_speedup = 1.1}),
      registered<NativeLstm>("native_lstm", Tolerance,
                             {.interacts = {"bf16_autocast", "allocator", "host_pool"},
                              .cost = "LSTM layers of other models in this process take this kernel too.",
                              .max_speedup = 4,
                              .expected_speedup = 2.2}),
      registered<NativeGru>("native_gru", Tolerance,
                            {.interacts = {"bf16_autocast", "allocator", "host_pool"},
                             .cost = "GRU layers of other models in this process take this kernel too.",
                             .max_speedup = 8,
                             .expected_speedup = 2.5}),
      registered<NativeActivation>("native_activation", Tolerance,
                                   {.interacts = {"bf16_autocast", "allocator", "host_pool"},
                                    .settle = 2,  // other blocks of memory
                                    .cost = "activations of other models in this process take these kernels too.",
                                    .max_speedup = 1.5,
                                    .expected_speedup = 1.02}),
      registered<NativeLinear>("native_linear", Precision,
                               {.requires_ = {"bf16_autocast"},
                                .interacts = {"allocator", "host_pool"},
                                .settle = 2,  // other blocks of memory
                                .cost = "linear layers of other models in this process take this kernel too.",
                                .max_speedup = 2,
                                .expected_speedup = 1.1}),
      registered<PackedWeights>("packed_weights", Exact,
                                {.requires_ = {"native_linear"},
                                 .interacts = {"allocator", "host_pool"},
                                 .settle = 2,  // the first one packs
                                 .cost = "4 bytes of memory for each element of a linear layer's weight.",
                                 .max_speedup = 3,
                                 .expected_speedup = 1.1}),
      registered<NativeBatchNorm>("native_batch_norm", Tolerance,
                                  {.interacts = {"channels_last", "bf16_autocast", "allocator", "host_pool"},
                                   .settle = 2,  // other blocks of memory
                                   .cost = "the memory of a normalized tensor cannot be read directly in the model.",
                                   .max_speedup = 3,
                                   .expected_speedup = 1.2}),
      registered<NativeLayerNorm>("native_layer_norm", Tolerance,
                                  {.interacts = {"bf16_autocast", "allocator", "host_pool"},
                                   .settle = 2,  // other blocks of memory
                                   .cost = "the memory of a sum cannot be read directly in the model.",
                                   .max_speedup = 2,
                                   .expected_speedup = 1.06}),
      registered<NativeGate>("native_gate", Tolerance,
                             {.interacts = {"bf16_autocast", "allocator", "host_pool"},
                              .settle = 2,  // other blocks of memory
                              .cost = "the memory of an activation cannot be read directly in the model.",
                              .max_speedup = 1.5,
                              .expected_speedup = 1.01}),
      registered<NativeCrossEntropy>("native_cross_entropy", Tolerance,
                                     {.interacts = {"bf16_autocast", "allocator", "host_pool"},
                                      .cost = "logits that are kept until the optimizer's step are computed then.",
                                      .max_speedup = 3,
                                      .expected_speedup = 1.1}),
      registered<Attention<false>>("math_attention", Tolerance,
                                   {.group = "attention",
                                    .interacts = {"bf16_autocast", "allocator", "host_pool"},
                                    .cost = squares,
                                    .expected_speedup = 1.1}),
      registered<Attention<true>>("math_attention_bf16", Precision,
                                  {.group = "attention",
                                   .requires_ = {"bf16_autocast"},
                                   .interacts = {"allocator", "host_pool"},
                                   .cost = "scores are rounded to bfloat16; " + squares,
                                   .expected_speedup = 1.35}),
      registered<Tf32>("tf32", Precision,
                       {.interacts = {"bf16_autocast"},
                        .cost = "inputs of float32 products keep 10 bits of their mantissa.",
                        .expected_speedup = 1.5}),
      registered<CudnnBenchmark>("cudnn_benchmark", Tolerance,
                                 {.interacts = {"channels_last", "bf16_autocast"}, .settle = 3})};
  const auto add = [&all](std::vector<RegisteredStrategy> more) {
    all.insert(all.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  add(optimizer_strategies());
  add({
      registered<Threads<physical_cores>>("physical_cores", Tolerance,
                                          {.group = "threads", .interacts = faster, .settle = 2}),
      registered<Threads<one>>("one_thread", Tolerance,
                               {.group = "threads", .interacts = faster, .settle = 2, .expected_speedup = 1.01}),
      registered<PinnedThreads>("pinned_threads", Exact,
                                {.group = "affinity",
                                 .interacts = {"one_thread", "physical_cores"},
                                 .settle = 2,
                                 .cost = "what else runs on those cores has to move."}),
      registered<FlushDenormals>("flush_denormals", Tolerance,
                                 {.interacts = {"one_thread", "physical_cores"},
                                  .cost = "numbers below 1.2e-38 become zero.",
                                  .max_speedup = 10}),
      registered<Split<2>>("split_2", Tolerance, split),
      registered<Split<4>>("split_4", Tolerance, split),
      registered<Split<8>>("split_8", Tolerance, split),
      registered<Saved<SavedFormat::BFloat16>>("saved_bf16", Precision,
                                               {.group = "saved",
                                                .interacts = {"bf16_autocast"},
                                                .settle = 2,
                                                .cost = "activations that backward reads are rounded to bfloat16.",
                                                .max_speedup = 1}),
      registered<Saved<SavedFormat::File>>(
          "saved_in_file", Tolerance,
          {.group = "saved",
           .settle = 2,
           .cost = "each step writes and reads a file as large as its activations, in TMPDIR or /var/tmp.",
           .max_speedup = 1}),
  });
  return all;
}

}  // namespace oxytorch::tune
