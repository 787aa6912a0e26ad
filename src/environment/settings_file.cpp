#include "settings_file.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>
#include <unordered_map>

#include "base/spelling.h"
#include "oxytorch/error.h"
#include "value.h"

namespace oxytorch::environment {
namespace {

/// The value of enumeration E whose name is `word`; `last` is the last value of E.
template <class E>
std::optional<E> named(std::string_view word, E last) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    if (word == name(static_cast<E>(i))) return static_cast<E>(i);
  }
  return std::nullopt;
}

template <class E>
std::vector<std::string> names_of(E last) {
  std::vector<std::string> names;
  for (int i = 0; i <= static_cast<int>(last); ++i) names.emplace_back(name(static_cast<E>(i)));
  return names;
}

bool is_version(std::string_view text) {
  for (const std::string_view part : split(text, '.')) {
    if (part.empty() || part.find_first_not_of("0123456789") != std::string_view::npos) return false;
  }
  return true;
}

/// Where a text stands, for messages.
struct Place {
  std::string_view file;
  int line = 0;
  std::string entry;  ///< the setting, or "" in the head

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    detail::raise(ErrorCode::InvalidArgument, "settings file ", file, ", line ", line, entry.empty() ? "" : ", ", entry,
                  ": ", parts...);
  }
};

/// A setting with the line that its name is on.
struct Placed {
  Setting setting;
  Place place;
};

/// Reads LOW..HIGH or LOW.. into a setting.
void read_range(const Place& place, Setting& setting, std::string_view text) {
  const std::size_t dots = std::min(text.find(".."), text.size());
  const auto whole_number = [](std::string_view part, std::optional<std::int64_t>& number) {
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number.emplace());
    return error == std::errc() && end == part.data() + part.size();
  };
  const std::string_view high = text.substr(std::min(dots + 2, text.size()));
  const bool read = dots < text.size() && whole_number(text.substr(0, dots), setting.low) &&
                    (high.empty() || whole_number(high, setting.high));
  if (!read || (setting.high && *setting.high < *setting.low)) {
    place.refuse("the range ", in_quotes(text), " must be LOW..HIGH or LOW.. in whole numbers, the lower one first.");
  }
}

/// Reads `values`: a kind, and what belongs to it.
void read_values(const Place& place, Setting& setting, std::string_view values) {
  const std::size_t space = values.find(' ');
  const std::string_view word = values.substr(0, space);
  std::string_view rest = space == std::string_view::npos ? "" : values.substr(space + 1);
  const auto kind = named(word, Kind::Grammar);
  if (!kind) {
    const auto kinds = names_of(Kind::Grammar);
    place.refuse("values ", in_quotes(values), " has no kind ", in_quotes(word), "; ", did_you_mean(word, kinds),
                 "write one of ", list_of(kinds), '.');
  }
  setting.kind = *kind;
  switch (*kind) {
    case Kind::Integer:
    case Kind::Number:
      if (!rest.empty()) read_range(place, setting, rest);
      return;
    case Kind::Choice: {
      constexpr std::string_view kAnyCase = ", any case";
      setting.any_case = rest.ends_with(kAnyCase);
      if (setting.any_case) rest.remove_suffix(kAnyCase.size());
      for (const std::string_view choice : split(rest, '/')) {
        if (choice.empty() || choice.find_first_of(" ,") != std::string_view::npos ||
            std::count(setting.choices.begin(), setting.choices.end(), choice) != 0) {
          place.refuse("values ", in_quotes(values), " has the choice ", in_quotes(choice),
                       "; write different words with a slash between them, such as 'choice LAZY/EAGER'.");
        }
        setting.choices.emplace_back(choice);
      }
      return;
    }
    case Kind::Grammar: {
      if (find_grammar(rest) == nullptr) {
        const auto known = grammar_names();
        place.refuse("there is no grammar ", in_quotes(rest), "; ", did_you_mean(rest, known), "write one of ",
                     list_of(known), "; a new one is added in src/environment/value.cpp.");
      }
      setting.grammar = rest;
      return;
    }
    case Kind::Flag:
    case Kind::Digit:
    case Kind::Size:
    case Kind::List:
    case Kind::Path:
    case Kind::Text: break;
  }
  if (!rest.empty()) {
    place.refuse("values ", in_quotes(values), " has ", in_quotes(rest),
                 " after a kind that takes nothing; remove it.");
  }
}

