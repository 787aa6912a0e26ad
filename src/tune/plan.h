/// What a Plan holds: the run, its certificate, and the guard that watches it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/guard.h"
#include "oxytorch/tune/run.h"

namespace oxytorch {

struct Plan::Impl {
  Impl(std::unique_ptr<tune::Run> run, tune::Certificate certificate, std::optional<tune::CertificateStore> store,
       tune::Kind widest, std::uint64_t seed);

  at::Tensor step(const Batch& batch);
  /// Puts in force what the guard wants for the next step; false where it was taken back for good.
  void decide(const Batch& batch);
  void compare(const Batch& batch);
  void roll_back(const std::string& reason);
  void revert();

  std::unique_ptr<tune::Run> run;
  tune::Certificate certificate;
  std::optional<tune::CertificateStore> store;
  std::vector<std::string> names;  // in force but for a step now and then
  std::optional<tune::Guard> guard;
  int waits = 0;  // steps whose end a device is waited for, as a check times them
};

}  // namespace oxytorch
