#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "data/file.h"
#include "data/group_order.h"
#include "oxytorch/data/order.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr std::int64_t kMostSamples = std::int64_t{1} << 60;  // sums of a few sizes do not overflow

/// What a key is for: numbers for one thing never repeat those for another.
enum class KeyUse : std::uint64_t { Augmentation, Order, Groups, Draws, Mixture };

std::uint64_t first_word64(const PhiloxBlock& block) { return std::uint64_t{block.word[0]} << 32 | block.word[1]; }

std::uint64_t epoch_key(std::uint64_t seed, std::uint64_t epoch, KeyUse use) {
  return first_word64(philox(seed, epoch, static_cast<std::uint64_t>(use)));
}

/// The order of the whole set in an epoch.
Permutation epoch_order(std::int64_t size, std::uint64_t epoch, std::uint64_t seed) {
  return {size, epoch_key(seed, epoch, KeyUse::Order)};
}

}  // namespace

Permutation group_order(std::int64_t size, std::int64_t group, std::uint64_t epoch, std::uint64_t seed) {
  return {size, first_word64(philox(epoch_key(seed, epoch, KeyUse::Groups), 0, static_cast<std::uint64_t>(group)))};
}

namespace {

void check_sampler_size(std::int64_t size) {
  OXY_CHECK(size >= 0 && size <= kMostSamples, InvalidArgument, "a sampler cannot have ", size, " samples; give 0 to ",
            kMostSamples, ".");
}

void check_sampler_option(const char* what, std::int64_t value) {
  OXY_CHECK(value >= 1, InvalidArgument, what, " is ", value, "; give 1 or more.");
}

/// Checks what all samplers are asked for.
class CheckedSampler : public Sampler {
 public:
  CheckedSampler(std::int64_t size, std::string fingerprint) : size_(size), fingerprint_(std::move(fingerprint)) {}
  [[nodiscard]] std::int64_t size() const noexcept final { return size_; }
  [[nodiscard]] std::string fingerprint() const final { return fingerprint_; }

  [[nodiscard]] std::int64_t at(std::int64_t position, std::uint64_t epoch, std::uint64_t seed) const final {
    OXY_CHECK(position >= 0 && position < size_, OutOfRange, "position ", position, " is outside of an epoch of ",
              size_, " samples.");
    return draw(position, epoch, seed);
  }

  [[nodiscard]] std::optional<Draw> next(std::int64_t sample, const Draw& from, std::uint64_t seed) const override {
    if (sample < 0 || sample >= size_) return std::nullopt;
    for (const auto epoch : {from.epoch, from.epoch + 1}) {
      const std::int64_t found = find(sample, epoch, seed);
      if (found < 0) break;
      if (epoch > from.epoch || found >= from.position) return Draw{epoch, found};
    }
    return std::nullopt;
  }

 private:
  /// The sample at a position that is inside.
  [[nodiscard]] virtual std::int64_t draw(std::int64_t position, std::uint64_t epoch, std::uint64_t seed) const = 0;
  /// The one position of a sample of [0, size()) in an epoch; -1 where it is not known.
  [[nodiscard]] virtual std::int64_t find(std::int64_t /*sample*/, std::uint64_t /*epoch*/,
                                          std::uint64_t /*seed*/) const {
    return -1;
  }

  std::int64_t size_;
  std::string fingerprint_;
};

class SequentialSampler final : public CheckedSampler {
 public:
  explicit SequentialSampler(std::int64_t size)
      : CheckedSampler(size, fingerprint_of({"sequential", std::to_string(size)})) {}

 private:
  [[nodiscard]] std::int64_t draw(std::int64_t position, std::uint64_t, std::uint64_t) const override {
    return position;
  }
  [[nodiscard]] std::int64_t find(std::int64_t sample, std::uint64_t, std::uint64_t) const override { return sample; }
};

class ShuffledSampler final : public CheckedSampler {
 public:
  explicit ShuffledSampler(std::int64_t size)
      : CheckedSampler(size, fingerprint_of({"shuffled", std::to_string(size)})) {}

