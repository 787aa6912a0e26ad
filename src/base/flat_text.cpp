#include "base/flat_text.h"

#include <fcntl.h>
#include <unistd.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/spelling.h"
#include "oxytorch/error.h"

namespace oxytorch::detail {
namespace {

// A configuration is a page of text; more is a wrong file, and parsers take long over it.
constexpr std::size_t kLargestText = 1 << 20;
constexpr std::size_t kMostPairs = 1000;

void check_text(std::string_view text, std::string_view origin) {
  OXY_CHECK(text.size() <= kLargestText, InvalidArgument, origin, ": ", text.size(),
            " bytes are too many for a configuration; the most is ", kLargestText, '.');
  OXY_CHECK(text.find('\0') == std::string_view::npos, InvalidArgument, origin, ": there is a zero byte in the text.");
}

[[noreturn]] void not_flat(std::string_view origin) {
  raise(ErrorCode::InvalidArgument, origin,
        ": a configuration is one flat mapping from settings to values, such as {\"level\": \"basic\"}.");
}

[[noreturn]] void not_a_value(std::string_view origin, const std::string& key, const char* what) {
  raise(ErrorCode::InvalidType, origin, ": setting ", in_quotes(key), " is ", what,
        "; a value is a word, a number, true or false.");
}

/// The sections around what is being read: "training.data." and how many settings there were before each of them.
class SectionPath {
 public:
  SectionPath(std::string_view origin, Sections sections) : origin_(origin), sections_(sections) {}

  [[nodiscard]] bool is_open() const { return open_; }
  [[nodiscard]] std::string full(const std::string& key) const { return prefix_ + key; }
  /// A mapping begins, `key` being what it is the value of.
  void enter(const std::string& key, std::size_t settings) {
    if (!std::exchange(open_, true)) return;
    if (sections_ == Sections::Refused || outer_.size() >= kDeepest) not_a_value(origin_, full(key), "a mapping");
    outer_.push_back({prefix_.size(), settings, full(key)});
    prefix_ += key + '.';
  }
  void leave(std::size_t settings) {
    if (outer_.empty()) return;
    if (outer_.back().settings == settings) not_a_value(origin_, outer_.back().name, "an empty mapping");
    prefix_.resize(outer_.back().length);
    outer_.pop_back();
  }

 private:
  static constexpr std::size_t kDeepest = 4;
  struct Outer {
    std::size_t length, settings;
    std::string name;
  };
  std::string_view origin_;
  Sections sections_;
  bool open_ = false;
  std::string prefix_;
  std::vector<Outer> outer_;
};

/// Collects a flat object in its order, duplicates and all, which nlohmann's own tree would drop.
class FlatReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  FlatReader(std::string_view origin, Sections sections) : origin_(origin), path_(origin, sections) {}

  bool null() override { return add(std::string("none")); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<number_unsigned_t>(INT64_MAX)) return add(static_cast<double>(value));
    return add(static_cast<std::int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(value); }
  bool binary(binary_t&) override { not_flat(origin_); }
  bool start_object(std::size_t) override {
    path_.enter(key_, pairs.size());
    return true;
  }
  bool key(string_t& value) override {
    key_ = value;
    return true;
  }
  bool end_object() override {
    path_.leave(pairs.size());
    return true;
  }
  bool start_array(std::size_t) override {
    if (path_.is_open()) not_a_value(origin_, path_.full(key_), "a list");
    not_flat(origin_);
  }
  bool end_array() override { return true; }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    // nlohmann quotes what it read last, which may be any bytes.
    std::string reason = in_quotes(error.what());
    raise(ErrorCode::InvalidArgument, origin_, ": not JSON, see byte ", position, ": ", reason, '.');
  }

  FlatPairs pairs;

 private:
  bool add(ConfigValue value) {
    if (!path_.is_open()) not_flat(origin_);
    pairs.emplace_back(path_.full(key_), std::move(value));
    return true;
  }

  std::string_view origin_;
  SectionPath path_;
  std::string key_;
};

