#include "oxytorch/memory/step_tape.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

#include "base/spelling.h"
#include "memory/block_search.h"
#include "oxytorch/error.h"

namespace oxytorch::memory {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

struct Block {
  std::int64_t taken = 0, given_back = kNever, bytes = 0;
};

void set_median(double BlockCall::*member, StepTape& last, const std::vector<StepTape>& others) {
  for (std::size_t i = 0; i < last.calls.size(); ++i) {
    std::vector<double> seconds{last.calls[i].*member};
    for (const auto& other : others) seconds.push_back(other.calls[i].*member);
    const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>((seconds.size() - 1) / 2);
    std::nth_element(seconds.begin(), middle, seconds.end());
    last.calls[i].*member = *middle;
  }
}

bool have_same_calls(const StepTape& one, const StepTape& other) {
  return one.names == other.names &&
         std::equal(one.calls.begin(), one.calls.end(), other.calls.begin(), other.calls.end(),
                    [](const BlockCall& a, const BlockCall& b) { return a.block == b.block; });
}

}  // namespace

std::optional<SavedFormat> format_of(BlockAction action) noexcept {
  switch (action) {
    case BlockAction::Lossless: return SavedFormat::Lossless;
    case BlockAction::BFloat16: return SavedFormat::BFloat16;
    case BlockAction::Int8: return SavedFormat::Int8;
    case BlockAction::File: return SavedFormat::File;
    default: return std::nullopt;
  }
}

std::string_view name(BlockAction action) noexcept {
  if (const auto format = format_of(action)) return name(*format);
  return action == BlockAction::Selective ? "selective" : action == BlockAction::Full ? "full" : "keep";
}

BlockAction parse_block_action(std::string_view word) {
  for (std::size_t i = 0; i < kBlockActions; ++i) {
    if (word == name(static_cast<BlockAction>(i))) return static_cast<BlockAction>(i);
  }
  oxytorch::detail::raise(ErrorCode::InvalidArgument, "the action for a block is ", in_quotes(std::string(word)),
                          ", expected 'keep', 'selective', 'full', 'lossless', 'bf16', 'int8' or 'file'.");
}

BlockChoice::BlockChoice(BlockAction action, std::vector<std::string> names) {
  if (action != BlockAction::Keep) names_[index_of(action)] = std::move(names);
}

BlockChoice& BlockChoice::add(BlockAction action, std::string name) {
  if (action != BlockAction::Keep) names_[index_of(action)].push_back(std::move(name));
  return *this;
}

BlockAction BlockChoice::action_of(std::string_view name) const {
  for (std::size_t i = 0; i < kBlockActions; ++i) {
    if (std::find(names_[i].begin(), names_[i].end(), name) != names_[i].end()) return static_cast<BlockAction>(i);
  }
  return BlockAction::Keep;
}

bool BlockChoice::empty() const noexcept {
  return std::all_of(names_.begin(), names_.end(), [](const auto& names) { return names.empty(); });
}

