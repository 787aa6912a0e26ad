// Gradients in the memory of other gradients or of parameters: the numbers of torch's loop over the parameters.
#include "optimizer_cases.h"

namespace oxytorch::optim::testing {
namespace {

using ::testing::HasSubstr;

// ---- gradients of parameters that share memory, updated as they arrive

Tensors vectors(int count) {
  torch::manual_seed(0);
  Tensors params;
  for (int i = 0; i < count; ++i) params.push_back(torch::randn({20}).requires_grad_());
  return params;
}

AdamWOptions in_backward() { return AdamWOptions(1e-2).nonfinite(NonFinite::Propagate).step_in_backward(true); }
AdamWOptions plain() { return AdamWOptions(1e-2).nonfinite(NonFinite::Propagate); }

// Gradients that overlap by half, summed by hand: [0, 20), [10, 30), [20, 40).
void give_overlapping(Tensors& params, const at::Tensor& memory) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto from = static_cast<std::int64_t>(10 * i);
    params[i].mutable_grad() = memory.slice(0, from, from + 20);
  }
}

TEST(SharedGradients, ThatNoHookReportedAreZeroedAfterAllUpdates) {
  for (const bool zero_grads : {true, false}) {
    Tensors params = vectors(3), apart = vectors(3);
    AdamW opt(params, in_backward().zero_grads(zero_grads)), reference(apart, plain());
    const at::Tensor memory = at::empty({40});
    for (int step = 0; step < 3; ++step) {
      memory.copy_(at::linspace(1, 2 + step, 40));
      give_overlapping(params, memory);
      for (std::size_t i = 0; i < params.size(); ++i) apart[i].mutable_grad() = params[i].grad().clone();
      opt.step();
      reference.step();
      expect_same_bits(params, apart);
      EXPECT_EQ(memory.any().item<bool>(), !zero_grads);
      for (auto& p : params) p.mutable_grad().zero_();  // one by one: each zeroes a part of the next
    }
  }
}

// Both parameters' gradients are views of one tensor, and the first is updated before autograd hands over the second.
TEST(SharedGradients, OfAutogradsOwnAreNotZeroedBeforeTheyAreRead) {
  Tensors params = vectors(2), apart = vectors(2);
  AdamW opt(params, in_backward().zero_grads(true)), reference(apart, plain());
  for (int step = 0; step < 3; ++step) {
    for (Tensors* of : {&params, &apart}) {
      for (auto& p : *of) p.mutable_grad().reset();
      const auto sum = (*of)[0].view({4, 5}) + (*of)[1].view({4, 5});
      (sum * at::linspace(1, 2 + step, 20).view({4, 5})).sum().backward();
    }
    opt.step();
    reference.step();
    expect_same_bits(params, apart);
  }
}

TEST(SharedGradients, SummedIntoOneBufferAreCompleteBeforeTheirUpdate) {
  for (const bool zero_grads : {true, false}) {
    Tensors params = vectors(3), apart = vectors(3);
    params.push_back(at::full({5}, 2.0).requires_grad_());  // alone
    apart.push_back(params.back().detach().clone().requires_grad_());
    AdamW opt(params, in_backward().zero_grads(zero_grads)), reference(apart, plain());
    for (int step = 0; step < 3; ++step) {
      for (Tensors* of : {&params, &apart}) {
        Tensors three(of->begin(), of->begin() + 3);
        give_overlapping(three, at::zeros({40}));
        (*of)[3].mutable_grad().reset();
        at::Tensor loss = at::zeros({});
        for (const auto& p : *of) loss = loss + (p * (step + 1)).sin().sum();
        loss.backward();
      }
      EXPECT_FALSE(params[3].grad().defined());
      opt.step();
      reference.step();
      expect_same_bits(params, apart);
      for (const auto& p : params) EXPECT_FALSE(p.grad().defined());
    }
  }
}

// ---- gradients that are parameters

template <class Case>
class EachReading : public ::testing::Test {};
TYPED_TEST_SUITE(EachReading, AllCases);

// Which parameter each one has for its gradient: those that come before it, or after.
const std::vector<std::vector<std::size_t>>& readings() {
  static const std::vector<std::vector<std::size_t>> all{{2, 0, 1}, {1, 2, 0}, {1, 0, 0}};
  return all;
}

template <class Case>
Tensors three() {
  torch::manual_seed(0);
  Tensors params;
  for (int i = 0; i < 3; ++i) params.push_back(torch::randn({6, 5}).requires_grad_());
  return params;
}

