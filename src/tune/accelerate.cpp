#include "oxytorch/tune/accelerate.h"

#include <c10/util/Type.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <optional>
#include <sstream>
#include <typeinfo>

#include "oxytorch/error.h"
#include "oxytorch/host.h"
#include "oxytorch/logging.h"
#include "oxytorch/memory.h"
#include "oxytorch/spelling.h"
#include "oxytorch/tune/escrow.h"
#include "oxytorch/tune/host.h"
#include "oxytorch/tune/reuse.h"
#include "oxytorch/tune/search.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/verify.h"
#include "tune/bench.h"
#include "tune/digest.h"
#include "tune/plan.h"
#include "tune/sources.h"

namespace oxytorch {
namespace {

using Names = std::vector<std::string>;

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

std::string joined(const Names& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

/// Module classes, shapes, dtypes, optimizer and shapes of the batches.
std::string structure(const tune::Run& run) {
  std::ostringstream text;
  const auto describe = [&](const at::Tensor& t) {
    if (t.defined()) text << t.sizes() << ' ' << t.scalar_type() << ' ' << t.device() << '\n';
  };
  text << run.model().name() << '\n';
  for (const auto& item : run.model().named_modules("", /*include_self=*/false)) {
    text << item.key() << ' ' << item.value()->name() << '\n';
  }
  for (const auto& item : run.model().named_parameters()) describe(item.value());
  for (const auto& item : run.model().named_buffers()) describe(item.value());
  text << c10::demangle(typeid(run.original()).name()) << ' ' << run.clip_norm() << '\n';
  for (const auto& group : run.original().param_groups()) text << group.params().size() << '\n';
  for (const auto& batch : run.batches()) {
    describe(batch.input);
    describe(batch.target);
  }
  tune::Digest digest;
  digest.add("structure", std::string_view(text.str()));
  return digest.text();
}

std::vector<tune::RegisteredStrategy> wanted_strategies(const AccelerateOptions& options) {
  if (options.strategies().empty()) return tune::strategies();
  std::vector<tune::RegisteredStrategy> wanted;
  for (const auto& name : options.strategies()) {
    OXY_CHECK(std::count(options.strategies().begin(), options.strategies().end(), name) == 1, InvalidArgument,
              "strategies names ", in_quotes(name), " more than once. Name each strategy once.");
    wanted.push_back(tune::find_strategy(name));
  }
  return wanted;
}

/// Trials of the host pool find its pages again.
struct KeptPool {
  KeptPool() = default;
  KeptPool(const KeptPool&) = delete;
  KeptPool& operator=(const KeptPool&) = delete;
  ~KeptPool() { setting.revert(); }
  HostSetting setting = keep_host_pool();
};

void warn(const std::string& text) { log(LogLevel::Warn, "accelerate: " + text); }

/// One search for what pays, on one run.
class Tuning {
 public:
  Tuning(tune::Run& run, tune::Escrow& escrow, const AccelerateOptions& options)
      : run_(run), escrow_(escrow), options_(options), strategies_(wanted_strategies(options)), bench_(run, escrow) {
    for (const auto& name : options.exclude()) {
      static_cast<void>(tune::find_strategy(name));
      OXY_CHECK(offered_of({name}).size() == 1, InvalidArgument, "exclude names ", in_quotes(name),
                ", which is not among the strategies that were given: ", joined(options.strategies()),
                ". Leave it out of exclude.");
      skipped_[name] = "excluded by the caller.";
    }
    Names offered;
    for (const auto& strategy : strategies_) {
      if (!skipped_.contains(strategy.name)) offered.push_back(strategy.name);
      if (tune::allows(options.level(), strategy.kind)) continue;
      skipped_.emplace(strategy.name, "level " + options.level() + " does not allow the kind " +
                                          std::string(tune::name(strategy.kind)) + ".");
    }
    key_ = {tune::hardware_key() + ", " + run.device().str(), TORCH_VERSION, structure(run),
            "C++, level " + options.level() + ", steps " + std::to_string(options.steps_planned()) + ", strategies " +
                joined(offered)};
  }

  [[nodiscard]] const tune::CertificateKey& key() const noexcept { return key_; }
  tune::Bench& bench() noexcept { return bench_; }
  [[nodiscard]] tune::Kind widest(const Names& names) const {
    auto kind = tune::Kind::Exact;
    for (const auto& strategy : strategies_) {
      if (std::find(names.begin(), names.end(), strategy.name) != names.end()) kind = std::max(kind, strategy.kind);
    }
    return kind;
  }

  /// The remembered certificate where it still holds. Nothing is in force at the end.
  std::optional<tune::Certificate> reuse(const tune::CertificateStore& store) {
    auto found = store.find(key_);
    if (!found) return found;
    look();
    if (const auto fault = canary(*found); !fault.empty()) {
      events_.push_back("step 0: the certificate of " + found->created + " did not hold: " + fault);
      warn(events_.back());
      return std::nullopt;
    }
    found->events.push_back("step 0: reused; one step verified and " +
                            std::to_string(tune::DuelOptions::canary(0).most_pairs) + " pairs measured at most");
    return found;
  }

  /// The certificate of a search. Nothing is in force at the end.
  tune::Certificate measure() {
    look();
    std::vector<tune::StrategyFacts> facts;
    Names of_optimizer;
    for (const auto& s : strategies_) {
      if (s.traits.group == "optimizer" && !skipped_.contains(s.name)) of_optimizer.push_back(s.name);
    }
    auto [updates, proven] = bench_.updates(of_optimizer, options_.seed());
    for (const auto& s : strategies_) {
      facts.push_back({s.name, s.kind, s.traits.group, offered_of(s.traits.requires_), s.traits.interacts,
                       s.traits.part_of, s.traits.renewed_by,
                       skipped_.contains(s.name) ? 0 : run_.strategy(s.name).expected_cost(run_),
                       most_speedup(s.traits), s.traits.expected_speedup, updates[s.name], s.name == proven});
    }
    auto bounds =
        tune::SearchOptions::for_run(options_.steps_planned(), bench_.fastest(), options_.budget(), options_.seed());
    bounds.used_seconds = tune::seconds_now() - began_;
    bounds.optimizer_share = bench_.optimizer_share();
    search_.emplace(std::move(facts), bounds);
    for (const auto& [name, reason] : skipped_) search_->skip(name, reason);
    const auto result = conclude();
    return certificate(search_->best(), result);
  }

  /// Notes in the certificate what could not be put in force.
  void put_in_force(tune::Certificate& certificate) {
    for (const auto& name : certificate.accepted()) {
      try {
        auto names = run_.in_force();
        names.push_back(name);
        run_.bring(names);
      } catch (const std::exception& error) {
        for (auto& entry : certificate.entries) {
          if (entry.strategy != name) continue;
          entry.standing = tune::Standing::Failed;
          entry.reason = std::string("could not be put in force: ") + error.what();
          warn(name + " " + entry.reason);
        }
      }
    }
  }

 private:
  /// A requirement that is not on offer: then what requires it cannot be tried either.
  Names offered_of(const Names& required) const {
    Names found;
    for (const auto& name : required) {
      const auto is = [&](const auto& strategy) { return strategy.name == name; };
      if (std::any_of(strategies_.begin(), strategies_.end(), is)) found.push_back(name);
    }
    return found;
  }

  /// By what a step faults in, of what keeps memory; else as the strategy says.
  double most_speedup(const tune::StrategyTraits& traits) {
    if (traits.group != "host_memory") return traits.hopeful;
    return std::min(traits.hopeful, tune::most_heap_speedup(bench_.faults(), bench_.step_seconds()));
  }

  /// Times the step as given, and asks the strategies whether they apply to it.
  void look() {
    if (looked_) return;
    looked_ = true;
    bench_.baseline();
    if (bench_.disturbed()) warn("the machine is busy: " + bench_.load().evidence() + '.');
    std::string everything;
    if (!std::isfinite(bench_.loss())) {
      everything = "the loss of the step as given is not finite: nothing can be verified by it.";
      warn("nothing was tried: " + everything);
    }
    for (const auto& strategy : strategies_) {
      if (skipped_.contains(strategy.name)) continue;
      if (!everything.empty()) {
        skipped_[strategy.name] = everything;
        continue;
      }
      if (strategy.traits.requires_ != offered_of(strategy.traits.requires_)) {
        skipped_[strategy.name] = "what it requires is not among the strategies.";
        continue;
      }
      try {
        const auto answer = run_.strategy(strategy.name).applies(run_);
        if (!answer.holds) skipped_[strategy.name] = answer.reason;
      } catch (const std::exception& error) {
        fail(strategy.name, std::string("applies() threw: ") + error.what());
      }
    }
    escrow_.restore();
    const bool keeps_memory = std::any_of(strategies_.begin(), strategies_.end(), [&](const auto& s) {
      return s.traits.group == "host_memory" && !skipped_.contains(s.name);
    });
    if (keeps_memory) note_heap();
  }

  void fail(const std::string& name, const std::string& reason) {
    final_[name] = {tune::Standing::Failed, reason};
    skipped_[name] = reason;
    warn(name + " failed and is left out: " + reason);
  }

  tune::TrialOutcome outcome(const tune::Trial& trial) {
    const double began = tune::seconds_now();
    auto found = tried(trial);
    const auto costly = [&](const auto& name) { return run_.strategy(name).expected_cost(run_) > 0; };
    if (costly(trial.strategy)) {
      compiling_ += tune::seconds_now() - began;  // its trial is part of what it costs, and it says when that is repaid
    } else if (std::any_of(trial.challenger.begin(), trial.challenger.end(), costly)) {
      compiling_ += found.cost_seconds;
    }
    return found;
  }

  tune::TrialOutcome tried(const tune::Trial& trial) {
    tune::TrialOutcome outcome;
    const double began = tune::seconds_now();
    try {
      std::tie(outcome.duel, outcome.cost_seconds) = bench_.duel(trial.incumbent, trial.challenger, trial.duel);
      outcome.disturbed = bench_.disturbed();
      outcome.spent_seconds = std::max(1e-9, tune::seconds_now() - began - outcome.cost_seconds);
      if (trial.incumbent.empty()) alone_ = {trial.challenger, outcome.duel};
      if (outcome.duel.decision != tune::Decision::Accept) return outcome;
      const auto ruling = verify_with(glance(), trial.challenger);
      evidence_[trial.strategy] = ruling.evidence;
      outcome.verified = ruling.held;
      outcome.reason = ruling.reason;
      if (!ruling.held) warn(trial.strategy + " is refused and left out: " + ruling.reason);
    } catch (const tune::SideFailed& failure) {
      outcome.failed = true;
      outcome.reason = blame(failure);
      warn(trial.strategy + " failed and is left out: " + outcome.reason);
    }
    return outcome;
  }

  /// What a combination threw, where the step as given does not throw too; else that passes through.
  std::string blame(const tune::SideFailed& failure) {
    bench_.plain_step();
    return failure.what();
  }

  tune::Ruling verify(const Names& names) {
    if (const auto known = rulings_.find(names); known != rulings_.end()) return known->second;
    if (!verifier_) verifier_.emplace(run_, escrow_);
    auto ruling = verify_with(*verifier_, names);
    rulings_[names] = ruling;
    return ruling;
  }

  /// One step is looked at on the way, so that nothing is built on a gross fault; all of it at the end.
  tune::Verifier& glance() {
    if (!glance_) glance_.emplace(run_, escrow_, tune::VerifierOptions{.steps = 1, .trajectory = 1});
    return *glance_;
  }

  tune::Ruling verify_with(tune::Verifier& verifier, const Names& names) {
    const double began = tune::seconds_now();
    bench_.guarded({}, [&] { escrow_.restore(); });
    auto ruling = bench_.guarded(names, [&] { return verifier.check(widest(names)); });
    bench_.guarded({}, [&] { escrow_.restore(); });
    if (search_) search_->charge(tune::seconds_now() - began);
    return ruling;
  }

  /// Searches, then verifies and measures everything against nothing; what spoils it is dropped and the search goes on.
  std::optional<tune::DuelResult> conclude() {
    while (true) {
      while (const auto trial = search_->ask()) search_->tell(outcome(*trial));
      const auto chosen = search_->best();
      if (chosen.empty()) return std::nullopt;
      try {
        const auto ruling = verify(chosen);
        const bool over = search_->seconds_left() <= 0;  // then what fails is not looked into
        if (!ruling.held) {
          over ? drop_all(chosen, tune::Standing::Refused, "all together were refused: " + ruling.reason)
               : drop_culprits(chosen, ruling);
          continue;
        }
        const auto result = against_nothing(chosen);
        if (result.decision == tune::Decision::Accept) return result;
        const std::string why = "all together did not pay: " + result.reason;
        over ? drop_all(chosen, tune::Standing::Rejected, why) : drop(chosen.back(), tune::Standing::Rejected, why);
      } catch (const tune::SideFailed& failure) {
        drop(chosen.back(), tune::Standing::Failed, "all together failed: " + blame(failure));
      }
    }
  }

  tune::DuelResult against_nothing(const Names& chosen) {
    if (chosen == alone_.first) return alone_.second;  // that was the trial by which it was accepted
    return bench_.duel({}, chosen, search_->conclusion()).first;
  }

  void drop(const std::string& name, tune::Standing standing, const std::string& reason) {
    const auto force = search_->best();
    if (std::find(force.begin(), force.end(), name) == force.end()) return;  // it went with what it requires
    warn(name + " is taken back: " + reason);
    search_->drop(name, standing, reason);
  }

  void drop_all(const Names& chosen, tune::Standing standing, const std::string& reason) {
    for (auto name = chosen.rbegin(); name != chosen.rend(); ++name) drop(*name, standing, reason);
  }

  /// What is refused by itself in a combination that is refused; else its last.
  void drop_culprits(const Names& chosen, const tune::Ruling& together) {
    bool found = false;
    for (const auto& name : chosen) {
      const auto& needs = tune::find_strategy(name).traits.requires_;
      Names alone;
      std::copy_if(chosen.begin(), chosen.end(), std::back_inserter(alone), [&](const auto& other) {
        return other == name || std::find(needs.begin(), needs.end(), other) != needs.end();
      });
      const auto ruling = alone == chosen ? together : verify(alone);
      if (ruling.held) continue;
      found = true;
      drop(name, tune::Standing::Refused, ruling.reason);
    }
    if (!found) drop(chosen.back(), tune::Standing::Refused, "all together were refused: " + together.reason);
  }

  tune::Certificate certificate(const Names& chosen, const std::optional<tune::DuelResult>& result) {
    tune::Certificate made;
    made.key = key_;
    made.level = options_.level();
    made.created = now_utc();
    made.steps_planned = options_.steps_planned();
    made.step_seconds = bench_.step_seconds();
    made.step_spread = bench_.spread();
    made.step_faults = bench_.faults();
    if (bench_.load().disturbed()) made.disturbance = bench_.load().evidence();
    made.baseline_seconds = result ? result->incumbent : bench_.step_seconds();
    made.tuned_seconds = result ? result->challenger : bench_.step_seconds();
    if (result) made.speedup = result->speedup;
    made.entries = search_->entries();
    for (auto& entry : made.entries) {
      entry.cost = tune::find_strategy(entry.strategy).traits.cost;
      entry.evidence = evidence_[entry.strategy];
      if (const auto last = final_.find(entry.strategy); last != final_.end()) {
        std::tie(entry.standing, entry.reason) = last->second;
      }
    }
    made.verification["restored"] =
        "model, optimizer and random generators proven by hash to be what they were; "
        "what only the loss function captures is not covered";
    if (!chosen.empty()) {
      made.verification["all together, as " + std::string(tune::name(widest(chosen)))] = rulings_[chosen].reason;
    }
    made.events = events_;
    const auto [seconds, faults] = bench_.untouched();
    made.relate(seconds, faults);
    made.compile_seconds = compiling_;
    made.tuning_seconds = std::max(0.0, tune::seconds_now() - began_ - compiling_);
    return made;
  }

  /// What is wrong with a remembered certificate; empty where it holds.
  std::string canary(const tune::Certificate& found) {
    const tune::StepNow now{bench_.step_seconds(), bench_.spread(), bench_.disturbed(), now_utc()};
    if (auto why = tune::why_not_trusted(found, now); !why.empty()) return why;
    const auto names = found.accepted();
    for (const auto& name : names) {
      if (const auto why = skipped_.find(name); why != skipped_.end()) return name + ": " + why->second;
    }
    try {
      const auto compared = [&](const Names& one, const Names& other, const tune::DuelOptions& options) {
        return bench_.duel(one, other, options).first;
      };
      if (names.empty()) {
        const auto again = tune::worth_another_look(found);
        if (again.empty() || skipped_.contains(again)) return "";
        const auto result = compared({}, {again}, tune::DuelOptions::canary(options_.seed()));
        return result.decision == tune::Decision::Accept ? again + " pays now: " + result.reason : "";
      }
      if (const auto ruling = verify_with(glance(), names); !ruling.held) return ruling.reason;
      const auto result = compared({}, names, tune::DuelOptions::canary(options_.seed()));
      if (result.speedup.mid <= 1) return result.reason;
      for (const auto& name : names.size() > 1 ? names : Names{}) {
        const auto without = compared(names, rest_of(names, name), tune::DuelOptions::member(options_.seed()));
        if (without.decision == tune::Decision::Accept)
          return "the rest is faster without " + name + ": " + without.reason;
      }
      return "";
    } catch (const tune::SideFailed& failure) {
      return blame(failure);
    }
  }

  /// Without one, and without those that require it.
  static Names rest_of(const Names& names, const std::string& without) {
    Names rest;
    std::copy_if(names.begin(), names.end(), std::back_inserter(rest), [&](const auto& name) {
      const auto needs = tune::find_strategy(name).traits.requires_;
      return name != without && std::find(needs.begin(), needs.end(), without) == needs.end();
    });
    return rest;
  }

  tune::Run& run_;
  tune::Escrow& escrow_;
  const AccelerateOptions& options_;
  std::vector<tune::RegisteredStrategy> strategies_;
  tune::Bench bench_;
  tune::CertificateKey key_;
  double began_ = tune::seconds_now();
  double compiling_ = 0;
  bool looked_ = false;
  Names events_;
  std::optional<tune::Search> search_;
  std::optional<tune::Verifier> verifier_;
  std::optional<tune::Verifier> glance_;
  std::pair<Names, tune::DuelResult> alone_;                       // the last trial against nothing
  std::map<std::string, std::map<std::string, double>> evidence_;  // of the look at each strategy that was faster
  std::map<std::string, std::string> skipped_;
  std::map<std::string, std::pair<tune::Standing, std::string>> final_;  // of strategies that failed before the search
  std::map<Names, tune::Ruling> rulings_;
};

}  // namespace

Plan accelerate(torch::nn::Module& model, torch::optim::Optimizer& optimizer, LossFunction loss,
                std::vector<Batch> batches, const AccelerateOptions& options) {
  OXY_CHECK(options.steps_planned() >= 1, InvalidArgument, "steps_planned is ", options.steps_planned(),
            ", expected at least 1.");
  OXY_CHECK(options.budget() >= 0 && std::isfinite(options.budget()), InvalidArgument, "budget is ", options.budget(),
            " s, expected a finite number of seconds, or 0 for what tune::SearchOptions::for_run() allows.");
  OXY_CHECK(options.folder().empty() || options.remember(), InvalidArgument, "folder is ", in_quotes(options.folder()),
            ", and remember is false, so nothing would be stored there. Leave folder out, or set remember(true).");
  static_cast<void>(tune::allows(options.level(), tune::Kind::Exact));
  resolve_vector_math();
  auto run = std::make_unique<tune::Run>(model, optimizer, std::move(loss), std::move(batches), options.clip_norm());
  std::optional<tune::CertificateStore> store;
  if (options.remember()) store.emplace(options.folder());
  std::optional<tune::Certificate> certificate;
  auto widest = tune::Kind::Exact;
  {
    const KeptPool kept;
    tune::Escrow escrow(*run);
    Tuning tuning(*run, escrow, options);
    try {
      if (store) certificate = tuning.reuse(*store);
      if (!certificate) certificate = tuning.measure();
    } catch (...) {
      tuning.bench().rewind();
      throw;
    }
    tuning.bench().rewind();
    escrow.prove();
    tuning.put_in_force(*certificate);
    widest = tuning.widest(run->in_force());
  }
  give_back_host_memory();  // what references and snapshots took: the steps that follow do not need it
  if (const auto why = store ? store->try_put(*certificate) : ""; !why.empty()) {
    certificate->events.push_back("step 0: the plan is not stored, so the next run tunes again: " + why);
    warn(certificate->events.back());
  }
  return Plan(
      std::make_unique<Plan::Impl>(std::move(run), std::move(*certificate), std::move(store), widest, options.seed()));
}

}  // namespace oxytorch
