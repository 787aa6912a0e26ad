#include "tune/combinations.h"

#include <algorithm>

#include "oxytorch/logging.h"
#include "tune/names.h"

namespace oxytorch::tune {

std::string joined(const Names& names, const char* none) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? none : text;
}

std::string sentence(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const auto part : parts) text += part;
  return text;
}

void warn(const std::string& text) { log(LogLevel::Warn, "accelerate: " + text, "tune"); }

Combinations::Combinations(Workload& w) : workload(w), offers(w.offers()), timing(w, offers) {}

const Offer* Combinations::offer_of(const std::string& name) const {
  const auto found = std::find_if(offers.begin(), offers.end(), [&](const auto& o) { return o.name == name; });
  return found == offers.end() ? nullptr : &*found;
}

bool Combinations::requires_it(const std::string& name, const std::string& other) const {
  const auto* const offer = offer_of(name);
  return offer != nullptr && holds(offer->traits.requires_, other);
}

Kind Combinations::widest(const Names& names) const {
  auto kind = Kind::Exact;
  for (const auto& offer : offers) {
    if (holds(names, offer.name)) kind = std::max(kind, offer.kind);
  }
  return kind;
}

Ruling Combinations::verify(const Names& names, bool glance) {
  if (names.empty()) return {true, "nothing is active", {}};
  if (const auto known = rulings.find({names, glance}); known != rulings.end()) return known->second;
  const double start = workload.seconds();
  workload.say("verifying " + joined(names, ""));
  auto ruling = from_start(names, [&] { return workload.verify(widest(names), glance); });
  if (charge) charge(workload.seconds() - start);
  return rulings[{names, glance}] = std::move(ruling);
}

std::vector<std::pair<std::string, std::string>> Combinations::culprits(const Names& names, const Ruling& together) {
  std::vector<std::pair<std::string, std::string>> found;
  for (const auto& name : names) {
    Names by_itself;
    std::copy_if(names.begin(), names.end(), std::back_inserter(by_itself),
                 [&](const auto& other) { return other == name || requires_it(name, other); });
    const auto ruling = by_itself == names ? together : verify(by_itself);
    if (!ruling.held) found.emplace_back(name, ruling.reason);
  }
  return found;
}

std::optional<std::int64_t> Combinations::measured(const Names& names, std::optional<std::int64_t> (Workload::*of)()) {
  const double start = workload.seconds();
  std::optional<std::int64_t> found;
  try {
    found = from_start(names, [&] { return (workload.*of)(); });
  } catch (const SideFailed& failure) {  // it has run often enough to be kept, unless the step as given throws now
    warn("what a step takes with " + joined(names, "nothing") + " is not known: " + timing.blame(failure));
  }
  if (charge) charge(workload.seconds() - start);
  return found;
}

std::optional<std::int64_t> Combinations::bytes_with(const Names& names) {
  const auto known = bytes.find(names);
  return known != bytes.end() ? known->second : bytes[names] = measured(names, &Workload::step_bytes);
}

std::optional<std::int64_t> Combinations::resident_with(const Names& names) {
  return measured(names, &Workload::step_resident);
}

}  // namespace oxytorch::tune
