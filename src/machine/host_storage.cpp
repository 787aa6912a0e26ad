// Rows on block devices, the file system of the data, and Lustre.
#include <algorithm>
#include <array>
#include <system_error>

#include "machine/host_reader.h"
#include "oxytorch/units.h"

namespace oxytorch::machine {
namespace {

namespace fs = std::filesystem;

bool is_disk(const std::string& name) {
  constexpr std::array<std::string_view, 8> kNone{"loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd"};
  return std::none_of(kNone.begin(), kNone.end(), [&](std::string_view prefix) { return name.starts_with(prefix); });
}

void block_device(HostReader& host, const std::string& name) {
  const std::string queue = "/sys/block/" + name + "/queue/";
  const bool spins = host.number(queue + "rotational").value_or(0) == 1 && !host.is_virtual();
  const bool nvme = name.starts_with("nvme");
  const std::string scheduler = selected(host.text(queue + "scheduler").value_or(""));
  if (nvme && !scheduler.empty() && scheduler != "none") {
    host.change("scheduler of " + name, queue + "scheduler", scheduler, "none",
                "An NVMe device sorts its own requests; a scheduler above it costs a lock a request.",
                "echo none | tee " + queue + "scheduler");
  } else if (spins && scheduler == "none") {
    host.change("scheduler of " + name, queue + "scheduler", scheduler, "mq-deadline",
                "A disk that turns needs its requests sorted, or every one is a seek.",
                "echo mq-deadline | tee " + queue + "scheduler");
  } else if (!scheduler.empty()) {
    host.fine("scheduler of " + name, queue + "scheduler", scheduler,
              nvme ? "An NVMe device sorts its own requests." : "Right for this kind of device.");
  }
  if (const auto ahead = host.number<std::uint64_t>(queue + "read_ahead_kb"); ahead && *ahead <= UINT64_MAX / 1024) {
    if (spins && *ahead < 1024) {
      host.change("read-ahead of " + name, queue + "read_ahead_kb", format_size(*ahead * 1024), "1 MiB",
                  "Reading shards in order from a disk that turns is bound by seeks between readers; larger read-ahead "
                  "makes them fewer.",
                  "echo 1024 | tee " + queue + "read_ahead_kb");
    } else {
      host.fine("read-ahead of " + name, queue + "read_ahead_kb", format_size(*ahead * 1024),
                spins ? "Large enough to read in order." : "Several readers at once fill this device, not read-ahead.");
    }
  }
  if (const auto depth = host.number(queue + "nr_requests")) {
    host.reported("queue depth of " + name, queue + "nr_requests", std::to_string(*depth),
                  "Requests that may wait for each hardware queue; readers beyond it block.");
  }
}

/// The mount that holds `directory`: the one with the longest path, of equals the last, which hides the others.
const detail::Mount* mount_of(const HostReader& host, const std::string& directory) {
  const detail::Mount* found = nullptr;
  for (const detail::Mount& mount : host.mounts()) {
    const bool holds = mount.point == "/" || directory == mount.point || directory.starts_with(mount.point + "/");
    if (holds && (found == nullptr || mount.point.size() >= found->point.size())) found = &mount;
  }
  return found;
}

void data_directory(HostReader& host) {
  std::string directory = host.options().data_directory;
  std::error_code unknown;
  if (directory.empty() && host.options().root == "/") directory = fs::current_path(unknown).string();
  if (directory.empty()) return;
  if (host.options().root == "/") {
    const fs::path whole = fs::weakly_canonical(directory, unknown);
    if (!unknown && !whole.empty()) directory = whole.string();
  }
  const detail::Mount* mount = mount_of(host, directory);
  if (mount == nullptr) return;
  const auto has = [&](const char* option) { return detail::contains(mount->options, option); };
  const std::string where = "/proc/self/mountinfo: " + shown(mount->point);
  const std::string time = has("noatime") ? "noatime" : has("relatime") ? "relatime" : "strictatime";
  const std::string value = shown(mount->type) + ", " + time;
  const bool local = mount->type == "ext4" || mount->type == "xfs" || mount->type == "btrfs" || mount->type == "ext3";
  if (local && time == "strictatime" && !has("ro")) {
    host.change("file system of the data", where, value, "noatime",
                "Every read of a sample writes the time of the read to disk.",
                "mount -o remount,noatime " + shell_word(mount->point));
  } else if (mount->type == "nfs" || mount->type == "nfs4") {
    std::string options;
    for (const std::string& option : mount->super_options) {
      for (const char* key : {"vers=", "rsize=", "wsize=", "nconnect=", "proto="}) {
        if (option.starts_with(key)) options += (options.empty() ? "" : ",") + option;
      }
    }
    host.reported(
        "file system of the data", where, value + (options.empty() ? "" : ", " + options),
        "One TCP connection carries all of it unless nconnect= is given when mounting (Linux 5.3 and later).");
  } else if (mount->type == "overlay") {
    host.reported("file system of the data", where, value,
                  "The container's own layer: data and checkpoints here pass through the overlay and are lost with it; "
                  "use a volume.");
  } else {
    host.fine("file system of the data", where, value,
              local ? "Reading a sample does not write the time of the read each time." : "Nothing to change here.");
  }
}

/// Least value of a Lustre parameter over all targets of a kind, with the folder it was found in.
struct Tunable {
  std::uint64_t least;
  std::string where;
};

std::optional<Tunable> lustre_tunable(const HostReader& host, const std::string& kind, const std::string& parameter) {
  std::optional<Tunable> found;
  for (const char* top : {"/sys/fs/lustre/", "/proc/fs/lustre/"}) {
    const std::string folder = std::string(top) + kind;
    for (const std::string& target : host.names(folder)) {
      const auto value = host.number<std::uint64_t>(joined({folder, "/", target, "/", parameter}));
      if (value && (!found || *value < found->least)) found = Tunable{*value, joined({folder, "/*/", parameter})};
    }
  }
  return found;
}

void lustre(HostReader& host) {
  std::vector<const detail::Mount*> mounts;
  for (const detail::Mount& mount : host.mounts()) {
    if (mount.type == "lustre") mounts.push_back(&mount);
  }
  for (const detail::Mount* mount : mounts) {
    const bool flock = detail::contains(mount->super_options, "flock") || detail::contains(mount->options, "flock");
    const auto stripes = lustre_tunable(host, "lov", "stripecount");
    host.reported("Lustre " + shown(mount->point), "/proc/self/mountinfo",
                  shown(mount->source) + (flock ? ", flock" : "") +
                      (stripes ? ", default stripes: " + std::to_string(stripes->least) : ""),
                  "A file of one stripe is served by one server; `lfs getstripe -d " + shell_word(shown(mount->point)) +
                      "` shows the layout, `lfs setstripe -c -1 DIR` spreads the new files of a folder.");
  }
  struct Rule {
    const char* kind;
    const char* parameter;
    std::uint64_t wanted;
    const char* why;
  };
  // The values are those that Amazon's guide to FSx for Lustre gives for clients with more than 64 processors.
  constexpr std::array<Rule, 3> kRules{
      {{"osc", "max_rpcs_in_flight", 32, "Requests under way to each server bound the rate of one client"},
       {"mdc", "max_rpcs_in_flight", 64, "Opening many small files is bound by metadata requests under way"},
       {"mdc", "max_mod_rpcs_in_flight", 50, "Creating many files is bound by metadata changes under way"}}};
  const bool large = host.cores().logical.value_or(0) >= 64;
  for (const Rule& rule : kRules) {
    const auto found = lustre_tunable(host, rule.kind, rule.parameter);
    if (!found) continue;
    const std::string what = std::string("Lustre ") + rule.kind + "." + rule.parameter;
    const std::string why =
        std::string(rule.why) + " (Amazon FSx for Lustre user guide, for clients of 64 processors and more).";
    if (large && found->least < rule.wanted) {
      host.change(
          what, found->where, std::to_string(found->least), std::to_string(rule.wanted), why,
          std::string("lctl set_param ") + rule.kind + ".*." + rule.parameter + "=" + std::to_string(rule.wanted));
    } else {
      host.fine(what, found->where, std::to_string(found->least), why);
    }
  }
  struct Fact {
    const char* kind;
    const char* parameter;
    const char* why;
  };
  constexpr std::array<Fact, 4> kFacts{
      {{"osc", "max_dirty_mb", "MiB of writes that may wait for each server."},
       {"osc", "checksums", "1: each request is summed on both sides, which costs processor time and finds bad links."},
       {"llite", "max_read_ahead_mb", "MiB that this client reads ahead, over all files."},
       {"llite", "max_read_ahead_per_file_mb", "MiB that it reads ahead in one file."}}};
  for (const Fact& fact : kFacts) {
    if (const auto found = lustre_tunable(host, fact.kind, fact.parameter)) {
      host.reported(std::string("Lustre ") + fact.kind + "." + fact.parameter, found->where,
                    std::to_string(found->least), fact.why);
    }
  }
}

}  // namespace

void read_storage_rows(HostReader& host) {
  for (const std::string& name : host.names("/sys/block")) {
    if (is_disk(name)) block_device(host, name);
  }
  data_directory(host);
  lustre(host);
}

}  // namespace oxytorch::machine
