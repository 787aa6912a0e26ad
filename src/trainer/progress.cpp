#include "trainer/progress.h"

#include <unistd.h>

#include <cstdio>

namespace oxytorch {

ProgressLine::ProgressLine(const std::string& setting, std::int64_t max_steps)
    : on_(setting == "on" || (setting == "auto" && isatty(STDERR_FILENO) == 1)), max_steps_(max_steps) {}

ProgressLine::~ProgressLine() {
  if (written_) std::fputc('\n', stderr);
}

void ProgressLine::show(std::int64_t epoch, std::int64_t steps, const at::Tensor& loss) {
  const auto now = std::chrono::steady_clock::now();
  if (!on_ || now < next_) return;
  next_ = now + std::chrono::milliseconds(500);
  written_ = true;
  const std::string total = max_steps_ > 0 ? "/" + std::to_string(max_steps_) : "";
  std::fprintf(stderr, "\rtraining  epoch %lld  step %lld%s  loss %.4g   ", static_cast<long long>(epoch + 1),
               static_cast<long long>(steps), total.c_str(), loss.item<double>());
  std::fflush(stderr);
}

}  // namespace oxytorch
