// In which order a step of a candidate is judged, by a step that is a table of errors.
#include "oxytorch/tune/step_judge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <vector>

namespace oxytorch::tune {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using testing::UnorderedElementsAre;

/// One gradient of the size 1 that is off by so much.
ValueErrors off_by(double error) {
  ValueErrors errors;
  errors.loss_size = 1;
  errors.whole = 1;
  errors.gradients = {{"weight", error, 1, 1000}};
  return errors;
}

/// Notes what the judge asks for. Its gradient is off by `jump` in its first elements.
struct ScriptedStep : ComparedStep {
  Gradients gradients() override { return {own}; }
  Gradients take_as_given() override {
    asked.emplace_back("as given");
    in_float64 = false;
    return reference();
  }
  Gradients take_in_float64() override {
    asked.emplace_back("float64");
    in_float64 = true;
    return reference();
  }
  ValueErrors errors() override {
    auto found = off_by(in_float64 ? wide_error : cheap_error);
    found.wrong = wrong;
    return found;
  }
  ValueErrors errors_with(const Gradients& gradients) override {
    asked.emplace_back("other gradients");
    return off_by((gradients[0] - exact).norm().item<double>());
  }
  ValueErrors yardstick_errors() override {
    asked.emplace_back("yardstick");
    return off_by(yardstick_error);
  }
  std::pair<Gradients, Gradients> take_apart(int state) override {
    if (state == 0) asked.emplace_back("apart");
    // Each state crosses the kink of the same unit, by which the reference jumps and the candidate does not.
    const auto right = state % 2 == 0 ? exact + jump : exact - jump;
    return {{fault ? 1.5 * right : exact}, {right}};
  }
  [[nodiscard]] Gradients reference() const { return steps ? Gradients{exact} : Gradients{}; }

