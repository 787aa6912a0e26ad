// Archives: with torch::optim both ways bit for bit, in every format without loss, and refused rather than half read.
#include "optimizer_cases.h"

namespace oxytorch::optim::testing {
namespace {

using ::testing::HasSubstr;

template <class Case>
class EachArchive : public ::testing::Test {};
TYPED_TEST_SUITE(EachArchive, AllCases);

template <class Case>
class EachTorchArchive : public ::testing::Test {};
TYPED_TEST_SUITE(EachTorchArchive, PeerCases);

// The state tensors of torch's own optimizers, as their archive has them.
template <class Torch>
Tensors state_of(const Torch& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::stringstream stream;
  archive.save_to(stream);
  torch::serialize::InputArchive read, states, groups;
  read.load_from(stream);
  read.read("state", states);
  read.read("param_groups", groups);
  Tensors all;
  for (int g = 0;; ++g) {
    torch::serialize::InputArchive group;
    if (!groups.try_read("param_groups/" + std::to_string(g), group)) return all;
    c10::IValue key;
    for (int i = 0; group.try_read("params/" + std::to_string(i), key); ++i) {
      torch::serialize::InputArchive entries;
      if (!states.try_read(key.toStringRef(), entries)) continue;
      for (const char* name :
           {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg"}) {
        c10::IValue value;
        const bool found = entries.try_read(name, value);
        all.push_back(!found ? torch::Tensor() : value.isInt() ? torch::tensor(value.toInt()) : value.toTensor());
      }
    }
  }
}

TYPED_TEST(EachTorchArchive, GoesToTorchAndBackBitForBit) {
  using Case = TypeParam;
  Trial<Case> ours(torch::kFloat, kPlain);
  ours.steps(0, 3);
  Tensors b = make_params<Case>();
  typename Case::Theirs theirs(b, typename Case::TheirOptions(0.5));
  through_archive(ours.optimizer, theirs);
  expect_same_bits(state_of(theirs), state_of(ours.optimizer));
  EXPECT_EQ(theirs.param_groups()[0].options().get_lr(), 1e-2);

  Trial<Case> again(torch::kFloat, [](auto o) { return o.lr(0.5).clip_norm(1e9); });
  through_archive(theirs, again.optimizer);
  expect_same_bits(state_of(again.optimizer), state_of(ours.optimizer));
  const torch::NoGradGuard no_grad;
  for (std::size_t k = 0; k < b.size(); ++k) {
    b[k].copy_(ours.params[k]);
    again.params[k].copy_(ours.params[k]);
  }
  for (int i = 3; i < 6; ++i) {
    ours.step(i);
    again.step(i);
    set_grads(b, i);
    theirs.step();
  }
  expect_same_bits(again.params, ours.params);
  expect_close(b, ours.params);
}

TYPED_TEST(EachArchive, KeepsEveryFormatToTheLastBit) {
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    const auto options = [&](auto o) { return o.tail(format.tail); };
    Trial<TypeParam> saved(format.dtype, options), loaded(format.dtype, options);
    saved.steps(0, 3);
    loaded.step(9);  // what it holds is replaced
    std::stringstream stream;
    torch::save(saved.optimizer, stream);
    torch::load(loaded.optimizer, stream);
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t k = 0; k < saved.params.size(); ++k) loaded.params[k].copy_(saved.params[k]);
    }
    expect_same_bits(loaded.everything(), saved.everything());
    saved.steps(3, 6);
    loaded.steps(3, 6);
    expect_same_bits(loaded.everything(), saved.everything());
  }
}

TYPED_TEST(EachArchive, RefusesThatOfAnotherClassAndChangesNothing) {
  using Case = TypeParam;
  using Other = std::conditional_t<std::is_same_v<Case, LionCase>, AdagradCase, LionCase>;
  Trial<Case> trial(torch::kFloat, kPlain);
  trial.step(0);
  const Tensors before = trial.everything();
  Tensors others = make_params<Case>();
  typename Other::Ours other(others, Other::set(typename Other::Options()).lr(0.5));
  set_grads(others, 1);
  other.step();
  EXPECT_THAT(message_of([&] { through_archive(other, trial.optimizer); }), HasSubstr("the archive is of "));
  if constexpr (!HasPeer<Case>) {
    torch::optim::RMSprop theirs(others, torch::optim::RMSpropOptions(0.5));
    set_grads(others, 2);
    theirs.step();
    EXPECT_THAT(message_of([&] { through_archive(theirs, trial.optimizer); }), HasSubstr("it is not one of "));
  }
  Tensors one{others[0]};
  const typename Case::Ours shorter(one);
  EXPECT_THAT(message_of([&] { through_archive(shorter, trial.optimizer); }),
              HasSubstr("of the archive has 1 parameters"));
  const typename Case::Ours grouped({{Tensors{others[0]}}, {Tensors{others[1]}}});
  EXPECT_THAT(message_of([&] { through_archive(grouped, trial.optimizer); }),
              HasSubstr("the archive has 2 parameter groups"));
  Tensors reshaped;
  for (const auto& p : others) reshaped.push_back(torch::ones({p.numel() + 1, 2}).requires_grad_());
  typename Case::Ours strange(reshaped, Case::set(typename Case::Options()));
  set_grads(reshaped, 2);
  strange.step();
  EXPECT_THAT(message_of([&] { through_archive(strange, trial.optimizer); }), HasSubstr("the parameter has"));
  expect_same_bits(trial.everything(), before);
  EXPECT_EQ(trial.optimizer.param_groups()[0].options().get_lr(), 1e-2);
}

