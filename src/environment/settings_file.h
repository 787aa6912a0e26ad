/// The registry as it is written down: data files in settings/, one for each source, which the build embeds.
#pragma once

#include <span>

#include "oxytorch/environment.h"

namespace oxytorch::environment {

struct SettingsFile {
  std::string_view name;  ///< for messages: "nccl.yaml"
  std::string_view text;
};

/// The files of this build, by name.
std::span<const SettingsFile> settings_files();

/// All settings of the files, ordered by family, then by file. docs/environment.md states the schema.
/// Error(InvalidArgument) names the file, the line, the setting and the value that break it, and what to write instead.
OXY_API std::vector<Setting> read_settings(std::span<const SettingsFile> files);

}  // namespace oxytorch::environment