TYPED_TEST(EachReading, AParameterSeesThoseBeforeItUpdated) {
  for (const bool composite : {false, true}) {
    for (const auto& reading : readings()) {
      const auto options = [&] {
        return TypeParam::set(typename TypeParam::Options()).ema_decay(0.5).copy_dtype(at::kHalf);
      };
      Tensors params = three<TypeParam>(), apart = three<TypeParam>();
      typename TypeParam::Ours opt(params, options().force_composite(composite));
      // An optimizer for each parameter, given what its gradient is when its turn comes.
      std::vector<std::unique_ptr<typename TypeParam::Ours>> references;
      for (const auto& p : apart) {
        references.push_back(std::make_unique<typename TypeParam::Ours>(Tensors{p}, options().force_composite(true)));
      }
      for (int step = 0; step < 4; ++step) {
        for (std::size_t i = 0; i < 3; ++i) params[i].mutable_grad() = params[reading[i]].detach();
        opt.step();
        EXPECT_FALSE(opt.tail().native());
        for (std::size_t i = 0; i < 3; ++i) {
          apart[i].mutable_grad() = apart[reading[i]].detach().clone();
          references[i]->step();
        }
        for (std::size_t i = 0; i < 3; ++i) {
          expect_same_bits({params[i], opt.tail().state(i).ema, opt.tail().state(i).copy},
                           {apart[i], references[i]->tail().state(0).ema, references[i]->tail().state(0).copy});
          for (std::size_t k = 0; k < 3; ++k) {
            EXPECT_TRUE(same_bits(opt.tail().state(i).moments[k], references[i]->tail().state(0).moments[k]));
          }
        }
        if (::testing::Test::HasFailure()) return;
      }
      for (auto& p : params) p.mutable_grad() = at::ones_like(p);
      opt.step();
      EXPECT_EQ(opt.tail().native(), !composite && !TypeParam::kMatricesOnly);
    }
  }
}

template <class Case>
class EachPeerReading : public ::testing::Test {};
TYPED_TEST_SUITE(EachPeerReading, PeerCases);

TYPED_TEST(EachPeerReading, AParameterOrAPartOfAnotherIsReadAsByTorch) {
  Tensors params = three<TypeParam>(), apart = three<TypeParam>();
  typename TypeParam::Ours opt(params, TypeParam::set(typename TypeParam::Options()));
  typename TypeParam::Theirs reference(apart, TypeParam::set(typename TypeParam::TheirOptions(0.5)));
  for (int step = 0; step < 4; ++step) {
    for (Tensors* of : {&params, &apart}) {
      Tensors& p = *of;
      p[0].mutable_grad() = p[0].detach();  // its own, which AdamW decays before it reads
      p[1].mutable_grad() = p[0].detach().slice(0, 0, 1).expand({6, 5});
      p[2].mutable_grad() = p[1].detach().view({5, 6}).t();
    }
    opt.step();
    reference.step();
  }
  expect_close(params, apart, 1e-5, 2e-6);
  typename TypeParam::Ours theirs(apart, TypeParam::set(typename TypeParam::Options()));
  through_archive(reference, theirs);
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t k = 0; k < 3; ++k) {
      const at::Tensor &ours = opt.tail().state(i).moments[k], &wanted = theirs.tail().state(i).moments[k];
      ASSERT_EQ(ours.defined(), wanted.defined());
      if (ours.defined()) expect_close({ours}, {wanted}, 1e-5, 2e-6);
    }
  }
}

TEST(SharedMemory, OfAParameterAndAGradientIsNotZeroed) {
  for (const bool in_backward : {false, true}) {
    Tensors params = vectors(3);
    AdamW opt(params, plain().zero_grads(true).step_in_backward(in_backward));
    for (auto& p : params) p.mutable_grad() = at::ones_like(p);
    opt.step();
    Tensors kept;
    for (const auto& p : params) kept.push_back(p.detach().clone());
    params[1].mutable_grad() = params[2].detach();
    EXPECT_THAT(message_of([&] { opt.step(); }),
                AllOf(HasSubstr("the gradient of parameter 1 of group 0"), HasSubstr("zero_grads would write zeros")));
    expect_same_bits(params, kept);
    params[1].mutable_grad() = params[2].detach().clone();
    EXPECT_EQ(message_of([&] { opt.step(); }), "no error");
  }
}

}  // namespace
}  // namespace oxytorch::optim::testing
