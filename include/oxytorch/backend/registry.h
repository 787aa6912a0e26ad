/// Which device backends this process has, and how good each is here.
///
/// Three ways in, one contract (`oxytorch/backend.h`): built in (`cpu`, `sim`), found in a directory, or loaded by path
/// (the Python entry points end there). A backend is never unloaded. Everything here may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "oxytorch/api.h"
#include "oxytorch/backend.h"

namespace oxytorch::backend {

/// One device, as its backend describes it.
struct DeviceInfo {
  std::string name;
  std::string architecture;
  std::string torch_device;  ///< type of the torch device this is; empty where torch does not know it
  std::uint64_t memory_bytes = 0;
};

/// One backend, as `available_backends()` lists it.
struct BackendInfo {
  std::string name;
  std::string description;
  int score = 0;                    ///< 0: unusable here
  std::string reason;               ///< one sentence on the score
  std::vector<DeviceInfo> devices;  ///< empty with a score of 0
  std::string origin;               ///< "built in" or the path of the library
};

/// A library that was found and refused.
struct Problem {
  std::string path;
  std::string reason;
};

/// A registered backend. The registry owns it for the life of the process; copies of the pointer stay valid.
class OXY_API Backend {
 public:
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  /// The table, padded: slots behind the backend's own `size` are NULL, so every member may be read.
  [[nodiscard]] const oxy_backend& table() const noexcept { return table_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::string& origin() const noexcept { return origin_; }
  /// Whether the device has queues and events of its own; without, every call is done when it returns.
  [[nodiscard]] bool has_queues() const noexcept { return table_.queue_create != nullptr; }
  /// Takes settings as text; NULL where the backend has none.
  [[nodiscard]] oxy_backend_configure_fn configure() const noexcept { return configure_; }
  /// Asks the backend now: score, reason, devices. A device that cannot be described is left out, and `reason` says so.
  [[nodiscard]] BackendInfo info() const;

 private:
  friend class Registry;
  Backend(const oxy_backend& source, std::string origin, oxy_backend_configure_fn configure);

  oxy_backend table_{};
  std::string name_;
  std::string origin_;
  oxy_backend_configure_fn configure_;
};

/// The backends of this process.
class OXY_API Registry {
 public:
  /// The one registry; the built-in backends are in it from the start.
  static Registry& instance();

  /// Registers a table whose storage lives as long as the process, with a name of where it came from.
  /// Error(InvalidArgument) where the table breaks the contract (wrong version, too small, an empty required slot, a
  /// bad name), Error(InvalidState) where the name is taken.
  const Backend& add(const oxy_backend* table, const std::string& origin, oxy_backend_configure_fn configure = nullptr);

  /// Loads one library. The same file again gives the same backend. Error(NotFound) where there is no such file,
  /// Error(NotSupported) where it cannot be loaded or exports no backend, otherwise as `add`.
  const Backend& load(const std::string& path);

  /// Loads what `OXYTORCH_BACKEND_PATH` names (directories or files, separated by colons) and every
  /// `liboxytorch-backend-*.so` beside this library, once per process. What is refused
  /// goes to `problems()` and, as a warning, to the log.
  void discover();

  /// All backends, best score first, equal scores by name.
  [[nodiscard]] std::vector<const Backend*> backends() const;
  /// The backend of that name. Error(InvalidArgument), with the names there are, where none has it.
  [[nodiscard]] const Backend& find(const std::string& name) const;
  /// The libraries that discovery refused, in the order it met them.
  [[nodiscard]] std::vector<Problem> problems() const;

 private:
  Registry();
  ~Registry() = delete;
  struct State;
  State* state_;
};

/// Every backend after discovery, best first; those unusable here too, with score 0 and the reason.
OXY_API std::vector<BackendInfo> available_backends();
/// The backend of that name after discovery, usable or not; Error(InvalidArgument) where there is none.
OXY_API const Backend& backend(const std::string& name);
/// The usable backend with the best score that is not simulated. `cpu` is always there.
OXY_API const Backend& best();

}  // namespace oxytorch::backend
