/// Certificate: what was tried on a training step, what pays, how sure that is, and how the numbers were checked.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/statistics.h"
#include "oxytorch/tune/kind.h"

namespace oxytorch::tune {

/// Accepted: active. Rejected: does not pay (measured). Refused: the verifier found other numbers. Failed: could not
/// be applied or threw; the original is active. Skipped: does not apply here, is not allowed at this level, or cannot
/// be repaid. RolledBack: was active and was taken back during the run.
enum class Status { Accepted, Rejected, Refused, Failed, Skipped, RolledBack };
/// "accepted", "rejected", "refused", "failed", "skipped", "rolled back".
OXY_API std::string_view name(Status status) noexcept;
/// Error(InvalidArgument) with the nearest word for another text.
OXY_API Status parse_status(std::string_view text);

struct CertificateEntry {
  std::string strategy;
  Kind kind = Kind::Exact;
  Status status = Status::Skipped;
  std::string reason;                    ///< one sentence, with the figures
  std::string cost = {};                 ///< what it costs, one sentence; empty where nothing
  std::optional<Interval> speedup = {};  ///< without over with, where measured
  int pairs = 0;
  double cost_seconds = 0;                      ///< one-off
  std::optional<double> break_even_steps = {};  ///< steps after which the one-off cost is repaid
  std::map<std::string, double> evidence = {};  ///< figures of the verifier: "gradient_error", "steps_identical" ...
  bool operator==(const CertificateEntry&) const = default;
};

/// What a certificate holds for; another key means that it must be measured again.
struct CertificateKey {
  std::string hardware;  ///< processor, cores in use, instruction sets, accelerators
  std::string torch;     ///< version and build
  std::string model;     ///< hash of the model's structure: module classes, shapes, dtypes, optimizer, batch shapes
  std::string options;   ///< level and the settings that decide what may be tried
  bool operator==(const CertificateKey&) const = default;
  /// 16 hexadecimal digits, the same on every machine.
  [[nodiscard]] OXY_API std::string digest() const;
};

/// The processor's part of CertificateKey::hardware: its name, the cores in use and what it multiplies in hardware. A
/// caller adds its accelerators. `root` as in oxytorch/system.h.
OXY_API std::string hardware_key(const std::string& root = "/");

/// Most that a step can gain where the memory that it frees is kept for the next one, by its page faults.
[[nodiscard]] OXY_API double most_heap_speedup(double faults, double step_seconds);
/// The least that so many page faults of a step take; 0 where they could not be seen in it.
[[nodiscard]] OXY_API double least_fault_seconds(double faults, double step_seconds);

struct OXY_API Certificate {
  CertificateKey key;
  std::string level;
  std::string created;  ///< UTC, ISO 8601
  std::int64_t steps_planned = 0;
  /// The step as given before anything was tried, as a process that is not tuned takes it: median seconds, what it
  /// varied by as a share, and page faults.
  double step_seconds = 0, step_spread = 0, step_faults = 0;
  std::string disturbance;          ///< what other programs did meanwhile; empty where the machine was quiet
  double baseline_seconds = 0;      ///< median step as given
  double tuned_seconds = 0;         ///< median step with all that was accepted
  std::optional<Interval> speedup;  ///< all together, measured at the end in a paired test of its own
  /// The most that tensors take in a step, model, optimizer and batch included, as given and with all that was
  /// accepted, and the most that they took while tuning, where timed steps are not counted; empty where it was not
  /// measured (on another device than a CPU).
  std::optional<std::int64_t> given_peak_bytes, tuned_peak_bytes, tuning_peak_bytes;
  double tuning_seconds = 0;   ///< everything but compiling
  double compile_seconds = 0;  ///< of what takes a one-off cost: that cost, also anew, and its trials
  std::vector<CertificateEntry> entries;
  std::map<std::string, std::string> verification;  ///< how the whole was verified: check -> outcome
  std::vector<std::string> events;  ///< what happened since: reused, canary, rolled back; each with its step

  bool operator==(const Certificate&) const = default;

  [[nodiscard]] std::vector<std::string> accepted() const;
  /// Tells what a step takes after the trials with nothing active: seconds and page faults. Where it faults others than
  /// before them, the heap lies otherwise than in a process that was not tuned: baseline and speedup are then by
  /// `step_seconds`, with an event that says so. Without anything accepted, `tuned_seconds` is what a step takes now.
  void relate(double seconds, double faults);
  /// Steps after which tuning, compiling included or apart, has been repaid; empty where nothing is saved.
  [[nodiscard]] std::optional<double> repaid_after(bool with_compiling = true) const;

  /// The same bytes for the same certificate; from_json() reads it back equal.
  [[nodiscard]] std::string to_json() const;
  /// Error(InvalidArgument) that says where and what, for text that is no certificate or of a newer format.
  static Certificate from_json(std::string_view text);
  /// Writes whole or not at all. Error(NotFound) where its folder is missing, Error(Io).
  void save(const std::string& path) const;
  /// Error(NotFound), Error(Io), or what from_json() throws, with the path.
  static Certificate load(const std::string& path);

  [[nodiscard]] std::string to_text() const;  ///< a table for the terminal, 120 columns
  [[nodiscard]] std::string to_html() const;  ///< a page that needs no network, with intervals drawn
};

/// Where certificates are remembered: $OXYTORCH_CACHE ("off": nowhere), or $XDG_CACHE_HOME/oxytorch, or
/// ~/.cache/oxytorch; one JSON file a key. A file that cannot be read is no certificate (a warning is logged), never an
/// error. Any number of processes may share a folder: a reader finds a whole certificate, of two writers the last.
class OXY_API CertificateStore {
 public:
  explicit CertificateStore(std::string folder = "");
  [[nodiscard]] std::optional<Certificate> find(const CertificateKey& key) const;
  /// Makes the folder where it is missing. Error(Io); Error(InvalidState) for one that was measured on a busy machine.
  void put(const Certificate& certificate) const;
  /// Nothing where there is none. Error(Io).
  void forget(const CertificateKey& key) const;
  /// put() and forget() for a run that goes on without them: empty, or a sentence that says why not. Never throw. A
  /// certificate of a run in which nothing could be tried is not stored.
  [[nodiscard]] std::string try_put(const Certificate& certificate) const noexcept;
  [[nodiscard]] std::string try_forget(const CertificateKey& key) const noexcept;
  [[nodiscard]] const std::string& folder() const noexcept { return folder_; }

 private:
  std::string folder_;
};

}  // namespace oxytorch::tune
