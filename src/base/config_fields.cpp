// The table of settings: one row decides a key's type, values, defaults and reasons everywhere.
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/spelling.h"
#include "oxytorch/config.h"
#include "oxytorch/error.h"

namespace oxytorch {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kMaxInteger = static_cast<double>(std::numeric_limits<std::int64_t>::max());

using Type = ConfigField::Type;

/// One of some words, or a number or size from `low` to `high`; a word is the default.
ConfigField worded(std::string key, Type type, std::vector<std::string> words, double low, double high,
                   const char* basic, const char* others, std::string reason, std::string basic_reason = "") {
  return {std::move(key),
          type,
          std::move(words),
          low,
          high,
          false,
          std::string(basic),
          std::string(others),
          std::string(others),
          std::move(reason),
          std::move(basic_reason)};
}

ConfigField choice(std::string key, std::vector<std::string> choices, const char* basic, const char* others,
                   std::string reason, std::string basic_reason = "") {
  return worded(std::move(key), Type::Choice, std::move(choices), 0, 0, basic, others, std::move(reason),
                std::move(basic_reason));
}

ConfigField integer(std::string key, std::int64_t low, std::int64_t value, std::string reason) {
  return {std::move(key), Type::Integer, {},    static_cast<double>(low), kMaxInteger, false,
          value,          value,         value, std::move(reason),        ""};
}

ConfigField number(std::string key, double low, double high, bool high_open, double value, std::string reason) {
  return {std::move(key), Type::Number, {}, low, high, high_open, value, value, value, std::move(reason), ""};
}

ConfigField flag(std::string key, bool value, std::string reason) {
  return {std::move(key), Type::Flag, {}, 0, 0, false, value, value, value, std::move(reason), ""};
}

ConfigField size(std::string key, std::string reason) {
  const std::string value = "auto";
  return {std::move(key), Type::Size, {}, 0, 0, false, value, value, value, std::move(reason), ""};
}

std::vector<ConfigField> make_fields() {
  const std::vector<std::string> auto_on_off{"auto", "on", "off"};
  const std::string keeps_bits = "Level basic changes no bit of the result.";
  std::vector<ConfigField> fields;
  fields.push_back(
      {"level",
       Type::Choice,
       {"basic", "advanced", "ultra"},
       0,
       0,
       false,
       std::string("basic"),
       std::string("advanced"),
       std::string("ultra"),
       "basic changes no bit of the result, advanced adds changes within rounding, ultra adds opt-in trades: "
       "8-bit optimizer state.",
       ""});
  fields.push_back(
      choice("precision", {"auto", "fp32", "bf16", "fp16"}, "fp32", "auto",
             "auto computes in bf16 where the processor multiplies bf16 in hardware and in fp32 elsewhere, "
             "where bf16 is 2 to 3 times slower.",
             keeps_bits));
  fields.push_back(choice("channels_last", auto_on_off, "off", "auto",
                          "auto lays out images channels last for models with convolutions, whose kernels want it so; "
                          "sums are rounded in another order.",
                          keeps_bits));
  fields.push_back(
      worded("threads", Type::Integer, {"auto", "keep"}, 1, 4096, "keep", "auto",
             "auto uses each core that affinity and cgroup leave to this process, once; the number of threads "
             "decides the order of torch's sums.",
             "keep leaves torch's own number, since another one changes the order of its sums."));
  fields.push_back(
      worded("interop_threads", Type::Integer, {"keep"}, 1, 4096, "keep", "keep",
             "keep leaves torch's own number; another one can be set once in a process, before torch has run "
             "operators beside each other."));
  fields.push_back(
      choice("flush_denormals", auto_on_off, "off", "auto",
             "auto flushes denormal numbers to zero on every worker thread: arithmetic on them is 10 to 100 "
             "times slower, and optimizer state gets stuck in them.",
             keeps_bits));
  fields.push_back(
      choice("allocator", {"auto", "system", "retain"}, "auto", "auto",
             "auto is retain on Linux with glibc: freed memory stays in the process instead of being faulted "
             "in anew each step, at the cost of a resident size that stays at its peak; no bit changes."));
  fields.push_back(size("allocator_retain_limit",
                        "auto keeps at most half of the memory available at the start; what is above goes back to the "
                        "system."));
  fields.push_back(choice("step_tail", auto_on_off, "off", "auto",
                          "auto does clip, update, EMA and zeroing in one native pass where the optimizer is one it "
                          "knows; within 4 ulp of the exact update.",
                          keeps_bits));
  fields.push_back(choice("optimizer_state", {"auto", "fp32", "bf16", "int8", "file"}, "auto", "auto",
                          "auto keeps running averages as torch does; ultra keeps them as int8, in a quarter of the "
                          "memory: a byte an element and a scale for 32, within 1.6 % of the largest; file keeps every "
                          "bit in a file, and a part of it at a time in memory."));
  fields.back().ultra = std::string("int8");
  fields.push_back(
      choice("attention", {"auto", "default", "math", "native"}, "default", "auto",
             "auto lets torch choose among its fused attention kernels for the precision in use; math is the "
             "plain formula; native is the kernel of this library for CPUs.",
             "default leaves torch's choice of kernel as it is."));
  fields.push_back(
      choice("compile", {"off", "default", "max-autotune"}, "off", "off",
             "torch.compile takes 10 to 20 s before the first step and does not pay for every model, so it "
             "is asked for."));
  fields.push_back(integer("accumulation_steps", 1, 1, "Batches per optimizer step; one unless you say so."));
  fields.push_back(number("clip_norm", 0, kInfinity, true, 0,
                          "Greatest global gradient norm; 0 is off, since clipping changes what is trained."));
  fields.push_back(number("clip_value", 0, kInfinity, true, 0,
                          "Greatest absolute gradient element; 0 is off, since clipping changes what is trained."));
  fields.push_back(
      number("ema_decay", 0, 1, true, 0,
             "Decay a step of the moving average of the weights; 0 is off, since it costs memory as large as "
             "the weights."));
  fields.push_back(
      choice("nonfinite", {"skip", "raise", "propagate"}, "propagate", "skip",
             "skip leaves out a step whose gradient has an infinity or NaN, as GradScaler does; the report "
             "counts them.",
             "propagate is what a plain PyTorch loop does."));
  fields.push_back(choice("grad_scaler", auto_on_off, "auto", "auto",
                          "auto scales the loss for fp16 only: bf16 and fp32 have the range without it."));
  fields.push_back(choice("schedule", {"none", "cosine", "one_cycle"}, "none", "none",
                          "none leaves the learning rate to you, since a schedule changes what is trained."));
  fields.push_back(
      integer("warmup_steps", 0, 0,
              "Steps over which a schedule raises the learning rate; 0 is none, of a cycle torch's 30 %."));
  fields.push_back(
      number("min_lr_ratio", 0, 1, false, 0,
             "Share of the learning rate left at the end of a schedule; 0 is none, of a cycle torch's own."));
  fields.push_back(integer("max_steps", 0, 0, "Steps planned, which schedules need; 0 is not known."));
  fields.push_back(integer("steps_planned", 1, 10'000,
                           "Length of the run over which a change that costs something once, such as compiling, must "
                           "repay it before it is kept."));
  fields.push_back(
      number("tune_seconds", 0, kInfinity, true, 0,
             "Seconds for trying what makes a step faster, compiling apart; 0 is what 60 steps take, at "
             "least 3 s, or what the saving repays within 240; of a short run 2 %. A Trainer takes 1 s for "
             "everything, or 15 % of the run."));
  fields.push_back(
      flag("remember", true,
           "What was found is kept in $OXYTORCH_CACHE and checked in the next run instead of measured again."));
  fields.push_back(integer("early_stopping_patience", 0, 0,
                           "Evaluations without improvement after which training stops; 0 is off."));
  fields.push_back(number("early_stopping_min_delta", 0, kInfinity, true, 0,
                          "Least improvement of the monitored loss that counts."));
  fields.push_back(choice("early_stopping_mode", {"min", "max"}, "min", "min",
                          "min is for a loss; max for a metric that is to grow, such as an accuracy."));
  fields.push_back(flag("early_stopping_restore_best", false,
                        "A copy of the weights of the best epoch takes their memory once more."));
  fields.push_back(
      size("memory_limit",
           "Memory of the process, as bytes or a share of what it may use; a tensor that would pass it raises an "
           "out-of-memory error. auto sets no limit."));
  fields.push_back(
      choice("goal", {"speed", "memory"}, "speed", "speed",
             "speed keeps what makes a step faster; memory also keeps what makes it smaller, as far as max_slowdown "
             "allows, and stands for gradient_checkpointing = least."));
  fields.push_back(number("max_slowdown", 1, kInfinity, true, 1.25,
                          "How many times as long as given a step may take for the sake of its memory, where goal is "
                          "memory or gradient_checkpointing least."));
  fields.push_back(
      number("max_growth", 1, kInfinity, true, 1.05,
             "How many times the memory as given the tensors of a step may take, model and optimizer included, "
             "for what makes it faster, where goal is speed. A MiB is always allowed."));
  fields.push_back(worded(
      "gradient_checkpointing", Type::Size, {"off", "least"}, 0, 0, "off", "off",
      "Bytes that the tensors of a step may take, or a share of memory: of blocks of the model, what costs least is "
      "made again in backward, or packed until then. auto is what memory_limit leaves or the machine has; least is the "
      "smallest that max_slowdown allows; off keeps everything, since that takes time."));
  fields.push_back(
      choice("saved_tensors", {"lossless", "bf16", "int8", "file"}, "lossless", "lossless",
             "How gradient_checkpointing may pack what blocks keep for backward: always masks as bits and integers as "
             "narrow as they fit; with bf16 and int8 also rounded, with file also written to TMPDIR in each step."));
  fields.push_back(worded(
      "num_workers", Type::Integer, {"auto", "keep"}, 0, 4096, "auto", "auto",
      "What draws batches: processes of torch's DataLoader, threads of oxytorch.data.Loader. auto lets "
      "accelerate(), PerformanceOptimizer and, in a run of 1,000 steps or more, Trainer.fit try more and keep what "
      "pays, with the same batches in the same order; keep leaves a loader as it was made."));
  fields.push_back(
      worded("prefetch", Type::Integer, {"auto", "keep"}, 1, 4096, "auto", "auto",
             "Batches drawn ahead: by each worker of torch's DataLoader, by a thread where it has none, or by "
             "oxytorch.data.Loader. auto and keep are those of num_workers."));
  fields.push_back(choice("pin_memory", auto_on_off, "auto", "auto",
                          "Whether torch's DataLoader copies batches to pinned memory, for an accelerator. auto leaves "
                          "it as it was made; oxytorch.data.Loader pins what goes to an accelerator."));
  fields.push_back(
      worded("cache", Type::Size, {"off"}, 0, 0, "off", "off",
             "Memory in which oxytorch.data.Loader keeps samples as they were read, for later epochs; auto is a "
             "quarter of what is available. off leaves the loader as it was made."));
  fields.push_back(worded("seed", Type::Integer, {"auto"}, 0, kMaxInteger, "auto", "auto",
                          "auto leaves the random generators as they are."));
  fields.push_back(
      flag("deterministic", false,
           "Deterministic algorithms can be slower and some operations have none, so they are asked for."));
  fields.push_back(choice("progress", auto_on_off, "auto", "auto", "auto shows a bar where stderr is a terminal."));
  fields.push_back(
      integer("log_every", 1, 10, "Steps between two reads of the loss, each of which waits for the device."));
  fields.push_back(
      flag("monitor", true, "Step and phase times are kept without an allocation or a wait on the step path."));
  return fields;
}

std::vector<ConfigWord> make_words() {
  const auto text = [](const char* word) { return ConfigValue(std::string(word)); };
  const std::vector<std::pair<ConfigValue, ConfigValue>> mixed{{true, text("auto")},
                                                               {text("yes"), text("auto")},
                                                               {false, text("fp32")},
                                                               {text("no"), text("fp32")},
                                                               {text("none"), text("fp32")},
                                                               {text("float16"), text("fp16")},
                                                               {text("bfloat16"), text("bf16")},
                                                               {text("float32"), text("fp32")}};
  const std::vector<std::pair<ConfigValue, ConfigValue>> compiles{
      {true, text("default")}, {false, text("off")}, {text("none"), text("off")}};
  std::vector<ConfigWord> words{
      {"mixed_precision", "precision", mixed},
      {"use_amp", "precision", mixed},
      {"amp", "precision", mixed},
      {"dtype", "precision", mixed},
      {"compile_model", "compile", compiles},
      {"use_compile", "compile", compiles},
      {"torch_compile", "compile", compiles},
      {"compile_mode", "compile", compiles},
      {"memory_format",
       "channels_last",
       {{text("channels_last"), text("on")},
        {text("contiguous_format"), text("off")},
        {text("contiguous"), text("off")},
        {text("preserve_format"), text("off")}}},
      {"use_channels_last", "channels_last"},
      {"flash_attention", "attention", {{true, text("auto")}, {false, text("math")}}},
      {"use_flash_attention", "attention", {{true, text("auto")}, {false, text("math")}}},
      {"num_threads", "threads"},
      {"intra_op_threads", "threads"},
      {"intraop_threads", "threads"},
      {"num_interop_threads", "interop_threads"},
      {"inter_op_threads", "interop_threads"},
      {"fused_optimizer", "step_tail"},
      {"gradient_accumulation_steps", "accumulation_steps"},
      {"gradient_accumulation", "accumulation_steps"},
      {"accumulate_grad_batches", "accumulation_steps"},
      {"max_grad_norm", "clip_norm"},
      {"gradient_clip_norm", "clip_norm"},
      {"gradient_clip_val", "clip_norm"},
      {"gradient_clipping", "clip_norm"},
      {"gradient_clip_value", "clip_value"},
      {"lr_schedule", "schedule"},
      {"lr_scheduler", "schedule"},
      {"lr_scheduler_type", "schedule"},
      {"schedule_name", "schedule"},
      {"total_steps", "max_steps"},
      {"random_seed", "seed"},
      {"logging_steps", "log_every"},
      {"log_interval", "log_every"},
      {"max_memory", "memory_limit"},
      {"activation_checkpointing", "gradient_checkpointing"},
      {"use_checkpointing", "gradient_checkpointing"},
      {"dataloader_num_workers", "num_workers"},
      {"workers", "num_workers"},
      {"prefetch_factor", "prefetch"},
      {"dataloader_prefetch_factor", "prefetch"},
      {"dataloader_pin_memory", "pin_memory"},
      {"cache_size", "cache"},
      {"cache_limit", "cache"},
      {"data_cache", "cache"},
  };
  const auto refuse = [&words](std::initializer_list<const char*> names, const std::string& advice,
                               bool is_switch = false) {
    for (const char* name : names) words.push_back({name, "", {}, advice, is_switch});
  };
  refuse({"batch_size", "auto_find_batch_size", "auto_batch_size"},
         "the loader that you make decides it. oxytorch.memory.largest_batch() finds the largest that fits and "
         "batch_curve() the fastest (C++: oxytorch::largest_batch, batch_curve); give that to the loader.",
         /*is_switch=*/true);
  refuse(
      {"shuffle"},
      "the loader that you make decides it. Give it to oxytorch.data.Loader (C++: oxytorch::data::LoaderOptions) or to "
      "torch's DataLoader.");
  refuse({"persistent_workers", "drop_last"}, "the loader that you make decides it. Give it to torch's DataLoader.",
         /*is_switch=*/true);
  refuse({"cache_dir"},
         "the loader that you make decides it. Give cache=oxytorch.data.Cache(disk=..., folder=...) to "
         "oxytorch.data.Loader (C++: oxytorch::data::LoaderOptions).");
  refuse({"cpu_offload", "offload", "optimizer_offload"},
         "no setting moves optimizer state or activations from a card to the host. Leave it out; on a CPU "
         "optimizer_state='file' keeps the running averages in a file, 'int8' keeps them in one byte an element, and "
         "gradient_checkpointing='50%' keeps activations within a budget, "
         "as oxytorch.memory.fit() does (C++: oxytorch::fit).",
         /*is_switch=*/true);
  refuse({"max_gpu_memory", "gpu_memory_fraction", "memory_fraction", "gpu_memory_limit"},
         "a share of a card is a setting of the process. Give oxytorch.PerformanceOptimizer "
         "gpu=oxytorch.GPUConfig(memory_fraction='90%'); C++ has oxytorch::accelerator::GPUConfig.");
  refuse({"device", "device_ids", "devices"},
         "the model is trained where its parameters are. Move it there before the trainer is made; "
         "oxytorch.GPUConfig(devices=[...]) narrows what the process sees.");
  refuse({"cudnn_benchmark", "allow_tf32", "tf32"},
         "it is a setting of the process. Give oxytorch.PerformanceOptimizer gpu=oxytorch.GPUConfig(...) with "
         "cudnn_benchmark, matmul_precision or conv_precision; C++ has oxytorch::accelerator::GPUConfig.",
         /*is_switch=*/true);
  refuse({"gc_threshold", "gc_interval", "automatic_gc", "empty_cache_interval", "clear_cache_every"},
         "a memory manager cleans up by rules. Give the trainer memory=oxytorch.memory.MemoryManager(clean_at=..., "
         "clean_every=..., cache_limit=...); C++ has oxytorch::MemoryConfig for TrainerOptions::memory.",
         /*is_switch=*/true);
  refuse({"learning_rate", "lr", "weight_decay", "momentum", "betas", "optimizer_type"},
         "it belongs to the optimizer. Give it there.");
  refuse({"epochs", "num_epochs", "num_train_epochs"}, "it belongs to a call. Give fit() epochs=...");
  refuse({"checkpoint_dir", "checkpoint_every", "checkpoint_interval", "save_every", "save_steps"},
         "nothing is saved by a configuration yet. Give the trainer a checkpointer, which fit() saves to.");
  refuse({"distributed", "distributed_backend", "world_size", "ddp", "bucket_cap_mb", "gradient_compression"},
         "training by several processes comes with a later module, distributed. Wrap the model in torch's "
         "DistributedDataParallel, and leave it out.",
         /*is_switch=*/true);
  refuse({"profile", "profiler", "enable_profiling"},
         "a configuration does not switch it on. Pass monitor=oxytorch.PerformanceMonitor() in Python, or use "
         "torch.profiler.",
         /*is_switch=*/true);
  refuse({"quantization", "pruning"},
         "it changes the model that is trained. Call oxytorch.model.quantize() or prune() on it yourself.",
         /*is_switch=*/true);
  return words;
}

}  // namespace

