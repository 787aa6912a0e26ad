#include "oxytorch/trainer/step_graph.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include "data/side_stream.h"
#include "generators/generators.h"
#include "optim/param_state.h"
#include "optim/torch_versions.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"

namespace oxytorch {
namespace {

// Recording needs a stream of its own. Work on it comes after what the caller's stream holds, and before what follows.
class OnSideStream {
 public:
  explicit OnSideStream(at::Device device) {
    if (device.is_cpu()) return;
    side_.emplace(device);
    scope_.emplace(*side_);
  }
  ~OnSideStream() {
    if (!side_) return;
    scope_.reset();
    c10::Event done = side_->mark();
    side_->follow(done);
  }
  OnSideStream(const OnSideStream&) = delete;
  OnSideStream& operator=(const OnSideStream&) = delete;

 private:
  std::optional<detail::SideStream> side_;
  std::optional<detail::SideStream::Scope> scope_;
};

#if OXYTORCH_TORCH_GRAPHS
class TorchGraph final : public GraphRecorder {
 public:
  void begin() override { graph_.capture_begin(); }
  void end() override { graph_.capture_end(); }
  void replay() override { graph_.replay(); }

 private:
  at::accelerator::Graph graph_;
};
#endif

bool like(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

bool all_like(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!like(a[i], b[i])) return false;
  }
  return true;
}

// NaN is equal to the same NaN here.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.detach().cpu().contiguous();
  const at::Tensor y = b.detach().cpu().contiguous();
  return x.nbytes() == y.nbytes() &&
         (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copied;
  copied.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) copied.push_back(tensor.detach().clone());
  return copied;
}

void put_back(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].detach().copy_(values[i]);
}

// Where bits differ, a replay may be this many times as far from an eager step as others are, all tensors together; one
// of them as well, or by a share of what the step changes in it, since noise in a few numbers is seldom the same twice.
constexpr double kOfUsual = 4;
constexpr double kOneTensor = 0.25;
constexpr double kMostNoise = 0.1;  // of a step's changes: eager steps that far apart prove nothing
constexpr int kMostRepeats = 10;    // of the eager step, until they explain the replay

/// What a step returned and left behind.
struct Seen {
  std::vector<at::Tensor> outputs, state;
};

std::string first_unequal(const Seen& a, const Seen& b) {
  for (std::size_t i = 0; i < a.outputs.size(); ++i) {
    if (!same_bytes(a.outputs[i], b.outputs[i])) return "output " + std::to_string(i) + " of the replay differs";
  }
  for (std::size_t i = 0; i < a.state.size(); ++i) {
    if (!same_bytes(a.state[i], b.state[i])) return "tensor " + std::to_string(i) + " of the state differs";
  }
  return {};
}

double norm_of(const at::Tensor& t) { return at::linalg_vector_norm(t.to(at::kDouble)).item<double>(); }

/// How far what two steps left is apart, relative to what one changes: an output to its size.
struct Distance {
  double whole = 0;             ///< that of the state in the mean of its numbers, or the worst output
  std::vector<double> tensors;  ///< each of the state

  /// The larger one of each.
  void widen(const Distance& other) {
    whole = std::max(whole, other.whole);
    tensors.resize(std::max(tensors.size(), other.tensors.size()));
    for (std::size_t i = 0; i < other.tensors.size(); ++i) tensors[i] = std::max(tensors[i], other.tensors[i]);
  }
  [[nodiscard]] bool explains(const Distance& found) const {
    if (!(whole > 0 && whole <= kMostNoise && found.whole <= kOfUsual * whole)) return false;
    for (std::size_t i = 0; i < found.tensors.size(); ++i) {
      if (!(found.tensors[i] <= std::max(kOneTensor, kOfUsual * tensors[i]))) return false;
    }
    return true;
  }
};

/// Integers may not differ, and no number may be inf or NaN in one of them alone.
Distance apart(const Seen& a, const Seen& b, const std::vector<at::Tensor>& before) {
  const at::NoGradGuard no_grad;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const auto relative = [](double off, double size) { return off == 0 ? 0 : size > 0 ? off / size : kNever; };
  const auto distance = [](const at::Tensor& x, const at::Tensor& y) {
    if (x.numel() == 0 || same_bytes(x, y)) return 0.0;
    const bool numbers = x.is_floating_point() || x.is_complex();
    const double off = numbers ? norm_of(x.to(at::kDouble) - y.to(at::kDouble)) : kNever;
    return std::isfinite(off) ? off : kNever;
  };
  Distance found;
  for (std::size_t i = 0; i < a.outputs.size(); ++i) {
    found.whole = std::max(found.whole, relative(distance(a.outputs[i], b.outputs[i]), norm_of(b.outputs[i])));
  }
  double squares = 0, count = 0;
  for (std::size_t i = 0; i < a.state.size(); ++i) {
    const double off = distance(a.state[i], b.state[i]);
    const double change = b.state[i].is_floating_point() ? norm_of(b.state[i].to(at::kDouble) - before[i]) : 0;
    found.tensors.push_back(relative(off, change));
    const auto numbers = static_cast<double>(a.state[i].numel());
    squares += numbers * found.tensors.back() * found.tensors.back();
    count += numbers;
  }
  found.whole = std::max(found.whole, relative(std::sqrt(squares), std::sqrt(count)));
  return found;
}

