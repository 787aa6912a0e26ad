#include "oxytorch/monitor/report.h"
#include "oxytorch/monitor/training_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "monitor/format.h"
#include "monitor/render.h"
#include "oxytorch/error.h"

namespace oxytorch::monitor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Report sample() {
  Report report("Sample");
  report.subtitle("A subtitle").metadata("machine", "2 cores").heading("Figures").paragraph("Some words.");
  report.preformatted("make demo\n  --fast");
  report.add(Table{
      "Times", {{"name"}, {"time", Align::Right, "ms"}}, {{"plain", Cell(12.345)}, {"ours", Cell(1.5)}}, {"A note."}});
  report.add(LineChart{
      "Loss", "step", "loss", {{"a", {1, 2, 3}, {3, 2, 1}, {2, 1, 0.5}, {4, 3, 2}, false}}, false, true, false, {}});
  report.add(BarChart{"Speed",
                      "times the plain loop",
                      "x",
                      {{"ours", 2.5, 2.25, 2.75, "CNN"}, {"plain", 1.0, {}, {}, "CNN"}},
                      1.0,
                      "plain",
                      {}});
  return report;
}

TEST(Report, JsonHoldsEverything) {
  const Json json = Json::parse(sample().to_json());
  EXPECT_EQ(json["schema"], "oxytorch-report/1");
  EXPECT_EQ(json["title"], "Sample");
  EXPECT_EQ(json["metadata"][0]["value"], "2 cores");
  ASSERT_EQ(json["blocks"].size(), 6u);
  EXPECT_EQ(json["blocks"][3]["rows"][0][1]["value"], 12.345);
  EXPECT_EQ(json["blocks"][3]["columns"][1]["unit"], "ms");
  EXPECT_EQ(json["blocks"][4]["series"][0]["y"], Json({3, 2, 1}));
  EXPECT_EQ(json["blocks"][4]["series"][0]["low"][2], 0.5);
  EXPECT_EQ(json["blocks"][5]["bars"][0]["high"], 2.75);
  EXPECT_EQ(json["blocks"][5]["reference"], 1.0);
}

TEST(Report, TextAlignsTablesAndStaysAsciiWhenAsked) {
  const std::string text = sample().to_text(TextStyle::Ascii);
  EXPECT_THAT(text, HasSubstr("name   time (ms)\n----------------\nplain      12.35\nours         1.5\n"));
  EXPECT_THAT(text, HasSubstr("make demo\n  --fast\n"));
  EXPECT_THAT(text, HasSubstr("[2.25, 2.75]"));
  for (char c : text) ASSERT_LT(static_cast<unsigned char>(c), 128);
  EXPECT_THAT(sample().to_text(TextStyle::Unicode), HasSubstr("\u2588"));
  EXPECT_THROW(static_cast<void>(sample().to_text(TextStyle::Ascii, 10)), Error);
}

TEST(Report, HostileTextIsData) {
  const std::string hostile = "</title><script>alert('x')</script>&\"\x1b[31m\xff\xc0\xaf\x00z";
  Report report(hostile);
  report.subtitle(hostile).metadata(hostile, hostile).heading(hostile).paragraph(hostile).preformatted(hostile);
  report.add(Table{hostile, {{hostile, Align::Left, hostile}}, {{Cell(hostile)}}, {hostile}});
  report.add(LineChart{hostile,
                       hostile,
                       hostile,
                       {{hostile, {1, 2}, {1, 2}, {}, {}, false}, {hostile, {1}, {1}, {}, {}, true}},
                       false,
                       false,
                       false,
                       {hostile}});
  report.add(BarChart{hostile, hostile, hostile, {{hostile, 1, 0.5, 2.0, hostile}}, 1.0, hostile, {hostile}});
  const std::string html = report.to_html();
  EXPECT_THAT(html, Not(HasSubstr("<script")));
  EXPECT_THAT(html, Not(HasSubstr("alert('")));
  EXPECT_THAT(html, Not(HasSubstr("\x1b")));
  EXPECT_THAT(html, Not(HasSubstr("\xff")));
  EXPECT_THAT(report.to_text(TextStyle::Ascii), Not(HasSubstr("\x1b")));
  EXPECT_TRUE(Json::accept(report.to_json()));
}

