/// PerformanceConfig: every setting of a run, with a level, a default and a reason.
///
/// One table of fields drives typed access, defaults, checks, files and explain(). Levels: `basic` changes no bit of
/// the result; `advanced` adds changes within rounding; `ultra` adds opt-in trades.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/units.h"

namespace oxytorch {

/// A setting's value: a flag, a whole number, a number, or a word ("auto", "bf16", "10GB").
using ConfigValue = std::variant<bool, std::int64_t, double, std::string>;

/// A value as it is written in messages: 'bf16', 4, 0.5, true.
OXY_API std::string to_string(const ConfigValue& value);

/// One row of the table.
struct OXY_API ConfigField {
  enum class Type { Flag, Integer, Number, Choice, Size };
  std::string key;
  Type type;
  std::vector<std::string> choices;  ///< words allowed (for Integer: beside whole numbers)
  double low;                        ///< least value of Integer and Number
  double high;                       ///< greatest value; itself refused where `high_open`
  bool high_open;
  ConfigValue basic;
  ConfigValue advanced;
  ConfigValue ultra;
  std::string reason;        ///< why the default is what it is, one sentence
  std::string basic_reason;  ///< the same at level basic, where it differs; else empty
  /// What may be set, for messages: "'auto', 'on' or 'off'", "a whole number >= 1 or 'auto'".
  [[nodiscard]] std::string allowed() const;
};

/// Another word for a setting, as the guides of the field have it; or for what has no effect here yet.
struct OXY_API ConfigWord {
  std::string word;
  std::string key;  ///< the setting that it stands for; empty where there is none
  std::vector<std::pair<ConfigValue, ConfigValue>> values = {};  ///< what is meant by a value; others are as they are
  std::string advice = {};  ///< where `key` is empty: what to do instead, as the end of a sentence
  bool is_switch = false;   ///< where `key` is empty: whether false asks for nothing, and is no error
};

/// Where a value came from.
enum class ConfigSource { Level, File, Caller };

/// A value type; not for changing from two threads at once. Setters and readers throw Error(InvalidArgument) for an
/// unknown key (with the nearest right one) or a value out of range, Error(InvalidType) for a value of a wrong type.
/// A key may be one of words(), and may have sections before it: "training.max_grad_norm" is "clip_norm". One that has
/// no effect yet is Error(NotSupported), with a sentence that says what to do.
class OXY_API PerformanceConfig {
 public:
  /// All defaults of "basic", "advanced" or "ultra".
  explicit PerformanceConfig(std::string_view level = "advanced");

  /// JSON or YAML text: a mapping from keys to values, or to sections of them. `origin` is named in messages and in
  /// explain().
  static PerformanceConfig from_json(std::string_view text, std::string_view origin = "JSON text");
  static PerformanceConfig from_yaml(std::string_view text, std::string_view origin = "YAML text");
  /// By extension: .json, .yaml or .yml. Error(NotFound), Error(Io) or what the parsers throw.
  static PerformanceConfig from_file(const std::string& path);

  /// Every key and value.
  [[nodiscard]] std::string to_json() const;
  [[nodiscard]] std::string to_yaml() const;
  /// Writes by extension, whole or not at all.
  void save(const std::string& path) const;

  /// Error(InvalidArgument) where one of the names is no setting, or two of them mean the same; `origin`, where it is
  /// given, begins the message.
  static void check_names(const std::vector<std::string>& names, std::string_view origin = "");
  /// Sets one value. Setting "level" gives every value that nobody set the new level's default.
  /// `origin` names the file or the caller in explain().
  void set(std::string_view key, const ConfigValue& value, ConfigSource source = ConfigSource::Caller,
           std::string_view origin = "");
  /// Back to the level's default.
  void unset(std::string_view key);

  [[nodiscard]] const std::string& level() const noexcept { return level_; }
  [[nodiscard]] ConfigValue get(std::string_view key) const;
  /// What the level gives it.
  [[nodiscard]] ConfigValue default_value(std::string_view key) const;
  /// Typed readers; a key of another type is Error(InvalidType).
  [[nodiscard]] bool flag(std::string_view key) const;
  [[nodiscard]] double number(std::string_view key) const;  ///< also of a whole number
  [[nodiscard]] std::string word(std::string_view key) const;
  [[nodiscard]] Size size(std::string_view key) const;
  /// The whole number, or nothing where the value is a word ("auto", "keep").
  [[nodiscard]] std::optional<std::int64_t> integer(std::string_view key) const;
  /// True where the value is "auto".
  [[nodiscard]] bool is_auto(std::string_view key) const;

  [[nodiscard]] ConfigSource source(std::string_view key) const;
  /// "level advanced", "file run.yaml", "caller".
  [[nodiscard]] std::string origin(std::string_view key) const;

  /// A table for a reader: each value, where it came from, and why it is the default.
  [[nodiscard]] std::string explain() const;

  /// The same level and values; where they came from does not matter.
  bool operator==(const PerformanceConfig& other) const;

  /// The table, in the order of explain(); "level" first.
  static const std::vector<ConfigField>& fields();
  /// The row of `key`, or Error(InvalidArgument) with the nearest right name.
  static const ConfigField& field(std::string_view key);
  /// Other words for keys.
  static const std::vector<ConfigWord>& words();
  /// The key that a name is of, or the word itself where it has no effect yet; Error(InvalidArgument) for another.
  static std::string key_of(std::string_view name);
  /// Names that group settings in a file and say nothing else.
  static const std::vector<std::string>& sections();

 private:
  struct Entry {
    ConfigValue value;
    ConfigSource source;
    std::string origin;
  };
  static PerformanceConfig from_pairs(const std::vector<std::pair<std::string, ConfigValue>>& pairs,
                                      std::string_view origin);

  std::string level_;
  std::vector<std::optional<Entry>> overrides_;  // by row of the table; empty: the level's default
};

}  // namespace oxytorch
