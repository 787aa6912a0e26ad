#include "memory/relaxation.h"

#include <algorithm>
#include <utility>

#include "memory/block_search.h"

namespace oxytorch::memory {
namespace {

constexpr int kPatience = 8;  // rounds without a better bound after which prices move half as far

}  // namespace

Relaxation::Relaxation(std::vector<std::array<double, kBlockActions>> seconds, const std::vector<Span>& spans,
                       std::int64_t budget)
    : seconds_(std::move(seconds)) {
  const auto whole = static_cast<double>(std::max<std::int64_t>(budget, 1));
  for (const auto& span : spans) {
    const auto most_over = static_cast<double>(most_live(span) - budget) / whole;
    if (most_over <= 0) continue;  // whatever is chosen
    Row row{static_cast<double>(span.live - budget) / whole, {}, 0};
    const auto entry = [&](std::size_t block) -> auto& {
      const auto known =
          std::find_if(row.lowered.begin(), row.lowered.end(), [&](auto& e) { return e.first == block; });
      if (known != row.lowered.end()) return known->second;
      return row.lowered.emplace_back(block, std::array<double, kBlockActions>{}).second;
    };
    for (const auto& [block, bytes] : span.lowered) {
      auto& lowered = entry(block);
      for (std::size_t i = 0; i < kBlockActions; ++i) lowered[i] = static_cast<double>(bytes[i]) / whole;
    }
    if (span.only_with) {  // an action with which it does not count lowers it by all that it can be over
      auto& lowered = entry(span.only_with->block);
      for (std::size_t i = 0; i < kBlockActions; ++i) {
        if (!span.only_with->counts[i]) lowered[i] += most_over;
      }
    }
    rows_.push_back(std::move(row));
  }
}

double Relaxation::left_over(const Row& row, const std::vector<BlockAction>& choice) {
  double over = row.over;
  for (const auto& [block, lowered] : row.lowered) over -= lowered[index_of(choice[block])];
  return over;
}

std::vector<BlockAction> Relaxation::next(double reached) {
  auto costs = seconds_;
  double value = 0;
  for (const auto& row : rows_) {
    if (row.price == 0) continue;
    value += row.price * row.over;
    for (const auto& [block, lowered] : row.lowered) {
      for (std::size_t i = 0; i < kBlockActions; ++i) costs[block][i] -= row.price * lowered[i];
    }
  }
  std::vector<BlockAction> choice;
  for (const auto& cost : costs) {
    const auto* const least = std::min_element(cost.begin(), cost.end());
    value += *least;
    choice.push_back(static_cast<BlockAction>(least - cost.begin()));
  }
  if (rounds_without_gain_++; value > bound_) {
    bound_ = value;
    rounds_without_gain_ = 0;
  } else if (rounds_without_gain_ >= kPatience) {
    step_scale_ /= 2;
    rounds_without_gain_ = 0;
  }
  std::vector<double> over;
  double square = 0;
  for (const auto& row : rows_) {
    over.push_back(left_over(row, choice));
    if (row.price > 0 || over.back() > 0) square += over.back() * over.back();
  }
  const double length = square > 0 ? step_scale_ * std::max(reached - value, 0.0) / square : 0;
  for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i].price = std::max(0.0, rows_[i].price + length * over[i]);
  return choice;
}

}  // namespace oxytorch::memory
