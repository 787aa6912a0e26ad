/// Who a request to S3 is made as.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace oxytorch::data {

/// Empty keys: requests are not signed.
struct S3Credentials {
  std::string key, secret, token, region;
};

/// A request to a service that gives credentials.
struct ServiceRequest {
  std::string url;
  std::vector<std::string> headers{};
  bool put = false;
  bool near = true;  ///< on this machine or its host, so that no proxy is between
};
/// The body of an answer with status 200; empty otherwise.
using AskService = std::function<std::optional<std::string>(const ServiceRequest&)>;

/// The usual chain: environment, profile in ~/.aws, token of a web identity (EKS), container (ECS, EKS), machine (EC2).
/// What a service gave is kept for the process until five minutes before its end; that there is none, for five minutes.
/// https://docs.aws.amazon.com/sdkref/latest/guide/standardized-credentials.html
S3Credentials s3_credentials(const AskService& ask);

/// With all but letters, digits and "-_.~" as %XX; "/" as itself unless `slashes`.
std::string escaped(const std::string& text, bool slashes);
/// What stands between <tag> and </tag> at or after `at` and begins before `end`, with entities undone; `at` goes
/// behind it, or to npos where there is none.
std::string text_between(const std::string& xml, const std::string& tag, std::size_t& at, std::size_t end);

}  // namespace oxytorch::data
