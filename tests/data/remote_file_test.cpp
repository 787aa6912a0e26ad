// What a server answers is in test_remote.py, which has one.
#include "data/remote_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "oxytorch/data/dataset.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

TEST(RemoteFile, IsToldByItsScheme) {
  for (const char* url : {"http://a/b", "https://a/b", "s3://bucket/key"}) EXPECT_TRUE(is_remote(url)) << url;
  for (const char* path : {"/a/b", "a", "file:///a", "s3", "httpd/logs"}) EXPECT_FALSE(is_remote(path)) << path;
}

TEST(RemoteFile, NamesWhatAnS3LocationLacks) {
  try {
    static_cast<void>(open("s3:///key"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("names no bucket"));
  }
}

TEST(RemoteFile, TellsThatNobodyAnswers) {
  try {
    static_cast<void>(open("http://127.0.0.1:1/x.npy"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Io);
    EXPECT_THAT(error.what(), testing::HasSubstr("after 6 tries"));
  }
}

}  // namespace
}  // namespace oxytorch::data
