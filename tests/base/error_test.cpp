#include "oxytorch/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace oxytorch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(Error, CarriesCodeAndMessage) {
  const Error error(ErrorCode::NotFound, "no file 'a'");
  EXPECT_EQ(error.code(), ErrorCode::NotFound);
  EXPECT_STREQ(error.what(), "no file 'a'");
}

TEST(Error, EveryCodeHasItsOwnName) {
  std::set<std::string> names;
  for (const ErrorCode code : {ErrorCode::InvalidArgument, ErrorCode::InvalidType, ErrorCode::OutOfRange,
                               ErrorCode::NotFound, ErrorCode::OutOfMemory, ErrorCode::NotSupported,
                               ErrorCode::InvalidState, ErrorCode::DeviceError, ErrorCode::Io, ErrorCode::Internal}) {
    names.insert(name(code));
  }
  EXPECT_EQ(names.size(), 10u);
  EXPECT_EQ(names.count("Unknown"), 0u);
  EXPECT_STREQ(name(ErrorCode::InvalidArgument), "InvalidArgument");
  EXPECT_STREQ(name(static_cast<ErrorCode>(99)), "Unknown");
}

TEST(Check, StreamsItsPartsOnlyOnFailure) {
  int made = 0;
  const auto part = [&made] { return ++made; };
  EXPECT_NO_THROW(OXY_CHECK(1 + 1 == 2, OutOfRange, "never ", part()));
  EXPECT_EQ(made, 0);
  try {
    OXY_CHECK(1 + 1 == 3, OutOfRange, "index ", 7, " of ", 2.5, "; seen ", part());
    FAIL() << "OXY_CHECK did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::OutOfRange);
    EXPECT_STREQ(error.what(), "index 7 of 2.5; seen 1");
  }
  EXPECT_EQ(made, 1);
}

TEST(Check, IsOneStatement) {
  // As the body of an unbraced if with an else, it must not swallow the else.
  bool reached = false;
  if (reached)
    OXY_CHECK(true, Io, "");
  else
    reached = true;
  EXPECT_TRUE(reached);
}

TEST(Assert, SaysItIsOurBugAndWhere) {
  try {
    OXY_ASSERT(2 < 1, "count was ", 3);
    FAIL() << "OXY_ASSERT did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Internal);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("Oxytorch bug"), HasSubstr("2 < 1"), HasSubstr("error_test.cpp"),
                                    HasSubstr("count was 3")));
  }
  EXPECT_NO_THROW(OXY_ASSERT(true, "fine"));
}

TEST(Error, IsARuntimeErrorForCallersWhoKnowOnlyStd) {
  EXPECT_THROW(OXY_CHECK(false, InvalidArgument, "x"), std::runtime_error);
}

}  // namespace
}  // namespace oxytorch
