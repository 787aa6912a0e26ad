#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "memory/cheap_operators.h"
#include "memory/recipe.h"
#include "memory/region_clock.h"
#include "memory/saved_tensors.h"
#include "oxytorch/error.h"
#include "oxytorch/memory/checkpoint.h"

namespace oxytorch::memory {
namespace {

namespace autograd = torch::autograd;

constexpr std::size_t kSmall = 16'384;        // bytes of what is not worth the time
constexpr std::size_t kLongestChain = 1'000;  // of recipes: they are followed by recursion
constexpr std::size_t kRunningMean = 3;       // argument of batch normalisation
constexpr std::size_t kWorth = 4;             // times as much is to go as has to be kept for it

/// Numbers and the like, that an operator can be given again.
bool is_plain_value(const c10::IValue& value) {
  return value.isNone() || value.isBool() || value.isInt() || value.isDouble() || value.isScalar() ||
         value.isString() || value.isDevice() || value.isIntList() || value.isDoubleList() || value.isBoolList();
}

thread_local SelectiveCheckpoint::Inside* recorded = nullptr;

/// What our own operators do is not looked at.
struct Unrecorded {
  Unrecorded() = default;
  ~Unrecorded() { recorded = before; }
  Unrecorded(const Unrecorded&) = delete;
  Unrecorded& operator=(const Unrecorded&) = delete;
  SelectiveCheckpoint::Inside* before = std::exchange(recorded, nullptr);
  c10::AutoGradMode grad{false};
};

}  // namespace

struct SelectiveCheckpoint::Inside : std::enable_shared_from_this<Inside>, TensorKeeper {
  /// What nodes share that saved the same content.
  struct Saved {
    std::shared_ptr<Content> content;
    std::shared_ptr<Kept> kept;
  };

  /// In place of a tensor that a node saves.
  struct Placeholder final : autograd::SavedVariableHooks {
    explicit Placeholder(std::shared_ptr<Inside> of) : of(std::move(of)) {}
    ~Placeholder() override {
      if (saved != nullptr && !was_asked) of->no_longer_saved(*saved);
    }
    void call_pack_hook(const at::Tensor& tensor) override { of->pack(tensor, *this); }
    at::Tensor call_unpack_hook() override {
      if (saved != nullptr) return of->unpack(*this);
      return as_it_is.get();
    }
    std::shared_ptr<Inside> of;
    std::shared_ptr<Saved> saved;
    std::optional<View> view;
    bool was_asked = false;
    SavedAsItIs as_it_is;  // where it is none to be made again
  };
  std::unique_ptr<autograd::SavedVariableHooks> make() override {
    return std::make_unique<Placeholder>(shared_from_this());
  }

  void pack(const at::Tensor& tensor, Placeholder& into) {
    if (!is_dense(tensor) || tensor.storage().nbytes() < kSmall || (tensor.is_leaf() && tensor.requires_grad())) {
      into.as_it_is = SavedAsItIs(tensor);
      return;
    }
    const std::lock_guard lock(mutex);
    auto content = content_of(tensor);
    auto& entry = saved[content.get()];
    if (entry == nullptr) {
      entry = std::make_shared<Saved>(Saved{content, std::make_shared<Kept>(Kept{tensor.storage(), {}})});
      content->kept = entry->kept;
      in_order.push_back(entry);
    }
    ++content->savers;
    into.saved = entry;
    into.view.emplace(std::move(content), tensor);
  }

  at::Tensor unpack(Placeholder& from) {
    const std::lock_guard lock(mutex);
    auto& content = *from.saved->content;
    const RegionClock clock(region);
    const auto storage = content.get();
    if (!std::exchange(from.was_asked, true) && --content.savers == 0) content.made_again = {};
    return from.view->over(storage);
  }

  void no_longer_saved(Saved& entry) {
    const std::lock_guard lock(mutex);
    if (--entry.content->savers > 0) return;
    entry.content->made_again = {};
    if (saved.erase(entry.content.get()) > 0) entry.kept = nullptr;  // forward runs, and nobody will ask for it
  }

  // ---- while forward runs

