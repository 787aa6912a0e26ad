#include "ops/convolution_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "ops/product.h"
#include "ops/shares.h"
#include "ops/tiles.h"
#include "oxytorch/kernels/attention.h"

namespace oxytorch::ops {
namespace {

using at::Tensor;
using kernels::ElementType;
using kernels::kTile;
using kernels::kTileStep;
using kernels::Operand;
using kernels::TileFormat;

// Images of a block are a multiple of the first: operands are padded with zeros to it. AMX multiplies as many terms as
// the second at once: where some are left over, products are of fewer terms and take longer.
constexpr std::int64_t kStep = kTileStep, kAtOnce = 32;
// Terms of a product: both operands are then near the core, and sums are read and written once for that many.
constexpr std::int64_t kMostTerms = 512, kTermsWithRest = 256;
// Channels of the input below which a product is filled with zeros, or takes less time than its operands.
constexpr std::int64_t kLeastInputs = 64, kLeastOutputs = 32;

/// One axis of an image.
struct Axis {
  std::int64_t input, output, kernel, stride, padding;

  /// The place in the input that element `at` of the kernel meets for output `of`; outside of the image that is
  /// padding.
  [[nodiscard]] std::int64_t met(std::int64_t of, std::int64_t at) const { return of * stride + at - padding; }

  /// Outputs, from first to before last, for which element `at` of the kernel meets the image.
  [[nodiscard]] std::array<std::int64_t, 2> outputs(std::int64_t at) const {
    const std::int64_t first = std::max<std::int64_t>(0, (padding - at + stride - 1) / stride);
    const std::int64_t last = input - 1 + padding - at;  // times the stride
    return {first, last < 0 ? first : std::min(output, last / stride + 1)};
  }

  /// Whether any output meets this place of the input.
  [[nodiscard]] bool meets(std::int64_t place) const {
    for (std::int64_t at = 0; at < kernel; ++at) {
      const std::int64_t of = place + padding - at;
      if (of >= 0 && of % stride == 0 && of / stride < output) return true;
    }
    return false;
  }
};

/// Images of a block, of which a row has about kMostTerms places, and what they cost in tenths of a whole batch's: some
/// are zeros, and where terms are left over, each counts as 1.4.
struct BlockOfImages {
  std::int64_t images = kStep, cost = 0;

