/// Configurations as text: one flat mapping from settings to values, in JSON or YAML; or sections of them.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oxytorch/config.h"

namespace oxytorch::detail {

/// In the order of the text, with duplicates; null is the word "none".
using FlatPairs = std::vector<std::pair<std::string, ConfigValue>>;

/// Whether a value may be a mapping: its settings then have the names "section.setting".
enum class Sections { Refused, Joined };

/// Error(InvalidArgument) for what is no flat mapping, Error(InvalidType) for a value that is a list, or a mapping
/// where sections are refused; `origin` begins each message.
FlatPairs read_flat_json(std::string_view text, std::string_view origin, Sections sections = Sections::Refused);
FlatPairs read_flat_yaml(std::string_view text, std::string_view origin, Sections sections = Sections::Refused);

/// By extension. Error(NotFound), Error(Io), or what the two above throw, with the origin "file <path>".
FlatPairs read_flat_file(const std::string& path, Sections sections = Sections::Refused);

/// True for .json, false for .yaml and .yml, Error(InvalidArgument) for others.
bool is_json(const std::string& path);

}  // namespace oxytorch::detail
