#include "oxytorch/machine/hardware.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace oxytorch::machine {
namespace {

using testing::HasSubstr;

const Hardware& row(const char* name) {
  const Hardware* found = find_hardware(name).hardware;
  EXPECT_NE(found, nullptr) << name;
  return *found;
}

TEST(Hardware, NamesAsDriversReportThem) {
  for (const auto& [reported, name] :
       std::vector<std::pair<const char*, const char*>>{{"NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"},
                                                        {"NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"},
                                                        {"NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"},
                                                        {"NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"},
                                                        {"NVIDIA H100 80GB HBM3", "H100 SXM"},
                                                        {"NVIDIA H100 PCIe", "H100 PCIe"},
                                                        {"NVIDIA H100 NVL", "H100 NVL"},
                                                        {"NVIDIA H200", "H200 SXM"},
                                                        {"NVIDIA H200 NVL", "H200 NVL"},
                                                        {"NVIDIA B200", "B200"},
                                                        {"GAUDI2", "Gaudi 2"},
                                                        {"HL-225", "Gaudi 2"},
                                                        {"GAUDI3", "Gaudi 3"},
                                                        {"HL-325L", "Gaudi 3"},
                                                        {"gaudi 3", "Gaudi 3"}}) {
    EXPECT_EQ(row(reported).name, name) << reported;
  }
  EXPECT_THAT(find_hardware("HL-325L").reason, HasSubstr("'HL-325L' is the Gaudi 3"));
}

TEST(Hardware, UnknownAndAmbiguousNamesGiveNoneAndSayWhy) {
  const auto ambiguous = find_hardware("H100");
  EXPECT_EQ(ambiguous.hardware, nullptr);
  EXPECT_EQ(ambiguous.reason, "'H100' may be 'H100 PCIe', 'H100 SXM' or 'H100 NVL'; say which.");
  for (const char* name : {"", "   ", "Radeon", "NVIDIA", "H1000", "\xff\x01", "AMD Instinct MI300X"}) {
    const auto none = find_hardware(name);
    EXPECT_EQ(none.hardware, nullptr) << name;
    EXPECT_THAT(none.reason, HasSubstr("no published figures are known for"));
  }
  EXPECT_THAT(find_hardware("Gaudi 4").reason, HasSubstr("did you mean 'Gaudi 2'?"));
}

TEST(Hardware, EveryRowIsWholeAndFindsItself) {
  std::set<std::string> names;
  for (const Hardware& one : hardware_table()) {
    EXPECT_TRUE(names.insert(one.name).second);
    EXPECT_EQ(find_hardware(one.name).hardware, &one);
    EXPECT_FALSE(one.source.empty());
    EXPECT_GE(one.memory_bytes, 40'000'000'000ULL);
    EXPECT_GT(one.memory_bytes_per_s, 1e12);
    EXPECT_GT(one.link_bytes_per_s, 1e11);
    EXPECT_GE(one.watts, 250);
    EXPECT_GT(one.peak_ops_per_s.at("bf16"), 3e14);
    if (one.maker != "NVIDIA") continue;
    // NVIDIA's matrix units halve from each format to the next wider one.
    const auto& peak = one.peak_ops_per_s;
    EXPECT_EQ(peak.at("fp16"), peak.at("bf16"));
    EXPECT_NEAR(peak.at("tf32") / peak.at("bf16"), 0.5, 0.001);
    EXPECT_NEAR(peak.at("int8") / peak.at("bf16"), 2, 0.002);
    if (peak.count("fp8") != 0) {
      EXPECT_EQ(peak.at("fp8"), peak.at("int8"));
    }
  }
  EXPECT_EQ(names.size(), 13U);
}

TEST(Hardware, PeaksFollowFromUnitsAndClocks) {
  // Multiprocessors x clock x dense bf16 operations a clock of one, from the architecture papers.
  EXPECT_NEAR(row("NVIDIA A100-SXM4-80GB").peak_ops_per_s.at("bf16"), 108 * 1.41e9 * 2048, 1e12);
  EXPECT_NEAR(row("NVIDIA H100 80GB HBM3").peak_ops_per_s.at("bf16"), 132 * 1.83e9 * 4096, 1e12);
  // 24 ports of 100 and 200 Gb/s.
  EXPECT_EQ(row("Gaudi 2").link_bytes_per_s, 24 * 100e9 / 8);
  EXPECT_EQ(row("Gaudi 3").link_bytes_per_s, 24 * 200e9 / 8);
  EXPECT_EQ(row("Gaudi 3").memory_bytes, 128'000'000'000ULL);
}

TEST(Hardware, ProcessorsByTheirInstructions) {
  CpuFeatures features;
  EXPECT_EQ(cpu_class(features), nullptr);
  features.avx2 = features.fma = true;
  EXPECT_EQ(cpu_class(features)->name, "AVX2");
  features.avx512f = true;
  EXPECT_EQ(cpu_class(features)->name, "AVX-512");
  features.avx512_bf16 = true;
  EXPECT_EQ(cpu_class(features)->name, "AVX-512 BF16");
  features.amx_tile = features.amx_bf16 = true;
  const CpuClass& amx = *cpu_class(features);
  EXPECT_EQ(amx.name, "AMX");
  // A 56-core part at 2 GHz: 1024 operations a cycle and core.
  EXPECT_DOUBLE_EQ(cpu_peak(amx, "bf16", 56, 2e9).value(), 1024 * 56 * 2e9);
  EXPECT_FALSE(cpu_peak(cpu_classes()[0], "bf16", 1, 1e9));
  for (const CpuClass& one : cpu_classes()) {
    EXPECT_EQ(one.ops_per_cycle.at("fp32"), 2 * one.ops_per_cycle.at("fp64"));
  }
}

}  // namespace
}  // namespace oxytorch::machine