  at::Tensor exact = torch::ones(40, at::kDouble), jump = torch::zeros(40, at::kDouble), own = exact;
  double cheap_error = 0, wide_error = 0, yardstick_error = 0;
  std::vector<std::string> wrong, asked;
  bool in_float64 = false, steps = true, fault = false;
};

/// Its gradient is too large at every state.
ScriptedStep too_large(double error) {
  ScriptedStep step;
  step.fault = true;
  step.own = 1.5 * step.exact;
  step.cheap_error = step.wide_error = error;
  return step;
}

ScriptedStep across_a_kink() {
  ScriptedStep step;
  step.jump.narrow(0, 3, 4).fill_(0.125);
  step.own = step.exact + step.jump;
  step.cheap_error = step.wide_error = 0.25;
  return step;
}

TEST(StepJudgeTest, ARoundingCostsOneStepMore) {
  StepJudge judge(off_by(0), false, true);
  ScriptedStep step;
  step.cheap_error = 1e-6;
  EXPECT_EQ(judge.fault(step, false), "");
  EXPECT_THAT(step.asked, ElementsAre("as given"));
  std::map<std::string, double> evidence;
  judge.add_to(evidence);
  EXPECT_THAT(evidence, IsEmpty()) << "nothing was taken in float64";
}

TEST(StepJudgeTest, Float64DecidesWhereTheStepAsGivenShowsMore) {
  StepJudge judge(off_by(2e-4), false, true);
  auto step = too_large(1e-2);
  step.wide_error = 5e-4;
  EXPECT_EQ(judge.fault(step, false), "") << "three times as far off as the step as given is allowed";
  EXPECT_THAT(step.asked, ElementsAre("as given", "float64"));
  step.wide_error = 2e-3;
  EXPECT_THAT(judge.fault(step, false), HasSubstr("weight is off by")) << "kinks explain none of it";
  std::map<std::string, double> evidence;
  judge.add_to(evidence);
  EXPECT_THAT(evidence, UnorderedElementsAre(Pair("float64_steps", 2), Pair("gradient_error", 2e-3),
                                             Pair("usual_error", 2e-4), Pair("loss_error", 0)));
}

TEST(StepJudgeTest, AWideStepIsTakenInFloat64WhateverTheOtherSays) {
  StepJudge judge(off_by(0), false, true);
  auto step = too_large(0);
  step.wide_error = 0.5;
  EXPECT_EQ(judge.fault(step, false), "");
  step.asked.clear();
  EXPECT_THAT(judge.fault(step, true), HasSubstr("weight is off by"));
  EXPECT_THAT(step.asked, ElementsAre("as given", "float64", "yardstick", "apart", "other gradients"));
}

TEST(StepJudgeTest, TheYardstickOfTheSameStepMayBeFurtherOffThanThatOfTheFirst) {
  StepJudge judge(off_by(0), true, true);
  ScriptedStep step;
  step.cheap_error = step.wide_error = 0.25;
  step.yardstick_error = 0.1;
  EXPECT_EQ(judge.fault(step, false), "");
  EXPECT_THAT(step.asked, ElementsAre("as given", "float64", "yardstick"));
}

TEST(StepJudgeTest, WithoutFloat64TheStepAsGivenDecides) {
  StepJudge judge(off_by(0), false, false);
  ScriptedStep step;
  step.cheap_error = 1e-2;
  EXPECT_THAT(judge.fault(step, true), HasSubstr("off by 0.01"));
  EXPECT_THAT(step.asked, ElementsAre("as given"));
}

TEST(StepJudgeTest, AStepThatCalledNoOptimizerIsComparedByLossAndBuffersAlone) {
  StepJudge judge(off_by(0), false, true);
  ScriptedStep step;
  step.steps = false;
  EXPECT_EQ(judge.fault(step, true), "");
  EXPECT_THAT(step.asked, ElementsAre("as given"));
}

TEST(StepJudgeTest, WhatIsMissingIsNeverARounding) {
  StepJudge judge(off_by(0), false, true);
  auto step = across_a_kink();
  step.wrong = {"weight has no gradient"};
  EXPECT_EQ(judge.fault(step, false), "weight has no gradient");
  EXPECT_THAT(step.asked, ElementsAre("as given", "float64", "yardstick"));
}

TEST(StepJudgeTest, KinksOfTwoStepsSpeakForTheNext) {
  StepJudge judge(off_by(0), false, true);
  for (int i = 0; i < 2; ++i) {
    auto step = across_a_kink();
    EXPECT_EQ(judge.fault(step, false), "");
    EXPECT_THAT(step.asked, ElementsAre("as given", "float64", "yardstick", "apart", "other gradients"));
  }
  auto step = across_a_kink();
  EXPECT_EQ(judge.fault(step, false), "");
  EXPECT_THAT(step.asked, ElementsAre("as given", "other gradients"));
  step.asked.clear();
  EXPECT_EQ(judge.fault(step, true), "");
  EXPECT_THAT(step.asked, ElementsAre("as given", "float64", "yardstick", "apart", "other gradients"));
  std::map<std::string, double> evidence;
  judge.add_to(evidence);
  EXPECT_EQ(evidence.at("across_kinks"), 1);
}

TEST(StepJudgeTest, AShortLookLetsSmallErrorsPass) {
  auto step = too_large(0.019);
  EXPECT_EQ(StepJudge(off_by(0), false, true, true).fault(step, true), "");
  step.cheap_error = step.wide_error = 0.021;
  EXPECT_NE(StepJudge(off_by(0), false, true, true).fault(step, true), "");
}

TEST(StepJudgeTest, WhatTheStepThrowsPasses) {
  struct Throwing : ScriptedStep {
    Gradients take_in_float64() override { throw std::runtime_error("no float64"); }
  } step;
  EXPECT_THROW((void)StepJudge(off_by(0), false, true).fault(step, true), std::runtime_error);
}

}  // namespace
}  // namespace oxytorch::tune
