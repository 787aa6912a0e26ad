// Training loops in C++ against oxytorch::accelerate: one contender in a process of its own, driven over pipes.
//
//   orchestrator_race --workload cnn|mlp|lstm --contender torch|basic|advanced --folder DIR [--seed S] [--threads N]
//                     [--bf16 1] [--channels-last 1]
//
// Commands come on standard input, answers in JSON go to standard output, one line each: `prepare`, `run N`, `finish`.
// bench/race/orchestrator.py starts it and shows the figures.
#include <ATen/autocast_mode.h>
#include <sys/prctl.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "oxytorch/clock.h"
#include "oxytorch/host.h"
#include "oxytorch/system.h"
#include "oxytorch/tune/accelerate.h"

namespace {

using Clock = std::chrono::steady_clock;
using oxytorch::Batch;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int kBatches = 16;
constexpr std::int64_t kStepsPlanned = 10'000;

struct Workload {
  std::shared_ptr<nn::Module> model;
  oxytorch::LossFunction loss;
  std::vector<Batch> batches;
};

// Inputs and the classes that a fixed random layer gives them.
std::vector<Batch> classes(at::IntArrayRef shape) {
  const auto rows = shape[0];
  const auto teacher = torch::randn({torch::ones(shape).numel() / rows, 10});
  std::vector<Batch> batches;
  for (int i = 0; i < kBatches; ++i) {
    const auto input = torch::randn(shape);
    batches.push_back({input, input.view({rows, -1}).matmul(teacher).argmax(1)});
  }
  return batches;
}

Workload make_cnn() {
  nn::Sequential model;
  std::int64_t channels = 3;
  for (const std::int64_t width : {64, 64, 128, 128}) {
    model->push_back(nn::Conv2d(nn::Conv2dOptions(channels, width, 3).padding(1).bias(false)));
    model->push_back(nn::BatchNorm2d(width));
    model->push_back(nn::ReLU());
    if (model->size() < 12) {
      model->push_back(nn::MaxPool2d(2));
    } else {
      model->push_back(nn::AdaptiveAvgPool2d(4));
    }
    channels = width;
  }
  model->push_back(nn::Flatten());
  model->push_back(nn::Linear(16 * channels, 10));
  return {model.ptr(), oxytorch::supervised(model, nn::CrossEntropyLoss()), classes({64, 3, 64, 64})};
}

Workload make_mlp() {
  nn::Sequential model(nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 512), nn::ReLU(), nn::Linear(512, 10));
  return {model.ptr(), oxytorch::supervised(model, nn::CrossEntropyLoss()), classes({128, 784})};
}

struct RecurrentImpl : nn::Module {
  Tensor forward(const Tensor& tokens) { return head(std::get<0>(lstm(token(tokens)))); }

  nn::Embedding token = register_module("token", nn::Embedding(256, 128));
  nn::LSTM lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(128, 256).num_layers(2).batch_first(true)));
  nn::Linear head = register_module("head", nn::Linear(256, 256));
};
TORCH_MODULE(Recurrent);

Workload make_lstm() {
  Recurrent model;
  const auto follower = torch::randperm(256);  // What comes after each byte.
  std::vector<Batch> batches;
  for (int i = 0; i < kBatches; ++i) {
    const auto tokens = torch::randint(256, {32, 64}, torch::kLong);
    batches.push_back({tokens, follower.index({tokens})});
  }
  const auto loss = [model](const Batch& batch) mutable {
    return nn::functional::cross_entropy(model->forward(batch.input).flatten(0, 1), batch.target.flatten());
  };
  return {model.ptr(), loss, std::move(batches)};
}

Workload make(const std::string& name) {
  if (name == "cnn") return make_cnn();
  if (name == "mlp") return make_mlp();
  if (name == "lstm") return make_lstm();
  throw std::invalid_argument("no workload '" + name + "'; there are cnn, mlp, lstm");
}

std::string list(const std::vector<double>& values) {
  std::ostringstream text;
  text.precision(9);
  for (std::size_t i = 0; i < values.size(); ++i) text << (i == 0 ? "" : ", ") << values[i];
  return "[" + text.str() + "]";
}

// What a plan applied, and what it left alone and why, as members of a JSON object.
std::string verdicts(const oxytorch::Plan& plan) {
  std::ostringstream accepted;
  std::ostringstream rejected;
  for (const auto& name : plan.accepted()) accepted << (accepted.tellp() > 0 ? ", " : "") << std::quoted(name);
  for (const auto& entry : plan.certificate().entries) {
    if (entry.status == oxytorch::tune::Status::Accepted) continue;
    rejected << (rejected.tellp() > 0 ? ", " : "") << std::quoted(entry.strategy) << ": " << std::quoted(entry.reason);
  }
  return R"("accepted": [)" + accepted.str() + R"(], "rejected": {)" + rejected.str() + "}";
}

