/// What is known of combinations of strategies: whether their numbers hold, and what tensors take in a step with them.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oxytorch/tune/timing.h"
#include "oxytorch/tune/workload.h"

namespace oxytorch::tune {

std::string joined(const Names& names, const char* none);
std::string sentence(std::initializer_list<std::string_view> parts);
void warn(const std::string& text);

struct Combinations {
  explicit Combinations(Workload& workload);

  [[nodiscard]] const Offer* offer_of(const std::string& name) const;
  [[nodiscard]] bool requires_it(const std::string& name, const std::string& other) const;
  [[nodiscard]] Kind widest(const Names& names) const;

  /// Looks at a combination from the state as held. It is restored with nothing active: what a strategy changed in the
  /// model, a hook or a layout, would be put back under it.
  template <typename Look>
  auto from_start(const Names& names, const Look& look) {
    timing.guarded({}, [&] { workload.restore(); });
    auto found = timing.guarded(names, look);
    timing.guarded({}, [&] { workload.restore(); });
    return found;
  }

  /// Lets the verifier judge a combination, once. A glance on the way finds what is grossly wrong before more is built
  /// on it.
  Ruling verify(const Names& names, bool glance = false);
  /// Of a combination that is refused, what is refused by itself, with what it requires; each with its reason.
  std::vector<std::pair<std::string, std::string>> culprits(const Names& names, const Ruling& together);
  /// The most that tensors take in a step; empty where that is not known.
  std::optional<std::int64_t> bytes_with(const Names& names);
  /// The most of this process that is in memory in a step; empty where that is not known.
  std::optional<std::int64_t> resident_with(const Names& names);

  Workload& workload;
  std::vector<Offer> offers;
  Timing timing;
  std::function<void(double)> charge;  ///< is told the seconds that a look took; may be empty

 private:
  std::optional<std::int64_t> measured(const Names& names, std::optional<std::int64_t> (Workload::*of)());

 protected:
  std::map<std::pair<Names, bool>, Ruling> rulings;    // glances apart
  std::map<Names, std::optional<std::int64_t>> bytes;  // that a step takes with them
};

}  // namespace oxytorch::tune
