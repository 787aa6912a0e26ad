#include "ops/linear_cross_entropy_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/product.h"
#include "ops/shares.h"
#include "ops/tiles.h"
#include "optim/dense.h"
#include "oxytorch/error.h"
#include "oxytorch/kernels/attention.h"
#include "oxytorch/kernels/cross_entropy.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::ElementType;
using kernels::kTile;
using kernels::kTileStep;
using kernels::Operand;
using kernels::Rows;
using kernels::TileFormat;

// Tokens whose logits are held at a time, in tiles; classes whose gradients are multiplied at a time: sums are then
// read and written once for 256 terms. Classes that are summed apart, at least and at most so many.
constexpr std::int64_t kTokenTiles = 4, kClassTiles = 4;
constexpr std::int64_t kTokens = kTokenTiles * kTile, kClasses = kClassTiles * kTile;
constexpr std::int64_t kRangeTiles = 8, kMostRanges = 32;

class Work {
 public:
  Work(const LinearCrossEntropy& call, std::array<bool, 3> wanted, std::int64_t counted)
      : call_(call),
        wanted_(wanted),
        input_(call.input.contiguous()),
        target_(call.target),
        tokens_(input_.size(0)),
        classes_(call.weight.size(0)),
        width_(round_up(input_.size(1), kTileStep)),
        format_(product_format(optim::element_type(input_).value())),
        // Operands of bfloat16 are read once for each chunk of tokens.
        weight_(dense(format_ == TileFormat::BFloat16 ? call.weight.to(at::kBFloat16) : call.weight)),
        range_tiles_(std::max(kRangeTiles, round_up((classes_.tiles + kMostRanges - 1) / kMostRanges, kClassTiles))),
        ranges_((classes_.tiles + range_tiles_ - 1) / range_tiles_),
        in_place_(width_ == input_.size(1) &&
                  weight_.scalar_type() == (format_ == TileFormat::BFloat16 ? at::kBFloat16 : at::kFloat)),
        counted_(counted) {
    if (call.bias.defined()) bias_ = call.bias.to(at::kFloat).contiguous();
  }

  LossAndGradients run() {
    const auto options = input_.options();
    const bool gradients = wanted_[0] || wanted_[1] || wanted_[2];
    const auto empty_if = [&](bool asked, at::IntArrayRef sizes, const Tensor& like) {
      return asked ? at::empty(sizes, options.dtype(type_of_gradient(like.scalar_type()))) : Tensor();
    };
    of_input_ = empty_if(wanted_[0], input_.sizes(), input_);
    Tensor of_weight = empty_if(wanted_[1], call_.weight.sizes(), call_.weight);
    Tensor of_bias = empty_if(wanted_[2], {classes_.count}, call_.weight);

    tokens_right_ = Packed(scratch_, format_, width_, kTokenTiles);
    tokens_transposed_ = Packed(scratch_, format_, width_, kTokenTiles);
    logits_ = scratch_.floats(round_up(classes_.tiles, kClassTiles) * kTokenTiles * kTile * kTile);
    states_.resize(static_cast<std::size_t>(ranges_ * kTokenTiles));
    plain_sums_.resize(static_cast<std::size_t>(ranges_ * kTokenTiles * kTile));
    if (wanted_[0]) {
      weight_transposed_ = Packed(scratch_, format_, width_, round_up(classes_.tiles, kClassTiles));
      partial_ = scratch_.floats(ranges_ * kTokenTiles * width_ * kTile);
      transpose_weight();
    }
    const bool sums_are_kept = wanted_[1] && of_weight.scalar_type() == at::kFloat && width_ == of_weight.size(1);
    if (wanted_[1]) {
      sum_weight_ = sums_are_kept ? of_weight.mutable_data_ptr<float>() : scratch_.floats(classes_.count * width_);
    }
    if (wanted_[2]) sum_bias_.assign(static_cast<std::size_t>(classes_.count), 0.0F);

    double loss = 0;
    for (std::int64_t first = 0; first < tokens_.tiles; first += kTokenTiles) {
      first_ = first;
      token_tiles_ = std::min(kTokenTiles, tokens_.tiles - first);
      load_tokens();
      over_ranges([&](std::int64_t range) { logits_of(range); });
      loss += finish_losses();
      if (!gradients) continue;
      over_ranges([&](std::int64_t range) { gradients_of(range); });
      if (wanted_[0]) store_input();
    }
    if (wanted_[1] && !sums_are_kept) store_weight(of_weight);
    if (wanted_[2]) {
      kernels::store_rows(sum_bias_.data(), 0, 1, classes_.count, 1, nullptr, optim::element_type(of_bias).value(),
                          of_bias.mutable_data_ptr(), 0);
    }
    return {reduced_loss(call_, loss, counted_), of_input_, of_weight, of_bias};
  }