/// One file: a head of single texts, and `settings`, a mapping from names to mappings of single texts.
class Reader : public YAML::EventHandler {
 public:
  explicit Reader(std::string_view file) : file_(file) {}

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1) at(mark).refuse("a second YAML document begins; keep one.");
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { odd(mark, "nothing"); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { odd(mark, "an alias"); }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    odd(mark, "a list");
  }
  void OnSequenceEnd() override {}

  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    const bool expected = depth_ == 0 || (key_ && (depth_ == 1 ? *key_ == "settings" : depth_ == 2));
    if (!expected) odd(mark, "a mapping");
    if (depth_ == 2) begin_setting();
    key_.reset();
    seen_.clear();
    ++depth_;
  }

  void OnMapEnd() override {
    if (--depth_ == 2) end_setting();
    if (depth_ == 0) end_file();
  }

  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t, const std::string& text) override {
    if (depth_ == 0) odd(mark, "a text");
    if (!key_) {
      key_ = text;
      key_line_ = mark.line + 1;
      if (depth_ != 2 && !(depth_ == 1 ? head_ : seen_).insert(text).second)
        at(mark).refuse("field ", in_quotes(text), " stands twice; keep one.");
      return;
    }
    if (depth_ == 2 || (depth_ == 1 && *key_ == "settings")) odd(mark, "a text");
    if (text.empty() || std::any_of(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; })) {
      at(mark).refuse("field ", in_quotes(*key_), " is ", in_quotes(text),
                      "; write printable ASCII on one line, or leave the field out.");
    }
    (depth_ == 1 ? head_field(at(mark), text) : field(at(mark), text));
    key_.reset();
  }

  std::vector<Placed> settings;

 private:
  [[nodiscard]] Place at(const YAML::Mark& mark) const {
    return {file_, mark.line + 1, depth_ == 3 ? settings.back().setting.name : ""};
  }

  [[noreturn]] void odd(const YAML::Mark& mark, const char* what) const {
    Place place = at(mark);
    if (key_) place.line = key_line_;  // yaml-cpp marks an empty value where the next one begins
    if (depth_ == 0)
      place.refuse("there is ", what, "; a file is a mapping with family, component, source and settings.");
    if (!key_) place.refuse("there is ", what, " for a name; write a word.");
    if (depth_ == 1 && *key_ == "settings")
      place.refuse("settings is ", what, "; write a mapping from names to fields.");
    if (depth_ == 2)
      place.refuse("setting ", in_quotes(*key_), " is ", what, "; write a mapping with values and what.");
    place.refuse("field ", in_quotes(*key_), " is ", what, "; write a text, or leave the field out.");
  }

  template <class Fields>
  [[noreturn]] void unknown_field(const Place& place, const Fields& fields) const {
    std::vector<std::string> known;
    for (const auto& one : fields) known.emplace_back(one.first);
    place.refuse("there is no field ", in_quotes(*key_), "; ", did_you_mean(*key_, known), "write one of ",
                 list_of(known), '.');
  }

  void head_field(const Place& place, const std::string& text) {
    const std::pair<const char*, std::string*> fields[] = {
        {"family", &family_}, {"component", &component_}, {"source", &source_}, {"settings", nullptr}};
    const auto* field =
        std::find_if(std::begin(fields), std::end(fields), [&](const auto& f) { return *key_ == f.first; });
    if (field == std::end(fields)) unknown_field(place, fields);
    *field->second = text;
    const auto families = names_of(Family::Launcher);
    if (field->second == &family_ && !named(text, Family::Launcher)) {
      place.refuse("there is no family ", in_quotes(text), "; ", did_you_mean(text, families), "write one of ",
                   list_of(families), '.');
    }
  }

  void begin_setting() {
    Place place{file_, key_line_, ""};
    if (!is_name(*key_)) {
      place.refuse(in_quotes(*key_), " is no name of an environment variable; write letters, digits and _.");
    }
    place.entry = *key_;
    if (!settings.empty() && settings.back().setting.name >= *key_) {
      const std::string& before = settings.back().setting.name;
      place.refuse(before == *key_ ? "the name stands twice; keep one of them."
                                   : "names are sorted as by LC_ALL=C sort; move it before " + before + '.');
    }
    settings.push_back({Setting{}, place});
    settings.back().setting.name = *key_;
  }

  void field(const Place& place, const std::string& text) {
    Setting& setting = settings.back().setting;
    if (*key_ == "values") return read_values(place, setting, text);
    const std::pair<const char*, std::string*> fields[] = {{"values", nullptr},
                                                           {"default", &setting.standard},
                                                           {"what", &setting.what},
                                                           {"since", &setting.since},
                                                           {"until", &setting.until},
                                                           {"deprecated", &setting.deprecated},
                                                           {"replacement", &setting.replacement}};
    const auto* field =
        std::find_if(std::begin(fields), std::end(fields), [&](const auto& f) { return *key_ == f.first; });
    if (field == std::end(fields)) unknown_field(place, fields);
    const bool version = *key_ == "since" || *key_ == "until" || *key_ == "deprecated";
    if (version && !is_version(text)) {
      place.refuse(*key_, ' ', in_quotes(text), " is no version; write numbers with dots, such as 2.10.");
    }
    if (*key_ == "what" && text.back() != '.') {
      place.refuse(
          "what ", in_quotes(text),
          " does not end with a full stop; write one sentence, in double quotes if it has ': ' or ' #' in it.");
    }
    *field->second = text;
  }

  void end_setting() {
    const auto& [setting, place] = settings.back();
    for (const char* required : {"values", "what"}) {
      if (!seen_.contains(required)) place.refuse("field '", required, "' is missing; add it.");
    }
    for (const std::string& later : {setting.until, setting.deprecated}) {
      if (!setting.since.empty() && !later.empty() && compare_versions(setting.since, later) >= 0) {
        place.refuse("since ", setting.since, " is not before ", later, "; correct the versions.");
      }
    }
  }

  void end_file() {
    const Place place{file_, 1, ""};
    for (const auto& [field, text] :
         {std::pair{"family", &family_}, {"component", &component_}, {"source", &source_}}) {
      if (text->empty()) place.refuse("field '", field, "' is missing in the head of the file; add it.");
    }
    if (settings.empty()) place.refuse("there are no settings; add one, or remove the file.");
    for (auto& [setting, place_of] : settings) {
      setting.family = *named(family_, Family::Launcher);
      setting.component = component_;
      setting.evidence = source_;
    }
  }

  std::string_view file_;
  int documents_ = 0;
  int depth_ = 0;  ///< open mappings: 1 the head, 2 all settings, 3 one setting
  std::optional<std::string> key_;
  int key_line_ = 0;
  std::set<std::string> head_, seen_;  ///< fields of the head and of the last setting
  std::string family_, component_, source_;
};

