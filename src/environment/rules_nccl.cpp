// Rules about NCCL, and about libfabric and EFA below it.
#include "judge.h"
#include "value.h"

namespace oxytorch::environment {
namespace {

constexpr char kEfaPage[] = "aws-ofi-nccl, doc/efa-env-var.md";

// ---- NCCL -----------------------------------------------------------------------------------------------------

void nccl_debug(const Judge& judge) {
  const std::string level = lower(judge.value());
  if (level == "trace")
    judge.harmful(kWarning, "logs every call of every rank: set WARN, and INFO while you look for a fault.", "WARN");
  if (level == "info")
    judge.harmful(kNote, "logs each communicator of each rank: set WARN once the run works.", "WARN");
}

bool on_efa(const View& view) {
  const auto provider = view.get("FI_PROVIDER");
  return view.context.efa.value_or(provider && *provider == "efa");
}

void p2p_disable(const Judge& judge) {
  if (judge.on())
    judge.harmful(kWarning,
                  "turns direct access between GPUs, NVLink included, off and sends through host memory: unset it.");
}

void shm_disable(const Judge& judge) {
  if (judge.on()) judge.harmful(kWarning, "sends between GPUs of one host over the network: unset it.");
}

void ib_disable(const Judge& judge) {
  // EFA is reached through libfabric, not through verbs.
  if (judge.on() && !on_efa(judge.view)) {
    judge.harmful(
        kWarning,
        "leaves InfiniBand and RoCE alone and sends through TCP sockets: unset it where the hosts have either.");
  }
}

void cumem_off(const Judge& judge) {
  if (judge.value() == "0")
    judge.harmful(
        kNote, "gives up NVLink SHARP and registered buffers, which need it: unset it unless it works around a fault.");
}

void topology_level(const Judge& judge) {
  const auto number = whole(judge.value());
  if (!number) return;
  const bool sys = *number > 4;
  if (sys && judge.assignment.name != "NCCL_P2P_LEVEL") {
    judge.harmful(kWarning,
                  "means SYS, which forces GPUDirect RDMA between sockets too: unset it, or write PXB or PHB.", "PXB");
  } else {
    judge.obsolete(kNote, "is an old number: write LOC, PIX, PXB, PHB or SYS.", "PHB");
  }
}

void nccl_proto(const Judge& judge) {
  std::string value = lower(judge.value());
  const bool forbids = !value.empty() && value[0] == '^';
  if (!forbids && value.find("ll128") != std::string::npos) {
    judge.harmful(
        kError,
        "forces LL128 on, which corrupts data where the links do not support it: unset it; NCCL knows where it may.");
  } else if (value == "simple") {
    const auto plugin = judge.view.compare("aws-ofi-nccl", "1.6");
    if (plugin && *plugin < 0) return;
    judge.harmful(kWarning,
                  "throws the fast protocols for small messages away: unset it; aws-ofi-nccl needs it up to 1.5 only "
                  "and later sets it itself where it must.",
                  "", kEfaPage);
  } else if (!value.empty()) {
    judge.harmful(kNote, "takes the choice of protocol from NCCL's tuner: unset it unless it works around a fault.");
  }
}

void takes_choice(const Judge& judge) {
  judge.harmful(kNote,
                "takes a choice from NCCL's tuner, which knows message sizes and links: unset it unless you measured "
                "that it pays.");
}

void nccl_buffsize(const Judge& judge) {
  if (on_efa(judge.view)) judge.harmful(kWarning, "is best left to the plugin on EFA: unset it.", "", kEfaPage);
}

void min_channels(const Judge& judge) {
  if (on_efa(judge.view)) judge.harmful(kWarning, "makes messages so small that EFA starves: unset it.", "", kEfaPage);
}

void socket_ifname(const Judge& judge) {
  const std::string& value = judge.value();
  if (value == "^docker,lo" || value == "^lo,docker" || value == "^docker" || value == "^lo" ||
      value == "^docker0,lo" || value == "^lo,docker0") {
    judge.harmful(kNote,
                  "is close to what NCCL prefers by itself, and setting it bypasses the automatic choice: unset it.");
  } else if ((value == "lo" || value == "=lo") && judge.view.number("SLURM_NNODES").value_or(1) > 1) {
    judge.contradicting(
        kError, "SLURM_NNODES",
        "is the loopback interface, but " + judge.other("SLURM_NNODES") + ": hosts cannot reach each other.");
  }
}

void socket_threads(const Judge& judge) {
  if (on_efa(judge.view)) {
    judge.harmful(kNote, "has no effect on EFA: unset it.", "", kEfaPage);
    return;
  }
  const auto threads = judge.view.number("NCCL_SOCKET_NTHREADS");
  const auto sockets = judge.view.number("NCCL_NSOCKS_PERTHREAD");
  if (judge.assignment.name == "NCCL_SOCKET_NTHREADS" && threads && sockets && *threads > 0 && *sockets > 0 &&
      *threads * *sockets > 64) {
    judge.contradicting(
        kWarning, "NCCL_NSOCKS_PERTHREAD",
        "times " + judge.other("NCCL_NSOCKS_PERTHREAD") + " is over 64 sockets, and NCCL takes fewer: lower one.");
  }
}

void min_over_max(const Judge& judge) {
  std::string most = judge.assignment.name;
  most.replace(most.find("_MIN_"), 5, "_MAX_");
  const auto low = whole(judge.value());
  const auto high = judge.view.number(most);
  if (low && high && *low > *high) judge.contradicting(kWarning, most, "is more than " + judge.other(most) + ".");
}

void check_pointers(const Judge& judge) {
  if (judge.on()) judge.harmful(kNote, "costs time in each collective: unset it once the fault is found.");
}

void gdr_flush_disable(const Judge& judge) {
  if (judge.on())
    judge.harmful(kWarning,
                  "may read data before it has arrived: unset it unless the platform's vendor says that it is safe.");
}

// ---- libfabric and EFA ----------------------------------------------------------------------------------------

/// aws-ofi-nccl and libfabric are known to be older than those that need no settings.
bool old_efa_software(const View& view) {
  const auto plugin = view.compare("aws-ofi-nccl", "1.7");
  const auto fabric = view.compare("libfabric", "1.18");
  return (plugin && *plugin < 0) || (fabric && *fabric < 0);
}

void device_rdma(const Judge& judge) {
  const View& view = judge.view;
  if (view.backend == "hpu") {
    if (!judge.on())
      judge.harmful(kWarning, "keeps Gaudi's host network cards from reaching its memory: set 1.", "1", kHostNicPage);
    if (judge.on() && !view.on("RDMAV_FORK_SAFE") && !(view.has("RDMAV_FORK_SAFE") && !view.get("RDMAV_FORK_SAFE"))) {
      judge.harmful(kNote, "works on Gaudi together with RDMAV_FORK_SAFE=1: set that too.", "RDMAV_FORK_SAFE",
                    kHostNicPage);
    }
    return;
  }
  if (view.backend != "cuda" || !judge.on() || old_efa_software(view)) return;
  judge.harmful(kWarning,
                "is not needed from libfabric 1.18 with aws-ofi-nccl 1.7 on, and ends the process on a card without "
                "RDMA: unset it.",
                "", kEfaPage);
}

void rdmav_fork_safe(const Judge& judge) {
  if (judge.view.backend == "cuda") {
    judge.harmful(kWarning, "breaks things on newer kernels under NCCL: unset it; libfabric makes fork safe by itself.",
                  "", kEfaPage);
  }
}

void fork_safe(const Judge& judge) {
  if (judge.view.backend == "cuda" && judge.on()) {
    judge.obsolete(kNote, "is what aws-ofi-nccl sets by itself: unset it.", "", kEfaPage);
  }
}

void shm_transfer(const Judge& judge) {
  if (judge.view.backend == "cuda" && judge.on())
    judge.obsolete(kNote, "has no effect under aws-ofi-nccl: unset it.", "", kEfaPage);
}

void fi_provider(const Judge& judge) {
  const auto plugin = judge.view.compare("aws-ofi-nccl", "1.6");
  if (judge.view.backend == "cuda" && judge.value() == "efa" && !(plugin && *plugin < 0)) {
    judge.obsolete(kWarning, "was needed up to aws-ofi-nccl 1.5: unset it.", "", kEfaPage);
  }
}

constexpr Rule kNcclRules[] = {
    {"NCCL_DEBUG", nccl_debug},
    {"NCCL_P2P_DISABLE", p2p_disable},
    {"NCCL_SHM_DISABLE", shm_disable},
    {"NCCL_IB_DISABLE", ib_disable},
    {"NCCL_CUMEM_ENABLE", cumem_off},
    {"NCCL_NET_GDR_LEVEL", topology_level},
    {"NCCL_P2P_LEVEL", topology_level},
    {"NCCL_PROTO", nccl_proto},
    {"NCCL_ALGO", takes_choice},
    {"NCCL_NTHREADS", takes_choice},
    {"NCCL_BUFFSIZE", nccl_buffsize},
    {"NCCL_MIN_NCHANNELS", min_channels},
    {"NCCL_MIN_NRINGS", min_channels},
    {"NCCL_MIN_CTAS", min_channels},
    {"NCCL_MIN_NCHANNELS", min_over_max},
    {"NCCL_MIN_CTAS", min_over_max},
    {"NCCL_MIN_P2P_NCHANNELS", min_over_max},
    {"NCCL_SOCKET_IFNAME", socket_ifname},
    {"NCCL_SOCKET_NTHREADS", socket_threads},
    {"NCCL_NSOCKS_PERTHREAD", socket_threads},
    {"NCCL_CHECK_POINTERS", check_pointers},
    {"NCCL_GDR_FLUSH_DISABLE", gdr_flush_disable},
    {"OFI_NCCL_GDR_FLUSH_DISABLE", gdr_flush_disable},
    {"FI_EFA_USE_DEVICE_RDMA", device_rdma},
    {"RDMAV_FORK_SAFE", rdmav_fork_safe},
    {"IBV_FORK_SAFE", rdmav_fork_safe},
    {"FI_EFA_FORK_SAFE", fork_safe},
    {"FI_EFA_ENABLE_SHM_TRANSFER", shm_transfer},
    {"FI_PROVIDER", fi_provider},
};

}  // namespace

std::span<const Rule> nccl_rules() { return kNcclRules; }

}  // namespace oxytorch::environment
