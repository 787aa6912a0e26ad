#include "oxytorch/tune/verify.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/rnn.h>
#include <torch/serialize/output-archive.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <utility>
#include <vector>

#include "optim/generators.h"
#include "oxytorch/amp.h"
#include "oxytorch/error.h"
#include "oxytorch/optim/optimizer.h"
#include "oxytorch/tune/kinks.h"
#include "oxytorch/tune/measure.h"
#include "oxytorch/tune/verdict.h"
#include "tune/digest.h"
#include "tune/optimizer_state.h"
#include "tune/sources.h"

namespace oxytorch::tune {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr std::size_t kKept = 4;  // steps of a candidate that are held at once; the rest is taken anew
constexpr double kJumps = 8;      // states a rounding apart, whose gradients show where kinks are
constexpr double kJumpBytes = 1 << 29;
constexpr double kRounding = 8 * 0x1p-23, kRoundingReduced = 0x1p-8;  // relative, of a parameter
constexpr double kSmall = 0.02;                                       // relative: what a look at one step lets pass
constexpr double kKeptByTrade = 0.1;  // of optimizer state that a trade holds in a lower precision, relative
constexpr int kDraws = 24;
constexpr double kRise = 0.03;  // of the loss, on either side of a difference quotient

/// What is wrong, as a sentence.
struct Wrong {
  std::string words;
};

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
  return batch.map([](const at::Tensor& t) { return t.is_floating_point() ? t.to(at::kDouble) : t; });
}

double number(const at::Tensor& loss) { return loss.to(at::kDouble).item<double>(); }

std::string brief(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
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

/// Every dropout of a module with probability zero until the end of the scope. One that a model calls as a function is
/// out of reach.
class Still {
 public:
  explicit Still(torch::nn::Module& model) {
    for (const auto& module : model.modules()) {
      of_dropout<torch::nn::Dropout>(*module);
      of_dropout<torch::nn::Dropout2d>(*module);
      of_dropout<torch::nn::Dropout3d>(*module);
      of_dropout<torch::nn::AlphaDropout>(*module);
      of_dropout<torch::nn::FeatureAlphaDropout>(*module);
      if (auto* lstm = module->as<torch::nn::LSTM>()) set(lstm->options_base.dropout());
      if (auto* gru = module->as<torch::nn::GRU>()) set(gru->options_base.dropout());
      if (auto* rnn = module->as<torch::nn::RNN>()) set(rnn->options_base.dropout());
      if (auto* attention = module->as<torch::nn::MultiheadAttention>()) set(attention->options.dropout());
    }
  }
  ~Still() {
    for (auto& [place, value] : before_) *place = value;
  }
  Still(const Still&) = delete;
  Still& operator=(const Still&) = delete;

 private:
  template <class Module>
  void of_dropout(torch::nn::Module& module) {
    if (auto* found = module.as<Module>()) set(found->options.p());
  }
  void set(double& probability) {
    before_.emplace_back(&probability, probability);
    probability = 0;
  }
  std::vector<std::pair<double*, double>> before_;
};

/// What a step showed before and after the update.
struct Observed {
  at::Tensor loss;
  Tensors gradients, buffers, parameters;
  std::map<std::string, at::Tensor> states;
};

/// The run as given over all steps.
struct Given {
  Tensors losses;
  std::vector<std::string> generators;
};

}  // namespace

struct Verifier::Impl {
  Impl(Run& r, Snapshot& s, VerifierOptions o) : run(r), snapshot(s), options(o) {
    std::map<const void*, std::string> known;
    for (const auto& item : run.model().named_parameters()) known[item.value().unsafeGetTensorImpl()] = item.key();
    for (std::size_t i = 0; i < run.parameters().size(); ++i) {
      const auto name = known.find(run.parameters()[i].unsafeGetTensorImpl());
      labels.push_back(name == known.end() ? "parameter " + std::to_string(i) : name->second);
    }
    for (const auto& item : run.model().named_buffers()) buffer_labels.push_back(item.key());
  }

  [[nodiscard]] const Batch& batch(int step) const {
    return run.batches()[static_cast<std::size_t>(step) % run.batches().size()];
  }