 private:
  [[nodiscard]] std::int64_t draw(std::int64_t position, std::uint64_t epoch, std::uint64_t seed) const override {
    return epoch_order(size(), epoch, seed)(position);
  }
  [[nodiscard]] std::int64_t find(std::int64_t sample, std::uint64_t epoch, std::uint64_t seed) const override {
    return epoch_order(size(), epoch, seed).position_of(sample);
  }
};

/// Blocks stand in an order of their own, `window` of them make a group, and each group is shuffled. One block may be
/// short, that at the set's end; it stands anywhere, and what stands behind it comes earlier by what it lacks.
class BlockSampler final : public CheckedSampler {
 public:
  BlockSampler(std::int64_t size, std::int64_t block, std::int64_t window)
      : CheckedSampler(size, fingerprint_of({"shuffled_blocks", std::to_string(size), std::to_string(block),
                                             std::to_string(window)})),
        block_(std::clamp<std::int64_t>(size, 1, block)),
        blocks_(size / block_ + (size % block_ != 0)),
        window_(std::clamp<std::int64_t>(blocks_, 1, window)),
        lacks_(size % block_ == 0 ? 0 : block_ - size % block_) {}

 private:
  /// One epoch: the order of its blocks, and where the short one stands.
  struct Epoch {
    Permutation order;
    std::int64_t short_place;
  };

  /// One group: where it begins, its samples, and where in it the short block ends (behind the group where it has
  /// none).
  struct Group {
    std::int64_t first, size, short_end;
  };

  [[nodiscard]] Epoch epoch_of(std::uint64_t epoch, std::uint64_t seed) const {
    const auto order = epoch_order(blocks_, epoch, seed);
    return {order, lacks_ == 0 ? blocks_ : order.position_of(blocks_ - 1)};
  }

  [[nodiscard]] Group group_of(std::int64_t group, std::int64_t short_place) const {
    const std::int64_t place = group * window_, count = std::min(window_, blocks_ - place);
    const bool holds_short = short_place >= place && short_place < place + count;
    return {place * block_ - (short_place < place ? lacks_ : 0), count * block_ - (holds_short ? lacks_ : 0),
            holds_short ? (short_place - place + 1) * block_ - lacks_ : count * block_};
  }

  [[nodiscard]] std::int64_t draw(std::int64_t position, std::uint64_t epoch, std::uint64_t seed) const override {
    const auto [order, short_place] = epoch_of(epoch, seed);
    const std::int64_t span = window_ * block_;
    const bool behind_short = position >= (short_place / window_ + 1) * span - lacks_;
    const std::int64_t group = (behind_short ? position + lacks_ : position) / span;
    const auto found = group_of(group, short_place);
    std::int64_t inside = group_order(found.size, group, epoch, seed)(position - found.first);
    if (inside >= found.short_end) inside += lacks_;
    return order(group * window_ + inside / block_) * block_ + inside % block_;
  }

  [[nodiscard]] std::int64_t find(std::int64_t sample, std::uint64_t epoch, std::uint64_t seed) const override {
    const auto [order, short_place] = epoch_of(epoch, seed);
    const std::int64_t place = order.position_of(sample / block_), group = place / window_;
    const auto found = group_of(group, short_place);
    std::int64_t inside = (place - group * window_) * block_ + sample % block_;
    if (short_place < place && short_place >= group * window_) inside -= lacks_;
    return found.first + group_order(found.size, group, epoch, seed).position_of(inside);
  }

  std::int64_t block_, blocks_, window_, lacks_;
};

/// The greatest of weights that can be drawn by.
double greatest_weight(const std::vector<double>& weights) {
  double most = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    OXY_CHECK(std::isfinite(weights[i]) && weights[i] >= 0, InvalidArgument, "weight ", i, " is ", weights[i],
              "; weights are finite numbers that are not negative.");
    most = std::max(most, weights[i]);
  }
  OXY_CHECK(most > 0, InvalidArgument, "all of the ", weights.size(), " weights are 0; at least one must be positive.");
  return most;
}

std::string bytes_of(const auto& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(numbers[0])};
}

/// Each of n equal columns holds its own sample up to a share, and above it one other.
class WeightedSampler final : public CheckedSampler {
 public:
  WeightedSampler(const std::vector<double>& weights, std::int64_t draws)
      : CheckedSampler(draws, fingerprint_of({"weighted", std::to_string(draws), bytes_of(weights)})), share_(weights) {
    const double most = greatest_weight(weights);
    double sum = 0;
    for (auto& share : share_) sum += share /= most;  // of the greatest, so that no sum overflows
    for (auto& share : share_) share *= static_cast<double>(share_.size()) / sum;
    fill_columns(weights);
  }

