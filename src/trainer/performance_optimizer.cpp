#include "oxytorch/trainer/performance_optimizer.h"

#include <torch/nn/module.h>
#include <torch/utils.h>

#include "base/spelling.h"
#include "oxytorch/config_use.h"
#include "oxytorch/error.h"
#include "trainer/check_optimizer.h"

namespace oxytorch {

PreparedRun PerformanceOptimizer::prepare(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                          std::vector<Batch> batches, LossFunction loss,
                                          AccelerateOptions options) const {
  OXY_CHECK(!options.config(), InvalidArgument,
            "the options of prepare() have a config. Give it to PerformanceOptimizer, which searches under its own.");
  OXY_CHECK(options.level().empty() || options.level() == config_.level(), InvalidArgument,
            "the options of prepare() have level ", in_quotes(options.level()), ", and the configuration has ",
            in_quotes(config_.level()), ". Give the level to PerformanceOptimizer.");
  for (const char* key : {"compile", "interop_threads"}) {
    OXY_CHECK(!is_given(config_, key), NotSupported, key, " = ", to_string(config_.get(key)), ": ",
              refusal(key, ConfigUser::CppTrainer));
  }
  check_settings(config_, ConfigUser::PerformanceOptimizer);
  const double clip_norm = check_optimizer(config_, optimizer);
  auto memory = std::make_unique<MemoryManager>(memory_);
  auto applied = gpu_ ? gpu_->apply() : accelerator::Applied();
  // The search puts generators back to here.
  if (const auto seed = config_.integer("seed")) torch::manual_seed(static_cast<std::uint64_t>(*seed));
  auto search = config_;
  for (const auto& field : PerformanceConfig::fields()) {
    if (!refusal(field.key, ConfigUser::Accelerate).empty()) search.unset(field.key);  // the trainer's
  }
  search.unset("progress");
  search.set("clip_norm", clip_norm);  // not beside an optimizer that clips itself
  auto plan = accelerate(model, optimizer, std::move(loss), std::move(batches), options.config(std::move(search)));
  Trainer trainer(plan, config_, memory.get());
  return {std::move(applied), std::move(memory), std::move(plan), std::move(trainer), config_};
}

}  // namespace oxytorch