TEST(Report, NothingInTheHtmlPointsOutside) {
  std::string html = sample().to_html();
  const std::string name_space = "xmlns=\"http://www.w3.org/2000/svg\"";  // an identifier, never fetched
  for (std::size_t at; (at = html.find(name_space)) != std::string::npos;) html.erase(at, name_space.size());
  for (const char* outward :
       {"http:", "https:", "//", "src=", "href=", "url(", "@import", "<link", "<script", "<iframe"}) {
    EXPECT_THAT(html, Not(HasSubstr(outward)));
  }
  EXPECT_THAT(html, HasSubstr("prefers-color-scheme:dark"));
}

TEST(Report, NonFiniteAndEmptyDataAreDrawnAsGapsOrSaid) {
  Report report("Empty");
  report.add(LineChart{"none", "", "", {}, false, false, false, {}});
  report.add(LineChart{"all nan", "", "", {{"a", {1, 2}, {kNan, HUGE_VAL}, {}, {}, false}}, false, false, false, {}});
  report.add(LineChart{"log of zero", "", "", {{"a", {1, 2}, {0, -1}, {}, {}, false}}, false, true, false, {}});
  report.add(LineChart{
      "gaps", "", "", {{"a", {1, 2, 3, 4, 5}, {1, kNan, 3, 4, HUGE_VAL}, {}, {}, false}}, false, false, false, {}});
  report.add(LineChart{"flat", "", "", {{"a", {1, 2}, {5, 5}, {}, {}, false}}, false, false, false, {}});
  report.add(LineChart{"point", "", "", {{"a", {1}, {0}, {}, {}, false}}, true, false, false, {}});
  report.add(BarChart{"no bars", "", "", {}, {}, "", {}});
  report.add(BarChart{"nan bar", "", "", {{"a", kNan, {}, {}, ""}, {"b", -2, kNan, kNan, ""}}, {}, "", {}});
  report.add(Table{"", {{"only"}}, {}, {}});
  const std::string html = report.to_html();
  EXPECT_THAT(html, HasSubstr("nothing to draw"));
  for (const char* broken : {"=\"nan", "=\"inf", "=\"-nan", "Lnan", "Mnan", " nan", "-nan", " inf"}) {
    // "nan bar" and "all nan" are titles of ours.
    std::string drawn = html;
    for (const char* title : {"all nan", "nan bar"}) {
      for (std::size_t at; (at = drawn.find(title)) != std::string::npos;) drawn.erase(at, std::string(title).size());
    }
    EXPECT_THAT(drawn, Not(HasSubstr(broken)));
  }
  EXPECT_THAT(report.to_text(TextStyle::Ascii), HasSubstr("(no finite points)"));
  EXPECT_EQ(Json::parse(report.to_json())["blocks"][1]["series"][0]["y"], Json({"NaN", "Infinity"}));
}

TEST(Report, PartsThatDoNotFitAreRefused) {
  Report report;
  EXPECT_THROW(report.add(Table{"t", {{"a"}, {"b"}}, {{"1"}}, {}}), Error);
  EXPECT_THROW(report.add(Table{"t", {}, {}, {}}), Error);
  EXPECT_THROW(report.add(LineChart{"c", "", "", {{"s", {1, 2}, {1}, {}, {}, false}}, false, false, false, {}}), Error);
  EXPECT_THROW(report.add(LineChart{"c", "", "", {{"s", {1}, {1}, {1}, {}, false}}, false, false, false, {}}), Error);
  EXPECT_THROW(report.add(BarChart{"b", "", "", {{"x", 1, 0.5, {}, ""}}, {}, "", {}}), Error);
  EXPECT_THROW(report.heading("h", 1), Error);
  EXPECT_TRUE(report.blocks().empty());
}

TEST(Report, OfATraining) {
  const std::vector<SettingLine> settings{{"precision", "on", "1.49x", "products are rounded", 1.494},
                                          {"threads", "off", "<keep>"}};
  const auto report =
      training_report("advanced", settings, {{{"forward", 0.002}, {"step", 0.005}}, {{"steps", 40}}, "all is well"});
  const auto& blocks = report.blocks();
  ASSERT_EQ(blocks.size(), 4U);
  EXPECT_EQ(std::get<Paragraph>(blocks[0]).text, "all is well");
  const auto& rows = std::get<Table>(blocks[1]).rows;
  EXPECT_TRUE(rows[0][0].strong && !rows[1][0].strong);
  EXPECT_EQ(rows[0][2].value, 1.494);
  EXPECT_EQ(rows[0][2].text, "1.49x");
  EXPECT_FALSE(rows[1][2].value);
  const auto& chart = std::get<BarChart>(blocks[2]);
  EXPECT_EQ(chart.unit, "ms");
  EXPECT_DOUBLE_EQ(chart.bars[1].value, 5);
  EXPECT_EQ(std::get<Table>(blocks[3]).rows[0][1].value, 40);
  EXPECT_THAT(report.to_html(), testing::HasSubstr("&lt;keep&gt;"));
  EXPECT_EQ(training_report("basic", settings, {}).blocks().size(), 1U);
}

