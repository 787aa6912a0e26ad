/// Files as readers see them: local ones are mapped, those behind a URL are fetched by range.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/data/value.h"

namespace oxytorch::data {

/// An open file. Its methods may be called by several threads at once.
class OXY_API File {
 public:
  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  virtual ~File();

  [[nodiscard]] virtual const std::string& location() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t size() const noexcept = 0;
  /// What changes where the content may have changed: size and time, or an ETag.
  [[nodiscard]] virtual std::string version() const = 0;
  /// Bytes [offset, offset + length). A local file's are mapped, not copied.
  /// Errors: `Io` where they end behind the file's end ("train.tar is truncated: it ends at ...") or cannot be
  /// read.
  [[nodiscard]] virtual View view(std::uint64_t offset, std::uint64_t length) const = 0;
  /// Starts reading ahead.
  virtual void will_view(std::uint64_t offset, std::uint64_t length) const;
  [[nodiscard]] virtual bool remote() const noexcept { return false; }
};

/// A location without "file://".
std::string local_path(const std::string& location);

/// Opens a path, a file:, http:, https: or s3: URL.
/// Errors: `NotFound` or `Io`, with the location.
OXY_API std::shared_ptr<const File> open_file(const std::string& location);

/// The whole content of a file, copied: for small files that are opened for one read, which mapping would make slower.
/// Errors: as open_file and File::view.
View read_whole_file(const std::string& location);

/// The same, or nothing where there is no such file.
std::optional<std::string> read_if_there(const std::string& location);
/// Writes a file, whole or not at all: a local one, or one behind a URL, whose server must take PUT requests.
/// Errors: `Io` or `NotFound`, with the location.
void write_location(const std::string& location, std::string_view content);

/// Whether a location is a folder: a local one, or a URL that ends with "/".
OXY_API bool is_folder(const std::string& location);
OXY_API bool exists(const std::string& location);
/// Names of all that is directly in a local folder, or of what a listing of an s3: folder gives, sorted; folders end
/// with "/".
OXY_API std::vector<std::string> list_folder(const std::string& location);
/// `folder` and `name` with one "/" between them.
OXY_API std::string join(const std::string& folder, const std::string& name);
/// What is behind the last "/".
std::string base_name(const std::string& location);
/// "shard-{000..003}.tar" as four names; a location without braces as itself.
/// Errors: `InvalidArgument` for braces that do not close or are no range.
OXY_API std::vector<std::string> expand_braces(const std::string& location);

/// 16 hexadecimal digits of XXH3 over text.
OXY_API std::string fingerprint_of(const std::vector<std::string>& parts);

}  // namespace oxytorch::data
