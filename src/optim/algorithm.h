/// What the algorithms have in common, as a table: their running averages and the kernel rule of each.
#pragma once

#include <cstddef>

#include "oxytorch/kernels/codec.h"
#include "oxytorch/kernels/step_tail.h"
#include "oxytorch/optim/step_tail.h"

namespace oxytorch::optim {

constexpr std::size_t kMoments = 3;

struct Moment {
  const char* name = nullptr;
  kernels::StateCode code = kernels::StateCode::Signed;
};

struct AlgorithmTraits {
  const char* name;
  bool counts_steps;
  Moment moments[kMoments];
};

const AlgorithmTraits& traits(Algorithm algorithm) noexcept;

/// True where a group's options call for moment `index`.
bool wants_moment(Algorithm algorithm, const GroupOptions& options, std::size_t index) noexcept;

/// The kernels' rule; not for Muon.
kernels::Rule rule_of(Algorithm algorithm, const GroupOptions& options) noexcept;

/// Throws Error(InvalidArgument) naming group, hyperparameter, value and range.
void check_group(Algorithm algorithm, const GroupOptions& options, std::size_t group);

/// Throws Error(InvalidArgument) for options out of range and Error(NotSupported) for those that exclude each other.
void check_options(Algorithm algorithm, const TailOptions& options);

/// Muon's factor of the learning rate for a matrix of `rows` x `columns`.
double muon_rate_factor(AdjustLr adjust, std::int64_t rows, std::int64_t columns) noexcept;

}  // namespace oxytorch::optim
