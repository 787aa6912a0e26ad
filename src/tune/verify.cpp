#include "oxytorch/tune/verify.h"

#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "optim/generators.h"
#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/optim/optimizer.h"
#include "tune/digest.h"
#include "tune/optimizer_state.h"
#include "tune/sources.h"

namespace oxytorch::tune {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr double kFactor = 3;         // of stock's own distance from float64
constexpr std::size_t kKept = 4;      // steps of a candidate that are held at once; the rest is taken anew
constexpr std::size_t kInDouble = 2;  // compared steps that are taken in float64 whatever the cheap comparison says

at::Tensor copied(const at::Tensor& t) { return t.defined() ? t.detach().clone() : t; }

Tensors copies(const Tensors& all) {
  Tensors result;
  for (const auto& t : all) result.push_back(copied(t));
  return result;
}

Tensors gradients(const Tensors& parameters) {
  Tensors result;
  for (const auto& p : parameters) result.push_back(copied(p.grad()));
  return result;
}

Batch as_double(const Batch& batch) {
  const auto wide = [](const at::Tensor& t) { return t.defined() && t.is_floating_point() ? t.to(at::kDouble) : t; };
  return {wide(batch.input), wide(batch.target)};
}

at::Tensor as_double(const at::Tensor& t) { return (t.is_sparse() ? t.to_dense() : t).detach().to(at::kDouble); }

// Sums of squares in float64.
double square_sum(const at::Tensor& t) { return as_double(t).square().sum().item<double>(); }

/// Distances of a candidate and of stock from a reference, of one tensor.
struct Distance {
  double candidate = 0, stock = 0, scale = 0;  // root mean squares
};

Distance distance(const at::Tensor& candidate, const at::Tensor& stock, const at::Tensor& reference) {
  const auto wide = as_double(reference);
  const double count = static_cast<double>(std::max<std::int64_t>(1, wide.numel()));
  const auto rms = [&](double sum) { return std::sqrt(sum / count); };
  return {rms(square_sum(as_double(candidate) - wide)), rms(square_sum(as_double(stock) - wide)),
          rms(square_sum(wide))};
}

std::string brief(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

/// Model, optimizer state and gradients in float64 until the end of the scope.
class InDouble {
 public:
  explicit InDouble(Run& run) : run_(run) {
    Tensors all = run.model().parameters();
    for (const auto& t : run.model().buffers()) all.push_back(t);
    all.insert(all.end(), run.parameters().begin(), run.parameters().end());
    for (auto& t : all) {
      if (!t.defined() || !t.is_floating_point() || t.scalar_type() == at::kDouble) continue;
      held_.emplace_back(t, t.variable_data());
      if (t.is_leaf()) t.mutable_grad().reset();
      t.set_data(t.variable_data().to(at::kDouble));
    }
    knows_optimizer_ = each_state_tensor(run.original(), [](const at::Tensor&, at::Tensor& value) {
      if (value.is_floating_point()) value = value.to(at::kDouble);
    });
  }
  ~InDouble() {
    for (auto& [tensor, data] : held_) {
      if (tensor.is_leaf()) tensor.mutable_grad().reset();
      tensor.set_data(data);
    }
  }
  InDouble(const InDouble&) = delete;
  InDouble& operator=(const InDouble&) = delete;
  [[nodiscard]] bool knows_optimizer() const noexcept { return knows_optimizer_; }

 private:
  Run& run_;
  std::vector<std::pair<at::Tensor, at::Tensor>> held_;
  bool knows_optimizer_ = false;
};

/// What a step showed before and after the update.
struct Observed {
  at::Tensor loss;
  Tensors gradients, buffers, parameters;
};

double number(const at::Tensor& loss) { return loss.to(at::kDouble).item<double>(); }

}  // namespace

struct Verifier::Impl {
  Impl(Run& r, Escrow& e, VerifierOptions o) : run(r), escrow(e), options(o) {}

