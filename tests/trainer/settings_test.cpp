// Every setting of a configuration has an effect on the trainer, or is refused with a sentence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>

#include "data/counted_samples.h"
#include "oxytorch/config_use.h"
#include "oxytorch/data/tensors.h"
#include "oxytorch/error.h"
#include "oxytorch/memory.h"
#include "oxytorch/optim.h"
#include "oxytorch/system.h"
#include "oxytorch/trainer.h"
#include "oxytorch/tune/host.h"
#include "oxytorch/units.h"

namespace oxytorch {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using Settings = std::vector<std::pair<const char*, ConfigValue>>;

struct Example {
  at::Tensor data, target;
};

std::vector<Example> data(int count) {
  torch::manual_seed(3);
  std::vector<Example> found;
  for (int i = 0; i < count; ++i) found.push_back({torch::randn({4, 6}), torch::randint(0, 3, {4})});
  return found;
}

/// A model, torch's own optimizer and a trainer with nothing on but what is given; SGD at a rate of 1.
struct Training {
  explicit Training(const Settings& given, const char* level = "basic", double lr = 1.0,
                    std::optional<optim::SGDOptions> ours = std::nullopt, bool calibrate = false)
      : config(level) {
    torch::manual_seed(0);
    model = torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::ReLU(), torch::nn::Linear(8, 3));
    config.set("precision", std::string("fp32"));
    config.set("channels_last", std::string("off"));
    config.set("attention", std::string("default"));
    for (const auto& [key, value] : given) config.set(key, value);
    if (ours) {
      optimizer = std::make_unique<optim::SGD>(model->parameters(), *ours);
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(lr));
    }
    trainer = std::make_unique<Trainer>(*model, *optimizer, supervised(model, torch::nn::CrossEntropyLoss()), config,
                                        TrainerOptions{.calibrate = calibrate});
  }
  ~Training() {
    if (trainer) trainer->revert();
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  [[nodiscard]] at::Tensor flat() const {
    std::vector<at::Tensor> parts;
    for (const auto& p : model->parameters()) parts.push_back(p.detach().clone().flatten());
    return at::cat(parts);
  }
  /// What one step adds to the weights.
  at::Tensor moved(std::optional<Example> example = std::nullopt) {
    const auto before = flat();
    const auto one = example ? *example : data(1)[0];
    trainer->step({one.data, one.target});
    return flat() - before;
  }
  std::vector<double> rates(int count) {
    std::vector<double> found;
    for (const auto& one : data(count)) {
      found.push_back(optimizer->param_groups()[0].options().get_lr());
      trainer->step({one.data, one.target});
    }
    return found;
  }
  [[nodiscard]] std::string line(const std::string& name) const {
    for (const auto& line : trainer->settings()) {
      if (line.name == name) return line.state + ": " + line.reason;
    }
    return "";
  }

  PerformanceConfig config;
  torch::nn::Sequential model{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<Trainer> trainer;
};

Example poisoned() {
  auto one = data(1)[0];
  one.data.fill_(std::numeric_limits<float>::quiet_NaN());
  return one;
}

at::ScalarType output_dtype(const char* precision) {
  Training setup({{"precision", std::string(precision)}});
  auto seen = at::ScalarType::Undefined;
  Trainer trainer(*setup.model, *setup.optimizer,
                  [&](const Batch& batch) {
                    const auto out = setup.model->forward(batch.input);
                    seen = out.scalar_type();
                    return torch::nn::functional::cross_entropy(out.to(at::kFloat), batch.target);
                  },
                  setup.config, {.calibrate = false});
  const auto one = data(1)[0];
  trainer.step({one.data, one.target});
  return seen;
}

int64_t epochs_until_stop(const std::vector<double>& metrics, Settings given) {
  given.emplace_back("early_stopping_patience", int64_t{1});
  Training setup(given, "basic", 0.1);
  auto loader = data(2);
  size_t seen = 0;
  return static_cast<int64_t>(
      setup.trainer->fit(loader, static_cast<int64_t>(metrics.size()), 0, [&] { return metrics.at(seen++); })
          .losses.size());
}

std::string progress_of(const char* setting) {
  Training setup({{"progress", std::string(setting)}});
  auto loader = data(2);
  testing::internal::CaptureStderr();
  setup.trainer->fit(loader, 1);
  return testing::internal::GetCapturedStderr();
}

// A setting: what shows that it was honoured.
/// What a fit makes of a setting of loaders: the loader's options in the middle of it and behind it, and the lines.
struct Fed {
  explicit Fed(const char* key, const ConfigValue& value) {
    Training setup({{key, value}});
    data::TensorLoader loader(std::make_shared<data::Counting>(16), {.batch_size = 4, .threads = 1, .prefetch = 1});
    const auto loss = loss_on<data::Tensors>([&](const data::Tensors& batch) {
      inside = loader.options();
      return setup.model->forward(batch.at("number").to(at::kFloat).view({-1, 1}).expand({-1, 6})).square().mean();
    });
    Trainer trainer(*setup.model, *setup.optimizer, loss, setup.config, {.calibrate = false});
    EXPECT_EQ(trainer.fit(loader, /*epochs=*/2).steps, 8);
    after = loader.options();
    for (const auto& line : trainer.settings()) lines += line.name + " " + line.state + ": " + line.reason + '\n';
    auto examples = data(1);
    setup.trainer->fit(examples, /*epochs=*/1);
    elsewhere = setup.line(key);
  }
  data::LoaderOptions inside, after;
  std::string lines, elsewhere;
};

const std::map<std::string, std::function<void()>>& effects() {
  static const std::map<std::string, std::function<void()>> table{
      {"level",
       [] {
         EXPECT_THAT(Training({}).line("step_tail"), HasSubstr("off"));
         Training setup({}, "advanced");
         EXPECT_THAT(setup.line("step_tail"), HasSubstr("decided at the first batch"));
         setup.moved();
         EXPECT_THAT(setup.line("step_tail"), HasSubstr("calibrate is off"));
       }},
      {"precision",
       [] {
         EXPECT_EQ(output_dtype("bf16"), at::kBFloat16);
         EXPECT_EQ(output_dtype("fp32"), at::kFloat);
       }},
      {"channels_last",
       [] {
         torch::manual_seed(0);
         torch::nn::Sequential model(torch::nn::Conv2d(3, 4, 3), torch::nn::AdaptiveAvgPool2d(1), torch::nn::Flatten(),
                                     torch::nn::Linear(4, 3));
         torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
         PerformanceConfig config("basic");
         config.set("channels_last", std::string("on"));
         Trainer trainer(*model, optimizer, supervised(model, torch::nn::CrossEntropyLoss()), config,
                         {.calibrate = false});
         trainer.step({torch::randn({2, 3, 6, 6}), torch::zeros({2}, at::kLong)});
         EXPECT_TRUE(model->parameters()[0].is_contiguous(at::MemoryFormat::ChannelsLast));
         trainer.revert();
         EXPECT_TRUE(model->parameters()[0].is_contiguous());
       }},
      {"threads",
       [] {
         const int before = at::get_num_threads();
         at::set_num_threads(2);
         {
           Training setup({{"threads", int64_t{1}}});
           EXPECT_EQ(at::get_num_threads(), 1);
         }
         EXPECT_EQ(at::get_num_threads(), 2);
         at::set_num_threads(before);
       }},
      {"flush_denormals",
       [] {
         {
           Training setup({{"flush_denormals", std::string("on")}});
           EXPECT_EQ(flush_state().flushing, flush_state().threads);
         }
         EXPECT_EQ(flush_state().flushing, 0);
       }},
      {"allocator",
       [] {
         EXPECT_THAT(Training({{"allocator", std::string("system")}}).line("allocator"), HasSubstr("off"));
         EXPECT_THAT(Training({{"allocator", std::string("retain")}}).line("allocator"), Not(HasSubstr("off: ")));
       }},
      {"allocator_retain_limit",
       [] {
         Training setup({{"allocator", std::string("retain")}, {"allocator_retain_limit", std::string("64MiB")}});
         std::string costs;
         for (const auto& line : setup.trainer->settings()) costs += line.name == "allocator" ? line.cost : "";
         // Where the environment decides, nothing is applied and the line says so.
         EXPECT_TRUE(costs.find("64") != std::string::npos || costs.empty()) << costs;
       }},
      {"step_tail",
       [] {
         Training on({{"step_tail", std::string("on")}, {"clip_norm", 0.01}}),
             off({{"step_tail", std::string("off")}}, "advanced");
         EXPECT_THAT(on.line("step_tail"), testing::StartsWith("on: step_tail: asked for. Clip and update are one"));
         EXPECT_NEAR(on.moved().norm().item<double>(), 0.01, 1e-5);
         EXPECT_THAT(off.line("step_tail"), testing::StartsWith("off: "));
         on.trainer->revert();
         EXPECT_THAT(on.line("step_tail"), testing::StartsWith("off: "));
       }},
      {"optimizer_state",
       [] {
         for (const char* format : {"bf16", "int8"}) {
           Training basic({{"optimizer_state", std::string(format)}});
           EXPECT_THAT(basic.line("optimizer_state"), HasSubstr("step_tail is 'off'"));
           Training setup({{"optimizer_state", std::string(format)}}, "advanced");
           EXPECT_THAT(setup.line("optimizer_state"), HasSubstr(std::string("on: the optimizer's running averages are "
                                                                            "kept as ") +
                                                                format));
           Training ours({{"optimizer_state", std::string(format)}}, "basic", 1.0, optim::SGDOptions(1.0));
           EXPECT_THAT(ours.line("optimizer_state"), testing::StartsWith("refused"));
           EXPECT_THAT(ours.line("optimizer_state"), HasSubstr("give the oxytorch optimizer its state_dtype"));
         }
         Training in_file({{"optimizer_state", std::string("file")}});
         EXPECT_THAT(in_file.line("optimizer_state"), testing::StartsWith("on: state_in_file: asked for."));
         EXPECT_THROW(Training({{"optimizer_state", std::string("file")}, {"step_tail", std::string("on")}}), Error);
       }},
      {"attention",
       [] {
         bool flash = true;
         Training setup({{"attention", std::string("math")}});
         Trainer trainer(*setup.model, *setup.optimizer,
                         [&](const Batch& batch) {
                           flash = at::globalContext().userEnabledFlashSDP();
                           return setup.model->forward(batch.input).square().mean();
                         },
                         setup.config, {.calibrate = false});
         trainer.step({data(1)[0].data, {}});
         EXPECT_FALSE(flash);
       }},
      {"accumulation_steps",
       [] {
         EXPECT_EQ(Training({{"accumulation_steps", int64_t{2}}}).moved().abs().sum().item<double>(), 0);
         EXPECT_GT(Training({}).moved().abs().sum().item<double>(), 0);
       }},
      {"clip_norm", [] { EXPECT_NEAR(Training({{"clip_norm", 0.01}}).moved().norm().item<double>(), 0.01, 1e-5); }},
      {"clip_value",
       [] {
         EXPECT_NEAR(Training({{"clip_value", 0.001}}).moved().abs().max().item<double>(), 0.001, 1e-6);
         Training ours({{"clip_value", 0.001}}, "basic", 1.0, optim::SGDOptions(1.0));
         EXPECT_NEAR(ours.moved().abs().max().item<double>(), 0.001, 1e-6);
       }},
      {"ema_decay",
       [] {
         Training setup({{"ema_decay", 0.5}});
         const auto start = setup.flat();
         setup.moved();
         const auto end = setup.flat();
         const auto guard = setup.trainer->ema_weights();
         EXPECT_TRUE(at::allclose(setup.flat(), (start + end) / 2, 1e-5, 1e-6));
       }},
      {"nonfinite",
       [] {
         Training skips({{"nonfinite", std::string("skip")}});
         EXPECT_EQ(skips.moved(poisoned()).abs().sum().item<double>(), 0);
         EXPECT_EQ(skips.trainer->global_step(), 1);
         EXPECT_THAT(skips.trainer->report(), HasSubstr("skipped 1"));
         EXPECT_TRUE(Training({{"nonfinite", std::string("propagate")}}).moved(poisoned()).isnan().all().item<bool>());
         Training raises({{"nonfinite", std::string("raise")}});
         const auto before = raises.flat();
         try {
           raises.moved(poisoned());
           ADD_FAILURE() << "nothing was thrown";
         } catch (const Error& error) {
           EXPECT_THAT(error.what(), HasSubstr("inf or NaN in gradient 0 of 4"));
         }
         EXPECT_TRUE(at::equal(before, raises.flat()));
         EXPECT_EQ(raises.trainer->global_step(), 0);
       }},
      {"grad_scaler",
       [] {
         for (const char* wanted : {"on", "off"}) {
           Training setup({{"grad_scaler", std::string(wanted)}});
           setup.moved();
           EXPECT_THAT(setup.line("grad_scaler"), testing::StartsWith(wanted));
         }
       }},
      {"schedule",
       [] {
         const auto rates = Training({{"schedule", std::string("cosine")}, {"max_steps", int64_t{4}}}).rates(3);
         EXPECT_GT(rates[0], rates[2]);
       }},
      {"warmup_steps",
       [] {
         Training setup({{"schedule", std::string("cosine")}, {"max_steps", int64_t{7}}, {"warmup_steps", int64_t{2}}});
         EXPECT_NEAR(setup.rates(1)[0], 1.0 / 3, 1e-12);
       }},
      {"min_lr_ratio",
       [] {
         Training setup({{"schedule", std::string("cosine")}, {"max_steps", int64_t{4}}, {"min_lr_ratio", 0.5}});
         for (const double rate : setup.rates(4)) EXPECT_GE(rate, 0.5);
         EXPECT_NEAR(setup.optimizer->param_groups()[0].options().get_lr(), 0.5, 1e-12);
       }},
      {"max_steps",
       [] {
         Training setup({{"max_steps", int64_t{3}}});
         auto loader = data(5);
         EXPECT_EQ(setup.trainer->fit(loader, 0).steps, 3);
       }},
      {"steps_planned",
       [] {
         const auto refused = [](const Settings& given) -> std::string {
           try {
             Training setup(given);
           } catch (const Error& error) {
             return error.what();
           }
           return "";
         };
         EXPECT_THAT(refused({{"steps_planned", int64_t{5}}}), HasSubstr("calibrate = false tries nothing"));
         EXPECT_THAT(refused({{"tune_seconds", 0.5}}), HasSubstr("calibrate = false tries nothing"));
         EXPECT_THAT(refused({{"remember", false}}), HasSubstr("calibrate = false tries nothing"));
       }},
      {"tune_seconds",
       [] {  // the rest is in auto_test.cpp
         Training setup({{"tune_seconds", 0.05}, {"steps_planned", int64_t{100}}}, "basic", 1.0, std::nullopt, true);
         setup.moved();
         EXPECT_THAT(setup.line("allocator"), Not(HasSubstr("decided at the first batch")));
       }},
      {"remember",
       [] {  // the rest is in auto_test.cpp
         Training setup({{"remember", false}}, "basic", 1.0, std::nullopt, true);
         setup.moved();
         EXPECT_THAT(setup.line("allocator"), Not(HasSubstr("decided at the first batch")));
       }},
      {"early_stopping_patience", [] { EXPECT_EQ(epochs_until_stop({1, 2, 3}, {}), 2); }},
      {"early_stopping_min_delta",
       [] {
         EXPECT_EQ(epochs_until_stop({3, 2, 1}, {}), 3);
         EXPECT_EQ(epochs_until_stop({3, 2, 1}, {{"early_stopping_min_delta", 100.0}}), 2);
       }},
      {"early_stopping_mode",
       [] { EXPECT_EQ(epochs_until_stop({1, 2, 3}, {{"early_stopping_mode", std::string("max")}}), 3); }},
      {"early_stopping_restore_best",
       [] {
         Training setup({{"early_stopping_patience", int64_t{2}}, {"early_stopping_restore_best", true}}, "basic", 0.1);
         auto loader = data(2);
         std::vector<at::Tensor> seen;
         setup.trainer->fit(loader, 3, 0, [&] {
           seen.push_back(setup.flat());
           return static_cast<double>(seen.size());
         });
         EXPECT_TRUE(at::equal(setup.flat(), seen.front()));
       }},
      {"seed",
       [] {
         const auto drawn = [](int64_t seed) {
           Training setup({{"seed", seed}});
           return torch::rand({4});
         };
         EXPECT_TRUE(at::equal(drawn(5), drawn(5)));
         EXPECT_FALSE(at::equal(drawn(5), drawn(6)));
       }},
      {"deterministic",
       [] {
         auto& context = at::globalContext();
         EXPECT_FALSE(context.deterministicAlgorithms());
         {
           Training outer({{"deterministic", true}});
           {
             Training inner({{"deterministic", true}});
             EXPECT_TRUE(context.deterministicAlgorithms());
           }
           EXPECT_TRUE(context.deterministicAlgorithms()) << "the other still wants them";
         }
         EXPECT_FALSE(context.deterministicAlgorithms());
       }},
      {"memory_limit",
       [] {
         {
           Training outer({{"memory_limit", std::string("90%")}});
           Training inner({{"memory_limit", std::string("80%")}});
           EXPECT_EQ(memory::limit(), Size::parse("80%").resolve(*read_memory().limit));
         }
         EXPECT_FALSE(memory::limit());
       }},
      {"goal",
       [] {
         Training one({{"goal", std::string("memory")}});
         one.trainer->step(Batch(data(1)[0].data, data(1)[0].target));
         EXPECT_THAT(one.trainer->report(), HasSubstr("the model calls no blocks"));
       }},
      {"max_slowdown",
       [] {
         EXPECT_THROW(Training({{"max_slowdown", 1.5}}), Error) << "the goal is speed";
         EXPECT_THROW(Training({{"max_slowdown", 0.5}}), Error);
         Training one({{"goal", std::string("memory")}, {"max_slowdown", 1.5}});  // shown by GradientCheckpointingTest
       }},
      {"max_growth",
       [] {
         EXPECT_THROW(Training({{"goal", std::string("memory")}, {"max_growth", 2.0}}), Error) << "nothing may grow";
         EXPECT_THROW(Training({{"max_growth", 0.5}}), Error);
         Training one({{"max_growth", 2.0}});  // shown by TunerTest
       }},
      {"gradient_checkpointing",
       [] {
         Training one({{"gradient_checkpointing", std::string("1GiB")}});
         EXPECT_THROW(one.trainer->step(Batch(data(1)[0].data, data(1)[0].target)), Error);  // it calls no blocks
       }},
      {"saved_tensors",
       [] {
         EXPECT_THROW(Training({{"saved_tensors", std::string("file")}}), Error) << "nothing is planned";
         Training one({{"gradient_checkpointing", std::string("1GiB")}, {"saved_tensors", std::string("file")}});
         // shown by GradientCheckpointingTest
       }},
      {"num_workers",
       [] {
         const Fed fed("num_workers", int64_t{3});
         EXPECT_EQ(fed.inside.threads, 3);
         EXPECT_EQ(fed.after.threads, 1);
         EXPECT_THAT(fed.lines, HasSubstr("num_workers on: threads = 3 of the loader."));
         EXPECT_THAT(fed.elsewhere, HasSubstr("refused: batches do not come from an oxytorch::data::TensorLoader"));
         EXPECT_THAT(Fed("num_workers", int64_t{0}).lines, HasSubstr("num_workers refused: "));
         EXPECT_THAT(Fed("num_workers", std::string("keep")).lines, Not(HasSubstr("num_workers")));
       }},
      {"prefetch",
       [] {
         const Fed fed("prefetch", int64_t{5});
         EXPECT_EQ(fed.inside.prefetch, 5);
         EXPECT_EQ(fed.after.prefetch, 1);
         EXPECT_THAT(fed.lines, HasSubstr("prefetch on: "));
       }},
      {"pin_memory",
       [] {
         EXPECT_THAT(Fed("pin_memory", std::string("on")).lines, HasSubstr("pin_memory refused: this loader pins"));
         EXPECT_THAT(Fed("pin_memory", std::string("off")).lines, HasSubstr("pin_memory on: "));
       }},
      {"cache",
       [] {
         const Fed fed("cache", std::string("1MiB"));
         ASSERT_NE(fed.inside.cache, nullptr);
         EXPECT_GT(fed.inside.cache->stats().memory.hits, 0) << "the second epoch's";
         EXPECT_EQ(fed.after.cache, nullptr);
         EXPECT_THAT(fed.lines, HasSubstr("cache on: cache = 1MiB of the loader."));
       }},
      {"progress",
       [] {
         EXPECT_THAT(progress_of("on"), ContainsRegex("epoch 1  step 1  loss [0-9]"));
         EXPECT_EQ(progress_of("off"), "");
       }},
  };
  return table;
}

ConfigValue other_value(const ConfigField& field) {
  switch (field.type) {
    case ConfigField::Type::Flag: return !std::get<bool>(field.basic);
    case ConfigField::Type::Size: return std::string("1GB");
    case ConfigField::Type::Number: return 0.5;
    case ConfigField::Type::Integer: return int64_t{7};
    case ConfigField::Type::Choice: break;
  }
  return field.choices.back();
}

TEST(TrainerSettingsTest, EachHasAnEffectOrIsRefusedWithASentence) {
  for (const auto& field : PerformanceConfig::fields()) {
    SCOPED_TRACE(field.key);
    const auto effect = effects().find(field.key);
    if (effect != effects().end()) {
      EXPECT_EQ(refusal(field.key, ConfigUser::CppTrainer), "");
      effect->second();
      continue;
    }
    try {
      Training setup({{field.key.c_str(), other_value(field)}});
      ADD_FAILURE() << "neither an effect nor a refusal is known here; add a row";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::NotSupported);
      EXPECT_THAT(error.what(), HasSubstr(field.key + " = "));
      EXPECT_THAT(error.what(), HasSubstr(refusal(field.key, ConfigUser::CppTrainer)));
    }
  }
  const std::set<std::string> refused{"compile", "interop_threads", "log_every", "monitor"};
  EXPECT_EQ(effects().size() + refused.size(), PerformanceConfig::fields().size());
}