const std::vector<ConfigField>& PerformanceConfig::fields() {
  static const std::vector<ConfigField> table = make_fields();
  return table;
}

const std::vector<ConfigWord>& PerformanceConfig::words() {
  static const std::vector<ConfigWord> table = make_words();
  return table;
}

const std::vector<std::string>& PerformanceConfig::sections() {
  static const std::vector<std::string> names{
      "accelerator", "checkpoint",  "compute", "cpu",     "data",      "dataloader", "environment",  "general",
      "gpu",         "hardware",    "loader",  "memory",  "model",     "monitoring", "optimization", "optimizer",
      "oxytorch",    "performance", "run",     "runtime", "scheduler", "system",     "trainer",      "training"};
  return names;
}

std::string to_string(const ConfigValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return in_quotes(*text);
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return std::to_string(*whole);
  if (const auto* truth = std::get_if<bool>(&value)) return *truth ? "true" : "false";
  const double real = std::get<double>(value);
  if (std::isnan(real)) return "NaN";
  if (std::isinf(real)) return real > 0 ? "infinity" : "-infinity";
  std::array<char, 32> buffer{};
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), real);
  return {buffer.data(), result.ptr};
}

std::string ConfigField::allowed() const {
  const auto range = [this](const char* noun) {
    std::string text = noun;
    if (std::isinf(high) || high == kMaxInteger) return text + " >= " + to_string(low);
    return text + " from " + to_string(low) + " to " + (high_open ? "below " : "") + to_string(high);
  };
  switch (type) {
    case Type::Flag: return "true or false";
    case Type::Choice: return list_of(choices);
    case Type::Size:
      return "a size such as '10GB', '1.5GiB' or '90%', or 'auto'" + (choices.empty() ? "" : " or " + list_of(choices));
    case Type::Number: return range("a number");
    case Type::Integer: break;
  }
  return range("a whole number") + (choices.empty() ? "" : " or " + list_of(choices));
}

}  // namespace oxytorch
