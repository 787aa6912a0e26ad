#include "data/whole_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "oxytorch/error.h"

namespace oxytorch::data {

void write_all(int descriptor, const void* data, std::size_t bytes, const std::string& path) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto written = ::write(descriptor, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    OXY_CHECK(written > 0, Io, path, " cannot be written: ", std::generic_category().message(errno), ".");
    at += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void write_whole_file(const std::string& path, std::initializer_list<std::string_view> parts) {
  const auto aside = path + ".part" + std::to_string(::getpid());
  const int descriptor = ::open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  OXY_CHECK(descriptor >= 0, Io, aside, " cannot be made: ", std::generic_category().message(errno), ".");
  try {
    for (const auto part : parts) write_all(descriptor, part.data(), part.size(), aside);
    OXY_CHECK(::fsync(descriptor) == 0, Io, aside, " cannot be written: ", std::generic_category().message(errno), ".");
  } catch (...) {
    ::close(descriptor);
    ::unlink(aside.c_str());
    throw;
  }
  ::close(descriptor);
  const bool renamed = std::rename(aside.c_str(), path.c_str()) == 0;
  const int error = errno;
  if (!renamed) ::unlink(aside.c_str());
  OXY_CHECK(renamed, Io, path, " cannot be written: ", std::generic_category().message(error), ".");
}

}  // namespace oxytorch::data
