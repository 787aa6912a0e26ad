// A BERT-style model whose batches are ids, mask and labels: a struct of one's own goes through `accelerate` and a
// trainer.
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <limits>
#include <vector>

#include "oxytorch/trainer.h"
#include "oxytorch/tune.h"

namespace {

constexpr int64_t kWords = 64, kWidth = 64, kHeads = 4, kLength = 24, kHidden = 0;

/// What the model needs of a batch. `each_tensor` lets strategies cut it, lay it out and describe it.
struct Sentences {
  at::Tensor ids, mask, labels;
  template <class Visit>
  void each_tensor(Visit&& visit) {
    visit(ids);
    visit(mask);
    visit(labels);
  }
};

struct BertImpl : torch::nn::Module {
  BertImpl()
      : words(register_module("words", torch::nn::Embedding(kWords, kWidth))),
        places(register_module("places", torch::nn::Embedding(kLength, kWidth))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        qkv(register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth))),
        out(register_module("out", torch::nn::Linear(kWidth, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))),
        head(register_module("head", torch::nn::Linear(kWidth, kWords))) {}

  // The loss of the words that are hidden in `ids`; where `mask` is false there is no word at all.
  at::Tensor loss(const Sentences& batch) {
    auto x = words(batch.ids) + places->weight.narrow(0, 0, batch.ids.size(1));
    const auto parts = qkv(norm(x)).view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads}).unbind(2);
    const auto seen = batch.mask.unsqueeze(1).unsqueeze(1).expand({-1, 1, x.size(1), -1});
    const auto y = at::scaled_dot_product_attention(parts[0].transpose(1, 2), parts[1].transpose(1, 2),
                                                    parts[2].transpose(1, 2), seen);
    x = x + out(y.transpose(1, 2).reshape({x.size(0), x.size(1), kWidth}));
    x = x + down(torch::gelu(up(x)));
    return torch::nn::functional::cross_entropy(head(x).flatten(0, 1), batch.labels.flatten(),
                                                torch::nn::functional::CrossEntropyFuncOptions().ignore_index(-100));
  }

  torch::nn::Embedding words, places;
  torch::nn::LayerNorm norm;
  torch::nn::Linear qkv, out, up, down, head;
};
TORCH_MODULE(Bert);

// Sentences count upwards from some word; every fourth word or so is hidden, and the last ones are padding.
Sentences sentences(int64_t count) {
  const auto words = (torch::randint(kWords - 1, {count, 1}) + torch::arange(kLength)) % (kWords - 1) + 1;
  const auto mask = torch::arange(kLength) < torch::randint(kLength / 2, kLength + 1, {count, 1});
  const auto hidden = (torch::rand({count, kLength}) < 0.25).logical_and(mask);
  return {words.masked_fill(hidden, kHidden), mask, words.masked_fill(hidden.logical_not(), -100)};
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 200;
  torch::manual_seed(0);
  Bert model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  std::vector<Sentences> data;
  for (int i = 0; i < 8; ++i) data.push_back(sentences(16));

  auto plan = oxytorch::accelerate(
      *model, optimizer, oxytorch::loss_on<Sentences>([&](const Sentences& batch) { return model->loss(batch); }),
      {data[0], data[1], data[2], data[3]}, oxytorch::AccelerateOptions().steps_planned(steps));

  // The plan's steps, with what belongs to a training loop: two batches a step, and an average of the weights.
  oxytorch::PerformanceConfig config("basic");
  config.set("accumulation_steps", int64_t{2});
  config.set("ema_decay", 0.99);
  oxytorch::Trainer trainer(plan, config);
  const double before = model->loss(data[0]).item<double>();
  const auto result = trainer.fit(data, /*epochs=*/0, /*max_steps=*/steps);
  const double after = model->loss(data[0]).item<double>();
  std::cout << trainer.report() << "loss " << before << " before, " << after << " after " << result.steps << " steps\n";
  return after < before ? 0 : 1;
}
