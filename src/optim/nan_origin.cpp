#include "oxytorch/optim/nan_origin.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "oxytorch/error.h"

namespace oxytorch::optim {
namespace {

// What these return or read of their target is whatever lay in memory.
const std::set<std::string> kUnwritten = {"aten::empty",          "aten::empty_like", "aten::empty_strided",
                                          "aten::empty_permuted", "aten::new_empty",  "aten::new_empty_strided",
                                          "aten::resize_"};
const std::set<std::string> kOverwrites = {"aten::copy_",        "aten::fill_",      "aten::zero_",
                                           "aten::normal_",      "aten::uniform_",   "aten::random_",
                                           "aten::exponential_", "aten::bernoulli_", "aten::log_normal_"};

bool watched(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex()) && tensor.layout() == at::kStrided &&
         !tensor.is_meta() && !tensor.is_quantized() && tensor.has_storage();
}

// Looking at a tensor must not be seen by the watch itself, by autograd or by autocast.
struct Unseen {
  at::DisableRecordFunctionGuard record;
  at::AutoDispatchBelowAutograd below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Types of eight bits have no comparisons of their own.
at::Tensor readable(const at::Tensor& tensor) {
  return tensor.is_floating_point() && tensor.element_size() == 1 ? tensor.to(at::kFloat) : tensor;
}

bool is_finite(const at::Tensor& tensor) { return at::isfinite(readable(tensor)).all().item<bool>(); }
bool has_nan(const at::Tensor& tensor) { return at::isnan(readable(tensor)).any().item<bool>(); }

TensorFacts facts(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor values = readable(tensor);
  const at::Tensor good = at::isfinite(values);
  const at::Tensor bad = good.logical_not().nonzero();
  const at::Tensor kept = values.masked_select(good);
  const at::Tensor real = (kept.is_complex() ? at::view_as_real(kept) : kept).to(at::kCPU, at::kDouble);
  TensorFacts found{name, tensor.sizes().vec(), tensor.scalar_type(), NAN, NAN, 0, 0, {}};
  if (real.numel() > 0) {
    found.min = real.min().item<double>();
    found.max = real.max().item<double>();
  }
  found.nan = at::isnan(values).sum().item<std::int64_t>();
  found.inf = bad.size(0) - found.nan;
  if (bad.size(0) > 0) {
    for (std::int64_t d = 0; d < bad.size(1); ++d) found.first.push_back(bad[0][d].item<std::int64_t>());
  }
  return found;
}

template <class F>
void for_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    if (watched(value.toTensor())) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (watched(tensor)) f(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor && watched(*tensor)) f(*tensor);
    }
  }
}

std::string list_of(const std::vector<std::int64_t>& numbers) {
  std::ostringstream out;
  out << c10::IntArrayRef(numbers);
  return out.str();
}

// The birth of an inf or NaN; tensors that got theirs from it point here.
struct Record {
  std::size_t order;
  NanReport report;
  bool intended;  // an inf that the program wrote itself, as masks do
  std::vector<const Record*> causes;

  [[nodiscard]] const Record* root() const {
    const Record* best = nullptr;
    for (const Record* cause : causes) {
      if (cause->intended) continue;
      const Record* found = cause->root();
      if (best == nullptr || found->order < best->order) best = found;
    }
    return best == nullptr ? this : best;
  }
};

// Where an operator was called in forward.
struct Site {
  std::string scope;
  std::string op;
};

// What is open on a thread, outermost first.
struct Frame {
  std::string name;
  bool is_node;
  std::int64_t sequence;
};
thread_local std::vector<Frame> frames;

struct Input {
  std::string name;
  at::Tensor tensor;
  TensorFacts before;  // only of one that is written
  bool written = false;
  bool finite = true;
  bool nan = false;
  const Record* record = nullptr;  // of one that is not finite
};

struct OperatorCall final : at::ObserverContext {
  std::vector<Input> inputs;
  std::vector<at::Tensor> written;
  Site site;
  std::string node, forward_op;
  bool inf_argument = false;
  bool is_op = false;
};

}  // namespace

