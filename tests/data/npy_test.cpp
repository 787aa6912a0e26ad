#include "record_test_files.h"

namespace oxytorch::data {
namespace {

std::string npy(const std::string& dictionary, const std::string& data, int version = 1) {
  auto bytes = std::string("\x93NUMPY", 6) + static_cast<char>(version) + std::string(1, '\0');
  const auto header = dictionary + "\n";
  bytes += version == 1 ? packed(static_cast<std::uint16_t>(header.size()))
                        : packed(static_cast<std::uint32_t>(header.size()));
  return bytes + header + data;
}

std::string npy_header(const std::string& descr, const std::string& shape, const std::string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }";
}

TEST(NpyTest, RowsAreSamples) {
  const TestFolder folder;
  const auto path = folder.write("x.npy", npy(npy_header("<i2", "(2, 3)"), packed_as<std::int16_t>(1, 2, 3, -4, 5, 6)));
  const auto dataset = open(path);
  EXPECT_EQ(dataset->format(), "npy");
  EXPECT_EQ(dataset->size(), 2);
  EXPECT_EQ(dataset->schema(), (Schema{{{"array", Kind::Array, DType::I16, {3}}}}));
  const auto sample = dataset->read(1);
  EXPECT_EQ(sample[0].shape, (std::vector<std::int64_t>{3}));
  EXPECT_EQ(elements_of<std::int16_t>(sample[0]), (std::vector<std::int16_t>{-4, 5, 6}));
  EXPECT_EQ(dataset->place(1), path + ", offset " + std::to_string(std::filesystem::file_size(path) - 6));
  EXPECT_FALSE(dataset->remote());
  expect_error(ErrorCode::OutOfRange, "2 samples", [&] { (void)dataset->read(2); });
  expect_error(ErrorCode::OutOfRange, "2 samples", [&] { (void)dataset->read(-1); });
}

TEST(NpyTest, EveryDTypeAndVersion) {
  const TestFolder folder;
  const std::vector<std::pair<std::string, DType>> dtypes = {
      {"|u1", DType::U8},  {"|i1", DType::I8},  {"|b1", DType::Bool}, {"<u2", DType::U16},
      {"<i2", DType::I16}, {"<u4", DType::U32}, {"<i4", DType::I32},  {"<u8", DType::U64},
      {"<i8", DType::I64}, {"<f2", DType::F16}, {"<f4", DType::F32},  {"<f8", DType::F64}};
  for (const auto& [descr, dtype] : dtypes) {
    for (const int version : {1, 2, 3}) {
      const std::string data(3 * size_of(dtype), '\1');
      const auto dataset = open(folder.write("x.npy", npy(npy_header(descr, "(3,)"), data, version)));
      ASSERT_EQ(dataset->size(), 3) << descr;
      EXPECT_EQ(dataset->schema().fields[0].dtype, dtype);
      EXPECT_EQ(dataset->read(2)[0].data.text(), data.substr(0, size_of(dtype)));
    }
  }
}

TEST(NpyTest, ScalarsAndEmptyArrays) {
  const TestFolder folder;
  const auto scalar = open(folder.write("s.npy", npy(npy_header("<f4", "()"), packed(1.5F))));
  ASSERT_EQ(scalar->size(), 1);
  EXPECT_EQ(elements_of<float>(scalar->read(0)[0]), std::vector<float>{1.5F});
  EXPECT_EQ(open(folder.write("e.npy", npy(npy_header("<f4", "(0, 7)"), "")))->size(), 0);
  const auto hollow = open(folder.write("h.npy", npy(npy_header("<f4", "(4, 0)"), "")));
  ASSERT_EQ(hollow->size(), 4);
  EXPECT_EQ(hollow->read(3)[0].elements(), 0);
}

TEST(NpyTest, HeadersOfOtherWriters) {
  const TestFolder folder;
  const auto header = R"({"shape": (2L,), "descr": "<u2", "fortran_order": True})";
  EXPECT_EQ(open(folder.write("x", npy(header, packed_as<std::uint16_t>(1, 2))))->size(), 2);
}

TEST(NpyTest, AFolderIsOneDataset) {
  const TestFolder folder;
  (void)folder.write("b.npy", npy(npy_header("|u1", "(2,)"), "cd"));
  (void)folder.write("a.npy", npy(npy_header("|u1", "(2,)"), "ab"));
  (void)folder.write("notes.txt", "not an array");
  (void)folder.write("empty.npy", npy(npy_header("|u1", "(0,)"), ""));
  const auto dataset = open(folder.path());
  ASSERT_EQ(dataset->size(), 4);
  std::string all;
  for (int i = 0; i < 4; ++i) all += dataset->read(i)[0].data.text();
  EXPECT_EQ(all, "abcd");
  (void)folder.write("c.npy", npy(npy_header("|i1", "(2,)"), "ef"));
  expect_error(ErrorCode::InvalidArgument, "c.npy and ", [&] { (void)open(folder.path()); });
}

TEST(NpyTest, WhatIsRefused) {
  const TestFolder folder;
  const auto refuse = [&](ErrorCode code, const std::string& part, const std::string& content) {
    const auto path = folder.write("x.npy", content);
    expect_error(code, part, [&] { (void)open(path); });
  };
  refuse(ErrorCode::NotSupported, "big-endian", npy(npy_header(">f4", "(1,)"), "abcd"));
  refuse(ErrorCode::NotSupported, "pickle", npy(npy_header("|O", "(1,)"), "abcd"));
  refuse(ErrorCode::NotSupported, "'<c8'", npy(npy_header("<c8", "(1,)"), "abcdefgh"));
  refuse(ErrorCode::NotSupported, "structured",
         npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", "abcd"));
  refuse(ErrorCode::NotSupported, "Fortran", npy(npy_header("|u1", "(2, 2)", "True"), "abcd"));
  refuse(ErrorCode::NotSupported, "version 4", npy(npy_header("|u1", "(1,)"), "a", 4));
  refuse(ErrorCode::Io, "truncated", npy(npy_header("<f8", "(9223372036854775807, 9223372036854775807)"), ""));
  refuse(ErrorCode::Io, "dimension", npy(npy_header("|u1", "(-1,)"), ""));
  refuse(ErrorCode::Io, "dimension", npy(npy_header("|u1", "(99999999999999999999,)"), ""));
  refuse(ErrorCode::Io, "all of", npy("{'descr': '|u1'}", "a"));
  refuse(ErrorCode::Io, "nothing more", npy(npy_header("|u1", "(1,)") + "x", "a"));
  refuse(ErrorCode::Io, "does not begin", "nonsense");
  refuse(ErrorCode::Io, "does not begin", "");
  refuse(ErrorCode::Io, "truncated", std::string("\x93NUMPY\x02\0\xff\xff\xff\xff{", 13));
}

TEST(NpyTest, DamageIsFound) {
  const TestFolder folder;
  const auto whole = npy(npy_header("<i4", "(3, 2)"), packed(1, 2, 3, 4, 5, 6));
  const auto path = folder.write("x.npy", whole);
  expect_threads_agree(*open(path));
  expect_truncations_safe(path, whole, open);
  expect_mutations_safe(path, whole, open, 4000);
}

}  // namespace
}  // namespace oxytorch::data
