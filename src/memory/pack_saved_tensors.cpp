#include "oxytorch/memory/pack_saved_tensors.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "base/spelling.h"
#include "memory/nameless_file.h"
#include "memory/recipe.h"
#include "memory/region_clock.h"
#include "memory/saved_tensors.h"
#include "oxytorch/error.h"
#include "oxytorch/memory/parked.h"
#include "oxytorch/units.h"

namespace oxytorch::memory {
namespace {

using at::Tensor;
namespace autograd = torch::autograd;

constexpr std::int64_t kBlock = 256;     // neighbours that share a scale
constexpr std::int64_t kChunk = 65'536;  // elements that a thread takes at a time; errors are summed by chunk, in order

// Squares of values and of what rounding did to them.
struct Squares {
  double values = 0, errors = 0;
};

// Runs over chunks of `count` elements and adds up what each gives; nothing where one of them finds what is not finite.
template <class Run>
std::optional<Squares> over_chunks(std::int64_t count, const Run& run) {
  const std::int64_t chunks = (count + kChunk - 1) / kChunk;
  std::vector<Squares> found(static_cast<std::size_t>(chunks));
  at::parallel_for(0, chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      found[static_cast<std::size_t>(chunk)] = run(chunk * kChunk, std::min(count, (chunk + 1) * kChunk));
    }
  });
  Squares sum;
  for (const auto& one : found) {
    sum.values += one.values;
    sum.errors += one.errors;
  }
  return std::isfinite(sum.values) && std::isfinite(sum.errors) ? std::optional(sum) : std::nullopt;
}

// The memory of a saved tensor as numbers of its dtype.
template <class T>
const T* numbers(const c10::Storage& storage) {
  return static_cast<const T*>(storage.data());
}
std::int64_t count_of(const c10::Storage& storage, std::size_t element_bytes) {
  return static_cast<std::int64_t>(storage.nbytes() / element_bytes);
}
Tensor new_memory(std::size_t bytes) { return at::empty({static_cast<std::int64_t>(bytes)}, at::kByte); }

// Memory of `count` numbers of a floating-point `type`, the float that `value_of` gives for each.
template <class ValueOf>
c10::Storage filled(std::int64_t count, at::ScalarType type, const ValueOf& value_of) {
  const Tensor made = new_memory(static_cast<std::size_t>(count) * c10::elementSize(type));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, type, "pack_saved_tensors", [&] {
    auto* to = static_cast<scalar_t*>(made.mutable_data_ptr());
    at::parallel_for(0, count, kChunk, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) to[i] = static_cast<scalar_t>(value_of(i));
    });
  });
  return made.storage();
}

// -- whole numbers, as narrow as they fit -----------------------------------------------------------------------------

struct Narrow {
  Tensor numbers;  // int8, int16 or int32
  std::int64_t count = 0;

  static std::optional<Narrow> pack(const c10::Storage& storage) {
    const auto* from = memory::numbers<std::int64_t>(storage);
    const std::int64_t count = count_of(storage, sizeof(std::int64_t));
    const auto [least, most] = std::minmax_element(from, from + count);
    const auto within = [&, low = *least, high = *most](auto limit) {
      using Limits = std::numeric_limits<decltype(limit)>;
      return low >= Limits::min() && high <= Limits::max();
    };
    const auto type = within(std::int8_t{})    ? at::kChar
                      : within(std::int16_t{}) ? at::kShort
                      : within(std::int32_t{}) ? at::kInt
                                               : at::kLong;
    if (type == at::kLong) return std::nullopt;
    Narrow packed{at::empty({count}, type), count};
    AT_DISPATCH_INTEGRAL_TYPES(type, "pack_saved_tensors", [&] {
      auto* to = packed.numbers.mutable_data_ptr<scalar_t>();
      for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<scalar_t>(from[i]);
    });
    return packed;
  }
  [[nodiscard]] c10::Storage unpack() const {
    const Tensor made = new_memory(static_cast<std::size_t>(count) * sizeof(std::int64_t));
    auto* to = static_cast<std::int64_t*>(made.mutable_data_ptr());
    AT_DISPATCH_INTEGRAL_TYPES(numbers.scalar_type(), "pack_saved_tensors",
                               [&] { std::copy_n(numbers.const_data_ptr<scalar_t>(), count, to); });
    return made.storage();
  }
  [[nodiscard]] std::size_t bytes() const { return numbers.nbytes(); }
};

