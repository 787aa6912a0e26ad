// PerformanceConfig as JSON, YAML, files and a table for readers.
#include <fcntl.h>
#include <sys/stat.h>
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

#include "oxytorch/config.h"
#include "oxytorch/error.h"
#include "oxytorch/spelling.h"

namespace oxytorch {
namespace {

using Pairs = std::vector<std::pair<std::string, ConfigValue>>;

// A configuration is a page of text; more is a wrong file, and parsers take long over it.
constexpr std::size_t kLargestText = 1 << 20;
constexpr std::size_t kMostPairs = 1000;

void check_text(std::string_view text, std::string_view origin) {
  OXY_CHECK(text.size() <= kLargestText, InvalidArgument, origin, ": ", text.size(),
            " bytes are too many for a configuration; the most is ", kLargestText, '.');
  OXY_CHECK(text.find('\0') == std::string_view::npos, InvalidArgument, origin, ": there is a zero byte in the text.");
}

[[noreturn]] void not_flat(std::string_view origin) {
  detail::raise(ErrorCode::InvalidArgument, origin,
                ": a configuration is one flat mapping from settings to values, such as {\"level\": \"basic\"}.");
}

[[noreturn]] void not_a_value(std::string_view origin, const std::string& key, const char* what) {
  detail::raise(ErrorCode::InvalidType, origin, ": setting ", in_quotes(key), " is ", what,
                "; a value is a word, a number, true or false.");
}

/// Collects a flat object in its order, duplicates and all, which nlohmann's own tree would drop.
class FlatReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit FlatReader(std::string_view origin) : origin_(origin) {}

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
    if (open_) not_a_value(origin_, key_, "a mapping");
    open_ = true;
    return true;
  }
  bool key(string_t& value) override {
    key_ = value;
    return true;
  }
  bool end_object() override { return true; }
  bool start_array(std::size_t) override {
    if (open_) not_a_value(origin_, key_, "a list");
    not_flat(origin_);
  }
  bool end_array() override { return true; }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    // nlohmann quotes what it read last, which may be any bytes.
    std::string reason = in_quotes(error.what());
    detail::raise(ErrorCode::InvalidArgument, origin_, ": not JSON, see byte ", position, ": ", reason, '.');
  }

  Pairs pairs;

 private:
  bool add(ConfigValue value) {
    if (!open_) not_flat(origin_);
    pairs.emplace_back(key_, std::move(value));
    return true;
  }

  std::string_view origin_;
  std::string key_;
  bool open_ = false;
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

/// Collects the events of one flat mapping.
class FlatYaml : public YAML::EventHandler {
 public:
  explicit FlatYaml(std::string_view origin) : origin_(origin) {}

  void OnDocumentStart(const YAML::Mark&) override {
    OXY_CHECK(++documents_ == 1, InvalidArgument, origin_, ": there is more than one YAML document; keep one.");
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {
    if (open_) value(std::string("none"));  // outside of a mapping it is an empty document
  }
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override { nested("an alias"); }
  void OnScalar(const YAML::Mark&, const std::string& tag, YAML::anchor_t, const std::string& text) override {
    if (!open_) not_flat(origin_);
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
    if (open_) nested("a mapping");
    open_ = true;
  }
  void OnMapEnd() override {}

  Pairs pairs;

 private:
  [[noreturn]] void nested(const char* what) {
    if (!key_) not_flat(origin_);
    not_a_value(origin_, *key_, what);
  }
  void value(ConfigValue value) {
    if (!key_) not_flat(origin_);
    pairs.emplace_back(*key_, std::move(value));
    key_.reset();
    OXY_CHECK(pairs.size() <= kMostPairs, InvalidArgument, origin_, ": more than ", kMostPairs, " settings.");
  }

  std::string_view origin_;
  std::optional<std::string> key_;
  bool open_ = false;
  int documents_ = 0;
};

/// "1e-05" as "1.0e-05": to YAML 1.1 readers a number has a point.
std::string yaml_number(const ConfigValue& value) {
  std::string text = to_string(value);
  const std::size_t exponent = text.find('e');
  if (std::holds_alternative<double>(value) && exponent != std::string::npos && text.find('.') == std::string::npos) {
    text.insert(exponent, ".0");
  }
  return text;
}

std::string extension_of(const std::string& path) {
  std::string extension = std::filesystem::path(path).extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  OXY_CHECK(extension == ".json" || extension == ".yaml" || extension == ".yml", InvalidArgument, "configuration '",
            path, "' must end in .json, .yaml or .yml, which says what is in it.");
  return extension;
}

std::string reason_of(const ConfigField& field, const std::string& level) {
  return level == "basic" && !field.basic_reason.empty() ? field.basic_reason : field.reason;
}

/// A value as explain() shows it: words without quotes.
std::string bare(const ConfigValue& value) {
  const auto* text = std::get_if<std::string>(&value);
  return text == nullptr ? to_string(value) : *text;
}

[[noreturn]] void io_error(const char* doing, const std::string& path) {
  const int number = errno;
  detail::raise(number == ENOENT ? ErrorCode::NotFound : ErrorCode::Io, doing, " '", path,
                "' failed: ", std::strerror(number), '.');
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

/// Writes beside `path` and renames, so that a reader finds the old file or the new one.
void write_whole(const std::string& path, const std::string& text) {
  std::string draft = path + ".XXXXXX";
  const Descriptor file(::mkostemp(draft.data(), O_CLOEXEC));
  if (file.number() < 0) io_error("writing", path);
  const auto give_up = [&] {
    const int number = errno;
    ::unlink(draft.c_str());
    errno = number;
    io_error("writing", path);
  };
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::write(file.number(), text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) give_up();
    done += static_cast<std::size_t>(count);
  }
  // mkostemp makes a private file; a configuration is as readable as its folder's others.
  const mode_t mask = ::umask(0);
  ::umask(mask);
  if (::fchmod(file.number(), 0666 & ~mask) != 0 || ::fsync(file.number()) != 0) give_up();
  if (::rename(draft.c_str(), path.c_str()) != 0) give_up();
}

}  // namespace

PerformanceConfig PerformanceConfig::from_json(std::string_view text, std::string_view origin) {
  check_text(text, origin);
  FlatReader reader(origin);
  // A mark of byte order, as some editors write, is no part of JSON and is skipped by the parser.
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  return from_pairs(reader.pairs, origin);
}

PerformanceConfig PerformanceConfig::from_yaml(std::string_view text, std::string_view origin) {
  check_text(text, origin);
  FlatYaml reader(origin);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    // Not YAML::Load: its tree of a broken text can grow without end, while this reader stops at the first odd event.
    while (parser.HandleNextDocument(reader)) continue;
  } catch (const YAML::Exception& error) {
    detail::raise(ErrorCode::InvalidArgument, origin, ": not YAML, see line ", error.mark.line + 1, ": ",
                  in_quotes(error.msg), '.');
  }
  return from_pairs(reader.pairs, origin);
}

PerformanceConfig PerformanceConfig::from_file(const std::string& path) {
  const std::string extension = extension_of(path);
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
  return extension == ".json" ? from_json(text, origin) : from_yaml(text, origin);
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
  const std::string extension = extension_of(path);
  write_whole(path, extension == ".json" ? to_json() : to_yaml());
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
