// A small LLaMA over bytes, of the library's modules: documents of any length in a row without padding, rotary
// positions, shared key heads, one table for input and output, and a loss that makes no logits.
//
//   llama FILE [STEPS]      the lines of FILE, a text, are the documents
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "oxytorch/nn.h"
#include "oxytorch/ops.h"
#include "oxytorch/optim.h"
#include "oxytorch/trainer.h"

namespace {

namespace ops = oxytorch::ops;

constexpr int64_t kWidth = 128, kHeads = 4, kLayers = 3, kKeyHeads = 2, kDocuments = 32;

struct Documents {
  at::Tensor bytes, offsets;  // one after the other, and where each begins
  at::Tensor following;       // the next byte of the document, or -100 after its last one
  template <class Visit>
  void each_tensor(Visit&& visit) {
    visit(bytes);
    visit(offsets);
    visit(following);
  }
};

struct LlamaImpl : torch::nn::Module {
  LlamaImpl()
      : table(register_module("table", torch::nn::Embedding(256, kWidth))),
        body(register_module("body", oxytorch::nn::Transformer(oxytorch::nn::TransformerOptions::llama(
                                         kWidth, kHeads, kLayers, kKeyHeads)))) {
    torch::nn::init::normal_(table->weight, 0.0, 0.02);
  }

  at::Tensor loss(const Documents& batch) {
    const auto hidden = body->forward_packed(ops::embedding(batch.bytes, table->weight), batch.offsets);
    return ops::linear_cross_entropy(hidden, table->weight, batch.following);
  }

  torch::nn::Embedding table;
  oxytorch::nn::Transformer body;
};
TORCH_MODULE(Llama);

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (line.size() > 1) lines.push_back(line);
  }
  return lines;
}

Documents some_of(const std::vector<std::string>& lines) {
  std::vector<int64_t> bytes, following, offsets{0};
  for (int64_t i = 0; i < kDocuments; ++i) {
    const auto& line = lines[torch::randint(static_cast<int64_t>(lines.size()), {1}).item().to<std::size_t>()];
    for (std::size_t j = 0; j < line.size(); ++j) {
      bytes.push_back(static_cast<unsigned char>(line[j]));
      following.push_back(j + 1 < line.size() ? static_cast<unsigned char>(line[j + 1]) : -100);
    }
    offsets.push_back(static_cast<int64_t>(bytes.size()));
  }
  return {torch::tensor(bytes), torch::tensor(offsets), torch::tensor(following)};
}

}  // namespace

int main(int argc, char** argv) {
  const auto lines = lines_of(argc > 1 ? argv[1] : "");
  const int steps = argc > 2 ? std::atoi(argv[2]) : 200;
  if (lines.empty()) {
    std::cerr << "no lines to learn from; give a text: llama FILE [STEPS]\n";
    return 1;
  }
  torch::manual_seed(0);
  Llama model;
  oxytorch::optim::AdamW optimizer(model->parameters(), oxytorch::optim::AdamWOptions(2e-3).clip_norm(1.0));
  oxytorch::PerformanceConfig config("advanced");
  config.set("tune_seconds", 0.05 * steps);  // trying what may be faster has to be worth it
  oxytorch::Trainer trainer(*model, optimizer,
                            oxytorch::loss_on<Documents>([&](const Documents& batch) { return model->loss(batch); }),
                            config);
  const auto held = some_of(lines);
  const double before = model->loss(held).item<double>();
  for (int step = 0; step < steps; ++step) trainer.step(some_of(lines));
  const double after = model->loss(held).item<double>();
  std::cout << trainer.report() << "loss " << before << " before, " << after << " after " << steps << " steps\n";
  return after < before ? 0 : 1;
}
