// Rows on the drivers of NVIDIA's and Intel Gaudi's accelerators, as far as files tell.
#include <algorithm>

#include "machine/host_reader.h"

namespace oxytorch::machine {
namespace {

void nvidia(HostReader& host) {
  const std::string version_file = "/proc/driver/nvidia/version";
  const auto version = host.text(version_file);
  if (!version) return;
  const auto gpus = host.names("/proc/driver/nvidia/gpus");
  const std::string first_line = version->substr(0, version->find('\n'));
  host.reported("NVIDIA driver", version_file, first_line + ", " + std::to_string(gpus.size()) + " GPUs",
                "Each CUDA release names the least driver it runs on.");
  const auto running = [&](const char* pid_file) { return host.exists(std::string("/run/") + pid_file); };
  if (running("nvidia-persistenced/nvidia-persistenced.pid")) {
    host.fine("NVIDIA persistence", "/run/nvidia-persistenced", "daemon running",
              "The driver stays initialised between processes.");
  } else {
    host.change(
        "NVIDIA persistence", "/run/nvidia-persistenced", "daemon not seen", "on",
        "Without it the driver lets a GPU go when the last process ends and sets it up again at the next start, "
        "seconds each time (NVIDIA: driver persistence). `nvidia-smi -q` shows the state for certain.",
        "nvidia-smi -pm 1");
  }
  // Open kernel modules hand memory to adapters through dma-buf and need no peer module.
  const bool open = version->find("Open Kernel Module") != std::string::npos;
  const bool peer = host.exists("/sys/module/nvidia_peermem") || host.exists("/sys/module/nv_peer_mem");
  const auto adapters = host.names("/sys/class/infiniband");
  const bool efa = std::any_of(adapters.begin(), adapters.end(), [&](const std::string& one) {
    return host.link_name("/sys/class/infiniband/" + one + "/device/driver") == "efa";
  });
  if (!adapters.empty() && !efa) {
    if (peer || open) {
      host.fine("GPUDirect RDMA", "/sys/module", peer ? "peer-memory module loaded" : "open kernel module, dma-buf",
                "Adapters read GPU memory without a copy through the host.");
    } else {
      host.change("GPUDirect RDMA", "/sys/module", "no nvidia_peermem", "nvidia_peermem loaded",
                  "The closed kernel module gives GPU memory to adapters through this module only; without it NCCL "
                  "copies through host memory.",
                  "modprobe nvidia_peermem");
    }
  }
  if (host.exists("/proc/driver/nvidia-nvswitch/devices") &&
      !host.names("/proc/driver/nvidia-nvswitch/devices").empty()) {
    if (running("nvidia-fabricmanager/nv-fabricmanager.pid")) {
      host.fine("NVIDIA Fabric Manager", "/run/nvidia-fabricmanager", "running", "It sets up the NVSwitches.");
    } else {
      host.change("NVIDIA Fabric Manager", "/run/nvidia-fabricmanager", "not seen, with NVSwitches here", "running",
                  "On machines with NVSwitch CUDA does not start without it (error 802, system not yet initialised).",
                  "systemctl enable --now nvidia-fabricmanager");
    }
  }
}

/// One card: newer drivers show it as /sys/class/accel/accel<n>/device, older ones as /sys/class/habanalabs/hl<n>.
void gaudi_card(HostReader& host, const std::string& name, const std::string& folder, bool& found) {
  const auto status = host.text(folder + "/status");
  const auto type = host.text(folder + "/device_type");
  if (!status || !type || !type->starts_with("GAUDI")) return;
  found = true;
  std::string lower = *status;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  std::string firmware = host.text(folder + "/cpucp_ver").value_or(host.text(folder + "/armcp_ver").value_or(""));
  firmware = firmware.substr(0, firmware.find('\n'));
  const auto resets = host.number(folder + "/hard_reset_cnt");
  const std::string value = shown(*type) + ", " + shown(*status) +
                            (firmware.empty() ? "" : ", firmware " + shown(firmware)) +
                            (resets && *resets > 0 ? ", " + std::to_string(*resets) + " hard resets" : "");
  if (lower == "operational") {
    host.fine("Gaudi " + name, folder + "/status", value, "The card takes work.");
  } else {
    host.change(
        "Gaudi " + name, folder + "/status", value, "operational",
        "The driver gives no work to a card in another state; a card that stays so needs its driver loaded anew.",
        "modprobe -r habanalabs && modprobe habanalabs");
  }
}

void gaudi(HostReader& host) {
  bool found = false;
  for (const std::string& name : host.names("/sys/class/accel")) {
    if (name.starts_with("accel") && !name.starts_with("accel_controlD")) {
      gaudi_card(host, name, "/sys/class/accel/" + name + "/device", found);
    }
  }
  for (const std::string& name : host.names("/sys/class/habanalabs")) {
    if (name.starts_with("hl") && !name.starts_with("hl_controlD")) {
      gaudi_card(host, name, "/sys/class/habanalabs/" + name, found);
    }
  }
  const auto version = host.text("/sys/module/habanalabs/version");
  if (version) {
    host.reported("Gaudi driver", "/sys/module/habanalabs/version", *version,
                  found ? "It must be of the same release as the SynapseAI software." : "Loaded, and no card is seen.");
  }
}

}  // namespace

void read_accelerator_rows(HostReader& host) {
  nvidia(host);
  gaudi(host);
}

}  // namespace oxytorch::machine
