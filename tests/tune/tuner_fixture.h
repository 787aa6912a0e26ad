/// The tuner's world as a table of seconds and bytes: what each strategy does to a step is planted.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "oxytorch/load.h"
#include "oxytorch/tune/tuner.h"

namespace oxytorch::tune {

/// What a strategy is in this world.
struct Planted {
  Offer offer;
  double factor = 1;          ///< of the step's seconds while it is active
  bool honest = true;         ///< what the verifier says of it
  double cost = 0;            ///< one-off seconds, said and taken
  std::string throws = {};    ///< the member that throws: "applies", "expected_cost", "apply", "step"
  std::int64_t bytes = -100;  ///< of a step's memory while it is active
  std::int64_t resident = 0;  ///< more of the process in memory
  bool unseen = false;        ///< what a step takes with it is not known
  bool shows_late = false;    ///< a glance does not see that it is not honest
};

/// Interrupts are no failure of a strategy.
struct Interrupt : std::exception {
  [[nodiscard]] const char* what() const noexcept override { return "interrupted"; }
};

class Table : public Workload {
 public:
  std::map<std::string, Planted> planted;
  std::int64_t given_bytes = 1000;  ///< of the step as given
  std::vector<std::string> order, now, said;
  double step_seconds = 0.02;
  double alone = 0;              ///< of steps in a row: the host before the first and after the last, on a device
  std::string everything;        ///< hindrance()
  int calls = 0, throw_at = -1;  ///< steps taken; the one that throws
  bool interrupt = false;        ///< what it throws then
  int restored = 0;
  int measured = 0;    ///< combinations whose bytes were asked for
  bool moved = false;  ///< the state is not as it was
  double time = 0;
  double faults = 0;       ///< of pages, a second of steps
  std::string keeps = {};  ///< a strategy with which there are none
  bool hides = false;      ///< from the first trial on there are none in any case

  void plant(Planted one) {
    order.push_back(one.offer.name);
    planted[one.offer.name] = std::move(one);
  }
  void plant(const std::string& name, double factor, Kind kind = Kind::Exact) {
    plant({.offer = {.name = name, .kind = kind}, .factor = factor});
  }

  std::vector<Offer> offers() override {
    std::vector<Offer> found;
    for (const auto& name : order) found.push_back(planted[name].offer);
    return found;
  }
  std::string hindrance() override { return everything; }
  Applicability applies(const std::string& name) override { return throw_from(name, "applies"), true; }
  double expected_cost(const std::string& name) override {
    throw_from(name, "expected_cost");
    return planted[name].cost;
  }
  std::vector<std::string> active() override { return now; }
  void activate(const std::vector<std::string>& names) override {
    std::erase_if(now, [&](const auto& name) { return std::find(names.begin(), names.end(), name) == names.end(); });
    if (hides && !names.empty()) faults = 0;
    for (const auto& name : names) {
      if (std::find(now.begin(), now.end(), name) != now.end()) continue;
      throw_from(name, "apply");
      if (planted[name].cost > 0 && paid_[name]++ == 0) time += planted[name].cost;
      now.push_back(name);
    }
  }
  void restore() override {
    moved = false;
    ++restored;
  }
  std::map<std::string, std::string> covered() override { return {{"restored", "all of it"}}; }
  std::vector<std::size_t> shapes() override { return {0}; }
  StepTimes steps(std::size_t first, int count, bool updates, bool /*drawn*/) override {
    StepTimes found;
    for (int i = 0; i < count; ++i) {
      if (++calls == throw_at) {
        if (interrupt) throw Interrupt();
        throw std::runtime_error("the data ran out\nat a line that nobody wants to read");
      }
      for (const auto& name : now) throw_from(name, "step");
      moved = true;
      // A little jitter, so that no two times are equal.
      const double jitter = 1 + 0.002 * (static_cast<double>((calls + first) * 2654435761 % 1000) / 1000 - 0.5);
      double seconds_taken = step_seconds * jitter;
      for (const auto& name : now) seconds_taken *= planted[name].factor;
      found.seconds += seconds_taken;
      if (updates) found.updates.push_back(0.1 * seconds_taken);
    }
    found.seconds += alone;
    time += found.seconds;
    if (std::find(now.begin(), now.end(), keeps) == now.end()) faulted_ += faults * found.seconds;
    return found;
  }
  double update() override {
    time += 0.1 * step_seconds;
    return 0.1 * step_seconds;
  }
  std::optional<std::int64_t> tuning_bytes() override { return 1500; }
  std::optional<std::int64_t> step_bytes() override {
    ++measured;
    time += 2 * step_seconds;
    for (const auto& name : now) throw_from(name, "step_bytes");
    std::int64_t bytes = given_bytes;
    for (const auto& name : now) {
      if (planted[name].unseen) return std::nullopt;
      bytes += planted[name].bytes;
    }
    return bytes;
  }
  std::optional<std::int64_t> step_resident() override {
    time += 3 * step_seconds;
    for (const auto& name : now) throw_from(name, "step_resident");
    std::int64_t bytes = 5000;
    for (const auto& name : now) bytes += planted[name].resident;
    return bytes;
  }
  bool on_host() override { return alone == 0; }
  Ruling verify(Kind kind, bool glance) override {
    verified.emplace_back(now, glance);
    time += step_seconds;
    for (const auto& name : now) {
      if (!planted[name].honest && !(glance && planted[name].shows_late))
        return {false, name + " is off by half as a " + std::string(tune::name(kind)), {}};
    }
    return {true, "held", {{"steps", glance ? 1 : 12}}};
  }
  std::optional<std::string> told(const std::exception& error) override {
    if (dynamic_cast<const Interrupt*>(&error) != nullptr) return std::nullopt;
    return Workload::told(error);
  }
  void say(const std::string& what) override { said.push_back(what); }
  double seconds() override { return time += 1e-7; }
  double processor_seconds() override { return time; }
  double page_faults() override { return faulted_; }

  std::vector<std::pair<std::vector<std::string>, bool>> verified;

 private:
  void throw_from(const std::string& name, const std::string& member) {
    if (planted[name].throws == member) throw std::runtime_error(name + " throws from " + member);
  }
  std::map<std::string, int> paid_;
  double faulted_ = 0;
};

class TunerTest : public testing::Test {
 protected:
  TunerTest() : folder_(std::filesystem::path(testing::TempDir()) / ("oxytorch_tuner_" + std::to_string(getpid()))) {
    std::filesystem::remove_all(folder_);
    set_load_source([this] { return LoadSample{.wall = watched_ += 1}; });
  }
  ~TunerTest() override {
    set_load_source({});
    std::filesystem::remove_all(folder_);
  }

  static const CertificateEntry& entry(const Certificate& made, const std::string& name) {
    const auto found =
        std::find_if(made.entries.begin(), made.entries.end(), [&](const auto& one) { return one.strategy == name; });
    if (found == made.entries.end()) throw std::runtime_error("no entry " + name);
    return *found;
  }

  Certificate tuned(TunerOptions options = {}, const CertificateStore* store = nullptr) {
    return tuned(table, std::move(options), store);
  }
  static Certificate tuned(Table& table, TunerOptions options = {}, const CertificateStore* store = nullptr) {
    Tuner tuner(table, {"here", "2", "model", "options"}, std::move(options));
    auto made = tuner.tune(store);
    EXPECT_THAT(table.now, testing::IsEmpty());
    EXPECT_FALSE(table.moved);
    return made;
  }

  Table table;
  std::filesystem::path folder_;

 private:
  double watched_ = 0;
};

}  // namespace oxytorch::tune