TEST(TrainerSettingsTest, OneCycleFollowsTorchsFormula) {
  constexpr int kSteps = 20;
  for (const auto& [warmup, least] : std::vector<std::pair<int64_t, double>>{{0, 0}, {4, 0}, {0, 0.25}, {6, 0.1}}) {
    Settings given{{"schedule", std::string("one_cycle")}, {"max_steps", int64_t{kSteps}}};
    if (warmup > 0) given.emplace_back("warmup_steps", warmup);
    if (least > 0) given.emplace_back("min_lr_ratio", least);
    Training setup(given, "basic", 1.0, optim::SGDOptions(1.0).momentum(0.9));
    const auto rates = setup.rates(kSteps - 1);
    // torch.optim.lr_scheduler.OneCycleLR with pct_start = warmup / steps, final_div_factor = 1 / (25 * least).
    const double start = 1.0 / 25, floor = least > 0 ? least : start / 1e4;
    const double rise = (warmup > 0 ? static_cast<double>(warmup) / kSteps : 0.3) * kSteps - 1;
    const auto cosine = [](double from, double to, double share) {
      return to + (from - to) / 2 * (std::cos(M_PI * share) + 1);
    };
    for (int t = 0; t < kSteps - 1; ++t) {
      const double wanted = t <= rise ? cosine(start, 1, t / rise) : cosine(1, floor, (t - rise) / (kSteps - 1 - rise));
      EXPECT_NEAR(rates[static_cast<size_t>(t)], wanted, 1e-12) << "step " << t << ", warm-up " << warmup;
    }
  }
}

