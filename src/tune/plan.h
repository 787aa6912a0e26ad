/// What a Plan holds: the run, its certificate, and the watch over it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/watch.h"

namespace oxytorch {

struct Plan::Impl : tune::Watched {
  Impl(std::unique_ptr<tune::Run> run, tune::Certificate certificate, std::optional<tune::CertificateStore> store,
       tune::Kind widest, std::uint64_t seed);

  at::Tensor step(const Batch& batch);
  void revert();

  void activate(const std::vector<std::string>& strategies) override { run->bring(strategies); }
  tune::BothWays compare() override;

  std::unique_ptr<tune::Run> run;
  tune::Certificate certificate;
  std::optional<tune::CertificateStore> store;
  std::optional<tune::Watch> watch;
  const Batch* batch = nullptr;  // of the window under way, the first; valid while it is taken
  bool watched = false;          // the window under way
  double window_seconds = 0;
};

}  // namespace oxytorch