// What users of LibTorch switch on in a line each.
struct Switches {
  bool bf16 = false;
  bool channels_last = false;

  void place(nn::Module& model) const {
    if (!channels_last) return;
    for (auto& parameter : model.parameters()) {
      if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(at::MemoryFormat::ChannelsLast));
    }
  }

  [[nodiscard]] Tensor loss(const Workload& workload, Batch batch) const {
    if (channels_last) batch.input = batch.input.contiguous(at::MemoryFormat::ChannelsLast);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, bf16);
    auto result = workload.loss(batch);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    return result;
  }
};

struct Contender {
  Switches switches;
  std::function<Tensor(const Batch&)> step;
  std::optional<oxytorch::Plan> plan;

  // What preparing took, as JSON.
  std::string prepare(Workload& workload, torch::optim::Optimizer& optimizer, const std::string& level,
                      const std::string& folder) {
    if (level == "torch") {
      switches.place(*workload.model);
      step = [this, &workload, &optimizer](const Batch& batch) {
        optimizer.zero_grad();
        const auto loss = switches.loss(workload, batch);
        loss.backward();
        optimizer.step();
        return loss.detach();
      };
      return R"({"cold": {}})";
    }
    const auto began = Clock::now();
    plan.emplace(
        oxytorch::accelerate(*workload.model, optimizer, workload.loss, workload.batches,
                             oxytorch::AccelerateOptions().level(level).steps_planned(kStepsPlanned).folder(folder)));
    step = [this](const Batch& batch) { return plan->step(batch); };
    const auto said = R"("tuning_seconds": )" + std::to_string(oxytorch::seconds_since(began)) + ", " + verdicts(*plan);
    std::ifstream before(folder + "/cold.json");
    std::string cold;
    if (!std::getline(before, cold)) {
      cold = "{" + said + "}";
      std::ofstream(folder + "/cold.json") << cold;
    }
    return "{" + said + ", \"cold\": " + cold + "}";
  }
};

void serve(std::map<std::string, std::string>& options) {
  torch::manual_seed(std::stoull(options["seed"]));
  auto workload = make(options["workload"]);
  torch::optim::AdamW optimizer(workload.model->parameters(), torch::optim::AdamWOptions(1e-3));
  std::ofstream("/proc/self/clear_refs") << 5;  // The peak starts anew from what is resident now.
  const auto resident = oxytorch::read_memory().resident.value_or(0);
  Contender contender;
  contender.switches = {options["bf16"] == "1", options["channels-last"] == "1"};
  std::vector<double> losses;
  std::size_t next = 0;
  std::cout.precision(9);
  std::cout << R"({"ready": true})" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream said(line);
    std::string command;
    said >> command;
    if (command == "prepare") {
      std::cout << contender.prepare(workload, optimizer, options["contender"], options["folder"]) << std::endl;
    } else if (command == "run") {
      int count = 0;
      said >> count;
      std::vector<double> seconds;
      std::vector<Tensor> found;
      const auto faults = oxytorch::page_faults();
      for (int i = 0; i < count; ++i) {
        const auto began = Clock::now();
        found.push_back(contender.step(workload.batches[next++ % kBatches]));
        seconds.push_back(oxytorch::seconds_since(began));
      }
      losses.clear();
      for (const auto& loss : found) losses.push_back(loss.item<double>());
      std::cout << R"({"seconds": )" << list(seconds) << R"(, "inner": [], "losses": )" << list(losses)
                << R"(, "page_faults": )" << oxytorch::page_faults() - faults << "}" << std::endl;
    } else {
      const auto loss = std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
      std::cout << R"({"held_out_loss": )" << loss << R"(, "peak_bytes": )"
                << oxytorch::read_memory().peak_resident.value_or(resident) - resident << R"(, "report": null})"
                << std::endl;
      return;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> options{{"seed", "1"}, {"threads", "2"}, {"folder", "."}};
  for (int i = 1; i + 1 < argc; i += 2) options[std::string(argv[i]).substr(2)] = argv[i + 1];
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // It ends with the race, however that ends.
  try {
    at::set_num_threads(std::stoi(options["threads"]));
    serve(options);
  } catch (const std::exception& error) {
    std::cerr << "orchestrator_race: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
