#include "oxytorch/machine/hardware.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include "base/spelling.h"

namespace oxytorch::machine {
namespace {

constexpr double kGiga = 1e9;
constexpr double kTera = 1e12;

/// A row, and the names by which drivers, torch and people call it.
struct Row {
  Hardware hardware;
  std::vector<std::string> names;
};

std::map<std::string, double> tera(std::map<std::string, double> peaks) {
  for (auto& [dtype, ops] : peaks) ops *= kTera;
  return peaks;
}

Hardware nvidia(const char* name, double gigabytes, double gigabytes_per_s, std::map<std::string, double> peaks,
                double link_gigabytes_per_s, double watts, const char* source) {
  return {name,
          "NVIDIA",
          static_cast<std::uint64_t>(gigabytes * kGiga),
          gigabytes_per_s * kGiga,
          tera(std::move(peaks)),
          "nvlink",
          link_gigabytes_per_s * kGiga,
          watts,
          source};
}

Hardware gaudi(const char* name, double gigabytes, double gigabytes_per_s, std::map<std::string, double> peaks,
               double link_gigabytes_per_s, double watts, const char* source) {
  Hardware one = nvidia(name, gigabytes, gigabytes_per_s, std::move(peaks), link_gigabytes_per_s, watts, source);
  one.maker = "Intel";
  one.link = "roce";
  return one;
}

/// Links: the sheets print both directions of NVLink together; half of it is one way.
const std::vector<Row>& rows() {
  static const std::map<std::string, double> a100{{"fp64", 19.5}, {"fp32", 19.5}, {"tf32", 156},
                                                  {"bf16", 312},  {"fp16", 312},  {"int8", 624}};
  static const std::map<std::string, double> h100_sxm{{"fp64", 67},    {"fp32", 67},  {"tf32", 494.5}, {"bf16", 989.5},
                                                      {"fp16", 989.5}, {"fp8", 1979}, {"int8", 1979}};
  static const std::map<std::string, double> h100_nvl{
      {"fp64", 60}, {"fp32", 60}, {"tf32", 417.5}, {"bf16", 835.5}, {"fp16", 835.5}, {"fp8", 1670.5}, {"int8", 1670.5}};
  const char* const a100_sheet = "NVIDIA A100 Tensor Core GPU data sheet";
  const char* const h100_sheet = "NVIDIA H100 Tensor Core GPU data sheet, halved where it counts sparsity";
  const char* const h200_sheet = "NVIDIA H200 Tensor Core GPU data sheet, halved where it counts sparsity";
  static const std::vector<Row> table{
      {nvidia("A100 PCIe 40GB", 40, 1555, a100, 300, 250, a100_sheet), {"A100-PCIE-40GB"}},
      {nvidia("A100 SXM 40GB", 40, 1555, a100, 300, 400, a100_sheet), {"A100-SXM4-40GB"}},
      {nvidia("A100 PCIe 80GB", 80, 1935, a100, 300, 300, a100_sheet), {"A100 80GB PCIe", "A100-PCIE-80GB"}},
      {nvidia("A100 SXM 80GB", 80, 2039, a100, 300, 400, a100_sheet), {"A100-SXM4-80GB"}},
      {nvidia("H100 PCIe", 80, 2000,
              {{"fp64", 51}, {"fp32", 51}, {"tf32", 378}, {"bf16", 756}, {"fp16", 756}, {"fp8", 1513}, {"int8", 1513}},
              300, 350, h100_sheet),
       {"H100 PCIe"}},
      {nvidia("H100 SXM", 80, 3350, h100_sxm, 450, 700, h100_sheet), {"H100 80GB HBM3", "H100 SXM5", "H100 SXM5 80GB"}},
      {nvidia("H100 NVL", 94, 3900, h100_nvl, 300, 400, h100_sheet), {"H100 NVL"}},
      {nvidia("H200 SXM", 141, 4800, h100_sxm, 450, 700, h200_sheet), {"H200"}},
      {nvidia("H200 NVL", 141, 4800, h100_nvl, 450, 600, h200_sheet), {"H200 NVL"}},
      {nvidia(
           "B200", 180, 8000,
           {{"fp64", 37}, {"fp32", 75}, {"tf32", 1125}, {"bf16", 2250}, {"fp16", 2250}, {"fp8", 4500}, {"int8", 4500}},
           900, 1000, "NVIDIA HGX B200 and DGX B200 data sheets, an eighth, halved where they count sparsity"),
       {"B200"}},
      {gaudi("Gaudi 2", 96, 2460, {{"bf16", 432}, {"fp8", 865}}, 300, 600,
             "Intel Gaudi 3 white paper, comparison table"),
       {"GAUDI2", "HL-225", "HL-225B", "HL-225H", "HL-225C"}},
      {gaudi("Gaudi 3", 128, 3670, {{"bf16", 1835}, {"fp8", 1835}}, 600, 900,
             "Intel Gaudi 3 at Hot Chips 2024 and white paper, OAM card"),
       {"GAUDI3", "HL-325", "HL-325L"}},
      {gaudi("Gaudi 3 PCIe", 128, 3670, {{"bf16", 1835}, {"fp8", 1835}}, 600, 600, "Intel Gaudi 3 white paper, HL-338"),
       {"HL-338"}},
  };
  return table;
}

/// Letters and digits alone, without the makers' names: "NVIDIA H100 80GB HBM3" and "h100-80gb-hbm3" are one.
std::string plain(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0)
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  for (const std::string_view maker : {"nvidia", "intel", "habana", "tesla"}) {
    if (out.starts_with(maker)) out.erase(0, maker.size());
  }
  return out;
}

bool is_called(const Row& row, const std::string& wanted) {
  return plain(row.hardware.name) == wanted ||
         std::any_of(row.names.begin(), row.names.end(),
                     [&](const std::string& name) { return plain(name) == wanted; });
}

}  // namespace