std::string two_digits(double value) {
  std::ostringstream out;
  out.precision(2);
  out << value;
  return out.str();
}

void describe(std::ostream& out, const optim::GroupOptions& g) {
  if (g.lr_tensor.defined()) {
    out << static_cast<const void*>(g.lr_tensor.unsafeGetTensorImpl());
  } else {
    out << g.lr;
  }
  for (const double value : {g.beta1, g.beta2, g.eps, g.weight_decay, g.momentum, g.dampening, g.alpha, g.lr_decay,
                             g.ns_coefficients[0], g.ns_coefficients[1], g.ns_coefficients[2]}) {
    out << ' ' << value;
  }
  out << ' ' << g.ns_steps << static_cast<int>(g.adjust_lr) << g.nesterov << g.centered << g.decoupled_weight_decay
      << g.amsgrad << g.maximize << ';';
}

}  // namespace

GraphRecorder::~GraphRecorder() = default;

std::unique_ptr<GraphRecorder> make_graph_recorder(at::Device device) {
  OXY_CHECK(!device.is_cpu(), NotSupported, "the CPU has no graphs; run the step eagerly.");
#if OXYTORCH_TORCH_GRAPHS
  return std::make_unique<TorchGraph>();
#else
  OXY_CHECK(false, NotSupported, "torch ", TORCH_VERSION,
            " has no graphs for any device but by Python; torch 2.13 has. Give StepGraphOptions::recorder.");
#endif
}

struct StepGraph::Impl {
  Step step;
  StepGraphOptions options;
  int warm = 0;
  bool given_up = false;
  bool replayed = false;
  std::string reason;
  std::int64_t replays = 0;
  std::int64_t recordings = 0;

  std::unique_ptr<GraphRecorder> recorder;
  std::vector<at::Tensor> inputs;   // where the recording reads
  std::vector<at::Tensor> outputs;  // where it writes
  std::string settings;
  std::string proof;

  [[nodiscard]] std::string settings_now() const { return options.settings ? options.settings() : std::string(); }

  std::vector<at::Tensor> eager(const std::vector<at::Tensor>& given, std::string why) {
    replayed = false;
    reason = std::move(why);
    return step(given);
  }

  void fill(const std::vector<at::Tensor>& given) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < given.size(); ++i) inputs[i].copy_(given[i], /*non_blocking=*/true);
  }

  std::vector<at::Tensor> replay(const std::vector<at::Tensor>& given) {
    fill(given);
    recorder->replay();
    ++replays;
    replayed = true;
    return outputs;
  }

  void record(const std::vector<at::Tensor>& given) {
    settings = settings_now();
    inputs.clear();
    for (const at::Tensor& tensor : given) inputs.push_back(tensor.detach().clone());
    recorder = options.recorder ? options.recorder() : make_graph_recorder(given.front().device());
    const OnSideStream side(given.front().device());
    recorder->begin();
    try {
      outputs = step(inputs);
    } catch (...) {
      // The device must leave the recording state whatever happened.
      try {
        recorder->end();
      } catch (const std::exception&) {
        // The first error tells more.
      }
      throw;
    }
    recorder->end();
    ++recordings;
  }

  // One step both ways from the same state; leaves behind what the eager one made. Empty where they agree.
  //
  // Kernels whose sums depend on the order of threads (embedding's and attention's gradients on a card) make two eager
  // steps differ, so where bits do, more eager steps say how far apart they may be.
  std::string differences(const std::vector<at::Tensor>& given, std::vector<at::Tensor>& result) {
    const std::vector<at::Tensor> state = options.state ? options.state() : std::vector<at::Tensor>();
    const std::vector<at::Tensor> before = copies(state);
    const at::Device device = given.front().device();
    const std::vector<at::Tensor> random = generators::states(device);
    const auto again = [&] {
      put_back(state, before);
      generators::set_states(device, random);
      return step(given);
    };
    const Seen of_graph{copies(replay(given)), copies(state)};
    result = again();
    if (result.size() != of_graph.outputs.size()) return "the step returned another number of tensors";
    const std::string unequal = first_unequal({result, state}, of_graph);
    if (unequal.empty()) {
      proof = "one step came out the same, bit for bit, eagerly and replayed";
      return {};
    }
    const Seen first{copies(result), copies(state)};
    const auto after = generators::states(device);
    const Distance found = apart(of_graph, first, before);
    Distance usual;
    for (int i = 0; i < kMostRepeats && !usual.explains(found); ++i) {
      const auto repeated = again();
      if (repeated.size() == first.outputs.size()) usual.widen(apart({repeated, state}, first, before));
    }
    put_back(state, first.state);
    generators::set_states(device, after);
    const std::string figures =
        two_digits(found.whole) + " of what it changes apart, eager steps " + two_digits(usual.whole);
    if (!usual.explains(found)) return unequal + ": " + figures;
    proof = "one step came out the same eagerly and replayed as far as eager steps do: " + figures;
    return {};
  }

  void give_up(std::string why) {
    if (why.ends_with('.')) why.pop_back();
    given_up = true;
    recorder.reset();
    inputs.clear();
    outputs.clear();
    reason = why + "; steps run eagerly";
    log(LogLevel::Warn, "step graph: " + reason, "trainer");
  }

  // Records and, where asked, proves the recording by this very step.
  std::vector<at::Tensor> record_and_step(const std::vector<at::Tensor>& given) {
    try {
      record(given);
    } catch (const std::exception& error) {
      give_up(std::string("the step could not be recorded: ") + error.what());
      return eager(given, reason);
    }
    if (!options.verify) {
      reason = "replayed without a proof";
      return replay(given);
    }
    std::vector<at::Tensor> result;
    const std::string difference = differences(given, result);
    if (!difference.empty()) give_up("a replay is not the eager step: " + difference);
    replayed = false;
    if (difference.empty()) reason = proof;
    return result;
  }

  std::vector<at::Tensor> record_again(const std::vector<at::Tensor>& given) {
    if (recordings < options.max_recordings) return record_and_step(given);
    give_up("what the step reads on the host changed " + std::to_string(recordings) +
            " times; keep the learning rate on the device (use_lr_tensors)");
    return eager(given, reason);
  }
};

