#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "optim/host_scalar.h"
#include "oxytorch/error.h"
#include "oxytorch/optim/stability.h"

namespace oxytorch::optim {
namespace {

constexpr std::int64_t kKept = 256;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
// A step number as two floats, each exact, for devices without wider types.
constexpr std::int64_t kStepUnit = 1 << 20;
enum Column { kStepHigh, kStepLow, kLossFlag, kNormFlag, kLoss, kNorm, kLossLimit, kNormLimit, kColumns };

void check(const SpikeOptions& o) {
  OXY_CHECK(o.window >= 8, InvalidArgument, "window is ", o.window, "; give at least 8 values to look back on.");
  OXY_CHECK(o.threshold > 0, InvalidArgument, "threshold is ", o.threshold, "; give a number of spreads above 0.");
  OXY_CHECK(o.floor >= 0 && std::isfinite(o.floor), InvalidArgument, "floor is ", o.floor,
            "; give a share of the median, 0 or above.");
  OXY_CHECK(o.warmup >= 2 && o.warmup <= o.window, InvalidArgument, "warmup is ", o.warmup,
            "; give between 2 and the window's ", o.window, " values.");
  OXY_CHECK(o.patience >= 1, InvalidArgument, "patience is ", o.patience, "; give at least 1 spike in a row.");
}

double middle(std::vector<double>& values) {
  const auto place = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

// The limit that follows from a history with NaN in empty places. limits_of() is the same of tensors.
double limit_of(const float* history, const SpikeOptions& o, std::vector<double>& values) {
  values.clear();
  bool positive = true;
  for (std::int64_t i = 0; i < o.window; ++i) {
    if (std::isnan(history[i])) continue;
    values.push_back(history[i]);
    positive = positive && history[i] > 0;
  }
  if (static_cast<std::int64_t>(values.size()) < o.warmup) return kInf;
  if (positive) {
    for (double& value : values) value = std::log(value);
  }
  const double median = middle(values);
  std::erase_if(values, [median](double value) { return value <= median; });
  double sum = 0;
  for (double& value : values) sum += value -= median;
  double spread = positive ? o.floor : o.floor * std::abs(median);
  if (!values.empty()) {
    const double mean = sum / static_cast<double>(values.size());
    spread = std::max({spread, 1.4826 * middle(values), 1.2533 * mean});
  }
  if (spread == 0) return kInf;  // a history of zeros has no measure
  const double limit = median + o.threshold * spread;
  return positive ? std::exp(limit) : limit;
}

// The element in the middle of the first `count` of each sorted row, NaN in an empty one.
at::Tensor middle(const at::Tensor& rows, const at::Tensor& count) {
  const at::Tensor sorted = std::get<0>(rows.sort(-1));  // NaN comes last
  return sorted.gather(-1, (count - 1).div(2, "floor").clamp_min(0));
}

// [2, window] history with NaN in empty places -> [2] limits.
at::Tensor limits_of(const at::Tensor& history, const SpikeOptions& o) {
  const at::Tensor valid = history.isfinite();
  const at::Tensor count = valid.sum(-1, /*keepdim=*/true);
  const at::Tensor positive = (history > 0).logical_or_(valid.logical_not()).all(-1, /*keepdim=*/true);
  const at::Tensor values = at::where(positive, history.log(), history);
  const at::Tensor median = middle(values, count);
  at::Tensor above = values - median;
  const at::Tensor is_above = above > 0;
  above = at::where(is_above, above, kNan);
  const at::Tensor above_count = is_above.sum(-1, /*keepdim=*/true);
  at::Tensor spread = at::maximum(middle(above, above_count).nan_to_num_(0).mul_(1.4826),
                                  (above.nansum(-1, /*keepdim=*/true) / above_count).nan_to_num_(0).mul_(1.2533));
  spread = at::maximum(spread, at::where(positive, o.floor, median.abs() * o.floor));
  const at::Tensor limit = spread * o.threshold + median;
  const at::Tensor unknown = (count < o.warmup).logical_or_(spread == 0);
  return at::where(unknown, kInf, at::where(positive, limit.exp(), limit)).squeeze(-1);
}

// Pinned where the device can; elsewhere the copies that go there wait.
at::Tensor host_zeros(at::IntArrayRef shape) {
  try {
    return at::zeros(shape, at::TensorOptions(at::kFloat).pinned_memory(true));
  } catch (const c10::Error&) {
    return at::zeros(shape, at::TensorOptions(at::kFloat));
  }
}

Spike read(const float* row) {
  Spike spike;
  spike.step = static_cast<std::int64_t>(row[kStepHigh]) * kStepUnit + static_cast<std::int64_t>(row[kStepLow]);
  spike.loss = row[kLossFlag] != 0;
  spike.grad_norm = row[kNormFlag] != 0;
  spike.loss_value = row[kLoss];
  spike.loss_limit = row[kLossLimit];
  spike.grad_norm_value = row[kNorm];
  spike.grad_norm_limit = row[kNormLimit];
  return spike;
}

// Spikes number `seen` + 1 and on of a log on the host, whose first row counts all.
std::vector<Spike> read_log(const at::Tensor& log, std::int64_t seen) {
  const float* rows = log.const_data_ptr<float>();
  const auto total = static_cast<std::int64_t>(rows[0]) * kStepUnit + static_cast<std::int64_t>(rows[1]);
  std::vector<Spike> found;
  for (std::int64_t i = std::max(seen, total - kKept); i < total; ++i) {
    found.push_back(read(rows + (1 + i % kKept) * kColumns));
  }
  return found;
}

}  // namespace

struct SpikeDetector::Impl {
  SpikeOptions options;
  at::Device device;
  at::Tensor history;  // fp32 [2, window], NaN where there is no value
  at::Tensor streak;   // fp32 [2], spikes in a row
  at::Tensor limits;   // fp32 [2]
  at::Tensor values;   // fp32 [2]: loss, norm
  at::Tensor counts;   // bool [2]: whether inf and NaN count
  at::Tensor loss_flag, loss_limit, norm_limit;
  // Row 0 holds the number of spikes; the last row takes what is no spike.
  at::Tensor log, row, places, total;
  at::Tensor host_log;
  std::optional<c10::Event> copied;
  bool pending = false;
  bool loss_counts = true, norm_counts = true;
  std::int64_t seen = 0;
  std::vector<Spike> queue;
  std::vector<double> scratch;
  bool on_host;

