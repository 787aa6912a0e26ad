/// The cluster as data: nodes, accelerators, links, memory. Planners read it; a file, a caller or detect() fills it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/backend/registry.h"
#include "oxytorch/config.h"

namespace oxytorch::machine {

/// One row of the topology's table.
struct TopologyField {
  enum class Type { Count, Bytes, Rate, Seconds, Name, Choice };
  std::string key;
  Type type;
  std::vector<std::string> choices;
  std::int64_t least;   ///< of a count
  std::string meaning;  ///< one line, for explain()
  /// What may be set, for messages: "a whole number >= 1", "a rate such as '400Gb/s'".
  [[nodiscard]] std::string allowed() const;
};

/// Where detect() looks, for tests; as it stands, this process on this machine.
struct TopologySources {
  std::string root = "/";
  std::optional<std::map<std::string, std::string>> environment = {};  ///< the process's own where empty
  std::optional<std::vector<backend::DeviceInfo>> accelerators = {};   ///< those of the best backend where empty
};

/// A value type; every key may be unknown but `nodes` (1) and `accelerators_per_node` (0). Setters throw
/// Error(InvalidArgument) for an unknown key (with the nearest right one) or a value out of range, Error(InvalidType)
/// for a value of a wrong type. Nothing is half-applied.
class OXY_API TopologyConfig {
 public:
  TopologyConfig();

  /// One flat mapping, as PerformanceConfig's. Sizes ("80GB"), rates ("400Gb/s") and durations ("5us") may be texts or
  /// plain numbers of bytes, bytes a second and seconds. Ends with check().
  static TopologyConfig from_json(std::string_view text, std::string_view origin = "JSON text");
  static TopologyConfig from_yaml(std::string_view text, std::string_view origin = "YAML text");
  static TopologyConfig from_file(const std::string& path);

  /// What this process can find out: nodes from torchrun's or Slurm's variables, accelerators from the backends,
  /// their link from the hardware table, the network from the adapters, memory and cores within the cgroup's limits.
  /// What cannot be found stays unknown; latencies always do. explain() says where each value came from.
  static TopologyConfig detect(const TopologySources& sources = {});

  /// "none" makes a key unknown. Does not check keys against each other: see check().
  void set(std::string_view key, const ConfigValue& value, std::string_view origin = "caller");
  /// Count: int64; Bytes: int64; Rate and Seconds: double; Name and Choice: string; empty where unknown.
  [[nodiscard]] std::optional<ConfigValue> get(std::string_view key) const;
  [[nodiscard]] std::optional<std::int64_t> whole(std::string_view key) const;  ///< of Count and Bytes
  [[nodiscard]] std::optional<double> number(std::string_view key) const;       ///< of Rate and Seconds
  [[nodiscard]] std::optional<std::string> word(std::string_view key) const;    ///< of Name and Choice
  [[nodiscard]] std::string origin(std::string_view key) const;  ///< "default", "caller", "file x.yaml", "SLURM_NNODES"

  /// Error(InvalidArgument) where keys contradict each other: what belongs to accelerators where there are none,
  /// more accelerators than there are cores to feed them.
  void check() const;

  [[nodiscard]] std::int64_t nodes() const { return *whole("nodes"); }
  [[nodiscard]] std::int64_t accelerators_per_node() const { return *whole("accelerators_per_node"); }

  // Derived; empty where an input is unknown or there is nothing to divide by.
  [[nodiscard]] std::int64_t total_accelerators() const { return nodes() * accelerators_per_node(); }
  [[nodiscard]] std::optional<double> total_accelerator_memory() const;  ///< bytes
  /// Bytes a second, one way, between the two halves of the cluster: floor(nodes / 2) times a node's network, taken as
  /// non-blocking; in a single node floor(accelerators / 2) times an accelerator's link.
  [[nodiscard]] std::optional<double> bisection_bytes_per_s() const;
  [[nodiscard]] std::optional<double> network_bytes_per_s_per_accelerator() const;
  [[nodiscard]] std::optional<double> host_memory_per_accelerator() const;  ///< bytes
  [[nodiscard]] std::optional<double> cores_per_accelerator() const;

  /// Every key; unknown ones are null.
  [[nodiscard]] std::string to_json() const;
  /// A table for a reader: value, origin and meaning of each key, then what follows from them.
  [[nodiscard]] std::string explain() const;

  /// The same values; where they came from does not matter.
  bool operator==(const TopologyConfig& other) const;

  static const std::vector<TopologyField>& fields();

 private:
  struct Entry {
    ConfigValue value;
    std::string origin;
  };
  static TopologyConfig from_pairs(const std::vector<std::pair<std::string, ConfigValue>>& pairs,
                                   std::string_view origin);

  std::vector<std::optional<Entry>> entries_;  // by row of the table
};

}  // namespace oxytorch::machine