StepGraph::StepGraph(Step step, StepGraphOptions options) : impl_(std::make_unique<Impl>()) {
  OXY_CHECK(step != nullptr, InvalidArgument, "the step of a StepGraph is null; give a function.");
  OXY_CHECK(options.max_recordings >= 1, InvalidArgument, "max_recordings is ", options.max_recordings,
            "; give at least 1.");
  OXY_CHECK(options.warmup >= 1, InvalidArgument, "warmup is ", options.warmup,
            "; give at least 1, so that the optimizer's state exists before the recording.");
  impl_->step = std::move(step);
  impl_->options = std::move(options);
}

StepGraph::StepGraph(Step step, std::vector<optim::TailOptimizer*> optimizers, StepGraphOptions options)
    : StepGraph(std::move(step), std::move(options)) {
  StepGraphOptions& own = impl_->options;
  own.state = [optimizers, also = std::move(own.state)] {
    std::vector<at::Tensor> state = also ? also() : std::vector<at::Tensor>();
    const auto take = [&state](const at::Tensor& tensor) {
      if (tensor.defined()) state.push_back(tensor);
    };
    for (const optim::TailOptimizer* optimizer : optimizers) {
      const optim::StepTail& tail = optimizer->tail();
      for (std::size_t i = 0; i < tail.param_count(); ++i) {
        take(tail.param(i));
        for (const at::Tensor* tensor : optim::fields(tail.state(i))) take(*tensor);
      }
    }
    return state;
  };
  own.settings = [optimizers, also = std::move(own.settings)] {
    std::ostringstream out;
    out.precision(17);
    if (also) out << also();
    for (const optim::TailOptimizer* optimizer : optimizers) {
      for (const auto& group : optimizer->param_groups()) {
        const auto& options = static_cast<const optim::TailOptimizerOptions&>(group.options());
        optim::GroupOptions described = options.group();
        if (!optimizer->lr_tensors().empty()) {
          described.lr_tensor =
              optimizer->lr_tensors()[static_cast<std::size_t>(&group - optimizer->param_groups().data())];
        }
        describe(out, described);
      }
    }
    return out.str();
  };
}

StepGraph::~StepGraph() = default;

std::vector<at::Tensor> StepGraph::operator()(const std::vector<at::Tensor>& inputs) {
  OXY_CHECK(!inputs.empty(), InvalidArgument, "a StepGraph was called without inputs; give at least one tensor.");
  for (const at::Tensor& tensor : inputs) {
    OXY_CHECK(tensor.defined(), InvalidArgument, "an input of a StepGraph is undefined; give tensors.");
  }
  Impl& graph = *impl_;
  if (graph.given_up) return graph.eager(inputs, graph.reason);
  if (graph.warm < graph.options.warmup) {
    ++graph.warm;
    const OnSideStream side(inputs.front().device());
    return graph.eager(inputs, "warming up");
  }
  if (graph.recorder == nullptr) return graph.record_and_step(inputs);
  if (!all_like(graph.inputs, inputs)) return graph.eager(inputs, "the inputs are not of the recorded kind");
  if (graph.settings != graph.settings_now()) return graph.record_again(inputs);
  return graph.replay(inputs);
}

bool StepGraph::replayed() const noexcept { return impl_->replayed; }
const std::string& StepGraph::reason() const noexcept { return impl_->reason; }
std::int64_t StepGraph::replays() const noexcept { return impl_->replays; }
std::int64_t StepGraph::recordings() const noexcept { return impl_->recordings; }

}  // namespace oxytorch
