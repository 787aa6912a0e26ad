#include "oxytorch/tune/batch.h"

#include <c10/util/Type.h>
#include <torch/types.h>

#include "oxytorch/error.h"

namespace oxytorch {
namespace detail {

BatchContent::~BatchContent() = default;

void holds_another(const std::type_info* held, const std::type_info& wanted) {
  raise(ErrorCode::InvalidType, "the batch holds ",
        held == nullptr ? std::string("input and target") : "a " + c10::demangle(held->name()), ", not a ",
        c10::demangle(wanted.name()), ". Read it as what it was made of.");
}

}  // namespace detail

void Batch::check_content() const {
  OXY_CHECK(!tensors().empty(), InvalidArgument, "a batch was made of a ", c10::demangle(content_->type().name()),
            ", and no tensor was found in it. Give a struct `template <class Visit> void each_tensor(Visit&& visit)`, "
            "which calls visit(tensor) with each of its tensors; pointers are not followed.");
}

void Batch::each_tensor(const detail::TensorVisitor& visit) {
  const auto defined = [&](at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
  };
  defined(input);
  defined(target);
  if (!content_) return;
  content_ = content_->copy();  // another batch may share it
  content_->each_tensor(defined);
}

std::vector<at::Tensor> Batch::tensors() const {
  std::vector<at::Tensor> found;
  Batch(*this).each_tensor([&](const at::Tensor& tensor) { found.push_back(tensor); });
  return found;
}

Batch Batch::map(const std::function<at::Tensor(const at::Tensor&)>& change) const {
  Batch changed = *this;
  changed.each_tensor([&](at::Tensor& tensor) { tensor = change(tensor); });
  return changed;
}

namespace tune {

std::int64_t rows(const Batch& batch) {
  for (const auto& tensor : batch.tensors()) {
    if (tensor.dim() > 0) return tensor.size(0);
  }
  return 1;
}

std::vector<Batch> split(const Batch& batch, int pieces) {
  const auto count = rows(batch);
  std::vector<Batch> result;
  for (std::int64_t i = 0; i < pieces; ++i) {
    const auto low = count * i / pieces, high = count * (i + 1) / pieces;
    if (low == high) continue;
    result.push_back(
        batch.map([&](const at::Tensor& t) { return t.dim() > 0 && t.size(0) == count ? t.slice(0, low, high) : t; }));
  }
  return result;
}

std::vector<std::vector<std::int64_t>> shapes(const Batch& batch) {
  std::vector<std::vector<std::int64_t>> found;
  for (const auto& tensor : batch.tensors()) found.push_back(tensor.sizes().vec());
  return found;
}

Batch channels_last(const Batch& batch) {
  return batch.map([](const at::Tensor& t) {
    return t.dim() == 4 && t.is_floating_point() ? t.contiguous(at::MemoryFormat::ChannelsLast) : t;
  });
}

}  // namespace tune
}  // namespace oxytorch
