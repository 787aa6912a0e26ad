#include "oxytorch/machine/topology.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/flat_text.h"
#include "base/spelling.h"
#include "oxytorch/error.h"
#include "oxytorch/units.h"

namespace oxytorch::machine {
namespace {

using Type = TopologyField::Type;

constexpr std::int64_t kMostCount = 1 << 24;

std::vector<std::string> keys() {
  std::vector<std::string> names;
  for (const TopologyField& field : TopologyConfig::fields()) names.push_back(field.key);
  return names;
}

std::size_t row_of(std::string_view key) {
  const auto& fields = TopologyConfig::fields();
  for (std::size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].key == key) return i;
  }
  const auto known = keys();
  detail::raise(ErrorCode::InvalidArgument, "unknown topology key ", in_quotes(key), "; ", did_you_mean(key, known),
                "the keys are ", list_of(known, false), '.');
}

[[noreturn]] void refuse(ErrorCode code, const TopologyField& field, const ConfigValue& value) {
  const auto* word = std::get_if<std::string>(&value);
  const std::string guess = word == nullptr ? "" : nearest(*word, field.choices);
  detail::raise(code, "topology key '", field.key, "' must be ", field.allowed(), ", not ", to_string(value), '.',
                guess.empty() ? "" : " Did you mean '" + guess + "'?");
}

/// A whole number of `value`, from 0 to 2^63 - 1; a double must be whole.
std::int64_t whole_number(const TopologyField& field, const ConfigValue& value) {
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return *whole;
  const auto* real = std::get_if<double>(&value);
  if (real == nullptr) refuse(ErrorCode::InvalidType, field, value);
  if (!(*real >= 0 && *real < 0x1p63 && *real == std::floor(*real))) refuse(ErrorCode::InvalidArgument, field, value);
  return static_cast<std::int64_t>(*real);
}

ConfigValue checked_bytes(const TopologyField& field, const ConfigValue& value) {
  std::int64_t bytes = 0;
  if (const auto* text = std::get_if<std::string>(&value)) {
    const Size size = Size::parse(*text);
    if (size.kind() != Size::Kind::Bytes || size.resolve(0) > INT64_MAX) {
      refuse(ErrorCode::InvalidArgument, field, value);
    }
    bytes = static_cast<std::int64_t>(size.resolve(0));
  } else {
    bytes = whole_number(field, value);
  }
  if (bytes <= 0) refuse(ErrorCode::InvalidArgument, field, value);
  return bytes;
}

ConfigValue checked_real(const TopologyField& field, const ConfigValue& value) {
  double real = 0;
  if (const auto* text = std::get_if<std::string>(&value)) {
    real = field.type == Type::Rate ? parse_rate(*text) : parse_duration(*text);
  } else if (const auto* number = std::get_if<double>(&value)) {
    real = *number;
  } else if (const auto* whole = std::get_if<std::int64_t>(&value)) {
    real = static_cast<double>(*whole);
  } else {
    refuse(ErrorCode::InvalidType, field, value);
  }
  if (!std::isfinite(real) || real <= 0) refuse(ErrorCode::InvalidArgument, field, value);
  return real;
}

ConfigValue checked(const TopologyField& field, const ConfigValue& value) {
  switch (field.type) {
    case Type::Count: {
      const std::int64_t count = whole_number(field, value);
      if (count < field.least || count > kMostCount) refuse(ErrorCode::InvalidArgument, field, value);
      return count;
    }
    case Type::Bytes: return checked_bytes(field, value);
    case Type::Rate:
    case Type::Seconds: return checked_real(field, value);
    case Type::Name:
    case Type::Choice: break;
  }
  const auto* word = std::get_if<std::string>(&value);
  if (word == nullptr) refuse(ErrorCode::InvalidType, field, value);
  const bool allowed = field.type == Type::Name
                           ? !word->empty() && word->size() <= 128 && in_quotes(*word) == "'" + *word + "'"
                           : std::find(field.choices.begin(), field.choices.end(), *word) != field.choices.end();
  if (!allowed) refuse(ErrorCode::InvalidArgument, field, value);
  return *word;
}