  BlockOfImages(std::int64_t batch, std::int64_t columns) : cost(cost_of(batch, kStep)) {
    const std::int64_t most = std::max(kAtOnce, round_up(kMostTerms / columns, kAtOnce));
    for (std::int64_t more = 2 * kStep; more <= most; more += kStep) {
      if (cost_of(batch, more) > cost) continue;
      images = more;
      cost = cost_of(batch, more);
    }
  }
  static std::int64_t cost_of(std::int64_t batch, std::int64_t images) {
    return round_up(batch, images) * (images % kAtOnce == 0 ? 10 : 14);
  }
};

/// For each place (kh, kw) of the kernel, the gradient is a product of two matrices: outputs x terms and terms x
/// inputs, where terms are all places of all images at which that element met one. Terms are ordered by row, column and
/// image, so that those of a row which (kh, kw) meets lie in one piece in both operands, whatever kw is: operands are
/// laid out once for all places, and nothing is multiplied with padding. Columns of the input that a stride keeps apart
/// come in turns for this. A row of the input meets up to kernel / stride rows of the gradient, which lie one after the
/// other: they are multiplied with it in one product.
class WeightGradient {
 public:
  WeightGradient(const Tensor& grad, const Tensor& input, const ConvolutionShape& shape)
      : grad_(static_cast<const std::byte*>(grad.const_data_ptr())),
        input_(static_cast<const std::byte*>(input.const_data_ptr())),
        batch_(grad.size(0)),
        outputs_(grad.size(1)),
        inputs_(input.size(1)),
        rows_{input.size(2), grad.size(2), shape.kernel[0], shape.stride[0], shape.padding[0]},
        columns_{input.size(3), grad.size(3), shape.kernel[1], shape.stride[1], shape.padding[1]},
        images_(BlockOfImages(batch_, columns_.output).images),
        panels_(inputs_) {
    const std::int64_t met_at_once = (rows_.kernel - 1) / rows_.stride + 1;
    const std::int64_t most = std::clamp(round_up(kRows / met_at_once, kAtOnce), kAtOnce, kRows);
    blocks_ = (outputs_ - 1) / std::min(most, round_up((outputs_ + 1) / 2, kTileStep)) + 1;
    block_ = round_up((outputs_ - 1) / blocks_ + 1, kTileStep);
    blocks_ = (outputs_ - 1) / block_ + 1;

    apart_ = columns_.output * images_ + kApart;
    panel_ = columns_.input * images_ * kTile;
    const std::int64_t row_bytes = (blocks_ * block_ * apart_ + rows_.stride * panels_.tiles * panel_) * kBytes;
    band_ = std::clamp<std::int64_t>(kHeld / row_bytes, 1, rows_.output);
    ring_ = std::min(rows_.input, (band_ - 1) * rows_.stride + rows_.kernel);

    place_.resize(static_cast<std::size_t>(columns_.input));
    std::int64_t next = 0;
    for (std::int64_t turn = 0; turn < columns_.stride; ++turn) {
      for (std::int64_t column = turn; column < columns_.input; column += columns_.stride) {
        place_[static_cast<std::size_t>(column)] = next++;
      }
    }
    row_of_kernel_.resize(static_cast<std::size_t>(rows_.kernel));
    next = 0;
    for (std::int64_t turn = 0; turn < std::min(rows_.stride, rows_.kernel); ++turn) {
      const std::int64_t last = (rows_.kernel - 1 - turn) / rows_.stride * rows_.stride + turn;
      for (std::int64_t kh = last; kh >= 0; kh -= rows_.stride) row_of_kernel_[static_cast<std::size_t>(kh)] = next++;
    }

    chunks_ = (batch_ - 1) / images_ + 1;
    bands_ = (rows_.output - 1) / band_ + 1;
    units_ = columns_.kernel * panels_.tiles * blocks_;
    unit_ = rows_.kernel * block_ * kTile;
    const std::int64_t most_parts = std::min(kSumBytes / (units_ * unit_ * std::int64_t(sizeof(float))), kParts);
    while (parts_ * 2 <= std::min(most_parts, chunks_ * bands_)) parts_ *= 2;
  }

  Tensor run() {
    Scratch scratch;
    sums_ = scratch.floats(parts_ * units_ * unit_);
    // As many parts for any number of threads: those that cannot share them out go through all parts together.
    if (parts_ % at::get_num_threads() == 0) {
      share_out(parts_, 1, [&](const auto& take) {
        for (std::int64_t part; (part = take()) >= 0;) add_up(part, part + 1);
      });
    } else {
      add_up(0, parts_);
    }
    return stored();
  }

 private:
  static constexpr auto kFormat = TileFormat::BFloat16;
  static constexpr std::int64_t kBytes = 2;
  // Rows of the gradient lie this much further apart: at powers of two, few sets of a cache would hold them.
  static constexpr std::int64_t kApart = 32;
  // Rows of the left operand of one product.
  static constexpr std::int64_t kRows = 256;
  // Bytes of both operands that a thread holds at a time: the cache of a core has 1 or 2 MiB.
  static constexpr std::int64_t kHeld = std::int64_t{1} << 20;
  // Parts with sums of their own, and the bytes of all these sums: to add them up takes time.
  static constexpr std::int64_t kParts = 4, kSumBytes = std::int64_t{5} << 20;
  // Bytes of sums that stay near a core while it goes through rows of an image.
  static constexpr std::int64_t kSumsHeld = std::int64_t{1} << 20;

  /// Rows of the gradient as left operands, and of the input as right ones.
  struct Held {
    std::byte* left;
    std::byte* right;
  };
  /// Some rows of some images, whose products are added to the sums of a part.
  struct Job {
    std::int64_t part;
    Held held;
    std::int64_t image = 0, images = 0;
    std::int64_t first = 0, last = 0;  // rows of the gradient
    // Rows of the input that they meet; not laid out are those from `unseen`.
    std::int64_t first_input = 0, last_input = 0, unseen = 0;

    [[nodiscard]] std::int64_t rows_to_lay_out() const { return last_input - unseen + last - first; }
  };

