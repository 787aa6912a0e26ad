/// What autograd keeps of a forward for its backward, in less memory.
///
/// ```cpp
/// oxytorch::memory::PackSavedTensors packed(oxytorch::memory::SavedFormat::BFloat16);
/// at::Tensor loss;
/// {
///   const oxytorch::memory::PackSavedTensors::Scope scope(packed);
///   loss = loss_of(model, batch);
/// }
/// loss.backward();
/// std::cout << packed.report().text() << '\n';
/// ```
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "oxytorch/api.h"
#include "oxytorch/memory/saved_format.h"

namespace oxytorch::memory {

/// Saved tensors of fewer bytes are not worth the time, unless said otherwise.
inline constexpr std::size_t kPackedBytes = std::size_t{16} << 10;

/// What was packed since the object was made. Each memory counts once, however many nodes save it.
struct OXY_API PackedReport {
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;         ///< as torch keeps them
  std::int64_t packed_bytes = 0;  ///< in memory
  std::int64_t file_bytes = 0;
  /// Root of the sum of squared errors over that of squared values, of all that was rounded.
  double relative_error = 0;

  [[nodiscard]] std::string text() const;
};

/// Packs what operators save while a Scope is there, and unpacks it as backward comes to it.
///
/// Left as they are: tensors on other devices, under `least` bytes and in torch.func; parameters, their copies by
/// autocast and their transposes; floating point that no operator of the graph made, as inputs, since somebody else
/// holds it; with BFloat16 and Int8 what is not finite. Where the memory is still there when backward comes, as it is
/// of what the program holds, backward takes that.
///
/// Gradients of Lossless and File keep every bit. Those of the others are of the rounded values: the results of forward
/// keep every bit. A tensor that is changed in place after it was saved has, where it was packed, its value of then;
/// where not, backward throws Error(InvalidState), as torch does.
///
/// The file has no name and ends with the object. It is written when forward saves and read when backward asks, and its
/// space is given back whenever nothing of it is left. Error(Io), out of forward, where it cannot be written.
///
/// Threads. Scopes are of the thread that runs forward; backward may run on others. Memory lives until the graphs end,
/// with or without the object.
class OXY_API PackSavedTensors {
 public:
  /// `folder`: of the file; the first of parking_folders() that can hold one where empty. Error(Io) where none can be
  /// made there.
  explicit PackSavedTensors(SavedFormat format, const std::string& folder = "", std::size_t least = kPackedBytes);
  ~PackSavedTensors();
  PackSavedTensors(const PackSavedTensors&) = delete;
  PackSavedTensors& operator=(const PackSavedTensors&) = delete;

  [[nodiscard]] PackedReport report() const;

  /// Whether somebody else keeps what is saved on this thread: torch.autograd.graph.saved_tensors_hooks of Python, a
  /// checkpoint, another object of this class. A Scope comes before them.
  [[nodiscard]] static bool others_keep();

  class OXY_API Scope {
   public:
    /// Does nothing inside torch.func and torch.compile, where torch takes no hooks.
    explicit Scope(PackSavedTensors& packed);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Open;
    std::unique_ptr<Open> open_;
  };

 private:
  struct Inside;
  std::shared_ptr<Inside> inside_;
};

}  // namespace oxytorch::memory