  std::shared_ptr<Content>& content_of(const at::Tensor& tensor) {
    auto& content = contents[tensor.storage().unsafeGetStorageImpl()];
    if (content == nullptr || content->version != tensor._version()) {
      content = std::make_shared<Content>(tensor);
      content->is_parameter = tensor.is_leaf() && tensor.requires_grad();
      content->is_called = depth > 0;
      if (content->is_called) called.push_back(content);
    }
    return content;
  }

  /// A call of an operator, until it ends.
  struct OperatorCall final : at::ObserverContext {
    std::shared_ptr<Recipe> recipe;
    std::size_t length = 0, first_called = 0;
    bool has_two_values = false, is_batch_norm = false;
  };

  std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    const RegionClock clock(region);
    const auto& cheap = cheap_operator(call);
    if (!cheap) return nullptr;
    auto noted = std::make_unique<OperatorCall>();
    if (cheap->draws_zeros_and_ones) {
      noted->has_two_values = true;
    } else {
      note(call.inputs(), *cheap, *noted);
    }
    // After its arguments, whose contents are older.
    noted->first_called = called.size();
    ++depth;
    return noted;
  }

  void note(c10::ArrayRef<const c10::IValue> inputs, const CheapOperator& cheap, OperatorCall& call) {
    const auto is_large = [](const c10::IValue& value) {
      if (!value.isTensor()) return value.isTensorList();
      const auto& tensor = value.toTensor();
      return tensor.defined() && static_cast<std::size_t>(tensor.numel()) * tensor.element_size() * 4 >= kSmall;
    };
    if (cheap.factor > 0 && !has_few_terms(cheap, inputs)) return;
    // Of small tensors small ones are made, but for lookups.
    if (std::none_of(inputs.begin(), inputs.end(), is_large)) return;
    auto recipe = std::make_shared<Recipe>(Recipe{.handle = cheap.handle, .is_inplace = cheap.is_inplace});
    recipe->arguments.reserve(inputs.size());
    const auto view = [&](const at::Tensor& tensor) {
      auto content = content_of(tensor);
      call.length = std::max(call.length, content->length + 1);
      return View(std::move(content), tensor);
    };
    std::size_t two_valued = 0, tensors = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto& value = inputs[i];
      if (cheap.is_batch_norm && i >= kRunningMean) {
        break;  // with the statistics of the batch, when they are known
      } else if (value.isTensor() && value.toTensor().defined()) {
        const auto& tensor = value.toTensor();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          recipe->arguments.emplace_back(value);  // only so are types promoted as before
          continue;
        }
        if (!is_dense(tensor)) return;
        ++tensors;
        recipe->arguments.emplace_back(view(tensor));
        two_valued += std::get<View>(recipe->arguments.back()).content->has_two_values ? 1 : 0;
      } else if (value.isTensorList()) {
        std::vector<View> views;
        for (const at::Tensor& tensor : value.toTensorVector()) {
          if (!is_dense(tensor)) return;
          views.push_back(view(tensor));
        }
        recipe->arguments.emplace_back(std::move(views));
      } else if (is_plain_value(value) || (value.isTensor() && !value.toTensor().defined())) {
        recipe->arguments.emplace_back(value);
      } else {
        return;
      }
    }
    // With statistics that are given its results are those of the moment.
    if (cheap.is_batch_norm && !inputs[kRunningMean + 2].toBool()) return;
    call.is_batch_norm = cheap.is_batch_norm;
    call.has_two_values = cheap.keeps_two_values && tensors == 1 && two_valued == 1;
    if (call.length <= kLongestChain) call.recipe = std::move(recipe);
  }

  void end(const at::RecordFunction& call, OperatorCall& noted) {
    const RegionClock clock(region);
    --depth;
    const auto& outputs = call.outputs();
    if (noted.is_batch_norm && noted.recipe != nullptr) {
      const Unrecorded unrecorded;
      if (!put_statistics_in(*noted.recipe, outputs)) noted.recipe = nullptr;
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].isTensor() || !is_dense(outputs[i].toTensor())) continue;
      const auto& tensor = outputs[i].toTensor();
      const auto known = contents.find(tensor.storage().unsafeGetStorageImpl());
      const bool is_known = known != contents.end() && known->second->version == tensor._version();
      // An operator inside of this one knows better; and a view has no content of its own.
      if (is_known && !known->second->is_called) continue;
      const bool has_two_values = noted.has_two_values || tensor.scalar_type() == at::kBool;
      if (noted.recipe == nullptr && !has_two_values) continue;
      auto& content = *content_of(tensor);
      content.is_called = false;
      content.has_two_values = has_two_values;
      if (noted.recipe == nullptr || takes(*noted.recipe, content)) continue;
      content.recipe = noted.recipe;
      content.result = i;
      content.length = noted.length;
    }
    for (auto i = noted.first_called; i < called.size(); ++i) called[i]->is_called = false;
    called.resize(std::min(called.size(), noted.first_called));
  }

  /// The operator that normalises by statistics that are given does the second half of what the one that computes them
  /// does, to the bit, where it has weights of weight / deviation, and a variance of 1.
  static bool put_statistics_in(Recipe& recipe, const std::vector<c10::IValue>& outputs) {
    const auto &mean = outputs.at(1).toTensor(), &inverse_deviation = outputs.at(2).toTensor();
    auto& weight = recipe.arguments[1];
    auto scale = inverse_deviation.detach();
    if (const auto* view = std::get_if<View>(&weight)) {
      const auto storage = view->content->storage.lock();
      if (!storage || view->dtype != inverse_deviation.dtype()) return false;
      scale = inverse_deviation.mul(view->over(c10::Storage(storage)));
    }
    weight = c10::IValue(scale);
    recipe.arguments.emplace_back(c10::IValue(mean.detach()));
    recipe.arguments.emplace_back(c10::IValue(at::ones_like(scale)));
    recipe.arguments.emplace_back(c10::IValue(false));
    recipe.arguments.emplace_back(c10::IValue(0.0));
    recipe.arguments.emplace_back(c10::IValue(0.0));
    return true;
  }

  static bool takes(const Recipe& recipe, const Content& content) {
    return std::any_of(recipe.arguments.begin(), recipe.arguments.end(), [&](const Recipe::Argument& argument) {
      const auto* view = std::get_if<View>(&argument);
      return view != nullptr && view->content.get() == &content;
    });
  }

  // ---- when it has ended

  /// Drops what can be made again from what is kept anyway.
  void settle() {
    const std::lock_guard lock(mutex);
    const RegionClock clock(region);
    std::unordered_set<const Content*> kept;
    std::vector<Saved*> to_choose;
    std::erase_if(in_order, [](const auto& each) { return each->kept == nullptr; });
    for (const auto& each : in_order) {
      const auto& content = *each->content;
      if (content.recipe == nullptr || content.is_parameter) {
        kept.insert(&content);
      } else {
        to_choose.push_back(each.get());
      }
    }
    for (auto* const each : to_choose) {
      auto& content = *each->content;
      // What comes out is kept by who takes it.
      constexpr std::size_t kOurs = 1;
      if (each->kept->storage.use_count() > kOurs) {
        kept.insert(&content);
        continue;
      }
      Needs needs(kept);
      if (needs.add(*content.recipe) && needs.more() * kWorth <= content.bytes) {
        content.is_dropped = true;
        content.made_of = needs.parts();
      } else {
        kept.insert(&content);
      }
    }
    for (const auto& each : in_order) {
      auto& content = *each->content;
      if (content.is_dropped) {
        each->kept = nullptr;
      } else {
        if (!content.is_parameter) content.recipe = nullptr;
        if (content.has_two_values) pack_two_values(content, *each->kept);
      }
    }
    contents.clear();
    saved.clear();
    in_order.clear();
    called.clear();
  }

  static void pack_two_values(const Content& content, Kept& kept) {
    auto packed = TwoValues::pack(kept.storage, content.element_bytes);
    if (!packed) return;
    kept.packed = std::move(packed);
    kept.storage = {};
  }

  /// What recipes take, down to what is kept.
  class Needs {
   public:
    explicit Needs(const std::unordered_set<const Content*>& kept) : kept_(kept) {}

    /// False where some of what it takes is gone.
    bool add(const Recipe& recipe) {
      const auto add_view = [this](const View& view) { return add(*view.content); };
      return std::all_of(recipe.arguments.begin(), recipe.arguments.end(), [&](const Recipe::Argument& argument) {
        if (const auto* view = std::get_if<View>(&argument)) return add_view(*view);
        if (const auto* views = std::get_if<std::vector<View>>(&argument))
          return std::all_of(views->begin(), views->end(), add_view);
        return true;
      });
    }
    [[nodiscard]] std::vector<std::shared_ptr<Kept>> parts() const {
      std::vector<std::shared_ptr<Kept>> found;
      for (const auto* content : order_) {
        const auto part = content->kept.lock();
        if (part != nullptr && !content->is_dropped) found.push_back(part);
        found.insert(found.end(), content->made_of.begin(), content->made_of.end());
      }
      return found;
    }
    /// Bytes that nobody keeps yet.
    [[nodiscard]] std::size_t more() const { return more_; }

   private:
    bool add(Content& content) {
      if (const auto found = state_.find(&content); found != state_.end()) return found->second;
      if (content.is_dropped || kept_.contains(&content)) return take(content);
      if (content.recipe != nullptr) {
        const auto before = order_.size();
        const auto more_before = more_;
        if (add(*content.recipe)) return state_[&content] = true;
        for (; order_.size() > before; order_.pop_back()) state_.erase(order_.back());
        more_ = more_before;
      }
      auto storage = content.storage.lock();
      if (!storage || !content.is_unchanged()) return state_[&content] = false;
      if (content.kept.expired()) {
        content.kept = new_parts_.emplace_back(std::make_shared<Kept>(Kept{c10::Storage(std::move(storage)), {}}));
      }
      if (!content.is_parameter) more_ += content.bytes;
      return take(content);
    }
    bool take(Content& content) {
      order_.push_back(&content);
      return state_[&content] = true;
    }

    const std::unordered_set<const Content*>& kept_;
    std::unordered_map<const Content*, bool> state_;
    std::vector<const Content*> order_;  // of what is taken
    std::vector<std::shared_ptr<Kept>> new_parts_;
    std::size_t more_ = 0;
  };

  std::mutex mutex;
  int region = RegionClock::region();
  std::size_t depth = 0;  // of operators that run
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Content>> contents;
  std::vector<std::shared_ptr<Content>> called;
  std::unordered_map<const Content*, std::shared_ptr<Saved>> saved;
  std::vector<std::shared_ptr<Saved>> in_order;
};

