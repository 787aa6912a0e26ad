#include "oxytorch/tune/verify.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "generators/generators.h"
#include "oxytorch/error.h"
#include "oxytorch/memory/parked.h"
#include "oxytorch/tune/measure.h"
#include "oxytorch/tune/step_judge.h"
#include "oxytorch/tune/verdict.h"
#include "tune/chance.h"
#include "tune/digest.h"
#include "tune/optimizer_state.h"
#include "tune/record.h"
#include "tune/sources.h"

namespace oxytorch::tune {
namespace {

constexpr std::size_t kKept = 4;      // steps of a candidate that are held at once; the rest is taken anew
constexpr double kKeptByTrade = 0.1;  // of optimizer state that a trade holds in a lower precision, relative

/// What is wrong, as a sentence.
struct Wrong {
  std::string words;
};

std::string brief(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

/// The run as given over all steps.
struct Given {
  Tensors losses;
  std::vector<std::string> generators;
};

}  // namespace

struct Verifier::Impl {
  Impl(Run& r, Snapshot& s, VerifierOptions o) : run(r), snapshot(s), options(o), recorder(r) {}

  [[nodiscard]] const Batch& batch(int step) const {
    return run.batches()[static_cast<std::size_t>(step) % run.batches().size()];
  }

  /// Steps that are taken.
  [[nodiscard]] int count() const { return options.steps == 1 ? 1 : options.steps + options.span; }

  [[nodiscard]] std::string generators_now() const {
    Digest digest;
    for (const auto& state : generators::states(run.device())) digest.add("random generator", state);
    return digest.text();
  }

  // -- exact --------------------------------------------------------------------------------------------------------

  std::pair<std::string, Tensors> steps_with(const std::vector<std::string>& names) {
    snapshot.restore();
    run.set_active(names);
    Tensors losses;
    for (int i = 0; i < count(); ++i) losses.push_back(copied(run.step(batch(i))));
    run.set_active({});
    return {snapshot.digest(), losses};
  }

  std::string exact() {
    if (!reference) {
      reference = steps_with({});
      // A step that does not repeat itself cannot be held to its bits.
      repeats = steps_with({}).first == reference->first;
    }
    if (!repeats) throw Wrong{"two runs of the step as given differ in their bits: nothing can be held to them"};
    const auto [digest, losses] = steps_with(candidate);
    for (int i = 0; i < count(); ++i) {
      const auto k = static_cast<std::size_t>(i);
      Digest mine, theirs;
      mine.add("loss", losses[k]);
      theirs.add("loss", reference->second[k]);
      if (mine.text() == theirs.text()) continue;
      throw Wrong{"it claims to change no bit, and the loss of step " + std::to_string(i + 1) + " is " +
                  brief(number(losses[k])) + " instead of " + brief(number(reference->second[k])) +
                  " or differs in its last bits"};
    }
    if (digest != reference->first) {
      throw Wrong{"it claims to change no bit, and weights, state or random numbers differ after " +
                  std::to_string(count()) + " steps"};
    }
    return "all bits are the same after " + std::to_string(count()) + " steps";
  }

  // -- steps --------------------------------------------------------------------------------------------------------

  /// Takes the candidate through its steps without a break; what it stood on before those of `keep` is kept. Returns
  /// the losses of all steps and the states of the generators after each.
  Given observe(const std::vector<int>& keep, std::vector<Observed>& seen,
                std::vector<std::unique_ptr<Snapshot>>& before) {
    Given all;
    snapshot.restore();
    for (int i = 0; i <= keep.back(); ++i) {
      const bool kept = std::find(keep.begin(), keep.end(), i) != keep.end();
      if (kept) before.push_back(std::make_unique<Snapshot>(run));
      auto now = recorder.forward_backward(batch(i));
      recorder.last_update();
      all.losses.push_back(now.loss);
      all.generators.push_back(generators_now());
      if (!kept) continue;
      recorder.note_updated(now);
      seen.push_back(std::move(now));
    }
    return all;
  }

  const Given& as_given() {
    if (!given) {
      std::vector<Observed> seen;
      std::vector<std::unique_ptr<Snapshot>> before;
      snapshot.restore();
      start = generators_now();
      given = observe({count() - 1}, seen, before);
      for (const auto& loss : given->losses) {
        if (!std::isfinite(number(loss))) throw Wrong{"the loss of the step as given is " + brief(number(loss))};
      }
    }
    return *given;
  }

