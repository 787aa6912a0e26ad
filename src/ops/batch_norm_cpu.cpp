#include "ops/batch_norm_cpu.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <vector>

#include "ops/shares.h"
#include "ops/tiles.h"
#include "optim/dense.h"
#include "oxytorch/kernels/channel_norm.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::Rows;

// Rows of one sum: few enough for fp32, and to be near the core when they are read again.
constexpr std::int64_t kPartRows = 256;
constexpr std::int64_t kPartBytes = std::int64_t{1} << 16;
// Elements below which a second thread costs more than it brings.
constexpr std::int64_t kElementsOfThread = 16384;

/// The tensor as rows of channels; a view.
Tensor channel_rows(const Tensor& tensor) {
  return tensor.dim() == 4 ? tensor.permute({0, 2, 3, 1}).flatten(0, 2) : tensor;
}
bool is_rows_of_channels(const Tensor& tensor) {
  return tensor.dim() == 4 ? tensor.is_contiguous(at::MemoryFormat::ChannelsLast)
                           : tensor.dim() == 2 && tensor.is_contiguous();
}

Rows rows_or_none(const Tensor& tensor) { return tensor.defined() ? rows_of(channel_rows(tensor)) : Rows(); }

/// Rows in equal parts, each for one thread at a time, by size alone.
class RowParts {
 public:
  RowParts(std::int64_t rows, std::int64_t row_bytes, std::int64_t step = 1)
      : rows_(rows),
        size_(round_up(std::clamp<std::int64_t>(kPartBytes / std::max<std::int64_t>(row_bytes, 1), 16, kPartRows),
                       step)) {}
  [[nodiscard]] std::int64_t count() const { return (rows_ + size_ - 1) / size_; }
  [[nodiscard]] std::int64_t begin(std::int64_t part) const { return part * size_; }
  [[nodiscard]] std::int64_t size(std::int64_t part) const { return std::min(size_, rows_ - begin(part)); }
  template <class Run>
  void each(std::int64_t columns, const Run& run) const {
    const std::int64_t grain = std::max<std::int64_t>(1, kElementsOfThread / (size_ * columns));
    share_out(count(), grain, [&](const auto& take) {
      for (std::int64_t part; (part = take()) >= 0;) run(part);
    });
  }

 private:
  std::int64_t rows_, size_;
};

/// Sums of each channel for each part, of `kinds` kinds.
class PartSums {
 public:
  PartSums(Scratch& scratch, std::int64_t parts, std::int64_t channels, std::int64_t kinds)
      : channels_(channels), kinds_(kinds), data_(scratch.floats(kinds * parts * channels)) {}
  [[nodiscard]] float* of(std::int64_t part, std::int64_t kind) const {
    return data_ + (kinds_ * part + kind) * channels_;
  }

 private:
  std::int64_t channels_, kinds_;
  float* data_;
};

Tensor of_channels(const Tensor& input) { return at::empty({input.size(1)}, input.options().dtype(at::kFloat)); }

/// Where an image in windows of `pool` lies: a line is one row of windows.
struct Lines {
  Lines(const Tensor& input, at::IntArrayRef pool)
      : channels(input.size(1)), of_image(input.size(2) / pool[0]), count(input.size(0) * of_image) {
    windows.height = pool[0];
    windows.width = pool[1];
    windows.count = input.size(3) / pool[1];
    windows.line = input.size(3) * channels;
  }
  /// Elements before the first of a line.
  [[nodiscard]] std::int64_t input(std::int64_t line) const { return line * windows.height * windows.line; }
  [[nodiscard]] std::int64_t output(std::int64_t line) const { return line * windows.count * channels; }
  /// Rows of the input of one line, as the kernel is given them.
  [[nodiscard]] Rows rows(const Rows& input_rows, std::int64_t line) const {
    return input_rows.part(input(line) / channels, windows.height * windows.line / channels);
  }

  std::int64_t channels, of_image, count;
  kernels::WindowRow windows;
};

/// What the kernels are given of each channel.
struct Rule {
  explicit Rule(const NormalizedLayer& layer) {
    const std::int64_t channels = layer.mean.numel();
    const auto* mean = layer.mean.const_data_ptr<float>();
    const auto* invstd = layer.invstd.const_data_ptr<float>();
    const auto* weight = layer.weight.defined() ? layer.weight.const_data_ptr<float>() : nullptr;
    const auto* bias = layer.bias.defined() ? layer.bias.const_data_ptr<float>() : nullptr;
    for (std::int64_t c = 0; c < channels; ++c) {
      scale.push_back(weight == nullptr ? invstd[c] : invstd[c] * weight[c]);
      shift.push_back(bias == nullptr ? 0.0F : bias[c]);
    }
    rule = {mean, scale.data(), shift.data(), layer.relu};
  }
  std::vector<float> scale, shift;
  kernels::ChannelRule rule;
};

std::int64_t bytes_of_row(const Tensor& input) {
  return input.size(1) * static_cast<std::int64_t>(input.element_size());
}

