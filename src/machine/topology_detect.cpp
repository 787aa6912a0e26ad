// TopologyConfig::detect: launcher's variables, backends, adapters, cgroup limits.
#include <algorithm>
#include <cstdlib>

#include "machine/host_reader.h"
#include "oxytorch/error.h"
#include "oxytorch/machine/hardware.h"
#include "oxytorch/machine/topology.h"

namespace oxytorch::machine {
namespace {

class Detector {
 public:
  explicit Detector(const TopologySources& sources) : sources_(sources), host_({sources.root, ""}) {}

  TopologyConfig detect() {
    find_nodes();
    find_accelerators();
    find_network();
    if (const auto limit = host_.memory().limit; limit && *limit > 0 && *limit <= INT64_MAX) {
      put("host_memory", static_cast<std::int64_t>(*limit), "this machine");
    }
    if (host_.cores().logical) put("cores_per_node", std::int64_t{host_.cores().usable_physical}, "this machine");
    // A container may show fewer cores than accelerators; what was found stands, and nobody is told a contradiction.
    const auto cores = config_.whole("cores_per_node");
    if (cores && *cores < config_.accelerators_per_node()) config_.set("cores_per_node", std::string("none"));
    return config_;
  }

 private:
  /// Sets what was found, if it can be meant: a launcher's variable may hold anything.
  void put(const char* key, const ConfigValue& value, const std::string& origin) {
    try {
      config_.set(key, value, origin);
    } catch (const Error&) {
    }
  }

  [[nodiscard]] std::optional<std::string> variable(const std::string& name) const {
    if (sources_.environment) {
      const auto found = sources_.environment->find(name);
      return found == sources_.environment->end() ? std::nullopt : std::optional(found->second);
    }
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  }

  [[nodiscard]] std::optional<std::int64_t> count(const std::string& name) const {
    const auto value = detail::parse<std::int64_t>(variable(name).value_or(""));
    return value && *value > 0 ? value : std::nullopt;
  }

  void find_nodes() {
    const auto world = count("WORLD_SIZE");
    const auto local = count("LOCAL_WORLD_SIZE");
    if (world && local && *world % *local == 0) {
      put("nodes", *world / *local, "WORLD_SIZE");
      return;
    }
    for (const char* name : {"SLURM_JOB_NUM_NODES", "SLURM_NNODES"}) {
      if (const auto nodes = count(name)) {
        put("nodes", *nodes, name);
        return;
      }
    }
  }

  void find_accelerators() {
    std::vector<backend::DeviceInfo> devices;
    std::string origin = "devices given";
    if (sources_.accelerators) {
      devices = *sources_.accelerators;
    } else {
      for (const backend::BackendInfo& one : backend::available_backends()) {
        if (one.score == 0 || one.name == "cpu" || one.name == "sim" || one.devices.empty()) continue;
        devices = one.devices;
        origin = "backend " + one.name;
        break;
      }
    }
    std::int64_t per_node = static_cast<std::int64_t>(devices.size());
    // A task that Slurm gave one of eight GPUs sees one.
    if (const auto slurm = count("SLURM_GPUS_ON_NODE"); slurm && *slurm > per_node) {
      per_node = *slurm;
      origin = "SLURM_GPUS_ON_NODE";
    }
    if (per_node == 0) return;
    put("accelerators_per_node", per_node, origin);
    if (devices.empty() || config_.accelerators_per_node() == 0) return;
    const backend::DeviceInfo& first = devices.front();
    put("accelerator", first.name, origin);
    const Hardware* known = find_hardware(first.name).hardware;
    if (first.memory_bytes > 0 && first.memory_bytes <= INT64_MAX) {
      put("accelerator_memory", static_cast<std::int64_t>(first.memory_bytes), origin);
    } else if (known != nullptr) {
      put("accelerator_memory", static_cast<std::int64_t>(known->memory_bytes), "hardware table");
    }
    if (known != nullptr && per_node > 1) {
      put("node_link", known->link, "hardware table");
      put("node_link_bandwidth", known->link_bytes_per_s, "hardware table");
    }
  }

  void find_network() {
    double bytes_per_s = 0;
    std::string kind;
    for (const std::string& device : host_.names("/sys/class/infiniband")) {
      const std::string folder = "/sys/class/infiniband/" + device;
      const bool efa = host_.link_name(folder + "/device/driver") == "efa";
      for (const std::string& port : host_.names(folder + "/ports")) {
        const std::string place = joined({folder, "/ports/", port});
        if (host_.text(place + "/state").value_or("").find("ACTIVE") == std::string::npos) continue;
        const std::string rate = host_.text(place + "/rate").value_or("");  // "400 Gb/sec (4X NDR)"
        const auto gigabits = detail::parse<double>(rate.substr(0, rate.find(' ')));
        if (!gigabits || !(*gigabits > 0 && *gigabits < 1e5)) continue;
        bytes_per_s += *gigabits * 1e9 / 8;
        kind = efa ? "efa" : host_.text(place + "/link_layer") == "Ethernet" ? "roce" : "infiniband";
      }
    }
    std::string origin = "/sys/class/infiniband";
    if (kind.empty()) {
      origin = "/sys/class/net";
      for (const std::string& name : host_.names(origin)) {
        // Bridges and tunnels have a speed too; what has a device behind it carries the bytes.
        const auto megabits = host_.number(joined({origin, "/", name, "/speed"}));
        if (!host_.exists(joined({origin, "/", name, "/device"})) || !megabits || *megabits <= 0) continue;
        bytes_per_s = std::max(bytes_per_s, static_cast<double>(*megabits) * 1e6 / 8);
        kind = "ethernet";
      }
    }
    if (kind.empty()) return;
    put("network", kind, origin);
    put("network_bandwidth", bytes_per_s, origin);
  }

  const TopologySources& sources_;
  HostReader host_;
  TopologyConfig config_;
};

}  // namespace

TopologyConfig TopologyConfig::detect(const TopologySources& sources) { return Detector(sources).detect(); }

}  // namespace oxytorch::machine