// -- rounded to bfloat16 ----------------------------------------------------------------------------------------------

struct Rounded {
  Tensor numbers;  // bfloat16
  at::ScalarType type = at::kFloat;

  static std::optional<Rounded> pack(const c10::Storage& storage, at::ScalarType type, Squares& squares) {
    const std::int64_t count = count_of(storage, c10::elementSize(type));
    Rounded packed{at::empty({count}, at::kBFloat16), type};
    auto* to = packed.numbers.mutable_data_ptr<at::BFloat16>();
    std::optional<Squares> found;
    AT_DISPATCH_FLOATING_TYPES(type, "pack_saved_tensors", [&] {
      const auto* from = memory::numbers<scalar_t>(storage);
      found = over_chunks(count, [&](std::int64_t begin, std::int64_t end) {
        Squares sum;
        for (std::int64_t i = begin; i < end; ++i) {
          to[i] = at::BFloat16(static_cast<float>(from[i]));
          const double value = from[i], error = value - static_cast<double>(static_cast<float>(to[i]));
          sum.values += value * value;
          sum.errors += error * error;
        }
        return sum;
      });
    });
    if (!found) return std::nullopt;
    squares = *found;
    return packed;
  }
  [[nodiscard]] c10::Storage unpack() const {
    const auto* from = numbers.const_data_ptr<at::BFloat16>();
    return filled(numbers.numel(), type, [from](std::int64_t i) { return static_cast<float>(from[i]); });
  }
  [[nodiscard]] std::size_t bytes() const { return numbers.nbytes(); }
};

// -- 8 bits and a scale for each block --------------------------------------------------------------------------------

struct Scaled {
  Tensor codes, scales;  // int8; float32, for each kBlock of them
  at::ScalarType type = at::kFloat;

  static std::optional<Scaled> pack(const c10::Storage& storage, at::ScalarType type, Squares& squares) {
    const std::int64_t count = count_of(storage, c10::elementSize(type));
    Scaled packed{at::empty({count}, at::kChar), at::empty({(count + kBlock - 1) / kBlock}, at::kFloat), type};
    auto* codes = packed.codes.mutable_data_ptr<std::int8_t>();
    auto* scales = packed.scales.mutable_data_ptr<float>();
    std::optional<Squares> found;
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, type, "pack_saved_tensors", [&] {
      const auto* from = memory::numbers<scalar_t>(storage);
      found = over_chunks(count, [&](std::int64_t begin, std::int64_t end) {
        Squares sum;
        for (std::int64_t first = begin; first < end; first += kBlock) {
          const std::int64_t last = std::min(end, first + kBlock);
          float most = 0;
          for (std::int64_t i = first; i < last; ++i) most = std::max(most, std::abs(static_cast<float>(from[i])));
          const float scale = most / 127.0F, inverse = scale > 0 ? 1.0F / scale : 0.0F;
          scales[first / kBlock] = std::isfinite(inverse) ? scale : 0.0F;  // of denormal numbers nothing is left
          for (std::int64_t i = first; i < last; ++i) {
            const auto value = static_cast<float>(from[i]);
            const float code = std::isfinite(inverse) ? std::nearbyint(value * inverse) : 0.0F;
            codes[i] = static_cast<std::int8_t>(std::clamp(code, -127.0F, 127.0F));
            const double exact = value, error = exact - static_cast<double>(codes[i]) * scales[first / kBlock];
            sum.values += exact * exact;
            sum.errors += error * error;
          }
        }
        return sum;
      });
    });
    if (!found) return std::nullopt;
    squares = *found;
    return packed;
  }
  [[nodiscard]] c10::Storage unpack() const {
    const auto* from = codes.const_data_ptr<std::int8_t>();
    const auto* scale = scales.const_data_ptr<float>();
    return filled(codes.numel(), type, [=](std::int64_t i) { return static_cast<float>(from[i]) * scale[i / kBlock]; });
  }
  [[nodiscard]] std::size_t bytes() const { return codes.nbytes() + scales.nbytes(); }
};