template <class T>
T* offset(void* data, std::int64_t bytes) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(data) + bytes);
}

}  // namespace

bool batch_norm_cpu_takes(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const auto type = input.scalar_type();
  if (!input.device().is_cpu() || (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf)) return false;
  if (input.layout() != at::kStrided || !is_rows_of_channels(input) || input.numel() < 2 * input.size(1)) return false;
  const auto fits = [&](const Tensor& tensor) {
    return !tensor.defined() || (tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.dim() == 1 &&
                                 tensor.numel() == input.size(1) && tensor.device().is_cpu());
  };
  return input.numel() > 0 && fits(weight) && fits(bias);
}

bool windows_fill(const Tensor& input, at::IntArrayRef pool) {
  return pool.empty() ||
         (pool.size() == 2 && input.dim() == 4 && pool[0] > 0 && pool[1] > 0 &&
          pool[0] * pool[1] <= kernels::kMostTaps && input.size(2) % pool[0] == 0 && input.size(3) % pool[1] == 0);
}

bool lies_as(const Tensor& added, const Tensor& input) {
  return added.sizes() == input.sizes() && added.scalar_type() == input.scalar_type() &&
         added.layout() == at::kStrided && is_rows_of_channels(added);
}

std::pair<Tensor, Tensor> batch_norm_cpu_moments(const Tensor& input) {
  const Rows rows = rows_of(channel_rows(input));
  const std::int64_t channels = rows.columns;
  const RowParts parts(rows.rows, bytes_of_row(input));
  Scratch scratch;
  const PartSums sums(scratch, parts.count(), channels, 3);
  parts.each(channels, [&](std::int64_t part) {
    kernels::channel_moments(rows.part(parts.begin(part), parts.size(part)), sums.of(part, 0), sums.of(part, 1),
                             sums.of(part, 2));
  });
  std::vector<double> mean(static_cast<std::size_t>(channels)), squares(mean.size());
  const auto count = static_cast<double>(rows.rows);
  const auto each_part = [&](const auto& add) {
    for (std::int64_t part = 0; part < parts.count(); ++part) {
      const auto size = static_cast<double>(parts.size(part));
      const float *of_part = sums.of(part, 0), *squared = sums.of(part, 1), *rest = sums.of(part, 2);
      for (std::size_t c = 0; c < mean.size(); ++c) add(c, size, of_part[c] + rest[c] / size, squared[c], rest[c]);
    }
  };
  each_part([&](auto c, double size, double of_part, float, float) { mean[c] += size * of_part; });
  for (double& one : mean) one /= count;
  // Sums of squares of parts (Chan, Golub, LeVeque 1979).
  each_part([&](auto c, double size, double of_part, double squared, double rest) {
    squares[c] += squared - rest * rest / size + size * (of_part - mean[c]) * (of_part - mean[c]);
  });
  Tensor means = of_channels(input), variances = of_channels(input);
  for (std::size_t c = 0; c < mean.size(); ++c) {
    means.mutable_data_ptr<float>()[c] = static_cast<float>(mean[c]);
    variances.mutable_data_ptr<float>()[c] = static_cast<float>(squares[c] / count);
  }
  return {means, variances};
}

std::pair<Tensor, Tensor> batch_norm_cpu(const NormalizedLayer& layer) {
  const Tensor& input = layer.input;
  const Rule rule(layer);
  const Rows rows = rows_of(channel_rows(input));
  const auto size = static_cast<std::int64_t>(input.element_size());
  if (layer.pool.empty()) {
    Tensor output = at::empty_like(input);
    const Rows added = rows_or_none(layer.added);
    void* to = output.mutable_data_ptr();
    const RowParts parts(rows.rows, bytes_of_row(input));
    parts.each(rows.columns, [&](std::int64_t part) {
      const auto begin = parts.begin(part), count = parts.size(part);
      kernels::normalize_rows(rule.rule, rows.part(begin, count),
                              added.data == nullptr ? Rows() : added.part(begin, count),
                              offset<void>(to, begin * bytes_of_row(input)));
    });
    return {output, at::empty({0}, input.options().dtype(at::kByte))};
  }
  const Lines lines(input, layer.pool);
  const std::array<std::int64_t, 4> sizes{input.size(0), lines.channels, lines.of_image, lines.windows.count};
  Tensor output = at::empty(sizes, input.options().memory_format(at::MemoryFormat::ChannelsLast));
  Tensor taps = at::empty(sizes, input.options().dtype(at::kByte).memory_format(at::MemoryFormat::ChannelsLast));
  void* to = output.mutable_data_ptr();
  auto* places = taps.mutable_data_ptr<std::uint8_t>();
  const RowParts parts(lines.count, lines.windows.height * lines.windows.line * size);
  parts.each(lines.windows.height * lines.windows.line, [&](std::int64_t part) {
    for (auto line = parts.begin(part); line < parts.begin(part) + parts.size(part); ++line) {
      kernels::normalize_windows(rule.rule, lines.windows, lines.rows(rows, line),
                                 offset<void>(to, lines.output(line) * size), places + lines.output(line));
    }
  });
  return {output, taps};
}