std::span<const Hardware> hardware_table() {
  static const std::vector<Hardware> table = [] {
    std::vector<Hardware> list;
    for (const Row& row : rows()) list.push_back(row.hardware);
    return list;
  }();
  return table;
}

HardwareMatch find_hardware(std::string_view name) {
  const std::string wanted = plain(name);
  std::vector<std::string> alike;
  std::vector<std::string> all;
  for (std::size_t i = 0; i < rows().size(); ++i) {
    const Row& row = rows()[i];
    if (is_called(row, wanted)) {
      return {&hardware_table()[i],
              in_quotes(name) + " is the " + row.hardware.name + " (" + row.hardware.source + ")."};
    }
    if (wanted.size() >= 4 && plain(row.hardware.name).starts_with(wanted)) alike.push_back(row.hardware.name);
    all.push_back(row.hardware.name);
  }
  if (!alike.empty()) return {nullptr, in_quotes(name) + " may be " + list_of(alike) + "; say which."};
  return {nullptr, "no published figures are known for " + in_quotes(name) + "; " + did_you_mean(name, all) +
                       "the table has " + list_of(all, false) + "."};
}

std::span<const CpuClass> cpu_classes() {
  // Two vector units a core and a multiply-add in each: 2 units x 2 operations x lanes. AMX: TDPBF16PS is 16 x 16 x 32
  // multiply-adds in 16 cycles.
  static const std::vector<CpuClass> classes{
      {"AVX2", {{"fp64", 16}, {"fp32", 32}}, "two 256-bit FMA units (Intel Haswell and later, AMD Zen 2 and later)"},
      {"AVX-512",
       {{"fp64", 32}, {"fp32", 64}},
       "two 512-bit FMA units (Intel Xeon Gold and Platinum, AMD Zen 5 server); parts with one unit, and AMD Zen 4, "
       "reach half"},
      {"AVX-512 BF16",
       {{"fp64", 32}, {"fp32", 64}, {"bf16", 128}},
       "as AVX-512, and VDPBF16PS with twice the multiply-adds; parts that start one a cycle reach half"},
      {"AMX",
       {{"fp64", 32}, {"fp32", 64}, {"bf16", 1024}, {"int8", 2048}},
       "Intel's optimization manual on AMX: TDPBF16PS does 16,384 operations in 16 cycles; the rest as AVX-512"},
  };
  return classes;
}

const CpuClass* cpu_class(const CpuFeatures& features) {
  const auto classes = cpu_classes();
  if (features.avx512f && features.amx_bf16) return &classes[3];
  if (features.avx512_bf16) return &classes[2];
  if (features.avx512f) return &classes[1];
  return features.avx2 && features.fma ? classes.data() : nullptr;
}

std::optional<double> cpu_peak(const CpuClass& kind, const std::string& dtype, int cores, double hertz) {
  const auto ops = kind.ops_per_cycle.find(dtype);
  if (ops == kind.ops_per_cycle.end()) return std::nullopt;
  return ops->second * cores * hertz;
}

}  // namespace oxytorch::machine