// -- in a file --------------------------------------------------------------------------------------------------------

/// A file without a name, written at its end, and emptied when nothing of it is left.
class SpillFile {
 public:
  explicit SpillFile(const std::string& given) {
    for (const auto& folder : given.empty() ? parking_folders() : std::vector{given}) {
      folder_ = folder;
      file_ = nameless_file(folder_, "saved");
      if (file_ >= 0) return;
    }
    oxytorch::detail::raise(ErrorCode::Io, "no file for saved tensors can be made in ", in_quotes(folder_), ": ",
                            std::strerror(errno), ". Name a folder that can be written to.");
  }
  ~SpillFile() { close(file_); }
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  std::int64_t write(const c10::Storage& storage) {
    const auto size = static_cast<std::int64_t>(storage.nbytes());
    const auto aligned = size < kLargePage ? kMapped : kLargePage;
    std::int64_t place = 0;
    {
      const std::lock_guard lock(mutex_);
      place = (end_ + aligned - 1) / aligned * aligned;
      end_ = place + size;
      ++blocks_;
    }
    const auto* from = static_cast<const char*>(storage.data());
    for (std::int64_t done = 0; done < size;) {
      const auto count = pwrite(file_, from + done, static_cast<std::size_t>(size - done), place + done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) {
        const std::string why = std::strerror(errno);
        forget();
        oxytorch::detail::raise(ErrorCode::Io, "a saved tensor of ", format_size(static_cast<std::uint64_t>(size)),
                                " could not be written to a file in ", in_quotes(folder_), ": ", why,
                                ". Free some space there, or name another folder.");
      }
      done += count;
    }
    return place;
  }
  /// The file's own pages, which are read without a copy; what is written to them stays out of the file.
  [[nodiscard]] void* map(std::int64_t place, std::size_t size) const {
    auto* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file_, place);
    OXY_CHECK(memory != MAP_FAILED, Io, "a saved tensor of ", format_size(size),
              " could not be read back from a file in ", in_quotes(folder_), ": ", std::strerror(errno),
              ". Name a folder whose files can be mapped.");
    return memory;
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    if (--blocks_ > 0) return;
    end_ = 0;
    // Where this fails, the space is taken again by what is written next.
    static_cast<void>(!ftruncate(file_, 0));
  }

 private:
  // Blocks begin where pages of that size do: the kernel keeps and maps what is written at once in large ones.
  static constexpr std::int64_t kMapped = 64 << 10, kLargePage = 2 << 20;

  std::string folder_;
  int file_ = -1;
  std::mutex mutex_;
  std::int64_t end_ = 0, blocks_ = 0;
};

class Spilled {
 public:
  Spilled(std::shared_ptr<SpillFile> file, const c10::Storage& storage)
      : block_(std::make_shared<Block>(std::move(file), storage)) {}

  [[nodiscard]] c10::Storage unpack() const {
    auto* const memory = block_->file->map(block_->place, block_->size);
    auto end = [block = block_](void* mapped) { munmap(mapped, block->size); };
    return {c10::Storage::use_byte_size_t(), block_->size,
            c10::InefficientStdFunctionContext::makeDataPtr(memory, std::move(end), at::kCPU)};
  }
  static std::size_t bytes() { return 0; }

