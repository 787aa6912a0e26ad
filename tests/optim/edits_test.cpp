// What C++ programs do to parameters, gradients and state between steps: other memory behind the same tensor, other
// layouts, other entries. The reference is a new optimizer that is given the same values in plain memory: it caches
// nothing, so every bit must agree. Run under the address sanitizer by `make nightly`.
#include <cstdlib>
#include <random>

#include "optimizer_cases.h"

namespace oxytorch::optim::testing {
namespace {

using ::testing::HasSubstr;

// ---- edits that keep all values

void cloned(at::Tensor t) { t.set_data(t.detach().clone()); }

void set_to_copy(at::Tensor t) { t.set_(t.detach().clone()); }

void resized(at::Tensor t) {
  const at::Tensor kept = t.detach().clone();
  t.set_data(at::empty({0}, t.options().requires_grad(false)));
  t.set_data(t.detach().resize_(kept.sizes()).copy_(kept));
}

void offloaded(at::Tensor t) {
  const at::Tensor kept = t.detach().clone();
  const auto bytes = static_cast<std::int64_t>(t.storage().nbytes());
  t.storage().unsafeGetStorageImpl()->set_data_ptr(c10::GetAllocator(at::kCPU)->allocate(0));
  t.storage().set_nbytes(0);
  t.storage().unsafeGetStorageImpl()->set_data_ptr(
      c10::GetAllocator(at::kCPU)->allocate(static_cast<std::size_t>(bytes)));
  t.storage().set_nbytes(static_cast<std::size_t>(bytes));
  t.copy_(kept);
}

void with_offset(at::Tensor t) {
  const at::Tensor room = at::zeros({t.numel() + 3}, t.options().requires_grad(false));
  const at::Tensor part = room.slice(0, 3).view(t.sizes());
  t.set_data(part.copy_(t.detach()));
}

void with_gaps(at::Tensor t) {
  auto sizes = t.sizes().vec();
  sizes.push_back(2);
  const at::Tensor part = at::zeros(sizes, t.options().requires_grad(false)).select(-1, 0);
  t.set_data(part.copy_(t.detach()));
}

void transposed(at::Tensor t) {
  if (t.dim() >= 2) t.set_data(t.detach().transpose(0, 1).contiguous().transpose(0, 1));
}

void channels_last(at::Tensor t) {
  if (t.dim() == 4) t.set_data(t.detach().contiguous(at::MemoryFormat::ChannelsLast));
}

void contiguous(at::Tensor t) { t.set_data(t.detach().contiguous()); }

using Edit = void (*)(at::Tensor);
// Codes and low bits stand in the order of memory, random bits belong to places in it.
constexpr Edit kInOrder[] = {cloned, set_to_copy, resized, offloaded, with_offset};
constexpr Edit kLayouts[] = {transposed, channels_last, contiguous, with_gaps};

Tensors state_of(const TailOptimizer& optimizer) {
  Tensors all;
  for (std::size_t i = 0; i < optimizer.tail().param_count(); ++i) {
    const ParamState& s = optimizer.tail().state(i);
    for (const auto& t : {s.step, s.master, s.low_bits, s.ema, s.copy}) all.push_back(t);
    for (std::size_t k = 0; k < s.moments.size(); ++k) {
      all.push_back(s.moments[k]);
      all.push_back(s.scales[k]);
    }
  }
  std::erase_if(all, [](const at::Tensor& t) { return !t.defined(); });
  return all;
}

template <class Case>
class EachEdited : public ::testing::Test {};
TYPED_TEST_SUITE(EachEdited, AllCases);

TYPED_TEST(EachEdited, KeepsEveryBitWhereStateGetsOtherMemory) {
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    const auto trained = [&](Edit edit) {
      Trial<TypeParam> trial(format.dtype, [&](auto o) { return o.tail(format.tail); });
      for (int i = 0; i < 5; ++i) {
        trial.step(i);
        if (edit == nullptr || i % 2 != 0) continue;
        const at::NoGradGuard no_grad;
        for (const auto& t : state_of(trial.optimizer)) edit(t);
      }
      return trial.everything();
    };
    const Tensors plain = trained(nullptr);
    for (const Edit edit : kInOrder) expect_same_bits(trained(edit), plain);
  }
}

TYPED_TEST(EachEdited, KeepsEveryBitWhereParametersChangeLayout) {
  const TailOptions tail{.ema_decay = 0.5, .master_weights = MasterFormat::Float32, .copy_dtype = at::kHalf};
  const auto trained = [&](Edit edit) {
    Trial<TypeParam> trial(torch::kBFloat16, [&](auto o) { return o.tail(tail); });
    for (int i = 0; i < 6; ++i) {
      trial.step(i);
      if (edit == nullptr) continue;
      const at::NoGradGuard no_grad;
      for (const auto& p : trial.params) (i == 4 ? contiguous : edit)(p);
    }
    EXPECT_EQ(trial.optimizer.tail().native(), !TypeParam::kMatricesOnly);
    return trial.everything();
  };
  const Tensors plain = trained(nullptr);
  expect_same_bits(trained(channels_last), plain);
  if (!TypeParam::kMatricesOnly) expect_same_bits(trained(transposed), plain);
}

TEST(Edits, ConvertCodesByIndex) {
  Tensors params = make_params<AdamWCase>(torch::kBFloat16);
  AdamW opt(params, AdamWOptions(1e-2).state_dtype(StateFormat::Int8).master_weights(MasterFormat::Int8));
  set_grads(params, 0);
  opt.step();
  const std::size_t image = params.size() - 1;
  const ParamState before = opt.tail().decoded_state(image);
  const at::Tensor low_bits = opt.tail().state(image).low_bits.clone();
  {
    const at::NoGradGuard no_grad;
    channels_last(params[image]);
  }
  opt.param_groups()[0].options().set_lr(0);
  static_cast<AdamWOptions&>(opt.param_groups()[0].options()).betas({1 - 1e-12, 1 - 1e-12}).weight_decay(0);
  params[image].mutable_grad().zero_();
  opt.step();
  const ParamState after = opt.tail().decoded_state(image);
  EXPECT_TRUE(opt.tail().state(image).moments[0].is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(same_bits(opt.tail().state(image).low_bits, low_bits));
  for (std::size_t k = 0; k < 2; ++k) {
    const double largest = before.moments[k].abs().max().item<double>();
    EXPECT_LE((after.moments[k] - before.moments[k]).abs().max().item<double>(), 0.03 * largest) << k;
  }
}

TEST(Edits, CodesLaidOutAnewKeepTheirValues) {
  Tensors params = make_params<AdamWCase>(torch::kFloat);
  AdamW opt(params, AdamWOptions(1e-2).state_dtype(StateFormat::Int8));
  set_grads(params, 0);
  const std::size_t image = params.size() - 1;
  {
    const at::NoGradGuard no_grad;
    at::Tensor& grad = params[image].mutable_grad();
    grad.mul_(at::linspace(1e-3, 1, grad.numel()).view_as(grad));
  }
  opt.step();
  const ParamState before = opt.tail().decoded_state(image);
  for (const at::Tensor& codes : opt.tail().state(image).moments) {
    if (codes.defined()) channels_last(codes);
  }
  opt.set_state(image, opt.tail().state(image));
  ParamState after = opt.tail().decoded_state(image);
  for (std::size_t k = 0; k < 2; ++k) EXPECT_TRUE(same_bits(after.moments[k], before.moments[k])) << k;
  // As it was held by the caller all along, without asking for it anew.
  const ParamState held = opt.tail().state(image);
  for (std::size_t k = 0; k < 2; ++k) channels_last(held.moments[k]);
  opt.set_state(image, held);
  after = opt.tail().decoded_state(image);
  for (std::size_t k = 0; k < 2; ++k) EXPECT_TRUE(same_bits(after.moments[k], before.moments[k])) << k;
}

TEST(Edits, MemoryInCommonIsLeftToTorchsOrder) {
  const at::Tensor memory = at::ones({300});
  Tensors params = {memory.slice(0, 0, 200).detach().requires_grad_(), memory.slice(0, 100).detach().requires_grad_()};
  AdamW opt(params, AdamWOptions(1e-2));
  for (at::Tensor& p : params) p.mutable_grad() = at::ones_like(p);
  opt.step();
  EXPECT_FALSE(opt.tail().native());
  params[1].set_data(params[1].detach().clone());
  opt.step();
  EXPECT_TRUE(opt.tail().native());
}

TEST(Edits, GradientsInCommonAreZeroedAfterAllUpdates) {
  const at::Tensor memory = at::ones({60});
  Tensors params, apart;
  for (Tensors* of : {&params, &apart}) {
    for (int i = 0; i < 3; ++i) of->push_back(at::full({20}, 1.0 + i).requires_grad_());
  }
  AdamW opt(params, AdamWOptions(1e-2).zero_grads(true)), reference(apart, AdamWOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    memory.fill_(1.0 + step);
    for (std::size_t i = 0; i < params.size(); ++i) {
      params[i].mutable_grad() =
          memory.slice(0, static_cast<std::int64_t>(10 * i), static_cast<std::int64_t>(10 * i + 20));
      apart[i].mutable_grad() = params[i].grad().clone();
    }
    opt.step();
    reference.step();
    EXPECT_TRUE(opt.tail().native());
    for (std::size_t i = 0; i < params.size(); ++i) {
      EXPECT_TRUE(same_bits(params[i], apart[i])) << i;
      EXPECT_FALSE(params[i].grad().any().item<bool>());
    }
  }
}

TEST(Edits, OfAWrongKindAreRefusedByName) {
  struct Wrong {
    std::function<void(at::Tensor)> edit;
    const char* text;
  };
  const std::vector<Wrong> wrongs{
      {[](at::Tensor t) { t.set_data(at::zeros({9})); }, "has shape [9]"},
      {[](at::Tensor t) { t.set_data(at::zeros({})); }, "has shape []"},
      {[](at::Tensor t) { t.set_data(at::zeros(t.sizes(), at::kInt)); }, "is of dtype Int"},
      {[](at::Tensor t) {
         t.storage().unsafeGetStorageImpl()->set_data_ptr(c10::GetAllocator(at::kCPU)->allocate(0));
         t.storage().set_nbytes(0);
       },
       "was freed"},
  };
  for (const bool composite : {false, true}) {
    for (const auto entry : {&ParamState::ema, &ParamState::copy, static_cast<at::Tensor ParamState::*>(nullptr)}) {
      for (const Wrong& wrong : wrongs) {
        Tensors params = make_params<AdamWCase>();
        AdamW opt(params, AdamWOptions(0.1).ema_decay(0.9).copy_dtype(at::kHalf).force_composite(composite));
        set_grads(params, 0);
        opt.step();
        Tensors kept;
        for (const auto& p : params) kept.push_back(p.detach().clone());
        const ParamState& state = opt.tail().state(1);
        const at::NoGradGuard no_grad;
        wrong.edit(entry == nullptr ? state.moments[1] : state.*entry);
        EXPECT_THAT(message_of([&] { opt.step(); }), HasSubstr(wrong.text));
        for (std::size_t i = 0; i < params.size(); ++i) EXPECT_TRUE(same_bits(params[i], kept[i])) << i;
      }
    }
  }
}

// ---- random edits

at::Tensor plain_copy(const at::Tensor& t) { return t.defined() ? t.detach().clone(at::MemoryFormat::Contiguous) : t; }

ParamState plain_copy(const ParamState& state) {
  ParamState copy;
  copy.step = plain_copy(state.step);
  for (std::size_t k = 0; k < state.moments.size(); ++k) {
    copy.moments[k] = plain_copy(state.moments[k]);
    copy.scales[k] = plain_copy(state.scales[k]);
  }
  copy.master = plain_copy(state.master);
  copy.low_bits = plain_copy(state.low_bits);
  copy.ema = plain_copy(state.ema);
  copy.copy = plain_copy(state.copy);
  return copy;
}

// One seed: an optimizer, a format, and edits before each of its steps.
template <class Case>
class RandomCase {
 public:
  explicit RandomCase(unsigned seed) : random_(seed), format_(pick_format()) {}

  void run() {
    Tensors params = make_params<Case>(format_.dtype);
    if (chance(0.5)) std::shuffle(params.begin(), params.end(), random_);
    const auto options = [&](double rate) {
      auto made = Case::set(typename Case::Options()).tail(format_.tail);
      made.lr(rate);
      return made;
    };
    typename Case::Ours ours(params, options(1e-2));
    const int steps = 3 + below(4);
    for (int i = 0; i < steps; ++i) {
      double rate = ours.param_groups()[0].options().get_lr();
      if (i > 0) edit(params, ours);
      if (chance(0.2)) ours.param_groups()[0].options().set_lr(rate *= 0.5);
      set_grads(params, below(1000));
      edit_grads(params);
      if (i > 0 && chance(0.15)) refuse_once(params, ours);
      Tensors copies;
      for (const auto& p : params) {
        copies.push_back(plain_copy(p).requires_grad_());
        copies.back().mutable_grad() = plain_copy(p.grad());
      }
      typename Case::Ours fresh(copies, options(rate));
      for (std::size_t k = 0; k < params.size(); ++k) fresh.set_state(k, plain_copy(ours.tail().state(k)));
      ours.step();
      fresh.step();
      expect_same_bits(everything(params, ours), everything(copies, fresh));
      if (::testing::Test::HasFailure()) return;
    }
  }

 private:
  Format pick_format() {
    std::vector<Format> all = formats();
    all.push_back({"plain", torch::kFloat, {.ema_decay = 0.9, .copy_dtype = at::kHalf}});
    all.push_back({"half", torch::kHalf, {.master_weights = MasterFormat::Float32}});
    all.push_back({"double", torch::kDouble, {.ema_decay = 0.5}});
    all.push_back({"composite", torch::kFloat, {.ema_decay = 0.9, .force_composite = true}});
    Format chosen = all[static_cast<std::size_t>(below(static_cast<int>(all.size())))];
    // Sums over elements are taken in the order of memory, which some edits change.
    chosen.tail.clip_norm = chosen.tail.agc = 0;
    chosen.tail.collect_stats = false;
    return chosen;
  }

  bool chance(double probability) { return std::bernoulli_distribution(probability)(random_); }
  int below(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }

  // Whether an element's place in memory may change without a change of bits.
  [[nodiscard]] bool free_order() const {
    return format_.tail.state_dtype != StateFormat::Int8 && !format_.tail.stochastic_rounding && !Case::kMatricesOnly;
  }

  Edit pick_edit(bool layouts) {
    const int moves = static_cast<int>(std::size(kInOrder)), all = moves + static_cast<int>(std::size(kLayouts));
    const int chosen = below(layouts ? all : moves);
    return chosen < moves ? kInOrder[chosen] : kLayouts[chosen - moves];
  }

  void edit(Tensors& params, typename Case::Ours& ours) {
    const at::NoGradGuard no_grad;
    for (int n = below(4); n > 0; --n) {
      const auto index = static_cast<std::size_t>(below(static_cast<int>(params.size())));
      const Tensors state = state_of(ours);
      switch (below(6)) {
        case 0: {
          // A write to a weight clears its low bits, whatever is written; views with gaps are stepped by torch's
          // operators, whose last bits are others.
          const Edit chosen = pick_edit(free_order());
          const bool other = format_.tail.master_weights == MasterFormat::Int8 || chosen == with_gaps;
          (other ? cloned : chosen)(params[index]);
          break;
        }
        case 1:
          for (const auto& t : state) pick_edit(free_order())(t);
          break;
        case 2:
          if (!state.empty())
            pick_edit(free_order())(state[static_cast<std::size_t>(below(static_cast<int>(state.size())))]);
          break;
        case 3: ours.set_state(index, {}); break;
        case 4: ours.set_state(index, plain_copy(ours.tail().state(index))); break;
        default: exchange(params, ours); break;
      }
    }
  }

  // The moments of two parameters of one shape, exchanged behind their tensors.
  void exchange(const Tensors& params, const typename Case::Ours& ours) {
    for (std::size_t i = 0; i + 1 < params.size(); ++i) {
      const ParamState &a = ours.tail().state(i), &b = ours.tail().state(i + 1);
      if (params[i].sizes() != params[i + 1].sizes() || !a.moments[0].defined() || !b.moments[0].defined()) continue;
      const at::Tensor kept = a.moments[0].detach().clone();
      a.moments[0].set_data(b.moments[0].detach());
      b.moments[0].set_data(kept);
    }
  }

  void edit_grads(Tensors& params) {
    const at::NoGradGuard no_grad;
    for (auto& p : params) {
      if (chance(0.15))
        p.mutable_grad().reset();
      else if (chance(0.3))
        pick_edit(!Case::kMatricesOnly)(p.grad());
    }
  }

  // A change that cannot be served: refused, and taken back nothing has happened.
  void refuse_once(Tensors& params, typename Case::Ours& ours) {
    const at::NoGradGuard no_grad;
    for (auto& p : params) {
      if (!p.grad().defined()) continue;
      const at::Tensor data = p.detach(), grad = p.grad();
      const at::Tensor kept = data.clone();
      p.mutable_grad().reset();
      p.set_data(data.to(p.scalar_type() == at::kDouble ? at::kFloat : at::kDouble));
      p.mutable_grad() = at::zeros_like(p);
      EXPECT_THAT(message_of([&] { ours.step(); }), HasSubstr("when the optimizer was built"));
      p.mutable_grad().reset();
      p.set_data(data);
      p.mutable_grad() = grad;
      EXPECT_TRUE(same_bits(p, kept));
      return;
    }
  }

  std::mt19937 random_;
  Format format_;
};

TEST(Edits, AtRandomLeaveAnOptimizerThatComputesAsANewOne) {
  const char* const cases = std::getenv("OXYTORCH_FUZZ_CASES");
  const char* const only = std::getenv("OXYTORCH_FUZZ_SEED");
  const unsigned begin = only != nullptr ? static_cast<unsigned>(std::atoi(only)) : 0;
  const unsigned end = only != nullptr ? begin + 1 : static_cast<unsigned>(cases != nullptr ? std::atoi(cases) : 300);
  using Run = void (*)(unsigned);
  const Run kinds[] = {
      [](unsigned s) { RandomCase<AdamWCase>(s).run(); },   [](unsigned s) { RandomCase<AdamCase>(s).run(); },
      [](unsigned s) { RandomCase<SGDCase>(s).run(); },     [](unsigned s) { RandomCase<LionCase>(s).run(); },
      [](unsigned s) { RandomCase<AdagradCase>(s).run(); }, [](unsigned s) { RandomCase<RMSpropCase>(s).run(); },
      [](unsigned s) { RandomCase<MuonCase>(s).run(); }};
  for (unsigned seed = begin; seed < end && !HasFailure(); ++seed) {
    SCOPED_TRACE("OXYTORCH_FUZZ_SEED=" + std::to_string(seed));
    kinds[seed % std::size(kinds)](seed);
  }
}

}  // namespace
}  // namespace oxytorch::optim::testing