  [[nodiscard]] float* sums(std::int64_t part, std::int64_t unit) const {
    return sums_ + (part * units_ + unit) * unit_;
  }

  [[nodiscard]] std::int64_t jobs_before(std::int64_t part) const { return chunks_ * bands_ * part / parts_; }

  // `before` is the one before it of the part, where there is one.
  [[nodiscard]] Job job(std::int64_t number, std::int64_t part, const Held& held, const Job* before) const {
    Job made{.part = part, .held = held};
    made.image = number / bands_ * images_;
    made.images = std::min(images_, batch_ - made.image);
    made.first = number % bands_ * band_;
    made.last = std::min(rows_.output, made.first + band_);
    made.first_input = std::clamp<std::int64_t>(rows_.met(made.first, 0), 0, rows_.input);
    made.last_input = std::clamp<std::int64_t>(rows_.met(made.last - 1, rows_.kernel - 1) + 1, 0, rows_.input);
    made.unseen = made.first_input;
    if (before != nullptr && made.first > 0) made.unseen = std::max(made.unseen, before->last_input);
    return made;
  }

  // The products of these parts, of each in the order of its rows and images.
  void add_up(std::int64_t first, std::int64_t last) const {
    Scratch scratch;
    std::vector<Held> held;
    for (std::int64_t part = first; part < last; ++part) {
      held.push_back({scratch.bytes(blocks_ * band_ * block_ * apart_ * kBytes),
                      scratch.bytes(ring_ * panels_.tiles * panel_ * kBytes)});
    }
    at::parallel_for(first * units_, last * units_, 1, [&](std::int64_t begin, std::int64_t end) {
      std::memset(sums(0, begin), 0, static_cast<std::size_t>((end - begin) * unit_) * sizeof(float));
    });
    std::vector<Job> jobs;
    for (std::int64_t round = 0; jobs.size() == held.size() || round == 0; ++round) {
      const std::vector<Job> before = std::exchange(jobs, {});
      for (std::int64_t part = first; part < last; ++part) {
        const std::int64_t number = jobs_before(part) + round;
        if (number >= jobs_before(part + 1)) continue;
        const auto at = static_cast<std::size_t>(part - first);
        jobs.push_back(job(number, part, held[at], before.empty() ? nullptr : &before[at]));
      }
      run(jobs);
    }
  }

  void run(const std::vector<Job>& jobs) const {
    std::vector<std::int64_t> rows{0};
    for (const Job& job : jobs) rows.push_back(rows.back() + job.rows_to_lay_out());
    at::parallel_for(0, rows.back(), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::size_t i = 0; i < jobs.size(); ++i) {
        for (std::int64_t row = std::max(begin, rows[i]); row < std::min(end, rows[i + 1]); ++row) {
          lay_out(jobs[i], row - rows[i]);
        }
      }
    });
    const auto count = static_cast<std::int64_t>(jobs.size());
    at::parallel_for(0, count * units_, 1, [&](std::int64_t begin, std::int64_t end) {
      const ProductScope scope(kFormat);
      for (std::int64_t i = begin / units_; i * units_ < end; ++i) {
        multiply(jobs[static_cast<std::size_t>(i)], std::max<std::int64_t>(0, begin - i * units_),
                 std::min(units_, end - i * units_));
      }
    });
  }

  void lay_out(const Job& job, std::int64_t row) const {
    const std::int64_t of_input = job.last_input - job.unseen;
    if (row < of_input) {
      lay_out_input(job, job.unseen + row);
    } else {
      lay_out_gradient(job, job.first + row - of_input);
    }
  }

  [[nodiscard]] std::byte* row_of_input(std::byte* right, std::int64_t row) const {
    return right + row % ring_ * panels_.tiles * panel_ * kBytes;
  }

  void lay_out_input(const Job& job, std::int64_t row) const {
    if (!rows_.meets(row)) return;
    std::byte* to = row_of_input(job.held.right, row);
    for (std::int64_t column = 0; column < columns_.input; ++column) {
      if (!columns_.meets(column)) continue;
      const std::int64_t at = (job.image * rows_.input + row) * columns_.input + column;
      kernels::pack_panels({ElementType::BF16, input_ + at * inputs_ * kBytes, rows_.input * columns_.input * inputs_,
                            job.images, inputs_},
                           images_, to + place_[static_cast<std::size_t>(column)] * images_ * kTile * kBytes, panel_);
    }
  }

