#include <simdjson.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "data/byte_reader.h"
#include "data/formats.h"
#include "data/record_files.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

using simdjson::dom::element_type;

constexpr std::uint64_t kJsonlChunk = 1 << 20;
constexpr std::int64_t kJsonlSchemaLines = 100;

/// What a key holds. Json is anything, kept as its text.
enum class JsonlType : std::uint8_t { Boolean, Integer, Number, String, Integers, Numbers, Json };

const char* jsonl_word(JsonlType type) {
  switch (type) {
    case JsonlType::Boolean: return "a boolean";
    case JsonlType::Integer: return "an integer";
    case JsonlType::Number: return "a number";
    case JsonlType::String: return "a string";
    case JsonlType::Integers: return "an array of integers";
    case JsonlType::Numbers: return "an array of numbers";
    case JsonlType::Json: return "another value";
  }
  return "unknown";
}

/// The narrowest type that holds both.
JsonlType jsonl_common(JsonlType a, JsonlType b) {
  if (a == b) return a;
  const auto are = [&](JsonlType x, JsonlType y) { return (a == x && b == y) || (a == y && b == x); };
  if (are(JsonlType::Integer, JsonlType::Number)) return JsonlType::Number;
  if (are(JsonlType::Integers, JsonlType::Numbers)) return JsonlType::Numbers;
  return JsonlType::Json;
}

JsonlType jsonl_type(const simdjson::dom::element& value) {
  switch (value.type()) {
    case element_type::BOOL: return JsonlType::Boolean;
    case element_type::INT64: return JsonlType::Integer;
    case element_type::DOUBLE: return JsonlType::Number;
    case element_type::STRING: return JsonlType::String;
    case element_type::ARRAY: {
      const simdjson::dom::array array = value.get_array().value_unsafe();
      auto common = JsonlType::Integers;
      for (const auto item : array) {
        if (item.type() == element_type::DOUBLE) {
          common = JsonlType::Numbers;
        } else if (item.type() != element_type::INT64) {
          return JsonlType::Json;
        }
      }
      return common;
    }
    default: return JsonlType::Json;
  }
}

template <class T>
Value jsonl_scalar(DType dtype, T value) {
  return own(dtype, {}, std::as_bytes(std::span(&value, 1)));
}

template <class T>
Value jsonl_numbers(DType dtype, const simdjson::dom::array& array) {
  std::vector<T> numbers;
  for (const auto item : array) numbers.push_back(item.get<T>().value_unsafe());  // doubles are read from integers too
  return own(dtype, {static_cast<std::int64_t>(numbers.size())}, std::as_bytes(std::span(numbers)));
}

Value jsonl_value(const simdjson::dom::element& value, JsonlType type) {
  switch (type) {
    case JsonlType::Boolean:
      return jsonl_scalar(DType::Bool, static_cast<std::uint8_t>(value.get_bool().value_unsafe()));
    case JsonlType::Integer: return jsonl_scalar(DType::I64, value.get_int64().value_unsafe());
    case JsonlType::Number: return jsonl_scalar(DType::F64, value.get_double().value_unsafe());
    case JsonlType::String: return own(value.get_string().value_unsafe());
    case JsonlType::Integers: return jsonl_numbers<std::int64_t>(DType::I64, value.get_array().value_unsafe());
    case JsonlType::Numbers: return jsonl_numbers<double>(DType::F64, value.get_array().value_unsafe());
    case JsonlType::Json: break;
  }
  return own(simdjson::minify(value));
}

Field jsonl_field(std::string name, JsonlType type) {
  switch (type) {
    case JsonlType::Boolean: return {std::move(name), Kind::Array, DType::Bool, {}};
    case JsonlType::Integer: return {std::move(name), Kind::Array, DType::I64, {}};
    case JsonlType::Number: return {std::move(name), Kind::Array, DType::F64, {}};
    case JsonlType::Integers: return {std::move(name), Kind::Array, DType::I64, {-1}};
    case JsonlType::Numbers: return {std::move(name), Kind::Array, DType::F64, {-1}};
    case JsonlType::String:
    case JsonlType::Json: break;
  }
  return {std::move(name), Kind::Text, DType::U8, {}};
}

