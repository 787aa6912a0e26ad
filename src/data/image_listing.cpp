#include "data/image_listing.h"

#define XXH_INLINE_ALL
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <system_error>

#include "base/whole_file.h"
#include "data/byte_reader.h"
#include "data/file.h"
#include "data/for_each_index.h"
#include "data/remote_file.h"
#include "oxytorch/clock.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"

namespace oxytorch::data {
namespace {

constexpr std::string_view kListingMagic("OXYLIST1", 8);
bool is_image_name(std::string_view name) {
  constexpr std::array<std::string_view, 4> kExtensions = {".jpg", ".jpeg", ".png", ".webp"};
  return std::any_of(kExtensions.begin(), kExtensions.end(), [&](std::string_view extension) {
    return name.size() > extension.size() &&
           std::equal(
               extension.begin(), extension.end(), name.end() - static_cast<std::ptrdiff_t>(extension.size()),
               [](char a, char b) { return a == (b >= 'A' && b <= 'Z' ? static_cast<char>(b - 'A' + 'a') : b); });
  });
}

/// One of several parts of a text, which lie one after the other.
std::string_view part_of(std::string_view text, std::span<const std::uint64_t> ends, std::size_t i) {
  const auto begin = i == 0 ? 0 : ends[i - 1];
  return text.substr(begin, ends[i] - begin);
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
  [[nodiscard]] std::string_view operator[](std::size_t i) const { return part_of(text_, ends_, i); }
  [[nodiscard]] std::vector<std::string_view> sorted() const {
    std::vector<std::string_view> names(size());
    for (std::size_t i = 0; i < size(); ++i) names[i] = (*this)[i];
    std::sort(names.begin(), names.end());
    return names;
  }
  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] const std::vector<std::uint64_t>& ends() const noexcept { return ends_; }

