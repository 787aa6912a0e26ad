#include "data/json_fields.h"

#include <simdjson.h>

#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

/// A value of a type that simdjson reads.
template <class T>
T json_value(const simdjson::dom::element& object, std::string_view key, const std::string& location,
             const char* type) {
  T value{};
  const auto found = json_field(object, key);
  OXY_CHECK(found && found->get(value) == simdjson::SUCCESS, Io, location, " is damaged: '", key, "' must be ", type,
            ".");
  return value;
}

}  // namespace

simdjson::dom::element parse_json(simdjson::dom::parser& parser, std::string_view text, const std::string& location) {
  OXY_CHECK(!text.empty(), Io, location, " is empty, and should be JSON.");
  simdjson::dom::element root;
  const auto error = parser.parse(text.data(), text.size()).get(root);
  OXY_CHECK(error == simdjson::SUCCESS, Io, location, " is no JSON: ", simdjson::error_message(error));
  return root;
}

std::optional<simdjson::dom::element> json_field(const simdjson::dom::element& object, std::string_view key) {
  simdjson::dom::object fields;
  simdjson::dom::element found;
  if (object.get(fields) != simdjson::SUCCESS || fields.at_key(key).get(found) != simdjson::SUCCESS ||
      found.is_null()) {
    return std::nullopt;
  }
  return found;
}

std::string json_text(const simdjson::dom::element& object, std::string_view key, const std::string& location) {
  return std::string(json_value<std::string_view>(object, key, location, "a string"));
}

std::uint64_t json_count(const simdjson::dom::element& object, std::string_view key, const std::string& location) {
  return json_value<std::uint64_t>(object, key, location, "a number that is not negative");
}

std::vector<std::string> json_texts(const simdjson::dom::element& object, std::string_view key,
                                    const std::string& location) {
  std::vector<std::string> texts;
  for (const auto item : json_value<simdjson::dom::array>(object, key, location, "a list of strings")) {
    std::string_view text;
    OXY_CHECK(item.get(text) == simdjson::SUCCESS, Io, location, " is damaged: '", key, "' must be a list of strings.");
    texts.emplace_back(text);
  }
  return texts;
}

}  // namespace oxytorch::data
