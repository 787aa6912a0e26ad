// Rows on TCP and on adapters for remote memory access.
#include <algorithm>

#include "machine/host_reader.h"
#include "oxytorch/units.h"

namespace oxytorch::machine {
namespace {

const std::string kInfiniband = "/sys/class/infiniband/";

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kEnoughBuffer = 16 * kMiB;
const char* const kBufferReason =
    "A connection moves one buffer a round trip: 100 Gb/s over 1 ms need 12.5 MB (bandwidth times delay).";
const char* const kOneNode = "It bounds TCP between nodes; no interface of 10 Gb/s or more is here.";

/// net.core.rmem_max and wmem_max: what a program may ask for by itself.
void socket_buffers(HostReader& host, bool fast) {
  for (const char* key : {"rmem_max", "wmem_max"}) {
    const std::string where = std::string("/proc/sys/net/core/") + key;
    const auto bytes = host.number<std::uint64_t>(where);
    if (!bytes) continue;
    const std::string what = std::string("net.core.") + key;
    if (!fast) {
      host.reported(what, where, format_size(*bytes), kOneNode);
    } else if (*bytes < kEnoughBuffer) {
      host.change(what, where, format_size(*bytes), "64 MiB", kBufferReason, sysctl(what, "67108864"));
    } else {
      host.fine(what, where, format_size(*bytes), kBufferReason);
    }
  }
}

/// net.ipv4.tcp_rmem and tcp_wmem: least, default and largest of the kernel's own sizing.
void tcp_buffers(HostReader& host, bool fast) {
  for (const char* key : {"tcp_rmem", "tcp_wmem"}) {
    const std::string where = std::string("/proc/sys/net/ipv4/") + key;
    std::string text = host.text(where).value_or("");
    std::replace(text.begin(), text.end(), '\t', ' ');
    std::vector<std::string> words = detail::split(text, ' ');
    std::erase(words, "");
    if (words.size() != 3) continue;
    const auto least = detail::parse<std::uint64_t>(words[0]);
    const auto usual = detail::parse<std::uint64_t>(words[1]);
    const auto most = detail::parse<std::uint64_t>(words[2]);
    if (!least || !usual || !most) continue;
    const std::string what = std::string("net.ipv4.") + key;
    const std::string value = "at most " + format_size(*most);
    if (!fast) {
      host.reported(what, where, value, kOneNode);
    } else if (*most < kEnoughBuffer) {
      host.change(what, where, value, "64 MiB", kBufferReason, sysctl(what, words[0] + " " + words[1] + " 67108864"));
    } else {
      host.fine(what, where, value, kBufferReason);
    }
  }
}

void congestion_control(HostReader& host) {
  const std::string where = "/proc/sys/net/ipv4/tcp_congestion_control";
  const auto value = host.text(where);
  if (!value) return;
  if (*value == "cubic" || *value == "bbr" || *value == "dctcp") {
    host.fine("congestion control", where, *value, "It fills a fast link again soon after a loss.");
    return;
  }
  const auto available =
      detail::split(host.text("/proc/sys/net/ipv4/tcp_available_congestion_control").value_or(""), ' ');
  if (detail::contains(available, "cubic")) {
    host.change("congestion control", where, *value, "cubic",
                "cubic is the kernel's default, and regains a fast link's rate after a loss in a time that does not "
                "grow with its length (RFC 9438).",
                sysctl("net.ipv4.tcp_congestion_control", "cubic"));
  } else {
    host.reported("congestion control", where, *value, "cubic, the kernel's default, is not loaded here.");
  }
}

void listen_queue(HostReader& host, bool fast) {
  const std::string where = "/proc/sys/net/core/somaxconn";
  const auto value = host.number(where);
  if (!value) return;
  if (*value >= 2048 || !fast) {
    host.fine(
        "net.core.somaxconn", where, std::to_string(*value),
        *value >= 2048 ? "torch's rendezvous store listens with a queue of 2048." : "Enough for one node's ranks.");
  } else {
    host.change("net.core.somaxconn", where, std::to_string(*value), "4096",
                "All ranks connect to rank 0 at once; torch's rendezvous store asks for a queue of 2048 and the kernel "
                "cuts it to this, so that a large job retries or times out as it starts.",
                sysctl("net.core.somaxconn", "4096"));
  }
}

void interface(HostReader& host, const std::string& name) {
  const std::string folder = "/sys/class/net/" + name;
  const auto speed = host.number(folder + "/speed");
  const auto mtu = host.number(folder + "/mtu");
  if (!speed || *speed < 10'000 || !mtu) return;
  host.reported("interface " + name, folder,
                std::to_string(*speed / 1000) + " Gb/s, frames of " + std::to_string(*mtu) + " bytes",
                *mtu >= 9000 ? "Jumbo frames take six times fewer packets."
                             : "Jumbo frames take six times fewer packets, where every switch on the way allows them.");
  // Drivers of mlx5 show here on which priorities RoCE slows down when a switch marks congestion.
  std::string marked;
  for (int priority = 0; priority < 8; ++priority) {
    const auto on = host.number(folder + "/ecn/roce_np/enable/" + std::to_string(priority));
    if (!on || *on != 1) continue;
    if (!marked.empty()) marked += ' ';
    marked += std::to_string(priority);
  }
  if (host.exists(folder + "/ecn/roce_np/enable")) {
    host.reported("ECN of " + name, folder + "/ecn/roce_np/enable", marked.empty() ? "off" : "priorities " + marked,
                  "RoCE needs ECN or PFC on the priority that NCCL_IB_TC maps to, the same on every switch; `mlnx_qos "
                  "-i " +
                      name + "` shows PFC.");
  }
}

/// First entry of the GID table that is RoCE v2 over IPv4, else the first that is RoCE v2.
std::string roce_gid(HostReader& host, const std::string& port) {
  std::string any;
  for (const std::string& index : host.names(port + "/gid_attrs/types")) {
    if (!detail::parse<int>(index) || host.text(joined({port, "/gid_attrs/types/", index})) != "RoCE v2") continue;
    const std::string gid = host.text(joined({port, "/gids/", index})).value_or("");
    if (gid.empty() || gid == "0000:0000:0000:0000:0000:0000:0000:0000") continue;
    const std::string entry = joined({"GID ", index, " is RoCE v2"});
    if (gid.starts_with("0000:0000:0000:0000:0000:ffff:")) return entry;
    if (any.empty()) any = entry;
  }
  return any;
}

void port_rows(HostReader& host, const std::string& device, const std::string& number, const std::string& kind,
               const std::string& firmware) {
  const std::string port = kInfiniband + device + "/ports/" + number;
  const auto state = host.text(port + "/state");
  if (!state) return;
  const std::string layer = host.text(port + "/link_layer").value_or("unknown link layer");
  const bool roce = kind != "EFA" && layer == "Ethernet";
  const std::string what = (kind == "EFA" ? kind : roce ? "RoCE" : "InfiniBand") + (" " + device) + " port " + number;
  const std::string value = shown(*state) + ", " + shown(host.text(port + "/rate").value_or("unknown rate")) + ", " +
                            shown(layer) + (firmware.empty() ? "" : ", firmware " + shown(firmware));
  if (state->find("ACTIVE") == std::string::npos) {
    host.change(what, port + "/state", value, "active, or left out",
                "The link is down; NCCL finds the adapter and fails or falls back to slower ones when it is named.",
                "export NCCL_IB_HCA=^" + device, false);
    return;
  }
  if (!roce) {
    host.fine(what, port + "/state", value, "The link is up.");
    return;
  }
  const std::string gid = roce_gid(host, port);
  if (gid.empty() && host.exists(port + "/gid_attrs/types")) {
    host.change(what, port + "/gid_attrs/types", value + ", no RoCE v2 address", "RoCE v2",
                "RoCE v1 frames do not pass a router; NCCL takes the RoCE v2 entry of the GID table.",
                "cma_roce_mode -d " + device + " -p " + number + " -m 2");
  } else {
    host.fine(what, port + "/state", value + (gid.empty() ? "" : ", " + gid),
              "The link is up; NCCL since 2.21 finds the RoCE v2 entry by itself, older ones need NCCL_IB_GID_INDEX.");
  }
  const auto lost = host.number<std::uint64_t>(port + "/hw_counters/out_of_sequence");
  if (lost && *lost > 0) {
    host.reported(what + " losses", port + "/hw_counters/out_of_sequence", std::to_string(*lost) + " since start",
                  "Packets came out of order or were lost; a count that grows during training means that PFC or ECN "
                  "does not work along the way.");
  }
}

void adapter(HostReader& host, const std::string& device) {
  const std::string folder = kInfiniband + device;
  const bool efa =
      host.link_name(folder + "/device/driver") == "efa" || host.text(folder + "/device/vendor") == "0x1d0f";
  const std::string firmware = host.text(folder + "/fw_ver").value_or("");
  for (const std::string& number : host.names(folder + "/ports")) {
    port_rows(host, device, number, efa ? "EFA" : "", firmware);
  }
}

}  // namespace

void read_network_rows(HostReader& host) {
  const bool fast = host.has_fast_network();
  socket_buffers(host, fast);
  tcp_buffers(host, fast);
  congestion_control(host);
  listen_queue(host, fast);
  for (const std::string& name : host.names("/sys/class/net")) interface(host, name);
  for (const std::string& device : host.names(kInfiniband)) adapter(host, device);
}

}  // namespace oxytorch::machine
