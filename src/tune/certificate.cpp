#include "oxytorch/tune/certificate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/spelling.h"
#include "base/whole_file.h"
#include "oxytorch/error.h"
#include "oxytorch/system.h"
#include "tune/words.h"

namespace oxytorch::tune {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "oxytorch-certificate";
constexpr std::int64_t kVersion = 4;
/// Of a page fault with its share of giving the page back: from a quiet kernel to a virtual machine.
constexpr double kLeastFaultSeconds = 2.5e-7;
constexpr double kMostFaultSeconds = 4e-6;
constexpr double kFaultShare = 0.02;  // of a step
constexpr std::size_t kLongest = std::size_t{16} << 20;

/// Whether so many page faults can be seen in a step.
bool faults_matter(double faults, double step_seconds) {
  return faults * kLeastFaultSeconds > kFaultShare * step_seconds;
}

const std::vector<std::string>& statuses() {
  static const std::vector<std::string> kNames{"accepted", "rejected", "refused", "failed", "skipped", "rolled back"};
  return kNames;
}

// JSON has no words for what is not finite.
Json to_json(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
}

Json to_json(const std::optional<Interval>& interval) {
  if (!interval) return nullptr;
  return {{"low", to_json(interval->low)},
          {"mid", to_json(interval->mid)},
          {"high", to_json(interval->high)},
          {"confidence", to_json(interval->confidence)}};
}

Json to_json(const std::optional<std::int64_t>& bytes) { return bytes ? Json(*bytes) : Json(nullptr); }

Json to_json(const CertificateEntry& entry) {
  Json evidence = Json::object();
  for (const auto& [what, value] : entry.evidence) evidence[what] = to_json(value);
  return {{"strategy", entry.strategy},
          {"kind", name(entry.kind)},
          {"status", name(entry.status)},
          {"reason", entry.reason},
          {"cost", entry.cost},
          {"speedup", to_json(entry.speedup)},
          {"pairs", entry.pairs},
          {"cost_seconds", to_json(entry.cost_seconds)},
          {"break_even_steps", entry.break_even_steps ? to_json(*entry.break_even_steps) : Json(nullptr)},
          {"evidence", std::move(evidence)}};
}

/// A value and where it stands, for messages: "entries[3].speedup.low".
class Node {
 public:
  Node(const Json& json, std::string place) : json_(json), place_(std::move(place)) {}

  [[nodiscard]] Node at(const char* key) const {
    expect(json_.is_object(), "an object");
    const auto found = json_.find(key);
    OXY_CHECK(found != json_.end(), InvalidArgument, "certificate: ", place_.empty() ? "the text" : place_, " has no '",
              key, "'; it is damaged, so measure again.");
    return {*found, place_.empty() ? key : place_ + "." + key};
  }
  [[nodiscard]] bool absent() const { return json_.is_null(); }

  [[nodiscard]] std::string text() const {
    expect(json_.is_string(), "a text");
    return json_.get<std::string>();
  }
  [[nodiscard]] double number() const {
    if (json_.is_number()) return json_.get<double>();
    expect(json_.is_string(), "a number");
    const auto& word = json_.get_ref<const std::string&>();
    if (word == "NaN") return NAN;
    expect(word == "Infinity" || word == "-Infinity", "a number");
    return word == "Infinity" ? INFINITY : -INFINITY;
  }
  [[nodiscard]] std::int64_t whole() const {
    expect(json_.is_number_integer() && (!json_.is_number_unsigned() || json_.get<std::uint64_t>() <= INT64_MAX),
           "a whole number");
    return json_.get<std::int64_t>();
  }
  [[nodiscard]] int count() const {
    const std::int64_t value = whole();
    expect(value >= 0 && value <= INT32_MAX, "a count");
    return static_cast<int>(value);
  }
  [[nodiscard]] std::optional<std::int64_t> bytes() const {
    if (absent()) return std::nullopt;
    return whole();
  }
  [[nodiscard]] std::optional<Interval> interval() const {
    if (absent()) return std::nullopt;
    return Interval{at("low").number(), at("mid").number(), at("high").number(), at("confidence").number()};
  }
  template <class F>
  void each(F take) const {
    expect(json_.is_array(), "a list");
    for (std::size_t i = 0; i < json_.size(); ++i) take(Node(json_[i], place_ + "[" + std::to_string(i) + "]"));
  }
  template <class F>
  void each_member(F take) const {
    expect(json_.is_object(), "an object");
    for (const auto& [key, value] : json_.items()) take(key, Node(value, place_ + "." + key));
  }
  /// What `read` makes of the text, with the place in its error.
  template <class F>
  auto word(F read) const {
    try {
      return read(text());
    } catch (const Error& error) {
      detail::raise(error.code(), "certificate: ", place_, ": ", error.what());
    }
  }