bool is_jsonl_name(std::string_view name) { return name.ends_with(".jsonl") || name.ends_with(".ndjson"); }

/// Parses a line that lies in `bytes` behind blank ones. What is returned lives until the thread parses the next.
simdjson::simdjson_result<simdjson::dom::object> parse_jsonl(std::string_view line) {
  static thread_local simdjson::dom::parser parser;
  return parser.parse(line.data(), line.size(), true).get_object();
}

/// Where the lines of a file begin that are not blank.
struct JsonlLines {
  std::vector<std::int64_t> starts;
  /// How many blank lines there are before a line: {index of the line, blank lines}, where the number changes.
  std::vector<std::pair<std::int64_t, std::int64_t>> blanks;
};

JsonlLines index_jsonl(const File& file) {
  JsonlLines lines;
  std::int64_t blank = 0, noted = 0;
  bool seeking = true;  // the first character of a line
  for (std::uint64_t base = 0; base < file.size(); base += kJsonlChunk) {
    const auto chunk = file.view(base, std::min(kJsonlChunk, file.size() - base));
    const auto text = chunk.text();
    std::size_t at = base == 0 && text.starts_with("\xEF\xBB\xBF") ? 3 : 0;  // a byte order mark
    while (at < text.size()) {
      if (!seeking) {
        at = text.find('\n', at);
        if (at == std::string_view::npos) break;
        seeking = true;
      } else if (text[at] == '\n') {
        ++blank;
      } else if (text[at] != ' ' && text[at] != '\t' && text[at] != '\r') {
        if (blank != noted) lines.blanks.emplace_back(static_cast<std::int64_t>(lines.starts.size()), noted = blank);
        lines.starts.push_back(static_cast<std::int64_t>(base + at));
        seeking = false;
      }
      ++at;
    }
  }
  return lines;
}

class JsonlDataset final : public Dataset {
 public:
  void add(std::shared_ptr<const File> file) {
    lines_.push_back(index_jsonl(*file));
    const auto lines = static_cast<std::int64_t>(lines_.back().starts.size());
    files_.add(std::move(file), lines);
  }