  [[nodiscard]] const Batch& batch(int step) const {
    return run.batches()[static_cast<std::size_t>(step) % run.batches().size()];
  }

  /// Steps that are taken.
  [[nodiscard]] int count() const { return options.steps == 1 ? 1 : options.steps + options.span; }

  struct Compared {
    std::vector<int> steps;
    std::vector<int> in_double;
    std::uint64_t drawn_by = 0;
  };

  /// Drawn for each check: what was put in force before cannot know it.
  [[nodiscard]] Compared draw() const {
    Compared found;
    found.drawn_by = options.drawn_by.value_or((fresh_bits() ^ options.seed) >> 11);  // which a double holds
    std::mt19937_64 lot(found.drawn_by);
    const auto some_of = [&](std::vector<int> all, std::size_t wanted) {
      std::shuffle(all.begin(), all.end(), lot);
      all.resize(std::min(wanted, all.size()));
      std::sort(all.begin(), all.end());
      return all;
    };
    found.steps.resize(static_cast<std::size_t>(options.steps));
    std::iota(found.steps.begin(), found.steps.end(), 0);
    const int last = count() - 1;
    if (last >= options.steps) {
      std::vector<int> between(static_cast<std::size_t>(last - options.steps));
      std::iota(between.begin(), between.end(), options.steps);
      for (const int step : some_of(between, static_cast<std::size_t>(std::max(0, options.drawn - 1)))) {
        found.steps.push_back(step);
      }
      found.steps.push_back(last);
    }
    found.in_double = some_of(found.steps, kInDouble);
    return found;
  }

  // -- exact --------------------------------------------------------------------------------------------------------

  std::pair<std::string, std::vector<at::Tensor>> steps_with(const std::vector<std::string>& names) {
    escrow.restore();
    run.bring(names);
    std::vector<at::Tensor> losses;
    for (int i = 0; i < count(); ++i) losses.push_back(copied(run.step(batch(i))));
    run.bring({});
    return {escrow.digest(), losses};
  }

  Ruling exact(const std::vector<std::string>& names) {
    if (!reference) {
      reference = steps_with({});
      // A step that does not repeat itself cannot be held to its bits.
      repeats = steps_with({}).first == reference->first;
    }
    const auto [digest, losses] = steps_with(names);
    Ruling ruling;
    ruling.evidence["steps"] = count();
    if (!repeats) {
      ruling.reason = "two runs of the step as given differ in their bits: nothing can be held to them.";
      return ruling;
    }
    for (int i = 0; i < count(); ++i) {
      const auto k = static_cast<std::size_t>(i);
      Digest mine, theirs;
      mine.add("loss", losses[k]);
      theirs.add("loss", reference->second[k]);
      if (mine.text() != theirs.text()) {
        ruling.reason = "it claims to change no bit, and the loss of step " + std::to_string(i + 1) + " is " +
                        brief(number(losses[k])) + " instead of " + brief(number(reference->second[k])) +
                        " or differs in its last bits.";
        return ruling;
      }
    }
    ruling.held = digest == reference->first;
    ruling.reason = ruling.held ? "all bits are the same after " + std::to_string(count()) + " steps."
                                : "it claims to change no bit, and weights, state or random numbers differ after " +
                                      std::to_string(count()) + " steps.";
    return ruling;
  }

  // -- refereed -----------------------------------------------------------------------------------------------------

  Observed forward_backward(const Batch& given) {
    Observed seen;
    seen.loss = copied(run.backward(given));
    seen.gradients = gradients(run.parameters());
    seen.buffers = copies(run.model().buffers());
    return seen;
  }

  /// Takes the candidate through its steps without a break; what it stood on before those of `keep` is kept.
  void observe(const std::vector<int>& keep, std::vector<Observed>& seen,
               std::vector<std::unique_ptr<Escrow>>& before) {
    escrow.restore();
    for (int i = 0; i <= keep.back(); ++i) {
      const bool kept = std::find(keep.begin(), keep.end(), i) != keep.end();
      if (kept) before.push_back(std::make_unique<Escrow>(run));
      auto now = forward_backward(batch(i));
      run.update();
      if (!kept) continue;
      now.parameters = copies(run.parameters());
      seen.push_back(std::move(now));
    }
  }