StepTape StepTape::of(const Timeline& timeline, const std::vector<std::string>& blocks) {
  StepTape tape;
  tape.names = blocks;
  std::unordered_map<int, std::size_t> block_of;  // by region
  for (std::size_t i = 0; i < timeline.names.size(); ++i) {
    const auto found = std::find(blocks.begin(), blocks.end(), timeline.names[i]);
    if (found != blocks.end()) block_of[static_cast<int>(i)] = static_cast<std::size_t>(found - blocks.begin());
  }
  const auto& events = timeline.events;
  std::vector<Block> taken;
  std::unordered_map<std::uint64_t, std::size_t> at_address;
  std::vector<std::vector<std::int64_t>> backward(blocks.size());  // moments at which backward comes to a block
  std::vector<std::int64_t> turns;                                 // those at which it comes to another block
  int previous = -1;                                               // region that backward was in
  for (std::size_t i = 0; i < events.size(); ++i) {
    const auto& event = events[i];
    tape.live.push_back(event.live_bytes);
    if (event.bytes >= 0) {
      at_address[event.address] = taken.size();
      taken.push_back({static_cast<std::int64_t>(i), kNever, event.bytes});
      const auto block = block_of.find(event.region);
      if (!event.in_backward || block == block_of.end()) continue;
      auto& moments = backward[block->second];
      if (event.region != previous || moments.empty()) {
        moments.push_back(static_cast<std::int64_t>(i));
        turns.push_back(static_cast<std::int64_t>(i));
      }
      previous = event.region;
    } else if (const auto found = at_address.find(event.address); found != at_address.end()) {
      taken[found->second].given_back = static_cast<std::int64_t>(i);
      at_address.erase(found);
    }
  }
  if (tape.live.empty()) tape.live.push_back(0);
  const auto live_before = [&](std::int64_t moment) {
    return moment <= 0 ? 0 : tape.live[static_cast<std::size_t>(moment) - 1];
  };
  // The block at an address at a moment.
  std::unordered_map<std::uint64_t, std::vector<const Block*>> by_address;
  for (const auto& each : taken) by_address[events[static_cast<std::size_t>(each.taken)].address].push_back(&each);
  const auto at = [&](std::uint64_t address, std::int64_t moment) -> const Block* {
    const auto found = by_address.find(address);
    if (found == by_address.end()) return nullptr;
    for (const auto* each : found->second) {
      if (each->taken < moment && moment <= each->given_back) return each;
    }
    return nullptr;
  };
  // A block that is called several times: backward comes to its last call first. A call that shares its moment with a
  // later one counts as given back too early, on the safe side.
  const auto begins_backward = [&](std::size_t block, std::int64_t forward_end) {
    const auto& moments = backward[block];
    std::vector<std::int64_t> open;
    auto next = moments.begin();
    const auto come_to = [&](std::int64_t until) {
      for (; next != moments.end() && *next < until; ++next) {
        if (open.empty()) continue;
        if (open.back() == forward_end) return *next;
        open.pop_back();
      }
      return kNever;
    };
    for (const auto& mark : timeline.marks) {
      const auto found = block_of.find(mark.region);
      if (mark.begins || mark.in_backward || found == block_of.end() || found->second != block) continue;
      if (const auto moment = come_to(mark.event); moment != kNever) return moment;
      open.push_back(mark.event);
    }
    if (const auto moment = come_to(kNever); moment != kNever) return moment;
    const auto first = std::lower_bound(moments.begin(), moments.end(), forward_end);
    return first == moments.end() ? kNever : *first;
  };
  std::vector<std::vector<const Block*>> inputs_of, outputs_of;  // of each call
  for (std::size_t begin = 0; begin < timeline.marks.size(); ++begin) {
    const auto& entered = timeline.marks[begin];
    const auto block = block_of.find(entered.region);
    if (!entered.begins || entered.in_backward || block == block_of.end()) continue;
    const auto end =
        std::find_if(timeline.marks.begin() + static_cast<std::ptrdiff_t>(begin), timeline.marks.end(),
                     [&](const RegionMark& mark) { return !mark.begins && mark.region == entered.region; });
    if (end == timeline.marks.end()) continue;
    BlockCall call;
    call.block = block->second;
    call.forward_begin = entered.event;
    call.forward_end = end->event;
    call.seconds = static_cast<double>(end->time_ns - entered.time_ns) * 1e-9;
    call.backward_begin = begins_backward(call.block, call.forward_end);
    if (call.backward_begin == kNever) continue;  // it does not come by
    const auto turn = std::upper_bound(turns.begin(), turns.end(), call.backward_begin);
    call.backward_end = turn == turns.end() ? static_cast<std::int64_t>(events.size()) : *turn;
    const auto peak_between = [&](std::int64_t from, std::int64_t until) {
      const auto highest = std::max_element(tape.live.begin() + from, tape.live.begin() + until);
      return highest == tape.live.begin() + until ? 0 : std::max<std::int64_t>(*highest - live_before(from), 0);
    };
    call.forward_peak = peak_between(call.forward_begin, call.forward_end);
    call.backward_peak = peak_between(call.backward_begin, call.backward_end);
    auto& outputs = outputs_of.emplace_back();
    for (const auto address : end->addresses) outputs.push_back(at(address, call.forward_end));
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const auto* output = outputs[i];
      if (output == nullptr || output->given_back < call.backward_begin || output->given_back == kNever) continue;
      call.kept_outputs.push_back({i, call.backward_begin, output->bytes});
    }
    for (const auto& each : taken) {
      const bool is_output = std::find(outputs.begin(), outputs.end(), &each) != outputs.end();
      if (call.forward_begin <= each.taken && each.taken < call.forward_end && !is_output &&
          each.given_back >= call.backward_begin && each.given_back != kNever)
        call.saved_bytes += each.bytes;
    }
    auto& inputs = inputs_of.emplace_back();
    for (std::size_t i = 0; i < entered.addresses.size(); ++i) {
      const auto* input = inputs.emplace_back(at(entered.addresses[i], call.forward_begin));
      if (input != nullptr && input->given_back < call.backward_begin)
        call.held.push_back({i, std::max(input->given_back, call.forward_end), input->bytes});
    }
    tape.calls.push_back(std::move(call));
  }
  for (std::size_t i = 0; i < tape.calls.size(); ++i) {
    for (auto& kept : tape.calls[i].kept_outputs) {
      std::int64_t last = -1;
      for (std::size_t j = 0; j < tape.calls.size(); ++j) {
        const auto& inputs = inputs_of[j];
        if (std::find(inputs.begin(), inputs.end(), outputs_of[i][kept.output]) != inputs.end()) {
          last = std::max(last, tape.calls[j].backward_begin);
        }
      }
      if (last >= 0) kept.from = std::min(kept.from, last);
    }
  }
  for (const auto& [region, time_ns] : timeline.overhead_ns) {
    const auto block = block_of.find(region);
    if (block == block_of.end()) continue;
    const auto first = std::find_if(tape.calls.begin(), tape.calls.end(),
                                    [&](const BlockCall& call) { return call.block == block->second; });
    if (first != tape.calls.end()) first->overhead_seconds = static_cast<double>(time_ns) * 1e-9;
  }
  return tape;
}

