// Rows on clocks, threads and interrupts.
#include <map>

#include "machine/host_reader.h"
#include "oxytorch/load.h"

namespace oxytorch::machine {
namespace {

const std::string kCpu = "/sys/devices/system/cpu/";

void governor(HostReader& host) {
  std::map<std::string, int> counts;
  for (const std::string& name : host.names(kCpu)) {
    if (!name.starts_with("cpu") || !detail::parse<int>(std::string_view(name).substr(3))) continue;
    if (const auto one = host.text(kCpu + name + "/cpufreq/scaling_governor")) ++counts[shown(*one)];
  }
  if (counts.empty()) return;
  std::string value;
  for (const auto& [one, count] : counts) {
    value += (value.empty() ? "" : ", ") + one + " on " + std::to_string(count) + " processors";
  }
  const std::string where = kCpu + "cpu*/cpufreq/scaling_governor";
  if (counts.size() == 1 && counts.begin()->first == "performance") {
    host.fine("cpufreq governor", where, value, "The clock does not fall between kernels.");
    return;
  }
  bool battery = false;
  for (const std::string& name : host.names("/sys/class/power_supply")) battery = battery || name.starts_with("BAT");
  host.change("cpufreq governor", where, value, "performance",
              std::string("Other governors lower the clock in short waits and raise it late (kernel: "
                          "admin-guide/pm/cpufreq), which a step of many short operations pays for") +
                  (battery ? "; it costs battery time." : "."),
              "echo performance | tee " + where);
}

void turbo(HostReader& host) {
  const std::string intel = kCpu + "intel_pstate/no_turbo";
  const std::string generic = kCpu + "cpufreq/boost";
  const bool is_intel = host.number(intel).has_value();
  const auto value = is_intel ? host.number(intel) : host.number(generic);
  if (!value || (*value != 0 && *value != 1)) return;
  const std::string& where = is_intel ? intel : generic;
  const bool on = (*value == 1) != is_intel;
  if (on) {
    host.fine("turbo", where, "on", "Clocks above the base clock are allowed.");
  } else {
    host.change("turbo", where, "off", "on", "Without turbo no core leaves the base clock, however few are busy.",
                std::string("echo ") + (is_intel ? "0" : "1") + " | tee " + where);
  }
}

void threads_of_a_core(HostReader& host) {
  const auto active = host.number(kCpu + "smt/active");
  if (!active) return;
  host.reported("SMT", kCpu + "smt/active", *active == 1 ? "on" : "off",
                *active == 1 ? "Two threads of a core share its multipliers; Oxytorch counts each core once for "
                               "arithmetic, so it need not be switched off."
                             : "Each core shows one thread.");
}

void clock_source(HostReader& host) {
  const std::string folder = "/sys/devices/system/clocksource/clocksource0/";
  const auto current = host.text(folder + "current_clocksource");
  if (!current) return;
  const auto available = detail::split(host.text(folder + "available_clocksource").value_or(""), ' ');
  const bool slow = *current == "hpet" || *current == "acpi_pm" || *current == "xen" || *current == "refined-jiffies";
  if (!slow) {
    host.fine("clocksource", folder + "current_clocksource", *current, "Reading the time needs no system call.");
  } else if (detail::contains(available, "tsc")) {
    host.change("clocksource", folder + "current_clocksource", *current, "tsc",
                "Every reading of this clock is a system call or a read of a slow device; timers, profilers and NCCL "
                "read the clock often.",
                "echo tsc | tee " + folder + "current_clocksource");
  } else {
    host.reported("clocksource", folder + "current_clocksource", *current,
                  "Reading this clock is slow, and the kernel offers no tsc here.");
  }
}

void interrupts(HostReader& host) {
  for (const char* unit : {"/usr/lib/systemd/system/irqbalance.service", "/lib/systemd/system/irqbalance.service"}) {
    if (!host.exists(unit)) continue;
    for (const std::string& process : host.names("/proc")) {
      if (!detail::parse<int>(process)) continue;
      if (host.text("/proc/" + process + "/comm") == "irqbalance") {
        host.fine("irqbalance", "/proc/" + process + "/comm", "running", "Interrupts are spread over the cores.");
        return;
      }
    }
    host.reported("irqbalance", unit, "installed, not running",
                  "Interrupts stay where the drivers put them, which is right only where they were pinned by hand.");
    return;
  }
}

void mitigations(HostReader& host) {
  const std::string folder = kCpu + "vulnerabilities";
  int mitigated = 0;
  int open = 0;
  for (const std::string& name : host.names(folder)) {
    const std::string state = host.text(joined({folder, "/", name})).value_or("");
    mitigated += state.starts_with("Mitigation") ? 1 : 0;
    open += state.starts_with("Vulnerable") ? 1 : 0;
  }
  if (mitigated + open == 0) return;
  host.reported("kernel mitigations", folder,
                std::to_string(mitigated) + " active, " + std::to_string(open) + " vulnerable",
                "They make system calls and page faults slower; whether to run without them is a question of safety, "
                "not of speed.");
}

void quota(HostReader& host) {
  const CoreInfo& cores = host.cores();
  if (!cores.logical) return;
  const std::string all = std::to_string(*cores.logical);
  if (cores.quota && *cores.quota < cores.affinity.value_or(*cores.logical)) {
    std::string share = std::to_string(*cores.quota);
    share.erase(share.find_last_not_of('0') + 1);
    if (share.ends_with('.')) share += '0';
    host.reported("cgroup CPU quota", "/proc/self/cgroup", share + " processors of " + all,
                  "More threads than the quota are all stopped for the rest of each period; Oxytorch uses " +
                      std::to_string(cores.usable) + ".");
  } else if (cores.affinity && *cores.affinity < *cores.logical) {
    host.reported("CPU affinity", "/proc/self/status", std::to_string(*cores.affinity) + " processors of " + all,
                  "Threads beyond these share them.");
  } else {
    host.fine("cgroup CPU quota", "/proc/self/cgroup", "none, " + all + " processors",
              "The process may use every processor.");
  }
}

void other_programs(HostReader& host) {
  const auto& options = host.options();
  const auto found = options.root == "/" || options.pause ? read_neighbours(options.root, options.pause) : std::nullopt;
  if (!found) return;
  const std::string what = "other programs", where = "/proc/*/stat";
  if (!found->share_cores()) {
    host.fine(what, where, found->said(), "The cores are left to this program.");
  } else if (waiting_threads_spin()) {
    host.change(what, where, found->said(), "OMP_WAIT_POLICY=passive in each program", advice_on_shared_cores(true),
                "export OMP_WAIT_POLICY=passive", /*needs_root=*/false);
  } else {
    host.reported(what, where, found->said(), advice_on_shared_cores(false));
  }
}

}  // namespace

void read_processor_rows(HostReader& host) {
  other_programs(host);
  quota(host);
  governor(host);
  turbo(host);
  threads_of_a_core(host);
  clock_source(host);
  interrupts(host);
  mitigations(host);
}

}  // namespace oxytorch::machine
