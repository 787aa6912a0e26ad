/// What the makers publish of their accelerators and processors: the denominator of "efficiency = actual / possible".
///
/// Peaks are dense: where a data sheet prints the number with structured sparsity, half of it stands here. They assume
/// the boost clock of the data sheet; a card that is throttled, or a part with another clock, reaches less.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "oxytorch/api.h"
#include "oxytorch/system.h"

namespace oxytorch::machine {

/// One accelerator as its data sheet has it.
struct Hardware {
  std::string name;            ///< "H100 SXM"
  std::string maker;           ///< "NVIDIA", "Intel"
  std::uint64_t memory_bytes;  ///< the sheet's GB times 10^9; a device reports its own, up to 7% more
  double memory_bytes_per_s;   ///< peak of the device memory
  /// Dense operations a second (a multiply-add is two) by dtype: "fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8".
  /// With matrix units where they serve the dtype; a dtype that the sheet does not give is left out.
  std::map<std::string, double> peak_ops_per_s;
  std::string link;         ///< to the other accelerators of the node: "nvlink", "roce", "pcie"
  double link_bytes_per_s;  ///< one way, all links of one accelerator together
  double watts;             ///< board power limit as shipped
  std::string source;
};

/// A row of the table, or none; the reason says in one sentence what was found, or why nothing was.
struct HardwareMatch {
  const Hardware* hardware;  ///< lives as long as the process
  std::string reason;
};

OXY_API std::span<const Hardware> hardware_table();

/// By the name that a driver, torch or a backend reports ("NVIDIA H100 80GB HBM3", "HL-225"), or by the table's own.
/// A name that fits several rows ("A100") gives none, and the reason lists them.
OXY_API HardwareMatch find_hardware(std::string_view name);

/// Operations a cycle and core of one kind of processor.
struct CpuClass {
  std::string name;                             ///< "AVX2", "AVX-512", "AVX-512 BF16", "AMX"
  std::map<std::string, double> ops_per_cycle;  ///< by dtype, dense, a multiply-add being two
  std::string source;
};

OXY_API std::span<const CpuClass> cpu_classes();

/// The best class whose instructions `features` has; none for a processor without AVX2 and FMA.
OXY_API const CpuClass* cpu_class(const CpuFeatures& features = cpu_features());

/// Operations a second of `cores` cores at `hertz`; empty where the class has none for the dtype: the processor then
/// computes in fp32. An upper bound: parts with one vector unit, or with a lower clock under wide vectors, reach less.
OXY_API std::optional<double> cpu_peak(const CpuClass& kind, const std::string& dtype, int cores, double hertz);

}  // namespace oxytorch::machine