 private:
  template <class Run>
  void over_ranges(const Run& run) const {
    share_out(ranges_, 1, [&](const auto& take) {
      const ProductScope products(format_);
      for (std::int64_t range; (range = take()) >= 0;) run(range);
    });
  }
  template <class Run>
  void over_tiles_of(std::int64_t range, const Run& run) const {
    const std::int64_t end = std::min(classes_.tiles, (range + 1) * range_tiles_);
    for (std::int64_t tile = range * range_tiles_; tile < end; ++tile) run(tile);
  }

  // Of kClassTiles tiles together, `width` rows of kClasses.
  void transpose_weight() {
    const bool paired = format_ == TileFormat::BFloat16;
    const std::int64_t words = kTile / (paired ? 2 : 1);
    at::parallel_for(0, classes_.tiles, 4, [&](std::int64_t begin, std::int64_t end) {
      Scratch scratch;
      const Packed plain(scratch, format_, width_, 2);
      for (std::int64_t tile = begin; tile < end; ++tile) {
        kernels::load_tile(format_, rows_of(weight_).part(classes_.begin(tile), classes_.used(tile)), kTile, width_,
                           plain[0]);
        if (paired) kernels::make_operand(format_, Operand::Right, plain[0], kTile, width_, plain[0], plain[1]);
        kernels::transpose_words(plain[paired ? 1 : 0], width_, words, width_,
                                 weight_transposed_[tile / kClassTiles * kClassTiles] + tile % kClassTiles * words * 4,
                                 kClassTiles * words);
      }
    });
  }

  void load_tokens() {
    at::parallel_for(0, token_tiles_, 1, [&](std::int64_t begin, std::int64_t end) {
      Scratch scratch;
      const Packed plain(scratch, format_, width_, 2);
      for (std::int64_t j = begin; j < end; ++j) {
        const std::int64_t tile = first_ + j, padded = tokens_.padded(tile);
        kernels::load_tile(format_, rows_of(input_).part(tokens_.begin(tile), tokens_.used(tile)), padded, width_,
                           plain[0]);
        kernels::make_operand(format_, Operand::Right, plain[0], padded, width_, plain[1], tokens_right_[j]);
        kernels::make_operand(format_, Operand::RightTransposed, plain[0], padded, width_, plain[1],
                              tokens_transposed_[j]);
      }
    });
  }

  // The tiles of one token tile that are multiplied together lie one after another.
  [[nodiscard]] float* logits(std::int64_t class_tile, std::int64_t j) const {
    const std::int64_t group = class_tile / kClassTiles * kTokenTiles + j;
    return logits_ + (group * kClassTiles + class_tile % kClassTiles) * kTile * kTile;
  }

  // Logits, and of each token the softmax over these classes.
  void logits_of(std::int64_t range) {
    Scratch scratch;
    Packed loaded;
    if (!in_place_) loaded = Packed(scratch, format_, width_, 1);
    alignas(64) float correction[kTile];
    for (std::int64_t j = 0; j < token_tiles_; ++j) {
      states_[static_cast<std::size_t>(range * kTokenTiles + j)].reset();
      std::fill_n(plain_sums_.begin() + (range * kTokenTiles + j) * kTile, kTile, 0.0);
    }
    over_tiles_of(range, [&](std::int64_t tile) {
      const Rows rows = rows_of(weight_).part(classes_.begin(tile), classes_.used(tile));
      const void* left = rows.data;
      std::int64_t stride = rows.stride;
      if (!in_place_) {
        kernels::load_tile(format_, rows, kTile, width_, loaded[0]);
        left = loaded[0];
        stride = width_;
      }
      const std::int64_t padded = classes_.padded(tile);
      for (std::int64_t j = 0; j < token_tiles_; ++j) {
        float* to = logits(tile, j);
        const std::int64_t columns = tokens_.padded(first_ + j);
        product(format_, rows.rows, columns, width_, left, stride, tokens_transposed_[j], kTile, to, kTile, false);
        if (bias_.defined()) add_bias(tile, to);
        if (call_.label_smoothing > 0) add_up(range, j, rows.rows, to);
        std::fill(to + rows.rows * kTile, to + padded * kTile, -kInfinity);
        kernels::softmax_tile(TileFormat::Float32, 1, padded, columns, to, nullptr,
                              states_[static_cast<std::size_t>(range * kTokenTiles + j)], correction, nullptr);
      }
    });
  }

