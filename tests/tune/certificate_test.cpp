#include "oxytorch/tune/certificate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "oxytorch/error.h"
#include "oxytorch/logging.h"
#include "oxytorch/random.h"

namespace oxytorch::tune {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

Certificate example() {
  Certificate certificate;
  certificate.key = {"Xeon, 2 threads on 2 cores avx2", "2.13.0+cpu", "5c1e", "level=advanced"};
  certificate.level = "advanced";
  certificate.created = "2026-01-02T03:04:05Z";
  certificate.steps_planned = 10'000;
  certificate.step_seconds = 0.42;
  certificate.step_spread = 0.01;
  certificate.step_faults = 30'000;
  certificate.baseline_seconds = 0.415;
  certificate.tuned_seconds = 0.0971;
  certificate.speedup = Interval{4.2, 4.27, 4.31, 0.95};
  certificate.given_peak_bytes = std::int64_t{100} << 20;
  certificate.tuned_peak_bytes = std::int64_t{150} << 20;
  certificate.tuning_seconds = 21.5;
  certificate.compile_seconds = 14.25;
  certificate.entries = {{.strategy = "allocator",
                          .kind = Kind::Exact,
                          .status = Status::Accepted,
                          .reason = "1.446x (1.430 to 1.461) over 9 pairs, p = 0.002: faster.",
                          .cost = "Resident memory stays at its peak.",
                          .speedup = Interval{1.43, 1.446, 1.461, 0.95},
                          .pairs = 9,
                          .cost_seconds = 0.1,
                          .break_even_steps = 0.7,
                          .evidence = {{"steps_identical", 5}, {"gradient_error", 0}}},
                         {.strategy = "compile <default>",
                          .kind = Kind::Tolerance,
                          .status = Status::Failed,
                          .reason = "It threw \"no compiler\" \xF0\x9F\x94\xA5 & more."}};
  certificate.verification = {{"trajectory", "inside the band of 5 seeds"}};
  certificate.events = {"step 50: the changes still pay"};
  return certificate;
}

TEST(Certificate, TheBaselineIsOfAProcessThatWasNotTuned) {
  Certificate same = example();
  same.relate(0.41, 30'100);
  EXPECT_EQ(same, example());
  // Trials left memory so that a step faults less of it: what was measured there flatters nobody.
  Certificate other = example();
  other.step_seconds = 0.2075;
  other.step_faults = 0;
  other.relate(0.415, 60'000);
  EXPECT_DOUBLE_EQ(other.baseline_seconds, 0.2075);
  EXPECT_DOUBLE_EQ(other.speedup->mid, 4.27 / 2);
  EXPECT_DOUBLE_EQ(other.speedup->low, 2.1);
  EXPECT_THAT(other.events.back(), HasSubstr("60,000 page faults after the trials"));
  Certificate none = example();
  none.entries.clear();
  none.speedup.reset();
  none.relate(0.3, 200'000);
  EXPECT_DOUBLE_EQ(none.tuned_seconds, 0.3);
  EXPECT_THAT(none.events.back(), HasSubstr("with nothing active"));
}

TEST(Certificate, PageFaultsBoundWhatKeepingMemoryCanGain) {
  EXPECT_LT(most_heap_speedup(50, 0.033), 1.01);
  EXPECT_GT(most_heap_speedup(50'000, 0.2), 1.5);
  EXPECT_DOUBLE_EQ(most_heap_speedup(1e9, 0.2), 3);
}

TEST(Certificate, ABusyMachineIsSaid) {
  Certificate busy = example();
  EXPECT_THAT(busy.to_text(), Not(HasSubstr("busy")));
  busy.disturbance = "other programs used 1.0 of its 2 cores";
  EXPECT_THAT(busy.to_text(), HasSubstr("The machine was busy while this was measured: other programs used 1.0"));
  EXPECT_EQ(Certificate::from_json(busy.to_json()), busy);
}

TEST(Certificate, SaysWhatTensorsTake) {
  Certificate certificate = example();
  EXPECT_THAT(
      certificate.to_text(),
      HasSubstr("Its tensors take 150 MiB at the most, model and optimizer included, and 100 MiB as given (1.5"));
  certificate.tuning_peak_bytes = std::int64_t{125} << 20;
  EXPECT_THAT(certificate.to_text(), HasSubstr("(1.500x); while tuning they\ntook 125 MiB (1.250x)."));
  EXPECT_EQ(Certificate::from_json(certificate.to_json()), certificate);
  std::string earlier = certificate.to_json();
  const auto at = earlier.find("  \"tuning_peak_bytes\"");
  earlier.erase(at, earlier.find('\n', at) + 1 - at);
  EXPECT_FALSE(Certificate::from_json(earlier).tuning_peak_bytes) << "certificates of before have none";
  certificate.tuned_peak_bytes.reset();
  EXPECT_THAT(certificate.to_text(), Not(HasSubstr("Its tensors take")));
  EXPECT_EQ(Certificate::from_json(certificate.to_json()), certificate);
  certificate = example();
  certificate.entries.clear();
  certificate.tuned_peak_bytes = certificate.given_peak_bytes;
  EXPECT_THAT(certificate.to_text(), HasSubstr("Its tensors take 100 MiB at the most, model and optimizer included."));
}

TEST(Certificate, ReadsBackWhatItWrote) {
  const Certificate one = example();
  const std::string text = one.to_json();
  const Certificate two = Certificate::from_json(text);
  EXPECT_TRUE(one == two);
  EXPECT_EQ(two.to_json(), text);
  EXPECT_EQ(Certificate::from_json(Certificate().to_json()), Certificate());
}

TEST(Certificate, KeepsNumbersThatAreNotFinite) {
  Certificate certificate = example();
  certificate.baseline_seconds = INFINITY;
  certificate.entries[0].evidence = {{"nan", NAN}, {"low", -INFINITY}, {"tiny", 5e-324}, {"third", 1.0 / 3}};
  const Certificate read = Certificate::from_json(certificate.to_json());
  EXPECT_EQ(read.to_json(), certificate.to_json());
  EXPECT_EQ(read.entries[0].evidence.at("third"), 1.0 / 3);
  EXPECT_TRUE(std::isnan(read.entries[0].evidence.at("nan")));
}

TEST(Certificate, SaysWhatIsWrongAndWhere) {
  const auto message = [](const std::string& text) {
    try {
      static_cast<void>(Certificate::from_json(text));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const auto with = [](const std::string& from, const std::string& to) {
    std::string text = example().to_json();
    return text.replace(text.find(from), from.size(), to);
  };
  EXPECT_THAT(message("{"), HasSubstr("parse error"));
  EXPECT_THAT(message("{}"), HasSubstr("no certificate"));
  EXPECT_THAT(message("[1]"), HasSubstr("no certificate"));
  EXPECT_THAT(message(with("\"version\": 4", "\"version\": 5")), HasSubstr("format 5"));
  EXPECT_THAT(message(with("\"accepted\"", "\"acepted\"")), HasSubstr("entries[0].status"));
  EXPECT_THAT(message(with("\"accepted\"", "\"acepted\"")), HasSubstr("did you mean 'accepted'"));
  EXPECT_THAT(message(with("\"pairs\": 9", "\"pairs\": -9")), HasSubstr("entries[0].pairs"));
  EXPECT_THAT(message(with("\"mid\": 1.446", "\"mid\": true")), HasSubstr("entries[0].speedup.mid"));
  EXPECT_THAT(message(with("\"events\"", "\"evens\"")), HasSubstr("no 'events'"));
}

/// Any text is a certificate that reads back equal, or an Error.
TEST(Certificate, SurvivesDamagedText) {
  const char* cases = std::getenv("OXYTORCH_FUZZ_CASES");
  const int count = cases == nullptr ? 3000 : std::atoi(cases) * 10;
  const std::string valid = example().to_json();
  int read = 0;
  for (int i = 0; i < count; ++i) {
    PhiloxStream random(static_cast<std::uint64_t>(i), 11);
    std::string text = valid;
    for (std::uint64_t edits = 1 + random.below(4); edits > 0; --edits) {
      const auto at = static_cast<std::size_t>(random.below(text.size()));
      const auto span = static_cast<std::size_t>(random.below(40));
      switch (random.below(5)) {
        case 0: text[at] = static_cast<char>(random.below(256)); break;
        case 1: text.erase(at, span); break;
        case 2: text.insert(at, valid.substr(random.below(valid.size()), span)); break;
        case 3: text.insert(at, 1, "{}[]\",:-.0e9n"[random.below(13)]); break;
        default: text.resize(at); break;
      }
      if (text.empty()) text = " ";
    }
    try {
      const Certificate certificate = Certificate::from_json(text);
      const std::string written = certificate.to_json();
      EXPECT_EQ(Certificate::from_json(written).to_json(), written) << "case " << i;
      EXPECT_FALSE(certificate.to_text().empty());
      EXPECT_FALSE(certificate.to_html().empty());
      ++read;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << "case " << i;
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_LT(read, count);
}

TEST(Certificate, RefusesDeepNesting) {
  const std::string deep(1 << 20, '[');
  EXPECT_THROW(static_cast<void>(Certificate::from_json(deep)), Error);
}

TEST(Certificate, KnowsWhenItIsRepaid) {
  Certificate certificate = example();
  EXPECT_THAT(certificate.accepted(), ElementsAre("allocator"));
  EXPECT_NEAR(certificate.repaid_after(false).value(), 21.5 / (0.415 - 0.0971), 1e-9);
  EXPECT_NEAR(certificate.repaid_after().value(), 35.75 / (0.415 - 0.0971), 1e-9);
  certificate.tuned_seconds = certificate.baseline_seconds;
  EXPECT_FALSE(certificate.repaid_after().has_value());
}

TEST(Certificate, IsATableForTheTerminal) {
  const std::string text = example().to_text();
  EXPECT_THAT(text, HasSubstr("1.446x"));
  EXPECT_THAT(text, HasSubstr("accepted"));
  EXPECT_THAT(text, HasSubstr("Resident memory stays"));
  EXPECT_THAT(text, HasSubstr("inside the band"));
  EXPECT_LT(text.find("Since then"), text.find("step 50: the changes still pay"));
  EXPECT_THAT(text, HasSubstr("repaid after 113 steps, without compiling after 68 steps"));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 130) << line;
}

TEST(Certificate, SaysOnceWhySeveralWereNotTried) {
  Certificate certificate = example();
  const auto skip = [&](const char* strategy, const char* reason) {
    certificate.entries.push_back({.strategy = strategy, .status = Status::Skipped, .reason = reason});
  };
  skip("split_2", "the loop is yours");
  skip("tf32", "the model is not on a CUDA device.");
  skip("split_4", "the loop is yours");
  const std::string text = certificate.to_text();
  EXPECT_THAT(text, HasSubstr("Not tried: split_2, split_4: the loop is yours.\n"));
  EXPECT_THAT(text, HasSubstr("Not tried: tf32: the model is not on a CUDA device.\n"));
  EXPECT_THAT(text, Not(HasSubstr("split_2 (")));
  EXPECT_THAT(text, HasSubstr("allocator (accepted): 1.446x (1.430 to 1.461) over 9 pairs, p = 0.002: faster. Costs: "
                              "Resident memory"));
  EXPECT_THAT(text, HasSubstr("Evidence: gradient_error 0, steps_identical 5"));
}

TEST(Certificate, IsAPageThatNeedsNothingElse) {
  const std::string page = example().to_html();
  EXPECT_THAT(page, HasSubstr("<svg"));
  EXPECT_THAT(page, HasSubstr("Since then"));
  EXPECT_THAT(page, HasSubstr("class=\"whisker\""));
  EXPECT_THAT(page, HasSubstr("compile &lt;default&gt;"));
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("compile <default>")));
}

TEST(CertificateKey, DigestTellsKeysApartAndStaysTheSame) {
  const CertificateKey key{"a", "b", "c", "d"};
  EXPECT_EQ(key.digest(), "53997eba86e1c7f5");
  EXPECT_NE((CertificateKey{"ab", "", "c", "d"}).digest(), (CertificateKey{"a", "b", "c", "d"}).digest());
  EXPECT_NE((CertificateKey{"", "ab", "c", "d"}).digest(), (CertificateKey{"ab", "", "c", "d"}).digest());
}

TEST(CertificateKey, NamesTheHardware) {
  const std::string key = hardware_key();
  EXPECT_THAT(key, HasSubstr("thread"));
  EXPECT_EQ(key, hardware_key());
  EXPECT_NE(key, hardware_key("/no/such/root"));
}

class Store : public testing::Test {
 protected:
  Store() {
    std::string name = testing::TempDir() + "certificates.XXXXXX";
    root_ = ::mkdtemp(name.data());
  }
  ~Store() override { std::filesystem::remove_all(root_); }

  std::string root_;
};

TEST_F(Store, FindsWhatWasPutAndForgetsIt) {
  const CertificateStore store(root_ + "/deep/down");
  const Certificate certificate = example();
  EXPECT_FALSE(store.find(certificate.key).has_value());
  store.forget(certificate.key);
  store.put(certificate);
  EXPECT_EQ(store.find(certificate.key), certificate);
  CertificateKey other = certificate.key;
  other.torch = "2.14";
  EXPECT_FALSE(store.find(other).has_value());
  store.forget(certificate.key);
  EXPECT_FALSE(store.find(certificate.key).has_value());
}

TEST_F(Store, TakesADamagedFileForNoneAndWarns) {
  const CertificateStore store(root_);
  const Certificate certificate = example();
  store.put(certificate);
  const std::string path = root_ + "/" + certificate.key.digest() + ".json";
  std::ofstream(path) << "{\"format\": ";
  std::string said;
  const LogSink before = set_log_sink([&](const LogRecord& record) { said = record.message; });
  EXPECT_FALSE(store.find(certificate.key).has_value());
  set_log_sink(before);
  EXPECT_THAT(said, HasSubstr(certificate.key.digest()));
  store.put(certificate);
  EXPECT_TRUE(store.find(certificate.key).has_value());
}

TEST_F(Store, IsNotFooledByAFileOfAnotherKey) {
  const CertificateStore store(root_);
  Certificate certificate = example();
  CertificateKey other = certificate.key;
  other.model = "another";
  certificate.save(root_ + "/" + other.digest() + ".json");
  EXPECT_FALSE(store.find(other).has_value());
}

TEST_F(Store, GivesAWholeCertificateToReadersAmongWriters) {
  const CertificateStore store(root_);
  Certificate certificate = example();
  store.put(certificate);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Certificate mine = certificate;
      for (int i = 0; i < 25; ++i) {
        mine.events.assign(static_cast<std::size_t>(i * 20 + t), "a line of the one who wrote");
        store.put(mine);
        EXPECT_TRUE(store.find(certificate.key).has_value());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(root_)) ++files;
  EXPECT_EQ(files, 1);
}

TEST_F(Store, LivesWhereTheEnvironmentSays) {
  const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  set("OXYTORCH_CACHE", root_);
  EXPECT_EQ(CertificateStore().folder(), root_);
  ::unsetenv("OXYTORCH_CACHE");
  set("XDG_CACHE_HOME", root_ + "/xdg");
  EXPECT_EQ(CertificateStore().folder(), root_ + "/xdg/oxytorch");
  ::unsetenv("XDG_CACHE_HOME");
  set("HOME", root_ + "/home");
  EXPECT_EQ(CertificateStore().folder(), root_ + "/home/.cache/oxytorch");
}

TEST_F(Store, SaysWhereItCannotWrite) {
  std::ofstream(root_ + "/file") << "x";
  try {
    CertificateStore(root_ + "/file/below").put(example());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Io);
    EXPECT_THAT(error.what(), HasSubstr("file/below"));
  }
  EXPECT_THROW(static_cast<void>(Certificate::load(root_ + "/none.json")), Error);
}

TEST_F(Store, ARunThatGoesOnIsToldWhyNothingWasStored) {
  const Certificate certificate = example();
  EXPECT_EQ(CertificateStore(root_).try_put(certificate), "");
  EXPECT_EQ(CertificateStore(root_).try_forget(certificate.key), "");
  std::ofstream(root_ + "/file") << "x";
  for (const char* below : {"/file", "/file/below"}) {
    const CertificateStore store(root_ + below);
    EXPECT_THAT(store.try_put(certificate), HasSubstr("file"));
    EXPECT_FALSE(store.find(certificate.key).has_value());
    EXPECT_EQ(store.try_forget(certificate.key), "");  // there is none
  }
  std::filesystem::create_directories(root_ + "/" + certificate.key.digest() + ".json/full");
  EXPECT_THAT(CertificateStore(root_).try_put(certificate), HasSubstr(".json"));
  EXPECT_THAT(CertificateStore(root_).try_forget(certificate.key), HasSubstr(".json"));
}

TEST_F(Store, WithoutAnyFolderThereIsNoneAndThatIsSaid) {
  for (const char* name : {"OXYTORCH_CACHE", "XDG_CACHE_HOME", "HOME"}) ::unsetenv(name);
  const CertificateStore store;
  EXPECT_FALSE(store.find(example().key).has_value());
  EXPECT_THAT(store.try_put(example()), HasSubstr("HOME"));
  EXPECT_EQ(store.try_forget(example().key), "");
}

}  // namespace
}  // namespace oxytorch::tune