 private:
  void fill_columns(const std::vector<double>& weights) {
    std::vector<std::int64_t> low, high;
    for (std::size_t i = 0; i < share_.size(); ++i)
      (share_[i] < 1 ? low : high).push_back(static_cast<std::int64_t>(i));
    other_.resize(share_.size());
    while (!low.empty() && !high.empty()) {
      const auto poor = static_cast<std::size_t>(low.back()), rich = static_cast<std::size_t>(high.back());
      low.pop_back();
      other_[poor] = high.back();
      share_[rich] = share_[rich] + share_[poor] - 1;
      if (share_[rich] < 1) {
        low.push_back(high.back());
        high.pop_back();
      }
    }
    // What is left would be exactly 1 without rounding; what has no weight must not come of it.
    const auto heaviest = std::max_element(weights.begin(), weights.end()) - weights.begin();
    high.insert(high.end(), low.begin(), low.end());
    for (const auto index : high) {
      const auto i = static_cast<std::size_t>(index);
      share_[i] = weights[i] > 0 ? 1 : 0;
      other_[i] = heaviest;
    }
  }

  [[nodiscard]] std::int64_t draw(std::int64_t position, std::uint64_t epoch, std::uint64_t seed) const override {
    const auto block = philox(epoch_key(seed, epoch, KeyUse::Draws), 0, static_cast<std::uint64_t>(position));
    const auto column =
        static_cast<std::size_t>(static_cast<unsigned __int128>(first_word64(block)) * share_.size() >> 64);
    return uniform_double(block.word[2], block.word[3]) < share_[column] ? static_cast<std::int64_t>(column)
                                                                         : other_[column];
  }

  std::vector<double> share_;
  std::vector<std::int64_t> other_;
};

/// A tree of splits: at each the draws go to its left and right half of the sets as evenly as whole numbers can, which
/// tells in constant time how many of the first n went left (J. Bresenham, "Algorithm for computer control of a digital
/// plotter", 1965). A leaf counts the draws of its set, and passes over it one shuffled order after the other.
class MixedSampler final : public CheckedSampler {
 public:
  MixedSampler(const std::vector<std::int64_t>& sizes, const std::vector<double>& weights, std::int64_t draws)
      : CheckedSampler(draws, fingerprint_of({"mixed", std::to_string(draws), bytes_of(weights), bytes_of(sizes)})),
        sizes_(sizes) {
    OXY_CHECK(sizes.size() == weights.size(), InvalidArgument, "there are ", weights.size(), " weights for ",
              sizes.size(), " datasets; give one for each.");
    const double most = greatest_weight(weights);
    std::int64_t samples = 0;
    sums_.push_back(0);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      check_sampler_size(sizes[i]);
      OXY_CHECK(sizes[i] > 0 || weights[i] == 0, InvalidArgument, "dataset ", i, " has no samples and the weight ",
                weights[i], "; give it 0.");
      firsts_.push_back(samples);
      samples += sizes[i];
      check_sampler_size(samples);
      sums_.push_back(sums_.back() + weights[i] / most);
    }
  }

 private:
  using Wide = unsigned __int128;
  using Count = std::uint64_t;

  /// Sets [first, last) and the half of their draws that goes to [first, middle): of the first n of them the whole part
  /// of n * left + phase, in 1/2^62. Exact at a share of 0 and of 1, so that a half without a weight is never drawn
  /// from.
  struct Split {
    std::size_t middle;
    Count left, phase;

    [[nodiscard]] Count drawn_left(Count n) const { return static_cast<Count>((Wide{n} * left + phase) >> 62); }
    /// The number, among the draws of both halves, of a half's draw of this number.
    [[nodiscard]] Count number_of(Count drawn, bool of_left) const {
      if (of_left) return static_cast<Count>(((Wide{drawn + 1} << 62) - phase - 1) / left);
      return static_cast<Count>(((Wide{drawn} << 62) + phase) / ((Count{1} << 62) - left));
    }
  };

  [[nodiscard]] Split split(std::size_t first, std::size_t last, std::uint64_t seed) const {
    const auto middle = first + (last - first) / 2;
    const auto share = (sums_[middle] - sums_[first]) / (sums_[last] - sums_[first]);
    // Where in its period a split begins, by the seed alone: two runs do not draw alike, and epochs go on.
    return {middle, static_cast<Count>(std::lround(share * 0x1p62)), epoch_key(seed, middle, KeyUse::Mixture) >> 2};
  }

  [[nodiscard]] std::int64_t draw(std::int64_t position, std::uint64_t epoch, std::uint64_t seed) const override {
    auto number = number_of({epoch, position});
    std::size_t first = 0, last = sizes_.size();
    while (last - first > 1) {
      const auto at = split(first, last, seed);
      const auto before = at.drawn_left(number);
      const bool left = at.drawn_left(number + 1) > before;
      number = left ? before : number - before;
      (left ? last : first) = at.middle;
    }
    const auto samples = static_cast<Count>(sizes_[first]);
    return firsts_[first] + pass_order(first, number / samples, seed)(static_cast<std::int64_t>(number % samples));
  }

  [[nodiscard]] std::optional<Draw> next(std::int64_t sample, const Draw& from, std::uint64_t seed) const override {
    if (size() == 0 || sample < 0 || sample >= firsts_.back() + sizes_.back()) return std::nullopt;
    const auto set = static_cast<std::size_t>(std::upper_bound(firsts_.begin(), firsts_.end(), sample) -
                                              firsts_.begin() - 1);  // the last of those that begin there: not empty
    std::vector<std::pair<Split, bool>> path;                        // from the root to the set
    auto number = number_of(from);
    for (std::size_t first = 0, last = sizes_.size(); last - first > 1;) {
      const auto at = split(first, last, seed);
      const bool left = set < at.middle;
      if (left ? at.left == 0 : at.left == Count{1} << 62) return std::nullopt;  // never drawn from
      const auto before = at.drawn_left(number);
      number = left ? before : number - before;
      (left ? last : first) = at.middle;
      path.emplace_back(at, left);
    }
    // `number` draws of the set come before; of each pass over it one is the sample's.
    const auto samples = static_cast<Count>(sizes_[set]);
    const auto drawn_in = [&](Count pass) {
      return pass * samples + static_cast<Count>(pass_order(set, pass, seed).position_of(sample - firsts_[set]));
    };
    auto found = drawn_in(number / samples);
    if (found < number) found = drawn_in(number / samples + 1);
    for (auto at = path.rbegin(); at != path.rend(); ++at) found = at->first.number_of(found, at->second);
    return Draw{found / static_cast<Count>(size()), static_cast<std::int64_t>(found % static_cast<Count>(size()))};
  }

  /// Of a draw, in the stream that the epochs are parts of.
  [[nodiscard]] Count number_of(const Draw& draw) const {
    return draw.epoch * static_cast<Count>(size()) + static_cast<Count>(draw.position);
  }
  [[nodiscard]] Permutation pass_order(std::size_t set, Count pass, std::uint64_t seed) const {
    return group_order(sizes_[set], static_cast<std::int64_t>(set), pass, seed);
  }

  std::vector<std::int64_t> sizes_, firsts_;
  std::vector<double> sums_;  // of the weights before each set, and of all
};