  void add_bias(std::int64_t tile, float* to) const {
    const float* bias = bias_.const_data_ptr<float>() + classes_.begin(tile);
    for (std::int64_t i = 0; i < classes_.used(tile); ++i) {
      for (std::int64_t t = 0; t < kTile; ++t) to[i * kTile + t] += bias[i];
    }
  }
  void add_up(std::int64_t range, std::int64_t j, std::int64_t rows, const float* from) {
    double* sums = plain_sums_.data() + (range * kTokenTiles + j) * kTile;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t t = 0; t < kTile; ++t) sums[t] += from[i * kTile + t];
    }
  }

  // The sum of the losses, and what the gradients need of each token.
  double finish_losses() {
    double loss = 0;
    const double smoothing = call_.label_smoothing;
    const auto* targets = target_.const_data_ptr<std::int64_t>();
    for (std::int64_t j = 0; j < token_tiles_; ++j) {
      const std::int64_t begin = tokens_.begin(first_ + j), used = tokens_.used(first_ + j);
      for (std::int64_t t = 0; t < kTile; ++t) {
        float& top = largest_[j * kTile + t];
        float& log_sum = log_sums_[j * kTile + t];
        float& times = times_[j * kTile + t];
        top = log_sum = times = 0;
        if (t >= used || targets[begin + t] == call_.ignore_index) continue;
        float largest = -kInfinity;
        for (std::int64_t range = 0; range < ranges_; ++range) largest = std::max(largest, state(range, j).largest[t]);
        double sum = 0, plain = 0;
        for (std::int64_t range = 0; range < ranges_; ++range) {
          const auto& one = state(range, j);
          sum += static_cast<double>(one.sum[t]) * std::exp(static_cast<double>(one.largest[t]) - largest);
          plain += plain_sums_[static_cast<std::size_t>((range * kTokenTiles + j) * kTile + t)];
        }
        const double log = std::log(sum);
        const std::int64_t wanted = targets[begin + t];
        const double right = logits(wanted / kTile, j)[wanted % kTile * kTile + t];
        loss += largest + log - (1 - smoothing) * right - smoothing * plain / static_cast<double>(classes_.count);
        top = largest;
        log_sum = static_cast<float>(log);
        times = call_.mean ? 1.0F / static_cast<float>(counted_) : 1.0F;
      }
    }
    return loss;
  }
  [[nodiscard]] const kernels::SoftmaxState& state(std::int64_t range, std::int64_t j) const {
    return states_[static_cast<std::size_t>(range * kTokenTiles + j)];
  }

  // Gradients of the logits of kClassTiles tiles of classes, as operands.
  struct Operands {
    std::uint16_t* left;   // BFloat16: a class a row, kTokens of them
    std::uint16_t* right;  // BFloat16: for each token tile kClasses rows
  };

  void gradients_of(std::int64_t range) {
    Scratch scratch;
    const Operands to{reinterpret_cast<std::uint16_t*>(scratch.bytes(kClasses * kTokens * 2)),
                      reinterpret_cast<std::uint16_t*>(scratch.bytes(kClasses * kTokens * 2))};
    if (wanted_[0]) std::fill_n(partial(range, 0), kTokenTiles * width_ * kTile, 0.0F);
    const std::int64_t end = std::min(classes_.tiles, (range + 1) * range_tiles_);
    for (std::int64_t first = range * range_tiles_; first < end; first += kClassTiles) {
      const std::int64_t last = std::min(end, first + kClassTiles) - 1;
      for (std::int64_t tile = first; tile <= last; ++tile) {
        for (std::int64_t j = 0; j < token_tiles_; ++j) {
          gradient_of_logits(tile, j, to);
          if (wanted_[2]) add_to_bias(tile, j, to);
        }
        if (wanted_[1]) add_to_weight(tile, to);
      }
      if (!wanted_[0]) continue;
      const std::int64_t rows = (last - first) * kTile + classes_.padded(last);
      for (std::int64_t j = 0; j < token_tiles_; ++j) {
        product(format_, width_, tokens_.padded(first_ + j), rows, weight_transposed_[first], kClasses,
                paired() ? static_cast<void*>(to.right + j * kClasses * kTile) : logits(first, j), kTile,
                partial(range, j), kTile, true);
      }
    }
  }
  [[nodiscard]] bool paired() const { return format_ == TileFormat::BFloat16; }

  void gradient_of_logits(std::int64_t tile, std::int64_t j, const Operands& to) const {
    const std::int64_t within = tile % kClassTiles * kTile;
    float* const of_logits = logits(tile, j);
    kernels::CrossEntropyGradient gradient;
    gradient.format = format_;
    gradient.rows = classes_.padded(tile);
    gradient.columns = tokens_.padded(first_ + j);
    gradient.largest = largest_ + j * kTile;
    gradient.log_sum = log_sums_ + j * kTile;
    gradient.weight = times_ + j * kTile;
    gradient.smoothing = static_cast<float>(call_.label_smoothing / static_cast<double>(classes_.count));
    gradient.logits = of_logits;
    gradient.left_gradient = to.left + within * kTokens + j * kTile;
    gradient.left_stride = kTokens;
    gradient.right_gradient = to.right + (j * kClasses + within) * kTile;
    const Targets here = targets_in(tile, j, of_logits);
    kernels::cross_entropy_gradient(gradient);
    for (std::int64_t n = 0; n < here.count; ++n) {
      const auto [row, column, value] = here.at[n];
      if (paired()) {
        const std::uint16_t narrow = at::BFloat16(value).x;
        gradient.left_gradient[row * kTokens + column] = narrow;
        gradient.right_gradient[(row / 2 * kTile + column) * 2 + row % 2] = narrow;
      } else {
        of_logits[row * kTile + column] = value;
      }
    }
  }

  void add_to_weight(std::int64_t tile, const Operands& from) const {
    const std::int64_t used = classes_.used(tile);
    float* const sum = sum_weight_ + classes_.begin(tile) * width_;
    if (paired()) {
      const std::int64_t columns = (token_tiles_ - 1) * kTile + tokens_.padded(first_ + token_tiles_ - 1);
      product(format_, used, width_, columns, from.left + tile % kClassTiles * kTile * kTokens, kTokens,
              tokens_right_[0], width_, sum, width_, first_ > 0);
      return;
    }
    for (std::int64_t j = 0; j < token_tiles_; ++j) {
      product(format_, used, width_, tokens_.padded(first_ + j), logits(tile, j), kTile, tokens_right_[j], width_, sum,
              width_, first_ > 0 || j > 0);
    }
  }

  // Gradients of the logits of the tokens' own classes, of which 1 is taken before they are rounded.
  struct Target {
    std::int64_t row, column;
    float value;
  };
  struct Targets {
    Target at[kTile];
    std::int64_t count = 0;
  };
  [[nodiscard]] Targets targets_in(std::int64_t tile, std::int64_t j, const float* logits) const {
    Targets here;
    const auto* targets = target_.const_data_ptr<std::int64_t>() + tokens_.begin(first_ + j);
    const double smoothing = call_.label_smoothing;
    for (std::int64_t t = 0; t < tokens_.used(first_ + j); ++t) {
      const float times = times_[j * kTile + t];
      if (times == 0 || targets[t] / kTile != tile) continue;
      const std::int64_t row = targets[t] % kTile;
      const double below = static_cast<double>(logits[row * kTile + t]) - largest_[j * kTile + t];
      const double probability = std::exp(below - log_sums_[j * kTile + t]);
      const double value = probability - (1 - smoothing) - smoothing / static_cast<double>(classes_.count);
      here.at[here.count++] = {row, t, static_cast<float>(value * times)};
    }
    return here;
  }

  void add_to_bias(std::int64_t tile, std::int64_t j, const Operands& from) {
    static const std::vector<float> ones(kTile, 1.0F);
    static const std::vector<std::uint16_t> narrow_ones(kTile, 0x3F80);
    const std::int64_t rows = classes_.used(tile), columns = tokens_.padded(first_ + j);
    float sums[kTile];
    if (paired()) {
      const auto* left = from.left + tile % kClassTiles * kTile * kTokens + j * kTile;
      kernels::dot_rows({ElementType::BF16, left, kTokens, rows, columns},
                        {ElementType::BF16, narrow_ones.data(), 0, rows, columns}, sums);
    } else {
      kernels::dot_rows({ElementType::F32, logits(tile, j), kTile, rows, columns},
                        {ElementType::F32, ones.data(), 0, rows, columns}, sums);
    }
    for (std::int64_t i = 0; i < rows; ++i) sum_bias_[static_cast<std::size_t>(classes_.begin(tile) + i)] += sums[i];
  }

  [[nodiscard]] float* partial(std::int64_t range, std::int64_t j) const {
    return partial_ + (range * kTokenTiles + j) * width_ * kTile;
  }

  void store_input() {
    at::parallel_for(0, token_tiles_, 1, [&](std::int64_t begin, std::int64_t end) {
      Scratch scratch;
      float* rows = scratch.floats(kTile * width_);
      for (std::int64_t j = begin; j < end; ++j) {
        float* sum = partial(0, j);
        for (std::int64_t range = 1; range < ranges_; ++range) {
          const float* more = partial(range, j);
          for (std::int64_t i = 0; i < width_ * kTile; ++i) sum[i] += more[i];
        }
        const std::int64_t tile = first_ + j, used = tokens_.used(tile);
        kernels::transpose_words(sum, kTile, width_, tokens_.padded(tile), rows, width_);
        const Rows to = rows_of(of_input_).part(tokens_.begin(tile), used);
        kernels::store_rows(rows, width_, used, to.columns, 1, nullptr, to.element, const_cast<void*>(to.data),
                            to.stride);
      }
    });
  }

  void store_weight(Tensor& of_weight) const {
    const Rows all = rows_of(of_weight);
    at::parallel_for(0, classes_.tiles, 4, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t first = classes_.begin(begin), last = std::min(classes_.count, classes_.begin(end));
      const Rows to = all.part(first, last - first);
      kernels::store_rows(sum_weight_ + first * width_, width_, to.rows, to.columns, 1, nullptr, to.element,
                          const_cast<void*>(to.data), to.stride);
    });
  }

  const LinearCrossEntropy& call_;
  std::array<bool, 3> wanted_;
  Tensor input_, target_;
  Tiled tokens_, classes_;
  std::int64_t width_;
  TileFormat format_;
  Tensor weight_;
  std::int64_t range_tiles_, ranges_;
  bool in_place_;  // rows of the weight are left operands as they lie
  Tensor bias_, of_input_;
  std::int64_t counted_;

  Scratch scratch_;
  Packed tokens_right_, tokens_transposed_, weight_transposed_;
  float *logits_ = nullptr, *partial_ = nullptr, *sum_weight_ = nullptr;
  std::vector<float> sum_bias_;
  std::vector<kernels::SoftmaxState> states_;
  std::vector<double> plain_sums_;
  float largest_[kTokenTiles * kTile], log_sums_[kTokenTiles * kTile], times_[kTokenTiles * kTile];
  std::int64_t first_ = 0, token_tiles_ = 0;  // of the tokens at hand
};

