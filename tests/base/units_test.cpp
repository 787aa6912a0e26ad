#include "oxytorch/units.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "oxytorch/error.h"
#include "oxytorch/random.h"

namespace oxytorch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string refusal(std::string_view text) {
  try {
    return "accepted: " + Size::parse(text).to_string();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    return error.what();
  }
}

TEST(SizeParse, BytesInEveryForm) {
  const struct {
    const char* text;
    std::uint64_t bytes;
  } cases[] = {{"0", 0},
               {"4096", 4096},
               {"1B", 1},
               {"10GB", 10'000'000'000},
               {"1.5GiB", 1'610'612'736},
               {"512 MiB", 536'870'912},
               {" 2 kb ", 2000},
               {"2KIB", 2048},
               {"0.1KB", 100},
               {".5KiB", 512},
               {"3.KB", 3000},
               {"1.1GiB", 1'181'116'006},
               {"4096.0", 4096},
               {"1TB", 1'000'000'000'000},
               {"1TiB", 1'099'511'627'776},
               {"1PB", 1'000'000'000'000'000},
               {"15EiB", 15ull << 60},
               {"18446744073709551615", UINT64_MAX},
               {"18.446744073709551615EB", UINT64_MAX},
               {"00012", 12},
               {"0.00000000000000000000000000000001EiB", 0}};
  for (const auto& [text, bytes] : cases) EXPECT_EQ(Size::parse(text), Size::bytes(bytes)) << text;
}

TEST(SizeParse, SharesAndAuto) {
  EXPECT_EQ(Size::parse("90%"), Size::percent(90));
  EXPECT_EQ(Size::parse(" 12.5 % "), Size::percent(12.5));
  EXPECT_EQ(Size::parse("100%"), Size::percent(100));
  EXPECT_EQ(Size::parse("0%"), Size::percent(0));
  EXPECT_EQ(Size::parse("auto"), Size::automatic());
  EXPECT_EQ(Size::parse("Auto"), Size());
  EXPECT_TRUE(Size::parse("AUTO").is_auto());
}

TEST(SizeParse, RefusalsSayWhatIsWrong) {
  EXPECT_THAT(refusal(""), HasSubstr("empty"));
  EXPECT_THAT(refusal("   "), HasSubstr("empty"));
  EXPECT_THAT(refusal("-1"), AllOf(HasSubstr("'-1'"), HasSubstr("negative"), HasSubstr("1.5GiB")));
  EXPECT_THAT(refusal("-5%"), HasSubstr("negative"));
  EXPECT_THAT(refusal("101%"), HasSubstr("over 100%"));
  EXPECT_THAT(refusal("1e999%"), HasSubstr("unknown unit"));
  EXPECT_THAT(refusal("10 GX"), AllOf(HasSubstr("unknown unit 'GX'"), HasSubstr("'10 GX'")));
  EXPECT_THAT(refusal("2G"), AllOf(HasSubstr("'GB'"), HasSubstr("'GiB'")));
  EXPECT_THAT(refusal("1.5"), HasSubstr("fraction of a byte"));
  EXPECT_THAT(refusal("0.5B"), HasSubstr("fraction of a byte"));
  EXPECT_THAT(refusal("18446744073709551616"), HasSubstr("over the largest"));
  EXPECT_THAT(refusal("16EiB"), HasSubstr("over the largest"));
  EXPECT_THAT(refusal("99999999999999999999999999999999999999999999999999GB"), HasSubstr("over the largest"));
  EXPECT_THAT(refusal("GB"), HasSubstr("does not start with a number"));
  EXPECT_THAT(refusal("."), HasSubstr("does not start with a number"));
  EXPECT_THAT(refusal("1.2.3MB"), HasSubstr("does not start with a number"));
  EXPECT_THAT(refusal("+1"), HasSubstr("does not start with a number"));
  EXPECT_THAT(refusal("nan"), HasSubstr("does not start with a number"));
  EXPECT_THAT(refusal("1,000"), HasSubstr("unknown unit"));
}

TEST(SizePercent, RefusesOutside) {
  for (const double value : {-0.1, 100.1, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(Size::percent(value), Error) << value;
  }
}

TEST(SizeResolve, BytesSharesAndAuto) {
  EXPECT_EQ(Size::bytes(10).resolve(4), 10u);
  EXPECT_EQ(Size::percent(90).resolve(1000), 900u);
  EXPECT_EQ(Size::percent(33.3).resolve(10), 3u);
  EXPECT_EQ(Size::percent(100).resolve(UINT64_MAX), UINT64_MAX);
  EXPECT_EQ(Size::percent(0).resolve(UINT64_MAX), 0u);
  EXPECT_EQ(Size::percent(50).resolve(UINT64_MAX), UINT64_MAX / 2);
  EXPECT_EQ(Size().resolve(64), 64u);
  EXPECT_EQ(Size().resolve(64, 8), 8u);
  EXPECT_EQ(Size::percent(50).resolve(64, 8), 32u);
}

TEST(SizePrint, ShortestExactText) {
  EXPECT_EQ(Size::bytes(0).to_string(), "0");
  EXPECT_EQ(Size::bytes(999).to_string(), "999");
  EXPECT_EQ(Size::bytes(10'000'000'000).to_string(), "10GB");
  EXPECT_EQ(Size::bytes(1'610'612'736).to_string(), "1.5GiB");
  EXPECT_EQ(Size::bytes(1ull << 40).to_string(), "1TiB");
  EXPECT_EQ(Size::bytes(1'181'116'006).to_string(), "1181116006");
  EXPECT_EQ(Size::percent(12.5).to_string(), "12.5%");
  EXPECT_EQ(Size::percent(-0.0).to_string(), "0%");
  EXPECT_EQ(Size().to_string(), "auto");
}

TEST(SizePrint, ParsesBackToTheSame) {
  PhiloxStream random(1);
  constexpr std::uint64_t kScales[] = {1, 1000, 1024, 1'000'000, 1 << 20, 1'000'000'000, 1 << 30, 1'000'000'000'000};
  for (int i = 0; i < 20'000; ++i) {
    std::uint64_t count = random.next64() >> random.below(64);
    if (i % 2 == 0) count = random.below(5000) * kScales[random.below(8)];
    const Size size = Size::bytes(count);
    ASSERT_EQ(Size::parse(size.to_string()), size) << count << " as " << size.to_string();
    const Size share = Size::percent(100 * random.uniform_double() * std::pow(10.0, -double(random.below(300))));
    ASSERT_EQ(Size::parse(share.to_string()), share) << share.to_string();
  }
}

TEST(SizeParse, AnyBytesGiveASizeOrAnError) {
  const std::string seeds[] = {"10GB", "1.5GiB", "512 MiB", "90%", "auto", "18446744073709551615", "0.001 EiB"};
  constexpr char kAlphabet[] = "0123456789.%kKmMgGtTpPeEiIbB -+auto\t\n,_xn";
  PhiloxStream random(2);
  int accepted = 0;
  for (int i = 0; i < 50'000; ++i) {
    std::string text = i % 2 == 0 ? seeds[random.below(7)] : std::string();
    for (std::uint64_t edits = random.below(i % 2 == 0 ? 4 : 40); edits > 0; --edits) {
      const char c = i % 3 == 0 ? static_cast<char>(random.below(256)) : kAlphabet[random.below(sizeof kAlphabet - 1)];
      const std::size_t place = random.below(text.size() + 1);
      if (random.below(3) == 0 && place < text.size()) {
        text.erase(place, 1);
      } else {
        text.insert(place, 1, c);
      }
    }
    try {
      const Size size = Size::parse(text);
      ++accepted;
      ASSERT_EQ(Size::parse(size.to_string()), size) << text;
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::InvalidArgument);
      for (const char* c = error.what(); *c != 0; ++c) ASSERT_TRUE(*c >= 0x20 && *c < 0x7F) << error.what();
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_LT(accepted, 45'000);
}

TEST(FormatSize, ThreeDigitsAndAUnit) {
  EXPECT_EQ(format_size(0), "0 B");
  EXPECT_EQ(format_size(1023), "1023 B");
  EXPECT_EQ(format_size(1024), "1.00 KiB");
  EXPECT_EQ(format_size(1536ull << 20), "1.50 GiB");
  EXPECT_EQ(format_size(123ull << 20), "123 MiB");
  EXPECT_EQ(format_size((1ull << 20) - 1), "1.00 MiB");
  EXPECT_EQ(format_size(UINT64_MAX), "16.0 EiB");
}

TEST(FormatDuration, ReadsWellAtEveryScale) {
  EXPECT_EQ(format_duration(0), "0 s");
  EXPECT_EQ(format_duration(3.42e-6), "3.42 us");
  EXPECT_EQ(format_duration(5e-9), "5.00 ns");
  EXPECT_EQ(format_duration(0.012), "12.0 ms");
  EXPECT_EQ(format_duration(0.9996), "1.00 s");
  EXPECT_EQ(format_duration(1.5), "1.50 s");
  EXPECT_EQ(format_duration(59.99), "1 min 00 s");
  EXPECT_EQ(format_duration(125), "2 min 05 s");
  EXPECT_EQ(format_duration(3 * 3600 + 7 * 60), "3 h 07 min");
  EXPECT_EQ(format_duration(86400 * 2 + 3600 * 4), "2 d 04 h");
  EXPECT_EQ(format_duration(-1.5), "-1.50 s");
  EXPECT_EQ(format_duration(std::nan("")), "unknown");
  EXPECT_EQ(format_duration(INFINITY), "forever");
  EXPECT_EQ(format_duration(1e300).back(), 'd');
}

TEST(ParseRate, BitsAndBytes) {
  const struct {
    const char* text;
    double bytes_per_s;
  } cases[] = {{"400Gb/s", 5e10},
               {"50GB/s", 5e10},
               {" 50 GB/s ", 5e10},
               {"25GiB/s", 25 * 0x1p30},
               {"100Gbps", 1.25e10},
               {"1.5 TB/s", 1.5e12},
               {"8b/s", 1},
               {"5e9", 5e9},
               {"0", 0},
               {"10gB/s", 1e10},
               {"3Mbit/s", 375e3}};
  for (const auto& one : cases) EXPECT_DOUBLE_EQ(parse_rate(one.text), one.bytes_per_s) << one.text;
  for (const char* text : {"", "fast", "-1GB/s", "400GB", "400G", "nan", "inf", "1e400", "1e308PB/s", "1 XB/s", "GB/s",
                           "1GGB/s", "1iB/s", "4\xff"}) {
    EXPECT_THROW(parse_rate(text), Error) << text;
  }
  EXPECT_EQ(format_rate(5e10), "50 GB/s");
  EXPECT_EQ(format_rate(0), "0 B/s");
  EXPECT_EQ(format_rate(3.35e12), "3.35 TB/s");
  EXPECT_EQ(format_rate(999.9e6), "1 GB/s");
}

TEST(ParseDuration, EveryUnit) {
  const struct {
    const char* text;
    double seconds;
  } cases[] = {{"1.5us", 1.5e-6}, {"300 ns", 3e-7}, {"2ms", 2e-3},  {"0.5s", 0.5},
               {"2min", 120},     {"3 h", 10800},   {"5e-6", 5e-6}, {"0", 0}};
  for (const auto& one : cases) EXPECT_DOUBLE_EQ(parse_duration(one.text), one.seconds) << one.text;
  for (const char* text : {"", "soon", "-1s", "1 parsec", "nan", "1e400", "5 m"}) {
    EXPECT_THROW(parse_duration(text), Error) << text;
  }
}

}  // namespace
}  // namespace oxytorch
