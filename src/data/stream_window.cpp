#include "data/stream_window.h"

#include <utility>

#include "data/group_order.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr int kMostFailures = 16;  // one after the other: a stream that only fails would never end

}  // namespace

Stream::~Stream() = default;

StreamWindow::StreamWindow(Stream& stream, std::int64_t window, std::uint64_t seed, std::int64_t epoch)
    : stream_(stream), window_(window), seed_(seed), epoch_(epoch) {
  stream_.begin(epoch);
}

std::optional<Drawn> StreamWindow::read() {
  if (ended_) return std::nullopt;
  Drawn drawn{.index = read_, .sample = {}, .failure = {}};
  try {
    auto sample = stream_.next();
    if (!sample) {
      ended_ = true;
      return std::nullopt;
    }
    const auto fields = stream_.schema().fields.size();
    OXY_CHECK(sample->size() == fields, InvalidArgument, "the sample has ", sample->size(), " fields, expected ",
              fields, ".");
    drawn.sample = *std::move(sample);
    failed_ = 0;
  } catch (const std::exception& error) {
    drawn.failure = failure_of(error);
    ended_ = ++failed_ == kMostFailures;
  }
  ++read_;
  return drawn;
}

std::optional<Drawn> StreamWindow::next() {
  if (window_ == 1) return read();
  if (given_ == held_.size()) {
    std::vector<Drawn> arrived;
    while (static_cast<std::int64_t>(arrived.size()) < window_) {
      auto one = read();
      if (!one) break;
      arrived.push_back(*std::move(one));
    }
    const auto order =
        group_order(static_cast<std::int64_t>(arrived.size()), windows_++, static_cast<std::uint64_t>(epoch_), seed_);
    held_.clear();
    given_ = 0;
    for (std::int64_t i = 0; i < order.size(); ++i) {
      held_.push_back(std::move(arrived[static_cast<std::size_t>(order(i))]));
    }
  }
  if (given_ == held_.size()) return std::nullopt;
  return std::move(held_[given_++]);
}

}  // namespace oxytorch::data