// The tokens that count.
std::int64_t counted_targets(const LinearCrossEntropy& call, const Tensor& target) {
  const std::int64_t classes = call.weight.size(0), tokens = target.size(0);
  const auto* targets = target.const_data_ptr<std::int64_t>();
  std::int64_t counted = 0;
  for (std::int64_t i = 0; i < tokens; ++i) {
    if (targets[i] == call.ignore_index) continue;
    OXY_CHECK(targets[i] >= 0 && targets[i] < classes, InvalidArgument, "target ", targets[i], " of token ", i,
              " is no class: there are ", classes, "; tokens that do not count have ignore_index, ", call.ignore_index,
              ".");
    ++counted;
  }
  return counted;
}

LossAndGradients of_all(const LinearCrossEntropy& call, std::array<bool, 3> wanted, std::int64_t counted) {
  return has_few_classes(call) ? linear_cross_entropy_of_few(call, wanted, counted) : Work(call, wanted, counted).run();
}

}  // namespace

Tensor reduced_loss(const LinearCrossEntropy& call, double sum, std::int64_t counted) {
  if (call.mean) sum = counted == 0 ? std::numeric_limits<double>::quiet_NaN() : sum / static_cast<double>(counted);
  Tensor loss = at::empty({}, call.input.options().dtype(at::kFloat));
  *loss.mutable_data_ptr<float>() = static_cast<float>(sum);
  return loss;
}

LossAndGradients linear_cross_entropy_cpu(const LinearCrossEntropy& given, std::array<bool, 3> wanted) {
  const Tensor target = given.target.contiguous();
  LinearCrossEntropy call{given.input,        given.weight,          target,    given.bias,
                          given.ignore_index, given.label_smoothing, given.mean};
  const std::int64_t some = counted_targets(call, target), all = target.size(0);
  if (some == 0 || some > all - all / 16) return of_all(call, wanted, some);
  // Tokens that do not count need no logits: their gradients are zeros.
  const Tensor counted = target.ne(call.ignore_index).nonzero().squeeze(1);
  const Tensor input = call.input.index_select(0, counted), those = target.index_select(0, counted);
  auto done =
      of_all({input, call.weight, those, call.bias, call.ignore_index, call.label_smoothing, call.mean}, wanted, some);
  if (done.input.defined()) {
    done.input = at::zeros(call.input.sizes(), done.input.options()).index_copy_(0, counted, done.input);
  }
  return done;
}

}  // namespace oxytorch::ops