std::vector<Placed> read_file(const SettingsFile& file) {
  Reader reader(file.name);
  try {
    std::istringstream stream{std::string(file.text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(reader)) continue;
  } catch (const YAML::Exception& error) {
    Place{file.name, error.mark.line + 1, ""}.refuse("this is not YAML: ", in_quotes(error.msg),
                                                     "; a text with ': ' or ' #' in it needs double quotes.");
  }
  return std::move(reader.settings);
}

}  // namespace

std::vector<Setting> read_settings(std::span<const SettingsFile> files) {
  std::vector<Placed> all;
  for (const SettingsFile& file : files) {
    auto some = read_file(file);
    if (some.empty()) Place{file.name, 1, ""}.refuse("the file is empty; remove it.");
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  std::unordered_map<std::string_view, const Place*> places;
  for (const auto& [setting, place] : all) {
    const auto [there, is_new] = places.emplace(setting.name, &place);
    if (!is_new)
      place.refuse("the name is in ", there->second->file, ", line ", there->second->line, " too; keep one.");
  }
  for (const auto& [setting, place] : all) {
    if (setting.replacement.empty() || places.contains(setting.replacement)) continue;
    std::vector<std::string> names;
    for (const auto& one : all) names.push_back(one.setting.name);
    place.refuse("the replacement ", in_quotes(setting.replacement), " is in no file; ",
                 did_you_mean(setting.replacement, names), "add it, or leave the field out.");
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Placed& a, const Placed& b) { return a.setting.family < b.setting.family; });
  std::vector<Setting> settings;
  settings.reserve(all.size());
  for (auto& one : all) settings.push_back(std::move(one.setting));
  return settings;
}

}  // namespace oxytorch::environment
