// A byte-level GPT trained from C++, with no Python in the process.
//
//   gpt --train FILE [--held FILE] [--contender torch|tail|trainer] [--steps N] [--steps-planned N] [--seed S]
//   [--threads N]
//
// `torch` is the loop that LibTorch's own parts give: torch::optim::AdamW, clip_grad_norm_, an averaging loop, fp32.
// `tail` is that loop with Oxytorch's optimizer; `trainer` is Oxytorch's trainer, which also decides precision and
// host settings.
// With --serve the program takes commands on standard input and answers in JSON, one line each, so that
// `oxytorch demo --cpp` can run several in turn: `run N` trains N steps, `finish` evaluates, `exit` ends.
#include <sys/prctl.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "oxytorch/optim.h"
#include "oxytorch/trainer.h"

namespace {

using Clock = std::chrono::steady_clock;
using oxytorch::Batch;
using torch::Tensor;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

// The recipe of the Python demo.
constexpr int64_t kLayers = 4, kWidth = 256, kHeads = 4, kContext = 128, kBatch = 16;
constexpr double kLr = 1.5e-3, kBeta1 = 0.9, kBeta2 = 0.98, kWeightDecay = 0.1, kClipNorm = 1.0, kEmaDecay = 0.9;

double lr_at(int64_t step, int64_t steps) {
  const auto warm = std::max<int64_t>(1, std::llround(0.1 * static_cast<double>(steps)));
  if (step < warm) return kLr * static_cast<double>(step + 1) / static_cast<double>(warm);
  const double share = static_cast<double>(step - warm) / static_cast<double>(std::max<int64_t>(1, steps - warm));
  return kLr * (0.1 + 0.45 * (1.0 + std::cos(M_PI * std::min(1.0, share))));
}

// --- the model ---------------------------------------------------------------------------------------------------

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        qkv(register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth))),
        out(register_module("out", torch::nn::Linear(kWidth, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}

  Tensor forward(Tensor x) {
    const auto parts = qkv(norm1(x)).view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads}).unbind(2);
    const auto y = at::scaled_dot_product_attention(parts[0].transpose(1, 2), parts[1].transpose(1, 2),
                                                    parts[2].transpose(1, 2), {}, 0.0, /*is_causal=*/true);
    x = x + out(y.transpose(1, 2).reshape({x.size(0), x.size(1), kWidth}));
    return x + down(torch::gelu(up(norm2(x))));
  }

  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, out, up, down;
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl()
      : token(register_module("token", torch::nn::Embedding(256, kWidth))),
        position(register_module("position", torch::nn::Embedding(kContext, kWidth))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, 256).bias(false)))) {
    for (int64_t i = 0; i < kLayers; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block()));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      if (parameter.dim() >= 2) parameter.normal_(0.0, 0.02);
    }
  }

  Tensor forward(const Tensor& tokens) {
    auto x = token(tokens) + position->weight.narrow(0, 0, tokens.size(1));
    for (auto& block : blocks) x = block(x);
    return head(norm(x));
  }

  torch::nn::Embedding token, position;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
  std::vector<Block> blocks;
};
TORCH_MODULE(Gpt);

// --- the data ----------------------------------------------------------------------------------------------------

Tensor read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (static_cast<int64_t>(bytes.size()) < 2 * kContext) {
    throw std::runtime_error(path + " has " + std::to_string(bytes.size()) + " bytes: give it a text of some length");
  }
  return torch::tensor(at::ArrayRef<uint8_t>(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()),
                       torch::kUInt8);
}

Batch windows(const Tensor& text, const Tensor& starts) {
  const auto rows = text.index({starts.unsqueeze(1) + torch::arange(kContext + 1)}).to(torch::kLong);
  return {rows.narrow(1, 0, kContext).contiguous(), rows.narrow(1, 1, kContext).contiguous()};
}

std::vector<Batch> training_batches(const Tensor& text, int64_t steps, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<Batch> batches;
  for (int64_t i = 0; i < steps; ++i) {
    batches.push_back(windows(text, torch::randint(0, text.numel() - kContext - 1, {kBatch}, generator, torch::kLong)));
  }
  return batches;
}

Tensor loss_of(Gpt& model, const Batch& batch) {
  const auto logits = model(batch.input).to(torch::kFloat);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), batch.target.flatten());
}

double held_out_loss(Gpt& model, const Tensor& text) {
  const torch::NoGradGuard no_grad;
  model->eval();
  constexpr int64_t kBatches = 6;
  const auto starts =
      torch::linspace(0, static_cast<double>(text.numel() - kContext - 1), kBatches * kBatch).to(torch::kLong);
  double total = 0;
  for (const auto& part : starts.split(kBatch)) total += loss_of(model, windows(text, part)).item<double>();
  model->train();
  return total / kBatches;
}