  [[nodiscard]] std::byte* row_of_gradient(std::byte* left, std::int64_t block, std::int64_t row) const {
    return left + (block * band_ + row) * block_ * apart_ * kBytes;
  }

  void lay_out_gradient(const Job& job, std::int64_t row) const {
    for (std::int64_t column = 0; column < columns_.output; ++column) {
      const std::byte* from = grad_ + ((job.image * rows_.output + row) * columns_.output + column) * outputs_ * kBytes;
      for (std::int64_t block = 0; block < blocks_; ++block) {
        std::byte* to = row_of_gradient(job.held.left, block, row - job.first) + column * images_ * kBytes;
        for (std::int64_t at = 0; at < block_; at += kTile) {
          const std::int64_t output = block * block_ + at, width = std::min(kTile, block_ - at);
          const std::int64_t used = std::clamp<std::int64_t>(outputs_ - output, 0, width);
          for (std::int64_t image = 0; image < images_; image += kTile) {
            const std::int64_t apart = rows_.output * columns_.output * outputs_;
            kernels::pack_operand(Operand::LeftTransposed,
                                  {ElementType::BF16, from + (image * apart + output) * kBytes, apart,
                                   std::clamp<std::int64_t>(job.images - image, 0, kTile), used},
                                  std::min(kTile, images_ - image), width, to + (at * apart_ + image) * kBytes, apart_);
          }
        }
      }
    }
  }

  // The units from `begin` to before `end`.
  void multiply(const Job& job, std::int64_t begin, std::int64_t end) const {
    const std::int64_t group = std::max<std::int64_t>(1, kSumsHeld / (unit_ * std::int64_t(sizeof(float))));
    for (std::int64_t first = begin; first < end; first += group) {
      for (std::int64_t row = job.first_input; row < job.last_input; ++row) {
        // Rows of the gradient that meet it, in the band.
        const std::int64_t least = row + rows_.padding - rows_.kernel + 1;
        const std::int64_t from = std::max(job.first, least <= 0 ? 0 : (least - 1) / rows_.stride + 1);
        const std::int64_t to = std::min(job.last, (row + rows_.padding) / rows_.stride + 1);
        for (std::int64_t unit = first; from < to && unit < std::min(end, first + group); ++unit) {
          multiply_row(job, row, from, to, unit);
        }
      }
    }
  }

  void multiply_row(const Job& job, std::int64_t row, std::int64_t from, std::int64_t to, std::int64_t unit) const {
    const std::int64_t block = unit % blocks_, panel = unit / blocks_ % panels_.tiles,
                       kw = unit / blocks_ / panels_.tiles;
    const auto [first, last] = columns_.outputs(kw);
    if (first >= last) return;
    const std::int64_t kh = row + rows_.padding - from * rows_.stride;
    const std::int64_t place = place_[static_cast<std::size_t>(columns_.met(first, kw))];
    const std::byte* right = row_of_input(job.held.right, row) + (panel * panel_ + place * images_ * kTile) * kBytes;
    const std::byte* left = row_of_gradient(job.held.left, block, from - job.first) + first * images_ * kBytes;
    const std::int64_t terms = (last - first) * images_, most = terms % kAtOnce == 0 ? kMostTerms : kTermsWithRest,
                       pieces = (terms - 1) / most + 1, piece = round_up((terms - 1) / pieces + 1, kAtOnce);
    float* here = sums(job.part, unit) + row_of_kernel_[static_cast<std::size_t>(kh)] * block_ * kTile;
    for (std::int64_t at = 0; at < terms; at += piece) {
      product(kFormat, (to - from) * block_, panels_.padded(panel), std::min(piece, terms - at), left + at * kBytes,
              apart_, right + at * kTile * kBytes, kTile, here, kTile, true);
    }
  }