  /// Takes the schema from the first lines.
  void find_schema() {
    std::vector<std::int64_t> seen;
    const auto lines = std::min(size(), kJsonlSchemaLines);
    for (std::int64_t i = 0; i < lines; ++i) {
      const auto view = line(i);
      for (const auto& [key, value] : parse(view, i)) {
        if (value.is_null()) {
          note(key, JsonlType::Json, seen);
          continue;
        }
        const auto type = jsonl_type(value);
        const auto field = note(key, type, seen);
        types_[field] = seen[field]++ == 0 ? type : jsonl_common(types_[field], type);
      }
    }
    for (std::size_t i = 0; i < types_.size(); ++i) {
      optional_.push_back(seen[i] < lines);
      if (optional_[i] && types_[i] != JsonlType::String) types_[i] = JsonlType::Json;
    }
    for (const auto& [name, field] : indices_) schema_.fields[field] = jsonl_field(name, types_[field]);
  }

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return files_.size(); }

  [[nodiscard]] Sample read(std::int64_t index) const override {
    const auto view = line(index);
    Sample sample(schema_.fields.size());
    std::vector<bool> found(sample.size());
    std::size_t next = 0;  // lines mostly have their keys in the same order
    for (const auto& [key, value] : parse(view, index)) {
      if (next >= sample.size() || schema_.fields[next].name != key) {
        const auto known = indices_.find(key);
        if (known == indices_.end()) continue;
        next = known->second;
      }
      sample[next] = convert(value, next, index);
      found[next++] = true;
    }
    for (std::size_t i = 0; i < sample.size(); ++i) {
      if (found[i]) continue;
      OXY_CHECK(optional_[i], Io, place(index), ": the key '", schema_.fields[i].name,
                "' is missing, which each of the first lines has.");
      sample[i] = own("");
    }
    return sample;
  }

  [[nodiscard]] std::string place(std::int64_t index) const override {
    const auto at = files_.find(index);
    const auto& blanks = lines_[at.file].blanks;
    const auto after = std::upper_bound(blanks.begin(), blanks.end(), at.index,
                                        [](std::int64_t line, const auto& entry) { return line < entry.first; });
    const auto blank = after == blanks.begin() ? 0 : std::prev(after)->second;
    return files_.file(at.file).location() + ", line " + std::to_string(at.index + blank + 1);
  }
  [[nodiscard]] std::string fingerprint() const override { return files_.fingerprint(); }
  void will_read(std::int64_t index) const override {
    const auto at = files_.find(index);
    const auto [begin, end] = range(at);
    files_.file(at.file).will_view(begin, end - begin);
  }
  [[nodiscard]] bool remote() const noexcept override { return files_.remote(); }
  [[nodiscard]] std::string format() const override { return "jsonl"; }

 private:
  /// The bytes of a line, and of blank lines behind it.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> range(const RecordFiles::Place& at) const {
    const auto& starts = lines_[at.file].starts;
    const auto i = static_cast<std::size_t>(at.index);
    return {starts[i], i + 1 < starts.size() ? static_cast<std::uint64_t>(starts[i + 1]) : files_.file(at.file).size()};
  }
  [[nodiscard]] View line(std::int64_t index) const {
    const auto at = files_.find(index);
    const auto [begin, end] = range(at);
    return files_.file(at.file).view(begin, end - begin);
  }
  [[nodiscard]] simdjson::dom::object parse(const View& line, std::int64_t index) const {
    simdjson::dom::object object;
    const auto error = parse_jsonl(line.text()).get(object);
    if (error != simdjson::SUCCESS) {
      const auto start = line.text().substr(0, std::min<std::size_t>(line.text().find('\n'), 40));
      OXY_CHECK(false, Io, place(index), " is no JSON object: ", simdjson::error_message(error),
                " It begins with: ", start);
    }
    return object;
  }
  /// The index of a key's field, which is added where it is new.
  std::size_t note(std::string_view key, JsonlType type, std::vector<std::int64_t>& seen) {
    const auto known = indices_.find(key);
    if (known != indices_.end()) return known->second;
    indices_.emplace(key, types_.size());
    types_.push_back(type);
    seen.push_back(0);
    schema_.fields.emplace_back();
    return types_.size() - 1;
  }
  [[nodiscard]] Value convert(const simdjson::dom::element& value, std::size_t field, std::int64_t index) const {
    if (value.is_null() && optional_[field]) return own("");
    const auto type = jsonl_type(value);
    OXY_CHECK(jsonl_common(type, types_[field]) == types_[field], Io, place(index), ": '", schema_.fields[field].name,
              "' is ", jsonl_word(type), " (", simdjson::minify(value).substr(0, 40), "), and ",
              jsonl_word(types_[field]), " in the first lines.");
    return jsonl_value(value, types_[field]);
  }

  RecordFiles files_;
  std::vector<JsonlLines> lines_;  // of each file
  Schema schema_;
  std::vector<JsonlType> types_;  // of each field
  std::vector<bool> optional_;    // whether one of the first lines had no such key, or null
  std::map<std::string, std::size_t, std::less<>> indices_;
};

/// Whether a file of another name begins with a line that is a JSON object.
bool begins_with_json_line(const File& file) {
  const auto head = file.view(0, std::min(kJsonlChunk, file.size()));
  const auto text = head.text();
  const auto start = text.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos || text[start] != '{') return false;
  const auto end = text.find('\n', start);
  if (end == std::string_view::npos && head.bytes.size() < file.size()) return false;
  return parse_jsonl(text.substr(start, end - start)).error() == simdjson::SUCCESS;
}

}  // namespace

// Keys of the first 100 lines are the fields: booleans, integers and numbers as scalars, arrays of numbers as arrays,
// strings as Text, anything else as Text of its JSON. A key that one of these lines lacks, or has as null, is Text too,
// which is empty where it is missing. Keys that appear later are ignored.
std::shared_ptr<const Dataset> open_jsonl(const std::string& location) {
  auto dataset = std::make_shared<JsonlDataset>();
  bool any = false;
  for (const auto& name : record_locations(location, is_jsonl_name)) {
    auto file = open_file(name);
    if (!any && !is_jsonl_name(name) && !begins_with_json_line(*file)) return nullptr;
    dataset->add(std::move(file));
    any = true;
  }
  if (!any) return nullptr;
  dataset->find_schema();
  return dataset;
}

}  // namespace oxytorch::data
