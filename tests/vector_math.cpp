// Tests compare torch's own operators to the bit: MKL chooses its kernels before torch's threads race for them.
#include <gtest/gtest.h>

#include "oxytorch/tune/host.h"

namespace {

class VectorMath : public testing::Environment {
  void SetUp() override { oxytorch::resolve_vector_math(); }
};

[[maybe_unused]] const auto* const kVectorMath = testing::AddGlobalTestEnvironment(new VectorMath);

}  // namespace
