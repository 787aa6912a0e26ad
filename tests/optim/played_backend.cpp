#include "optim/played_backend.h"

#include <cmath>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "oxytorch/backend/registry.h"
#include "oxytorch/backend/sim.h"
#include "oxytorch/backend_kernels.h"
#include "oxytorch/kernels/step_tail.h"

struct oxy_tail_s {
  std::int32_t device;
  oxytorch::kernels::StepTailPlan plan;
  std::vector<oxytorch::kernels::TailGroup> groups;
  std::vector<oxy_tail_group> given;
  std::vector<const void*> buffers;  // state[0] of each tensor, as given
};

namespace oxytorch::test {
namespace {

using kernels::ElementType;

const oxy_backend& sim() {
  static const oxy_backend& table = backend::backend("sim").table();
  return table;
}

std::set<oxy_queue>& wrapped() {
  static std::set<oxy_queue> handles;
  return handles;
}

// What lies at a device address; an empty tensor's is its own.
template <class T>
T* at(std::int32_t device, T* address) {
  void* const found = backend::sim_host_address(device, address);
  return found == nullptr ? address : static_cast<T*>(found);
}

oxy_status queue_create(std::int32_t device, const oxy_queue_options* options, oxy_queue* queue) {
  if (options == nullptr || (options->flags & OXY_QUEUE_WRAP_NATIVE) == 0) {
    return sim().queue_create(device, options, queue);
  }
  if (!played().wraps) return OXY_NOT_SUPPORTED;
  *queue = static_cast<oxy_queue>(options->native_handle);
  wrapped().insert(*queue);
  return OXY_OK;
}

oxy_status queue_destroy(oxy_queue queue) {
  return wrapped().contains(queue) ? sim().synchronize(0, queue) : sim().queue_destroy(queue);
}

kernels::TailTensor as_here(std::int32_t device, const oxy_tail_tensor& t) {
  kernels::TailTensor here;
  here.param = at(device, t.param);
  here.grad = at(device, t.grad);
  here.master = at(device, t.master);
  here.low_bits = at(device, t.low_bits);
  here.copy = at(device, t.copy);
  for (int k = 0; k < 3; ++k) here.state[k] = {at(device, t.state[k]), at(device, t.scale[k])};
  here.ema = at(device, t.ema);
  here.step = at(device, t.step);
  here.numel = t.numel;
  here.rows = t.rows;
  here.group = t.group;
  here.stream = t.stream;
  here.type = static_cast<ElementType>(t.type);
  here.grad_type = static_cast<ElementType>(t.grad_type);
  here.state_type = static_cast<ElementType>(t.state_type);
  here.copy_type = static_cast<ElementType>(t.copy_type);
  here.first = t.first != 0;
  return here;
}

oxy_status tail_create(std::int32_t device, const oxy_tail_tensor* tensors, std::uint32_t count, oxy_tail* tail) {
  if (!played().serves) return OXY_NOT_SUPPORTED;
  std::vector<kernels::TailTensor> here;
  for (std::uint32_t i = 0; i < count; ++i) here.push_back(as_here(device, tensors[i]));
  *tail = new oxy_tail_s{device, kernels::StepTailPlan(here), {}, {}, {}};
  ++played().created;
  ++played().live;
  return OXY_OK;
}

oxy_status tail_destroy(oxy_tail tail) {
  delete tail;
  --played().live;
  return OXY_OK;
}

oxy_status tail_configure(oxy_tail tail, oxy_queue, const oxy_tail_tensor* tensors, std::uint32_t count,
                          const oxy_tail_group* groups, std::uint32_t group_count) {
  ++played().configured;
  tail->buffers.resize(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    kernels::TailTensor& mine = tail->plan.tensors()[i];
    const bool kept =
        tail->groups.empty() || tail->buffers[i] != tensors[i].state[0] ? tensors[i].first != 0 : mine.first;
    mine = as_here(tail->device, tensors[i]);
    mine.first = kept;
    tail->buffers[i] = tensors[i].state[0];
  }
  tail->given.assign(groups, groups + group_count);
  tail->groups.clear();
  for (const oxy_tail_group& g : tail->given) {
    tail->groups.push_back({static_cast<kernels::Rule>(g.rule), g.lr, g.beta1, g.beta2, g.eps, g.weight_decay,
                            g.momentum, g.dampening, g.lr_decay, g.nesterov != 0, g.maximize != 0});
  }
  return OXY_OK;
}

oxy_status tail_measure(oxy_tail tail, oxy_queue queue, double* sums) {
  if (played().fails) return OXY_DEVICE_ERROR;
  sim().synchronize(tail->device, queue);
  tail->plan.measure({});
  double* const out = at(tail->device, sums);
  for (std::size_t i = 0; i < tail->plan.tensors().size(); ++i) {
    out[tail->plan.tensors()[i].stream] = tail->plan.grad_sum_squares()[i];
  }
  return OXY_OK;
}

oxy_status tail_judge(oxy_tail tail, oxy_queue queue, const double* sums, const oxy_tail_settings* settings,
                      const oxy_tail_results* results, oxy_tail_verdict* verdict) {
  sim().synchronize(tail->device, queue);
  const auto here = [tail](auto* address) { return at(tail->device, address); };
  const oxy_tail_settings& s = *settings;
  double total = 0;
  for (std::uint32_t i = 0; i < results->count; ++i) total += here(sums)[i];
  const double scale = (s.grad_scale == nullptr ? 1.0 : static_cast<double>(*here(s.grad_scale))) * s.grad_divisor;
  const double norm = std::sqrt(total) / scale;
  const bool finite = std::isfinite(total) && std::isfinite(1 / scale);
  const bool scaled = s.grad_scale != nullptr || s.found_inf != nullptr;
  const bool told = s.found_inf != nullptr && *here(s.found_inf) != 0;
  const bool bad = told || (!finite && (scaled || (s.flags & OXY_TAIL_PROPAGATE) == 0));
  const bool skip = bad || (s.skip != nullptr && *here(s.skip) != 0) ||
                    (s.norm_limit != nullptr && norm > static_cast<double>(*here(s.norm_limit)));
  if (bad && s.found_inf != nullptr) *here(s.found_inf) = 1;
  double clip = s.clip_norm > 0 ? s.clip_norm / (norm + 1e-6) : 1.0;
  if (clip > 1) clip = 1;
  *here(verdict) = {clip / scale, 1 / scale, norm, skip ? 1.0 : 0.0};
  *here(results->grad_norm) = static_cast<float>(norm);
  *here(results->found_inf) = bad ? 1 : 0;
  *here(results->applied) = skip ? 0 : 1;
  *here(results->skipped) += skip ? 1 : 0;
  for (std::uint32_t i = 0; i < results->count; ++i) {
    here(results->grad_norms)[i] = static_cast<float>(std::sqrt(here(sums)[i]) * (1 / scale));
  }
  return OXY_OK;
}

oxy_status tail_apply(oxy_tail tail, oxy_queue queue, const oxy_tail_verdict* verdict,
                      const oxy_tail_settings* settings, const oxy_tail_results* results) {
  ++played().rounds;
  sim().synchronize(tail->device, queue);
  const auto here = [tail](auto* address) { return at(tail->device, address); };
  const bool zeroes = (settings->flags & OXY_TAIL_ZERO_GRAD) != 0;
  if (here(verdict)->skip != 0) {
    if (zeroes) tail->plan.zero_gradients({});
    return OXY_OK;
  }
  for (std::size_t g = 0; g < tail->groups.size(); ++g) {
    const oxy_tail_group& given = tail->given[g];
    if (given.lr_tensor == nullptr) continue;
    const void* const rate = here(given.lr_tensor);
    tail->groups[g].lr = given.lr_type == OXY_F64 ? *static_cast<const double*>(rate)
                                                  : static_cast<double>(*static_cast<const float*>(rate));
  }
  kernels::TailSettings s;
  s.grad_multiplier = here(verdict)->multiplier;
  s.clip_value = settings->clip_value;
  s.agc = settings->agc;
  s.agc_eps = settings->agc_eps;
  s.ema_decay = settings->ema_decay;
  s.zero_grad = zeroes;
  s.collect = (settings->flags & OXY_TAIL_COLLECT) != 0;
  s.stochastic = (settings->flags & OXY_TAIL_STOCHASTIC) != 0;
  s.seed = settings->seed;
  tail->plan.apply(tail->groups, s, {});
  for (std::size_t i = 0; s.collect && i < tail->plan.tensors().size(); ++i) {
    if (tail->plan.tensors()[i].grad == nullptr) continue;
    const std::uint32_t place = tail->plan.tensors()[i].stream;
    here(results->param_norms)[place] = static_cast<float>(std::sqrt(tail->plan.param_sum_squares()[i]));
    here(results->update_norms)[place] = static_cast<float>(std::sqrt(tail->plan.update_sum_squares()[i]));
  }
  return OXY_OK;
}

std::string torch_type;

}  // namespace

Played& played() {
  static Played state;
  return state;
}

void register_played(const char* type) {
  torch_type = type;
  static const oxy_kernels kernels{sizeof(oxy_kernels), OXY_KERNELS_VERSION, tail_create, tail_destroy,
                                   tail_configure,      tail_measure,        tail_judge,  tail_apply};
  static oxy_backend table = sim();
  table.name = "played";
  table.kernels = &kernels;
  table.queue_create = queue_create;
  table.queue_destroy = queue_destroy;
  table.device_properties = [](std::int32_t device, oxy_device_properties* properties) {
    const oxy_status status = sim().device_properties(device, properties);
    if (status == OXY_OK) properties->torch_device = torch_type.c_str();
    return status;
  };
  backend::Registry::instance().add(&table, "built into the test");
}

}  // namespace oxytorch::test
