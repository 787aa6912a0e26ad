// PerformanceConfig as JSON, YAML, files and a table for readers.
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/flat_text.h"
#include "base/whole_file.h"
#include "oxytorch/config.h"
#include "oxytorch/error.h"

namespace oxytorch {
namespace {

/// "1e-05" as "1.0e-05": to YAML 1.1 readers a number has a point.
std::string yaml_number(const ConfigValue& value) {
  std::string text = to_string(value);
  const std::size_t exponent = text.find('e');
  if (std::holds_alternative<double>(value) && exponent != std::string::npos && text.find('.') == std::string::npos) {
    text.insert(exponent, ".0");
  }
  return text;
}

std::string reason_of(const ConfigField& field, const std::string& level) {
  return level == "basic" && !field.basic_reason.empty() ? field.basic_reason : field.reason;
}

/// A value as explain() shows it: words without quotes.
std::string bare(const ConfigValue& value) {
  const auto* text = std::get_if<std::string>(&value);
  return text == nullptr ? to_string(value) : *text;
}

}  // namespace

PerformanceConfig PerformanceConfig::from_json(std::string_view text, std::string_view origin) {
  return from_pairs(detail::read_flat_json(text, origin, detail::Sections::Joined), origin);
}

PerformanceConfig PerformanceConfig::from_yaml(std::string_view text, std::string_view origin) {
  return from_pairs(detail::read_flat_yaml(text, origin, detail::Sections::Joined), origin);
}

PerformanceConfig PerformanceConfig::from_file(const std::string& path) {
  return from_pairs(detail::read_flat_file(path, detail::Sections::Joined), "file " + path);
}

std::string PerformanceConfig::to_json() const {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const ConfigField& field : fields()) {
    std::visit([&](const auto& value) { object[field.key] = value; }, get(field.key));
  }
  return object.dump(2) + '\n';
}

std::string PerformanceConfig::to_yaml() const {
  YAML::Emitter out;
  out << YAML::BeginMap;
  for (const ConfigField& field : fields()) {
    const ConfigValue value = get(field.key);
    out << YAML::Key << field.key << YAML::Value;
    // Quoted, since YAML 1.1 readers take a bare on or off for a boolean.
    if (const auto* text = std::get_if<std::string>(&value)) {
      out << YAML::DoubleQuoted << *text;
    } else {
      out << yaml_number(value);
    }
  }
  out << YAML::EndMap;
  return std::string(out.c_str()) + '\n';
}

void PerformanceConfig::save(const std::string& path) const {
  write_whole_file(path, {detail::is_json(path) ? to_json() : to_yaml()});
}

std::string PerformanceConfig::explain() const {
  std::size_t key_width = 0;
  std::size_t value_width = 0;
  std::size_t origin_width = 0;
  for (const ConfigField& field : fields()) {
    key_width = std::max(key_width, field.key.size());
    value_width = std::max(value_width, bare(get(field.key)).size());
    origin_width = std::max(origin_width, origin(field.key).size());
  }
  std::ostringstream out;
  const auto column = [&out](const std::string& text, std::size_t width) {
    out << text << std::string(width - text.size() + 2, ' ');
  };
  for (const ConfigField& field : fields()) {
    column(field.key, key_width);
    column(bare(get(field.key)), value_width);
    column(origin(field.key), origin_width);
    out << reason_of(field, level_);
    if (source(field.key) != ConfigSource::Level) out << " May be " << field.allowed() << '.';
    out << '\n';
  }
  return out.str();
}

}  // namespace oxytorch
