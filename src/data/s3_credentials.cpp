#include "data/s3_credentials.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/set_variable.h"

namespace oxytorch::data {
namespace {

constexpr std::int64_t kEarly = 300;  // seconds before their end from which on credentials are renewed

/// A section of ~/.aws/credentials or config.
std::string profile_value(const std::string& file, const std::string& section, const std::string& wanted) {
  std::ifstream lines(file);
  std::string line;
  bool inside = false;
  while (std::getline(lines, line)) {
    line.erase(std::remove(line.begin(), line.end(), ' '), line.end());
    if (line.starts_with("[")) inside = line == "[" + section + "]";
    const auto equals = line.find('=');
    if (inside && equals != std::string::npos && line.substr(0, equals) == wanted) return line.substr(equals + 1);
  }
  return "";
}

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) text.pop_back();
  return text;
}

/// What a service gave, and until when.
struct Temporary {
  S3Credentials credentials;
  std::int64_t ends = 0;  // seconds since 1970
};

/// "2026-11-29T20:00:00Z"; 0 for what is no time.
std::int64_t seconds_of(const std::string& time) {
  std::tm parts{};
  if (::strptime(time.c_str(), "%Y-%m-%dT%H:%M:%S", &parts) == nullptr) return 0;
  return ::timegm(&parts);
}

std::optional<Temporary> read_json(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return std::nullopt;
  const auto word = [&](const char* name) {
    const auto found = json.find(name);
    return found != json.end() && found->is_string() ? found->get<std::string>() : "";
  };
  Temporary found{{word("AccessKeyId"), word("SecretAccessKey"), word("Token"), ""}, seconds_of(word("Expiration"))};
  return found.credentials.key.empty() || found.credentials.secret.empty() ? std::nullopt : std::optional(found);
}

/// The role of a Kubernetes account, for its token.
std::optional<Temporary> from_web_identity(const AskService& ask, const std::string& region) {
  const auto file = set_variable({"AWS_WEB_IDENTITY_TOKEN_FILE"}), role = set_variable({"AWS_ROLE_ARN"});
  if (file.empty() || role.empty()) return std::nullopt;
  const auto name = set_variable({"AWS_ROLE_SESSION_NAME"});
  auto endpoint = set_variable({"AWS_ENDPOINT_URL_STS"});
  if (endpoint.empty()) endpoint = "https://sts." + region + ".amazonaws.com";
  while (endpoint.ends_with('/')) endpoint.pop_back();
  const auto xml =
      ask({.url = endpoint + "/?Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=" + escaped(role, true) +
                  "&RoleSessionName=" + escaped(name.empty() ? "oxytorch" : name, true) +
                  "&WebIdentityToken=" + escaped(content_of(file), true),
           .near = false});
  if (!xml) return std::nullopt;
  const auto word = [&](const char* tag) {
    std::size_t at = 0;
    return text_between(*xml, tag, at, xml->size());
  };
  Temporary found{{word("AccessKeyId"), word("SecretAccessKey"), word("SessionToken"), ""},
                  seconds_of(word("Expiration"))};
  return found.credentials.key.empty() ? std::nullopt : std::optional(found);
}

