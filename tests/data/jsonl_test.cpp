#include "record_test_files.h"

namespace oxytorch::data {
namespace {

TEST(JsonlTest, FieldsByTheirValues) {
  const TestFolder folder;
  const auto path = folder.write(
      "x.jsonl",
      R"({"text": "na\u00efve", "n": 1, "score": 1, "ok": true, "ids": [1, 2], "box": [1, 2.5], "meta": {"a": [1, null]}})"
      "\n"
      R"({"ok": false, "text": "", "n": -9223372036854775808, "score": 0.5, "ids": [], "box": [], "meta": "s", "later": 1})"
      "\n");
  const auto dataset = open(path);
  EXPECT_EQ(dataset->format(), "jsonl");
  ASSERT_EQ(dataset->size(), 2);
  const auto& schema = dataset->schema();
  const auto field = [&](const std::string& name) {
    return schema.fields[static_cast<std::size_t>(schema.find(name))];
  };
  EXPECT_EQ(schema.fields.size(), 8U);
  EXPECT_EQ(field("text"), (Field{"text", Kind::Text, DType::U8, {}}));
  EXPECT_EQ(field("n"), (Field{"n", Kind::Array, DType::I64, {}}));
  EXPECT_EQ(field("score"), (Field{"score", Kind::Array, DType::F64, {}}));
  EXPECT_EQ(field("ok"), (Field{"ok", Kind::Array, DType::Bool, {}}));
  EXPECT_EQ(field("ids"), (Field{"ids", Kind::Array, DType::I64, {-1}}));
  EXPECT_EQ(field("box"), (Field{"box", Kind::Array, DType::F64, {-1}}));
  EXPECT_EQ(field("meta"), (Field{"meta", Kind::Text, DType::U8, {}}));
  EXPECT_EQ(field("later"), (Field{"later", Kind::Text, DType::U8, {}}));
  const auto first = dataset->read(0), second = dataset->read(1);
  const auto value = [&](const Sample& sample, const std::string& name) {
    return sample[static_cast<std::size_t>(schema.find(name))];
  };
  EXPECT_EQ(value(first, "text").data.text(), "na\xc3\xafve");
  EXPECT_EQ(elements_of<double>(value(first, "score")), std::vector<double>{1});
  EXPECT_EQ(elements_of<std::int64_t>(value(first, "ids")), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(elements_of<double>(value(first, "box")), (std::vector<double>{1, 2.5}));
  EXPECT_EQ(value(first, "meta").data.text(), R"({"a":[1,null]})");
  EXPECT_EQ(value(first, "later").data.text(), "");
  EXPECT_EQ(elements_of<std::int64_t>(value(second, "n")), std::vector<std::int64_t>{INT64_MIN});
  EXPECT_EQ(elements_of<std::uint8_t>(value(second, "ok")), std::vector<std::uint8_t>{0});
  EXPECT_EQ(value(second, "ids").shape, (std::vector<std::int64_t>{0}));
  EXPECT_EQ(value(second, "meta").data.text(), R"("s")");
  EXPECT_EQ(value(second, "later").data.text(), "1");
  expect_threads_agree(*dataset);
}

TEST(JsonlTest, BlankLinesAndLineNumbers) {
  const TestFolder folder;
  const auto path = folder.write("x.jsonl", "\xEF\xBB\xBF\n \t\r\n{\"a\": 1}\r\n\n\n{\"a\": 2}\n{\"a\": 3}");
  const auto dataset = open(path);
  ASSERT_EQ(dataset->size(), 3);
  EXPECT_EQ(elements_of<std::int64_t>(dataset->read(2)[0]), std::vector<std::int64_t>{3});
  EXPECT_EQ(dataset->place(0), path + ", line 3");
  EXPECT_EQ(dataset->place(1), path + ", line 6");
  EXPECT_EQ(dataset->place(2), path + ", line 7");
}

TEST(JsonlTest, EmptyFiles) {
  const TestFolder folder;
  EXPECT_EQ(open(folder.write("x.jsonl", ""))->size(), 0);
  EXPECT_EQ(open(folder.write("x.jsonl", "\n \n"))->size(), 0);
  expect_error(ErrorCode::OutOfRange, "0 samples", [&] { (void)open(folder.path("x.jsonl"))->read(0); });
}

TEST(JsonlTest, LinesAcrossChunks) {
  const TestFolder folder;
  std::string content;
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < 9; ++i) {
    texts.emplace_back((std::size_t{1} << 20) * i / 3 + i, static_cast<char>('a' + i));
    content += R"({"text": ")" + texts.back() + "\"}\n" + std::string(i * 300000 % 7, ' ');
  }
  const auto dataset = open(folder.write("x.ndjson", content));
  ASSERT_EQ(dataset->size(), 9);
  for (std::size_t i = 0; i < 9; ++i) {
    ASSERT_TRUE(dataset->read(static_cast<std::int64_t>(i))[0].data.text() == texts[i]) << i;
  }
}

TEST(JsonlTest, FoundByContentAndInFolders) {
  const TestFolder folder;
  EXPECT_EQ(open(folder.write("x.txt", "\n {\"a\": 1}\n{\"a\": 2}"))->size(), 2);
  (void)folder.write("set/b.jsonl", "{\"a\": 3}\n");
  (void)folder.write("set/a.jsonl", "{\"a\": 1}\n{\"a\": 2}\n");
  const auto dataset = open(folder.path("set"));
  ASSERT_EQ(dataset->size(), 3);
  EXPECT_EQ(elements_of<std::int64_t>(dataset->read(2)[0]), std::vector<std::int64_t>{3});
  EXPECT_EQ(dataset->place(2), folder.path("set/b.jsonl, line 1"));
  const auto pretty = folder.write("pretty.json", "{\n  \"a\": 1\n}\n");
  expect_error(ErrorCode::InvalidArgument, "is no dataset", [&] { (void)open(pretty); });
}

TEST(JsonlTest, StringsThatMayBeMissing) {
  const TestFolder folder;
  const auto dataset = open(folder.write("x.jsonl", "{\"a\": null}\n{\"a\": \"x\"}\n{}\n"));
  EXPECT_EQ(dataset->read(0)[0].data.text(), "");
  EXPECT_EQ(dataset->read(1)[0].data.text(), "x");
  EXPECT_EQ(dataset->read(2)[0].data.text(), "");
}

TEST(JsonlTest, LinesThatDoNotFitTheFirst) {
  const TestFolder folder;
  std::string content;
  for (int i = 0; i < 100; ++i)
    content += R"({"n": 1, "x": 0.5, "t": "s", "b": true, "v": [1], "j": {}})"
               "\n";
  const auto refuse = [&](const std::string& part, const std::string& line) {
    const auto dataset = open(folder.write("x.jsonl", content + line + "\n"));
    ASSERT_EQ(dataset->size(), 101);
    expect_error(ErrorCode::Io, "x.jsonl, line 101", [&] { (void)dataset->read(100); });
    expect_error(ErrorCode::Io, part, [&] { (void)dataset->read(100); });
  };
  refuse("'n' is a number (1.5), and an integer in the first lines",
         R"({"n": 1.5, "x": 0.5, "t": "s", "b": true, "v": [1], "j": {}})");
  refuse("'n' is another value (18446744073709551615)",
         R"({"n": 18446744073709551615, "x": 0.5, "t": "s", "b": true, "v": [1], "j": {}})");
  refuse("'t' is another value (null), and a string", R"({"n": 1, "x": 1, "t": null, "b": true, "v": [1], "j": {}})");
  refuse("'b' is an integer", R"({"n": 1, "x": 1, "t": "", "b": 1, "v": [1], "j": {}})");
  refuse("'v' is an array of numbers", R"({"n": 1, "x": 1, "t": "", "b": true, "v": [0.5], "j": {}})");
  refuse("the key 'j' is missing", R"({"n": 1, "x": 1, "t": "", "b": true, "v": []})");
  refuse("is no JSON object", R"({"n": 1, "x": })");
  refuse("is no JSON object", R"([1, 2])");
  refuse("is no JSON object", "{\"t\": \"\xff\"}");
  refuse("is no JSON object", std::string(3000, '['));
  const auto other =
      open(folder.write("x.jsonl", content + R"({"j": 1, "v": [], "b": false, "t": "", "x": 2, "n": 7, "new": 1})"));
  EXPECT_EQ(elements_of<std::int64_t>(other->read(100)[0]), std::vector<std::int64_t>{7});
  expect_error(ErrorCode::Io, "x.jsonl, line 2", [&] { (void)open(folder.write("x.jsonl", "{}\nnonsense\n")); });
}

TEST(JsonlTest, DamageIsFound) {
  const TestFolder folder;
  const std::string whole =
      "{\"t\": \"text\", \"n\": [1, 2.5]}\n\n{\"t\": \"\\u00e4\", \"n\": []}\n{\"t\": \"\", \"n\": [3]}\n";
  const auto path = folder.write("x.jsonl", whole);
  expect_mutations_safe(path, whole, open, 4000);
  expect_truncations_safe(path, "{\"t\": \"text\", \"n\": [1, 2.5]}\n{\"t\": \"\\u00e4\", \"n\": [0.5]}", open);
}

}  // namespace
}  // namespace oxytorch::data