 private:
  void expect(bool holds, const char* what) const {
    OXY_CHECK(holds, InvalidArgument, "certificate: ", place_.empty() ? "the text" : place_, " must be ", what,
              ", not ", json_.type_name(), "; it is damaged, so measure again.");
  }

  const Json& json_;
  std::string place_;
};

CertificateEntry read_entry(const Node& node) {
  CertificateEntry entry;
  entry.strategy = node.at("strategy").text();
  entry.kind = node.at("kind").word(parse_kind);
  entry.status = node.at("status").word(parse_status);
  entry.reason = node.at("reason").text();
  entry.cost = node.at("cost").text();
  entry.speedup = node.at("speedup").interval();
  entry.pairs = node.at("pairs").count();
  entry.cost_seconds = node.at("cost_seconds").number();
  if (const Node steps = node.at("break_even_steps"); !steps.absent()) entry.break_even_steps = steps.number();
  node.at("evidence").each_member([&](const std::string& what, const Node& value) {
    entry.evidence[what] = value.number();
  });
  return entry;
}

Json parse(std::string_view text) {
  OXY_CHECK(text.size() <= kLongest, InvalidArgument, "certificate: the text has ", text.size(),
            " bytes; no certificate has over ", kLongest, '.');
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    detail::raise(ErrorCode::InvalidArgument, "certificate: ", error.what(), "; it is damaged, so measure again.");
  }
}

}  // namespace

std::string_view name(Status status) noexcept {
  switch (status) {
    case Status::Accepted: return "accepted";
    case Status::Rejected: return "rejected";
    case Status::Refused: return "refused";
    case Status::Failed: return "failed";
    case Status::Skipped: return "skipped";
    case Status::RolledBack: break;
  }
  return "rolled back";
}

Status parse_status(std::string_view text) {
  const auto found = std::find(statuses().begin(), statuses().end(), text);
  OXY_CHECK(found != statuses().end(), InvalidArgument, "unknown status ", in_quotes(text), "; ",
            did_you_mean(text, statuses()), "use ", list_of(statuses(), true), '.');
  return static_cast<Status>(found - statuses().begin());
}

std::string CertificateKey::digest() const {
  // FNV-1a of 64 bits (G. Fowler, L. C. Noll, K.-P. Vo); each part ends in a byte that no text holds.
  std::uint64_t hash = 0xCBF29CE484222325;
  const auto add = [&hash](unsigned char byte) { hash = (hash ^ byte) * 0x100000001B3; };
  for (const std::string* part : {&hardware, &torch, &model, &options}) {
    for (const char c : *part) add(static_cast<unsigned char>(c));
    add(0xFF);
  }
  std::string digits(16, '0');
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit, hash >>= 4)
    *digit = "0123456789abcdef"[hash & 15];
  return digits;
}

std::string hardware_key(const std::string& root) {
  const CoreInfo cores = read_cores(root);
  const CpuFeatures& cpu = cpu_features();
  std::string key = processor_name(root);
  key.append(", ").append(std::to_string(cores.usable)).append(cores.usable == 1 ? " thread" : " threads");
  key.append(" on ")
      .append(std::to_string(cores.usable_physical))
      .append(cores.usable_physical == 1 ? " core" : " cores");
  const std::array<std::pair<bool, const char*>, 9> sets{{{cpu.avx2, "avx2"},
                                                          {cpu.avx512f, "avx512f"},
                                                          {cpu.avx512bw, "avx512bw"},
                                                          {cpu.avx512_vnni, "avx512_vnni"},
                                                          {cpu.avx512_bf16, "avx512_bf16"},
                                                          {cpu.avx512_fp16, "avx512_fp16"},
                                                          {cpu.amx_tile, "amx_tile"},
                                                          {cpu.amx_bf16, "amx_bf16"},
                                                          {cpu.amx_fp16, "amx_fp16"}}};
  for (const auto& [has, set] : sets) {
    if (has) key.append(" ").append(set);
  }
  return key;
}

std::vector<std::string> Certificate::accepted() const {
  std::vector<std::string> names;
  for (const CertificateEntry& entry : entries) {
    if (entry.status == Status::Accepted) names.push_back(entry.strategy);
  }
  return names;
}

void Certificate::relate(double seconds, double faults) {
  const bool none = accepted().empty();
  if (none) tuned_seconds = seconds;
  if (!faults_matter(std::abs(faults - step_faults), seconds)) return;
  std::string event = "step 0: with nothing active a step takes ";
  event.append(monitor::format_seconds(seconds)).append(" and ").append(monitor::format_count(std::round(faults)));
  event.append(" page faults after the trials; before them it took ").append(monitor::format_seconds(step_seconds));
  event.append(" and ").append(monitor::format_count(std::round(step_faults)));
  events.push_back(event + (none ? "" : ", which is what the speedup is held against"));
  if (none) return;
  const double factor = step_seconds / std::max(baseline_seconds, 1e-9);
  baseline_seconds = step_seconds;
  if (speedup)
    speedup = Interval{speedup->low * factor, speedup->mid * factor, speedup->high * factor, speedup->confidence};
}

