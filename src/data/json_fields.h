/// Values of JSON objects, with errors that name the file and the key.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/data/value.h"

namespace simdjson::dom {
class element;
class parser;
}  // namespace simdjson::dom

namespace oxytorch::data {

/// Parses a text; the element lives until the parser's next call.
/// Errors: `Io` where it is no JSON.
simdjson::dom::element parse_json(simdjson::dom::parser& parser, std::string_view text, const std::string& location);

/// The value of a key; empty where there is none or it is null, or where `object` is no object.
std::optional<simdjson::dom::element> json_field(const simdjson::dom::element& object, std::string_view key);

/// Errors: `Io` where the key is missing or of another type.
std::string json_text(const simdjson::dom::element& object, std::string_view key, const std::string& location);
std::uint64_t json_count(const simdjson::dom::element& object, std::string_view key, const std::string& location);
std::vector<std::string> json_texts(const simdjson::dom::element& object, std::string_view key,
                                    const std::string& location);

}  // namespace oxytorch::data