  Impl(const SpikeOptions& given, at::Device where)
      : options(given), device(where), on_host(where.is_cpu() && !given.force_composite) {
    const auto fp32 = at::TensorOptions(at::kFloat).device(device);
    history = at::full({2, options.window}, kNan, fp32);
    streak = at::zeros({2}, fp32);
    limits = at::full({2}, kInf, fp32);
    values = at::full({2}, kNan, fp32);
    counts = at::ones({2}, fp32.dtype(at::kBool));
    loss_flag = at::zeros({}, fp32);
    loss_limit = limits.select(0, 0);
    norm_limit = limits.select(0, 1);
    if (on_host) return;
    log = at::zeros({kKept + 2, kColumns}, fp32);
    row = at::zeros({kColumns}, fp32);
    places = at::arange(kKept + 2, fp32.dtype(at::kLong)).unsqueeze(1);
    total = at::zeros({}, fp32.dtype(at::kLong));
    if (!device.is_cpu()) {
      host_log = host_zeros({kKept + 2, kColumns});
      copied.emplace(device.type());
    }
  }

  at::Tensor flags(const at::Tensor& value, const at::Tensor& limit, const at::Tensor& count) const {
    const at::Tensor finite = value.isfinite();
    return (value > limit).logical_and_(finite).logical_or_(finite.logical_not().logical_and_(count));
  }

  // CPU: memory of the device is memory of the host, and one call does what the operators below do in sixty.
  void record_on_host(std::int64_t step, double norm, bool scaled) {
    auto* value = values.mutable_data_ptr<float>();
    auto* limit = limits.mutable_data_ptr<float>();
    auto* in_row = streak.mutable_data_ptr<float>();
    value[1] = static_cast<float>(norm);
    const auto flag = [&](int i) {
      return std::isfinite(value[i]) ? value[i] > limit[i] : i == 0 ? loss_counts : !scaled;
    };
    const Spike spike{step, flag(0), flag(1), value[0], limit[0], value[1], limit[1]};
    if (spike.loss || spike.grad_norm) queue.push_back(spike);
    for (int i = 0; i < 2; ++i) {
      const bool flagged = flag(i);
      auto* past = history.mutable_data_ptr<float>() + i * options.window;
      if (std::isfinite(value[i])) in_row[i] = flagged ? in_row[i] + 1 : 0;
      const bool anew = in_row[i] >= static_cast<float>(options.patience);
      if (anew) {
        std::fill_n(past, options.window, static_cast<float>(kNan));
        in_row[i] = 0;
      }
      const bool refused = (flagged && !anew) || !std::isfinite(value[i]);
      past[step % options.window] = refused ? static_cast<float>(kNan) : value[i];
      limit[i] = static_cast<float>(limit_of(past, options, scratch));
    }
  }

  void count_nonfinite(std::int64_t series, bool& now, bool wanted) {
    if (now == wanted) return;
    counts.select(0, series).fill_(wanted);
    now = wanted;
  }

  void fetch(bool wait) {
    if (!pending) return;
    if (wait) copied->synchronize();
    if (!wait && !copied->query()) return;
    pending = false;
    take(host_log);
  }