  // Sums of all parts, in their order, rounded.
  [[nodiscard]] Tensor stored() const {
    Tensor made = at::empty({outputs_, inputs_, rows_.kernel, columns_.kernel},
                            at::TensorOptions(at::kBFloat16).memory_format(at::MemoryFormat::ChannelsLast));
    auto* data = static_cast<std::byte*>(made.mutable_data_ptr());
    const std::int64_t places = rows_.kernel * columns_.kernel;
    at::parallel_for(0, units_, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const std::int64_t output = unit % blocks_ * block_, panel = unit / blocks_ % panels_.tiles,
                           kw = unit / blocks_ / panels_.tiles;
        for (std::int64_t part = 1; part < parts_; ++part) {
          kernels::add_rows(sums(part, unit), kTile, rows_.kernel * block_, kTile, sums(0, unit), kTile);
        }
        for (std::int64_t kh = 0; kh < rows_.kernel; ++kh) {
          const std::int64_t at = (output * places + kh * columns_.kernel + kw) * inputs_ + panels_.begin(panel);
          kernels::store_rows(sums(0, unit) + row_of_kernel_[static_cast<std::size_t>(kh)] * block_ * kTile, kTile,
                              std::min(block_, outputs_ - output), panels_.used(panel), 1, nullptr, ElementType::BF16,
                              data + at * kBytes, places * inputs_);
        }
      }
    });
    return made;
  }

  const std::byte* grad_;
  const std::byte* input_;
  std::int64_t batch_, outputs_, inputs_;
  Axis rows_, columns_;
  std::int64_t images_;                  // of a block of terms
  Tiled panels_;                         // of the input's channels
  std::int64_t blocks_ = 0, block_ = 0;  // of the gradient's channels
  std::int64_t apart_ = 0, panel_ = 0;   // elements from row to row of a left operand, and of a panel of a row
  std::int64_t band_ = 0, ring_ = 0;     // rows of the gradient and of the input that are held
  std::int64_t chunks_ = 0, bands_ = 0, units_ = 0, unit_ = 0, parts_ = 1;
  std::vector<std::int64_t> place_;          // of a column in a row that is laid out
  std::vector<std::int64_t> row_of_kernel_;  // of an element of the kernel among those of one product
  float* sums_ = nullptr;
};

bool is_pointwise(const ConvolutionShape& shape) {
  constexpr std::array<std::int64_t, 2> kOne{1, 1}, kNone{0, 0};
  return shape.kernel == kOne && shape.stride == kOne && shape.padding == kNone;
}

}  // namespace

bool convolution_cpu_is_for(std::int64_t outputs, std::int64_t inputs) {
  return outputs >= kLeastOutputs && inputs >= kLeastInputs;
}

bool convolution_cpu_takes(const Tensor& grad_output, const Tensor& input, const ConvolutionShape& shape) {
  const auto is_taken = [](const Tensor& tensor) {
    return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == at::kBFloat16 &&
           tensor.dim() == 4 && tensor.numel() > 0 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast);
  };
  if (!is_taken(grad_output) || !is_taken(input) || grad_output.size(0) != input.size(0)) return false;
  for (std::size_t axis = 0; axis < 2; ++axis) {
    const auto dimension = static_cast<std::int64_t>(axis) + 2;
    const std::int64_t kernel = shape.kernel[axis], stride = shape.stride[axis], padding = shape.padding[axis];
    if (kernel < 1 || stride < 1 || padding < 0) return false;
    const std::int64_t last = input.size(dimension) + 2 * padding - kernel;  // where the kernel may begin
    if (last < 0 || last / stride + 1 != grad_output.size(dimension)) return false;
  }
  const std::int64_t batch = is_pointwise(shape) ? input.numel() / input.size(1) : input.size(0);
  const std::int64_t columns = is_pointwise(shape) ? 1 : grad_output.size(3);
  return BlockOfImages(batch, columns).cost <= 14 * batch && product_format(ElementType::BF16) == TileFormat::BFloat16;
}

Tensor convolution_cpu_weight_gradient(const Tensor& grad_output, const Tensor& input, const ConvolutionShape& shape) {
  if (!is_pointwise(shape)) return WeightGradient(grad_output, input, shape).run();
  // Any place is as good as an image of its own, and they lie one after the other.
  const auto places = [](const Tensor& image) {
    return image.permute({0, 2, 3, 1}).reshape({-1, image.size(1), 1, 1});
  };
  return WeightGradient(places(grad_output), places(input), shape).run();
}

}  // namespace oxytorch::ops
