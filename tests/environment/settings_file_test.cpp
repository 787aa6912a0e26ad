#include "environment/settings_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "oxytorch/error.h"
#include "oxytorch/random.h"

namespace oxytorch::environment {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::StartsWith;

constexpr char kHead[] = "family: nccl\ncomponent: nccl\nsource: NCCL 2.30\nsettings:\n";
constexpr char kEntry[] =
    "  NCCL_ALPHA:\n"
    "    values: integer 1..32\n"
    "    default: 8\n"
    "    what: Does a thing.\n"
    "    since: 2.10\n"
    "    until: 2.20\n"
    "    replacement: NCCL_BETA\n"
    "  NCCL_BETA:\n"
    "    values: choice LAZY/EAGER, any case\n"
    "    what: \"Does it: sooner.\"\n"
    "    deprecated: 3.1.4\n";

std::vector<Setting> settings_of(const std::string& text) {
  return read_settings(std::vector{SettingsFile{"a.yaml", text}});
}

/// The message with which files are refused.
std::string refusal(const std::vector<SettingsFile>& files) {
  try {
    read_settings(files);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
    return error.what();
  }
  return "accepted";
}

std::string refusal(const std::string& text) { return refusal({SettingsFile{"a.yaml", text}}); }

/// The good file with its first `old` replaced.
std::string with(const std::string& old, const std::string& replacement) {
  std::string text = std::string(kHead) + kEntry;
  const std::size_t at = text.find(old);
  EXPECT_NE(at, std::string::npos) << old;
  return text.replace(at, old.size(), replacement);
}

TEST(SettingsFile, EveryFieldIsRead) {
  const auto settings = settings_of(std::string("# A comment.\n") + kHead + kEntry);
  ASSERT_EQ(settings.size(), 2U);
  const Setting& first = settings[0];
  EXPECT_EQ(first.name, "NCCL_ALPHA");
  EXPECT_EQ(first.family, Family::Nccl);
  EXPECT_EQ(first.component, "nccl");
  EXPECT_EQ(first.evidence, "NCCL 2.30");
  EXPECT_EQ(first.kind, Kind::Integer);
  EXPECT_EQ(first.low, 1);
  EXPECT_EQ(first.high, 32);
  EXPECT_EQ(first.standard, "8");
  EXPECT_EQ(first.what, "Does a thing.");
  EXPECT_EQ(first.since, "2.10");  // text, not the number 2.1
  EXPECT_EQ(first.until, "2.20");
  EXPECT_EQ(first.replacement, "NCCL_BETA");
  EXPECT_EQ(first.deprecated, "");
  const Setting& second = settings[1];
  EXPECT_EQ(second.kind, Kind::Choice);
  EXPECT_THAT(second.choices, testing::ElementsAre("LAZY", "EAGER"));
  EXPECT_TRUE(second.any_case);
  EXPECT_EQ(second.what, "Does it: sooner.");
  EXPECT_EQ(second.deprecated, "3.1.4");
  EXPECT_EQ(second.low, std::nullopt);
}

TEST(SettingsFile, ValuesNameAKindAndWhatBelongsToIt) {
  const auto of = [](const std::string& values) { return settings_of(with("integer 1..32", values)).at(0); };
  for (const char* word : {"flag", "digit", "size", "list", "path", "text", "integer", "number"}) {
    EXPECT_EQ(name(of(word).kind), std::string(word));
  }
  EXPECT_EQ(of("integer -1..").low, -1);
  EXPECT_EQ(of("integer -1..").high, std::nullopt);
  EXPECT_EQ(of("number 0..100").high, 100);
  EXPECT_FALSE(of("choice a/B").any_case);
  EXPECT_EQ(of("grammar level").grammar, "level");
}

TEST(SettingsFile, FilesJoinByFamily) {
  const std::string cuda =
      "family: cuda\ncomponent: cuda\nsource: s\nsettings:\n  A: {values: flag, what: W., replacement: Z}\n";
  const std::string nccl = "family: nccl\ncomponent: nccl\nsource: s\nsettings:\n  Z: {values: flag, what: W.}\n";
  const auto settings = read_settings(std::vector{SettingsFile{"1.yaml", nccl}, SettingsFile{"2.yaml", cuda}});
  ASSERT_EQ(settings.size(), 2U);
  EXPECT_EQ(settings[0].name, "A");
  EXPECT_EQ(settings[1].name, "Z");
  EXPECT_EQ(refusal({{"1.yaml", nccl}, {"2.yaml", nccl}}),
            "settings file 2.yaml, line 5, Z: the name is in 1.yaml, line 5 too; keep one.");
  EXPECT_EQ(refusal(cuda),
            "settings file a.yaml, line 5, A: the replacement 'Z' is in no file; did you mean 'A'? add it, or leave "
            "the field out.");
}

struct Bad {
  const char* old;
  const char* now;
  const char* message;  ///< a part of it
};

class BadFile : public testing::TestWithParam<Bad> {};

TEST_P(BadFile, IsRefusedWithTheWayOut) {
  const Bad& bad = GetParam();
  EXPECT_THAT(refusal(with(bad.old, bad.now)),
              AllOf(StartsWith("settings file a.yaml, line "), HasSubstr(bad.message)));
}

INSTANTIATE_TEST_SUITE_P(
    Head, BadFile,
    testing::Values(
        Bad{"family: nccl", "family: ncl",
            "line 1: there is no family 'ncl'; did you mean 'nccl'? write one of 'cuda', "},
        Bad{"family: nccl\n", "", "line 1: field 'family' is missing in the head of the file; add it."},
        Bad{"component: nccl\n", "", "line 1: field 'component' is missing in the head"},
        Bad{"source: NCCL 2.30\n", "", "line 1: field 'source' is missing in the head"},
        Bad{"source: NCCL 2.30", "source:", "line 3: field 'source' is nothing; write a text, or leave the field out."},
        Bad{"source: NCCL 2.30", "source: a\nsource: b", "line 4: field 'source' stands twice; keep one."},
        Bad{"source: NCCL 2.30", "sources: a",
            "line 3: there is no field 'sources'; did you mean 'source'? write one of "},
        Bad{"source: NCCL 2.30", "source: [a, b]", "line 3: field 'source' is a list; write a text"},
        Bad{"source: NCCL 2.30", "source: {a: b}", "line 3: field 'source' is a mapping; write a text"},
        Bad{"settings:\n", "settings: all\nmore:\n",
            "line 4: settings is a text; write a mapping from names to fields."},
        Bad{"family", "---\n---\nfamily", "line 2: there is nothing; a file is a mapping with family, "},
        Bad{"family", "[family]\n---\nfamily", "line 1: there is a list; a file is a mapping with family, "},
        Bad{"    deprecated: 3.1.4\n", "---\nfamily: nccl\n", "line 15: a second YAML document begins; keep one."}));

INSTANTIATE_TEST_SUITE_P(
    Entry, BadFile,
    testing::Values(
        Bad{"NCCL_BETA:\n", "NCCL_AAA:\n",
            "line 12, NCCL_AAA: names are sorted as by LC_ALL=C sort; move it before NCCL_ALPHA."},
        Bad{"  NCCL_BETA:\n", "  NCCL_ALPHA:\n", "line 12, NCCL_ALPHA: the name stands twice; keep one of them."},
        Bad{"NCCL_ALPHA:", "NCCL-ALPHA:", "line 5: 'NCCL-ALPHA' is no name of an environment variable; write "},
        Bad{"NCCL_ALPHA:", "1NCCL:", "line 5: '1NCCL' is no name of an environment variable"},
        Bad{"  NCCL_ALPHA:\n", "  NCCL_AAA: text\n  NCCL_ALPHA:\n",
            "line 5: setting 'NCCL_AAA' is a text; write a mapping with values and what."},
        Bad{"    values: integer 1..32\n", "", "line 5, NCCL_ALPHA: field 'values' is missing; add it."},
        Bad{"    what: Does a thing.\n", "", "line 5, NCCL_ALPHA: field 'what' is missing; add it."},
        Bad{"default: 8", "defualt: 8",
            "line 7, NCCL_ALPHA: there is no field 'defualt'; did you mean 'default'? write one of 'values', "
            "'default', "},
        Bad{"default: 8", "default: 8\n    default: 9", "line 8, NCCL_ALPHA: field 'default' stands twice; keep one."},
        Bad{"default: 8", "default:", "line 7, NCCL_ALPHA: field 'default' is nothing; write a text, or leave"},
        Bad{"default: 8", "default: ~", "line 7, NCCL_ALPHA: field 'default' is nothing"},
        Bad{"default: 8", "default: ''",
            "line 7, NCCL_ALPHA: field 'default' is ''; write printable ASCII on one line"},
        Bad{"default: 8", "default: [8]", "line 7, NCCL_ALPHA: field 'default' is a list; write a text"},
        Bad{"integer 1..32\n    default: 8", "&a flag\n    default: *a",
            "line 7, NCCL_ALPHA: field 'default' is an alias"},
        Bad{"default: 8", "default: \xC3\xBC", "line 7, NCCL_ALPHA: field 'default' is '\\xc3\\xbc'; write printable"},
        Bad{"Does a thing.", "Does a thing", "line 8, NCCL_ALPHA: what 'Does a thing' does not end with a full stop"},
        Bad{"Does a thing.", "Does: a thing.",
            "line 8, NCCL_ALPHA: what 'Does' does not end with a full stop; write one sentence, in double quotes"},
        Bad{"default: 8", "default: @8",
            "line 7: this is not YAML: 'unknown token'; a text with ': ' or ' #' in it needs double quotes."},
        Bad{"since: 2.10", "since: v2.10", "line 9, NCCL_ALPHA: since 'v2.10' is no version; write numbers with dots"},
        Bad{"since: 2.10", "since: 2..1", "line 9, NCCL_ALPHA: since '2..1' is no version"},
        Bad{"until: 2.20", "until: 2.9", "line 5, NCCL_ALPHA: since 2.10 is not before 2.9; correct the versions."},
        Bad{"replacement: NCCL_BETA", "replacement: NCCL_BETTA",
            "line 5, NCCL_ALPHA: the replacement 'NCCL_BETTA' is in no file; did you mean 'NCCL_BETA'? add it"}));

INSTANTIATE_TEST_SUITE_P(
    Values, BadFile,
    testing::Values(
        Bad{"integer 1..32", "int 1..32",
            "line 6, NCCL_ALPHA: values 'int 1..32' has no kind 'int'; write one of 'flag', "},
        Bad{"integer 1..32", "intger", "has no kind 'intger'; did you mean 'integer'? write one of"},
        Bad{"integer 1..32", "integer 32..1",
            "line 6, NCCL_ALPHA: the range '32..1' must be LOW..HIGH or LOW.. in whole"},
        Bad{"integer 1..32", "integer ..32", "the range '..32' must be"},
        Bad{"integer 1..32", "integer 1-32", "the range '1-32' must be"},
        Bad{"integer 1..32", "integer 1..99999999999999999999", "the range '1..99999999999999999999' must be"},
        Bad{"integer 1..32", "number 0.5..1", "the range '0.5..1' must be"},
        Bad{"integer 1..32", "flag yes", "values 'flag yes' has 'yes' after a kind that takes nothing; remove it."},
        Bad{"integer 1..32", "choice", "values 'choice' has the choice ''; write different words with a slash between"},
        Bad{"integer 1..32", "choice a//b", "has the choice ''; write different words"},
        Bad{"integer 1..32", "choice a/a", "has the choice 'a'; write different words"},
        Bad{"integer 1..32", "choice a, b", "has the choice 'a, b'; write different words"},
        Bad{"integer 1..32", "grammar levl",
            "there is no grammar 'levl'; did you mean 'level'? write one of 'cpu_affinity', "}));

TEST(SettingsFile, TextsThatAreNoFileAreRefused) {
  EXPECT_THAT(refusal(""), HasSubstr("line 1: the file is empty; remove it."));
  EXPECT_THAT(refusal(std::string(kHead) + "  {}\n"), HasSubstr("line 1: there are no settings; add one, or remove"));
  EXPECT_THAT(refusal("family"), HasSubstr("line 1: there is a text; a file is a mapping"));
}

// Any text gives settings that keep the schema, or a message that says where it is broken.
TEST(SettingsFileFuzz, AnyTextGivesSettingsOrAMessage) {
  const std::string good = std::string(kHead) + kEntry;
  const std::vector<std::string> pieces{
      "{",  "}",   "[",    "]",   ":",    ",", "\"", "'",           "\n", "  ",   "- ",           "&a ", "*a",
      "!!", "---", "<<: ", "|\n", ">-\n", "#", "?",  "%YAML 9.9\n", "\t", "null", "\xEF\xBB\xBF", "..",  "/"};
  PhiloxStream random(17);
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string text = good;
    for (std::uint64_t edits = 1 + random.below(2); edits > 0; --edits) {
      const std::size_t place = random.below(text.size() + 1);
      switch (random.below(4)) {
        case 0: text.erase(place, 1 + random.below(30)); break;
        case 1: text.insert(place, 1, static_cast<char>(random.below(256))); break;
        case 2: text.insert(place, text.substr(random.below(text.size() + 1), random.below(80))); break;
        default: text.insert(place, pieces[random.below(pieces.size())]);
      }
    }
    try {
      for (const Setting& one : settings_of(text)) {
        ASSERT_FALSE(one.name.empty() || one.what.empty() || one.component.empty() || one.evidence.empty()) << text;
        ASSERT_EQ(one.kind == Kind::Choice, !one.choices.empty()) << text;
      }
      ++accepted;
    } catch (const Error& error) {
      ++refused;
      ASSERT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
      ASSERT_THAT(error.what(), MatchesRegex("settings file a\\.yaml, line [0-9]+(, [A-Za-z0-9_]+)?: [ -~]+\\."))
          << text;
    }
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 1000);
}

TEST(SettingsFileFuzz, DeepNestingIsRefusedNotFollowed) {
  for (const char* piece : {"[", "{a: ", "- ", "? "}) {
    std::string text;
    for (int i = 0; i < 20'000; ++i) text += piece;
    EXPECT_NE(refusal(text), "accepted");
  }
}

}  // namespace
}  // namespace oxytorch::environment