std::string TensorFacts::text() const {
  std::ostringstream out;
  out << name << ": " << c10::toString(dtype) << ' ' << list_of(shape) << ", ";
  std::isnan(min) ? out << "nothing finite" : out << min << " to " << max;
  if (finite()) {
    out << ", all finite";
  } else {
    out << ", " << nan << " nan, " << inf << " inf, first at " << list_of(first);
  }
  return out.str();
}

std::string NanReport::text() const {
  const std::string where = op + (scope.empty() ? "" : " in '" + scope + "'") +
                            (node.empty() ? "" : ", in backward of " + forward_op + " (" + node + ")");
  std::ostringstream out;
  if (phase == "given") {
    out << kind << " was given by the " << what << " '" << name << "', first read by " << where;
  } else {
    out << kind << " first appeared in " << phase << ": " << where;
  }
  for (const TensorFacts& fact : inputs) out << "\n  in   " << fact.text();
  for (const TensorFacts& fact : outputs) out << "\n  out  " << fact.text();
  if (!became_nan.empty()) out << "\n  became nan in " << became_nan;
  if (!reached.empty()) out << "\n  reached " << reached;
  return out.str();
}

struct NanOrigin::Impl {
  struct Owner {
    const char* what;
    std::string name;
  };
  // By storage, since views and autograd's copies share it; the weak reference keeps the address from being used again.
  struct Held {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const Record* record;
  };

  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Owner> owners;
  std::unordered_map<const c10::StorageImpl*, Held> held;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::map<std::int64_t, Site> sites;  // of forward operators, by autograd's sequence number
  std::vector<std::unique_ptr<Record>> births;
  std::vector<std::pair<const Record*, std::string>> harm;
  at::CallbackHandle callback = 0;
  bool watching = true;
  std::optional<NanReport> result;

  static std::atomic<Impl*>& active() {
    static std::atomic<Impl*> instance{nullptr};
    return instance;
  }

  static const c10::StorageImpl* key(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

  void own(const at::Tensor& tensor, const char* what, const std::string& name) {
    if (watched(tensor)) owners.try_emplace(key(tensor), Owner{what, name});
  }

  // ---- what an operator does

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& fn) {
    auto call = std::make_unique<OperatorCall>();
    if (fn.scope() != at::RecordScope::FUNCTION) {
      frames.push_back({fn.name(), fn.scope() == at::RecordScope::BACKWARD_FUNCTION, fn.seqNr()});
      return call;
    }
    Impl* self = active().load();
    if (self == nullptr) return call;
    call->is_op = true;
    const Unseen unseen;
    const std::scoped_lock lock(self->mutex);
    self->enter(fn, *call);
    return call;
  }

  static void end(const at::RecordFunction& fn, at::ObserverContext* context) {
    auto* call = static_cast<OperatorCall*>(context);
    if (call == nullptr) return;
    if (!call->is_op) {
      if (!frames.empty()) frames.pop_back();
      return;
    }
    Impl* self = active().load();
    if (self == nullptr) return;
    const Unseen unseen;
    const std::scoped_lock lock(self->mutex);
    self->leave(fn, *call);
  }

  void enter(const at::RecordFunction& fn, OperatorCall& call) {
    call.site.op = fn.name();
    const Frame* node = nullptr;
    for (const Frame& frame : frames) {
      if (frame.is_node) node = &frame;
      if (!frame.is_node && node == nullptr) {
        call.site.scope += (call.site.scope.empty() ? "" : ".") + frame.name;
      }
    }
    if (node == nullptr) {
      if (fn.seqNr() >= 0) sites[fn.seqNr()] = call.site;
    } else {
      call.node = node->name.substr(node->name.rfind(' ') + 1);
      const auto forward = sites.find(node->sequence);
      if (forward != sites.end()) {
        call.site.scope = forward->second.scope;
        call.forward_op = forward->second.op;
      }
    }
    read_inputs(fn, call);
    // Backward starts with the gradient of the loss.
    if (node == nullptr && call.site.op == "aten::ones_like" && !call.inputs.empty() &&
        call.inputs.front().tensor.numel() == 1 && !call.inputs.front().finite) {
      harm.emplace_back(call.inputs.front().record, "the loss");
    }
  }

