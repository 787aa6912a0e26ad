// libcurl: https://curl.se/libcurl/c/. S3: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html,
// signatures by CURLOPT_AWS_SIGV4.
#include "data/remote_file.h"

#include <curl/curl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>

#include "base/set_variable.h"
#include "data/crc32c.h"
#include "data/s3_credentials.h"
#include "oxytorch/error.h"
#include "oxytorch/random.h"

namespace oxytorch::data {
namespace {

constexpr int kTries = 6;
constexpr double kFirstPause = 0.1;                // seconds; twice that after each failure
constexpr std::uint64_t kBlock = 1 << 20;          // bytes that are fetched at once where less is asked for
constexpr std::size_t kBlocks = 16;                // of a file that are kept
constexpr std::uint64_t kLargestWhole = 64 << 20;  // of a server without ranges
constexpr long kConnectSeconds = 10, kStallSeconds = 15, kServiceMilliseconds = 1000;

/// Without a query, which may hold a signature, and without credentials.
std::string shown_url(const std::string& url) {
  auto shown = url.substr(0, url.find('?'));
  const auto scheme = shown.find("://");
  const auto at = shown.find('@');
  if (scheme != std::string::npos && at != std::string::npos && at < shown.find('/', scheme + 3))
    shown.erase(scheme + 3, at - scheme - 2);
  return shown;
}

// -- S3
// -----------------------------------------------------------------------------------------------------------------

/// https URL of s3://bucket/key: by the bucket's host, or by path where an endpoint is named.
std::string s3_url(const std::string& bucket, const std::string& key, const S3Credentials& credentials) {
  auto endpoint = set_variable({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"});
  if (endpoint.empty())
    return "https://" + bucket + ".s3." + credentials.region + ".amazonaws.com/" + escaped(key, false);
  while (endpoint.ends_with('/')) endpoint.pop_back();
  return endpoint + "/" + bucket + "/" + escaped(key, false);
}

std::pair<std::string, std::string> bucket_and_key(const std::string& location) {
  const auto rest = location.substr(5);
  const auto slash = rest.find('/');
  OXY_CHECK(!rest.empty() && slash != 0, InvalidArgument, location, " names no bucket; expected s3://bucket/key.");
  return {rest.substr(0, slash), slash == std::string::npos ? "" : rest.substr(slash + 1)};
}

// -- requests
// -----------------------------------------------------------------------------------------------------------

enum class Method : std::uint8_t { Get, Put, Delete };

struct Request {
  std::string location;                 ///< as the user has it
  std::string query{};                  ///< of S3, sorted by name
  std::int64_t first = 0, length = -1;  ///< a range; -1: all
  std::string if_match{};               ///< an ETag
  Method method = Method::Get;
  std::string_view body{};  ///< of Put
};

struct Answer {
  long status = 0;
  std::string body, etag, modified;
  std::int64_t size = -1;  ///< of the whole object
  std::string failure;     ///< of the connection; empty where there was an answer
};

struct Handle {
  CURL* curl;
  Handle() {
    static const auto once = curl_global_init(CURL_GLOBAL_DEFAULT);
    static_cast<void>(once);
    curl = curl_easy_init();
    OXY_ASSERT(curl != nullptr, "libcurl gives no handle.");
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { curl_easy_cleanup(curl); }
};

std::size_t take_body(char* data, std::size_t, std::size_t bytes, void* to) {
  static_cast<std::string*>(to)->append(data, bytes);
  return bytes;
}

std::size_t give_body(char* to, std::size_t, std::size_t most, void* from) {
  auto& rest = *static_cast<std::string_view*>(from);
  const auto given = rest.copy(to, most);
  rest.remove_prefix(given);
  return given;
}

std::size_t take_header(char* data, std::size_t, std::size_t bytes, void* to) {
  auto& answer = *static_cast<Answer*>(to);
  std::string line(data, bytes);
  while (!line.empty() && (line.back() == '\r' || line.back() == '\n')) line.pop_back();
  const auto colon = line.find(": ");
  if (line.starts_with("HTTP/")) answer.etag = answer.modified = "";  // of a redirection before
  if (colon == std::string::npos) return bytes;
  auto name = line.substr(0, colon);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto value = line.substr(colon + 2);
  if (name == "etag") answer.etag = value;
  if (name == "last-modified") answer.modified = value;
  if (name == "content-length" && answer.size < 0) answer.size = std::atoll(value.c_str());
  const auto slash = value.find('/');
  if (name == "content-range" && slash != std::string::npos) answer.size = std::atoll(value.c_str() + slash + 1);
  return bytes;
}

/// CRC-32C in base64, by which S3 refuses a body that came otherwise.
std::string checksum_of(std::string_view body) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const std::uint64_t bits = std::uint64_t{crc32c(std::as_bytes(std::span(body)))} << 16;  // 32 of 48
  std::string text;
  for (int shift = 42; shift > 6; shift -= 6) text += kDigits[bits >> shift & 63];
  return text + "==";
}

struct HeaderList {
  curl_slist* list = nullptr;
  HeaderList() = default;
  HeaderList(const HeaderList&) = delete;
  HeaderList& operator=(const HeaderList&) = delete;
  ~HeaderList() { curl_slist_free_all(list); }
  void add(const std::string& line) { list = curl_slist_append(list, line.c_str()); }
};

/// Of the calling thread, which keeps its connections; what every request has is set.
CURL* fresh_handle(const std::string& url, Answer& answer) {
  thread_local Handle handle;
  auto* curl = handle.curl;
  curl_easy_reset(curl);
  curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_USERAGENT, "oxytorch");
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take_body);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer.body);
  return curl;
}

void perform(CURL* curl, Answer& answer) {
  const auto code = curl_easy_perform(curl);
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &answer.status);
  if (code != CURLE_OK) answer.failure = curl_easy_strerror(code);
}

