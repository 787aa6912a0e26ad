/// Work that waits for disks or networks, done by a few threads of its own for as long as a call lasts.
#pragma once

#include <cstddef>
#include <functional>

namespace oxytorch::data {

/// Calls `work` for each index below `count`, by at most `threads` threads, this one among them. Where it throws, no
/// further indices are begun, and the exception of the lowest index is thrown on.
void for_each_index(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& work);

}  // namespace oxytorch::data
