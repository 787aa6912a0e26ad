/// Files behind http:, https: and s3: URLs, by libcurl: range requests, uploads, retries, AWS signatures.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/file.h"

namespace oxytorch::data {

[[nodiscard]] OXY_API bool is_remote(const std::string& location) noexcept;
std::shared_ptr<const File> open_remote_file(const std::string& location);
bool remote_exists(const std::string& location);
std::vector<std::string> list_remote_folder(const std::string& location);
/// The whole of a small object, or empty where there is none.
std::optional<std::string> fetch_whole(const std::string& location);
/// Writes an object by a PUT request: whole, or not at all.
void put_whole(const std::string& location, std::string_view content);
void remove_remote(const std::string& location);

}  // namespace oxytorch::data
