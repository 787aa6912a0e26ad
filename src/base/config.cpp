#include "oxytorch/config.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/spelling.h"
#include "oxytorch/error.h"

namespace oxytorch {
namespace {

using Type = ConfigField::Type;

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const ConfigField& field : PerformanceConfig::fields()) all.push_back(field.key);
  for (const ConfigWord& word : PerformanceConfig::words()) all.push_back(word.word);
  return all;
}

bool is_choice(const ConfigField& field, const std::string& word) {
  return std::find(field.choices.begin(), field.choices.end(), word) != field.choices.end();
}

/// What a key names.
struct Named {
  std::optional<std::size_t> row;    // of the table of fields
  const ConfigWord* word = nullptr;  // where it is not the key itself
  explicit operator bool() const { return row.has_value() || word != nullptr; }
};

std::optional<std::size_t> row_of_key(std::string_view key) {
  const auto& fields = PerformanceConfig::fields();  // short, so it is searched
  for (std::size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].key == key) return i;
  }
  return std::nullopt;
}

Named named_by(std::string_view name) {
  if (const auto row = row_of_key(name)) return {row};
  for (const ConfigWord& word : PerformanceConfig::words()) {
    if (word.word == name) return {row_of_key(word.key), &word};
  }
  return {};
}

bool is_section(const std::string& name) {
  const auto& known = PerformanceConfig::sections();
  return std::find(known.begin(), known.end(), name) != known.end();
}

[[noreturn]] void unknown(std::string_view key) {
  detail::raise(ErrorCode::InvalidArgument, "unknown setting ", in_quotes(key), "; ", did_you_mean(key, names()),
                "PerformanceConfig.explain() lists them all.");
}

