#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <initializer_list>
#include <system_error>

#include "data/file.h"
#include "data/for_each_index.h"
#include "data/formats.h"
#include "data/remote_file.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

bool is_image_name(std::string_view name) {
  constexpr std::array<std::string_view, 4> kExtensions = {".jpg", ".jpeg", ".png", ".webp"};
  return std::any_of(kExtensions.begin(), kExtensions.end(), [&](std::string_view extension) {
    return name.size() > extension.size() &&
           std::equal(
               extension.begin(), extension.end(), name.end() - static_cast<std::ptrdiff_t>(extension.size()),
               [](char a, char b) { return a == (b >= 'A' && b <= 'Z' ? static_cast<char>(b - 'A' + 'a') : b); });
  });
}

/// Names one after the other in one string: a million of them take no allocation each.
class NameArena {
 public:
  /// The parts of a name, one after the other.
  void add(std::initializer_list<std::string_view> parts) {
    for (const auto part : parts) text_.append(part);
    ends_.push_back(text_.size());
  }
  void append(const NameArena& other) {
    for (const auto end : other.ends_) ends_.push_back(text_.size() + end);
    text_ += other.text_;
  }
  [[nodiscard]] std::size_t size() const noexcept { return ends_.size(); }
  [[nodiscard]] std::string_view operator[](std::size_t i) const {
    const auto begin = i == 0 ? 0 : ends_[i - 1];
    return std::string_view(text_).substr(begin, ends_[i] - begin);
  }
  [[nodiscard]] std::vector<std::string_view> sorted() const {
    std::vector<std::string_view> names(size());
    for (std::size_t i = 0; i < size(); ++i) names[i] = (*this)[i];
    std::sort(names.begin(), names.end());
    return names;
  }
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
  std::vector<std::uint64_t> ends_;
};

/// What is directly in a folder.
struct ImageListing {
  NameArena images;
  std::vector<std::string> folders;  // sorted, without "/"
};

ImageListing list_remote_images(const std::string& folder) {
  ImageListing listing;
  for (const auto& name : list_folder(folder)) {
    if (name.ends_with('/')) {
      listing.folders.push_back(name.substr(0, name.size() - 1));
    } else if (is_image_name(name)) {
      listing.images.add({name});
    }
  }
  return listing;
}

/// One pass over the names; only links, and file systems that do not say what an entry is, cost a call each.
ImageListing list_images(const std::string& folder) {
  if (is_remote(folder)) return list_remote_images(folder);
  ImageListing listing;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(folder.c_str()), ::closedir);
  OXY_CHECK(directory, Io, folder, " cannot be listed: ", std::generic_category().message(errno), ".");
  errno = 0;
  while (const auto* entry = ::readdir(directory.get())) {
    const std::string_view name = entry->d_name;
    auto type = entry->d_type;
    if (name == "." || name == "..") continue;
    if (type == DT_LNK || type == DT_UNKNOWN) {
      struct stat status {};
      if (::fstatat(::dirfd(directory.get()), entry->d_name, &status, 0) != 0) continue;  // a link to nowhere
      type = S_ISDIR(status.st_mode) ? DT_DIR : S_ISREG(status.st_mode) ? DT_REG : DT_UNKNOWN;
    }
    if (type == DT_DIR) {
      listing.folders.emplace_back(name);
    } else if (type == DT_REG && is_image_name(name)) {
      listing.images.add({name});
    }
    errno = 0;
  }
  OXY_CHECK(errno == 0, Io, folder, " cannot be listed: ", std::generic_category().message(errno), ".");
  std::sort(listing.folders.begin(), listing.folders.end());
  return listing;
}

class ImageFolder final : public Dataset {
 public:
  explicit ImageFolder(std::string root) : root_(std::move(root)) {
    schema_.fields.push_back({"image", Kind::Image, DType::U8, {-1}});
  }

