#include "oxytorch/memory/block.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace oxytorch::memory {
namespace {

std::mutex mutex;
std::map<std::string, int, std::less<>> run_again;  // how many plans say so

}  // namespace

bool is_run_again(std::string_view name) {
  const std::lock_guard lock(mutex);
  return run_again.find(name) != run_again.end();
}

RunAgain::RunAgain(std::vector<std::string> names) : names_(std::move(names)) {
  const std::lock_guard lock(mutex);
  for (const auto& name : names_) ++run_again[name];
}

RunAgain::~RunAgain() {
  const std::lock_guard lock(mutex);
  for (const auto& name : names_) {
    const auto found = run_again.find(name);
    if (--found->second == 0) run_again.erase(found);
  }
}

}  // namespace oxytorch::memory
