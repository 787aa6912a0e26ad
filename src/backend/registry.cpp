#include "oxytorch/backend/registry.h"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <utility>

#include "backends/cpu/cpu_backend.h"
#include "backends/sim/sim_backend.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"

namespace oxytorch::backend {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "liboxytorch-backend-";
constexpr const char* kSuffix = ".so";
constexpr int kFirstRealScore = 10;

bool valid_name(const char* name) {
  if (name == nullptr || *name == '\0') return false;
  return std::all_of(name, name + std::strlen(name), [](unsigned char c) {
    return std::islower(c) != 0 || std::isdigit(c) != 0 || c == '-' || c == '_';
  });
}

// Clauses C1 to C3, before anything else of the table is read.
void check_table(const oxy_backend* source, const std::string& origin) {
  OXY_CHECK(source != nullptr, InvalidArgument, "the backend from ", origin,
            " gave no table: it does not serve API version ", OXY_BACKEND_API_VERSION,
            "; build it against this version's oxytorch/backend.h.");
  OXY_CHECK(source->api_version == OXY_BACKEND_API_VERSION, InvalidArgument, "the backend from ", origin,
            " was built for API version ", source->api_version, ", this library speaks version ",
            OXY_BACKEND_API_VERSION, "; rebuild it against this version's oxytorch/backend.h.");
  OXY_CHECK(source->size >= OXY_BACKEND_SIZE_V1, InvalidArgument, "the backend from ", origin, " has a table of ",
            source->size, " bytes, version 1 needs at least ", OXY_BACKEND_SIZE_V1,
            "; set size to sizeof(oxy_backend).");
}

void check_slots(const oxy_backend& table, const std::string& origin) {
  OXY_CHECK(valid_name(table.name), InvalidArgument, "the backend from ", origin, " has the name '",
            table.name == nullptr ? "(null)" : table.name, "'; use lower case letters, digits, '-' and '_'.");
  const auto require = [&](bool present, const char* slot) {
    OXY_CHECK(present, InvalidArgument, "backend '", table.name, "' from ", origin, " leaves the required slot '", slot,
              "' NULL; fill it in (oxytorch/backend.h, clause C3).");
  };
  require(table.description != nullptr, "description");
  require(table.score != nullptr, "score");
  require(table.device_properties != nullptr, "device_properties");
  require(table.memory_info != nullptr, "memory_info");
  require(table.alloc != nullptr, "alloc");
  require(table.free != nullptr, "free");
  require(table.copy_async != nullptr, "copy_async");
  require(table.fill_async != nullptr, "fill_async");
  require(table.last_error != nullptr, "last_error");
  const int present = (table.queue_create != nullptr) + (table.queue_destroy != nullptr) +
                      (table.event_record != nullptr) + (table.event_wait != nullptr) +
                      (table.event_destroy != nullptr) + (table.synchronize != nullptr);
  OXY_CHECK(present == 0 || present == 6, InvalidArgument, "backend '", table.name, "' from ", origin, " fills ",
            present, " of the 6 slots of the queue group; fill all or none (oxytorch/backend.h, clause C3).");
}

std::string own_directory() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&available_backends), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code failed;
  const fs::path path = fs::canonical(info.dli_fname, failed);
  return failed ? std::string() : path.parent_path().string();
}

bool is_backend_library(const fs::path& path) {
  const std::string file = path.filename().string();
  return file.starts_with(kPrefix) && file.ends_with(kSuffix);
}