/// A key as it may be written: itself or another word, with sections before it, of which the last may be a part of its
/// name: "early_stopping.patience" is "early_stopping_patience".
Named resolve(std::string_view path) {
  std::vector<std::string> parts{""};
  for (const char c : path) {
    if (c == '.') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  const std::string leaf = parts.back();
  Named found;
  std::size_t sections = parts.size() - 1;
  if (parts.size() > 1) found = named_by(parts[sections - 1] + "_" + leaf);
  if (found) {
    --sections;
  } else {
    found = named_by(leaf);
  }
  for (std::size_t i = 0; i < sections; ++i) {
    if (is_section(parts[i])) continue;
    OXY_CHECK(!named_by(parts[i]), InvalidType, "setting ", in_quotes(parts[i]), " is a mapping", found ? "" : " with ",
              found ? "" : in_quotes(leaf), "; a value is a word, a number, true or false.");
    const std::string joined = parts[i] + "_" + leaf;
    if (nearest(parts[i], PerformanceConfig::sections()).empty() && !nearest(joined, names()).empty()) unknown(joined);
    detail::raise(ErrorCode::InvalidArgument, "unknown section ", in_quotes(parts[i]), " around ", in_quotes(leaf),
                  "; ", did_you_mean(parts[i], PerformanceConfig::sections()), "sections are ",
                  list_of(PerformanceConfig::sections(), false), ", and settings may stand without one.");
  }
  if (!found) unknown(leaf);
  return found;
}

/// The row of a key; Error(NotSupported) for a word that has none.
std::size_t row_of(std::string_view key) {
  const Named found = resolve(key);
  OXY_CHECK(found.row, NotSupported, found.word->word, ": ", found.word->advice);
  return *found.row;
}

/// Whether a value of a switch asks for what is so anyway.
bool asks_for_nothing(const ConfigValue& value) {
  return value == ConfigValue(false) || value == ConfigValue(std::string("off")) ||
         value == ConfigValue(std::string("none"));
}

const ConfigValue& default_of(const ConfigField& field, const std::string& level) {
  return level == "basic" ? field.basic : level == "ultra" ? field.ultra : field.advanced;
}

[[noreturn]] void refuse(ErrorCode code, const ConfigField& field, const ConfigValue& value, std::string_view origin) {
  const auto* word = std::get_if<std::string>(&value);
  const std::string guess = word == nullptr ? "" : nearest(*word, field.choices);
  detail::raise(code, origin.empty() ? "" : std::string(origin) + ": ", "setting '", field.key, "' must be ",
                field.allowed(), ", not ", to_string(value), '.',
                guess.empty() ? "" : " Did you mean '" + guess + "'?");
}

ConfigValue checked_number(const ConfigField& field, const ConfigValue& value, std::string_view origin) {
  double real = 0;
  if (const auto* whole = std::get_if<std::int64_t>(&value)) {
    real = static_cast<double>(*whole);
  } else if (const auto* number = std::get_if<double>(&value)) {
    real = *number;
  } else {
    refuse(ErrorCode::InvalidType, field, value, origin);
  }
  const bool inside = real >= field.low && (field.high_open ? real < field.high : real <= field.high);
  if (!inside) refuse(ErrorCode::InvalidArgument, field, value, origin);
  if (field.type == Type::Number) return real == 0 ? 0.0 : real;  // no -0
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return *whole;
  // 2^63 itself passes the range, rounded as it is, and does not fit.
  if (real != std::floor(real) || real >= 0x1p63) refuse(ErrorCode::InvalidArgument, field, value, origin);
  return static_cast<std::int64_t>(real);
}

/// `value` in the form it is kept in, or an error that names key, value and what is allowed.
ConfigValue checked(const ConfigField& field, const ConfigValue& value, std::string_view origin) {
  const auto* word = std::get_if<std::string>(&value);
  switch (field.type) {
    case Type::Flag:
      if (!std::holds_alternative<bool>(value)) refuse(ErrorCode::InvalidType, field, value, origin);
      return value;
    case Type::Choice: {
      // Python's True and YAML 1.1's on are the same wish.
      if (const auto* truth = std::get_if<bool>(&value); truth != nullptr && is_choice(field, *truth ? "on" : "off")) {
        return std::string(*truth ? "on" : "off");
      }
      if (word == nullptr) refuse(ErrorCode::InvalidType, field, value, origin);
      if (!is_choice(field, *word)) refuse(ErrorCode::InvalidArgument, field, value, origin);
      return value;
    }
    case Type::Size:
      if (const auto* truth = std::get_if<bool>(&value); truth != nullptr && is_choice(field, "off")) {
        return std::string(*truth ? "auto" : "off");
      }
      if (word != nullptr && is_choice(field, *word)) return value;
      if (word != nullptr) {
        try {
          return Size::parse(*word).to_string();
        } catch (const Error& error) {
          detail::raise(error.code(), origin.empty() ? "" : std::string(origin) + ": ", "setting '", field.key,
                        "': ", error.what());
        }
      }
      if (const auto* whole = std::get_if<std::int64_t>(&value)) {
        if (*whole < 0) refuse(ErrorCode::InvalidArgument, field, value, origin);
        return Size::bytes(static_cast<std::uint64_t>(*whole)).to_string();
      }
      if (const auto* real = std::get_if<double>(&value)) {
        if (!(*real >= 0 && *real < 0x1p63 && *real == std::floor(*real))) {
          refuse(ErrorCode::InvalidArgument, field, value, origin);
        }
        return Size::bytes(static_cast<std::uint64_t>(*real)).to_string();
      }
      refuse(ErrorCode::InvalidType, field, value, origin);
    case Type::Number:
    case Type::Integer: break;
  }
  if (word != nullptr && !field.choices.empty()) {
    if (!is_choice(field, *word)) refuse(ErrorCode::InvalidArgument, field, value, origin);
    return value;
  }
  return checked_number(field, value, origin);
}

[[noreturn]] void wrong_reader(std::string_view key, const char* asked) {
  detail::raise(ErrorCode::InvalidType, "setting '", key, "' is not ", asked, "; it is ",
                PerformanceConfig::field(key).allowed(), '.');
}

}  // namespace

PerformanceConfig::PerformanceConfig(std::string_view level) : overrides_(fields().size()) {
  level_ = std::get<std::string>(checked(fields()[0], std::string(level), ""));
}

const ConfigField& PerformanceConfig::field(std::string_view key) { return fields()[row_of(key)]; }

void PerformanceConfig::check_names(const std::vector<std::string>& names, std::string_view origin) {
  const std::string begin = origin.empty() ? "" : std::string(origin) + ": ";
  std::map<std::string, std::string_view> seen;  // as it was written, by what is meant
  for (const std::string& name : names) {
    std::string meant;
    try {
      meant = key_of(name);
    } catch (const Error& error) {
      detail::raise(error.code(), begin, error.what());
    }
    const auto [before, is_new] = seen.emplace(std::move(meant), name);
    OXY_CHECK(is_new, InvalidArgument, begin, "setting ", in_quotes(name), " is there twice",
              before->second == name ? "" : ", also as " + in_quotes(before->second), "; keep one of them.");
  }
}