double most_heap_speedup(double faults, double step_seconds) {
  const double share = faults * kMostFaultSeconds / std::max(step_seconds, 1e-9);
  return share < 1 - 1.0 / 3 ? 1 / (1 - share) : 3;
}

double least_fault_seconds(double faults, double step_seconds) {
  return faults_matter(faults, step_seconds) ? faults * kLeastFaultSeconds : 0;
}

std::optional<double> Certificate::repaid_after(bool with_compiling) const {
  const double saved = baseline_seconds - tuned_seconds;
  if (!(saved > 0)) return std::nullopt;
  return (tuning_seconds + (with_compiling ? compile_seconds : 0)) / saved;
}

std::string Certificate::to_json() const {
  Json list = Json::array();
  for (const CertificateEntry& entry : entries) list.push_back(tune::to_json(entry));
  Json checks = Json::object();
  for (const auto& [check, outcome] : verification) checks[check] = outcome;
  const Json json{
      {"format", kFormat},
      {"version", kVersion},
      {"key", {{"hardware", key.hardware}, {"torch", key.torch}, {"model", key.model}, {"options", key.options}}},
      {"level", level},
      {"created", created},
      {"steps_planned", steps_planned},
      {"step_seconds", tune::to_json(step_seconds)},
      {"step_spread", tune::to_json(step_spread)},
      {"step_faults", tune::to_json(step_faults)},
      {"disturbance", disturbance},
      {"baseline_seconds", tune::to_json(baseline_seconds)},
      {"tuned_seconds", tune::to_json(tuned_seconds)},
      {"speedup", tune::to_json(speedup)},
      {"given_peak_bytes", tune::to_json(given_peak_bytes)},
      {"tuned_peak_bytes", tune::to_json(tuned_peak_bytes)},
      {"tuning_peak_bytes", tune::to_json(tuning_peak_bytes)},
      {"tuning_seconds", tune::to_json(tuning_seconds)},
      {"compile_seconds", tune::to_json(compile_seconds)},
      {"entries", std::move(list)},
      {"verification", std::move(checks)},
      {"events", events}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

Certificate Certificate::from_json(std::string_view text) {
  const Json json = parse(text);
  const Node root(json, "");
  OXY_CHECK(json.is_object() && json.value("format", Json()) == kFormat, InvalidArgument,
            "certificate: the text is no certificate: it does not say \"format\": \"", kFormat, "\".");
  const std::int64_t version = root.at("version").whole();
  OXY_CHECK(version == kVersion, InvalidArgument, "certificate: it is of format ", version,
            ", and this Oxytorch reads ", kVersion, "; measure again.");
  Certificate certificate;
  const Node key = root.at("key");
  certificate.key = {key.at("hardware").text(), key.at("torch").text(), key.at("model").text(),
                     key.at("options").text()};
  certificate.level = root.at("level").text();
  certificate.created = root.at("created").text();
  certificate.steps_planned = root.at("steps_planned").whole();
  certificate.step_seconds = root.at("step_seconds").number();
  certificate.step_spread = root.at("step_spread").number();
  certificate.step_faults = root.at("step_faults").number();
  certificate.disturbance = root.at("disturbance").text();
  certificate.baseline_seconds = root.at("baseline_seconds").number();
  certificate.tuned_seconds = root.at("tuned_seconds").number();
  certificate.speedup = root.at("speedup").interval();
  certificate.given_peak_bytes = root.at("given_peak_bytes").bytes();
  certificate.tuned_peak_bytes = root.at("tuned_peak_bytes").bytes();
  if (json.contains("tuning_peak_bytes")) {  // not of earlier ones
    certificate.tuning_peak_bytes = root.at("tuning_peak_bytes").bytes();
  }
  certificate.tuning_seconds = root.at("tuning_seconds").number();
  certificate.compile_seconds = root.at("compile_seconds").number();
  root.at("entries").each([&](const Node& entry) { certificate.entries.push_back(read_entry(entry)); });
  root.at("verification").each_member([&](const std::string& check, const Node& outcome) {
    certificate.verification[check] = outcome.text();
  });
  root.at("events").each([&](const Node& event) { certificate.events.push_back(event.text()); });
  return certificate;
}

void Certificate::save(const std::string& path) const { write_whole_file(path, {to_json()}); }

Certificate Certificate::load(const std::string& path) {
  std::error_code none;
  OXY_CHECK(std::filesystem::is_regular_file(path, none), NotFound, "there is no certificate at ", in_quotes(path),
            '.');
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  OXY_CHECK(!file.bad() && file.is_open(), Io, "cannot read the certificate ", in_quotes(path),
            "; check that it may be read.");
  try {
    return from_json(text);
  } catch (const Error& error) {
    detail::raise(error.code(), "file ", in_quotes(path), ": ", error.what());
  }
}

}  // namespace oxytorch::tune
