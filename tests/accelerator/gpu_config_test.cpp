#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>

#include "optim/torch_versions.h"
#include "oxytorch/accelerator.h"
#include "oxytorch/error.h"

namespace oxytorch::accelerator {
namespace {

using testing::HasSubstr;

constexpr std::pair<Float32Backend, Float32Op> kPrecisions[] = {
    {Float32Backend::GENERIC, Float32Op::ALL},   {Float32Backend::CUDA, Float32Op::ALL},
    {Float32Backend::CUDA, Float32Op::MATMUL},   {Float32Backend::CUDA, Float32Op::CONV},
    {Float32Backend::CUDA, Float32Op::RNN},      {Float32Backend::MKLDNN, Float32Op::ALL},
    {Float32Backend::MKLDNN, Float32Op::MATMUL}, {Float32Backend::MKLDNN, Float32Op::CONV},
    {Float32Backend::MKLDNN, Float32Op::RNN}};

/// All that GPUConfig touches, as torch's readers tell it.
std::string state() {
  auto& context = at::globalContext();
  std::string text;
  for (const auto& [backend, op] : kPrecisions) text += precision2str(float32_precision(backend, op)) + ' ';
  for (const bool flag :
       {context.benchmarkCuDNN(), context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(),
        context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(), context.userEnabledCuDNNSDP(),
        context.userEnabledMathSDP()}) {
    text += flag ? '1' : '0';
  }
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return text + ' ' + at::toString(at::autocast::get_autocast_dtype(at::kCPU)) + ' ' +
         at::toString(at::autocast::get_autocast_dtype(at::kCUDA)) + ' ' + std::to_string(at::get_num_threads()) + ' ' +
         (visible == nullptr ? "unset" : visible);
}

/// What torch's readers tell under each parent: two equal answers mean that the same values are stored.
std::string stored_state() {
  std::string text;
  const auto generic = float32_precision(Float32Backend::GENERIC, Float32Op::ALL);
  for (const auto parent : {Float32Precision::NONE, Float32Precision::IEEE, Float32Precision::TF32}) {
    write_float32_precision(Float32Backend::GENERIC, Float32Op::ALL, parent);
    text += state() + " | ";
  }
  write_float32_precision(Float32Backend::GENERIC, Float32Op::ALL, generic);
  return text;
}

GPUConfig everything() {
  GPUConfig config;
  config.matmul_precision = "tf32";
  config.conv_precision = "ieee";
  config.cpu_precision = "bf16";
  config.cudnn_benchmark = true;
  config.attention = {"math", "flash"};
  config.autocast_dtype = "fp16";
  config.threads = 1;
  return config;
}

CpuFeatures amx() {
  CpuFeatures features;
  features.avx2 = features.fma = features.avx512f = features.avx512_bf16 = features.avx512_fp16 = true;
  features.amx_tile = features.amx_bf16 = features.amx_fp16 = true;
  return features;
}

const FieldReport& row(const Applied& applied, const std::string& field) {
  for (const FieldReport& one : applied.report()) {
    if (one.field == field) return one;
  }
  throw std::out_of_range(field);
}

/// A made-up CUDA runtime; it keeps what it was told.
struct FakeRuntime {
  int count = 4;
  bool initialized = false;
  std::vector<double> fractions = std::vector<double>(8, 1.0);
  int fail_on = -1;