std::string PerformanceConfig::key_of(std::string_view name) {
  const Named found = resolve(name);
  return found.row ? fields()[*found.row].key : found.word->word;
}

void PerformanceConfig::set(std::string_view key, const ConfigValue& value, ConfigSource source,
                            std::string_view origin) {
  const Named found = resolve(key);
  if (!found.row) {
    if (found.word->is_switch && asks_for_nothing(value)) return;
    detail::raise(ErrorCode::NotSupported, found.word->word, " = ", to_string(value), " (",
                  origin.empty() ? "caller" : std::string(origin), "): ", found.word->advice);
  }
  const std::size_t row = *found.row;
  ConfigValue meant = value;
  if (found.word != nullptr) {
    for (const auto& [word, meaning] : found.word->values) {
      if (value == word) meant = meaning;
    }
  }
  ConfigValue kept = checked(fields()[row], meant, source == ConfigSource::File ? origin : std::string_view{});
  if (row == 0) level_ = std::get<std::string>(kept);
  overrides_[row] = Entry{std::move(kept), source, std::string(origin)};
}

void PerformanceConfig::unset(std::string_view key) {
  const std::size_t row = row_of(key);
  overrides_[row].reset();
  if (row == 0) level_ = "advanced";
}

ConfigValue PerformanceConfig::get(std::string_view key) const {
  const std::size_t row = row_of(key);
  if (row == 0) return level_;
  return overrides_[row] ? overrides_[row]->value : default_of(fields()[row], level_);
}

ConfigValue PerformanceConfig::default_value(std::string_view key) const {
  return default_of(fields()[row_of(key)], level_);
}

bool PerformanceConfig::flag(std::string_view key) const {
  const ConfigValue value = get(key);
  if (const auto* truth = std::get_if<bool>(&value)) return *truth;
  wrong_reader(key, "a flag");
}

double PerformanceConfig::number(std::string_view key) const {
  const ConfigValue value = get(key);
  if (const auto* real = std::get_if<double>(&value)) return *real;
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return static_cast<double>(*whole);
  wrong_reader(key, "a number");
}

std::string PerformanceConfig::word(std::string_view key) const {
  const ConfigValue value = get(key);
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  wrong_reader(key, "a word");
}

Size PerformanceConfig::size(std::string_view key) const {
  if (field(key).type != ConfigField::Type::Size) wrong_reader(key, "a size");
  return Size::parse(word(key));
}

std::optional<std::int64_t> PerformanceConfig::integer(std::string_view key) const {
  if (field(key).type != ConfigField::Type::Integer) wrong_reader(key, "a whole number");
  const ConfigValue value = get(key);
  const auto* whole = std::get_if<std::int64_t>(&value);
  return whole == nullptr ? std::nullopt : std::optional(*whole);
}

bool PerformanceConfig::is_auto(std::string_view key) const { return get(key) == ConfigValue(std::string("auto")); }

ConfigSource PerformanceConfig::source(std::string_view key) const {
  const auto& entry = overrides_[row_of(key)];
  return entry ? entry->source : ConfigSource::Level;
}

std::string PerformanceConfig::origin(std::string_view key) const {
  const std::size_t row = row_of(key);
  const auto& entry = overrides_[row];
  if (!entry) return row != 0 ? "level " + level_ : level_ == "advanced" ? "default" : "caller";
  if (!entry->origin.empty()) return entry->origin;
  return entry->source == ConfigSource::File ? "file" : "caller";
}

bool PerformanceConfig::operator==(const PerformanceConfig& other) const {
  return std::all_of(fields().begin(), fields().end(),
                     [&](const ConfigField& field) { return get(field.key) == other.get(field.key); });
}

PerformanceConfig PerformanceConfig::from_pairs(const std::vector<std::pair<std::string, ConfigValue>>& pairs,
                                                std::string_view origin) {
  PerformanceConfig config;
  std::vector<std::string> names;
  for (const auto& [key, value] : pairs) names.push_back(key);
  PerformanceConfig::check_names(names, origin);
  for (const auto& [key, value] : pairs) {
    config.set(key, value, ConfigSource::File, origin);
  }
  return config;
}

}  // namespace oxytorch