/// One request to a service that gives credentials, which is near or absent.
std::optional<std::string> ask_service(const ServiceRequest& request) {
  Answer answer;
  auto* curl = fresh_handle(request.url, answer);
  HeaderList headers;
  for (const auto& line : request.headers) headers.add(line);
  curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers.list);
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, kServiceMilliseconds);
  curl_easy_setopt(curl, CURLOPT_TIMEOUT, kConnectSeconds);
  if (request.near) curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
  if (request.put) curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, "PUT");
  perform(curl, answer);
  return answer.status == 200 ? std::optional(answer.body) : std::nullopt;
}

Answer ask_once(const Request& request) {
  std::string url = request.location;
  S3Credentials credentials;
  const bool s3 = url.starts_with("s3://");
  if (s3) {
    credentials = s3_credentials(ask_service);
    const auto [bucket, key] = bucket_and_key(url);
    url = s3_url(bucket, key, credentials);
  }
  if (!request.query.empty()) url += "?" + request.query;
  Answer answer;
  auto* curl = fresh_handle(url, answer);
  HeaderList headers;
  const auto userpwd = credentials.key + ":" + credentials.secret, sigv4 = "aws:amz:" + credentials.region + ":s3";
  if (s3 && !credentials.key.empty()) {
    curl_easy_setopt(curl, CURLOPT_AWS_SIGV4, sigv4.c_str());
    curl_easy_setopt(curl, CURLOPT_USERPWD, userpwd.c_str());
    // S3 wants the hash of the body among the headers: that of none, or this word where a checksum is given instead.
    headers.add(request.method == Method::Put
                    ? "x-amz-content-sha256: UNSIGNED-PAYLOAD"
                    : "x-amz-content-sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    if (request.method == Method::Put) headers.add("x-amz-checksum-crc32c: " + checksum_of(request.body));
    if (!credentials.token.empty()) headers.add("x-amz-security-token: " + credentials.token);
  }
  curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, 1L);
  curl_easy_setopt(curl, CURLOPT_MAXREDIRS, 5L);
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, kConnectSeconds);
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, kStallSeconds);
  curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, take_header);
  curl_easy_setopt(curl, CURLOPT_HEADERDATA, &answer);
  const auto range = std::to_string(request.first) + "-" + std::to_string(request.first + request.length - 1);
  if (request.length >= 0) curl_easy_setopt(curl, CURLOPT_RANGE, range.c_str());
  auto rest = request.body;
  if (request.method == Method::Put) {
    curl_easy_setopt(curl, CURLOPT_UPLOAD, 1L);
    curl_easy_setopt(curl, CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(rest.size()));
    curl_easy_setopt(curl, CURLOPT_READFUNCTION, give_body);
    curl_easy_setopt(curl, CURLOPT_READDATA, &rest);
    curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, 0L);  // a body is given once
    headers.add("Expect:");  // not to wait for servers that do not answer before the body has come
  }
  if (request.method == Method::Delete) curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, "DELETE");
  if (!request.if_match.empty()) headers.add("If-Match: " + request.if_match);
  curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers.list);
  perform(curl, answer);
  return answer;
}