  void read_inputs(const at::RecordFunction& fn, OperatorCall& call) {
    const std::optional<c10::FunctionSchema> schema = fn.operator_schema();
    const auto values = fn.inputs();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const c10::Argument* argument = schema && i < schema->arguments().size() ? &schema->arguments()[i] : nullptr;
      const bool writes = argument != nullptr && argument->alias_info() != nullptr && argument->alias_info()->isWrite();
      const bool reads = !writes || !(argument->kwarg_only() || kOverwrites.contains(call.site.op));
      if (values[i].isDouble() && std::isinf(values[i].toDouble())) call.inf_argument = true;
      if (values[i].isScalar() && values[i].toScalar().isFloatingPoint() &&
          std::isinf(values[i].toScalar().toDouble())) {
        call.inf_argument = true;
      }
      for_tensors(values[i], [&](const at::Tensor& tensor) {
        if (writes) call.written.push_back(tensor);
        if (reads) call.inputs.push_back(input(argument ? argument->name() : "input", tensor, writes, call));
      });
    }
  }

  Input input(const std::string& name, const at::Tensor& tensor, bool written, const OperatorCall& call) {
    Input in{name, tensor, {}, written, true, false, nullptr};
    if (kUnwritten.contains(call.site.op)) return in;
    if (written) in.before = facts(name, tensor);
    in.finite = is_finite(tensor);
    if (!in.finite) {
      in.nan = has_nan(tensor);
      in.record = record_of(name, tensor, call);
    }
    return in;
  }

  void leave(const at::RecordFunction& fn, const OperatorCall& call) {
    if (kUnwritten.contains(call.site.op)) return;
    std::vector<at::Tensor> outputs = call.written;
    for (const c10::IValue& value : fn.outputs()) {
      for_tensors(value, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
    }
    std::vector<at::Tensor> bad;
    for (const at::Tensor& tensor : outputs) {
      if (!is_finite(tensor)) bad.push_back(tensor);
    }
    if (bad.empty()) {
      for (const at::Tensor& tensor : outputs) forget(tensor);
      return;
    }
    const Record* known = find(bad.front());
    // An operator inside of this one has been blamed already.
    const bool nested = known != nullptr && std::none_of(call.inputs.begin(), call.inputs.end(),
                                                         [&](const Input& in) { return in.record == known; });
    const Record* record = nested ? known : account(call, bad);
    for (const at::Tensor& tensor : outputs) forget(tensor);
    for (const at::Tensor& tensor : bad) remember(tensor, record);
  }

  // The record that bad outputs owe to: of a bad input, or a new one.
  const Record* account(const OperatorCall& call, const std::vector<at::Tensor>& bad) {
    bool nan = false;
    for (const at::Tensor& tensor : bad) nan = nan || has_nan(tensor);
    std::vector<const Record*> sources, spoilt;
    for (const Input& in : call.inputs) {
      if (in.finite) continue;
      sources.push_back(in.record);
      if (!nan || in.nan) spoilt.push_back(in.record);
    }
    if (!spoilt.empty()) {
      return *std::min_element(spoilt.begin(), spoilt.end(), [](const Record* a, const Record* b) {
        return std::pair(a->root()->intended, a->order) < std::pair(b->root()->intended, b->order);
      });
    }
    NanReport report = place(call);
    report.phase = call.node.empty() ? "forward" : "backward";
    report.kind = nan ? "nan" : "inf";
    report.what = "operator";
    for (const Input& in : call.inputs) {
      report.inputs.push_back(in.written ? in.before : facts(in.name, in.tensor));
    }
    for (const at::Tensor& tensor : bad) report.outputs.push_back(facts("output", tensor));
    return born(std::move(report), !nan && (call.inf_argument || call.inputs.empty()), std::move(sources));
  }

  static NanReport place(const OperatorCall& call) {
    NanReport report;
    report.scope = call.site.scope;
    report.op = call.site.op;
    report.node = call.node;
    report.forward_op = call.forward_op;
    return report;
  }

  const Record* born(NanReport report, bool intended, std::vector<const Record*> causes) {
    births.push_back(std::make_unique<Record>(Record{births.size(), std::move(report), intended, std::move(causes)}));
    return births.back().get();
  }

  // The record of a bad tensor; one that no watched operator made is recorded as given.
  const Record* record_of(const std::string& label, const at::Tensor& tensor, const OperatorCall& call) {
    if (const Record* found = find(tensor)) return found;
    const auto owner = owners.find(key(tensor));
    NanReport report = place(call);
    report.phase = "given";
    report.what = owner == owners.end() ? "tensor" : owner->second.what;
    report.name = owner == owners.end() ? label : owner->second.name;
    report.inputs.push_back(facts(report.name, tensor));
    const bool nan = report.inputs.front().nan > 0;
    report.kind = nan ? "nan" : "inf";
    // Masks with inf are given as buffers and inputs; a parameter or gradient with inf is broken.
    const bool intended = !nan && report.what != "parameter" && report.what != "gradient";
    const Record* record = born(std::move(report), intended, {});
    remember(tensor, record);
    return record;
  }

  // ---- which tensor owes its inf or NaN to which record

  const Record* find(const at::Tensor& tensor) {
    const auto found = held.find(key(tensor));
    return found != held.end() && !found->second.storage.expired() ? found->second.record : nullptr;
  }

  void remember(const at::Tensor& tensor, const Record* record) {
    const c10::Storage& storage = tensor.storage();
    held.insert_or_assign(storage.unsafeGetStorageImpl(), Held{storage.getWeakStorageImpl(), record});
  }

  void forget(const at::Tensor& tensor) {
    if (static_cast<std::size_t>(tensor.numel()) * tensor.element_size() == tensor.storage().nbytes()) {
      held.erase(key(tensor));
    }
  }

  // ---- the verdict

  void look(const at::Tensor& tensor, const std::string& name) {
    if (!watched(tensor)) return;
    const Unseen unseen;
    const std::scoped_lock lock(mutex);
    if (!is_finite(tensor)) harm.emplace_back(record_of(name, tensor, OperatorCall()), name);
  }

  std::optional<NanReport> judge() {
    for (const auto& [name, parameter] : parameters) look(parameter.grad(), "the gradient of " + name);
    if (harm.empty()) return std::nullopt;
    const auto first = std::min_element(harm.begin(), harm.end(), [](const auto& a, const auto& b) {
      return a.first->root()->order < b.first->root()->order;
    });
    const Record* root = first->first->root();
    NanReport report = root->report;
    report.reached = first->second;
    for (const auto& birth : births) {
      if (birth.get() != root && birth->root() == root && birth->report.kind == "nan") {
        report.became_nan = birth->report.op + (birth->report.scope.empty() ? "" : " in '" + birth->report.scope + "'");
        break;
      }
    }
    return report;
  }
};

