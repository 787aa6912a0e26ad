#include "oxytorch/data/loader_settings.h"

#include <memory>
#include <utility>

namespace oxytorch::data {

LoaderSettings::LoaderSettings(TensorLoader& loader, const PerformanceConfig& config, std::optional<at::Device> device)
    : loader_(&loader), before_(loader.asked()) {
  const auto say = [&](const char* setting, bool is_in_effect, std::string reason, std::string cost = {}) {
    lines_.push_back({setting, is_in_effect, std::move(reason), std::move(cost)});
  };
  if (device && !device->is_cpu() && !loader.device()) {
    loader.set_device(device);
    is_moved_ = true;
    say("device", true, "each batch is copied to " + device->str() + " while the step on the one before it is taken.",
        "two batches are there at once.");
  }
  auto asked = before_;
  if (const auto threads = config.integer("num_workers"); threads && *threads == 0) {
    say("num_workers", false, "this loader makes batches with threads, of which it needs one.");
  } else if (threads) {
    asked.threads = static_cast<int>(*threads);
    say("num_workers", true, "threads = " + std::to_string(*threads) + " of the loader.");
  }
  if (const auto prefetch = config.integer("prefetch")) {
    asked.prefetch = static_cast<int>(*prefetch);
    say("prefetch", true, "prefetch = " + std::to_string(*prefetch) + " of the loader.");
  }
  if (!config.is_auto("pin_memory")) {
    say("pin_memory", loader.is_pinned() == (config.word("pin_memory") == "on"),
        "this loader pins what goes to an accelerator, and nothing else.");
  }
  if (const auto cache = config.word("cache"); cache != "off" && loader.is_stream()) {
    say("cache", false, "the samples of a stream have no numbers by which they would be found again.");
  } else if (cache != "off") {
    asked.cache = std::make_shared<Cache>(CacheOptions{.memory = cache});
    asked.strip_jpegs = true;
    say("cache", true, "cache = " + cache + " of the loader.", "samples as they were read stay in memory.");
  }
  is_changed_ = asked.threads != before_.threads || asked.prefetch != before_.prefetch || asked.cache != before_.cache;
  if (is_changed_) loader.change(asked);
}

LoaderSettings::~LoaderSettings() { revert(); }

void LoaderSettings::revert() {
  if (loader_ == nullptr) return;
  if (is_changed_) loader_->change(before_);
  if (is_moved_) loader_->set_device({});
  loader_ = nullptr;
}

}  // namespace oxytorch::data