  /// False where there is no image.
  bool scan() {
    const auto top = list_images(root_);
    std::vector<NameArena> found(top.folders.size());
    for_each_index(found.size(), 16, [&](std::size_t i) { found[i] = find_class(top.folders[i]); });
    std::vector<std::string> empty;
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (found[i].size() == 0) empty.push_back(top.folders[i]);
      paths_.append(found[i]);
      found[i] = {};
      classes_.push_back(top.folders[i]);
      class_ends_.push_back(paths_.size());
    }
    if (paths_.size() > 0) {
      // Leaving it out would give other labels than to those who count it, and so would counting it.
      OXY_CHECK(empty.empty(), InvalidArgument, join(root_, empty.front()),
                " is a class folder without a .jpg, .jpeg, .png or .webp file; remove it, or add its images.");
      schema_.fields.push_back({"label", Kind::Array, DType::I64, {}});
      return true;
    }
    classes_.clear();
    for (const auto name : top.images.sorted()) paths_.add({name});
    return paths_.size() > 0;
  }

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return static_cast<std::int64_t>(paths_.size()); }
  [[nodiscard]] std::vector<std::string> classes() const override { return classes_; }
  [[nodiscard]] bool remote() const noexcept override { return is_remote(root_); }
  [[nodiscard]] std::string format() const override { return "image_folder"; }

  [[nodiscard]] std::string place(std::int64_t index) const override {
    OXY_CHECK(index >= 0 && index < size(), OutOfRange, "sample ", index, " does not exist: ", root_, " has ", size(),
              ".");
    return join(root_, std::string(paths_[static_cast<std::size_t>(index)]));
  }

  /// From names and their number: asking for the sizes and times of a million files takes too long. An image that was
  /// replaced under its name goes unnoticed.
  [[nodiscard]] std::string fingerprint() const override {
    return fingerprint_of({"image_folder", std::to_string(paths_.size()), paths_.text()});
  }

  [[nodiscard]] Sample read(std::int64_t index) const override {
    auto image = read_whole_file(place(index));
    const auto size = static_cast<std::int64_t>(image.bytes.size());
    Sample sample{{DType::U8, {size}, std::move(image)}};
    if (!classes_.empty()) {
      const auto end = std::upper_bound(class_ends_.begin(), class_ends_.end(), static_cast<std::size_t>(index));
      const auto label = static_cast<std::int64_t>(end - class_ends_.begin());
      sample.push_back(own(DType::I64, {}, std::as_bytes(std::span(&label, 1))));
    }
    return sample;
  }

 private:
  struct Folder {
    std::string path;  // from the root
    NameArena images;
  };

  /// A class's images in torchvision's order: folder after folder, and by name within each.
  [[nodiscard]] NameArena find_class(const std::string& name) const {
    std::vector<Folder> found;
    std::vector<std::pair<dev_t, ino_t>> above;
    collect(name, above, found);
    std::sort(found.begin(), found.end(), [](const Folder& a, const Folder& b) { return a.path < b.path; });
    NameArena paths;
    for (const auto& folder : found) {
      for (const auto image : folder.images.sorted()) paths.add({folder.path, "/", image});
    }
    return paths;
  }

  /// `above`: the folders that hold this one, to notice a link that leads back.
  void collect(const std::string& path, std::vector<std::pair<dev_t, ino_t>>& above, std::vector<Folder>& found) const {
    const auto folder = join(root_, path) + (remote() ? "/" : "");
    if (!remote()) {
      struct stat status {};
      OXY_CHECK(::stat(folder.c_str(), &status) == 0, Io, folder,
                " cannot be listed: ", std::generic_category().message(errno), ".");
      const std::pair here(status.st_dev, status.st_ino);
      OXY_CHECK(std::find(above.begin(), above.end(), here) == above.end(), InvalidArgument, folder,
                " is a link to a folder that holds it; remove the link.");
      above.push_back(here);
    }
    auto listing = list_images(folder);
    if (listing.images.size() > 0) found.push_back({path, std::move(listing.images)});
    for (const auto& name : listing.folders) collect(join(path, name), above, found);
    if (!remote()) above.pop_back();
  }

  std::string root_;
  NameArena paths_;  // from the root
  std::vector<std::string> classes_;
  std::vector<std::size_t> class_ends_;  // of each class, in paths_
  Schema schema_;
};

}  // namespace

std::shared_ptr<const Dataset> open_image_folder(const std::string& location) {
  if (!is_folder(location)) return nullptr;
  auto folder = std::make_shared<ImageFolder>(local_path(location));
  return folder->scan() ? folder : nullptr;
}

}  // namespace oxytorch::data
