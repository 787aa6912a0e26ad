/// What the host's settings are, which of them slow a training run down, and the command that changes each.
///
/// Nothing is ever changed here. The readers look at files of /proc, /sys and /run below a root, which tests replace
/// by another machine's tree. A file that is absent, unreadable or garbage leaves its row out; it is never an error.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::machine {

enum class Verdict {
  Fine,      ///< judged, and good as it is
  Change,    ///< `suggestion` and `command` say what to do
  Reported,  ///< a fact to know; not judged, because what is right depends on more than this machine
};

/// "fine", "change" or "reported".
OXY_API const char* name(Verdict verdict) noexcept;

/// One setting. All texts are printable ASCII.
struct HostRow {
  std::string area;   ///< "processor", "memory", "limits", "network", "storage" or "accelerator"
  std::string what;   ///< the setting, for example "swappiness"
  std::string where;  ///< the path it was read from
  std::string value;  ///< as found
  Verdict verdict;
  std::string suggestion;  ///< the value to have; empty unless Change
  std::string why;         ///< one sentence, with its evidence
  std::string command;     ///< the exact command; empty unless Change
  bool needs_root;         ///< of the command
};

struct HostReportOptions {
  std::string root = "/";
  std::string data_directory = "";   ///< its file system is judged; "": the working directory where root is "/"
  std::function<void()> pause = {};  ///< stands for the time between two looks at other programs; for tests
};

/// Every row that this host has something for, by area. Reads some hundred small files, and looks at what other
/// programs use for a quarter of a second.
OXY_API std::vector<HostRow> host_report(const HostReportOptions& options = {});

/// A JSON array with an object per row, its keys the names above; `verdict` is the word.
OXY_API std::string to_json(std::span<const HostRow> rows);

/// For a reader: what to change first, then the rest, one line each.
OXY_API std::string to_text(std::span<const HostRow> rows);

}  // namespace oxytorch::machine
