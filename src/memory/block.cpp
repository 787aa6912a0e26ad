#include "oxytorch/memory/block.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace oxytorch::memory {
namespace {

std::mutex mutex;
/// Plans that say something of a block, the earliest first.
struct Said {
  const PlannedBlocks* plan;
  BlockAction action;
  std::shared_ptr<PackSavedTensors> packed;
};
std::map<std::string, std::vector<Said>, std::less<>> blocks;

/// From what keeps the least to what keeps the most.
int rank(BlockAction action) {
  switch (action) {
    case BlockAction::Full: return 0;
    case BlockAction::File: return 1;
    case BlockAction::Int8: return 2;
    case BlockAction::BFloat16: return 3;
    case BlockAction::Selective: return 4;
    case BlockAction::Lossless: return 5;
    case BlockAction::Keep: return 6;
  }
  return 6;
}

}  // namespace

BlockAction action_of(std::string_view name) { return detail::planned(name).action; }

detail::Planned detail::planned(std::string_view name) {
  const std::lock_guard lock(mutex);
  const auto found = blocks.find(name);
  if (found == blocks.end()) return {};
  const auto least =
      std::min_element(found->second.begin(), found->second.end(),
                       [](const Said& one, const Said& other) { return rank(one.action) < rank(other.action); });
  return {least->action, least->packed};
}

PlannedBlocks::PlannedBlocks(BlockChoice choice) : choice_(std::move(choice)) {
  std::map<std::string, Said> said;
  for (std::size_t i = 0; i < kBlockActions; ++i) {
    const auto action = static_cast<BlockAction>(i);
    const auto format = format_of(action);
    if (choice_[action].empty()) continue;
    const auto packed = format ? std::make_shared<PackSavedTensors>(*format) : nullptr;
    if (packed) packed_.push_back(packed);
    for (const auto& name : choice_[action]) said[name] = {this, action, packed};
  }
  const std::lock_guard lock(mutex);
  for (auto& [name, one] : said) blocks[name].push_back(std::move(one));
}

PlannedBlocks::~PlannedBlocks() {
  const std::lock_guard lock(mutex);
  for (auto each = blocks.begin(); each != blocks.end();) {
    std::erase_if(each->second, [this](const Said& one) { return one.plan == this; });
    each = each->second.empty() ? blocks.erase(each) : std::next(each);
  }
}

double PlannedBlocks::relative_error() const {
  double most = 0;
  for (const auto& one : packed_) most = std::max(most, one->report().relative_error);
  return most;
}

}  // namespace oxytorch::memory