  /// Steps that are taken.
  [[nodiscard]] int count() const { return options.steps == 1 ? 1 : options.steps + options.span; }

  [[nodiscard]] std::string generators_now() const {
    Digest digest;
    for (const auto& state : optim::generator_states(run.device())) digest.add("random generator", state);
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

  std::string exact(const std::vector<std::string>& names) {
    if (!reference) {
      reference = steps_with({});
      // A step that does not repeat itself cannot be held to its bits.
      repeats = steps_with({}).first == reference->first;
    }
    if (!repeats) throw Wrong{"two runs of the step as given differ in their bits: nothing can be held to them"};
    const auto [digest, losses] = steps_with(names);
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

  Observed forward_backward(const Batch& given) {
    Observed seen;
    seen.loss = copied(run.backward(given));
    seen.gradients = gradients(run.parameters());
    seen.buffers = copies(run.model().buffers());
    return seen;
  }

  /// The optimizer's state by the parameter that it is of; empty where its class is not known.
  std::map<std::string, at::Tensor> states_now() {
    run.hand_back();
    std::map<const void*, std::size_t> place;
    for (std::size_t i = 0; i < run.parameters().size(); ++i) place[run.parameters()[i].unsafeGetTensorImpl()] = i;
    std::map<std::string, int> numbers;
    std::map<std::string, at::Tensor> found;
    const bool known = each_state_tensor(run.original(), [&](const at::Tensor& param, at::Tensor& value) {
      const auto& name = labels[place.at(param.unsafeGetTensorImpl())];
      found["state " + std::to_string(++numbers[name]) + " of " + name] = copied(value);
    });
    return known ? found : std::map<std::string, at::Tensor>();
  }

  /// Takes the candidate through its steps without a break; what it stood on before those of `keep` is kept. Returns
  /// the losses of all steps and the states of the generators after each.
  Given observe(const std::vector<int>& keep, std::vector<Observed>& seen,
                std::vector<std::unique_ptr<Snapshot>>& before) {
    Given all;
    snapshot.restore();
    for (int i = 0; i <= keep.back(); ++i) {
      const bool kept = std::find(keep.begin(), keep.end(), i) != keep.end();
      if (kept) before.push_back(std::make_unique<Snapshot>(run));
      auto now = forward_backward(batch(i));
      run.update();
      all.losses.push_back(now.loss);
      all.generators.push_back(generators_now());
      if (!kept) continue;
      now.parameters = copies(run.parameters());
      now.states = states_now();
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

  /// The step as given in float64; each parameter moved by a random part of itself first, at most `nudge` large.
  Observed in_float64(int step, Snapshot& before, double nudge = 0, std::mt19937_64* random = nullptr) {
    before.restore();
    const InDouble scope(run);
    if (random != nullptr) {
      const at::NoGradGuard no_grad;
      for (auto p : run.parameters()) {
        if (!p.is_floating_point()) continue;
        std::uniform_real_distribution<double> part(-nudge, nudge);
        auto factors = at::empty(p.sizes(), at::kDouble);
        std::generate_n(factors.data_ptr<double>(), factors.numel(), [&] { return 1 + part(*random); });
        p.mul_(factors.to(p.device()));
      }
    }
    return forward_backward(as_double(batch(step)));
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

  // -- loss, gradients, buffers ---------------------------------------------------------------------------------------

  ValueErrors measure(const Observed& seen, const Observed& right, const Tensors& buffers_before) const {
    ValueMeter meter(number(seen.loss), number(right.loss));
    for (std::size_t i = 0; i < labels.size(); ++i) meter.gradient(labels[i], seen.gradients[i], 1, right.gradients[i]);
    for (std::size_t i = 0; i < buffer_labels.size(); ++i) {
      meter.buffer(buffer_labels[i], seen.buffers[i], right.buffers[i], buffers_before[i]);
    }
    return meter.found();
  }

  /// The yardstick of a kind: the step as given, or stock torch's own at that precision. From where the run stands.
  Observed yardstick(Kind kind, int step) {
    return kind >= Kind::Precision ? under_autocast(step) : forward_backward(batch(step));
  }

  /// How far off the yardstick is itself at the start; sets no_truth where the model does not run in float64.
  const ValueErrors& usual(Kind kind) {
    auto& known = usual_[kind >= Kind::Precision];
    if (known) return *known;
    snapshot.restore();
    const auto buffers = copies(run.model().buffers());
    std::optional<Observed> right;
    try {
      right = in_float64(0, snapshot);
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      no_truth = "the model does not run in float64 (" + text.substr(0, text.find('\n')) + ")";
    }
    snapshot.restore();
    if (!right && kind >= Kind::Precision) right = forward_backward(batch(0));
    known.emplace();
    if (right) {
      snapshot.restore();
      known = measure(yardstick(kind, 0), *right, buffers);
    }
    snapshot.restore();
    return *known;
  }

  /// Gradients in float64 of states a rounding apart.
  std::vector<Tensors> jumps(int step, Kind kind, Snapshot& before) {
    double bytes = 0;
    for (const auto& p : run.parameters()) bytes += 8 * static_cast<double>(p.numel());
    const auto some = static_cast<int>(std::clamp(kJumpBytes / std::max(bytes, 1.0), 2.0, kJumps));
    std::mt19937_64 random(static_cast<std::uint64_t>(step));
    std::vector<Tensors> found;
    for (int i = 0; i < some; ++i) {
      found.push_back(
          in_float64(step, before, kind >= Kind::Precision ? kRoundingReduced : kRounding, &random).gradients);
    }
    return found;
  }

  /// The step as given in its own precision is a reference good to 1e-6 at the price of one step; float64 costs three
  /// to four, and decides where the first shows more than rounding.
  void judge_values(int step, Kind kind, const Observed& seen, Snapshot& before, bool wide, Ruling& ruling) {
    const auto& base = usual(kind);
    const auto& allowance = kind >= Kind::Precision ? kReduced : no_truth.empty() ? kFloat32 : kUnknown;
    const auto beyond = [&](const ValueErrors& found, const ValueErrors& of) {
      auto excess = values_beyond(found, of, allowance);
      if (options.steps == 1) std::erase_if(excess, [](const auto& one) { return one.relative < kSmall; });
      return excess;
    };
    before.restore();
    const auto buffers = copies(run.model().buffers());
    auto excess = beyond(measure(seen, forward_backward(batch(step)), buffers), base);
    if (no_truth.empty() && (wide || !excess.empty())) {
      const auto right = in_float64(step, before);
      const auto found = measure(seen, right, buffers);
      note(found, base, ruling);
      excess = beyond(found, base);
      if (!excess.empty()) {
        before.restore();
        const auto here = measure(yardstick(kind, step), right, buffers);
        excess = beyond(found, here);
        if (!excess.empty() && found.wrong.empty()) {  // less what the reference's own kinks explain
          auto smooth = seen;
          smooth.gradients = unexplained(seen.gradients, right.gradients, jumps(step, kind, before));
          excess = values_beyond(measure(smooth, right, buffers), here, allowance);
          if (excess.empty()) ruling.evidence["across_kinks"] = 1;
        }
      }
    }
    if (!excess.empty()) throw Wrong{"step " + std::to_string(step + 1) + ": " + excess.front().words};
  }

  static void note(const ValueErrors& found, const ValueErrors& base, Ruling& ruling) {
    auto& evidence = ruling.evidence;
    evidence["gradient_error"] = std::max(evidence["gradient_error"], found.worst());
    evidence["loss_error"] = std::max(evidence["loss_error"], found.loss / std::max(found.loss_size, 1e-12));
    evidence["usual_error"] = base.worst();
    evidence["float64_steps"] += 1;
  }

  // -- the update -----------------------------------------------------------------------------------------------------

  /// Lets the optimizer step with these gradients from where the run stands.
  Observed updated_by(const Tensors& some) {
    auto parameters = run.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = some[i].defined() ? some[i].to(parameters[i].scalar_type(), false, true) : some[i];
    }
    run.update();
    Observed found;
    found.parameters = copies(parameters);
    found.states = states_now();
    return found;
  }

  /// What a step changed, against the update in float64 from its own gradients. `wrong`: state that is missing.
  std::vector<NamedChange> changes(const Observed& seen, Snapshot& before, std::vector<std::string>* wrong) {
    before.restore();
    const auto origin = copies(run.parameters());
    const auto states = states_now();
    std::optional<Observed> right;
    {
      const InDouble scope(run);
      if (scope.knows_optimizer()) right = updated_by(seen.gradients);
    }
    before.restore();
    if (!right) right = updated_by(seen.gradients);  // an optimizer that torch does not know is held against itself
    std::vector<NamedChange> found;
    for (std::size_t i = 0; i < labels.size(); ++i) {
      found.push_back(measured_change(labels[i], origin[i], seen.parameters[i], right->parameters[i], false));
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
      auto as_given = forward_backward(batch(step));
      run.update();
      as_given.parameters = copies(run.parameters());
      as_given.states = states_now();
      faults = update_faults(found, changes(as_given, before, nullptr), {}, loose);
    }
    ruling.evidence["update_error"] = std::max(ruling.evidence["update_error"], faults.worst);
    faults.words.insert(faults.words.begin(), wrong.begin(), wrong.end());
    if (!faults.words.empty()) throw Wrong{"step " + std::to_string(step + 1) + ": " + faults.words.front()};
  }

  // -- what all steps show
  // ----------------------------------------------------------------------------------------------

  /// All that no strategy may change by being made active, the optimizer's state apart.
  [[nodiscard]] std::string values_now() const {
    Digest digest;
    for (const auto& p : run.parameters()) digest.add("parameter", p);
    for (const auto& b : run.model().buffers()) digest.add("buffer", b);
    for (const auto& group : run.original().param_groups()) {
      std::ostringstream options;
      torch::serialize::OutputArchive archive;
      group.options().serialize(archive);
      archive.save_to(options);
      digest.add("options", options.str());
    }
    return digest.text() + generators_now();
  }

  void judge_applied(Kind kind, const std::vector<std::string>& names) {
    const bool trades = kind == Kind::Trade;
    std::map<std::string, at::Tensor> before, after;
    std::string values;
    snapshot.restore();
    if (trades) {  // its state may be held in a lower precision, so it is looked at apart
      before = states_now();
      values = values_now();
    }
    run.set_active(names);
    const bool same = trades ? values_now() == values : snapshot.digest() == snapshot.held();
    if (trades) after = states_now();
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

  void judge_losses(const Given& found) {
    const auto& all = as_given().losses;
    for (std::size_t i = 0; i < found.losses.size(); ++i) {
      const std::string step = "step " + std::to_string(i + 1) + ": ";
      const auto &mine = found.losses[i], &theirs = all[i];
      if (!std::isfinite(number(mine))) {
        throw Wrong{step + "the loss is " + brief(number(mine)) + ", " + brief(number(theirs)) + " as given"};
      }
      if (mine.element_size() < theirs.element_size()) {
        throw Wrong{step + "the loss is " + c10::toString(mine.scalar_type()) + ", " +
                    c10::toString(theirs.scalar_type()) + " as given"};
      }
    }
    for (const auto type : {at::kBFloat16, at::kHalf}) {
      const auto coarse = [&](const Tensors& losses) {
        return std::all_of(losses.begin(), losses.begin() + static_cast<std::ptrdiff_t>(found.losses.size()),
                           [&](const auto& loss) { return at::equal(loss.to(type).to(loss.scalar_type()), loss); });
      };
      if (found.losses.size() > 2 && coarse(found.losses) && !coarse(all)) {
        throw Wrong{std::string("the loss is computed in ") + c10::toString(type) +
                    ": every one is a number of that dtype"};
      }
    }
  }

  /// Whether the candidate draws other random numbers; none, or more than none, where it should not, is wrong.
  bool draws_others(const Given& found, const std::vector<std::string>& names) {
    const auto& all = as_given().generators;
    if (const auto why = generators_fault(start, found.generators, all); !why.empty()) throw Wrong{why};
    const bool draws = all.front() != start;
    const bool differs = !std::equal(found.generators.begin(), found.generators.end(), all.begin());
    snapshot.restore();
    run.set_active(names);
    const bool pieces = run.micro_batches() > 1;  // of a batch draw as many numbers, for other rows
    run.set_active({});
    return draws && (differs || pieces);
  }

  /// Losses of one batch, each time with the next random numbers, and how far gradients are apart, two by two: of masks
  /// at another rate the mean loss may be the same.
  Draws draw_losses() {
    Draws found{.spread_of = "gradients"};
    Tensors before;
    for (int i = 0; i < kDraws; ++i) {
      found.losses.push_back(number(run.backward(batch(0))));
      if (i % 2 == 0) {
        before = gradients(run.parameters());
        continue;
      }
      double square = 0;
      for (std::size_t k = 0; k < before.size(); ++k) {
        const auto& now = run.parameters()[k].grad();
        if (!now.defined() || !before[k].defined()) continue;
        const auto change = now.is_sparse() ? (now - before[k]).to_dense() : now - before[k];
        square += change.detach().to(at::kDouble).square().sum().item<double>();
      }
      found.spreads.push_back(square / 2);
    }
    return found;
  }

  /// How far the gradient is from the difference quotient of the loss with the same random numbers, relative: a
  /// recomputation in backward with masks of its own is off by as much as masks matter.
  double backward_error() {
    const auto random = optim::generator_states(run.device());
    run.original().zero_grad();
    const auto whole = run.loss(batch(0));  // not in pieces, as the ends below
    whole.backward();
    const double there = number(whole.detach());
    Tensors moved, directions;
    double square = 0;
    for (const auto& p : run.parameters()) {
      if (!p.grad().defined()) continue;
      moved.push_back(p);
      directions.push_back((p.grad().is_sparse() ? p.grad().to_dense() : p.grad()).detach().clone());
      square += directions.back().to(at::kDouble).square().sum().item<double>();
    }
    const double norm = std::sqrt(square);
    if (norm == 0) return 0;
    const double length = kRise * std::abs(there) / norm;
    const at::NoGradGuard no_grad;
    std::vector<double> ends;
    for (const double factor : {length / norm, -2 * length / norm}) {
      for (std::size_t i = 0; i < moved.size(); ++i) moved[i].add_(directions[i], factor);
      optim::set_generator_states(run.device(), random);
      ends.push_back(number(run.loss(batch(0))));
    }
    return std::abs((ends[0] - ends[1]) / (2 * length) / norm - 1);
  }

  void judge_random_numbers(Kind kind, const std::vector<std::string>& names) {
    const auto with = [&](const std::vector<std::string>& active, const auto& look) {
      snapshot.restore();
      run.set_active(active);
      const auto found = look();
      run.set_active({});
      return found;
    };
    const auto losses = [&] { return draw_losses(); };
    const auto backward = [&] { return backward_error(); };
    if (const auto why = draws_fault(with(names, losses), with({}, losses)); !why.empty()) throw Wrong{why};
    const double error = with(names, backward);
    if (!(error <= quotient_allowance(kind, with({}, backward)))) {
      throw Wrong{"with random numbers the gradient is off by " + brief(error) +
                  " from the difference quotient of the loss: backward may see other ones than forward did"};
    }
  }

  // -- trajectories
  // -----------------------------------------------------------------------------------------------------

  /// The mean loss over the last half of a trajectory; `seed` 0 is the run as given.
  double trajectory(std::uint64_t seed) {
    snapshot.restore();
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

  void judge_trajectory(const std::vector<std::string>& names, Ruling& ruling) {
    if (ends.empty()) ends.push_back(trajectory(0));
    snapshot.restore();
    run.set_active(names);
    const double reached = trajectory(0);
    run.set_active({});
    ruling.evidence["end_loss"] = reached;
    ruling.evidence["given_loss"] = ends.front();
    if (in_any_band(reached, ends.front())) return;
    // A run that learns its few batches by heart ends near 0: the loss it began with is a measure too.
    const double first = std::abs(number(as_given().losses.front()));
    if (std::abs(reached - ends.front()) <= 1e-3 * first) return;
    for (auto seed = ends.size(); seed <= static_cast<std::size_t>(options.seeds); ++seed) {
      ends.push_back(trajectory(seed));
    }
    const auto band = band_of(ends);
    ruling.evidence["band_low"] = band.low;
    ruling.evidence["band_high"] = band.high;
    if (band.low <= reached && reached <= band.high) return;
    throw Wrong{"after " + std::to_string(options.trajectory) + " steps the loss is " + brief(reached) +
                ", outside of " + brief(band.low) + " to " + brief(band.high) + " that seeds span"};
  }

  // -- all of it
  // --------------------------------------------------------------------------------------------------------

  /// Judges the compared steps of the candidate, as much as may be held at once; `look` at each of them.
  template <class Look>
  void each_compared(const std::vector<std::string>& names, const ComparedSteps& steps, const Look& look) {
    for (std::size_t at = 0; at < steps.compared.size(); at += kKept) {
      const std::vector<int> keep(
          steps.compared.begin() + static_cast<std::ptrdiff_t>(at),
          steps.compared.begin() + static_cast<std::ptrdiff_t>(std::min(at + kKept, steps.compared.size())));
      std::vector<Observed> seen;
      std::vector<std::unique_ptr<Snapshot>> before;
      snapshot.restore();
      run.set_active(names);
      observe(keep, seen, before);
      run.set_active({});
      for (std::size_t k = 0; k < keep.size(); ++k) look(keep[k], seen[k], *before[k]);
      snapshot.restore();
    }
  }

  std::string compared(Kind kind, const std::vector<std::string>& names, Ruling& ruling) {
    const auto drawn_by = options.drawn_by.value_or((fresh_bits() ^ options.seed) >> 11);  // which a double holds
    const auto steps = draw_steps(count(), options.steps, drawn_by);
    ruling.evidence["drawn_by"] = static_cast<double>(drawn_by);
    ruling.evidence["compared"] = static_cast<double>(steps.compared.size());
    judge_applied(kind, names);
    std::vector<Observed> none;
    std::vector<std::unique_ptr<Snapshot>> no_state;
    snapshot.restore();
    run.set_active(names);
    const auto taken = observe({count() - 1}, none, no_state);
    run.set_active({});
    no_state.clear();
    judge_losses(taken);
    const bool quiet = draws_others(taken, names);
    each_compared(names, steps, [&](int step, const Observed& seen, Snapshot& before) {
      judge_update(step, kind, seen, before, ruling);
      if (!quiet) judge_values(step, kind, seen, before, steps.wide.contains(step), ruling);
    });
    if (quiet) {
      judge_random_numbers(kind, names);
      const Still still(run.model());
      snapshot.restore();
      const auto here = generators_now();
      static_cast<void>(run.loss(batch(0)));
      if (generators_now() != here) {
        throw Wrong{
            "it draws other random numbers than the step as given, by functions that are no modules, so that "
            "its gradients cannot be compared"};
      }
      std::array<std::optional<ValueErrors>, 2> loud;
      usual_.swap(loud);
      each_compared(names, steps, [&](int step, const Observed& seen, Snapshot& before) {
        judge_values(step, kind, seen, before, steps.wide.contains(step), ruling);
      });
      usual_.swap(loud);
    } else if (count() > 1) {
      judge_trajectory(names, ruling);
    }
    std::string text = "loss, gradients, buffers and updates of " + std::to_string(steps.compared.size()) + " of " +
                       std::to_string(count()) + " steps are as near to float64 as stock torch's";
    if (quiet) text += "; it draws other random numbers: judged with dropout at zero, and the losses apart";
    return no_truth.empty() ? text : text + "; " + no_truth + ": it is compared with the step as given alone";
  }

  Ruling check(Kind kind, const std::vector<std::string>& names) {
    Ruling ruling;
    ruling.evidence["steps"] = count();
    try {
      ruling.reason = kind == Kind::Exact ? exact(names) : compared(kind, names, ruling);
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
  std::vector<std::string> labels, buffer_labels;
  std::optional<std::pair<std::string, Tensors>> reference;
  bool repeats = true;
  std::optional<Given> given;
  std::string start;                                 // of the random generators
  std::string no_truth;                              // why the model does not run in float64
  std::array<std::optional<ValueErrors>, 2> usual_;  // of the step as given, and of stock torch at lower precision
  std::vector<double> ends;  // of trajectories as given: of the run's own seed, then of others where they decide
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