  Tensors updated_by(const Tensors& given) {
    auto parameters = run.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() =
          given[i].defined() ? given[i].to(parameters[i].scalar_type(), false, true) : given[i];
    }
    run.update();
    return copies(parameters);
  }

  /// An empty text where candidate is as near to the reference as stock is.
  std::string compare(const char* what, const Tensors& candidate, const Tensors& stock, const Tensors& wide,
                      double floor, double tiny, Ruling& ruling, const Tensors* origin = nullptr) const {
    double all = 0, count = 0;
    for (const auto& t : wide) {
      if (!t.defined() || !t.is_floating_point()) continue;
      all += square_sum(t);
      count += static_cast<double>(t.numel());
    }
    const double everywhere = std::sqrt(all / std::max(1.0, count));
    double& worst = ruling.evidence[std::string(what) + "_error"];
    for (std::size_t i = 0; i < wide.size(); ++i) {
      const std::string which = std::string(what) + " " + std::to_string(i);
      if (candidate[i].defined() != stock[i].defined()) {
        return "the " + which + " is there with it alone, or without it alone.";
      }
      if (!stock[i].defined() || !wide[i].defined()) continue;
      if (!stock[i].is_floating_point()) {
        if (!at::equal(candidate[i], stock[i])) return "the " + which + ", of whole numbers, differs.";
        continue;
      }
      auto d = distance(candidate[i], stock[i], wide[i]);
      if (origin != nullptr) {
        // An update is judged by its own size, not by that of the weights.
        d.scale = distance((*origin)[i], (*origin)[i], wide[i]).candidate;
      }
      if (!std::isfinite(d.stock)) continue;  // stock has no number to compare with
      const double bound = kFactor * d.stock + floor * d.scale + tiny * everywhere;
      if (d.scale > 0) worst = std::max(worst, d.candidate / d.scale);
      if (!(d.candidate <= bound)) {
        return "the " + which + " is " + brief(d.candidate) + " away from float64 (root mean square; its size is " +
               brief(d.scale) + "), stock torch " + brief(d.stock) + ".";
      }
    }
    return "";
  }

  /// A factor common to all gradients: their projection on those of float64.
  std::string common_factor(const Observed& seen, const Observed& stock, const Observed& wide, double floor,
                            Ruling& ruling) const {
    double own = 0, usual = 0, size = 0;
    for (std::size_t i = 0; i < wide.gradients.size(); ++i) {
      if (!wide.gradients[i].defined() || !stock.gradients[i].defined()) continue;
      const auto w = as_double(wide.gradients[i]);
      size += square_sum(w);
      own += (as_double(seen.gradients[i]) * w).sum().item<double>();
      usual += (as_double(stock.gradients[i]) * w).sum().item<double>();
    }
    if (size == 0 || !std::isfinite(usual)) return "";
    ruling.evidence["gradient_factor"] = own / size;
    if (std::abs(own / size - 1) <= kFactor * std::abs(usual / size - 1) + floor) return "";
    return "all gradients together are " + brief(own / size) + " times those of float64, stock torch's " +
           brief(usual / size) + " times.";
  }

