#include "optim/muon.h"

#include <ATen/ATen.h>

namespace oxytorch::optim {

std::vector<at::Tensor> orthogonalized(const std::vector<at::Tensor>& matrices, const GroupOptions& group) {
  const auto [a, b, c] = group.ns_coefficients;
  const bool tall = matrices.front().size(0) > matrices.front().size(1);
  at::Tensor x = at::stack(matrices).to(at::kBFloat16);
  if (tall) x = x.mT();
  // Spectral norm at most 1.
  x = x.div(at::linalg_vector_norm(x, 2, at::IntArrayRef{1, 2}, /*keepdim=*/true).clamp_min(group.eps));
  for (std::int64_t i = 0; i < group.ns_steps; ++i) {
    const at::Tensor gram = x.matmul(x.mT());
    const at::Tensor polynomial = at::baddbmm(gram, gram, gram, b, c);
    x = at::baddbmm(x, polynomial, x, a);
  }
  return (tall ? x.mT() : x).unbind(0);
}

}  // namespace oxytorch::optim
