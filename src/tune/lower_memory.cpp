#include "tune/lower_memory.h"

#include <algorithm>
#include <limits>
#include <set>

#include "base/size_text.h"
#include "oxytorch/tune/asked.h"
#include "oxytorch/tune/policy.h"
#include "tune/names.h"
#include "tune/words.h"

namespace oxytorch::tune {
namespace {

std::string_view setting(const Offer& offer) { return setting_of(offer.name, offer.kind, offer.traits.group); }
bool is_allocator(const Offer& offer) { return setting(offer) == "allocator"; }

/// Settings of the process, which change nothing of what a step needs.
bool is_of_process(const Offer& offer) {
  return is_allocator(offer) || setting(offer) == "threads" || setting(offer) == "flush_denormals";
}

/// Bytes that must be saved of those for a trial.
std::int64_t least_saving(std::int64_t bytes) {
  return static_cast<std::int64_t>((1 - kPolicy.smaller) * static_cast<double>(bytes));
}

}  // namespace

LowerMemory::LowerMemory(Combinations& all, const TunerOptions& options,
                         std::map<std::string, std::pair<Status, std::string>> judged,
                         std::function<double()> seconds_left)
    : all_(all), options_(options), judged_(std::move(judged)), seconds_left_(std::move(seconds_left)) {}

std::optional<PairedTestResult> LowerMemory::add_to(Names& kept) {
  const Names before = kept;
  choose(kept);
  explain_the_rest(kept);
  choose_allocator(kept);
  while (!added_.empty()) {
    try {
      if (const auto ruling = all_.verify(kept); !ruling.held) {
        if (!drop_refused(ruling, kept)) break;
        continue;
      }
      if (const auto known = within_.find(kept); known != within_.end()) return known->second;
      auto result = at_most_slower(kept, kPolicy.one_trial_seconds);
      if (result.decision == Decision::Accept) return result;
      take_out(Names(added_).back(), Status::Rejected, "all together did not pay: " + result.reason, kept);
    } catch (const SideFailed& failure) {
      take_out(Names(added_).back(), Status::Failed, "all together failed: " + all_.timing.blame(failure), kept);
    }
  }
  for (const auto& name : Names(added_)) take_out(name, Status::Refused, "all together were refused.", kept);
  for (const auto& name : before) judged_.erase(name);
  kept = before;
  return std::nullopt;
}

void LowerMemory::choose(Names& kept) {
  while (seconds_left_() > 0) {
    const auto now = all_.bytes_with(kept);
    if (!now) return;
    all_.workload.say("what makes the step smaller");
    const auto choice = most_saving(kept, *now);
    if (!choice) return;
    try {
      try_one(*choice, *now, kept);
    } catch (const SideFailed& failure) {
      judged_[choice->name] = {Status::Failed, all_.timing.blame(failure)};
      warn(choice->name + " failed and is left out: " + judged_[choice->name].second);
    }
  }
}

std::optional<LowerMemory::Choice> LowerMemory::most_saving(const Names& kept, std::int64_t now) {
  const auto least = least_saving(now);
  std::map<std::string, Choice> choices;
  for (const auto& offer : all_.offers) {
    if (is_of_process(offer)) continue;
    if (auto names = joined_by(offer, kept); !names.empty()) choices[offer.name] = {offer.name, std::move(names), 0};
  }
  std::set<std::string> measured;
  // Once something saves enough, measuring others takes no more than half of the time: the rest is for its trial.
  const double last = seconds_left_() / 2;
  bool has_one = false;
  bool is_late = false;
  // What was not measured beside this yet comes before what saves too little.
  const auto promised = [&](const std::string& name) {
    const auto known = saved_.find(name);
    const auto saved = known == saved_.end() ? std::numeric_limits<std::int64_t>::max() : known->second.bytes;
    if (measured.contains(name)) return saved;
    return is_late ? 0 : std::max(saved, least + 1);
  };
  while (!choices.empty() && seconds_left_() > 0) {
    is_late = has_one && seconds_left_() < last;
    auto& [name, choice] = *std::max_element(choices.begin(), choices.end(), [&](const auto& a, const auto& b) {
      return promised(a.first) < promised(b.first);
    });
    if (measured.contains(name)) return saved_[name].bytes > least ? std::optional(choice) : std::nullopt;
    const auto bytes = all_.bytes_with(choice.names);
    if (!bytes) {
      choices.erase(choice.name);
      continue;
    }
    choice.bytes = *bytes;
    saved_[name] = {now - *bytes, now};
    measured.insert(name);
    has_one = has_one || saved_[name].bytes > least;
  }
  return std::nullopt;
}

/// Why the rest of what could join what was kept did not.
void LowerMemory::explain_the_rest(const Names& kept) {
  std::map<std::string, std::string> reasons;
  for (const auto& offer : all_.offers) {
    if (is_of_process(offer) || joined_by(offer, kept).empty()) continue;
    const auto known = saved_.find(offer.name);
    auto& reason = reasons[offer.name];
    if (known == saved_.end() || known->second.bytes > least_saving(known->second.of)) {
      reason = "The time for what makes a step smaller was over before its turn.";
    } else if (known->second.bytes <= 0) {
      reason = "A step takes no less memory with it.";
    } else {
      reason = sentence({"It saves ", size_text(known->second.bytes), " of the ", size_text(known->second.of),
                         " that a step takes, which is too little for a trial."});
    }
  }
  for (auto& [name, reason] : reasons) judged_[name] = {Status::Skipped, std::move(reason)};
}

/// Of what was not kept, what can join it: with which names, those of its group left out; empty: it cannot.
Names LowerMemory::joined_by(const Offer& offer, const Names& kept) const {
  const auto& traits = offer.traits;
  const auto is_kept = [&](const auto& name) { return holds(kept, name); };
  if (judged_.contains(offer.name) || is_kept(offer.name) || traits.feeds) return {};
  if (std::any_of(traits.part_of.begin(), traits.part_of.end(), is_kept)) return {};
  Names found;
  for (const auto& each : all_.offers) {  // in the order given, as the search has them
    const bool gives_way = !traits.group.empty() && each.traits.group == traits.group;
    if (each.name == offer.name || (is_kept(each.name) && !gives_way)) found.push_back(each.name);
  }
  for (const auto& name : found) {
    const auto& needs = all_.offer_of(name)->traits.requires_;
    if (!std::all_of(needs.begin(), needs.end(), [&](const auto& need) { return holds(found, need); })) return {};
  }
  return found;
}

void LowerMemory::try_one(const Choice& choice, std::int64_t now, Names& kept) {
  const auto& [name, names, bytes] = choice;
  const auto saved = sentence({"a step takes ", size_text(bytes), " of memory instead of ", size_text(now)});
  const auto joint = at_most_slower(names, 0);
  if (joint.decision != Decision::Accept) {
    judged_[name] = {Status::Rejected, sentence({saved, ", and its time ", joint.reason})};
    return;
  }
  if (const auto ruling = all_.verify(names, /*glance=*/true); !ruling.held) {
    judged_[name] = {Status::Refused, ruling.reason};
    warn(name + " is refused and left out: " + ruling.reason);
    return;
  }
  keep(names, joint, saved, name + " saves more memory in its place", kept);
}

/// `saved`: by what is new. `instead`: why what makes room for it goes.
void LowerMemory::keep(const Names& names, const PairedTestResult& joint, const std::string& saved,
                       const std::string& instead, Names& kept) {
  for (const auto& before : kept) {
    if (!holds(names, before)) judged_[before] = {Status::Rejected, instead};
  }
  std::erase_if(added_, [&](const auto& before) { return !holds(names, before); });
  for (const auto& name : names) {
    if (holds(kept, name)) continue;
    judged_[name] = {Status::Accepted,
                     sentence({saved, "; ", ratio_text(1 / joint.speedup.mid), " times as long as given"})};
    added_.push_back(name);
  }
  kept = names;
  within_[names] = joint;
}

/// The same with every other choice of allocator: none, or one that does not keep glibc's heap.
std::vector<Names> LowerMemory::allocators_for(const Names& kept) const {
  Names none;
  std::copy_if(kept.begin(), kept.end(), std::back_inserter(none),
               [&](const auto& name) { return !is_allocator(*all_.offer_of(name)); });
  std::vector<Names> found;
  if (none != kept) found.push_back(none);
  for (const auto& offer : all_.offers) {
    if (!is_allocator(offer) || offer.traits.group == "host_memory") continue;
    if (auto names = joined_by(offer, none); !names.empty() && names != kept) found.push_back(std::move(names));
  }
  return found;
}

void LowerMemory::choose_allocator(Names& kept) {
  const auto given = all_.bytes_with({});
  const auto others = allocators_for(kept);
  if (!given || others.empty()) return;
  all_.workload.say("what leaves less of the process in memory");
  const auto now = all_.resident_with(kept);
  if (!now) return;
  const auto most = *now - static_cast<std::int64_t>(kPolicy.less_resident * static_cast<double>(*given));
  std::multimap<std::int64_t, Names> less;
  for (const auto& names : others) {
    if (const auto resident = all_.resident_with(names); resident && *resident <= most) less.emplace(*resident, names);
  }
  for (const auto& [resident, names] : less) {
    const auto said = sentence({"the process has ", size_text(resident), " in memory instead of ", size_text(*now)});
    try {
      if (replace_allocator(names, said, kept)) return;
    } catch (const SideFailed& failure) {
      warn(joined(names, "nothing") + " failed: " + all_.timing.blame(failure));
    }
  }
}

/// Where a step is not too slow with it. What was measured last is measured no more in the end, so this has its time.
bool LowerMemory::replace_allocator(const Names& names, const std::string& said, Names& kept) {
  const auto joint = in_place_of(kept, names, kPolicy.resident_steps * all_.timing.step_seconds());
  if (joint.decision == Decision::Accept) {
    keep(names, joint, said, "without it " + said, kept);
    return true;
  }
  for (const auto& name : names) {
    if (!holds(kept, name)) judged_[name] = {Status::Rejected, sentence({said, ", and its time ", joint.reason})};
  }
  return false;
}

/// Takes out what is refused by itself, else what was added last; false where there is no time to look.
bool LowerMemory::drop_refused(const Ruling& ruling, Names& kept) {
  if (seconds_left_() <= 0) return false;
  const auto found = all_.culprits(kept, ruling);
  for (const auto& [name, reason] : found) take_out(name, Status::Refused, reason, kept);
  if (found.empty()) {
    take_out(Names(added_).back(), Status::Refused, "all together were refused: " + ruling.reason, kept);
  }
  return true;
}

void LowerMemory::take_out(const std::string& name, Status status, const std::string& reason, Names& kept) {
  if (!holds(kept, name)) return;  // it went with what it requires
  warn(name + " is taken back: " + reason);
  judged_[name] = {status, reason};
  std::erase(kept, name);
  for (const auto& other : Names(kept)) {
    if (all_.requires_it(other, name)) {
      take_out(other, Status::Rejected, "it needs " + name + ", which was taken back.", kept);
    }
  }
  std::erase_if(added_, [&](const auto& before) { return !holds(kept, before); });
}

PairedTestResult LowerMemory::at_most_slower(const Names& names, double least_seconds) {
  return compare({}, names, options_.max_slowdown, least_seconds);
}

/// The same by way of `kept`, where how long a step takes with that is known: a step with `names` differs less from it
/// than from one as given, which decides sooner.
PairedTestResult LowerMemory::in_place_of(const Names& kept, const Names& names, double least_seconds) {
  const auto known = within_.find(kept);
  if (known == within_.end()) return at_most_slower(names, least_seconds);
  const auto& before = known->second;
  auto result = compare(kept, names, options_.max_slowdown * before.speedup.mid, least_seconds);
  auto& speedup = result.speedup;
  speedup.low *= before.speedup.low;  // wider than the interval of both
  speedup.mid *= before.speedup.mid;
  speedup.high *= before.speedup.high;
  result.incumbent = before.incumbent;
  result.challenger = before.incumbent / speedup.mid;
  result.pairs = std::min(result.pairs, before.pairs);
  result.p_value = std::max(result.p_value, before.p_value);
  result.reason.insert(0, "in place of what was kept is ");
  return result;
}

PairedTestResult LowerMemory::compare(const Names& with, const Names& names, double slowdown, double least_seconds) {
  all_.workload.say("how long a step takes with " + joined(names, "nothing"));
  auto test = PairedTestOptions::conclusion(options_.seed + 1);
  test.threshold = test.worth = 1 / slowdown;
  test.most_seconds = std::max({seconds_left_(), least_seconds, 1e-9});
  return all_.timing.compare(with, names, test).first;
}

}  // namespace oxytorch::tune