 private:
  // Goes with the last of what was unpacked: pages behind the end of a file cannot be read.
  struct Block {
    Block(std::shared_ptr<SpillFile> into, const c10::Storage& storage)
        : file(std::move(into)), size(storage.nbytes()), place(file->write(storage)) {}
    ~Block() { file->forget(); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    std::shared_ptr<SpillFile> file;
    std::size_t size;
    std::int64_t place;
  };
  std::shared_ptr<Block> block_;
};

// -- what of a graph is a parameter -----------------------------------------------------------------------------------

/// Whether the tensor is a parameter, or shows one: its transpose, a view of it, its copy by autocast.
bool is_of_parameter(const Tensor& tensor) {
  if (tensor.is_leaf()) return tensor.requires_grad();
  static const std::unordered_set<std::string> shows{"TBackward0",      "TransposeBackward0",  "PermuteBackward0",
                                                     "ViewBackward0",   "UnsafeViewBackward0", "ReshapeAliasBackward0",
                                                     "ExpandBackward0", "ToCopyBackward0"};
  auto* node = tensor.grad_fn().get();
  while (node != nullptr && node->num_outputs() == 1 && shows.contains(node->name())) {
    node = node->next_edge(0).function.get();
  }
  return dynamic_cast<autograd::AccumulateGrad*>(node) != nullptr;
}

}  // namespace

std::string PackedReport::text() const {
  const auto size = [](std::int64_t bytes) { return format_size(static_cast<std::uint64_t>(bytes)); };
  auto said = std::to_string(tensors) + " saved tensors of " + size(bytes) + " in " + size(packed_bytes);
  if (file_bytes > 0) said += " and a file of " + size(file_bytes);
  if (relative_error > 0) {
    std::array<char, 16> error{};
    std::snprintf(error.data(), error.size(), "%.2g", relative_error);
    said += ", rounded by " + std::string(error.data()) + " of their size";
  }
  return said;
}

struct PackSavedTensors::Inside : std::enable_shared_from_this<Inside>, TensorKeeper {
  /// The memory of saved tensors, from one change of it to the next. Shared by the nodes that saved it.
  struct Content {
    std::variant<TwoValues, Narrow, Rounded, Scaled, Spilled> packed;
    c10::weak_intrusive_ptr<c10::StorageImpl> original;
    c10::VariableVersion versions;
    std::uint32_t version;
    at::ScalarType type;
    std::mutex mutex = {};
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> unpacked = {};  // as long as somebody holds it

    [[nodiscard]] c10::Storage get() {
      const std::lock_guard lock(mutex);
      if (auto held = original.lock(); held && versions.current_version() == version) return c10::Storage(held);
      if (auto held = unpacked ? unpacked->lock() : nullptr) return c10::Storage(held);
      auto made = std::visit([](const auto& one) { return one.unpack(); }, packed);
      unpacked = made.getWeakStorageImpl();
      return made;
    }
  };

  /// In place of a tensor that a node saves.
  struct Hooks final : autograd::SavedVariableHooks {
    explicit Hooks(std::shared_ptr<Inside> of) : of(std::move(of)) {}
    void call_pack_hook(const Tensor& tensor) override {
      region = RegionClock::region();
      const RegionClock clock(region);
      content = of->content_of(tensor);
      if (content) {
        view.emplace(nullptr, tensor);
      } else {
        as_it_is = SavedAsItIs(tensor);
      }
      of.reset();
    }
    Tensor call_unpack_hook() override {
      const RegionClock clock(region);
      return content ? view->over(content->get()) : as_it_is.get();
    }
    std::shared_ptr<Inside> of;
    int region = -1;
    std::shared_ptr<Content> content;
    std::optional<View> view;
    SavedAsItIs as_it_is;
  };
  std::unique_ptr<autograd::SavedVariableHooks> make() override { return std::make_unique<Hooks>(shared_from_this()); }