// --- the loops ---------------------------------------------------------------------------------------------------

struct StepTimes {
  double whole = 0;
  double inner = 0;  // forward and backward; 0 where the trainer keeps them to itself
  float loss = 0;
};

class Loop {
 public:
  virtual ~Loop() = default;
  virtual StepTimes step(const Batch& batch) = 0;
  // Puts the averaged weights into the model, for good: training is over.
  virtual void take_average() = 0;
  // What was on and why, for a reader and for `oxytorch demo --cpp`; empty where there is nothing to say.
  [[nodiscard]] virtual std::string report() const { return ""; }
  [[nodiscard]] virtual std::string report_json() const { return "null"; }
};

class TorchLoop : public Loop {
 public:
  TorchLoop(Gpt model, int64_t steps)
      : model_(std::move(model)),
        params_(model_->parameters()),
        steps_(steps),
        optimizer_(params_, torch::optim::AdamWOptions(kLr).betas({kBeta1, kBeta2}).weight_decay(kWeightDecay)) {
    for (const auto& param : params_) ema_.push_back(param.detach().clone());
  }

  StepTimes step(const Batch& batch) override {
    StepTimes times;
    const auto began = Clock::now();
    optimizer_.zero_grad();
    const auto inner = Clock::now();
    const auto loss = loss_of(model_, batch);
    loss.backward();
    times.inner = seconds_since(inner);
    torch::nn::utils::clip_grad_norm_(params_, kClipNorm);
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(lr_at(done_, steps_));
    optimizer_.step();
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < params_.size(); ++i) ema_[i].lerp_(params_[i], 1.0 - kEmaDecay);
    }
    times.whole = seconds_since(began);
    ++done_;
    times.loss = loss.item<float>();
    return times;
  }

  void take_average() override {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < params_.size(); ++i) params_[i].copy_(ema_[i]);
  }

 private:
  Gpt model_;
  std::vector<Tensor> params_, ema_;
  int64_t steps_, done_ = 0;
  torch::optim::AdamW optimizer_;
};

oxytorch::optim::AdamWOptions tail_options() {
  return oxytorch::optim::AdamWOptions(kLr)
      .betas({kBeta1, kBeta2})
      .weight_decay(kWeightDecay)
      .clip_norm(kClipNorm)
      .ema_decay(kEmaDecay);
}

// The same loop, with Oxytorch's optimizer alone: clip, update and average are one call.
class TailLoop : public Loop {
 public:
  TailLoop(Gpt model, int64_t steps)
      : model_(std::move(model)), steps_(steps), optimizer_(model_->parameters(), tail_options()) {}

  StepTimes step(const Batch& batch) override {
    StepTimes times;
    const auto began = Clock::now();
    optimizer_.zero_grad();
    const auto inner = Clock::now();
    const auto loss = loss_of(model_, batch);
    loss.backward();
    times.inner = seconds_since(inner);
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(lr_at(done_, steps_));
    optimizer_.step();
    times.whole = seconds_since(began);
    ++done_;
    times.loss = loss.item<float>();
    return times;
  }

  void take_average() override { optimizer_.apply_ema(); }

 private:
  Gpt model_;
  int64_t steps_, done_ = 0;
  oxytorch::optim::AdamW optimizer_;
};

// Oxytorch's trainer: on its first batch it tries what makes the step faster, and says why in its report.
class TrainerLoop : public Loop {
 public:
  TrainerLoop(Gpt model, int64_t steps, int64_t steps_planned)
      : model_(std::move(model)),
        steps_(steps),
        optimizer_(model_->parameters(), tail_options()),
        trainer_(
            *model_, optimizer_, [this](const Batch& batch) { return loss_of(model_, batch); },
            planned(steps_planned)) {}

  StepTimes step(const Batch& batch) override {
    StepTimes times;
    const auto began = Clock::now();
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(lr_at(done_, steps_));
    const auto loss = trainer_.step(batch);
    times.whole = seconds_since(began);
    ++done_;
    times.loss = loss.item<float>();
    return times;
  }

  void take_average() override { optimizer_.apply_ema(); }
  [[nodiscard]] std::string report() const override { return trainer_.report(); }
  [[nodiscard]] std::string report_json() const override { return trainer_.report_json(); }

 private:
  // What is found must pay within the run.
  static oxytorch::PerformanceConfig planned(int64_t steps_planned) {
    oxytorch::PerformanceConfig config("advanced");
    config.set("steps_planned", steps_planned);
    return config;
  }

  Gpt model_;
  int64_t steps_, done_ = 0;
  oxytorch::optim::AdamW optimizer_;
  oxytorch::Trainer trainer_;
};