namespace {

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& call) {
  return recorded == nullptr || inside_operator() ? nullptr : recorded->begin(call);
}

void end_operator(const at::RecordFunction& call, at::ObserverContext* context) {
  if (recorded != nullptr && context != nullptr)
    recorded->end(call, *static_cast<SelectiveCheckpoint::Inside::OperatorCall*>(context));
}

}  // namespace

/// What of it belongs to the thread that runs forward.
struct SelectiveCheckpoint::Open {
  explicit Open(Inside& inside)
      : keeping(inside),
        handle(at::addThreadLocalCallback(at::RecordFunctionCallback(begin_operator, end_operator)
                                              .needsInputs(true)
                                              .needsOutputs(true)
                                              .scopes({at::RecordScope::FUNCTION}))) {
    recorded = &inside;
  }
  ~Open() {
    recorded = nullptr;
    at::removeCallback(handle);
  }
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;

  KeepingTensors keeping;
  at::RecordFunctionGuard enabled{true};
  at::CallbackHandle handle;
};

SelectiveCheckpoint::SelectiveCheckpoint() {
  // Inside another checkpoint nothing is kept, or what is kept is chosen already; in torch.func's transforms torch
  // refuses hooks of saved tensors.
  if (!records_gradients() || KeepingTensors::is_active() || !KeepingTensors::is_possible()) return;
  inside_ = std::make_shared<Inside>();
  open_ = std::make_unique<Open>(*inside_);
}

SelectiveCheckpoint::~SelectiveCheckpoint() = default;

void SelectiveCheckpoint::end() {
  if (open_ == nullptr) return;
  open_ = nullptr;
  inside_->settle();
}

}  // namespace oxytorch::memory