  void take(const at::Tensor& host) {
    for (Spike& spike : read_log(host, seen)) queue.push_back(spike);
    const float* rows = host.const_data_ptr<float>();
    seen = static_cast<std::int64_t>(rows[0]) * kStepUnit + static_cast<std::int64_t>(rows[1]);
  }

  void send() {
    if (device.is_cpu()) return take(log);
    if (pending) return;
    host_log.copy_(log, /*non_blocking=*/true);
    copied->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    pending = true;
  }
};

SpikeDetector::SpikeDetector(const SpikeOptions& options, at::Device device) {
  check(options);
  impl_ = std::make_unique<Impl>(options, device);
}
SpikeDetector::~SpikeDetector() = default;

const at::Tensor& SpikeDetector::loss_flag() const noexcept { return impl_->loss_flag; }
const at::Tensor& SpikeDetector::norm_limit() const noexcept { return impl_->norm_limit; }
const at::Tensor& SpikeDetector::loss_limit() const noexcept { return impl_->loss_limit; }

void SpikeDetector::judge(const at::Tensor& loss) {
  const at::NoGradGuard no_grad;
  Impl& s = *impl_;
  OXY_CHECK(!loss.defined() || loss.numel() == 1, InvalidArgument, "the loss has shape ", loss.sizes(),
            "; give one number, such as its mean.");
  const bool readable =
      loss.defined() && loss.is_cpu() && (loss.scalar_type() == at::kFloat || loss.scalar_type() == at::kDouble);
  if (s.on_host && (readable || !loss.defined())) {
    const auto value = static_cast<float>(loss.defined() ? host_scalar(loss, "loss") : kNan);
    s.loss_counts = loss.defined();
    *s.values.mutable_data_ptr<float>() = value;
    const bool flag = std::isfinite(value) ? value > *s.limits.const_data_ptr<float>() : s.loss_counts;
    set_host_scalar(s.loss_flag, flag ? 1 : 0);
    return;
  }
  at::Tensor value = s.values.select(0, 0);
  if (loss.defined()) {
    value.copy_(loss.detach().reshape({}), /*non_blocking=*/true);
  } else {
    value.fill_(kNan);
  }
  s.count_nonfinite(0, s.loss_counts, loss.defined());
  s.loss_flag.copy_(s.flags(value, s.loss_limit, s.counts.select(0, 0)));
}

void SpikeDetector::record(std::int64_t step, const at::Tensor& grad_norm, bool scaled) {
  const at::NoGradGuard no_grad;
  Impl& s = *impl_;
  if (s.on_host) return s.record_on_host(step, host_scalar(grad_norm, "grad_norm"), scaled);
  s.values.select(0, 1).copy_(grad_norm.detach().reshape({}), /*non_blocking=*/true);
  s.count_nonfinite(1, s.norm_counts, !scaled);
  const at::Tensor finite = s.values.isfinite();
  const at::Tensor flags = s.flags(s.values, s.limits, s.counts);

  s.row.select(0, kStepHigh).fill_(step / kStepUnit);
  s.row.select(0, kStepLow).fill_(step % kStepUnit);
  s.row.slice(0, kLossFlag, kLoss).copy_(flags);
  s.row.slice(0, kLoss, kLossLimit).copy_(s.values);
  s.row.slice(0, kLossLimit, kColumns).copy_(s.limits);
  const at::Tensor any = flags.any();
  const at::Tensor place = at::where(any, s.total.remainder(kKept) + 1, kKept + 1);
  s.log.copy_(at::where(s.places == place, s.row, s.log));
  s.total.add_(any);
  s.log[0][0].copy_(s.total.div(kStepUnit, "floor"));
  s.log[0][1].copy_(s.total.remainder(kStepUnit));

  // A finite value that is no spike ends a streak; inf and NaN neither end nor make one, and are never learnt.
  s.streak.copy_(at::where(flags.logical_and(finite), s.streak + 1, at::where(finite, 0, s.streak)));
  const at::Tensor anew = s.streak >= s.options.patience;
  s.history.masked_fill_(anew.unsqueeze(1), kNan);
  s.streak.masked_fill_(anew, 0);
  const at::Tensor refused = flags.logical_and(anew.logical_not()).logical_or_(finite.logical_not());
  s.history.select(1, step % s.options.window).copy_(at::where(refused, kNan, s.values));
  s.limits.copy_(limits_of(s.history, s.options));
  s.fetch(/*wait=*/false);
  s.send();
}

std::vector<Spike> SpikeDetector::arrived(bool wait) {
  impl_->fetch(wait);
  return std::exchange(impl_->queue, {});
}

std::vector<Spike> SpikeDetector::drain() {
  if (!impl_->on_host) {
    impl_->pending = false;
    impl_->take(impl_->log.cpu());
  }
  return std::exchange(impl_->queue, {});
}

std::vector<at::Tensor> SpikeDetector::state() const { return {impl_->history, impl_->streak, impl_->limits}; }

}  // namespace oxytorch::optim