  /// Loss, gradients and buffers against a reference; an empty text where they are as near to it as stock torch's.
  std::string judge_values(Kind kind, const Observed& seen, const Observed& stock, const Observed& reference,
                           Ruling& ruling) const {
    const bool precise = kind == Kind::Tolerance;
    const double floor = precise ? 1e-4 : 2e-3, tiny = precise ? 1e-6 : 1e-3;
    const double loss = number(seen.loss), usual = number(stock.loss), right = number(reference.loss);
    ruling.evidence["loss_error"] = std::max(ruling.evidence["loss_error"], std::abs(loss - right));
    if (std::isfinite(usual) &&
        !(std::abs(loss - right) <= kFactor * std::abs(usual - right) + floor * std::abs(right))) {
      return "the loss is " + brief(loss) + ", in float64 " + brief(right) + ", by stock torch " + brief(usual) + ".";
    }
    if (auto why = common_factor(seen, stock, reference, precise ? 1e-4 : 3e-3, ruling); !why.empty()) return why;
    auto why = compare("gradient", seen.gradients, stock.gradients, reference.gradients, floor, tiny, ruling);
    if (why.empty()) why = compare("buffer", seen.buffers, stock.buffers, reference.buffers, floor, tiny, ruling);
    return why;
  }

  Observed under_autocast(int step) {
    run.scope("referee",
              [device = run.device().type()] { return std::make_shared<amp::Autocast>(device, at::kBFloat16); });
    try {
      auto found = forward_backward(batch(step));
      run.scope("referee", {});
      return found;
    } catch (...) {
      run.scope("referee", {});
      throw;
    }
  }

  /// The step as given, in float32, is a reference good to 1e-6 at the price of one step; float64 costs three to four,
  /// and decides where the first shows more than rounding.
  std::string judge_step(int step, Kind kind, const Observed& seen, Escrow& before, bool in_double, Ruling& ruling) {
    before.restore();
    const auto origin = copies(run.parameters());
    const auto given = forward_backward(batch(step));
    std::optional<Observed> reduced;
    if (kind >= Kind::Precision) {
      before.restore();
      reduced = under_autocast(step);
    }
    const Observed& stock = reduced ? *reduced : given;
    auto why = judge_values(kind, seen, stock, given, ruling);
    if (!why.empty() || in_double) {
      before.restore();
      const InDouble scope(run);
      const auto wide = forward_backward(as_double(batch(step)));
      why = judge_values(kind, seen, stock, wide, ruling);
    }
    if (!why.empty() || kind == Kind::Trade) return why;

    before.restore();
    const auto usual_update = updated_by(seen.gradients);
    before.restore();
    Tensors right_update;
    bool knows = false;
    {
      const InDouble in_double(run);
      knows = in_double.knows_optimizer();
      if (knows) right_update = updated_by(seen.gradients);
    }
    if (!knows) right_update = usual_update;
    // Stock's own distance is nothing where it stands for the reference: then rounding of the weights is the floor.
    return compare("parameter after the update", seen.parameters, usual_update, right_update, 1e-3, knows ? 1e-8 : 3e-7,
                   ruling, &origin);
  }

  // -- trajectories -------------------------------------------------------------------------------------------------

