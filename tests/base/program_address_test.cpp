// A program that is not position-independent lends its own address to a library's function whose address it takes, as
// Debian's Python does with malloc; that is no other malloc.
#include <gtest/gtest.h>

#include <cstdlib>

#include "oxytorch/host.h"

namespace oxytorch {
namespace {

TEST(ProgramAddressTest, GlibcsMallocIsKnownBehindTheProgramsOwnAddress) {
  void* (*volatile address_of_malloc)(std::size_t) = std::malloc;  // in code, so that the program needs an address
  std::free(address_of_malloc(16));
  auto setting = tune_allocator();
  EXPECT_TRUE(setting.is_applied()) << setting.reason();
  setting.revert();
}

}  // namespace
}  // namespace oxytorch
