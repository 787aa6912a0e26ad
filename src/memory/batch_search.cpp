#include "oxytorch/memory/batch_search.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <limits>
#include <new>
#include <typeinfo>

#include "memory/aligned.h"
#include "oxytorch/error.h"
#include "oxytorch/statistics.h"
#include "oxytorch/units.h"

namespace oxytorch {
namespace {

constexpr double kSlower = 1.02;  // a doubled batch must give so many times the samples a second to be worth another

std::string formatted(const char* how, double value) {
  char text[48];
  std::snprintf(text, sizeof text, how, value);
  return text;
}

/// What another batch size does to convergence.
std::string convergence(const BatchPlan& plan) {
  std::string change =
      "A batch k times as large makes 1/k as many updates an epoch, with a k-th of the gradient's variance";
  if (plan.current && *plan.current != plan.fastest) {
    const double less = static_cast<double>(*plan.current) / static_cast<double>(plan.fastest);
    const auto times = formatted("%.3g", less);
    change = "A batch of " + std::to_string(plan.fastest) + " in place of " + std::to_string(*plan.current) +
             " makes " + times + " times as many updates an epoch, with " + times + " times the gradient's variance";
  }
  return change +
         ": the run converges otherwise, and may need more epochs. Learning rates are commonly scaled with the batch "
         "(SGD) or with its square root (Adam); nothing was changed here. split(batch) keeps the batch by accumulating "
         "over pieces that fit.";
}

}  // namespace

std::pair<std::int64_t, std::int64_t> BatchPlan::split(std::int64_t batch) const {
  OXY_CHECK(batch >= 1, InvalidArgument, "batch is ", batch, ", expected at least 1.");
  std::int64_t pieces = 1;
  while (batch % pieces != 0 || batch / pieces > largest) ++pieces;
  return {batch / pieces, pieces};
}

std::string BatchPlan::table() const {
  std::vector<std::vector<std::string>> rows{{"batch", "fits", "peak", "step", "samples/s"}};
  if (samples) rows.front().emplace_back("updates/epoch");
  for (const auto& trial : trials) {
    rows.push_back({std::to_string(trial.size), trial.fits ? "yes" : "no",
                    trial.peak_bytes ? format_size(*trial.peak_bytes) : "-",
                    trial.step_seconds ? formatted("%.4g ms", 1e3 * *trial.step_seconds) : "-",
                    trial.step_seconds ? formatted("%.4g", trial.samples_per_second()) : "-"});
    if (samples) rows.back().push_back(std::to_string((*samples + trial.size - 1) / trial.size));
  }
  auto text = aligned(std::move(rows));
  for (const auto& trial : trials) {
    if (!trial.reason.empty()) text += std::to_string(trial.size) + ": " + trial.reason + '\n';
  }
  return text + "Limit " + format_size(limit_bytes) + ", " + formatted("%.0f%%", 100 * headroom) +
         " of it left free. Largest that ran: " + std::to_string(largest) + "; fastest: " + std::to_string(fastest) +
         ".\n" + convergence(*this);
}

BatchSearch::BatchSearch(const BatchSearchOptions& options, std::uint64_t limit, std::uint64_t base)
    : options_(options),
      limit_(limit),
      base_(base),
      usable_(std::floor(static_cast<double>(limit) * (1 - options.headroom))) {
  OXY_CHECK(options.headroom >= 0 && options.headroom < 1, InvalidArgument, "headroom is ", options.headroom,
            ", expected a share from 0 up to but not including 1.");
  OXY_CHECK(options.multiple >= 1 && options.start >= 1 && options.start % options.multiple == 0, InvalidArgument,
            "start is ", options.start, " and multiple ", options.multiple,
            "; start must be a positive multiple of multiple.");
  OXY_CHECK(options.most >= options.start, InvalidArgument, "most is ", options.most,
            ", expected at least start, which is ", options.start, '.');
  OXY_CHECK(options.resolution >= 0, InvalidArgument, "resolution is ", options.resolution, ", expected 0 or more.");
  good_ = options.start;
  bad_ = (options.most / options.multiple + 1) * options.multiple;
}

std::optional<std::int64_t> BatchSearch::next() {
  pending_.reset();
  if (trials_.empty()) {
    pending_ = options_.start;
  } else if (options_.curve) {
    const auto doubled = 2 * good_;
    if (!refused_ && idle_ < 2 && doubled <= options_.most && predicted(doubled) <= usable_) pending_ = doubled;
  } else {
    const auto close = static_cast<std::int64_t>(static_cast<double>(good_) * options_.resolution) / options_.multiple *
                       options_.multiple;
    if (bad_ - good_ > std::max(options_.multiple, close)) {
      pending_ = std::min(good_ + stride(), bad_ - options_.multiple);
      guided_ = !guided_;
    }
  }
  return pending_;
}

/// How far beyond the last that fits to try: to where memory is predicted to end, or else where the bounds close fast.
/// The prediction has every second turn: alone it would creep where memory grows in jumps.
std::int64_t BatchSearch::stride() const {
  const auto room = bad_ - good_, multiple = options_.multiple;
  const double ahead = predicted(good_), slope = predicted(good_ + 1) - ahead;
  const double reach = slope > 0 ? (usable_ - ahead) / slope : std::numeric_limits<double>::infinity();
  if (!refused_ && reach >= static_cast<double>(good_)) return good_;  // doubled
  const auto whole = static_cast<std::int64_t>(std::min(reach, static_cast<double>(room))) / multiple * multiple;
  if (!guided_ && multiple <= whole && whole < room) return whole;
  return std::max(multiple, (refused_ ? room / 2 : good_ / 8) / multiple * multiple);
}

/// Peak of a size not run yet: on from the largest that fits, as steeply as memory has grown so far.
double BatchSearch::predicted(std::int64_t size) const {
  double at = 0, bytes = static_cast<double>(base_), slope = 0;
  for (const auto& trial : trials_) {
    if (!trial.fits || !trial.peak_bytes) continue;
    const auto here = static_cast<double>(trial.size), peak = static_cast<double>(*trial.peak_bytes);
    slope = std::max(slope, (peak - bytes) / (here - at));
    at = here;
    bytes = peak;
  }
  return bytes + slope * (static_cast<double>(size) - at);
}

void BatchSearch::ran(std::uint64_t peak_bytes, std::span<const double> step_seconds) {
  OXY_CHECK(pending_, InvalidState, "no size is being run: call next() first.");
  BatchTrial trial{.size = *pending_, .fits = static_cast<double>(peak_bytes) <= usable_};
  trial.peak_bytes = peak_bytes;
  trial.step_seconds = median(step_seconds);
  if (!trial.fits) {
    trial.reason = "took " + format_size(peak_bytes) + ", over the " +
                   format_size(static_cast<std::uint64_t>(usable_)) + " that may be used";
  }
  note(std::move(trial));
}

void BatchSearch::ran_out(const std::string& why) {
  OXY_CHECK(pending_, InvalidState, "no size is being run: call next() first.");
  const auto line = why.substr(0, why.find('\n'));
  BatchTrial trial{.size = *pending_, .fits = false};
  trial.reason = "ran out of memory (" + line.substr(0, 120) + ")";
  note(std::move(trial));
}

void BatchSearch::note(BatchTrial trial) {
  const auto size = *std::exchange(pending_, std::nullopt);
  OXY_CHECK(trial.fits || !trials_.empty(), OutOfMemory, "a batch of ", size, ' ', trial.reason, ", of a limit of ",
            format_size(limit_), "; raise limit=, or start= from a smaller batch.");
  const double rate = trial.samples_per_second();
  if (trial.fits) {
    if (!trials_.empty()) idle_ = rate < kSlower * best_ ? idle_ + 1 : 0;
    best_ = std::max(best_, rate);
    good_ = size;
  } else {
    bad_ = size;
    refused_ = true;
  }
  const auto place = std::find_if(trials_.begin(), trials_.end(), [&](const auto& other) { return other.size > size; });
  trials_.insert(place, std::move(trial));
}

BatchPlan BatchSearch::plan(std::optional<std::int64_t> samples, std::optional<std::int64_t> current) const {
  OXY_CHECK(!trials_.empty(), InvalidState, "no batch was run yet.");
  BatchPlan plan{.trials = trials_, .limit_bytes = limit_, .headroom = options_.headroom};
  plan.samples = samples;
  plan.current = current;
  double most = 0;
  for (const auto& trial : trials_) {
    if (!trial.fits) continue;
    plan.largest = trial.size;
    most = std::max(most, trial.samples_per_second());
  }
  for (const auto& trial : trials_) {
    if (!trial.fits || trial.samples_per_second() * kSlower < most) continue;
    plan.fastest = trial.size;
    break;
  }
  return plan;
}

bool is_out_of_memory(const std::exception& error) {
  if (const auto* const ours = dynamic_cast<const Error*>(&error); ours && ours->code() == ErrorCode::OutOfMemory)
    return true;
  // c10::OutOfMemoryError, which this layer does not know, may say it in other words.
  const std::string_view type = typeid(error).name();
  return type.find("OutOfMemoryError") != std::string_view::npos ||
         dynamic_cast<const std::bad_alloc*>(&error) != nullptr || says_out_of_memory(error.what());
}

bool says_out_of_memory(std::string_view message) {
  std::string lower(message);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* words :
       {"out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "alloc_failed"}) {
    if (lower.find(words) != std::string::npos) return true;
  }
  return false;
}

}  // namespace oxytorch