/// A value as explain() shows it.
std::string value_shown(const TopologyField& field, const std::optional<ConfigValue>& value) {
  if (!value) return "unknown";
  switch (field.type) {
    case Type::Bytes: {
      const auto bytes = static_cast<std::uint64_t>(std::get<std::int64_t>(*value));
      const std::string exact = Size::bytes(bytes).to_string();
      return exact.size() <= 8 ? exact : format_size(bytes);
    }
    case Type::Rate: return format_rate(std::get<double>(*value));
    case Type::Seconds: return format_duration(std::get<double>(*value));
    case Type::Name:
    case Type::Choice: return std::get<std::string>(*value);
    case Type::Count: break;
  }
  return to_string(*value);
}

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(text.size() + 1, width), ' ');
  return text;
}

}  // namespace

std::string TopologyField::allowed() const {
  switch (type) {
    case Type::Count: return "a whole number from " + std::to_string(least) + " to " + std::to_string(kMostCount);
    case Type::Bytes: return "a size above 0 such as '80GB' or '1.5TiB'";
    case Type::Rate: return "a rate above 0 such as '400Gb/s' or '50GB/s'";
    case Type::Seconds: return "a duration above 0 such as '5us'";
    case Type::Name: return "a name of 1 to 128 printable characters";
    case Type::Choice: break;
  }
  return list_of(choices);
}

const std::vector<TopologyField>& TopologyConfig::fields() {
  static const std::vector<TopologyField> table{
      {"nodes", Type::Count, {}, 1, "machines that train together"},
      {"accelerators_per_node", Type::Count, {}, 0, "GPUs or other cards of one machine; 0: the processors train"},
      {"accelerator", Type::Name, {}, 0, "name, as the driver or the hardware table has it"},
      {"accelerator_memory", Type::Bytes, {}, 0, "of one accelerator"},
      {"node_link", Type::Choice, {"nvlink", "roce", "pcie", "other"}, 0, "what joins the accelerators of a node"},
      {"node_link_bandwidth", Type::Rate, {}, 0, "one way, all links of one accelerator together"},
      {"node_link_latency", Type::Seconds, {}, 0, "of one small message between accelerators of a node"},
      {"network", Type::Choice, {"infiniband", "roce", "efa", "ethernet", "other"}, 0, "what joins the nodes"},
      {"network_bandwidth", Type::Rate, {}, 0, "one way, all adapters of one node together"},
      {"network_latency", Type::Seconds, {}, 0, "of one small message between nodes"},
      {"host_memory", Type::Bytes, {}, 0, "of one node, that training may use"},
      {"cores_per_node", Type::Count, {}, 1, "of one node, that training may use, each counted once"},
  };
  return table;
}

TopologyConfig::TopologyConfig() : entries_(fields().size()) {
  set("nodes", std::int64_t{1}, "default");
  set("accelerators_per_node", std::int64_t{0}, "default");
}

TopologyConfig TopologyConfig::from_pairs(const std::vector<std::pair<std::string, ConfigValue>>& pairs,
                                          std::string_view origin) {
  TopologyConfig config;
  std::set<std::string_view> seen;
  try {
    for (const auto& [key, value] : pairs) {
      OXY_CHECK(seen.insert(key).second, InvalidArgument, "topology key ", in_quotes(key),
                " is there twice; keep one of them.");
      config.set(key, value, origin);
    }
    config.check();
  } catch (const Error& error) {
    detail::raise(error.code(), origin, ": ", error.what());
  }
  return config;
}

TopologyConfig TopologyConfig::from_json(std::string_view text, std::string_view origin) {
  return from_pairs(detail::read_flat_json(text, origin), origin);
}

TopologyConfig TopologyConfig::from_yaml(std::string_view text, std::string_view origin) {
  return from_pairs(detail::read_flat_yaml(text, origin), origin);
}

TopologyConfig TopologyConfig::from_file(const std::string& path) {
  return from_pairs(detail::read_flat_file(path), "file " + path);
}

void TopologyConfig::set(std::string_view key, const ConfigValue& value, std::string_view origin) {
  const std::size_t row = row_of(key);
  if (value == ConfigValue(std::string("none")) && row > 1) {
    entries_[row].reset();
    return;
  }
  try {
    entries_[row] = Entry{checked(fields()[row], value), std::string(origin)};
  } catch (const Error& error) {
    const std::string what = error.what();
    if (what.starts_with("topology key")) throw;
    detail::raise(error.code(), "topology key '", key, "': ", what);
  }
}

std::optional<ConfigValue> TopologyConfig::get(std::string_view key) const {
  const auto& entry = entries_[row_of(key)];
  return entry ? std::optional(entry->value) : std::nullopt;
}