NanOrigin::NanOrigin() : impl_(std::make_unique<Impl>()) {
  Impl* expected = nullptr;
  OXY_CHECK(Impl::active().compare_exchange_strong(expected, impl_.get()), InvalidState,
            "a NanOrigin is watching already; finish() it before making another.");
  impl_->callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(Impl::start, Impl::end)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
}

NanOrigin::NanOrigin(const torch::nn::Module& model) : NanOrigin() {
  for (const auto& item : model.named_parameters()) {
    impl_->parameters.emplace_back(item.key(), item.value());
    impl_->own(item.value(), "parameter", item.key());
    if (item.value().grad().defined()) impl_->own(item.value().grad(), "gradient", item.key());
  }
  for (const auto& item : model.named_buffers()) impl_->own(item.value(), "buffer", item.key());
}

NanOrigin::~NanOrigin() {
  if (!impl_->watching) return;
  at::removeCallback(impl_->callback);
  Impl::active().store(nullptr);
}

void NanOrigin::check(const at::Tensor& tensor, const std::string& name) {
  OXY_CHECK(impl_->watching, InvalidState, "check(\"", name, "\") came after finish(); make a new NanOrigin.");
  impl_->look(tensor, name);
}

std::optional<NanReport> NanOrigin::finish() {
  if (impl_->watching) {
    at::removeCallback(impl_->callback);
    Impl::active().store(nullptr);
    impl_->watching = false;
    impl_->result = impl_->judge();
    impl_->held.clear();
  }
  return impl_->result;
}

NanOrigin::Scope::Scope(std::string name) : name_(std::move(name)), record_(at::RecordScope::USER_SCOPE) {
  if (record_.isActive()) record_.before(std::string_view(name_));
}

}  // namespace oxytorch::optim
