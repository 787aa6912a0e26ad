/// What the parts of the host report share: a reader of one tree and a writer of rows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file_tree.h"
#include "oxytorch/machine/host_report.h"
#include "oxytorch/system.h"

namespace oxytorch::machine {

/// Trimmed, with bytes outside printable ASCII and the middle of a long text replaced.
std::string shown(std::string_view text);

/// The parts, one behind the other.
std::string joined(std::initializer_list<std::string_view> parts);

/// The word in brackets of "always [madvise] never"; "" where there is none.
std::string selected(std::string_view text);

/// "sysctl -w key=value", the value quoted where it has spaces.
std::string sysctl(const std::string& key, const std::string& value);

/// `text` as one word of a shell command.
std::string shell_word(const std::string& text);

class HostReader {
 public:
  explicit HostReader(const HostReportOptions& options);

  /// Trimmed text of a file; empty where it is absent, unreadable or blank.
  [[nodiscard]] std::optional<std::string> text(const std::string& path) const;
  template <class T = std::int64_t>
  [[nodiscard]] std::optional<T> number(const std::string& path) const {
    return detail::parse<T>(text(path).value_or(""));
  }
  [[nodiscard]] bool exists(const std::string& path) const;
  /// Entries of a folder in the order of their numbers and letters. Names that could not stand in a command bare are
  /// left out: the kernel gives none.
  [[nodiscard]] std::vector<std::string> names(const std::string& folder) const;
  /// Last part of where a link points, for example the driver of a device; "" where there is no link.
  [[nodiscard]] std::string link_name(const std::string& path) const;
  [[nodiscard]] const std::vector<detail::Mount>& mounts() const { return mounts_; }
  [[nodiscard]] const CoreInfo& cores() const { return cores_; }
  [[nodiscard]] const MemoryInfo& memory() const { return memory_; }
  [[nodiscard]] const HostReportOptions& options() const { return options_; }
  [[nodiscard]] int numa_nodes() const;
  /// Under a hypervisor, whose disks say that they turn whatever they are made of.
  [[nodiscard]] bool is_virtual() const;
  /// An adapter for remote memory access, or an Ethernet interface of 10 Gb/s and more: several nodes may train.
  [[nodiscard]] bool has_fast_network() const;

  void area(std::string name) { area_ = std::move(name); }
  void fine(std::string what, std::string where, std::string_view value, std::string why);
  void reported(std::string what, std::string where, std::string_view value, std::string why);
  void change(std::string what, std::string where, std::string_view value, std::string suggestion, std::string why,
              std::string command, bool needs_root = true);
  [[nodiscard]] std::vector<HostRow> take() { return std::move(rows_); }

 private:
  HostReportOptions options_;
  std::vector<detail::Mount> mounts_;
  CoreInfo cores_;
  MemoryInfo memory_;
  std::string area_;
  std::vector<HostRow> rows_;
};

void read_processor_rows(HostReader& host);
void read_memory_rows(HostReader& host);
void read_limit_rows(HostReader& host);
void read_network_rows(HostReader& host);
void read_storage_rows(HostReader& host);
void read_accelerator_rows(HostReader& host);

}  // namespace oxytorch::machine
