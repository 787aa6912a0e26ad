/// SIGTERM and SIGINT as a wish to stop, while fit runs.
#pragma once

#include <array>
#include <csignal>
#include <cstddef>

namespace oxytorch {

/// Turns SIGTERM and SIGINT into a wish to stop; a second one acts as before.
class StopSignals {
 public:
  StopSignals() {
    pending = 0;
    struct sigaction action {};
    action.sa_handler = [](int number) { pending = number; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    for (std::size_t i = 0; i < kNumbers.size(); ++i) sigaction(kNumbers[i], &action, &before_[i]);
  }
  ~StopSignals() {
    for (std::size_t i = 0; i < kNumbers.size(); ++i) sigaction(kNumbers[i], &before_[i], nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  [[nodiscard]] static const char* received() {
    return pending == SIGTERM ? "SIGTERM" : pending == SIGINT ? "SIGINT" : nullptr;
  }

 private:
  static constexpr std::array<int, 2> kNumbers{SIGTERM, SIGINT};
  static inline volatile std::sig_atomic_t pending = 0;
  std::array<struct sigaction, 2> before_{};
};

}  // namespace oxytorch
