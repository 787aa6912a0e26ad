// Rules about Gaudi's bridge, compiler and collectives.
#include "judge.h"
#include "value.h"

namespace oxytorch::environment {
namespace {

void lazy_mode(const Judge& judge) {
  if (judge.value() != "1") return;
  const View& view = judge.view;
  for (const char* other : {"PT_HPU_ENABLE_COMPILED_AUTOGRAD", "PT_HPU_TC_MODE"}) {
    if (view.on(other)) {
      judge.contradicting(kError, other,
                          "excludes torch.compile, which " + judge.other(other) + " is for: set PT_HPU_LAZY_MODE=0.");
      return;
    }
  }
  const auto dynamo = view.get("ACCELERATE_DYNAMO_BACKEND");
  if (dynamo && lower(*dynamo) != "no" && !dynamo->empty()) {
    judge.contradicting(kError, "ACCELERATE_DYNAMO_BACKEND",
                        "excludes torch.compile, which " + judge.other("ACCELERATE_DYNAMO_BACKEND") +
                            " asks for: set PT_HPU_LAZY_MODE=0.");
  } else if (view.context.compile.value_or(false)) {
    judge.contradicting(kError, "torch.compile", "excludes torch.compile, which the program uses: set 0.");
  }
}

bool eager(const View& view) { return view.get("PT_HPU_LAZY_MODE") == "0"; }

void lazy_only(const Judge& judge) {
  if (eager(judge.view))
    judge.contradicting(kNote, "PT_HPU_LAZY_MODE",
                        "has an effect in lazy mode only, and " + judge.other("PT_HPU_LAZY_MODE") + ": unset one.");
}

void compound_op_size(const Judge& judge) {
  lazy_only(judge);
  const auto size = whole(judge.value());
  if (size && *size < 1'000'000 && !eager(judge.view)) {
    judge.harmful(
        kNote,
        "cuts lazy graphs after so many operators, where the default is no limit: unset it unless the model needs it.");
  }
}

void recipe_cache(const Judge& judge) {
  for (const char* old : {"PT_RECIPE_CACHE_PATH", "PT_CACHE_FOLDER_SIZE_MB", "PT_CACHE_FOLDER_DELETE"}) {
    if (judge.view.has(old)) {
      judge.contradicting(kWarning, old, "takes the place of " + judge.other(old) + ": unset the old one.");
      return;
    }
  }
}

void compile_only(const Judge& judge) {
  if (judge.on()) judge.harmful(kError, "never launches what it compiles, so that results are garbage: unset it.");
}

void pool_strategy(const Judge& judge) {
  if (judge.value() == "0")
    judge.harmful(kNote, "turns the memory pool off, so that each allocation goes to the driver: unset it.");
}

void gaudi_log_level(const Judge& judge) {
  const auto level = whole(judge.value());
  if (level && *level <= 1)
    judge.harmful(kWarning, "logs so much that it slows the run down: set 4 or unset it once the fault is found.", "4");
}

void graph_visualization(const Judge& judge) {
  if (judge.on()) judge.harmful(kNote, "writes each compiled graph to disk: unset it once you have seen them.");
}

void sync_for_debugging(const Judge& judge) {
  const bool async = judge.assignment.name == "PT_ENABLE_HABANA_STREAMASYNC";
  if (judge.on() != async)
    judge.harmful(kWarning, "makes the host wait for the device: unset it once the fault is found.");
}

void over_ofi(const Judge& judge) {
  if (judge.on())
    judge.harmful(
        kNote, "turns detection of the network off and goes through host memory: unset it unless detection is wrong.",
        "", kHostNicPage);
}

constexpr Rule kGaudiRules[] = {
    {"PT_HPU_LAZY_MODE", lazy_mode},
    {"PT_HPU_MAX_COMPOUND_OP_SIZE", compound_op_size},
    {"PT_HPU_ENABLE_LAZY_COLLECTIVES", lazy_only},
    {"PT_HPU_ENABLE_WEIGHT_CPU_PERMUTE", lazy_only},
    {"PT_HPU_ENABLE_WEIGHT_HPU_PERMUTE", lazy_only},
    {"PT_HPU_RECIPE_CACHE_CONFIG", recipe_cache},
    {"PT_COMPILE_ONLY_MODE", compile_only},
    {"PT_HPU_POOL_STRATEGY", pool_strategy},
    {"LOG_LEVEL_ALL", gaudi_log_level},
    {"LOG_LEVEL_ALL_PT", gaudi_log_level},
    {"GRAPH_VISUALIZATION", graph_visualization},
    {"PT_HPU_SYNC_LAUNCH", sync_for_debugging},
    {"PT_HPU_DISABLE_ASYNC_COLLECTIVE", sync_for_debugging},
    {"PT_ENABLE_HABANA_STREAMASYNC", sync_for_debugging},
    {"HCCL_OVER_OFI", over_ofi},
};

}  // namespace

std::span<const Rule> gaudi_rules() { return kGaudiRules; }

}  // namespace oxytorch::environment