  // -- loss, gradients, buffers ---------------------------------------------------------------------------------------

  ValueErrors measure(const Observed& seen, const Observed& right, const Tensors& buffers_before) const {
    ValueMeter meter(number(seen.loss), number(right.loss));
    for (std::size_t i = 0; i < recorder.labels().size(); ++i)
      meter.gradient(recorder.labels()[i], seen.gradients[i], 1, right.gradients[i]);
    for (std::size_t i = 0; i < recorder.buffer_labels().size(); ++i) {
      meter.buffer(recorder.buffer_labels()[i], seen.buffers[i], right.buffers[i], buffers_before[i]);
    }
    return meter.found();
  }

  /// The yardstick of a kind: the step as given, or stock torch's own at that precision. From where the run stands.
  Observed yardstick(Kind kind, int step, const Observed& taken) {
    return kind >= Kind::Precision ? recorder.under_autocast(batch(step), taken)
                                   : recorder.forward_backward(batch(step), &taken);
  }

  /// How far off the yardstick is itself at the start; sets no_truth where the model does not run in float64.
  const ValueErrors& usual(Kind kind) {
    auto& known = usual_[kind >= Kind::Precision];
    if (known) return *known;
    snapshot.restore();
    const auto buffers = copies(run.model().buffers());
    const auto first = recorder.forward_backward(batch(0));
    std::optional<Observed> right;
    try {
      right = recorder.in_float64(batch(0), snapshot, first);
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      no_truth = "the model does not run in float64 (" + text.substr(0, text.find('\n')) + ")";
    }
    if (!right && kind >= Kind::Precision) right = first;
    known.emplace();
    if (right) {
      snapshot.restore();
      known = measure(kind >= Kind::Precision ? recorder.under_autocast(batch(0), first) : first, *right, buffers);
    }
    snapshot.restore();
    return *known;
  }

  /// A compared step of the candidate, as the judge asks for it.
  class Again : public ComparedStep {
   public:
    Again(Impl& verifier, int step, Kind kind, const Observed& seen, Snapshot& before)
        : self_(verifier), step_(step), kind_(kind), seen_(seen), before_(before) {}

    Gradients gradients() override { return seen_.gradients; }
    Gradients take_as_given() override {
      before_.restore();
      buffers_ = copies(self_.run.model().buffers());
      right_ = self_.recorder.forward_backward(batch(), &seen_);
      return right_.gradients;
    }
    Gradients take_in_float64() override {
      right_ = self_.recorder.in_float64(batch(), before_, seen_);
      return right_.gradients;
    }
    ValueErrors errors() override { return self_.measure(seen_, right_, buffers_); }
    ValueErrors errors_with(const Gradients& gradients) override {
      auto other = seen_;
      other.gradients = gradients;
      return self_.measure(other, right_, buffers_);
    }
    ValueErrors yardstick_errors() override {
      before_.restore();
      return self_.measure(self_.yardstick(kind_, step_, seen_), right_, buffers_);
    }
    std::pair<Gradients, Gradients> take_apart(int state) override {
      const Nudge nudge(self_.run.parameters(), kind_ >= Kind::Precision, step_, state);
      before_.restore();
      self_.run.set_active(self_.candidate);
      self_.recorder.move(nudge);
      const auto apart = self_.recorder.forward_backward(batch());
      self_.run.set_active({});
      before_.restore();
      self_.recorder.move(nudge);
      return {apart.gradients, self_.recorder.forward_backward(batch(), &apart).gradients};
    }

   private:
    [[nodiscard]] const Batch& batch() const { return self_.batch(step_); }

    Impl& self_;
    int step_;
    Kind kind_;
    const Observed& seen_;
    Snapshot& before_;
    Observed right_;   // the reference
    Tensors buffers_;  // before the step
  };

  /// Judges values of the compared steps that are yet to come.
  StepJudge judge_of(Kind kind) {
    const auto& base = usual(kind);  // says whether the model runs in float64, too
    return {base, kind >= Kind::Precision, no_truth.empty(), options.steps == 1};
  }

