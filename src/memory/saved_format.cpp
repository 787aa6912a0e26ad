#include "oxytorch/memory/saved_format.h"

#include <string>

#include "base/spelling.h"
#include "oxytorch/error.h"

namespace oxytorch::memory {

std::string_view name(SavedFormat format) noexcept {
  switch (format) {
    case SavedFormat::Lossless: return "lossless";
    case SavedFormat::BFloat16: return "bf16";
    case SavedFormat::Int8: return "int8";
    case SavedFormat::File: return "file";
  }
  return "";
}

SavedFormat parse_saved_format(std::string_view word) {
  for (const auto format : {SavedFormat::Lossless, SavedFormat::BFloat16, SavedFormat::Int8, SavedFormat::File}) {
    if (word == name(format)) return format;
  }
  oxytorch::detail::raise(ErrorCode::InvalidArgument, "the format of saved tensors is ", in_quotes(std::string(word)),
                          ", expected 'lossless', 'bf16', 'int8' or 'file'.");
}

}  // namespace oxytorch::memory
