#include "data/record_files.h"

#include <algorithm>

#include "oxytorch/error.h"

namespace oxytorch::data {

std::vector<std::string> record_locations(const std::string& location, bool (*belongs)(std::string_view name)) {
  if (!is_folder(location)) return expand_braces(location);
  std::vector<std::string> found;
  for (const auto& name : list_folder(location)) {
    if (name.ends_with('/') || name == "index.json") return {};
    if (belongs(name)) found.push_back(join(location, name));
  }
  return found;
}

void RecordFiles::add(std::shared_ptr<const File> file, std::int64_t samples) {
  std::int64_t end = 0;
  OXY_CHECK(!__builtin_add_overflow(size(), samples, &end), Io, file->location(), " is damaged: it says that it has ",
            samples, " samples.");
  files_.push_back(std::move(file));
  ends_.push_back(end);
}

RecordFiles::Place RecordFiles::find(std::int64_t index) const {
  OXY_CHECK(index >= 0 && index < size(), OutOfRange, "sample ", index, " is outside of the dataset, which has ",
            size(), " samples.");
  const auto found = std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin();
  const auto file = static_cast<std::size_t>(found);
  return {file, file == 0 ? index : index - ends_[file - 1]};
}

std::string RecordFiles::fingerprint() const {
  std::vector<std::string> parts;
  for (const auto& file : files_) {
    parts.push_back(file->location());
    parts.push_back(file->version());
  }
  return fingerprint_of(parts);
}

bool RecordFiles::remote() const noexcept {
  return std::any_of(files_.begin(), files_.end(), [](const auto& file) { return file->remote(); });
}

}  // namespace oxytorch::data
