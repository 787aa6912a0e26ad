// The momentum of sparse gradients, as torch's SGD takes it back, also where no gradient is there any more to tell by.
#include "optimizer_cases.h"

namespace oxytorch::optim::testing {
namespace {

at::Tensor loss_of_rows(const at::Tensor& table, int seed) {
  torch::manual_seed(seed);
  const auto rows = at::randint(0, 6, {5, 4}, at::kLong);
  return (at::embedding(table, rows, -1, false, /*sparse=*/true) * at::randn({5, 4, 3}).to(table.dtype())).sum();
}

// `steps` of torch alone in float64.
at::Tensor exact_rows(const torch::optim::SGDOptions& options, int steps) {
  torch::manual_seed(0);
  const auto table = torch::randn({8, 3}).to(at::kDouble).requires_grad_();
  torch::optim::SGD opt({table}, options);
  for (int step = 0; step < steps; ++step) {
    opt.zero_grad();
    loss_of_rows(table, step).backward();
    opt.step();
  }
  return table.detach();
}

TEST(SparseMomentum, IsHandedBackAsTorchKeepsItWhetherOrNotThereIsAGradient) {
  const auto sgd = [](bool nesterov) { return torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(nesterov); };
  for (const bool nesterov : {true, false}) {
    for (const TailOptions& tail :
         {TailOptions{}, TailOptions{.nonfinite = NonFinite::Propagate, .step_in_backward = true},
          TailOptions{.force_composite = true}, TailOptions{.zero_grads = true}}) {
      for (const bool grows : {false, true}) {
        torch::manual_seed(0);
        const auto table = torch::randn({8, 3}).requires_grad_();
        torch::optim::SGD theirs({table}, sgd(nesterov));
        const auto ours = replace(theirs, tail);
        for (int step = 0; step < 2; ++step) {
          ours->zero_grad(/*set_to_none=*/true);
          loss_of_rows(table, step).backward();
          ours->step();
        }
        ours->zero_grad(/*set_to_none=*/true);
        if (grows) {  // the native step is built anew
          const auto more = torch::zeros({2}).requires_grad_();
          ours->add_param_group(torch::optim::OptimizerParamGroup(Tensors{more}));
          theirs.add_param_group(torch::optim::OptimizerParamGroup(Tensors{more}));
        }
        hand_back(*ours, theirs);
        loss_of_rows(table, 2).backward();
        theirs.step();
        expect_close({table}, {exact_rows(sgd(nesterov), 3)});
      }
    }
  }
}

TEST(SparseMomentum, IsDenseWhereTheFirstGradientWas) {
  torch::manual_seed(0);
  const auto table = torch::randn({8, 3}).requires_grad_();
  const auto wanted = table.detach().to(at::kDouble).clone().requires_grad_();
  const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD theirs({table}, sgd), reference({wanted}, sgd);
  const auto ours = replace(theirs, {});
  const auto step = [](const at::Tensor& on, torch::optim::Optimizer& opt, int seed) {
    on.mutable_grad().reset();
    (seed == 1 ? loss_of_rows(on, seed) : (on.sin() * (seed + 1)).sum()).backward();
    opt.step();
  };
  for (int seed = 0; seed < 3; ++seed) {
    if (seed == 2) hand_back(*ours, theirs);
    step(table, seed < 2 ? static_cast<torch::optim::Optimizer&>(*ours) : theirs, seed);
    step(wanted, reference, seed);
  }
  expect_close({table}, {wanted});
}

TEST(SparseMomentum, OfOneByteAnElementIsKnownToBeSoAfterAGroupIsAdded) {
  torch::manual_seed(0);
  const auto table = torch::randn({8, 3}).requires_grad_();
  torch::optim::SGD theirs({table}, torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  const auto ours = replace(theirs, {.state_dtype = StateFormat::Int8});
  loss_of_rows(table, 0).backward();
  ours->step();
  const at::Tensor before = ours->tail().decoded_state(0).moments[0];
  ASSERT_TRUE(before.is_sparse());
  ours->add_param_group(torch::optim::OptimizerParamGroup(Tensors{torch::zeros({2}).requires_grad_()}));
  const at::Tensor after = ours->tail().decoded_state(0).moments[0];
  ASSERT_TRUE(after.is_sparse());
  EXPECT_TRUE(same_bits(after.to_dense(), before.to_dense()));
}

}  // namespace
}  // namespace oxytorch::optim::testing
