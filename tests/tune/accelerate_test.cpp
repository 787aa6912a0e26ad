// What accelerate() tries, refuses and keeps, and that it leaves everything as it was.
#include <gmock/gmock.h>

#include <climits>
#include <filesystem>

#include "accelerate_fixture.h"
#include "oxytorch/error.h"

namespace oxytorch::accelerate_tests {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;
using tune::Status;

TEST_F(AccelerateTest, KeepsWhatPaysAndRefusesALie) {
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  const auto batches = make_batches();
  const auto before = state_of(model, *optimizer);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"throws", "lie", "no_delay"}));
  EXPECT_THAT(plan.accepted(), ElementsAre("no_delay"));
  EXPECT_GT(plan.speedup().low, 1);
  EXPECT_EQ(entry(plan, "lie").status, Status::Refused) << entry(plan, "lie").reason;
  EXPECT_EQ(entry(plan, "throws").status, Status::Failed);
  EXPECT_THAT(entry(plan, "throws").reason, HasSubstr("it was planted"));
  EXPECT_THAT(plan.report(), HasSubstr("no_delay"));
  EXPECT_FALSE(delayed);
  plan.revert();
  EXPECT_TRUE(delayed);
  EXPECT_THAT(plan.accepted(), IsEmpty());
  EXPECT_TRUE(state_of(model, *optimizer) == before);
}

TEST_F(AccelerateTest, RefusesAWrongLearningRateAndStaleGradients) {
  for (const char* optimizer_name : {"AdamW", "SGD", "oxytorch"}) {
    auto model = make_model();
    auto optimizer = make_optimizer(optimizer_name, model);
    const auto batches = make_batches();
    auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"faster_rate", "stale_gradients"}));
    EXPECT_THAT(plan.accepted(), IsEmpty()) << optimizer_name;
    EXPECT_EQ(entry(plan, "faster_rate").status, Status::Refused) << entry(plan, "faster_rate").reason;
    EXPECT_THAT(entry(plan, "faster_rate").reason, HasSubstr("update"));
    EXPECT_EQ(entry(plan, "stale_gradients").status, Status::Refused) << entry(plan, "stale_gradients").reason;
  }
}

TEST_F(AccelerateTest, DoesNotTryAnUpdateThatIsSlowerByItself) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), make_batches(), only({"slow_update"}));
  EXPECT_THAT(plan.accepted(), IsEmpty());
  EXPECT_EQ(entry(plan, "slow_update").pairs, 0);
  EXPECT_THAT(entry(plan, "slow_update").reason, HasSubstr("Its update by itself"));
}

TEST_F(AccelerateTest, LeavesOutWhatThrowsOrChangesWeights) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto batches = make_batches();
  const auto before = state_of(model, *optimizer);
  auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches, only({"throws_later", "leaves_dirt"}));
  EXPECT_EQ(entry(plan, "throws_later").status, Status::Failed);
  EXPECT_EQ(entry(plan, "leaves_dirt").status, Status::Failed);
  EXPECT_TRUE(state_of(model, *optimizer) == before);
}

TEST_F(AccelerateTest, RestoresEverythingWhereverTheStepThrows) {
  for (const auto& name : kOptimizers) {
    const bool has_tail = name != "oxytorch";
    int calls = 0, with_tail = 0;
    /// Tunes with a loss that throws from its `point`-th call on; whether that came through.
    const auto throws_at = [&](int point) {
      plant();
      costs.update = 0.005;
      auto model = make_model();
      auto optimizer = make_optimizer(name, model);
      const auto batches = make_batches();
      tune::Run plain(*model, *optimizer, loss_of(model), batches);
      for (int i = 0; i < 2; ++i) plain.step(batches[0]);  // there is state to lose
      const auto before = state_of(model, *optimizer);
      calls = 0;
      const auto loss = [&, inner = delayed_loss(model)](const Batch& batch) {
        if (++calls == point) with_tail += has_tail && costs.update == 0;
        if (calls >= point) throw std::runtime_error("the data ran out");
        return inner(batch);
      };
      try {
        auto plan = accelerate(*model, *optimizer, loss, batches, only({"no_delay", "paying_tail"}));
        EXPECT_THAT(plan.accepted(), Contains("no_delay")) << name;
        EXPECT_EQ(plan.accepted().size(), has_tail ? 2U : 1U) << name;
        plan.revert();
      } catch (const std::runtime_error& error) {
        EXPECT_THAT(error.what(), HasSubstr("the data ran out"));
        EXPECT_TRUE(state_of(model, *optimizer) == before) << name << ", throwing at call " << point;
        EXPECT_TRUE(delayed);
        EXPECT_EQ(costs.update, 0.005);
        return true;
      }
      return false;
    };
    EXPECT_FALSE(throws_at(INT_MAX)) << name;
    const int last = calls;
    ASSERT_GT(last, 50) << name;
    for (const int point : {1, 2, 3, 9, 17, 30, 50, last / 2, last - 10, last}) {
      EXPECT_TRUE(throws_at(point)) << name << ", call " << point << " of " << last;
    }
    EXPECT_EQ(with_tail > 0, has_tail) << name << ": some points are steps by the replacement";
  }
}

