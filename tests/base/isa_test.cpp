#include "oxytorch/isa.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "oxytorch/error.h"

namespace oxytorch {
namespace {

TEST(Isa, NamesRoundTrip) {
  for (const Isa isa : {Isa::Scalar, Isa::Avx2, Isa::Avx512}) EXPECT_EQ(parse_isa(name(isa)), isa);
}

TEST(Isa, RefusesOtherNames) {
  for (const char* text : {"", "AVX2", "avx", "avx512 ", "sse"}) {
    try {
      parse_isa(text);
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_NE(std::string(error.what()).find("'avx512'"), std::string::npos) << error.what();
    }
  }
}

TEST(Isa, SupportedStartsScalarAndWidens) {
  const auto& sets = supported_isas();
  ASSERT_FALSE(sets.empty());
  EXPECT_EQ(sets.front(), Isa::Scalar);
  for (std::size_t i = 1; i < sets.size(); ++i) EXPECT_LT(sets[i - 1], sets[i]);
}

TEST(Isa, WidestIsTheDefault) {
  if (std::getenv("OXYTORCH_ISA") != nullptr) GTEST_SKIP() << "OXYTORCH_ISA is set";
  EXPECT_EQ(active_isa(), supported_isas().back());
}

TEST(Isa, ScopesNestAndEnd) {
  const Isa before = active_isa();
  for (const Isa isa : supported_isas()) {
    const ScopedIsa outer(isa);
    EXPECT_EQ(active_isa(), isa);
    {
      const ScopedIsa inner(Isa::Scalar);
      EXPECT_EQ(active_isa(), Isa::Scalar);
    }
    EXPECT_EQ(active_isa(), isa);
  }
  EXPECT_EQ(active_isa(), before);
}

TEST(Isa, ScopeRefusesWhatTheProcessorLacks) {
  for (const Isa isa : {Isa::Avx2, Isa::Avx512}) {
    bool supported = false;
    for (const Isa one : supported_isas()) supported |= one == isa;
    if (supported) continue;
    try {
      const ScopedIsa scope(isa);
      ADD_FAILURE() << "accepted " << name(isa);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::NotSupported);
    }
  }
}

using IsaDeathTest = testing::Test;

// Each in a process of its own: the choice is made once a process.
TEST(IsaDeathTest, VariableLowersTheChoice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("OXYTORCH_ISA", "scalar", 1);
        std::_Exit(active_isa() == Isa::Scalar ? 7 : 1);
      },
      testing::ExitedWithCode(7), "");
}

TEST(IsaDeathTest, BadVariableIsAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("OXYTORCH_ISA", "avx1024", 1);
        try {
          active_isa();
        } catch (const Error& error) {
          std::_Exit(error.code() == ErrorCode::InvalidArgument ? 7 : 2);
        }
        std::_Exit(1);
      },
      testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace oxytorch