  /// The mean loss over the last half of a trajectory; `seed` 0 is the run as given.
  double trajectory(std::uint64_t seed) {
    escrow.restore();
    std::vector<std::size_t> order(static_cast<std::size_t>(options.trajectory));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i % run.batches().size();
    if (seed != 0) {
      std::mt19937_64 shuffler(seed);
      std::shuffle(order.begin(), order.end(), shuffler);
      for (auto& generator : optim::generators(run.device())) generator.set_current_seed(seed);
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

  std::string judge_trajectory(Kind kind, const std::vector<std::string>& names, double first, Ruling& ruling) {
    if (band.empty()) {
      run.bring({});
      band.push_back(trajectory(0));
    }
    escrow.restore();
    run.bring(names);
    const double reached = trajectory(0), given = band.front();
    // A run that learns its few batches by heart ends near 0: the loss it began with is a measure too.
    double width = (kind == Kind::Tolerance ? 1e-3 : 1e-2) * std::max(std::abs(given), std::abs(first));
    const auto inside = [&] { return !std::isfinite(given) || std::abs(reached - given) <= width; };
    if (!inside()) {  // other seeds are run only where they decide
      run.bring({});
      for (auto seed = band.size(); seed <= static_cast<std::size_t>(options.seeds); ++seed) {
        band.push_back(trajectory(seed));
      }
      for (const double other : band) width = std::max(width, std::abs(other - given));
    }
    ruling.evidence["trajectory_loss"] = reached;
    ruling.evidence["trajectory_band"] = width;
    if (inside()) return "";
    return "after " + std::to_string(options.trajectory) + " steps the loss is " + brief(reached) + ", as given " +
           brief(given) + ", and seeds move it by at most " + brief(width) + ".";
  }

  Ruling refereed(Kind kind, const std::vector<std::string>& names) {
    Ruling ruling;
    const auto compared = draw();
    ruling.evidence["steps"] = count();
    ruling.evidence["drawn_by"] = static_cast<double>(compared.drawn_by);
    double first_loss = 0;
    for (std::size_t at = 0; at < compared.steps.size() && ruling.reason.empty(); at += kKept) {
      const std::vector<int> keep(
          compared.steps.begin() + static_cast<std::ptrdiff_t>(at),
          compared.steps.begin() + static_cast<std::ptrdiff_t>(std::min(at + kKept, compared.steps.size())));
      std::vector<Observed> seen;
      std::vector<std::unique_ptr<Escrow>> before;
      escrow.restore();
      run.bring(names);
      observe(keep, seen, before);
      run.bring({});
      if (at == 0) first_loss = number(seen.front().loss);
      for (std::size_t k = 0; k < keep.size() && ruling.reason.empty(); ++k) {
        const bool wide =
            std::find(compared.in_double.begin(), compared.in_double.end(), keep[k]) != compared.in_double.end();
        try {
          ruling.reason = judge_step(keep[k], kind, seen[k], *before[k], wide, ruling);
        } catch (const c10::Error& error) {
          ruling.reason =
              std::string("the referee could not take the step in float64: ") + error.what_without_backtrace();
        }
        if (!ruling.reason.empty()) ruling.reason = "step " + std::to_string(keep[k] + 1) + ": " + ruling.reason;
      }
      escrow.restore();
    }
    if (ruling.reason.empty()) ruling.reason = judge_trajectory(kind, names, first_loss, ruling);
    ruling.held = ruling.reason.empty();
    if (ruling.held) {
      ruling.reason = "loss, gradients, buffers and updates of " + std::to_string(compared.steps.size()) +
                      " steps are as near to float64 as stock torch's, and the loss after " +
                      std::to_string(options.trajectory) + " steps lies in the band of seeds.";
    }
    return ruling;
  }

  Run& run;
  Escrow& escrow;
  VerifierOptions options;
  std::optional<std::pair<std::string, std::vector<at::Tensor>>> reference;
  bool repeats = true;
  /// Losses at the end as given: of the run's own seed, then of others where they are asked for.
  std::vector<double> band;
};

Verifier::Verifier(Run& run, Escrow& escrow, VerifierOptions options)
    : impl_(std::make_unique<Impl>(run, escrow, options)) {
  OXY_CHECK(options.steps > 0 && options.trajectory > 0 && options.seeds > 0, InvalidArgument,
            "steps, trajectory and seeds must be at least 1; they are ", options.steps, ", ", options.trajectory,
            " and ", options.seeds, ".");
  OXY_CHECK(options.span >= 0 && options.drawn >= 0, InvalidArgument, "span and drawn must not be negative; they are ",
            options.span, " and ", options.drawn, ".");
}
Verifier::~Verifier() = default;

Ruling Verifier::check(Kind kind) {
  auto& self = *impl_;
  const auto names = self.run.in_force();
  try {
    auto ruling = kind == Kind::Exact ? self.exact(names) : self.refereed(kind, names);
    self.escrow.restore();
    self.run.bring(names);
    return ruling;
  } catch (...) {
    self.run.bring({});
    self.escrow.restore();
    throw;
  }
}

}  // namespace oxytorch::tune