std::unique_ptr<Loop> make_loop(const std::string& contender, const Gpt& model, int64_t steps, int64_t steps_planned) {
  if (contender == "torch") return std::make_unique<TorchLoop>(model, steps);
  if (contender == "tail") return std::make_unique<TailLoop>(model, steps);
  if (contender == "trainer") return std::make_unique<TrainerLoop>(model, steps, steps_planned);
  throw std::runtime_error("--contender is torch, tail or trainer, not '" + contender + "'");
}

// --- commands and answers ----------------------------------------------------------------------------------------

int64_t status_kib(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(key + ":", 0) == 0) return std::atoll(line.c_str() + key.size() + 1);
  }
  return 0;
}

int64_t page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// JSON has no NaN; the reader takes null for one.
std::string number(double value) {
  std::ostringstream out;
  out.precision(9);
  out << value;
  return std::isfinite(value) ? out.str() : "null";
}

std::string list_of(const std::vector<double>& values) {
  std::string out;
  for (const double value : values) out += (out.empty() ? "" : ", ") + number(value);
  return "[" + out + "]";
}

void serve(Loop& loop, Gpt& model, const std::vector<Batch>& batches, const Tensor& held, int64_t resident_before) {
  std::size_t done = 0;
  std::cout << "{\"ready\": true}" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "run") {
      std::size_t count = 0;
      words >> count;
      std::vector<double> whole, inner, losses;
      const auto faults = page_faults();
      for (; count > 0 && done < batches.size(); --count, ++done) {
        const auto times = loop.step(batches[done]);
        whole.push_back(times.whole);
        inner.push_back(times.inner);
        losses.push_back(times.loss);
      }
      std::cout << "{\"seconds\": " << list_of(whole) << ", \"inner\": " << list_of(inner)
                << ", \"losses\": " << list_of(losses) << ", \"page_faults\": " << page_faults() - faults << "}"
                << std::endl;
    } else if (command == "finish") {
      const auto peak = status_kib("VmHWM") - resident_before;
      loop.take_average();
      std::cout << "{\"peak_bytes\": " << peak * 1024 << ", \"held_out_loss\": " << number(held_out_loss(model, held))
                << ", \"report\": " << loop.report_json() << "}" << std::endl;
    } else if (command == "exit") {
      break;
    } else {
      throw std::runtime_error("unknown command: " + line);
    }
  }
}

void train_and_print(Loop& loop, Gpt& model, const std::vector<Batch>& batches, const Tensor& held) {
  std::vector<double> whole;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto times = loop.step(batches[i]);
    whole.push_back(times.whole);
    if (i % 10 == 0 || i + 1 == batches.size()) {
      std::cout << "step " << i << "  loss " << times.loss << "  " << 1e3 * times.whole << " ms" << std::endl;
    }
  }
  std::nth_element(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(whole.size() / 2), whole.end());
  loop.take_average();
  std::cout << "median step " << 1e3 * whole[whole.size() / 2] << " ms, held-out loss of the averaged weights "
            << held_out_loss(model, held) << '\n'
            << loop.report();
}

int run(int argc, char** argv) {
  std::map<std::string, std::string> options = {
      {"--contender", "trainer"}, {"--steps", "40"},      {"--seed", "1"},
      {"--threads", "0"},         {"--train", ""},        {"--held", ""},
      {"--coordinator", "0"},     {"--steps-planned", ""}};  // of the whole run, whose beginning this is
  bool serving = false;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (key == "--serve") {
      serving = true;
    } else if (options.count(key) != 0 && i + 1 < argc) {
      options[key] = argv[++i];
    } else {
      std::cerr << "gpt: unknown argument or missing value: " << key << '\n';
      return 2;
    }
  }
  if (options["--train"].empty()) {
    std::cerr << "gpt: give a text to train on: --train FILE\n";
    return 2;
  }
  // Ends with the coordinator, however that ends.
  if (options["--coordinator"] != "0") prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (const int threads = std::stoi(options["--threads"]); threads > 0) torch::set_num_threads(threads);
  const int64_t steps = std::stoll(options["--steps"]);
  const auto& planned = options["--steps-planned"];
  const uint64_t seed = std::stoull(options["--seed"]);
  const auto text = read_bytes(options["--train"]);
  const auto held = options["--held"].empty() ? text : read_bytes(options["--held"]);
  const auto batches = training_batches(text, steps, seed);
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak counts from here
  const auto resident_before = status_kib("VmRSS");
  torch::manual_seed(seed);
  Gpt model;
  const auto loop = make_loop(options["--contender"], model, steps, planned.empty() ? steps : std::stoll(planned));
  if (serving) {
    serve(*loop, model, batches, held, resident_before);
  } else {
    train_and_print(*loop, model, batches, held);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "gpt: " << error.what() << '\n';
    return 1;
  }
}