std::optional<Temporary> from_container(const AskService& ask) {
  const auto relative = set_variable({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"});
  ServiceRequest request{.url = relative.empty() ? set_variable({"AWS_CONTAINER_CREDENTIALS_FULL_URI"})
                                                 : "http://169.254.170.2" + relative};
  if (request.url.empty()) return std::nullopt;
  const auto file = set_variable({"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"});
  const auto token = file.empty() ? set_variable({"AWS_CONTAINER_AUTHORIZATION_TOKEN"}) : content_of(file);
  if (!token.empty()) request.headers.push_back("Authorization: " + token);
  const auto answer = ask(request);
  return answer ? read_json(*answer) : std::nullopt;
}

/// The role of an EC2 instance, by version 2 of its metadata service.
std::optional<Temporary> from_machine(const AskService& ask) {
  if (set_variable({"AWS_EC2_METADATA_DISABLED"}) == "true") return std::nullopt;
  auto endpoint = set_variable({"AWS_EC2_METADATA_SERVICE_ENDPOINT"});
  if (endpoint.empty()) endpoint = "http://169.254.169.254";
  while (endpoint.ends_with('/')) endpoint.pop_back();
  const auto token = ask(
      {.url = endpoint + "/latest/api/token", .headers = {"X-aws-ec2-metadata-token-ttl-seconds: 21600"}, .put = true});
  if (!token) return std::nullopt;
  const std::vector<std::string> headers{"X-aws-ec2-metadata-token: " + *token};
  const auto roles = endpoint + "/latest/meta-data/iam/security-credentials/";
  const auto role = ask({.url = roles, .headers = headers});
  if (!role || role->empty()) return std::nullopt;
  const auto answer = ask({.url = roles + role->substr(0, role->find('\n')), .headers = headers});
  return answer ? read_json(*answer) : std::nullopt;
}

/// What decides which service is asked, and for what.
std::string asked_for(const std::string& region) {
  std::string all = region;
  for (const char* name :
       {"AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "AWS_ENDPOINT_URL_STS", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_EC2_METADATA_DISABLED", "AWS_EC2_METADATA_SERVICE_ENDPOINT"})
    all += '\n' + set_variable({name});
  return all;
}

/// From the services, or as they gave it before. The lock is held while they are asked: threads want the same.
S3Credentials from_services(const AskService& ask, const std::string& region) {
  static std::mutex mutex;
  static Temporary kept;
  static std::string kept_for;
  static std::int64_t ask_again = 0;
  const std::lock_guard lock(mutex);
  const std::int64_t now = std::time(nullptr);
  const auto wanted = asked_for(region);
  if (wanted == kept_for && now < ask_again) return kept.credentials;
  if (wanted != kept_for) kept = {};
  kept_for = wanted;
  auto found = from_web_identity(ask, region);
  if (!found) found = from_container(ask);
  if (!found) found = from_machine(ask);
  if (found) kept = *std::move(found);
  if (now >= kept.ends) kept = {};
  // Those that a service could not renew just now serve to their end.
  ask_again = now + std::max<std::int64_t>(kept.ends - kEarly - now, kept.credentials.key.empty() ? kEarly : 10);
  return kept.credentials;
}

}  // namespace

std::string escaped(const std::string& text, bool slashes) {
  std::string found;
  for (const unsigned char c : text) {
    const bool plain = std::isalnum(c) != 0 || std::strchr("-_.~", c) != nullptr || (c == '/' && !slashes);
    char hex[4];
    std::snprintf(hex, sizeof(hex), "%%%02X", c);
    found += plain ? std::string(1, static_cast<char>(c)) : std::string(hex);
  }
  return found;
}

std::string text_between(const std::string& xml, const std::string& tag, std::size_t& at, std::size_t end) {
  const auto open = "<" + tag + ">", close = "</" + tag + ">";
  const auto first = xml.find(open, at);
  if (first == std::string::npos || first >= end) {
    at = std::string::npos;
    return "";
  }
  const auto last = xml.find(close, first);
  if (last == std::string::npos) {
    at = std::string::npos;
    return "";
  }
  at = last + close.size();
  auto text = xml.substr(first + open.size(), last - first - open.size());
  for (const auto& [entity, plain] : {std::pair("&lt;", "<"), std::pair("&gt;", ">"), std::pair("&quot;", "\""),
                                      std::pair("&apos;", "'"), std::pair("&#39;", "'"), std::pair("&amp;", "&")}) {
    for (std::size_t found = text.find(entity); found != std::string::npos; found = text.find(entity, found + 1)) {
      text.replace(found, std::strlen(entity), plain);
    }
  }
  return text;
}

S3Credentials s3_credentials(const AskService& ask) {
  const auto or_else = [](const std::string& value, const std::string& other) { return value.empty() ? other : value; };
  const auto home = set_variable({"HOME"}) + "/.aws/";
  const auto profile = or_else(set_variable({"AWS_PROFILE"}), "default");
  const auto file = or_else(set_variable({"AWS_SHARED_CREDENTIALS_FILE"}), home + "credentials");
  const auto config = or_else(set_variable({"AWS_CONFIG_FILE"}), home + "config");
  const auto section = profile == "default" ? profile : "profile" + profile;  // spaces are gone
  auto region = set_variable({"AWS_REGION", "AWS_DEFAULT_REGION"});
  if (region.empty()) region = or_else(profile_value(config, section, "region"), "us-east-1");
  S3Credentials found{set_variable({"AWS_ACCESS_KEY_ID"}), set_variable({"AWS_SECRET_ACCESS_KEY"}),
                      set_variable({"AWS_SESSION_TOKEN"}), ""};
  if (found.key.empty() || found.secret.empty()) {
    found = {profile_value(file, profile, "aws_access_key_id"), profile_value(file, profile, "aws_secret_access_key"),
             profile_value(file, profile, "aws_session_token"), ""};
  }
  if (found.key.empty() || found.secret.empty()) found = from_services(ask, region);
  found.region = region;
  return found;
}

}  // namespace oxytorch::data