StepTape StepTape::steady(std::vector<StepTape> recordings) {
  OXY_CHECK(!recordings.empty(), InvalidArgument, "there is no recording of a step. Give at least one.");
  StepTape last = std::move(recordings.back());
  recordings.pop_back();
  std::erase_if(recordings, [&](const StepTape& other) { return !have_same_calls(last, other); });
  set_median(&BlockCall::seconds, last, recordings);
  set_median(&BlockCall::overhead_seconds, last, recordings);
  return last;
}

void StepTape::add(BlockAction action, const StepTape& recording) {
  if (!have_same_calls(*this, recording)) return;
  const auto has = [](const std::vector<BlockCall::Held>& inputs, std::size_t input) {
    return std::any_of(inputs.begin(), inputs.end(), [&](const auto& held) { return held.input == input; });
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const auto& found = recording.calls[i];
    BlockCall::Under under{found.saved_bytes, found.backward_peak, found.overhead_seconds};
    for (const auto& held : calls[i].held) {
      if (!has(found.held, held.input)) under.held.push_back(held);
    }
    for (const auto& given_back : found.held) {
      if (!has(calls[i].held, given_back.input)) under.released_bytes += given_back.bytes;
    }
    for (const auto& kept : calls[i].kept_outputs) {
      const auto is_same = [&](const BlockCall::KeptOutput& other) { return other.output == kept.output; };
      if (std::none_of(found.kept_outputs.begin(), found.kept_outputs.end(), is_same)) under.released.push_back(kept);
    }
    calls[i].under[index_of(action)] = std::move(under);
  }
}

bool StepTape::has(BlockAction action) const {
  return std::all_of(calls.begin(), calls.end(), [&](const auto& call) { return call.under[index_of(action)]; });
}

std::int64_t StepTape::peak(const std::vector<BlockAction>& choice) const { return peak_of(spans(), choice); }

double StepTape::seconds(const std::vector<BlockAction>& choice) const {
  const auto each = seconds();
  double all = 0;
  for (std::size_t i = 0; i < each.size(); ++i) all += each[i][static_cast<std::size_t>(choice[i])];
  return all;
}

std::vector<std::array<double, kBlockActions>> StepTape::seconds() const {
  std::vector<std::array<double, kBlockActions>> found(names.size());
  std::vector<std::array<bool, kBlockActions>> saves(names.size());
  for (const auto& call : calls) {
    auto& of_block = found[call.block];
    of_block[index_of(BlockAction::Full)] += call.seconds;
    for (const auto action : kRecordedActions) {
      const auto& under = call.under[index_of(action)];
      of_block[index_of(action)] += under ? under->seconds : std::numeric_limits<double>::infinity();
      if (under && (under->saved_bytes - under->released_bytes < call.saved_bytes || !under->released.empty())) {
        saves[call.block][index_of(action)] = true;
      }
    }
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (const auto action : kRecordedActions) {
      if (!saves[i][index_of(action)]) found[i][index_of(action)] = std::numeric_limits<double>::infinity();
    }
  }
  return found;
}

}  // namespace oxytorch::memory
