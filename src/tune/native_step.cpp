#include "oxytorch/tune/native_step.h"

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/sqrt.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "optim/memory_ranges.h"
#include "oxytorch/error.h"
#include "oxytorch/kernels/operators.h"
#include "oxytorch/tune/host.h"

namespace oxytorch::tune {
namespace {

using at::Tensor;

// -- torch's own operators, in the order of its loops ----------------------------------------------------------------
//
// The second copy of kernels/optimizer_loop-inl.h, for tensors that the kernels do not take: other dtypes and layouts,
// whose terms round in ways that only torch's operators know.

Tensor directed(const Tensor& grad, const Tensor& param, bool maximize, double weight_decay) {
  Tensor result = maximize ? grad.neg() : grad;
  return weight_decay == 0 ? result : result.add(param, weight_decay);
}

// The front ends multiply in another order, which tells in 16-bit formats.
void scale(const Tensor& tensor, double factor, FrontEnd front_end) {
  if (front_end == FrontEnd::Cpp) {
    tensor.mul_(factor);
  } else {
    tensor.mul_(at::native::wrapped_scalar_tensor(factor));
  }
}

double correction(double beta, double step) { return 1 - std::pow(beta, step); }
// Of the second average; the front ends take it by functions that need not round alike.
double root_correction(const AdamStep& o, double step) {
  const double whole = correction(o.beta2, step);
  return o.front_end == FrontEnd::Python ? std::pow(whole, 0.5) : std::sqrt(whole);
}

// Of parameter i; the state's own tensors are written.
void adam_by_torch(const AdamStep& o, const StepTensors& t, std::size_t i, double step) {
  const Tensor& param = t.params[i];
  const Tensor grad = directed(t.grads[i], param, o.maximize, o.decoupled_weight_decay ? 0 : o.weight_decay);
  if (o.decoupled_weight_decay && o.weight_decay != 0) scale(param, 1 - o.lr * o.weight_decay, o.front_end);
  if (o.front_end == FrontEnd::Python) {
    t.exp_avgs[i].lerp_(grad, 1 - o.beta1);
  } else {
    scale(t.exp_avgs[i], o.beta1, o.front_end);
    t.exp_avgs[i].add_(grad, 1 - o.beta1);
  }
  scale(t.exp_avg_sqs[i], o.beta2, o.front_end);
  t.exp_avg_sqs[i].addcmul_(grad, grad, 1 - o.beta2);
  Tensor square = t.exp_avg_sqs[i];
  if (!t.max_exp_avg_sqs.empty()) {
    square = t.max_exp_avg_sqs[i];
    at::maximum_out(square, square, t.exp_avg_sqs[i]);
  }
  const Tensor denominator = square.sqrt().div_(root_correction(o, step)).add_(o.eps);
  param.addcdiv_(t.exp_avgs[i], denominator, -(o.lr / correction(o.beta1, step)));
}

void sgd_by_torch(const SgdStep& o, const StepTensors& t, std::size_t i) {
  Tensor grad = directed(t.grads[i], t.params[i], o.maximize, o.weight_decay);
  if (!t.momentum_buffers.empty()) {
    scale(t.momentum_buffers[i], o.momentum, o.front_end);
    t.momentum_buffers[i].add_(grad, 1 - o.dampening);
    grad = o.nesterov ? grad.add(t.momentum_buffers[i], o.momentum) : t.momentum_buffers[i];
  }
  t.params[i].add_(grad, -o.lr);
}

// -- ours ------------------------------------------------------------------------------------------------------------

// Elements that go through all terms together: four arrays of them stay in a core's cache. Small steps are cut finer,
// so that every thread has a part; a step in one block would leave its root to be shared out by a library.
constexpr std::int64_t kBlock = 16384, kLeastBlock = 512;

struct Block {
  std::size_t tensor;
  std::int64_t begin;
  std::int64_t count;
};

struct StepBlocks {
  std::vector<Block> blocks;          // of the tensors that the kernels serve
  std::vector<std::size_t> by_torch;  // the others
};

using Lists = std::array<const std::vector<Tensor>*, 5>;

Lists written(const StepTensors& t) {
  return {&t.params, &t.exp_avgs, &t.exp_avg_sqs, &t.max_exp_avg_sqs, &t.momentum_buffers};
}

// Whether the order of the parameters, and of the terms of each, tells: what one writes is also another's, or read as a
// gradient.
bool needs_torchs_order(const StepTensors& t) {
  optim::Memory memory;
  for (const auto* list : written(t)) {
    for (const Tensor& tensor : *list) memory.add(tensor);
  }
  return memory.finish() ||
         std::any_of(t.grads.begin(), t.grads.end(), [&](const Tensor& grad) { return memory.has(grad); });
}

bool served(const StepTensors& t, std::size_t i) {
  const Tensor& param = t.params[i];
  const auto alike = [&](const Tensor& other) {
    return other.scalar_type() == at::kFloat && other.device().is_cpu() && other.layout() == at::kStrided &&
           other.sizes() == param.sizes() && other.strides() == param.strides() && !other.is_neg();
  };
  if (!param.is_non_overlapping_and_dense() || !alike(param) || !alike(t.grads[i])) return false;
  const auto lists = written(t);
  return std::all_of(lists.begin(), lists.end(), [&](const auto* list) { return list->empty() || alike((*list)[i]); });
}

StepBlocks blocks_of(const StepTensors& t) {
  StepBlocks work;
  const bool all_by_torch = needs_torchs_order(t);
  std::int64_t all = 0;
  for (const Tensor& param : t.params) all += param.numel();
  const std::int64_t most = std::clamp(all / (2 * at::get_num_threads()), kLeastBlock, kBlock);
  for (std::size_t i = 0; i < t.params.size(); ++i) {
    if (all_by_torch || !served(t, i)) {
      work.by_torch.push_back(i);
      continue;
    }
    const std::int64_t size = t.params[i].numel();
    for (std::int64_t begin = 0; begin < size; begin += most) {
      work.blocks.push_back({i, begin, std::min(most, size - begin)});
    }
  }
  return work;
}

const float* read(const Tensor& tensor, std::int64_t at) { return tensor.const_data_ptr<float>() + at; }
float* write(const std::vector<Tensor>& list, const Block& block) {
  return list.empty() ? nullptr : list[block.tensor].mutable_data_ptr<float>() + block.begin;
}

// Below autograd: nothing is recorded, and versions go up once.
struct Below {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
};

template <class Body>
void run(const StepBlocks& work, Body body) {
  at::parallel_for(0, static_cast<std::int64_t>(work.blocks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    const Below below;
    body(work.blocks.data() + begin, work.blocks.data() + end);
  });
}

void check_lists(const StepTensors& t, bool adam) {
  const auto expect = [&](const char* name, const std::vector<Tensor>& list, bool optional) {
    OXY_CHECK(list.size() == t.params.size() || (optional && list.empty()), InvalidArgument, "there are ", list.size(),
              " ", name, " for ", t.params.size(), " parameters; give one for each.");
  };
  expect("gradients", t.grads, false);
  expect("exp_avgs", t.exp_avgs, !adam);
  expect("exp_avg_sqs", t.exp_avg_sqs, !adam);
  expect("max_exp_avg_sqs", t.max_exp_avg_sqs, true);
  expect("momentum_buffers", t.momentum_buffers, true);
}

void bump_versions(const StepTensors& t) {
  for (const auto* list : written(t)) {
    for (const Tensor& tensor : *list) {
      c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      if (impl.version_counter().enabled()) impl.bump_version();
    }
  }
}

kernels::AdamLoop adam_loop(const AdamStep& o, double step, bool fused) {
  const auto narrow = [](double value) { return static_cast<float>(value); };
  kernels::AdamLoop loop;
  loop.fused = fused;
  loop.lerp = o.front_end == FrontEnd::Python;
  loop.maximize = o.maximize;
  if (o.decoupled_weight_decay) {
    loop.decay = narrow(1 - o.lr * o.weight_decay);
  } else {
    loop.weight_decay = narrow(o.weight_decay);
  }
  loop.beta1 = narrow(o.beta1);
  loop.beta1_rest = narrow(1 - o.beta1);
  loop.beta2 = narrow(o.beta2);
  loop.beta2_rest = narrow(1 - o.beta2);
  loop.correction = narrow(root_correction(o, step));
  loop.eps = narrow(o.eps);
  loop.rate = narrow(-(o.lr / correction(o.beta1, step)));
  return loop;
}

// `fused`: whether torch's kernels fuse multiply-adds.
void adam_as(const AdamStep& options, const StepTensors& t, const std::vector<double>& steps, bool fused) {
  const StepBlocks work = blocks_of(t);
  run(work, [&](const Block* begin, const Block* end) {
    const Tensor scratch = at::empty({kBlock}, at::kFloat);
    auto* const root = scratch.mutable_data_ptr<float>();
    for (const Block* block = begin; block != end; ++block) {
      const std::size_t i = block->tensor;
      const auto loop = adam_loop(options, steps[i], fused);
      auto* const param = write(t.params, *block);
      auto* const exp_avg = write(t.exp_avgs, *block);
      auto* const exp_avg_sq = write(t.exp_avg_sqs, *block);
      auto* const max_exp_avg_sq = write(t.max_exp_avg_sqs, *block);
      kernels::adam_averages(loop, block->count, param, read(t.grads[i], block->begin), exp_avg, exp_avg_sq,
                             max_exp_avg_sq);
      float* const square = max_exp_avg_sq != nullptr ? max_exp_avg_sq : exp_avg_sq;
      Tensor to = block->count == kBlock ? scratch : scratch.narrow(0, 0, block->count);
      at::sqrt_out(to, at::from_blob(square, {block->count}, at::kFloat));
      kernels::adam_parameters(loop, block->count, exp_avg, root, param);
    }
  });
  const Below below;
  for (const std::size_t i : work.by_torch) adam_by_torch(options, t, i, steps[i]);
}

void sgd_as(const SgdStep& o, const StepTensors& t, bool fused) {
  kernels::SgdLoop loop;
  loop.fused = fused;
  loop.maximize = o.maximize;
  loop.nesterov = o.nesterov;
  loop.weight_decay = static_cast<float>(o.weight_decay);
  loop.momentum = static_cast<float>(o.momentum);
  loop.dampening_rest = static_cast<float>(1 - o.dampening);
  loop.rate = static_cast<float>(-o.lr);
  const StepBlocks work = blocks_of(t);
  run(work, [&](const Block* begin, const Block* end) {
    for (const Block* block = begin; block != end; ++block) {
      kernels::sgd_step(loop, block->count, read(t.grads[block->tensor], block->begin),
                        write(t.momentum_buffers, *block), write(t.params, *block));
    }
  });
  const Below below;
  for (const std::size_t i : work.by_torch) sgd_by_torch(o, t, i);
}

// -- the proof -------------------------------------------------------------------------------------------------------

StepTensors copies(const StepTensors& t) {
  StepTensors result = t;
  for (auto* list :
       {&result.params, &result.exp_avgs, &result.exp_avg_sqs, &result.max_exp_avg_sqs, &result.momentum_buffers}) {
    for (Tensor& tensor : *list) tensor = tensor.clone();
  }
  return result;
}

bool same_bits(const StepTensors& a, const StepTensors& b) {
  const auto lists = written(a), others = written(b);
  for (std::size_t n = 0; n < lists.size(); ++n) {
    for (std::size_t i = 0; i < lists[n]->size(); ++i) {
      const Tensor &x = (*lists[n])[i], &y = (*others[n])[i];
      if (std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) != 0) return false;
    }
  }
  return true;
}

// Sizes that leave parts of vectors, and one that several threads share; values by a generator of its own.
StepTensors proof_tensors(bool adam, bool extra) {
  at::Generator generator = at::detail::createCPUGenerator(7);
  const auto normal = [&](std::int64_t size, double scale) {
    return at::empty({size}, at::kFloat).normal_(0, scale, generator);
  };
  StepTensors t;
  for (const std::int64_t size : {1, 3, 21, 1001, 70001}) {
    t.params.push_back(normal(size, 1));
    t.grads.push_back(normal(size, 0.1));
    if (adam) {
      t.exp_avgs.push_back(normal(size, 0.1));
      t.exp_avg_sqs.push_back(normal(size, 0.1).square_());
      if (extra) t.max_exp_avg_sqs.push_back(normal(size, 0.1).square_());
    } else if (extra) {
      t.momentum_buffers.push_back(normal(size, 0.1));
    }
  }
  return t;
}

template <class Ours, class Torchs>
bool agrees(const StepTensors& start, Ours ours, Torchs torchs) {
  const StepTensors mine = copies(start), wanted = copies(start);
  ours(mine);
  for (std::size_t i = 0; i < wanted.params.size(); ++i) torchs(wanted, i);
  return same_bits(mine, wanted);
}

bool all_agree(bool fused) {
  const auto adam = [&](const AdamStep& options, bool amsgrad, double step) {
    const StepTensors start = proof_tensors(true, amsgrad);
    const std::vector<double> steps(start.params.size(), step);
    return agrees(
        start, [&](const StepTensors& t) { adam_as(options, t, steps, fused); },
        [&](const StepTensors& t, std::size_t i) { adam_by_torch(options, t, i, step); });
  };
  const auto sgd = [&](const SgdStep& options, bool momentum) {
    return agrees(
        proof_tensors(false, momentum), [&](const StepTensors& t) { sgd_as(options, t, fused); },
        [&](const StepTensors& t, std::size_t i) { sgd_by_torch(options, t, i); });
  };
  AdamStep adamw{.weight_decay = 0.03, .decoupled_weight_decay = true};
  AdamStep coupled{.beta1 = 0.3, .eps = 1e-6, .weight_decay = 0.03, .maximize = true};
  for (const auto front_end : {FrontEnd::Python, FrontEnd::Cpp}) {
    adamw.front_end = coupled.front_end = front_end;
    if (!adam(adamw, false, 3) || !adam(coupled, true, 1)) return false;
  }
  return sgd({.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.03, .nesterov = true}, true) &&
         sgd({.lr = 0.1, .weight_decay = 0.03, .maximize = true}, false);
}

struct Proof {
  bool fused;
  std::string reason;
};

const Proof& proof() {
  static const Proof found = [] {
    resolve_vector_math();
    const Below below;
    for (const bool fused : {true, false}) {
      if (all_agree(fused)) return Proof{fused, ""};
    }
    return Proof{false, "the steps of Adam and SGD differ from torch's, whether or not its multiply-adds are fused"};
  }();
  return found;
}

bool found_fusion() {
  OXY_CHECK(proof().reason.empty(), NotSupported, proof().reason, "; keep torch's own step.");
  return proof().fused;
}

}  // namespace

const std::string& native_step_differs() { return proof().reason; }

void adam_step(const AdamStep& options, const StepTensors& tensors, const std::vector<double>& steps) {
  check_lists(tensors, true);
  OXY_CHECK(steps.size() == tensors.params.size(), InvalidArgument, "there are ", steps.size(), " step counts for ",
            tensors.params.size(), " parameters; give one for each.");
  adam_as(options, tensors, steps, found_fusion());
  bump_versions(tensors);
}

void sgd_step(const SgdStep& options, const StepTensors& tensors) {
  check_lists(tensors, false);
  sgd_as(options, tensors, found_fusion());
  bump_versions(tensors);
}

}  // namespace oxytorch::tune