std::optional<std::int64_t> TopologyConfig::whole(std::string_view key) const {
  const auto value = get(key);
  return value ? std::optional(std::get<std::int64_t>(*value)) : std::nullopt;
}

std::optional<double> TopologyConfig::number(std::string_view key) const {
  const auto value = get(key);
  return value ? std::optional(std::get<double>(*value)) : std::nullopt;
}

std::optional<std::string> TopologyConfig::word(std::string_view key) const {
  const auto value = get(key);
  return value ? std::optional(std::get<std::string>(*value)) : std::nullopt;
}

std::string TopologyConfig::origin(std::string_view key) const {
  const auto& entry = entries_[row_of(key)];
  return entry ? entry->origin : "";
}

void TopologyConfig::check() const {
  if (accelerators_per_node() == 0) {
    for (const char* key :
         {"accelerator", "accelerator_memory", "node_link", "node_link_bandwidth", "node_link_latency"}) {
      OXY_CHECK(!get(key), InvalidArgument, "topology key '", key,
                "' is set and accelerators_per_node is 0; set accelerators_per_node, or leave '", key, "' out.");
    }
  }
  const auto cores = whole("cores_per_node");
  OXY_CHECK(!cores || accelerators_per_node() <= *cores, InvalidArgument, "topology: ", accelerators_per_node(),
            " accelerators_per_node on ", cores.value_or(0),
            " cores_per_node; each accelerator needs a core that feeds it. Mend one of the two.");
}

std::optional<double> TopologyConfig::total_accelerator_memory() const {
  const auto bytes = whole("accelerator_memory");
  if (!bytes) return std::nullopt;
  return static_cast<double>(*bytes) * static_cast<double>(total_accelerators());
}

std::optional<double> TopologyConfig::bisection_bytes_per_s() const {
  const bool one = nodes() == 1;
  const auto rate = number(one ? "node_link_bandwidth" : "network_bandwidth");
  const std::int64_t half = (one ? accelerators_per_node() : nodes()) / 2;
  if (!rate || half == 0) return std::nullopt;
  return *rate * static_cast<double>(half);
}

namespace {
std::optional<double> share(std::optional<double> amount, std::int64_t parts) {
  if (!amount || parts == 0) return std::nullopt;
  return *amount / static_cast<double>(parts);
}
std::optional<double> real(std::optional<std::int64_t> value) {
  return value ? std::optional(static_cast<double>(*value)) : std::nullopt;
}
}  // namespace

std::optional<double> TopologyConfig::network_bytes_per_s_per_accelerator() const {
  return share(number("network_bandwidth"), accelerators_per_node());
}
std::optional<double> TopologyConfig::host_memory_per_accelerator() const {
  return share(real(whole("host_memory")), accelerators_per_node());
}
std::optional<double> TopologyConfig::cores_per_accelerator() const {
  return share(real(whole("cores_per_node")), accelerators_per_node());
}

std::string TopologyConfig::to_json() const {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const TopologyField& field : fields()) {
    const auto value = get(field.key);
    object[field.key] = nullptr;
    if (value) std::visit([&](const auto& known) { object[field.key] = known; }, *value);
  }
  return object.dump(2) + '\n';
}

std::string TopologyConfig::explain() const {
  std::string text;
  for (const TopologyField& field : fields()) {
    text += padded(field.key, 23) + padded(value_shown(field, get(field.key)), 20) + padded(origin(field.key), 22) +
            field.meaning + '\n';
  }
  text += '\n' + padded("total accelerators", 43) + std::to_string(total_accelerators()) + '\n';
  const auto line = [&](const char* name, const std::optional<double>& value, const auto& format) {
    if (value) text += padded(name, 43) + format(*value) + '\n';
  };
  const auto bytes = [](double count) { return format_size(static_cast<std::uint64_t>(std::min(count, 0x1p63))); };
  line("total accelerator memory", total_accelerator_memory(), bytes);
  line("bisection bandwidth, one way", bisection_bytes_per_s(), format_rate);
  line("network per accelerator, one way", network_bytes_per_s_per_accelerator(), format_rate);
  line("host memory per accelerator", host_memory_per_accelerator(), bytes);
  line("cores per accelerator", cores_per_accelerator(), [](double count) { return to_string(ConfigValue(count)); });
  return text;
}

bool TopologyConfig::operator==(const TopologyConfig& other) const {
  return std::all_of(fields().begin(), fields().end(),
                     [&](const TopologyField& field) { return get(field.key) == other.get(field.key); });
}

}  // namespace oxytorch::machine