/// A window of the shuffled order, sorted by length: numbers of its samples in the window. Made when it is first drawn
/// from.
struct SortedWindow {
  std::uint64_t seed, epoch;
  std::int64_t index;
  std::once_flag once;
  std::vector<std::uint32_t> places;
};

class BucketedSampler final : public CheckedSampler {
 public:
  BucketedSampler(std::vector<std::int32_t> lengths, std::int64_t batch, std::int64_t window)
      : CheckedSampler(static_cast<std::int64_t>(lengths.size()),
                       fingerprint_of({"bucketed", std::to_string(batch), std::to_string(window), bytes_of(lengths)})),
        lengths_(std::move(lengths)),
        batch_(std::clamp<std::int64_t>(size(), 1, batch)),
        window_((std::clamp(window, batch_, std::max(size(), batch_)) - 1) / batch_ * batch_ + batch_) {
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      OXY_CHECK(lengths_[i] >= 0, InvalidArgument, "length ", i, " is ", lengths_[i], "; lengths are not negative.");
    }
    OXY_CHECK(std::min(window_, size()) <= std::numeric_limits<std::uint32_t>::max(), InvalidArgument, "window is ",
              window, "; at most 4294967295 samples are sorted at once.");
  }

 private:
  static constexpr std::size_t kWindowsKept = 4;  // threads ahead may be one or two windows on, or in the next epoch

  [[nodiscard]] std::int64_t draw(std::int64_t position, std::uint64_t epoch, std::uint64_t seed) const override {
    const auto sorted = window_at(position / window_, epoch, seed);
    const auto place = sorted->places[static_cast<std::size_t>(position % window_)];
    return epoch_order(size(), epoch, seed)(sorted->index * window_ + place);
  }

  /// The window, from those that are kept or in the place of that which was not asked for longest.
  [[nodiscard]] std::shared_ptr<SortedWindow> window_at(std::int64_t index, std::uint64_t epoch,
                                                        std::uint64_t seed) const {
    std::shared_ptr<SortedWindow> found;
    {
      const std::scoped_lock lock(mutex_);
      auto it = std::find_if(kept_.begin(), kept_.end(), [&](const auto& window) {
        return window->index == index && window->epoch == epoch && window->seed == seed;
      });
      if (it == kept_.end()) {
        found = std::make_shared<SortedWindow>();
        found->seed = seed;
        found->epoch = epoch;
        found->index = index;
        if (kept_.size() == kWindowsKept) kept_.pop_back();
        it = kept_.insert(kept_.end(), found);
      }
      std::rotate(kept_.begin(), it, it + 1);
      found = kept_.front();
    }
    std::call_once(found->once,
                   [&] { sort(*found); });  // outside of the lock: others draw from other windows meanwhile
    return found;
  }

  void sort(SortedWindow& window) const {
    const std::int64_t first = window.index * window_, count = std::min(window_, size() - first);
    const auto order = epoch_order(size(), window.epoch, window.seed);
    std::vector<std::uint64_t> keys(static_cast<std::size_t>(count));  // length above, place below: ties stay shuffled
    for (std::int64_t place = 0; place < count; ++place) {
      const auto length = static_cast<std::uint64_t>(lengths_[static_cast<std::size_t>(order(first + place))]);
      keys[static_cast<std::size_t>(place)] = length << 32 | static_cast<std::uint64_t>(place);
    }
    std::sort(keys.begin(), keys.end());
    // Full batches come in random order. What fills none ends the epoch, cut from anywhere, so that no length is last
    // always.
    const std::int64_t full = count / batch_, rest = count % batch_;
    const auto batches = group_order(full, window.index, window.epoch, window.seed);
    PhiloxStream random(epoch_key(window.seed, window.epoch, KeyUse::Draws));
    const auto rest_before = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(full) + 1));
    window.places.resize(keys.size());
    for (std::int64_t place = 0; place < count; ++place) {
      const std::int64_t number = place / batch_;
      std::int64_t from = rest_before * batch_ + place - full * batch_;
      if (number < full) {
        const std::int64_t picked = batches(number);
        from = picked * batch_ + place % batch_ + (picked >= rest_before ? rest : 0);
      }
      window.places[static_cast<std::size_t>(place)] = static_cast<std::uint32_t>(keys[static_cast<std::size_t>(from)]);
    }
  }

  std::vector<std::int32_t> lengths_;
  std::int64_t batch_, window_;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<SortedWindow>> kept_;  // that asked for last first
};

}  // namespace