  DeviceRuntime runtime() {
    return {[this] { return count; }, [this] { return initialized; },
            [](int) { return std::string("NVIDIA H100 80GB HBM3"); },
            [this](int index) {
              initialized = true;
              return fractions.at(static_cast<size_t>(index));
            },
            [this](int index, double share) {
              if (index == fail_on && share < 1) throw std::runtime_error("the driver refused");
              fractions.at(static_cast<size_t>(index)) = share;
            }};
  }
};

TEST(GPUConfig, SetsReadsBackAndReverts) {
  const std::string before = stored_state();
  {
    auto applied = everything().apply({}, amx());
    auto& context = at::globalContext();
    EXPECT_TRUE(applied.complete()) << to_text(applied.report());
    EXPECT_EQ(float32_precision(Float32Backend::CUDA, Float32Op::MATMUL), Float32Precision::TF32);
    EXPECT_EQ(float32_precision(Float32Backend::CUDA, Float32Op::CONV), Float32Precision::IEEE);
    EXPECT_EQ(float32_precision(Float32Backend::CUDA, Float32Op::RNN), Float32Precision::IEEE);
    EXPECT_EQ(float32_precision(Float32Backend::MKLDNN, Float32Op::RNN), Float32Precision::BF16);
    EXPECT_TRUE(context.benchmarkCuDNN() && context.userEnabledFlashSDP() && context.userEnabledMathSDP());
    EXPECT_FALSE(context.userEnabledMemEfficientSDP() || context.userEnabledCuDNNSDP());
    const bool card = at::hasCUDA();
    EXPECT_EQ(at::autocast::get_autocast_dtype(card ? at::kCUDA : at::kCPU), at::kHalf);
    EXPECT_EQ(at::get_num_threads(), 1);
    EXPECT_EQ(row(applied, "conv_precision").before, "tf32");
    EXPECT_EQ(row(applied, "attention").now, "flash,math");
    if (!card) {
      EXPECT_THAT(row(applied, "matmul_precision").reason, HasSubstr("no CUDA device here"));
    }
    EXPECT_NE(stored_state(), before);
    applied.revert();
    EXPECT_EQ(stored_state(), before);
    EXPECT_FALSE(applied.active());
  }
  EXPECT_EQ(stored_state(), before);
  { const auto applied = everything().apply({}, amx()); }  // the end of the scope reverts
  EXPECT_EQ(stored_state(), before);
}

void set_parents(Float32Precision generic, Float32Precision whole) {
  write_float32_precision(Float32Backend::GENERIC, Float32Op::ALL, generic);
  for (const auto backend : {Float32Backend::CUDA, Float32Backend::MKLDNN}) {
    write_float32_precision(backend, Float32Op::ALL, whole);
  }
}

/// Applies each precision and reverts it: torch answers as before under every parent, and other products keep theirs.
void expect_exact_way_back() {
  const std::string before = stored_state();
  for (const char* conv : {"ieee", "tf32"}) {
    GPUConfig config;
    config.conv_precision = conv;
    config.cpu_precision = "bf16";
    const auto read = [] {
      const auto products = float32_precision(Float32Backend::CUDA, Float32Op::MATMUL);
      return products == Float32Precision::NONE ? Float32Precision::IEEE : products;  // the same arithmetic
    };
    const auto products = read();
    auto applied = config.apply({}, amx());
    EXPECT_TRUE(applied.complete()) << to_text(applied.report());
    EXPECT_EQ(read(), products);
    applied.revert();
    EXPECT_EQ(stored_state(), before);
    config.matmul_precision = "tf32";
    applied = config.apply({}, amx());
    EXPECT_TRUE(applied.complete()) << to_text(applied.report());
    applied.revert();
    EXPECT_EQ(stored_state(), before);
  }
}

TEST(GPUConfig, RevertsToWhatWasStoredUnderAnyParents) {
  constexpr Float32Precision kWords[] = {Float32Precision::NONE, Float32Precision::IEEE, Float32Precision::TF32};
  const std::string untouched = stored_state();
  for (const auto generic : kWords) {
    for (const auto whole : kWords) {
      set_parents(generic, whole);
      expect_exact_way_back();  // cuDNN's unwritten default, which nobody can write again
    }
  }
  set_parents(Float32Precision::NONE, Float32Precision::NONE);
  EXPECT_EQ(stored_state(), untouched);
  // Every value that a user may have written. cuDNN's default is gone for this process afterwards.
  for (const auto generic : kWords) {
    for (const auto whole : kWords) {
      for (const auto conv : kWords) {
        for (const auto products : kWords) {
          set_parents(generic, whole);
          write_float32_precision(Float32Backend::CUDA, Float32Op::CONV, conv);
          write_float32_precision(Float32Backend::CUDA, Float32Op::MATMUL, products);
          expect_exact_way_back();
        }
      }
    }
  }
  set_parents(Float32Precision::NONE, Float32Precision::NONE);
  write_float32_precision(Float32Backend::CUDA, Float32Op::CONV, Float32Precision::TF32);
  write_float32_precision(Float32Backend::CUDA, Float32Op::MATMUL, Float32Precision::NONE);
}

TEST(GPUConfig, MovedAndKeptSettingsLiveAsLongAsTheyShould) {
  const std::string before = stored_state();
  GPUConfig config;
  config.attention = {"math"};
  Applied outer;
  {
    Applied inner = config.apply();
    outer = std::move(inner);
  }
  EXPECT_FALSE(at::globalContext().userEnabledFlashSDP());
  outer.revert();
  EXPECT_EQ(stored_state(), before);
  { config.apply().keep(); }
  EXPECT_FALSE(at::globalContext().userEnabledFlashSDP());
  at::globalContext().setSDPUseFlash(true);
  at::globalContext().setSDPUseMemEfficient(true);
  at::globalContext().setSDPUseCuDNN(true);
  EXPECT_EQ(stored_state(), before);
}

TEST(GPUConfig, WhatTheProcessorIsSlowerWithIsNotApplied) {
  const std::string before = stored_state();
  GPUConfig config;
  config.device = "cpu";
  config.autocast_dtype = "bf16";
  config.cpu_precision = "bf16";
  const auto applied = config.apply({}, CpuFeatures{});
  EXPECT_EQ(stored_state(), before);
  EXPECT_THAT(row(applied, "cpu_precision").reason, HasSubstr("neither avx512_bf16 nor amx_bf16"));
  EXPECT_THAT(row(applied, "autocast_dtype").reason, HasSubstr("2 to 3 times slower"));
  EXPECT_FALSE(applied.complete());
  config.cpu_precision = "tf32";
  EXPECT_THAT(row(config.apply({}, CpuFeatures{}), "cpu_precision").reason, HasSubstr("amx_fp16"));
  EXPECT_TRUE(row(config.apply({}, amx()), "cpu_precision").applied);
  config.threads = 4096;
  EXPECT_THAT(row(config.apply({}, amx()), "threads").reason, HasSubstr("may use"));
  at::globalContext().setUserEnabledMkldnn(false);
  EXPECT_THAT(row(config.apply({}, amx()), "cpu_precision").reason, HasSubstr("switched off"));
  at::globalContext().setUserEnabledMkldnn(true);
  EXPECT_EQ(stored_state(), before);
}

TEST(GPUConfig, DevicesNarrowWhatIsVisible) {
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  const std::string before = stored_state();
  FakeRuntime fake;
  GPUConfig config;
  config.devices = {2, 0};
  {
    const auto applied = config.apply(fake.runtime());
    EXPECT_STREQ(std::getenv("CUDA_VISIBLE_DEVICES"), "2,0");
    EXPECT_TRUE(applied.complete()) << to_text(applied.report());
  }
  EXPECT_EQ(stored_state(), before);
  // Indices count within what is visible already; UUIDs stay, and the list ends at the first that is none.
  ::setenv("CUDA_VISIBLE_DEVICES", "7, GPU-8a1b ,5,-1,3", 1);
  fake.count = 3;
  {
    const auto applied = config.apply(fake.runtime());
    EXPECT_STREQ(std::getenv("CUDA_VISIBLE_DEVICES"), "5,7");
  }
  EXPECT_STREQ(std::getenv("CUDA_VISIBLE_DEVICES"), "7, GPU-8a1b ,5,-1,3");
  config.devices = {1};
  {
    const auto applied = config.apply(fake.runtime());
    EXPECT_STREQ(std::getenv("CUDA_VISIBLE_DEVICES"), "GPU-8a1b");
  }
  config.devices = {3};
  EXPECT_THROW(static_cast<void>(config.apply(fake.runtime())), Error);
  config.devices = {0};
  fake.initialized = true;
  EXPECT_THAT(row(config.apply(fake.runtime()), "devices").reason, HasSubstr("CUDA is initialised"));
  fake.count = 0;
  config.device = "cuda";
  EXPECT_THAT(row(config.apply(fake.runtime()), "devices").reason, HasSubstr("no CUDA device"));
  config.device = "hpu";
  EXPECT_THAT(row(config.apply(fake.runtime()), "devices").reason, HasSubstr("HABANA_VISIBLE_MODULES"));
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(stored_state(), before);
}

TEST(GPUConfig, MemoryFractionOfEachVisibleDevice) {
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  FakeRuntime fake;
  fake.fractions = {1.0, 0.5, 1.0, 1.0};
  GPUConfig config;
  config.memory_fraction = GPUConfig::parse_fraction("90%");
  {
    const auto applied = config.apply(fake.runtime());
    EXPECT_THAT(fake.fractions, testing::ElementsAre(0.9, 0.9, 0.9, 0.9));
    EXPECT_EQ(row(applied, "memory_fraction").before, "1,0.5,1,1");
    EXPECT_EQ(row(applied, "memory_fraction").now, "0.9");
  }
  EXPECT_THAT(fake.fractions, testing::ElementsAre(1.0, 0.5, 1.0, 1.0));
  config.devices = {3, 1};  // two are left, and they are 0 and 1 now
  fake.initialized = false;
  {
    const auto applied = config.apply(fake.runtime());
    EXPECT_THAT(fake.fractions, testing::ElementsAre(0.9, 0.9, 1.0, 1.0));
  }
  config.device = "hpu";
  EXPECT_THAT(row(config.apply(fake.runtime()), "memory_fraction").reason, HasSubstr("torch.hpu has no such setting"));
  config.device = "cpu";
  EXPECT_FALSE(row(config.apply(fake.runtime()), "memory_fraction").applied);
  // A runtime that keeps another value than it was told.
  auto deaf = fake.runtime();
  deaf.set_memory_fraction = [](int, double) {};
  config.device = "cuda";
  config.devices.reset();
  EXPECT_THAT(row(config.apply(deaf), "memory_fraction").reason, HasSubstr("torch kept"));
}

TEST(GPUConfig, AFailingSetterLeavesNothingBehind) {
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  const std::string before = stored_state();
  FakeRuntime fake;
  fake.fail_on = 2;
  auto config = everything();
  config.devices = {0, 1, 2, 3};
  config.memory_fraction = 0.5;
  EXPECT_THROW(static_cast<void>(config.apply(fake.runtime())), std::runtime_error);
  EXPECT_EQ(stored_state(), before);
  EXPECT_THAT(fake.fractions, testing::Each(1.0));
  // So does an exception between apply and the end of the scope.
  fake.fail_on = -1;
  try {
    const auto applied = everything().apply(fake.runtime(), amx());
    throw std::logic_error("the step failed");
  } catch (const std::logic_error&) {
  }
  EXPECT_EQ(stored_state(), before);
}

TEST(GPUConfig, RefusesWhatCannotBeMeant) {
  const std::string before = stored_state();
  const auto refusal = [](const std::function<void(GPUConfig&)>& change) -> std::string {
    GPUConfig config;
    change(config);
    try {
      static_cast<void>(config.apply());
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(refusal([](auto& c) { c.matmul_precision = "tf23"; }), HasSubstr("did you mean 'tf32'"));
  EXPECT_THAT(refusal([](auto& c) { c.matmul_precision = "bf16"; }), HasSubstr("must be 'ieee' or 'tf32'"));
  EXPECT_THAT(refusal([](auto& c) { c.device = "gpu"; }), HasSubstr("'cuda'"));
  EXPECT_THAT(refusal([](auto& c) { c.attention = std::vector<std::string>{}; }), HasSubstr("attention is empty"));
  EXPECT_THAT(refusal([](auto& c) { c.attention = {"flesh"}; }), HasSubstr("did you mean 'flash'"));
  EXPECT_THAT(refusal([](auto& c) { c.devices = {0, 0}; }), HasSubstr("twice"));
  EXPECT_THAT(refusal([](auto& c) { c.devices = {-1}; }), HasSubstr("count from 0"));
  EXPECT_THAT(refusal([](auto& c) { c.memory_fraction = 1.5; }), HasSubstr("at most 1"));
  EXPECT_THAT(refusal([](auto& c) { c.memory_fraction = std::nan(""); }), HasSubstr("at most 1"));
  EXPECT_THAT(refusal([](auto& c) { c.threads = 0; }), HasSubstr("from 1 to 4096"));
  EXPECT_THAT(refusal([](auto& c) { c.deterministic = c.cudnn_benchmark = true; }), HasSubstr("contradict"));
  for (const char* text : {"", "0", "0%", "101%", "1.5", "x", "90", "nan", "-1"}) {
    EXPECT_THROW(static_cast<void>(GPUConfig::parse_fraction(text)), Error) << text;
  }
  EXPECT_EQ(stored_state(), before);
}

TEST(GPUConfig, DeterminismTellsOfTheWorkspace) {
  GPUConfig config;
  config.device = "cuda";
  config.deterministic = true;
  ::unsetenv("CUBLAS_WORKSPACE_CONFIG");
  EXPECT_THAT(row(config.apply(), "deterministic").reason, HasSubstr("CUBLAS_WORKSPACE_CONFIG=:4096:8"));
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 1);
  EXPECT_THAT(row(config.apply(), "deterministic").reason, testing::Not(HasSubstr("CUBLAS")));
  ::unsetenv("CUBLAS_WORKSPACE_CONFIG");
  // Warn-only, if the user had it, comes back as it was.
  at::globalContext().setDeterministicAlgorithms(true, true);
  config.apply().revert();
  EXPECT_TRUE(at::globalContext().deterministicAlgorithmsWarnOnly());
  at::globalContext().setDeterministicAlgorithms(false, false);
}

TEST(GPUConfig, PresetsHaveAReasonForEachField) {
  const std::string before = stored_state();
  for (const std::string& name : GPUConfig::presets()) {
    const auto config = GPUConfig::preset(name);
    config.check();
    EXPECT_EQ(config.preset_name, name);
    for (const auto& [field, value] : config.values()) {
      ASSERT_EQ(config.reasons.count(field), 1U) << name << ' ' << field;
      EXPECT_TRUE(config.reasons.at(field).ends_with('.'));
      EXPECT_THAT(config.explain(), HasSubstr(config.reasons.at(field)));
    }
    const auto applied = config.apply();
    EXPECT_FALSE(applied.report().empty());
  }
  EXPECT_EQ(stored_state(), before);
  EXPECT_THAT(GPUConfig::preset("h100").reasons.at("matmul_precision"), HasSubstr("494.5 against 67 TFLOP/s"));
  EXPECT_THAT(GPUConfig::preset("Gaudi 3").reasons.at("autocast_dtype"), HasSubstr("1835 TFLOP/s"));
  EXPECT_EQ(GPUConfig::preset("cpu-amx").cpu_precision, "bf16");
  EXPECT_EQ(GPUConfig::preset("cpu-avx512").cpu_precision, "ieee");
  try {
    GPUConfig::preset("A10");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("did you mean 'A100'"));
  }
  FakeRuntime fake;
  fake.initialized = true;
  EXPECT_THAT(row(GPUConfig::preset("A100").apply(fake.runtime()), "preset").reason, HasSubstr("another one"));
  const auto right = GPUConfig::preset("H100").apply(fake.runtime());
  EXPECT_THROW(row(right, "preset"), std::out_of_range);
}

}  // namespace
}  // namespace oxytorch::accelerator
