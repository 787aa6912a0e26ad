#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "oxytorch/error.h"
#include "oxytorch/ops.h"

namespace oxytorch {
namespace {

using at::Tensor;

// Some tokens as a batch of one.
Tensor as_sample(const Tensor& packed, std::int64_t begin, std::int64_t end) {
  return packed.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
}

struct Documents {
  explicit Documents(at::ScalarType type) {
    torch::manual_seed(0);
    const auto make = [&](std::int64_t heads) {
      return torch::randn({offsets.back(), heads, 24}).to(type).detach().requires_grad_();
    };
    query = make(4);
    key = make(2);
    value = make(2);
  }
  [[nodiscard]] Tensor packed(const ops::PackedAttentionOptions& options = {}) const {
    return ops::packed_attention(query, key, value, torch::tensor(offsets), options);
  }
  [[nodiscard]] Tensor one_by_one(const ops::AttentionOptions& options) const {
    std::vector<Tensor> parts;
    for (std::size_t i = 1; i < offsets.size(); ++i) {
      const auto cut = [&](const Tensor& t) { return as_sample(t, offsets[i - 1], offsets[i]); };
      parts.push_back(ops::attention(cut(query), cut(key), cut(value), options)[0].transpose(0, 1));
    }
    return at::cat(parts);
  }
  [[nodiscard]] std::vector<Tensor> grads(const Tensor& output) const {
    return torch::autograd::grad({output.square().sum()}, {query, key, value});
  }

  std::vector<std::int64_t> offsets{0, 70, 70, 71, 200};
  Tensor query, key, value;
};

TEST(PackedAttentionTest, HasTheBitsOfEachDocument) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const Documents in(type);
    const Tensor packed = in.packed({.causal = true, .soft_cap = 4});
    const Tensor apart = in.one_by_one({.causal = true, .soft_cap = 4});
    EXPECT_TRUE(at::equal(packed, apart)) << type;
    const auto of_packed = in.grads(packed), of_apart = in.grads(apart);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(of_packed[i], of_apart[i])) << type << i;
  }
}

TEST(PackedAttentionTest, TakesOtherKeysThanQueries) {
  const Documents in(at::kFloat);
  const Tensor keys = torch::tensor(std::vector<std::int64_t>{0, 0, 100, 130, 200}).to(at::kInt);
  const Tensor output = in.packed({.key_offsets = keys, .window_before = 5, .window_after = 9});
  EXPECT_EQ(output.slice(0, 0, 70).count_nonzero().item<std::int64_t>(), 0);
  const Tensor last = ops::attention(as_sample(in.query, 71, 200), as_sample(in.key, 130, 200),
                                     as_sample(in.value, 130, 200), {.window_before = 5, .window_after = 9});
  EXPECT_TRUE(at::equal(as_sample(output, 71, 200), last));
}

TEST(PackedAttentionTest, DropsWeightsByTorchsSeed) {
  const Documents in(at::kFloat);
  const auto drop = [&] {
    torch::manual_seed(5);
    return in.packed({.dropout = 0.5});
  };
  EXPECT_TRUE(at::equal(drop(), drop()));
  EXPECT_FALSE(at::allclose(drop(), in.packed(), 1e-2, 1e-2));
}

TEST(PackedAttentionTest, RefusesInWords) {
  const Documents in(at::kFloat);
  const auto message = [&](const Tensor& offsets) -> std::string {
    try {
      static_cast<void>(ops::packed_attention(in.query, in.key, in.value, offsets));
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  const auto offsets = [](std::vector<std::int64_t> values) { return torch::tensor(values); };
  EXPECT_THAT(message(offsets({0, 100})), testing::HasSubstr("query_offsets end with 100 for 200 tokens"));
  EXPECT_THAT(message(offsets({0, 100, 90, 200})), testing::HasSubstr("fall from 100 to 90 at entry 2"));
  EXPECT_THAT(message(offsets({3, 200})), testing::HasSubstr("begin with 3"));
  EXPECT_THAT(message(offsets({0, 200}).to(at::kFloat)), testing::HasSubstr("give int64 or int32"));
}

}  // namespace
}  // namespace oxytorch