std::vector<std::string> libraries_in(const fs::path& directory) {
  std::vector<std::string> found;
  std::error_code failed;
  for (fs::directory_iterator entry(directory, failed), end; !failed && entry != end; entry.increment(failed)) {
    if (is_backend_library(entry->path())) found.push_back(entry->path().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

Backend::Backend(const oxy_backend& source, std::string origin, oxy_backend_configure_fn configure)
    : origin_(std::move(origin)), configure_(configure) {
  std::memcpy(&table_, &source, std::min<std::size_t>(source.size, sizeof(table_)));
  check_slots(table_, origin_);
  name_ = table_.name;
}

BackendInfo Backend::info() const {
  BackendInfo info;
  info.name = name_;
  info.description = table_.description;
  info.origin = origin_;
  const char* reason = nullptr;
  std::int32_t devices = 0;
  info.score = std::max(0, table_.score(&reason, &devices));
  info.reason = reason == nullptr ? "the backend gives no reason" : reason;
  for (std::int32_t index = 0; info.score > 0 && index < devices; ++index) {
    oxy_device_properties properties{};
    properties.size = sizeof(properties);
    const oxy_status status = table_.device_properties(index, &properties);
    if (status != OXY_OK || properties.name == nullptr) {
      info.reason += " Device " + std::to_string(index) + " is left out: " + table_.last_error();
      continue;
    }
    const auto text = [](const char* value) { return std::string(value == nullptr ? "" : value); };
    info.devices.push_back(
        {text(properties.name), text(properties.architecture), text(properties.torch_device), properties.memory_bytes});
  }
  return info;
}

struct Registry::State {
  struct Library {
    void* handle;
    const Backend* backend;
  };
  mutable std::recursive_mutex mutex;  // a backend's entry function may itself ask the registry
  std::vector<std::unique_ptr<const Backend>> backends;
  std::vector<Library> libraries;
  std::vector<Problem> problems;
  bool discovered = false;
};

// Neither the registry nor what it loaded is ever destroyed: worker threads of backends outlive static destructors.
Registry& Registry::instance() {
  static Registry* const registry = new Registry();
  return *registry;
}

Registry::Registry() : state_(new State()) {
  add(cpu_backend_table(), "built in");
  add(sim_backend_table(), "built in", &sim_backend_configure);
}

const Backend& Registry::add(const oxy_backend* table, const std::string& origin, oxy_backend_configure_fn configure) {
  check_table(table, origin);
  std::unique_ptr<const Backend> made(new Backend(*table, origin, configure));
  const std::lock_guard lock(state_->mutex);
  for (const auto& other : state_->backends) {
    OXY_CHECK(other->name() != made->name(), InvalidState, "a backend named '", made->name(),
              "' is registered already (", other->origin(), "); the one from ", origin,
              " is refused. Give it another name.");
  }
  state_->backends.push_back(std::move(made));
  return *state_->backends.back();
}

const Backend& Registry::load(const std::string& path) {
  std::error_code failed;
  const fs::path file = fs::canonical(path, failed);
  OXY_CHECK(!failed && fs::is_regular_file(file, failed), NotFound, "there is no backend library '", path,
            "'; give the path of a ", kPrefix, "<name>", kSuffix, ".");
  const std::lock_guard lock(state_->mutex);
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* why = dlerror();
    oxytorch::detail::raise(ErrorCode::NotSupported, "cannot load the backend library '", file.string(),
                            "': ", why == nullptr ? "the loader gives no reason" : why);
  }
  for (const State::Library& library : state_->libraries) {
    if (library.handle == handle) return *library.backend;
  }
  const auto entry = reinterpret_cast<oxy_backend_entry_fn>(dlsym(handle, OXY_BACKEND_ENTRY));
  OXY_CHECK(entry != nullptr, NotSupported, "the library '", file.string(), "' exports no '", OXY_BACKEND_ENTRY,
            "', so it is no backend; put OXY_BACKEND_EXPORT before the definition of that function.");
  const auto configure = reinterpret_cast<oxy_backend_configure_fn>(dlsym(handle, OXY_BACKEND_CONFIGURE));
  const Backend& added = add(entry(OXY_BACKEND_API_VERSION), file.string(), configure);
  state_->libraries.push_back({handle, &added});
  log(LogLevel::Info, "loaded backend '" + added.name() + "' from " + file.string(), "backend");
  return added;
}

void Registry::discover() {
  const std::lock_guard lock(state_->mutex);
  if (std::exchange(state_->discovered, true)) return;
  std::vector<std::string> paths;
  const auto append = [&paths](const std::vector<std::string>& more) {
    paths.insert(paths.end(), more.begin(), more.end());
  };
  if (const char* list = std::getenv("OXYTORCH_BACKEND_PATH"); list != nullptr) {
    std::istringstream entries(list);
    for (std::string entry; std::getline(entries, entry, ':');) {
      if (entry.empty()) continue;
      std::error_code failed;
      if (fs::is_directory(entry, failed)) {
        append(libraries_in(entry));
      } else {
        paths.push_back(entry);
      }
    }
  }
  if (const std::string beside = own_directory(); !beside.empty()) append(libraries_in(beside));
  for (const std::string& path : paths) {
    try {
      load(path);
    } catch (const Error& error) {
      state_->problems.push_back({path, error.what()});
      log(LogLevel::Warn, error.what(), "backend");
    }
  }
}

std::vector<const Backend*> Registry::backends() const {
  std::vector<const Backend*> all;
  {
    const std::lock_guard lock(state_->mutex);
    for (const auto& backend : state_->backends) all.push_back(backend.get());
  }
  const auto score = [](const Backend* backend) {
    const char* reason = nullptr;
    std::int32_t devices = 0;
    return backend->table().score(&reason, &devices);
  };
  std::vector<std::pair<int, const Backend*>> ranked;
  for (const Backend* backend : all) ranked.emplace_back(-score(backend), backend);
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second->name() < b.second->name();
  });
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = ranked[i].second;
  return all;
}

const Backend& Registry::find(const std::string& name) const {
  const std::lock_guard lock(state_->mutex);
  std::string known;
  for (const auto& backend : state_->backends) {
    if (backend->name() == name) return *backend;
    known += (known.empty() ? "" : ", ") + backend->name();
  }
  oxytorch::detail::raise(ErrorCode::InvalidArgument, "there is no backend '", name, "'; there are: ", known,
                          ". Put the directory of another into OXYTORCH_BACKEND_PATH, or load it by path.");
}

std::vector<Problem> Registry::problems() const {
  const std::lock_guard lock(state_->mutex);
  return state_->problems;
}

std::vector<BackendInfo> available_backends() {
  Registry::instance().discover();
  std::vector<BackendInfo> all;
  for (const Backend* backend : Registry::instance().backends()) all.push_back(backend->info());
  return all;
}

const Backend& backend(const std::string& name) {
  Registry::instance().discover();
  return Registry::instance().find(name);
}

const Backend& best() {
  Registry::instance().discover();
  const Backend* first = Registry::instance().backends().front();
  const char* reason = nullptr;
  std::int32_t devices = 0;
  return first->table().score(&reason, &devices) >= kFirstRealScore ? *first : Registry::instance().find("cpu");
}

}  // namespace oxytorch::backend