bool may_pass(const Answer& answer) {
  return !answer.failure.empty() || answer.status >= 500 || answer.status == 429 || answer.status == 408;
}

/// Asks until there is an answer that stays. Each request may be made again: what it leaves is the same.
Answer ask(const Request& request) {
  std::string failures;
  PhiloxStream jitter(static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()));
  for (int attempt = 0; attempt < kTries; ++attempt) {
    auto answer = ask_once(request);
    const bool cut = answer.failure.empty() && answer.status == 206 && request.length >= 0 &&
                     static_cast<std::int64_t>(answer.body.size()) != request.length;
    if (!may_pass(answer) && !cut) return answer;
    const auto why = cut                      ? "a body of " + std::to_string(answer.body.size()) + " bytes"
                     : answer.failure.empty() ? "status " + std::to_string(answer.status)
                                              : answer.failure;
    failures += (failures.empty() ? "" : ", ") + why;
    if (attempt + 1 < kTries) {
      const double pause = kFirstPause * static_cast<double>(1 << attempt) * (0.5 + jitter.uniform_double());
      std::this_thread::sleep_for(std::chrono::duration<double>(pause));
    }
  }
  OXY_CHECK(false, Io, shown_url(request.location),
            request.method == Method::Get ? " cannot be read" : " cannot be written", " after ", kTries,
            " tries: ", failures, ".");
}

void check_status(const std::string& location, const Answer& answer, Method method = Method::Get) {
  if (answer.status == 200 || (method == Method::Get ? answer.status == 206 : answer.status / 100 == 2)) return;
  const auto* done = method == Method::Get ? "read" : "written";
  OXY_CHECK(answer.status != 404, NotFound, shown_url(location), " does not exist.");
  OXY_CHECK(answer.status != 403 && answer.status != 401, Io, shown_url(location), " may not be ", done, " (status ",
            answer.status,
            "). Credentials of s3 are taken from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from the profile "
            "AWS_PROFILE in ~/.aws/credentials, or from the role of the container or machine.");
  OXY_CHECK(answer.status != 412, Io, shown_url(location), " has changed since it was opened. Open it anew.");
  OXY_CHECK(answer.status != 416, Io, shown_url(location), " is shorter than when it was opened. Open it anew.");
  OXY_CHECK(false, Io, shown_url(location), " cannot be ", done, ": the server answers with status ", answer.status,
            ".");
}

class RemoteFile final : public File {
 public:
  explicit RemoteFile(std::string location) : location_(std::move(location)) {
    // A ranged request, which servers that sign for one method alone understand too.
    const auto answer = ask({.location = location_, .length = 1});
    if (answer.status == 416) {  // an empty object has no first byte
      size_ = 0;
    } else {
      check_status(location_, answer);
      OXY_CHECK(answer.size >= 0, Io, shown_url(location_), " is of unknown size: the server sends no length.");
      size_ = static_cast<std::uint64_t>(answer.size);
      if (answer.status == 200) keep_whole(answer);
    }
    etag_ = answer.etag;
    version_ = std::to_string(size_) + "-" + (etag_.empty() ? answer.modified : etag_);
  }

  [[nodiscard]] const std::string& location() const noexcept override { return location_; }
  [[nodiscard]] std::uint64_t size() const noexcept override { return size_; }
  [[nodiscard]] std::string version() const override { return version_; }
  [[nodiscard]] bool remote() const noexcept override { return true; }

  [[nodiscard]] View view(std::uint64_t offset, std::uint64_t length) const override {
    OXY_CHECK(offset <= size_ && length <= size_ - offset, Io, shown_url(location_),
              " is truncated or damaged: it has ", size_, " bytes, and bytes ", offset, " to ", offset + length,
              " are asked for.");
    if (length == 0) return {};
    if (whole_) return {std::as_bytes(std::span(*whole_)).subspan(offset, length), whole_};
    const auto block = offset / kBlock;
    if (length >= kBlock || (offset + length - 1) / kBlock != block) return fetched(offset, length);
    const auto held = block_at(block);
    return {held.bytes.subspan(offset - block * kBlock, length), held.owner};
  }