TEST(Archive, WhatTorchCouldNotCarryOnFromItRefuses) {
  const auto refused = [](torch::Dtype dtype, auto change) {
    Trial<AdamWCase> trial(dtype, change);
    trial.step(0);
    Tensors params = make_params<AdamWCase>(dtype);
    torch::optim::AdamW theirs(params, torch::optim::AdamWOptions(0.5));
    EXPECT_THROW(through_archive(trial.optimizer, theirs), c10::Error);
    EXPECT_EQ(theirs.param_groups()[0].options().get_lr(), 0.5);
    EXPECT_TRUE(theirs.state().empty());
  };
  refused(torch::kFloat, [](auto o) { return o.state_dtype(StateFormat::Int8); });
  refused(torch::kFloat, [](auto o) { return o.maximize(true); });
  refused(torch::kBFloat16, [](auto o) { return o.master_weights(MasterFormat::Float32); });
  refused(torch::kBFloat16, [](auto o) { return o.master_weights(MasterFormat::Int8); });
}

TEST(Archive, RefusesToLoseWhatTheOptimizerDoesNotKeep) {
  const auto message = [](auto saved_with, auto loaded_with) {
    Trial<AdamWCase> saved(torch::kBFloat16, saved_with), loaded(torch::kBFloat16, loaded_with);
    saved.step(0);
    loaded.step(1);
    const Tensors before = loaded.everything();
    const std::string said = message_of([&] { through_archive(saved.optimizer, loaded.optimizer); });
    if (said != "no error") expect_same_bits(loaded.everything(), before);
    return said;
  };
  const auto masters = [](auto o) { return o.master_weights(MasterFormat::Float32); };
  const auto low_bits = [](auto o) { return o.master_weights(MasterFormat::Int8); };
  EXPECT_THAT(message(masters, kPlain), HasSubstr("fp32 master weights of parameter 0, and this optimizer keeps none"));
  EXPECT_THAT(message(low_bits, masters), HasSubstr("int8 master weights"));
  EXPECT_THAT(message([](auto o) { return o.ema_decay(0.9); }, kPlain), HasSubstr("give it an ema_decay"));
  EXPECT_EQ(message(kPlain, masters), "no error");
}

TEST(Archive, StateIsConvertedToTheFormatOfTheOptimizerThatLoadsIt) {
  Trial<AdamWCase> narrow(torch::kFloat, [](auto o) { return o.state_dtype(StateFormat::Int8); });
  Trial<AdamWCase> wide(torch::kFloat, [](auto o) { return o.state_dtype(StateFormat::Float32); });
  narrow.steps(0, 3);
  through_archive(narrow.optimizer, wide.optimizer);
  const ParamState &coded = narrow.optimizer.tail().state(1), &plain = wide.optimizer.tail().state(1);
  EXPECT_EQ(coded.moments[0].scalar_type(), at::kChar);
  EXPECT_EQ(plain.moments[0].scalar_type(), at::kFloat);
  EXPECT_FALSE(plain.scales[0].defined());
  Trial<AdamWCase> again(torch::kFloat, [](auto o) { return o.state_dtype(StateFormat::Int8); });
  through_archive(wide.optimizer, again.optimizer);
  EXPECT_EQ(again.optimizer.tail().state(1).moments[0].scalar_type(), at::kChar);
  EXPECT_EQ(again.optimizer.tail().state(1).moments[1].scalar_type(), at::kByte) << "squares have no sign";
  for (const std::size_t k : {0U, 1U}) {
    const at::Tensor there = again.optimizer.tail().decoded_state(1).moments[k];
    EXPECT_LT((there - plain.moments[k]).norm().item<double>(), 0.02 * plain.moments[k].norm().item<double>()) << k;
  }
  // And torch takes it from there.
  Tensors params = make_params<AdamWCase>();
  torch::optim::AdamW theirs(params);
  through_archive(wide.optimizer, theirs);
  expect_same_bits(state_of(theirs), state_of(wide.optimizer));
}

TEST(Archive, TorchsLeavesTheAveragesAsTheyAre) {
  Trial<AdamWCase> trial(torch::kFloat, [](auto o) { return o.ema_decay(0.9); });
  trial.steps(0, 2);
  Tensors params = make_params<AdamWCase>();
  torch::optim::AdamW theirs(params, torch::optim::AdamWOptions(0.5));
  set_grads(params, 0);
  theirs.step();
  Tensors before;
  for (const auto& t : trial.optimizer.ema_parameters()) before.push_back(t.clone());
  through_archive(theirs, trial.optimizer);
  expect_same_bits(trial.optimizer.ema_parameters(), before);
  EXPECT_EQ(trial.optimizer.param_groups()[0].options().get_lr(), 0.5);
}

TEST(Archive, RefusesOneThatIsNoOptimizers) {
  Trial<AdamWCase> trial(torch::kFloat, kPlain);
  std::stringstream stream;
  torch::save(torch::nn::Linear(2, 2), stream);
  EXPECT_THAT(message_of([&] { torch::load(trial.optimizer, stream); }), HasSubstr("not one of an optimizer"));
}

}  // namespace
}  // namespace oxytorch::optim::testing
