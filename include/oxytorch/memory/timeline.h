/// What a meter records of a step. Knows no torch.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace oxytorch::memory {

/// Memory that a tensor took or gave back.
struct BlockEvent {
  std::int64_t time_ns = 0;     ///< since the meter began
  std::uint64_t address = 0;    ///< until it is given back, that of no other
  std::int64_t bytes = 0;       ///< below zero where it was given back
  std::int64_t live_bytes = 0;  ///< after it
  int phase = -1;               ///< index into Timeline::names; -1: none
  int region = -1;              ///< index into Timeline::names; -1: none
  int site = -1;                ///< index into Timeline::sites; -1: not recorded
  bool in_backward = false;     ///< taken by a node of the graph
};

/// Where a region of a model begins or ends.
struct RegionMark {
  std::int64_t event = 0;  ///< of the events, those before this one came before
  std::int64_t time_ns = 0;
  int region = -1;
  bool begins = false;
  bool in_backward = false;                ///< run again there
  std::vector<std::uint64_t> addresses{};  ///< of tensors that go in, or come out
};

struct Timeline {
  std::vector<BlockEvent> events;
  std::vector<RegionMark> marks;
  std::vector<std::string> names;
  /// How long selective_checkpoint() or PackSavedTensors worked in a region: to leave tensors out or to pack them, and
  /// to make them again or unpack them in backward.
  std::vector<std::pair<int, std::int64_t>> overhead_ns{};
  /// Where blocks were taken: "file:line function", the innermost call first, one call a line.
  std::vector<std::string> sites;
};

}  // namespace oxytorch::memory
