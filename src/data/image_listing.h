/// The images of a folder, in order: listed once, and kept where that takes long.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/data/value.h"

namespace oxytorch::data {

/// A folder of class folders of images, or of images alone. A local listing is kept in the cache folder with the time
/// of the last change of each folder that it is of, so that the next process asks for those times alone: a million
/// names are there in milliseconds.
class OXY_API ImageListing {
 public:
  struct Keeping {
    std::string folder;         ///< of the listings; "" keeps none
    double from_seconds = 0.1;  ///< what listing must take to be kept
    /// What must have passed since the last change of a folder: two changes within a step of the file system's clock
    /// have one time.
    double settled_seconds = 2;
  };

  /// Errors: `Io` for a folder that cannot be listed, `InvalidArgument` for a class without images and for a link that
  /// leads to a folder above it.
  static ImageListing of(const std::string& root, const Keeping& keeping);

  [[nodiscard]] std::size_t size() const noexcept { return ends_.size(); }
  /// From the root.
  [[nodiscard]] std::string_view path(std::size_t image) const noexcept;
  /// In order; none where the images are in the root.
  [[nodiscard]] const std::vector<std::string>& classes() const noexcept { return classes_; }
  [[nodiscard]] std::size_t class_of(std::size_t image) const noexcept;
  /// Over all names and their number.
  [[nodiscard]] const std::string& fingerprint() const noexcept { return fingerprint_; }

 private:
  friend class ImageLister;

  /// Whether the folders must be as they were when they were listed.
  enum class Stamps : std::uint8_t { AsTheyWere, AsTheyAre };

  /// What is kept; nothing where it is damaged, of another root, or a folder has changed.
  static std::optional<ImageListing> kept_in(const std::string& file, const std::string& root);
  bool unpack(const View& packed, const std::string& root, Stamps expected);

  View packed_;
  std::span<const std::uint64_t> ends_;        // of each path in names_
  std::span<const std::uint64_t> class_ends_;  // of each class's images
  std::string_view names_;
  std::vector<std::string> classes_;
  std::string fingerprint_;
};

}  // namespace oxytorch::data
