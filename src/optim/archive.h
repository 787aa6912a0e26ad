/// torch::optim's archive layout, with what the tail keeps besides.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "oxytorch/optim/optimizer.h"
#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

/// Writes the options of `groups`, all of one class, and the state of `tail`, whose parameters are theirs.
void write_archive(torch::serialize::OutputArchive& archive, const ParamGroups& groups, const StepTail& tail);

struct ArchivedOptimizer {
  std::vector<std::unique_ptr<TailOptimizerOptions>> options;  ///< of each group; those of `groups` where not archived
  std::vector<ParamState> states;                              ///< of each parameter, on its device
};

/// Throws Error(InvalidArgument) for an archive of another class, or for other parameters than those of `groups`.
ArchivedOptimizer read_archive(torch::serialize::InputArchive& archive, const ParamGroups& groups);

}  // namespace oxytorch::optim