TEST(Report, AppendsAnotherUnderItsTitle) {
  Report whole("Whole");
  whole.append(sample());
  ASSERT_EQ(whole.blocks().size(), 8u);
  EXPECT_EQ(std::get<Heading>(whole.blocks()[0]).text, "Sample");
  EXPECT_EQ(std::get<Heading>(whole.blocks()[2]).level, 3);
}

TEST(Report, ThinsLongSeriesButKeepsTheirExtremes) {
  LineChart chart;
  Series series;
  for (int i = 0; i < 100'000; ++i) {
    series.x.push_back(i);
    series.y.push_back(i == 54'321 ? 1000 : std::sin(i * 1e-3));
  }
  chart.series.push_back(series);
  const std::string svg = render_svg(chart);
  EXPECT_LT(svg.size(), 100'000u);
  // The spike is the top of the axis: its point has the smallest y of the drawing.
  double least = 1e9;
  const std::size_t begin = svg.find("class=\"curve");
  std::istringstream path(svg.substr(svg.find(" d=\"M", begin) + 5));
  for (std::string pair; std::getline(path, pair, 'L') && pair.find('<') == std::string::npos;) {
    least = std::min(least, std::stod(pair.substr(pair.find(' ') + 1)));
  }
  EXPECT_LT(least, 25);
}

TEST(Report, FilesAreReplacedWholeAndErrorsNameThePath) {
  const auto folder = std::filesystem::temp_directory_path() / ("oxytorch_report_test." + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const std::string path = (folder / "report.html").string();
  std::ofstream(path) << "old";
  sample().write_html(path);
  std::ifstream file(path);
  std::stringstream content;
  content << file.rdbuf();
  EXPECT_EQ(content.str(), sample().to_html());
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0444, 0444u);
  sample().write_json((folder / "report.json").string());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 2);  // no temporary file is left
  const std::string missing = (folder / "missing" / "report.html").string();
  try {
    sample().write_html(missing);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::NotFound);
    EXPECT_THAT(error.what(), HasSubstr(missing));
  }
  try {
    sample().write_html(folder.string());  // a folder stands in the way
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(folder.string()));
  }
  std::filesystem::remove_all(folder);
}

TEST(Format, NumbersReadWell) {
  EXPECT_EQ(format_number(0), "0");
  EXPECT_EQ(format_number(12.3456), "12.35");
  EXPECT_EQ(format_number(0.00123456), "0.001235");
  EXPECT_EQ(format_number(100), "100");
  EXPECT_EQ(format_number(123456.7), "123,457");
  EXPECT_EQ(format_number(1234.56), "1235");
  EXPECT_EQ(format_number(2e12), "2e+12");
  EXPECT_EQ(format_fixed(2.2, decimals_for(57.6, 3)), "2.2");
  EXPECT_EQ(format_number(-1.5e-9), "-1.5e-09");
  EXPECT_EQ(format_number(kNan), "NaN");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_count(-999), "-999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_seconds(0.0123), "12.3 ms");
}

TEST(Format, TicksAreRoundAndInside) {
  EXPECT_THAT(linear_ticks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(log_ticks(1, 1e5, 5), ElementsAre(1, 10, 100, 1000, 1e4, 1e5));
  for (double low : {-3.7, 0.0, 1e-9, 123.0}) {
    for (double span : {1e-12, 1e-3, 7.0, 1e9}) {
      const std::vector<double> ticks = linear_ticks(low, low + span, 6);
      ASSERT_LE(ticks.size(), 13u);
      for (double tick : ticks) ASSERT_TRUE(tick >= low - span * 1e-6 && tick <= low + span * (1 + 1e-6));
    }
  }
  EXPECT_EQ(tick_text(0.5, 0.25), "0.5");
  EXPECT_EQ(tick_text(2000, 500), "2,000");
}

}  // namespace
}  // namespace oxytorch::monitor