Sampler::~Sampler() = default;

std::optional<Draw> Sampler::next(std::int64_t, const Draw&, std::uint64_t) const { return std::nullopt; }

PhiloxStream sample_random(std::uint64_t seed, std::uint64_t epoch, std::int64_t sample) {
  return PhiloxStream(epoch_key(seed, epoch, KeyUse::Augmentation), static_cast<std::uint64_t>(sample));
}

std::shared_ptr<const Sampler> sequential(std::int64_t size) {
  check_sampler_size(size);
  return std::make_shared<SequentialSampler>(size);
}

std::shared_ptr<const Sampler> shuffled(std::int64_t size) {
  check_sampler_size(size);
  return std::make_shared<ShuffledSampler>(size);
}

std::shared_ptr<const Sampler> shuffled_blocks(std::int64_t size, std::int64_t block, std::int64_t window) {
  check_sampler_size(size);
  check_sampler_option("block", block);
  check_sampler_option("window", window);
  return std::make_shared<BlockSampler>(size, block, window);
}

std::shared_ptr<const Sampler> weighted(const std::vector<double>& weights, std::int64_t draws) {
  check_sampler_size(draws);
  return std::make_shared<WeightedSampler>(weights, draws);
}

std::shared_ptr<const Sampler> mixed(const std::vector<std::int64_t>& sizes, const std::vector<double>& weights,
                                     std::int64_t draws) {
  check_sampler_size(draws);
  return std::make_shared<MixedSampler>(sizes, weights, draws);
}

std::shared_ptr<const Sampler> bucketed(std::vector<std::int32_t> lengths, std::int64_t batch, std::int64_t window) {
  check_sampler_option("batch", batch);
  check_sampler_option("window", window);
  return std::make_shared<BucketedSampler>(std::move(lengths), batch, window);
}

}  // namespace oxytorch::data