  /// Of a tensor that is to be packed; null where it stays as it is.
  std::shared_ptr<Content> content_of(const Tensor& tensor) {
    if (!is_dense(tensor) || !tensor.device().is_cpu() || tensor.storage().nbytes() < least ||
        tensor.storage().nbytes() % tensor.element_size() != 0 || is_of_parameter(tensor)) {
      return nullptr;
    }
    const auto& storage = tensor.storage();
    auto* const memory = storage.unsafeGetStorageImpl();
    const std::lock_guard lock(mutex);
    if (const auto found = contents.find(memory); found != contents.end()) {
      const auto content = found->second.lock();
      const auto held = content ? content->original.lock() : nullptr;  // null: another one lies there now
      if (held.get() == memory && content->version == tensor._version()) {
        return content->type == tensor.scalar_type() ? content : nullptr;
      }
    }
    Squares squares;
    auto packed = pack(tensor, squares);
    if (!packed) return nullptr;
    const auto bytes = std::visit([](const auto& one) { return one.bytes(); }, *packed);
    ++report.tensors;
    report.bytes += static_cast<std::int64_t>(storage.nbytes());
    report.packed_bytes += static_cast<std::int64_t>(bytes);
    if (std::holds_alternative<Spilled>(*packed)) report.file_bytes += static_cast<std::int64_t>(storage.nbytes());
    sum.values += squares.values;
    sum.errors += squares.errors;
    auto content = std::shared_ptr<Content>(
        new Content{std::move(*packed), storage.getWeakStorageImpl(), tensor.unsafeGetTensorImpl()->version_counter(),
                    static_cast<std::uint32_t>(tensor._version()), tensor.scalar_type()});
    std::erase_if(contents, [](const auto& one) { return one.second.expired(); });
    contents[memory] = content;
    return content;
  }

  std::optional<decltype(Content::packed)> pack(const Tensor& tensor, Squares& squares) const {
    const auto type = tensor.scalar_type();
    const auto& storage = tensor.storage();
    const bool is_made = !tensor.is_leaf();
    // Masks lead to no parameter: no node made them.
    if (!is_made && tensor.element_size() <= 8 && !c10::isComplexType(type)) {
      if (auto bits = TwoValues::pack(storage, static_cast<std::size_t>(tensor.element_size())))
        return *std::move(bits);
    }
    if (type == at::kLong) {
      if (auto narrow = Narrow::pack(storage)) return *std::move(narrow);
    }
    if (!is_made) return std::nullopt;
    if (format == SavedFormat::BFloat16 && (type == at::kFloat || type == at::kDouble)) {
      if (auto rounded = Rounded::pack(storage, type, squares)) return *std::move(rounded);
    }
    const bool has_scale = type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
    if (format == SavedFormat::Int8 && has_scale) {
      if (auto scaled = Scaled::pack(storage, type, squares)) return *std::move(scaled);
    }
    if (format == SavedFormat::File) return Spilled(file, storage);
    return std::nullopt;
  }

  SavedFormat format = SavedFormat::Lossless;
  std::size_t least = kPackedBytes;
  std::shared_ptr<SpillFile> file;
  mutable std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Content>> contents;
  PackedReport report;
  Squares sum;
};

PackSavedTensors::PackSavedTensors(SavedFormat format, const std::string& folder, std::size_t least)
    : inside_(std::make_shared<Inside>()) {
  inside_->format = format;
  inside_->least = least;
  if (format == SavedFormat::File) inside_->file = std::make_shared<SpillFile>(folder);
}

PackSavedTensors::~PackSavedTensors() = default;

PackedReport PackSavedTensors::report() const {
  const std::lock_guard lock(inside_->mutex);
  auto report = inside_->report;
  if (inside_->sum.values > 0) report.relative_error = std::sqrt(inside_->sum.errors / inside_->sum.values);
  return report;
}

bool PackSavedTensors::others_keep() { return KeepingTensors::is_active() || KeepingTensors::has_python_hooks(); }

struct PackSavedTensors::Scope::Open {
  explicit Open(std::shared_ptr<Inside> given) : inside(std::move(given)), keeping(*inside) {}
  std::shared_ptr<Inside> inside;
  KeepingTensors keeping;
};

PackSavedTensors::Scope::Scope(PackSavedTensors& packed)
    : open_(KeepingTensors::is_possible() ? std::make_unique<Open>(packed.inside_) : nullptr) {}
PackSavedTensors::Scope::~Scope() = default;

}  // namespace oxytorch::memory