TEST(TrainerSettingsTest, WhatTheOptimizerWasToldOtherwiseIsRefused) {
  const auto told = [](const Settings& given, const optim::SGDOptions& ours) -> std::string {
    try {
      Training setup(given, "basic", 1.0, ours);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(told({{"clip_norm", 0.5}}, optim::SGDOptions(1.0).clip_norm(1.0)),
              HasSubstr("clip_norm = 0.5 was given"));
  EXPECT_THAT(told({{"clip_value", 0.5}}, optim::SGDOptions(1.0).clip_value(1.0)), HasSubstr("clip_value"));
  EXPECT_THAT(told({{"ema_decay", 0.5}}, optim::SGDOptions(1.0).ema_decay(0.9)), HasSubstr("ema_decay"));
  EXPECT_THAT(told({{"nonfinite", std::string("raise")}}, optim::SGDOptions(1.0)), HasSubstr("nonfinite = skip"));
  EXPECT_EQ(told({{"clip_norm", 0.5}, {"ema_decay", 0.5}}, optim::SGDOptions(1.0).clip_norm(0.5).ema_decay(0.5)), "");
}

TEST(TrainerSettingsTest, WhatBothAgreeOnIsDoneOnce) {
  for (const bool average : {false, true}) {
    const auto ours = [&] {
      return average ? optim::SGDOptions(1.0).ema_decay(0.5) : optim::SGDOptions(1.0).clip_norm(0.01);
    };
    const Settings given{{average ? "ema_decay" : "clip_norm", average ? 0.5 : 0.01}};
    std::vector<at::Tensor> ends;
    for (const int both : {0, 1, 2}) {
      Training setup(both == 2 ? Settings{} : given, "basic", 1.0, both == 0 ? optim::SGDOptions(1.0) : ours());
      for (const auto& one : data(3)) setup.trainer->step({one.data, one.target});
      ends.push_back(setup.flat());
      if (average) {
        const auto guard = setup.trainer->ema_weights();
        ends.back() = at::cat({ends.back(), setup.flat()});
      }
    }
    EXPECT_TRUE(at::allclose(ends[0], ends[1], 1e-5, 1e-7));
    EXPECT_TRUE(at::allclose(ends[0], ends[2], 1e-5, 1e-7));
  }
}

TEST(TrainerSettingsTest, AStepThatIsNotFiniteIsAsIfItHadNotBeen) {
  std::vector<at::Tensor> ends;
  for (const bool poison : {true, false}) {
    Training setup({{"nonfinite", std::string("skip")}, {"ema_decay", 0.5}}, "basic", 0.1);
    const auto batches = data(2);
    setup.moved(batches[0]);
    if (poison) setup.moved(poisoned());
    setup.moved(batches[1]);
    ends.push_back(setup.flat());
    const auto guard = setup.trainer->ema_weights();
    ends.back() = at::cat({ends.back(), setup.flat()});
  }
  EXPECT_TRUE(at::equal(ends[0], ends[1]));
}

TEST(TrainerSettingsTest, FiniteGradientsWhoseNormOverflowsAreSteppedWith) {
  torch::manual_seed(0);
  torch::nn::Linear model(torch::nn::LinearOptions(2, 1).bias(false));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-30));
  PerformanceConfig config("basic");
  config.set("nonfinite", std::string("skip"));
  Trainer trainer(*model, optimizer, [&](const Batch& batch) { return model->forward(batch.input).sum(); }, config,
                  {.calibrate = false});
  const auto before = model->weight.detach().clone();
  trainer.step({torch::full({1, 2}, 3e38F), {}});
  EXPECT_GT((model->weight - before).abs().min().item<double>(), 0);
  trainer.revert();
}

}  // namespace
}  // namespace oxytorch
