#include "monitor/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "oxytorch/error.h"

namespace oxytorch::monitor {
namespace {

// mkstemp makes private files; a report is as readable as the file it replaces, or as 0644.
mode_t new_file_mode(const std::string& path) {
  struct stat existing {};
  if (::stat(path.c_str(), &existing) == 0) return existing.st_mode & 0777;
  return 0644;
}

}  // namespace

void write_file_atomically(const std::string& path, std::string_view content) {
  std::string temporary = path + ".XXXXXX";
  const int file = ::mkstemp(temporary.data());
  OXY_CHECK(file >= 0, Io, "cannot write '", path, "': ", std::strerror(errno),
            "; check that its folder exists and can be written.");
  int failure = 0;
  for (std::size_t done = 0; failure == 0 && done < content.size();) {
    const ssize_t wrote = ::write(file, content.data() + done, content.size() - done);
    if (wrote >= 0) {
      done += static_cast<std::size_t>(wrote);
    } else if (errno != EINTR) {
      failure = errno;
    }
  }
  if (failure == 0 && ::fchmod(file, new_file_mode(path)) != 0) failure = errno;
  if (failure == 0 && ::fsync(file) != 0) failure = errno;
  if (::close(file) != 0 && failure == 0) failure = errno;
  if (failure == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) failure = errno;
  if (failure != 0) {
    ::unlink(temporary.c_str());
    detail::raise(ErrorCode::Io, "cannot write '", path, "': ", std::strerror(failure), ".");
  }
}

}  // namespace oxytorch::monitor
