#include "oxytorch/tune/reuse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace oxytorch::tune {
namespace {

using testing::HasSubstr;

Certificate made(bool pays) {
  Certificate certificate;
  certificate.created = "2026-01-01T00:00:00Z";
  certificate.step_seconds = 0.033;
  certificate.step_spread = 0.02;
  certificate.entries = {{.strategy = "pool", .status = pays ? Status::Accepted : Status::Rejected, .reason = ""}};
  return certificate;
}

std::string fault(const Certificate& certificate, double seconds = 0.033, bool disturbed = false,
                  const char* time = "2026-01-02T00:00:00Z", double spread = 0.02) {
  return why_not_trusted(certificate, {.seconds = seconds, .spread = spread, .disturbed = disturbed, .time = time});
}

TEST(Reuse, TrustsWhatWasMeasuredOnTheSameStep) {
  for (const bool pays : {true, false}) {
    EXPECT_EQ(fault(made(pays)), "");
    EXPECT_EQ(fault(made(pays), 0.037), "");
    EXPECT_EQ(fault(made(pays), 0.029), "");
  }
}

TEST(Reuse, AnotherStepIsMeasuredAnew) {
  // Made beside another program: 2.47 s of a step that takes 33 ms.
  Certificate busy = made(false);
  busy.step_seconds = 2.47;
  EXPECT_EQ(fault(busy), "a step as given takes 33 ms, and took 2.47 s then");
  EXPECT_THAT(fault(made(true), 0.045), HasSubstr("45 ms"));
  EXPECT_EQ(fault(made(true), 0.045, false, "2026-01-02T00:00:00Z", 0.15), "") << "its own noise";
  EXPECT_EQ(fault(made(true), 2.47, true), "") << "on a busy machine its time tells nothing";
  busy = made(true);
  busy.disturbance = "other programs used 1.0 of its 2 cores";
  EXPECT_THAT(fault(busy), HasSubstr("busy"));
}

TEST(Reuse, ThatNothingPaysExpires) {
  EXPECT_EQ(fault(made(false), 0.033, false, "2026-01-07T00:00:00Z"), "");
  EXPECT_EQ(fault(made(false), 0.033, false, "2026-01-10T00:00:00Z"), "that nothing pays was found 9 days ago");
  EXPECT_EQ(fault(made(true), 0.033, false, "2026-03-10T00:00:00Z"), "");
  Certificate often = made(false);
  for (int i = 0; i < 7; ++i) often.events.push_back("step 0: reused, nothing pays here");
  EXPECT_EQ(fault(often), "");
  often.events.push_back("step 0: reused, nothing pays here");
  EXPECT_THAT(fault(often), HasSubstr("reused 8 times"));
  often = made(false);
  often.created = "yesterday";
  EXPECT_THAT(fault(often), HasSubstr("cannot be read"));
}

TEST(Reuse, WhereNothingIsActiveTheNearestIsTriedAgain) {
  Certificate certificate = made(false);
  EXPECT_EQ(worth_another_look(certificate), "");
  const auto rejected = [](const char* name, double high, double cost) {
    return CertificateEntry{.strategy = name,
                            .status = Status::Rejected,
                            .reason = "",
                            .speedup = Interval{0.9, 0.95, high, 0.95},
                            .cost_seconds = cost};
  };
  certificate.entries = {rejected("slower", 0.97, 0), rejected("near", 1.02, 0), rejected("nearer", 1.04, 0),
                         rejected("compile", 1.2, 16)};
  EXPECT_EQ(worth_another_look(certificate), "nearer");
  certificate.entries[0].status = Status::Accepted;
  EXPECT_EQ(worth_another_look(certificate), "");
}

}  // namespace
}  // namespace oxytorch::tune