 private:
  /// The server has no ranges.
  void keep_whole(const Answer& answer) {
    OXY_CHECK(size_ <= kLargestWhole, NotSupported, shown_url(location_), " has ", size_,
              " bytes, and its server knows no ranges. Copy the file to a disk.");
    OXY_CHECK(answer.body.size() == size_, Io, shown_url(location_), " ended after ", answer.body.size(), " of ", size_,
              " bytes.");
    whole_ = std::make_shared<const std::string>(answer.body);
  }

  [[nodiscard]] View fetched(std::uint64_t offset, std::uint64_t length) const {
    auto answer = ask({.location = location_,
                       .first = static_cast<std::int64_t>(offset),
                       .length = static_cast<std::int64_t>(length),
                       .if_match = etag_});
    check_status(location_, answer);
    OXY_CHECK(answer.status == 206 && (etag_.empty() || answer.etag.empty() || answer.etag == etag_), Io,
              shown_url(location_), " has changed since it was opened. Open it anew.");
    auto owner = std::make_shared<const std::string>(std::move(answer.body));
    const auto bytes = std::as_bytes(std::span(*owner));
    return {bytes, std::move(owner)};
  }

  [[nodiscard]] View block_at(std::uint64_t block) const {
    {
      const std::lock_guard lock(mutex_);
      for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
        if (it->first != block) continue;
        blocks_.splice(blocks_.begin(), blocks_, it);
        return it->second;
      }
    }
    const auto start = block * kBlock;
    auto view = fetched(start, std::min(kBlock, size_ - start));
    const std::lock_guard lock(mutex_);
    blocks_.emplace_front(block, view);
    if (blocks_.size() > kBlocks) blocks_.pop_back();
    return view;
  }

  std::string location_, version_, etag_;
  std::uint64_t size_ = 0;
  std::shared_ptr<const std::string> whole_;
  mutable std::mutex mutex_;
  mutable std::list<std::pair<std::uint64_t, View>> blocks_;  // the last one used first
};

}  // namespace

bool is_remote(const std::string& location) noexcept {
  return location.starts_with("http://") || location.starts_with("https://") || location.starts_with("s3://");
}

std::shared_ptr<const File> open_remote_file(const std::string& location) {
  return std::make_shared<RemoteFile>(location);
}

bool remote_exists(const std::string& location) {
  if (location.ends_with('/')) return !location.starts_with("s3://") || !list_remote_folder(location).empty();
  const auto answer = ask({.location = location, .length = 1});
  if (answer.status == 404) return false;
  if (answer.status != 416) check_status(location, answer);
  return true;
}

std::vector<std::string> list_remote_folder(const std::string& location) {
  OXY_CHECK(
      location.starts_with("s3://"), NotSupported, shown_url(location),
      " cannot be listed over http: name its files, such as shard-{000..042}.tar, or a folder with an index.json.");
  const auto [bucket, prefix] = bucket_and_key(location);
  std::vector<std::string> names;
  std::string token;
  do {
    const auto continued = token.empty() ? "" : "continuation-token=" + escaped(token, true) + "&";
    const auto answer = ask({.location = "s3://" + bucket + "/",
                             .query = continued + "delimiter=%2F&list-type=2&prefix=" + escaped(prefix, true)});
    check_status(location, answer);
    const auto add = [&names, &prefix = prefix](const std::string& key) {
      if (key.size() > prefix.size() && key.starts_with(prefix)) names.push_back(key.substr(prefix.size()));
    };
    const auto& xml = answer.body;
    for (std::size_t at = 0;;) {
      const auto key = text_between(xml, "Key", at, xml.size());
      if (at == std::string::npos) break;
      add(key);
    }
    for (std::size_t at = xml.find("<CommonPrefixes>"); at != std::string::npos;
         at = xml.find("<CommonPrefixes>", at)) {
      add(text_between(xml, "Prefix", at, xml.size()));
      if (at == std::string::npos) break;
    }
    std::size_t at = 0;
    token = text_between(xml, "NextContinuationToken", at, xml.size());
  } while (!token.empty());
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<std::string> fetch_whole(const std::string& location) {
  auto answer = ask({.location = location});
  if (answer.status == 404 || answer.status == 403) return std::nullopt;  // S3 says 403 for what is not there
  check_status(location, answer);
  return std::move(answer.body);
}

void put_whole(const std::string& location, std::string_view content) {
  check_status(location, ask({.location = location, .method = Method::Put, .body = content}), Method::Put);
}

void remove_remote(const std::string& location) {
  const auto answer = ask({.location = location, .method = Method::Delete});
  if (answer.status != 404) check_status(location, answer, Method::Delete);
}

}  // namespace oxytorch::data