std::array<Tensor, 4> batch_norm_cpu_backward(const NormalizedLayer& layer, const Tensor& grad_output,
                                              const Tensor& output, const Tensor& taps, std::array<bool, 4> wanted) {
  const Tensor& input = layer.input;
  const auto format = input.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  const Tensor grad = grad_output.to(input.scalar_type()).contiguous(format);
  const Rule rule(layer);
  const Rows rows = rows_of(channel_rows(input)), grad_rows = rows_of(channel_rows(grad));
  const std::int64_t channels = rows.columns;
  const auto size = static_cast<std::int64_t>(input.element_size());
  const bool pools = !layer.pool.empty();
  const std::optional<Lines> lines = pools ? std::optional(Lines(input, layer.pool)) : std::nullopt;
  const std::uint8_t* places = pools ? taps.const_data_ptr<std::uint8_t>() : nullptr;
  const Rows output_rows = rows_or_none(output);
  const auto part_of = [&](std::int64_t begin, std::int64_t count) {
    return kernels::ChannelGradient{rule.rule, grad_rows.part(begin, count), rows.part(begin, count),
                                    output_rows.data == nullptr ? Rows() : output_rows.part(begin, count)};
  };
  const auto line_of = [&](std::int64_t line) {
    return kernels::ChannelGradient{rule.rule, grad_rows.part(line * lines->windows.count, lines->windows.count),
                                    lines->rows(rows, line), Rows()};
  };
  const RowParts parts = pools ? RowParts(lines->count, lines->windows.height * lines->windows.line * size)
                               : RowParts(rows.rows, bytes_of_row(input));
  const std::int64_t part_elements = pools ? lines->windows.height * lines->windows.line : channels;

  Scratch scratch;
  const PartSums sums(scratch, parts.count(), channels, 2);
  parts.each(part_elements, [&](std::int64_t part) {
    float *sum = sums.of(part, 0), *dot = sums.of(part, 1);
    if (!pools) {
      kernels::channel_gradient_sums(part_of(parts.begin(part), parts.size(part)), sum, dot);
      return;
    }
    std::vector<float> of_line(static_cast<std::size_t>(2 * channels));
    std::fill_n(sum, 2 * channels, 0.0F);
    for (auto line = parts.begin(part); line < parts.begin(part) + parts.size(part); ++line) {
      kernels::window_gradient_sums(line_of(line), lines->windows, places + lines->output(line), of_line.data(),
                                    of_line.data() + channels);
      for (std::size_t c = 0; c < of_line.size(); ++c) sum[c] += of_line[c];
    }
  });
  std::vector<double> sum(static_cast<std::size_t>(channels)), dot(sum.size());
  for (std::int64_t part = 0; part < parts.count(); ++part) {
    for (std::size_t c = 0; c < sum.size(); ++c) {
      sum[c] += sums.of(part, 0)[c];
      dot[c] += sums.of(part, 1)[c];
    }
  }

  std::array<Tensor, 4> made;
  const auto* invstd = layer.invstd.const_data_ptr<float>();
  if (wanted[1]) {
    made[1] = of_channels(input);
    for (std::size_t c = 0; c < sum.size(); ++c) {
      made[1].mutable_data_ptr<float>()[c] = static_cast<float>(dot[c] * invstd[c]);
    }
  }
  if (wanted[2]) {
    made[2] = of_channels(input);
    std::copy(sum.begin(), sum.end(), made[2].mutable_data_ptr<float>());
  }
  if (!wanted[0] && !wanted[3]) return made;
  std::vector<float> constant, slope;
  for (std::size_t c = 0; c < sum.size(); ++c) {
    const double scale = rule.scale[c], count = static_cast<double>(rows.rows);
    constant.push_back(static_cast<float>(-scale * sum[c] / count));
    slope.push_back(static_cast<float>(-scale * invstd[c] * invstd[c] * dot[c] / count));
  }
  const kernels::ChannelSlope line_of_channel{constant.data(), slope.data()};
  made[0] = at::empty_like(input);
  if (wanted[3]) made[3] = at::empty_like(input);
  void* to = made[0].mutable_data_ptr();
  void* added = wanted[3] ? made[3].mutable_data_ptr() : nullptr;
  parts.each(part_elements, [&](std::int64_t part) {
    const auto begin = parts.begin(part), count = parts.size(part);
    if (!pools) {
      const auto at = begin * bytes_of_row(input);
      kernels::channel_gradient(part_of(begin, count), line_of_channel, offset<void>(to, at),
                                added == nullptr ? nullptr : offset<void>(added, at));
      return;
    }
    for (auto line = begin; line < begin + count; ++line) {
      kernels::window_gradient(line_of(line), line_of_channel, lines->windows, places + lines->output(line),
                               offset<void>(to, lines->input(line) * size));
    }
  });
  if (!wanted[0]) made[0] = Tensor();
  return made;
}

}  // namespace oxytorch::ops
