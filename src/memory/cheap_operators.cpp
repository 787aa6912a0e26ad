#include "memory/cheap_operators.h"

#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace oxytorch::memory {
namespace {

/// Beside the elementwise ones.
bool is_listed(std::string_view name) {
  static const std::unordered_set<std::string_view> listed{"aten::_log_softmax",
                                                           "aten::_softmax",
                                                           "aten::_to_copy",
                                                           "aten::avg_pool1d",
                                                           "aten::avg_pool2d",
                                                           "aten::cat",
                                                           "aten::constant_pad_nd",
                                                           "aten::embedding",
                                                           "aten::glu",
                                                           "aten::hardswish",
                                                           "aten::hardswish_",
                                                           "aten::index_select",
                                                           "aten::_fused_rms_norm",
                                                           "aten::max_pool2d_with_indices",
                                                           "aten::native_batch_norm",
                                                           "aten::native_group_norm",
                                                           "aten::native_layer_norm",
                                                           "aten::_prelu_kernel",
                                                           "aten::reflection_pad2d",
                                                           "aten::replication_pad2d",
                                                           "aten::upsample_bilinear2d",
                                                           "aten::upsample_nearest2d"};
  return listed.contains(name);
}

bool is_product(std::string_view name) {
  return name == "aten::convolution" || name == "aten::addmm" || name == "aten::mm";
}

bool is_scaling(std::string_view name) {
  return name == "aten::div" || name == "aten::div_" || name == "aten::mul" || name == "aten::mul_";
}

std::optional<CheapOperator> looked_up(const c10::OperatorName& name) {
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  if (!handle) return std::nullopt;
  if (name.name == "aten::bernoulli_") return CheapOperator{.handle = *handle, .draws_zeros_and_ones = true};
  if (handle->hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;
  if (!handle->hasTag(at::Tag::pointwise) && !is_listed(name.name) && !is_product(name.name)) return std::nullopt;
  CheapOperator found{.handle = *handle, .keeps_two_values = is_scaling(name.name)};
  found.is_batch_norm = name.name == "aten::native_batch_norm";
  found.factor = name.name == "aten::addmm" ? 2 : is_product(name.name) ? 1 : 0;
  const auto& arguments = handle->schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    if (i > 0) return std::nullopt;  // into an argument that is given for it
    found.is_inplace = true;
  }
  return found;
}

}  // namespace

bool inside_operator() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::AutogradOther);
}

bool has_few_terms(const CheapOperator& product, c10::ArrayRef<const c10::IValue> inputs) {
  constexpr std::int64_t kFew = 64;  // two operations each: what two cores compute in the time that a byte moves
  const auto& factor = inputs[product.factor].toTensor();
  if (factor.dim() == 2) return factor.size(0) <= kFew;  // rows of a matrix
  const bool is_transposed = inputs[6].toBool();
  return !is_transposed && factor.size(0) > 0 && factor.numel() / factor.size(0) <= kFew;
}

const std::optional<CheapOperator>& cheap_operator(const at::RecordFunction& call) {
  // By the address of its name, which lives as long as the operator, and which overloads do not share.
  thread_local std::unordered_map<const char*, std::optional<CheapOperator>> known;
  const auto [entry, is_new] = known.try_emplace(call.name());
  if (is_new) {
    if (const auto name = call.operator_name()) entry->second = looked_up(*name);
  }
  return entry->second;
}

}  // namespace oxytorch::memory