 private:
  std::string text_;
  std::vector<std::uint64_t> ends_;
};

/// Which folder stands at a path, and when its entries last changed. The time of the inode's change: unlike that of its
/// content, nobody can set it back.
struct FolderStamp {
  std::uint64_t device = 0, inode = 0;
  std::int64_t changed = 0;  // nanoseconds since 1970
  bool operator==(const FolderStamp&) const = default;
};

std::optional<FolderStamp> stamp_of(const std::string& folder) {
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) return std::nullopt;
  return FolderStamp{status.st_dev, status.st_ino, status.st_ctim.tv_sec * 1'000'000'000 + status.st_ctim.tv_nsec};
}

/// What is directly in a folder.
struct FolderListing {
  NameArena images;
  std::vector<std::string> folders;  // sorted, without "/"
};

FolderListing list_remote(const std::string& folder) {
  FolderListing listing;
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
FolderListing list_images(const std::string& folder) {
  if (is_remote(folder)) return list_remote(folder);
  FolderListing listing;
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

/// The numbers at the head of a listing: what follows it, in this order, each number of 8 bytes.
struct ListingHead {
  std::uint64_t images = 0, classes = 0, folders = 0;  // ends of paths; classes; stamps and ends of folder names
  std::uint64_t name_bytes = 0;                        // of all paths
  std::uint64_t text_bytes = 0;                        // of the classes' names, the folders' and the root, behind those
  std::array<char, 16> fingerprint{};
};

std::string_view bytes_of(const auto& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(numbers[0])};
}

std::uint64_t hash_of(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

}  // namespace

/// Lists a folder.
class ImageLister {
 public:
  explicit ImageLister(std::string root) : root_(std::move(root)) {}

  /// A listing as it is kept, by the root's absolute path.
  std::string run(const std::string& absolute) {
    const auto top = list(root_, "", stamps_);
    std::vector<ClassFolder> found(top.folders.size());
    for_each_index(found.size(), 16, [&](std::size_t i) { found[i] = find_class(top.folders[i]); });
    std::vector<std::string> empty;
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (found[i].paths.size() == 0) empty.push_back(top.folders[i]);
      paths_.append(found[i].paths);
      stamps_.insert(stamps_.end(), found[i].stamps.begin(), found[i].stamps.end());
      found[i] = {};
      classes_.add({top.folders[i]});
      class_ends_.push_back(paths_.size());
    }
    if (paths_.size() > 0) {
      // Leaving it out would give other labels than to those who count it, and so would counting it.
      OXY_CHECK(empty.empty(), InvalidArgument, join(root_, empty.front()),
                " is a class folder without a .jpg, .jpeg, .png or .webp file; remove it, or add its images.");
    } else {
      classes_ = {};
      class_ends_.clear();
      for (const auto name : top.images.sorted()) paths_.add({name});
    }
    return packed(absolute);
  }

  /// Whether no folder has changed for so long.
  [[nodiscard]] bool settled(double seconds) const {
    struct timespec now {};
    ::clock_gettime(CLOCK_REALTIME, &now);
    const auto before =
        now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec - static_cast<std::int64_t>(seconds * 1e9);
    return std::all_of(stamps_.begin(), stamps_.end(), [&](const auto& one) { return one.second.changed < before; });
  }

 private:
  using Stamped = std::vector<std::pair<std::string, FolderStamp>>;  // by the path from the root

  struct Folder {
    std::string path;  // from the root
    NameArena images;
  };
  struct ClassFolder {
    NameArena paths;
    Stamped stamps;
  };

  /// The time is asked for first: what changes while a folder is listed has a later one.
  FolderListing list(const std::string& folder, const std::string& path, Stamped& stamps) const {
    if (!is_remote(folder)) {
      const auto stamp = stamp_of(folder);
      OXY_CHECK(stamp, Io, folder, " cannot be listed: ", std::generic_category().message(errno), ".");
      stamps.emplace_back(path, *stamp);
    }
    return list_images(folder);
  }

  /// A class's images in torchvision's order: folder after folder, and by name within each.
  [[nodiscard]] ClassFolder find_class(const std::string& name) const {
    ClassFolder found;
    std::vector<Folder> folders;
    std::vector<FolderStamp> above;
    collect(name, above, folders, found.stamps);
    std::sort(folders.begin(), folders.end(), [](const Folder& a, const Folder& b) { return a.path < b.path; });
    for (const auto& folder : folders) {
      for (const auto image : folder.images.sorted()) found.paths.add({folder.path, "/", image});
    }
    return found;
  }

  /// `above`: the folders that hold this one, to notice a link that leads back.
  void collect(const std::string& path, std::vector<FolderStamp>& above, std::vector<Folder>& found,
               Stamped& stamps) const {
    const bool remote = is_remote(root_);
    const auto folder = join(root_, path) + (remote ? "/" : "");
    auto listing = list(folder, path, stamps);
    if (!remote) {
      const auto here = stamps.back().second;
      const auto is_here = [&](const FolderStamp& one) { return one.device == here.device && one.inode == here.inode; };
      OXY_CHECK(std::none_of(above.begin(), above.end(), is_here), InvalidArgument, folder,
                " is a link to a folder that holds it; remove the link.");
      above.push_back(here);
    }
    if (listing.images.size() > 0) found.push_back({path, std::move(listing.images)});
    for (const auto& name : listing.folders) collect(join(path, name), above, found, stamps);
    if (!remote) above.pop_back();
  }

  [[nodiscard]] std::string packed(const std::string& absolute) const {
    NameArena folders;
    std::vector<FolderStamp> stamps;
    for (const auto& [path, stamp] : stamps_) {
      folders.add({path});
      stamps.push_back(stamp);
    }
    ListingHead head;
    head.images = paths_.size();
    head.classes = classes_.size();
    head.folders = stamps.size();
    head.name_bytes = paths_.text().size();
    head.text_bytes = classes_.text().size() + folders.text().size() + absolute.size();
    const auto fingerprint = fingerprint_of({"image_folder", std::to_string(paths_.size()), paths_.text()});
    std::copy(fingerprint.begin(), fingerprint.end(), head.fingerprint.begin());
    std::string text;
    text.reserve(kListingMagic.size() + 8 + sizeof(head) + 8 * (head.images + 2 * head.classes + 4 * head.folders) +
                 head.name_bytes + head.text_bytes);
    text.append(kListingMagic).append(8, '\0');
    text.append(reinterpret_cast<const char*>(&head), sizeof(head));
    text.append(bytes_of(paths_.ends())).append(bytes_of(class_ends_)).append(bytes_of(classes_.ends()));
    text.append(bytes_of(stamps)).append(bytes_of(folders.ends()));
    text.append(paths_.text()).append(classes_.text()).append(folders.text()).append(absolute);
    const auto hash = hash_of(std::string_view(text).substr(16));
    std::memcpy(text.data() + 8, &hash, sizeof(hash));
    return text;
  }

  std::string root_;
  NameArena paths_, classes_;
  std::vector<std::uint64_t> class_ends_;  // of each class, in paths_
  Stamped stamps_;
};

ImageListing ImageListing::of(const std::string& root, const Keeping& keeping) {
  std::error_code error;
  std::string absolute = root;
  if (!is_remote(root)) {
    absolute = std::filesystem::absolute(root, error).lexically_normal().string();
    while (absolute.size() > 1 && absolute.ends_with('/')) absolute.pop_back();
  }
  const bool keeps = !keeping.folder.empty() && !is_remote(root) && !error;
  const auto file = join(keeping.folder, fingerprint_of({absolute}) + ".list");
  if (keeps) {
    if (auto found = kept_in(file, absolute)) return *std::move(found);
  }
  const auto began = monotonic_seconds();
  ImageLister lister(root);
  auto packed = std::make_shared<const std::string>(lister.run(absolute));
  ImageListing listing;
  const bool whole = listing.unpack({std::as_bytes(std::span(*packed)), packed}, absolute, Stamps::AsTheyWere);
  OXY_ASSERT(whole, "a listing that was packed cannot be unpacked.");
  if (!keeps || monotonic_seconds() - began < keeping.from_seconds || !lister.settled(keeping.settled_seconds))
    return listing;
  try {
    std::filesystem::create_directories(keeping.folder, error);
    write_whole_file(file, {*packed}, Flush::No);
  } catch (const Error& failure) {  // it is listed anew next time
    log(LogLevel::Warn, "the listing of " + root + " is not kept: " + failure.what(), "data");
  }
  return listing;
}

std::optional<ImageListing> ImageListing::kept_in(const std::string& file, const std::string& root) {
  if (!exists(file)) return std::nullopt;
  ImageListing listing;
  try {
    const auto opened = open_file(file);
    const auto whole = opened->view(0, opened->size());
    if (listing.unpack(whole, root, Stamps::AsTheyAre)) return listing;
  } catch (const Error&) {  // another process has removed it
  }
  return std::nullopt;
}

bool ImageListing::unpack(const View& packed, const std::string& root, Stamps expected) {
  const auto text = packed.text();
  ListingHead head;
  constexpr std::size_t kBegin = 16 + sizeof(head);
  if (text.size() < kBegin || !text.starts_with(kListingMagic)) return false;
  if (load_number<std::uint64_t>(packed.bytes.data() + 8) != hash_of(text.substr(16))) return false;
  std::memcpy(&head, text.data() + 16, sizeof(head));
  const auto most = text.size();  // no sum of numbers up to it overflows
  for (const auto count : {head.images, head.classes, head.folders, head.name_bytes, head.text_bytes}) {
    if (count > most) return false;
  }
  const auto numbers = head.images + 2 * head.classes + 4 * head.folders;
  if (kBegin + 8 * numbers + head.name_bytes + head.text_bytes != text.size()) return false;
  const auto* at = reinterpret_cast<const std::uint64_t*>(text.data() + kBegin);
  const auto take = [&](std::uint64_t count) {
    const std::span<const std::uint64_t> taken(at, count);
    at += count;
    return taken;
  };
  ends_ = take(head.images);
  class_ends_ = take(head.classes);
  const auto class_names = take(head.classes), stamps = take(3 * head.folders), folder_names = take(head.folders);
  names_ = text.substr(kBegin + 8 * numbers, head.name_bytes);
  auto rest = text.substr(kBegin + 8 * numbers + head.name_bytes);
  const auto ordered = [](std::span<const std::uint64_t> ends, std::uint64_t last) {
    return std::is_sorted(ends.begin(), ends.end()) && (ends.empty() || ends.back() <= last);
  };
  const auto last_of = [](std::span<const std::uint64_t> ends) { return ends.empty() ? 0 : ends.back(); };
  const bool fits = ordered(ends_, names_.size()) && ordered(class_ends_, ends_.size()) &&
                    (class_ends_.empty() || class_ends_.back() == ends_.size()) && ordered(class_names, rest.size()) &&
                    ordered(folder_names, rest.size() - last_of(class_names));
  if (!fits || rest.substr(last_of(class_names) + last_of(folder_names)) != root) return false;
  for (std::size_t i = 0; i < class_names.size(); ++i) classes_.emplace_back(part_of(rest, class_names, i));
  rest.remove_prefix(last_of(class_names));
  for (std::size_t i = 0; expected == Stamps::AsTheyAre && i < folder_names.size(); ++i) {
    const FolderStamp then{stamps[3 * i], stamps[3 * i + 1], static_cast<std::int64_t>(stamps[3 * i + 2])};
    const std::string name(part_of(rest, folder_names, i));
    if (stamp_of(name.empty() ? root : join(root, name)) != then) return false;
  }
  fingerprint_.assign(head.fingerprint.begin(), head.fingerprint.end());
  packed_ = packed;
  return true;
}

std::string_view ImageListing::path(std::size_t image) const noexcept { return part_of(names_, ends_, image); }

std::size_t ImageListing::class_of(std::size_t image) const noexcept {
  return static_cast<std::size_t>(std::upper_bound(class_ends_.begin(), class_ends_.end(), image) -
                                  class_ends_.begin());
}

}  // namespace oxytorch::data
