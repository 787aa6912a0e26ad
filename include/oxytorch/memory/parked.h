/// CPU tensors whose memory is a file without a name: they are read and written like any other, and take no memory
/// while nobody does. The kernel writes what has changed to the disk when it needs the memory, and reads it back when
/// asked.
///
/// ```cpp
/// oxytorch::memory::move_to_file(average);  // the same tensor, on other memory
/// ...                                       // read and written as before
/// oxytorch::memory::rest(average);          // its pages are let go of; its values stay
/// ```
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "oxytorch/api.h"

namespace oxytorch::memory {

/// Tensors of fewer bytes share a file with others, and are not moved.
inline constexpr std::size_t kParkedBytes = std::size_t{1} << 20;

/// Where the files are made, the first that can hold them: TMPDIR where that is named and on a disk, /var/tmp, then
/// /tmp or a TMPDIR in memory, where files save none.
[[nodiscard]] OXY_API std::vector<std::string> parking_folders();

/// A copy with the layout that clone() has, detached, in a file that goes with its memory: with the copy and its views.
/// A plain clone of what is under 4 KiB, not of a CPU, not strided, a lazy conjugate or negative, and where none of
/// `folders` can hold it. Pages of the copy are not resident.
///
/// The mapping is shared: what a forked child writes to it, its parent sees.
[[nodiscard]] OXY_API at::Tensor park(const at::Tensor& tensor,
                                      const std::vector<std::string>& folders = parking_folders());

/// Whether the tensor's memory is such a file's.
[[nodiscard]] OXY_API bool is_parked(const at::Tensor& tensor);

/// Moves a tensor's own memory to a file and back: the tensor stays the same object, views of its old memory show
/// what it held then. False where it stays as it is: of fewer than kParkedBytes, where park() would make a clone in
/// memory, and where it lies there already.
OXY_API bool move_to_file(at::Tensor& tensor);
OXY_API bool move_to_memory(at::Tensor& tensor);

/// Lets go of the pages of a parked tensor that were read or written, or of all; their values stay in the files.
OXY_API void rest(const at::Tensor& tensor);
OXY_API void rest_all();

/// Has the kernel read a parked tensor's pages from the disk meanwhile.
OXY_API void read_ahead(const at::Tensor& tensor);

/// Maps a parked tensor's pages at once, to be written: each would be asked for by itself otherwise, which takes longer
/// than the work on it. Nothing before Linux 5.14.
OXY_API void populate(const at::Tensor& tensor);

/// How many of some tensors each part takes where a part at a time is in memory, by the bytes of each: a sixteenth of
/// all in a part, at least 4 MiB and at most 64, or more of a single tensor.
[[nodiscard]] OXY_API std::vector<std::size_t> parked_parts(const std::vector<std::size_t>& bytes);

}  // namespace oxytorch::memory
