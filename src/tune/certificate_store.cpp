#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>

#include "base/cache_folder.h"
#include "base/spelling.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"
#include "oxytorch/tune/certificate.h"

namespace oxytorch::tune {
namespace {

std::string path_of(const std::string& folder, const CertificateKey& key) {
  return folder + "/" + key.digest() + ".json";
}

/// What `work` throws, as text; empty where it throws nothing.
template <class Work>
std::string failure_of(const Work& work) noexcept {
  try {
    try {
      work();
      return {};
    } catch (const std::exception& error) {
      return error.what();
    }
  } catch (...) {  // not even the text could be made
    return "no memory is left.";
  }
}

}  // namespace

CertificateStore::CertificateStore(std::string folder) : folder_(folder.empty() ? cache_folder() : std::move(folder)) {}

std::optional<Certificate> CertificateStore::find(const CertificateKey& key) const {
  if (folder_.empty()) return std::nullopt;
  try {
    Certificate certificate = Certificate::load(path_of(folder_, key));
    if (certificate.key == key) return certificate;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::NotFound) log(LogLevel::Warn, error.what(), "tune");
  } catch (const std::exception& error) {
    log(LogLevel::Warn, std::string("a stored certificate could not be read: ") + error.what(), "tune");
  }
  return std::nullopt;
}

void CertificateStore::put(const Certificate& certificate) const {
  OXY_CHECK(certificate.disturbance.empty(), InvalidState, "the machine was busy: ", certificate.disturbance,
            "; measure again on a quiet one.");
  OXY_CHECK(!folder_.empty(), Io,
            "there is no folder for certificates: none of OXYTORCH_CACHE, XDG_CACHE_HOME and HOME "
            "is set, or OXYTORCH_CACHE is 'off'; set it to a folder.");
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  OXY_CHECK(!error, Io, "cannot make the folder ", in_quotes(folder_), " for certificates: ", error.message(),
            "; set OXYTORCH_CACHE to one that can be written.");
  certificate.save(path_of(folder_, certificate.key));
}

void CertificateStore::forget(const CertificateKey& key) const {
  if (folder_.empty()) return;
  const std::string path = path_of(folder_, key);
  std::error_code error;
  std::filesystem::remove(path, error);
  const bool absent = error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
  OXY_CHECK(!error || absent, Io, "cannot remove ", in_quotes(path), ": ", error.message(), '.');
}

std::string CertificateStore::try_put(const Certificate& certificate) const noexcept {
  if (folder_.empty() && cache_is_off()) return {};
  const auto& entries = certificate.entries;
  const auto was_skipped = [](const CertificateEntry& entry) { return entry.status == Status::Skipped; };
  if (std::all_of(entries.begin(), entries.end(), was_skipped)) return {};  // it says nothing to the next run
  return failure_of([&] { put(certificate); });
}

std::string CertificateStore::try_forget(const CertificateKey& key) const noexcept {
  return failure_of([&] { forget(key); });
}

}  // namespace oxytorch::tune
