#include "data/tune_loader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <deque>
#include <utility>

#include "oxytorch/clock.h"
#include "oxytorch/error.h"
#include "oxytorch/statistics.h"
#include "oxytorch/system.h"
#include "oxytorch/units.h"

namespace oxytorch::data {
namespace {

constexpr double kLeastGain = 1.02;
constexpr std::size_t kFewestRounds = 3, kMostRounds = 15;       // so that one slow moment decides nothing
constexpr double kHopeless = 0.8;                                // of the speed as given, after two rounds
constexpr double kShareOfThreads = 0.4, kShareOfPrefetch = 0.6;  // of the seconds, until when each is looked for
constexpr std::array kThreads = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128};

std::string text_of(const char* format, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

class LoaderSearch {
 public:
  LoaderSearch(TensorLoader& loader, const TuneOptions& options, const std::function<double()>& seconds)
      : loader_(loader),
        options_(options),
        seconds_(seconds),
        given_(loader.asked()),
        start_(loader.state()),
        began_(seconds_()) {}

  LoaderTuning run() {
    try {
      search();
      settle(trials_[best_].setting);
    } catch (...) {
      settle(given_);
      throw;
    }
    return found_;
  }

 private:
  struct Trial {
    LoaderOptions setting;
    std::string name, note{};
    std::vector<double> seconds{}, ratios{};  // a batch, of each round
  };

  void settle(const LoaderOptions& setting) {
    loader_.change(setting);
    loader_.load_state(start_);
  }

  void search() {
    trials_.push_back({given_, "as given: " + name_of(given_)});
    if (loader_.size() == 0) {
      trials_[0].note = "it has no batches";
    } else {
      search_threads();
      search_prefetch();
      if (!given_.cache) search_cache();
      if (best_ == 0 && trials_[0].note.empty()) trials_[0].note = "nothing is at least 2 % faster";
    }
    if (best_ != 0) trials_[best_].note = "taken" + (trials_[best_].note.empty() ? "" : "; " + trials_[best_].note);
    for (const auto& trial : trials_) found_.trials.push_back(told(trial));
    const auto& taken = trials_[best_].setting;
    found_.threads = resolved(taken).first;
    found_.prefetch = resolved(taken).second;
    found_.cache = taken.cache;
    found_.bottleneck = loader_.stats().bottleneck();
  }

  static std::pair<int, int> resolved(const LoaderOptions& setting) {
    const int threads = setting.threads > 0 ? setting.threads : read_cores().usable;
    return {threads, setting.prefetch > 0 ? setting.prefetch : 2 + threads / 2};
  }

  static std::string name_of(const LoaderOptions& setting, const std::string& cache = "") {
    const auto [threads, prefetch] = resolved(setting);
    return std::to_string(threads) + (threads == 1 ? " thread, " : " threads, ") + std::to_string(prefetch) + " ahead" +
           (cache.empty() ? "" : ", " + cache);
  }

  static LoaderTrial told(const Trial& trial) {
    LoaderTrial found{trial.name, {}, {}, trial.note};
    if (!trial.seconds.empty()) found.batches_per_second = 1 / median(trial.seconds);
    if (!trial.ratios.empty()) found.ratio = median(trial.ratios);
    return found;
  }

  std::size_t add(LoaderOptions setting, std::string name) {
    trials_.push_back({std::move(setting), std::move(name)});
    return trials_.size() - 1;
  }

  // -- the settings
  // -------------------------------------------------------------------------------------------------------------

  /// More and more threads, while the most of them are the best.
  void search_threads() {
    const int usable = read_cores().usable, now = resolved(given_).first;
    std::deque<int> counts;
    for (const int count : kThreads) {
      if (count <= usable && count != now) counts.push_back(count);
    }
    for (std::size_t group = 3; !counts.empty(); group = 2) {
      std::vector<std::size_t> racing{0};
      if (best_ != 0) racing.push_back(best_);
      int most = now;
      for (; !counts.empty() && racing.size() < group + 1 + (best_ != 0 ? 1 : 0); counts.pop_front()) {
        auto setting = given_;
        setting.threads = most = counts.front();
        racing.push_back(add(setting, name_of(setting)));
      }
      race(racing, kShareOfThreads);
      best_ = winner(0, racing);
      if (best_ == 0 ? most > now : resolved(trials_[best_].setting).first < most) break;
    }
  }

  void search_prefetch() {
    for (int i = 0; i < 2; ++i) {
      auto setting = trials_[best_].setting;
      setting.prefetch = 2 * resolved(setting).second;
      const auto one = add(setting, name_of(setting));
      std::vector<std::size_t> racing{0, best_, one};
      if (best_ == 0) racing.erase(racing.begin());
      race(racing, kShareOfPrefetch);
      if (winner(best_, racing) == best_) break;
      best_ = one;
    }
  }

  /// The same batches with their samples in a cache, and without one.
  void search_cache() {
    const auto* dataset = loader_.dataset();
    const Cache trial({.memory = options_.memory, .disk = "0"});
    const auto memory = trial.stats().memory.limit;
    if (dataset == nullptr || memory == 0) return;
    std::int64_t disk = 0;
    if (options_.disk != "0")
      disk = Cache({.memory = "0", .disk = options_.disk, .folder = options_.folder}).stats().disk.limit;
    auto in_memory = trials_[best_].setting, on_disk = in_memory;
    in_memory.cache = std::make_shared<Cache>(CacheOptions{.memory = options_.memory});
    in_memory.strip_jpegs = true;
    const auto bare = filled(trials_[best_].setting, in_memory);
    const auto held = in_memory.cache->stats().memory;
    if (held.entries == 0) return;
    const double whole =
        static_cast<double>(held.bytes) / static_cast<double>(held.entries) * static_cast<double>(dataset->size());
    const double of_memory = std::min(1.0, static_cast<double>(memory) / whole);
    const double of_disk = std::min(1 - of_memory, static_cast<double>(disk) / whole);
    if (of_disk > 0) {
      on_disk.cache =
          std::make_shared<Cache>(CacheOptions{.memory = "0", .disk = options_.disk, .folder = options_.folder});
      on_disk.strip_jpegs = true;
      (void)filled(trials_[best_].setting, on_disk);
    }
    const auto bytes = [&](double share) {
      return std::to_string(static_cast<std::int64_t>(1.02 * share * whole) + 4096);
    };
    auto name = "cache of " + format_size(static_cast<std::uint64_t>(of_memory * whole));
    if (of_disk > 0) name += " and " + format_size(static_cast<std::uint64_t>(of_disk * whole)) + " of disk";
    const auto one = add(in_memory, name_of(in_memory, name));
    auto& found = trials_[one];
    const auto began = seconds_();
    for (std::size_t round = 0; round < kMostRounds && !(round >= kFewestRounds && is_over(1)); ++round) {
      const double none = repeated(trials_[best_].setting), hit = repeated(in_memory);
      const double read = of_disk > 0 ? repeated(on_disk) : none;
      const double epoch = of_memory * hit + of_disk * read + (1 - of_memory - of_disk) * bare.filling;
      found.seconds.push_back(epoch);
      found.ratios.push_back(none / epoch);
      if (seconds_() - began > options_.seconds && round + 1 >= kFewestRounds) break;
    }
    // Of the speed as given, as the other ratios are.
    const double before = best_ == 0 ? 1 : median(trials_[best_].ratios);
    const bool wins = is_faster(found.ratios);
    for (auto& ratio : found.ratios) ratio *= before;
    found.note = "the epoch that fills it takes " + text_of("%.2f", bare.filling / bare.without) + " times as long";
    if (of_memory + of_disk < 1)
      found.note += "; it holds " + text_of("%.0f", 100 * (of_memory + of_disk)) + " % of the samples";
    tell(found);
    if (!wins) return;
    found.setting.cache = std::make_shared<Cache>(CacheOptions{
        .memory = bytes(of_memory), .disk = of_disk > 0 ? bytes(of_disk) : "0", .folder = options_.folder});
    best_ = one;
  }

  // -- measuring
  // ----------------------------------------------------------------------------------------------------------------

  [[nodiscard]] bool is_over(double share) const { return seconds_() - began_ > share * options_.seconds; }

  /// Seconds of a batch, in the state that many of them come to.
  double batch_seconds(const LoaderOptions& setting, double at_least) {
    loader_.change(setting);
    const int warm = resolved(setting).second + 1;
    int drawn = 0;
    for (double since = 0;;) {
      take_one();
      ++drawn;
      const auto now = seconds_();
      if (drawn == warm) since = now;
      if (drawn > warm && now - since >= at_least) return (now - since) / (drawn - warm);
    }
  }

  void take_one() {
    auto batch = loader_.next();
    if (!batch) batch = loader_.next();  // an epoch has ended
    OXY_CHECK(batch, InvalidState, "the loader gave no batch of a whole epoch.");
    if (options_.step) options_.step(*batch);
  }

  struct Filling {
    double without, filling;  // seconds of a batch
  };
  /// Draws batches from the start into a cache, and says what that takes.
  Filling filled(const LoaderOptions& without, const LoaderOptions& with) {
    const double each = std::max(0.1, 0.05 * options_.seconds);
    loader_.change(without);
    loader_.load_state(start_);
    const auto draw = [&](auto goes_on) {
      const auto began = seconds_();
      int drawn = 0;
      do take_one(), ++drawn;
      while (goes_on(drawn, seconds_() - began));
      return std::pair(drawn, (seconds_() - began) / drawn);
    };
    const auto size = loader_.size();
    const auto [count, seconds] =
        draw([&](int drawn, double taken) { return drawn < size && (taken < each || drawn < 4); });
    repeated_ = count;
    loader_.change(with);
    loader_.load_state(start_);
    const auto filling = draw([&, count = count](int drawn, double) { return drawn < count; }).second;
    return {seconds, filling};
  }
  /// Seconds of a batch of those that filled() has drawn.
  double repeated(const LoaderOptions& setting) {
    loader_.change(setting);
    loader_.load_state(start_);
    const auto began = seconds_();
    for (int i = 0; i < repeated_; ++i) take_one();
    return (seconds_() - began) / repeated_;
  }

  /// Lets settings draw in turn until their share of the time is over. The first is what others are compared with.
  void race(std::vector<std::size_t> racing, double share) {
    const auto all = racing;
    const double left = share * options_.seconds - (seconds_() - began_);
    const double each = std::max(0.02, left / (5 * static_cast<double>(racing.size())));
    std::vector<std::vector<double>> rounds(trials_.size());
    for (std::size_t done = 0; racing.size() > 1 && done < kMostRounds && !(done >= kFewestRounds && is_over(share));
         ++done) {
      std::rotate(racing.begin(), racing.begin() + 1, racing.end());
      for (const auto one : racing) rounds[one].push_back(batch_seconds(trials_[one].setting, each));
      std::erase_if(racing, [&](std::size_t one) {
        return one != all.front() && done >= 1 && median(ratios_of(rounds, all.front(), one)) < kHopeless;
      });
    }
    compared_ = rounds;
    // All ratios that are told are of the speed as given.
    const double before = all.front() == 0 ? 1 : median(trials_[all.front()].ratios);
    for (const auto one : all) {
      auto& trial = trials_[one];
      const bool is_new = trial.seconds.empty();
      trial.seconds.insert(trial.seconds.end(), rounds[one].begin(), rounds[one].end());
      if (one != all.front()) {
        for (const auto ratio : ratios_of(rounds, all.front(), one)) trial.ratios.push_back(before * ratio);
      }
      if (is_new && one != 0) tell(trial);
    }
  }

  static std::vector<double> ratios_of(const std::vector<std::vector<double>>& rounds, std::size_t base,
                                       std::size_t one) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < std::min(rounds[base].size(), rounds[one].size()); ++i)
      ratios.push_back(rounds[base][i] / rounds[one][i]);
    return ratios;
  }

