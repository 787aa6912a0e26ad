#include "base/whole_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "oxytorch/error.h"

namespace oxytorch {
namespace {

// mkstemp makes private files; a new one is as readable as the file it replaces, or as this process's others.
mode_t new_file_mode(const std::string& path) {
  struct stat existing {};
  if (::stat(path.c_str(), &existing) == 0) return existing.st_mode & 0777;
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return 0666 & ~mask;
}

}  // namespace

int write_all(int descriptor, const void* data, std::size_t bytes) noexcept {
  const auto* from = static_cast<const char*>(data);
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t wrote = ::write(descriptor, from + done, bytes - done);
    if (wrote < 0 && errno != EINTR) return errno;
    if (wrote > 0) done += static_cast<std::size_t>(wrote);
  }
  return 0;
}

void write_whole_file(const std::string& path, std::initializer_list<std::string_view> parts, Flush flush) {
  std::string temporary = path + ".XXXXXX";
  const int file = ::mkstemp(temporary.data());
  if (file < 0) {
    const int number = errno;
    detail::raise(number == ENOENT ? ErrorCode::NotFound : ErrorCode::Io, "cannot write '", path,
                  "': ", std::strerror(number), "; check that its folder exists and can be written.");
  }
  int failure = 0;
  for (const auto part : parts) {
    if (failure == 0) failure = write_all(file, part.data(), part.size());
  }
  if (failure == 0 && ::fchmod(file, new_file_mode(path)) != 0) failure = errno;
  if (failure == 0 && flush == Flush::ToDisk && ::fsync(file) != 0) failure = errno;
  if (::close(file) != 0 && failure == 0) failure = errno;
  if (failure == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) failure = errno;
  if (failure != 0) {
    ::unlink(temporary.c_str());
    detail::raise(ErrorCode::Io, "cannot write '", path, "': ", std::strerror(failure), ".");
  }
}

}  // namespace oxytorch
