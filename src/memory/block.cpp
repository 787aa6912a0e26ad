#include "oxytorch/memory/block.h"

#include <array>
#include <map>
#include <mutex>
#include <utility>

namespace oxytorch::memory {
namespace {

std::mutex mutex;
/// How many plans say so, by Recompute.
std::map<std::string, std::array<int, kRecomputes>, std::less<>> blocks;

void add(const std::vector<std::string>& names, Recompute recompute, int count) {
  for (const auto& name : names) {
    auto& of_block = blocks[name];
    of_block[static_cast<std::size_t>(recompute)] += count;
    if (of_block == std::array<int, kRecomputes>{}) blocks.erase(name);
  }
}

void add(const RecomputeChoice& choice, int count) {
  const std::lock_guard lock(mutex);
  add(choice.selective, Recompute::Selective, count);
  add(choice.full, Recompute::Full, count);
}

}  // namespace

Recompute recompute_of(std::string_view name) {
  const std::lock_guard lock(mutex);
  const auto found = blocks.find(name);
  if (found == blocks.end()) return Recompute::Nothing;
  return found->second[static_cast<std::size_t>(Recompute::Full)] > 0 ? Recompute::Full : Recompute::Selective;
}

RecomputeBlocks::RecomputeBlocks(RecomputeChoice choice) : choice_(std::move(choice)) { add(choice_, 1); }

RecomputeBlocks::~RecomputeBlocks() { add(choice_, -1); }

}  // namespace oxytorch::memory
