#include "base/spelling.h"

#include <gtest/gtest.h>

#include <string>

namespace oxytorch {
namespace {

TEST(EditDistance, KnownPairs) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("preicsion", "precision"), 1u);  // one swap
  EXPECT_EQ(edit_distance("ca", "abc"), 3u);               // optimal string alignment, not full Damerau
  EXPECT_EQ(edit_distance("same", "same"), 0u);
}

TEST(EditDistance, IsSymmetric) {
  for (const char* a : {"threads", "seed", "clip_norm", ""}) {
    for (const char* b : {"thread", "sede", "clip_value", "x"}) EXPECT_EQ(edit_distance(a, b), edit_distance(b, a));
  }
}

TEST(Nearest, FindsWhatWasMeantOrNothing) {
  const std::vector<std::string> names{"precision", "threads", "seed", "clip_norm", "clip_value"};
  EXPECT_EQ(nearest("Precison", names), "precision");
  EXPECT_EQ(nearest("thread", names), "threads");
  EXPECT_EQ(nearest("clipnorm", names), "clip_norm");
  EXPECT_EQ(nearest("banana", names), "");
  EXPECT_EQ(nearest("", names), "");
  EXPECT_EQ(nearest(std::string(1'000'000, 's'), names), "");
  EXPECT_EQ(did_you_mean("sed", names), "did you mean 'seed'? ");
  EXPECT_EQ(did_you_mean("zzzzz", names), "");
}

TEST(Quoted, KeepsMessagesOnOneSafeLine) {
  EXPECT_EQ(in_quotes("plain"), "'plain'");
  EXPECT_EQ(in_quotes("a\nb\xff"), "'a\\x0ab\\xff'");
  const std::string text = in_quotes(std::string(5000, 'x') + "end");
  EXPECT_LT(text.size(), 100u);
  EXPECT_NE(text.find("end'"), std::string::npos);
}

TEST(ListOf, ReadsAsEnglish) {
  EXPECT_EQ(list_of({}), "");
  EXPECT_EQ(list_of({"a"}), "'a'");
  EXPECT_EQ(list_of({"a", "b", "c"}), "'a', 'b' or 'c'");
  EXPECT_EQ(list_of({"a", "b"}, false), "a or b");
}

}  // namespace
}  // namespace oxytorch