  void judge_values(StepJudge& judge, const ComparedSteps& steps, int step, Kind kind, const Observed& seen,
                    Snapshot& before, Ruling& ruling) {
    Again again(*this, step, kind, seen, before);
    const auto why = judge.fault(again, steps.wide.contains(step));
    judge.add_to(ruling.evidence);
    if (!why.empty()) throw Wrong{"step " + std::to_string(step + 1) + ": " + why};
  }

  // -- the update -----------------------------------------------------------------------------------------------------

  /// What a step changed, against the update in float64 from its own gradients. `wrong`: state that is missing.
  std::vector<NamedChange> changes(const Observed& seen, Snapshot& before, std::vector<std::string>* wrong) {
    before.restore();
    const auto origin = copies(run.parameters());
    const auto states = recorder.states();
    auto right = recorder.updated_in_float64(seen.gradients);
    before.restore();
    if (!right)
      right = recorder.updated_by(seen.gradients);  // an optimizer that torch does not know is held against itself
    std::vector<NamedChange> found;
    for (std::size_t i = 0; i < recorder.labels().size(); ++i) {
      found.push_back(
          measured_change(recorder.labels()[i], origin[i], seen.parameters[i], right->parameters[i], false));
      for (const at::Tensor& one : {origin[i], seen.parameters[i], right->parameters[i]}) memory::rest(one);
    }
    for (const auto& [name, wanted] : right->states) {
      const auto mine = seen.states.find(name);
      if (mine == seen.states.end() || !mine->second.sizes().equals(wanted.sizes())) {
        if (wrong != nullptr) wrong->push_back("the optimizer's " + name + " is missing or of another shape");
        continue;
      }
      if (!wanted.is_floating_point()) continue;
      const auto known = states.find(name);
      found.push_back(measured_change(name, known == states.end() ? at::Tensor() : known->second, mine->second, wanted,
                                      /*state=*/true));
      memory::rest(wanted);
      memory::rest(mine->second);
    }
    return found;
  }

  void judge_update(int step, Kind kind, const Observed& seen, Snapshot& before, Ruling& ruling) {
    std::vector<std::string> wrong;
    const auto found = changes(seen, before, &wrong);
    const bool loose = kind == Kind::Trade;
    auto faults = update_faults(found, {}, {}, loose);
    if (!faults.words.empty()) {  // how far off the update of the step as given is itself: only where it decides
      before.restore();
      auto as_given = recorder.forward_backward(batch(step));
      recorder.last_update();
      recorder.note_updated(as_given);
      faults = update_faults(found, changes(as_given, before, nullptr), {}, loose);
    }
    ruling.evidence["update_error"] = std::max(ruling.evidence["update_error"], faults.worst);
    faults.words.insert(faults.words.begin(), wrong.begin(), wrong.end());
    if (!faults.words.empty()) throw Wrong{"step " + std::to_string(step + 1) + ": " + faults.words.front()};
  }

  // -- what all steps show
  // ---------------------------------------------------------------------------------------------

  /// All that no strategy may change by being made active, the optimizer's state apart.
  [[nodiscard]] std::string values_now() const {
    Digest digest;
    for (const auto& p : run.parameters()) digest.add("parameter", p);
    for (const auto& b : run.model().buffers()) digest.add("buffer", b);
    for (const auto& slot : run.slots()) digest_options(slot.original(), slot.name(), digest);
    return digest.text() + generators_now();
  }

  void judge_applied(Kind kind) {
    const bool trades = kind == Kind::Trade;
    std::map<std::string, at::Tensor> before, after;
    std::string values;
    snapshot.restore();
    if (trades) {  // its state may be held in a lower precision, so it is looked at apart
      before = recorder.states();
      values = values_now();
    }
    run.set_active(candidate);
    const bool same = trades ? values_now() == values : snapshot.digest() == snapshot.held();
    if (trades) after = recorder.states();
    run.set_active({});
    if (!same) throw Wrong{"making it active changes weights, optimizer state or random generators"};
    for (const auto& [name, held] : before) {
      const auto found = after.find(name);
      if (found == after.end()) throw Wrong{"making it active loses the optimizer's " + name};
      const auto wide = held.to(at::kDouble);
      const double size = wide.norm().item<double>();
      const double change = (found->second.to(at::kDouble) - wide).norm().item<double>();
      if (!(change <= kKeptByTrade * size)) {
        throw Wrong{"making it active changes the optimizer's " + name + " by " + brief(change / size) +
                    " of its size"};
      }
    }
  }