  static bool is_faster(const std::vector<double>& ratios) {
    return ratios.size() >= kFewestRounds && median(ratios) >= kLeastGain && quantile(ratios, 0.25) > 1;
  }

  /// The fastest of those that were surely faster than `base` in the last race; `base` where none was.
  [[nodiscard]] std::size_t winner(std::size_t base, const std::vector<std::size_t>& racing) const {
    std::size_t best = base;
    double most = 0;
    for (const auto one : racing) {
      const auto ratios = ratios_of(compared_, base, one);
      if (one == base || !is_faster(ratios) || median(ratios) <= most) continue;
      best = one;
      most = median(ratios);
    }
    return best;
  }

  void tell(const Trial& trial) const {
    if (options_.progress) options_.progress(told(trial).text());
  }

  TensorLoader& loader_;
  const TuneOptions& options_;
  const std::function<double()>& seconds_;
  const LoaderOptions given_;
  const std::string start_;
  const double began_;
  std::vector<Trial> trials_;
  std::vector<std::vector<double>> compared_;  // the rounds of the last race, by trial
  std::size_t best_ = 0;
  int repeated_ = 0;  // batches that a cache holds
  LoaderTuning found_;
};

}  // namespace

std::string LoaderTrial::text() const {
  const auto padded = [](const std::string& text, std::size_t width) {
    return std::string(width > text.size() ? width - text.size() : 0, ' ') + text;
  };
  auto line = setting + padded("", setting.size() < 44 ? 44 - setting.size() : 0) + ' ' +
              padded(batches_per_second ? text_of("%.4g", *batches_per_second) : "", 10) + ' ' +
              padded(ratio ? text_of("%.2fx", *ratio) : "", 8) + "  " + note;
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

LoaderTuning tune(TensorLoader& loader, const TuneOptions& options) {
  return tune_by(loader, options, monotonic_seconds);
}

LoaderTuning tune_by(TensorLoader& loader, const TuneOptions& options, const std::function<double()>& seconds) {
  OXY_CHECK(options.seconds > 0 && std::isfinite(options.seconds), InvalidArgument, "seconds is ", options.seconds,
            ", expected a positive number.");
  if (loader.is_stream()) {
    LoaderTuning left;
    left.trials.push_back({"as given", {}, {}, "it draws from a stream, which cannot be drawn from again"});
    left.threads = loader.options().threads;
    left.prefetch = loader.options().prefetch;
    return left;
  }
  return LoaderSearch(loader, options, seconds).run();
}

}  // namespace oxytorch::data