TEST_F(AccelerateTest, LetsPassWhatIsNoException) {
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  const auto batches = make_batches();
  const auto before = state_of(model, *optimizer);
  int calls = 0;
  const auto loss = [&, inner = delayed_loss(model)](const Batch& batch) {
    if (++calls >= 30) throw 42;
    return inner(batch);
  };
  EXPECT_THROW(accelerate(*model, *optimizer, loss, batches, only({"no_delay", "step_tail"})), int);
  EXPECT_TRUE(state_of(model, *optimizer) == before);
}

TEST_F(AccelerateTest, BasicTrainsToTheSameBits) {
  for (const auto& name : kOptimizers) {
    const auto batches = make_batches();
    auto reference = make_model();
    auto plain_optimizer = make_optimizer(name, reference);
    tune::Run plain(*reference, *plain_optimizer, loss_of(reference), batches, 1.0);
    auto model = make_model();
    auto optimizer = make_optimizer(name, model);
    torch::manual_seed(7);
    for (int i = 0; i < 12; ++i) plain.step(batches[static_cast<std::size_t>(i) % 4]);
    torch::manual_seed(7);
    costs.allocator = 0.005;
    auto plan = accelerate(*model, *optimizer, delayed_loss(model), batches,
                           AccelerateOptions().level("basic").remember(false).tune_seconds(20).clip_norm(1.0).exclude(
                               {"throws", "throws_later", "leaves_dirt", "drifts"}));
    EXPECT_THAT(plan.accepted(), UnorderedElementsAre("host_pool", "no_delay")) << name << plan.report();
    for (int i = 0; i < 12; ++i) plan.step(batches[static_cast<std::size_t>(i) % 4]);
    plan.revert();
    EXPECT_TRUE(state_of(model, *optimizer) == state_of(reference, *plain_optimizer)) << name;
  }
}

TEST_F(AccelerateTest, AcceptsNoStrategyThatDoesNothing) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  std::vector<std::string> nulls;
  for (int i = 0; i < 12; ++i) nulls.push_back("null_" + std::to_string(i));
  auto plan = accelerate(*model, *optimizer, loss_of(model), make_batches(), only(nulls).tune_seconds(20));
  // At most 1 in 100 is accepted: two of twelve are far outside of that.
  EXPECT_LE(plan.accepted().size(), 1U);
}

TEST_F(AccelerateTest, WorksWithoutOptions) {
  const CacheFolder cache;
  auto model = make_model();
  auto optimizer = make_optimizer("AdamW", model);
  const auto batches = make_batches();
  auto plan = accelerate(*model, *optimizer, loss_of(model), batches);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(std::isfinite(plan.step(batches[0]).item<double>()));
  EXPECT_FALSE(plan.report().empty());
}

TEST_F(AccelerateTest, SaysWhatCannotBeMeant) {
  auto model = make_model();
  auto optimizer = make_optimizer("SGD", model);
  const auto batches = make_batches();
  EXPECT_THROW(accelerate(*model, *optimizer, loss_of(model), batches, only({"no_dela"})), Error);
  EXPECT_THROW(accelerate(*model, *optimizer, loss_of(model), batches, AccelerateOptions().level("bold")), Error);
  EXPECT_THROW(accelerate(*model, *optimizer, loss_of(model), batches, AccelerateOptions().steps_planned(0)), Error);
  EXPECT_THROW(accelerate(*model, *optimizer, loss_of(model), {}), Error);
  EXPECT_THROW(accelerate(*model, *optimizer, {}, batches), Error);
  EXPECT_THROW(tune::register_strategy<NoDelay>("no_delay", Kind::Exact), Error);
}

}  // namespace
}  // namespace oxytorch::accelerate_tests
