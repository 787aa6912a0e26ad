#include "memory/nameless_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

namespace oxytorch::memory {

int nameless_file(const std::string& folder, const char* purpose) {
  auto path = folder + "/oxytorch-" + purpose + "-XXXXXX";
  const int file = mkostemp(path.data(), O_CLOEXEC);
  if (file >= 0) unlink(path.c_str());
  return file;
}

}  // namespace oxytorch::memory