/// A plain YAML scalar by the core schema: null, booleans and numbers; all else is a word.
ConfigValue plain_scalar(const std::string& text) {
  for (const char* word : {"", "~", "null", "Null", "NULL"}) {
    if (text == word) return std::string("none");
  }
  for (const char* word : {"true", "True", "TRUE"}) {
    if (text == word) return true;
  }
  for (const char* word : {"false", "False", "FALSE"}) {
    if (text == word) return false;
  }
  for (const char* word : {".inf", ".Inf", ".INF", "+.inf"}) {
    if (text == word) return INFINITY;
  }
  if (text == "-.inf") return -INFINITY;
  for (const char* word : {".nan", ".NaN", ".NAN"}) {
    if (text == word) return static_cast<double>(NAN);
  }
  const char* begin = text.data() + (text.front() == '+' && text.size() > 1 && text[1] != '-' ? 1 : 0);
  const char* end = text.data() + text.size();
  std::int64_t whole = 0;
  if (const auto [stop, status] = std::from_chars(begin, end, whole); status == std::errc() && stop == end)
    return whole;
  // from_chars also reads "inf" and "nan", which are words in YAML.
  const bool numeric = text.find_first_not_of("0123456789+-.eE") == std::string::npos;
  double real = 0;
  if (const auto [stop, status] = std::from_chars(begin, end, real); numeric && stop == end) {
    if (status == std::errc()) return real;
    if (status == std::errc::result_out_of_range) return std::strtod(begin, nullptr);
  }
  return text;
}

/// Collects the events of one mapping.
class FlatYaml : public YAML::EventHandler {
 public:
  FlatYaml(std::string_view origin, Sections sections) : origin_(origin), path_(origin, sections) {}

  void OnDocumentStart(const YAML::Mark&) override {
    OXY_CHECK(++documents_ == 1, InvalidArgument, origin_, ": there is more than one YAML document; keep one.");
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {
    if (path_.is_open()) value(std::string("none"));  // outside of a mapping it is an empty document
  }
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override { nested("an alias"); }
  void OnScalar(const YAML::Mark&, const std::string& tag, YAML::anchor_t, const std::string& text) override {
    if (!path_.is_open()) not_flat(origin_);
    if (key_) {
      // "!" marks quotes.
      const bool is_word = tag == "!" || tag == "tag:yaml.org,2002:str";
      value(is_word ? ConfigValue(text) : plain_scalar(text));
    } else {
      key_ = text;
    }
  }
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    nested("a list");
  }
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    if (path_.is_open() && !key_) not_flat(origin_);
    path_.enter(key_.value_or(""), pairs.size());
    key_.reset();
  }
  void OnMapEnd() override { path_.leave(pairs.size()); }

  FlatPairs pairs;

 private:
  [[noreturn]] void nested(const char* what) {
    if (!key_) not_flat(origin_);
    not_a_value(origin_, path_.full(*key_), what);
  }
  void value(ConfigValue value) {
    if (!key_) not_flat(origin_);
    pairs.emplace_back(path_.full(*key_), std::move(value));
    key_.reset();
    OXY_CHECK(pairs.size() <= kMostPairs, InvalidArgument, origin_, ": more than ", kMostPairs, " settings.");
  }

  std::string_view origin_;
  SectionPath path_;
  std::optional<std::string> key_;
  int documents_ = 0;
};

[[noreturn]] void io_error(const char* doing, const std::string& path) {
  const int number = errno;
  raise(number == ENOENT ? ErrorCode::NotFound : ErrorCode::Io, doing, " '", path, "' failed: ", std::strerror(number),
        '.');
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

FlatPairs read_flat_json(std::string_view text, std::string_view origin, Sections sections) {
  check_text(text, origin);
  FlatReader reader(origin, sections);
  // A mark of byte order, as some editors write, is no part of JSON and is skipped by the parser.
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  return std::move(reader.pairs);
}

FlatPairs read_flat_yaml(std::string_view text, std::string_view origin, Sections sections) {
  check_text(text, origin);
  FlatYaml reader(origin, sections);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    // Not YAML::Load: its tree of a broken text can grow without end, while this reader stops at the first odd event.
    while (parser.HandleNextDocument(reader)) continue;
  } catch (const YAML::Exception& error) {
    raise(ErrorCode::InvalidArgument, origin, ": not YAML, see line ", error.mark.line + 1, ": ", in_quotes(error.msg),
          '.');
  }
  return std::move(reader.pairs);
}

bool is_json(const std::string& path) {
  std::string extension = std::filesystem::path(path).extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  OXY_CHECK(extension == ".json" || extension == ".yaml" || extension == ".yml", InvalidArgument, "configuration '",
            path, "' must end in .json, .yaml or .yml, which says what is in it.");
  return extension == ".json";
}

FlatPairs read_flat_file(const std::string& path, Sections sections) {
  const bool json = is_json(path);
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.number() < 0) io_error("opening", path);
  std::string text;
  std::array<char, 65536> buffer{};
  // One byte over the limit is enough to refuse a file, however long.
  while (text.size() <= kLargestText) {
    const ssize_t count = ::read(file.number(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) io_error("reading", path);
    if (count == 0) break;
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
  const std::string origin = "file " + path;
  return json ? read_flat_json(text, origin, sections) : read_flat_yaml(text, origin, sections);
}

}  // namespace oxytorch::detail