  /// Whether the candidate draws other random numbers; none, or more than none, where it should not, is wrong.
  bool draws_others(const Given& found) {
    const auto& all = as_given().generators;
    if (const auto why = generators_fault(start, found.generators, all); !why.empty()) throw Wrong{why};
    const bool draws = all.front() != start;
    const bool differs = !std::equal(found.generators.begin(), found.generators.end(), all.begin());
    snapshot.restore();
    run.set_active(candidate);
    const bool pieces = run.micro_batches() > 1;  // of a batch draw as many numbers, for other rows
    run.set_active({});
    return draws && (differs || pieces);
  }

  void judge_random_numbers(Kind kind) {
    const auto with = [&](const std::vector<std::string>& active, const auto& look) {
      snapshot.restore();
      run.set_active(active);
      const auto found = look();
      run.set_active({});
      return found;
    };
    const auto losses = [&] { return draw_losses(run, batch(0)); };
    const auto backward = [&] { return backward_error(run, batch(0)); };
    if (const auto why = draws_fault(with(candidate, losses), with({}, losses)); !why.empty()) throw Wrong{why};
    const double error = with(candidate, backward);
    if (!(error <= quotient_allowance(kind, with({}, backward)))) {
      throw Wrong{"with random numbers the gradient is off by " + brief(error) +
                  " from the difference quotient of the loss: backward may see other ones than forward did"};
    }
  }

  // -- trajectories
  // ----------------------------------------------------------------------------------------------------

  /// The mean loss over the last half of a trajectory; `seed` 0 is the run as given.
  double trajectory(std::uint64_t seed) {
    snapshot.restore();
    std::vector<std::size_t> order(static_cast<std::size_t>(options.trajectory));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i % run.batches().size();
    if (seed != 0) {
      std::mt19937_64 shuffler(seed);
      std::shuffle(order.begin(), order.end(), shuffler);
      for (auto& generator : generators::all(run.device())) generator.set_current_seed(seed);
    }
    double sum = 0, taken = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const double loss = number(run.step(run.batches()[order[i]]));
      if (2 * i < order.size()) continue;
      sum += loss;
      taken += 1;
    }
    return sum / taken;
  }

  /// Where stock torch ends at bfloat16: with few batches, orders of them say little about how far it may be from here.
  double reduced_end() {
    if (!reduced_at) {
      const UnderAutocast narrow(run);
      reduced_at = trajectory(0);
    }
    return *reduced_at;
  }

  void judge_trajectory(Kind kind, Ruling& ruling) {
    if (ends.empty()) ends.push_back(trajectory(0));
    snapshot.restore();
    run.set_active(candidate);
    const double reached = trajectory(0);
    run.set_active({});
    RunEnd end{options.trajectory, reached, ends.front(), number(as_given().losses.front())};
    end.as_given = [&] {
      for (auto seed = ends.size(); seed <= static_cast<std::size_t>(options.seeds); ++seed) {
        ends.push_back(trajectory(seed));
      }
      return ends;
    };
    if (kind >= Kind::Precision) end.reduced = [&] { return reduced_end(); };
    if (const auto why = end_fault(end, ruling.evidence); !why.empty()) throw Wrong{why};
  }

  // -- all of it
  // -------------------------------------------------------------------------------------------------------

  /// Judges the compared steps of the candidate, as much as may be held at once; `look` at each of them.
  template <class Look>
  void each_compared(const ComparedSteps& steps, const Look& look) {
    for (std::size_t at = 0; at < steps.compared.size(); at += kKept) {
      const std::vector<int> keep(
          steps.compared.begin() + static_cast<std::ptrdiff_t>(at),
          steps.compared.begin() + static_cast<std::ptrdiff_t>(std::min(at + kKept, steps.compared.size())));
      std::vector<Observed> seen;
      std::vector<std::unique_ptr<Snapshot>> before;
      snapshot.restore();
      run.set_active(candidate);
      observe(keep, seen, before);
      run.set_active({});
      for (std::size_t k = 0; k < keep.size(); ++k) look(keep[k], seen[k], *before[k]);
      snapshot.restore();
    }
  }

  std::string compared(Kind kind, Ruling& ruling) {
    const auto drawn_by = options.drawn_by.value_or((fresh_bits() ^ options.seed) >> 11);  // which a double holds
    const auto steps = draw_steps(count(), options.steps, drawn_by);
    ruling.evidence["drawn_by"] = static_cast<double>(drawn_by);
    ruling.evidence["compared"] = static_cast<double>(steps.compared.size());
    judge_applied(kind);
    std::vector<Observed> none;
    std::vector<std::unique_ptr<Snapshot>> no_state;
    snapshot.restore();
    run.set_active(candidate);
    const auto taken = observe({count() - 1}, none, no_state);
    run.set_active({});
    no_state.clear();
    if (const auto why = losses_fault(taken.losses, as_given().losses); !why.empty()) throw Wrong{why};
    const bool quiet = draws_others(taken);
    std::optional<StepJudge> judge;
    if (!quiet) judge = judge_of(kind);
    each_compared(steps, [&](int step, const Observed& seen, Snapshot& before) {
      judge_update(step, kind, seen, before, ruling);
      if (judge) judge_values(*judge, steps, step, kind, seen, before, ruling);
    });
    if (quiet) {
      judge_random_numbers(kind);
      const Still still(run.model());
      snapshot.restore();
      const auto here = generators_now();
      static_cast<void>(run.losses(batch(0)));
      if (generators_now() != here) {
        throw Wrong{
            "it draws other random numbers than the step as given, by functions that are no modules, so that "
            "its gradients cannot be compared"};
      }
      std::array<std::optional<ValueErrors>, 2> loud;
      usual_.swap(loud);
      judge = judge_of(kind);
      each_compared(steps, [&](int step, const Observed& seen, Snapshot& before) {
        judge_values(*judge, steps, step, kind, seen, before, ruling);
      });
      usual_.swap(loud);
    } else if (count() > 1) {
      judge_trajectory(kind, ruling);
    }
    std::string text = "loss, gradients, buffers and updates of " + std::to_string(steps.compared.size()) + " of " +
                       std::to_string(count()) + " steps are as near to float64 as stock torch's";
    if (quiet) text += "; it draws other random numbers: judged with dropout at zero, and the losses apart";
    return no_truth.empty() ? text : text + "; " + no_truth + ": it is compared with the step as given alone";
  }

  Ruling check(Kind kind, std::vector<std::string> names) {
    Ruling ruling;
    candidate = std::move(names);
    ruling.evidence["steps"] = count();
    try {
      ruling.reason = kind == Kind::Exact ? exact() : compared(kind, ruling);
      ruling.held = true;
    } catch (const Wrong& wrong) {
      ruling.reason = wrong.words;
    }
    ruling.reason += '.';
    return ruling;
  }

  Run& run;
  Snapshot& snapshot;
  VerifierOptions options;
  Recorder recorder;
  std::vector<std::string> candidate;  // what is judged
  std::optional<std::pair<std::string, Tensors>> reference;
  bool repeats = true;
  std::optional<Given> given;
  std::string start;                                 // of the random generators
  std::string no_truth;                              // why the model does not run in float64
  std::array<std::optional<ValueErrors>, 2> usual_;  // of the step as given, and of stock torch at lower precision
  std::vector<double> ends;  // of trajectories as given: of the run's own seed, then of others where they decide
  std::optional<double> reduced_at;
};

Verifier::Verifier(Run& run, Snapshot& snapshot, VerifierOptions options)
    : impl_(std::make_unique<Impl>(run, snapshot, options)) {
  OXY_CHECK(options.steps > 0 && options.trajectory > 0 && options.seeds > 0, InvalidArgument,
            "steps, trajectory and seeds must be at least 1; they are ", options.steps, ", ", options.trajectory,
            " and ", options.seeds, ".");
  OXY_CHECK(!run.batches().empty(), InvalidArgument, "the run has no batch to verify by. Give it some of its own.");
  OXY_CHECK(options.span >= 0, InvalidArgument, "span must not be negative; it is ", options.span, ".");
}
Verifier::~Verifier() = default;

Ruling Verifier::check(Kind kind) {
  auto& self = *impl_;
  const auto names = self.run.active();
  try {
    self.run.set_active({});
    auto ruling = self.check(kind, names);
    self.run.set_active({});
    self.snapshot.restore();
    self.run.set_active(names);
    return ruling;
  } catch (...) {
    self.run.set_active({});
    self.snapshot.restore();
    throw;
  }
}

}  // namespace oxytorch::tune
