#include <algorithm>
#include <cstring>
#include <limits>

#include "data/byte_reader.h"
#include "data/file.h"
#include "data/token_source.h"
#include "oxytorch/data/dataset.h"
#include "oxytorch/error.h"
#include "oxytorch/isa.h"

namespace oxytorch::data {
namespace {

// One loop for each instruction set, and vectorised by the compiler. All give the same.
template <class T>
[[gnu::always_inline]] inline void widen_loop(const std::byte* from, std::int64_t count, std::int64_t* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) {
    T token;
    std::memcpy(&token, from + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    to[i] = static_cast<std::int64_t>(token);  // NOLINT(bugprone-signed-char-misuse): int8 is a number here
  }
}
template <class T>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void widen_avx512(const std::byte* from, std::int64_t count,
                                                                        std::int64_t* to) {
  widen_loop<T>(from, count, to);
}
template <class T>
[[gnu::target("avx2")]] void widen_avx2(const std::byte* from, std::int64_t count, std::int64_t* to) {
  widen_loop<T>(from, count, to);
}
template <class T>
void widen_tokens(const std::byte* from, std::int64_t count, std::int64_t* to) {
  switch (active_isa()) {
    case Isa::Avx512: return widen_avx512<T>(from, count, to);
    case Isa::Avx2: return widen_avx2<T>(from, count, to);
    case Isa::Scalar: return widen_loop<T>(from, count, to);
  }
}

void widen_tokens(DType dtype, const std::byte* from, std::int64_t count, std::int64_t* to) {
  switch (dtype) {
    case DType::U8: return widen_tokens<std::uint8_t>(from, count, to);
    case DType::I8: return widen_tokens<std::int8_t>(from, count, to);
    case DType::U16: return widen_tokens<std::uint16_t>(from, count, to);
    case DType::I16: return widen_tokens<std::int16_t>(from, count, to);
    case DType::U32: return widen_tokens<std::uint32_t>(from, count, to);
    case DType::I32: return widen_tokens<std::int32_t>(from, count, to);
    default: std::memcpy(to, from, static_cast<std::size_t>(count) * 8);
  }
}

/// Tokens of any dataset, sample by sample.
class SampleTokens final : public TokenSource {
 public:
  SampleTokens(std::shared_ptr<const Dataset> dataset, std::size_t field)
      : dataset_(std::move(dataset)), field_(field), dtype_(schema_field().dtype) {
    const auto& shape = schema_field().shape;
    if (shape.empty() || shape[0] >= 0) {
      fixed_ = shape.empty() ? 1 : shape[0];
      const bool fits = !__builtin_mul_overflow(dataset_->size(), fixed_, &tokens_);
      OXY_CHECK(fits, InvalidArgument, "a dataset of ", dataset_->size(), " samples has too many tokens to count.");
      return;
    }
    for (std::int64_t i = 0; i < dataset_->size(); ++i) {
      tokens_ += static_cast<std::int64_t>(sample(i).bytes.size() / size_of(dtype_));
      ends_.push_back(tokens_);
    }
  }

  [[nodiscard]] std::int64_t tokens() const override { return tokens_; }
  [[nodiscard]] DType token_dtype() const override { return dtype_; }
  [[nodiscard]] View view_tokens(std::int64_t first, std::int64_t count) const override {
    const auto [index, skipped] = find(first);
    auto view = sample(index);
    const auto length = size(index);
    OXY_CHECK(view.bytes.size() == static_cast<std::size_t>(length) * size_of(dtype_), Io, dataset_->place(index),
              ": the sample has ", view.bytes.size() / size_of(dtype_), " tokens, and had ", length, " before.");
    view.bytes = view.bytes.subspan(static_cast<std::size_t>(skipped) * size_of(dtype_),
                                    static_cast<std::size_t>(std::min(count, length - skipped)) * size_of(dtype_));
    return view;
  }
  void will_view_tokens(std::int64_t first, std::int64_t count) const override {
    const auto last = find(first + count - 1).first;
    for (auto i = find(first).first; i <= last; ++i) dataset_->will_read(i);
  }
  [[nodiscard]] std::string token_place(std::int64_t token) const override {
    return dataset_->place(find(token).first);
  }

 private:
  [[nodiscard]] const Field& schema_field() const noexcept { return dataset_->schema().fields[field_]; }
  [[nodiscard]] View sample(std::int64_t index) const {
    auto value = std::move(dataset_->read(index)[field_]);
    OXY_CHECK(value.dtype == dtype_ && value.shape.size() <= 1, Io, dataset_->place(index), ": field '",
              schema_field().name, "' is ", name(value.dtype), " of ", value.shape.size(), " dimensions, not ",
              name(dtype_), " of one.");
    return std::move(value.data);
  }
  /// The sample of a token, and the tokens of it that come before.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> find(std::int64_t token) const {
    if (fixed_ > 0) return {token / fixed_, token % fixed_};
    const auto index = std::upper_bound(ends_.begin(), ends_.end(), token) - ends_.begin();
    return {index, token - (ends_[static_cast<std::size_t>(index)] - size(index))};
  }
  [[nodiscard]] std::int64_t size(std::int64_t index) const {
    if (fixed_ > 0) return fixed_;
    const auto i = static_cast<std::size_t>(index);
    return i == 0 ? ends_[0] : ends_[i] - ends_[i - 1];
  }

  std::shared_ptr<const Dataset> dataset_;
  std::size_t field_;
  DType dtype_;
  std::int64_t fixed_ = 0;          // tokens of each sample where all have as many
  std::vector<std::int64_t> ends_;  // of the samples otherwise
  std::int64_t tokens_ = 0;
};

class TokenWindows final : public Dataset {
 public:
  /// `source` is `dataset`, or reads it.
  TokenWindows(std::shared_ptr<const Dataset> dataset, std::shared_ptr<const TokenSource> source, std::int64_t tokens,
               std::int64_t length)
      : dataset_(std::move(dataset)),
        source_(std::move(source)),
        dtype_(source_->token_dtype()),
        length_(length),
        size_(tokens > 0 ? (tokens - 1) / length : 0),
        schema_{{{"tokens", Kind::Array, DType::I64, {length + 1}}}} {}

  [[nodiscard]] const Schema& schema() const noexcept override { return schema_; }
  [[nodiscard]] std::int64_t size() const noexcept override { return size_; }

  [[nodiscard]] Sample read(std::int64_t index) const override {
    const auto count = static_cast<std::size_t>(length_ + 1);
    auto window = std::make_shared_for_overwrite<std::int64_t[]>(count);
    write(index, window.get());
    Sample sample(1);
    const std::span<const std::int64_t> written(window.get(), count);
    sample[0] = {DType::I64, schema_.fields[0].shape, {std::as_bytes(written), std::move(window)}};
    return sample;
  }
  [[nodiscard]] bool reads_into() const noexcept override { return true; }
  void read_into(std::int64_t index, const std::vector<std::byte*>& fields) const override {
    write(index, reinterpret_cast<std::int64_t*>(fields[0]));
  }

  [[nodiscard]] std::string place(std::int64_t index) const override {
    const auto first = first_token(index);
    return source_->token_place(first) + " (tokens " + std::to_string(first) + " to " +
           std::to_string(first + length_) + ")";
  }
  [[nodiscard]] std::string fingerprint() const override {
    return fingerprint_of({dataset_->fingerprint(), std::to_string(length_)});
  }
  void will_read(std::int64_t index) const override { source_->will_view_tokens(first_token(index), length_ + 1); }
  [[nodiscard]] bool remote() const noexcept override { return dataset_->remote(); }
  [[nodiscard]] std::string format() const override { return dataset_->format(); }

 private:
  void write(std::int64_t index, std::int64_t* window) const {
    const auto first = first_token(index), count = length_ + 1;
    for (std::int64_t done = 0; done < count;) {
      const auto run = source_->view_tokens(first + done, count - done);
      const auto tokens = static_cast<std::int64_t>(run.bytes.size() / size_of(dtype_));
      OXY_ASSERT(tokens > 0 && tokens <= count - done, "A run of ", tokens, " tokens.");
      widen_tokens(dtype_, run.bytes.data(), tokens, window + done);
      done += tokens;
    }
    if (dtype_ == DType::U64) {
      const bool fits = std::all_of(window, window + count, [](std::int64_t token) { return token >= 0; });
      OXY_CHECK(fits, Io, place(index), ": a token is 2^63 or more, which int64 does not hold.");
    }
  }

  [[nodiscard]] std::int64_t first_token(std::int64_t index) const {
    OXY_CHECK(index >= 0 && index < size_, OutOfRange, "window ", index, " is outside of the dataset, which has ",
              size_, " windows of ", length_, " tokens.");
    return index * length_;
  }

  std::shared_ptr<const Dataset> dataset_;
  std::shared_ptr<const TokenSource> source_;
  DType dtype_;
  std::int64_t length_, size_;
  Schema schema_;
};

/// The field that holds tokens: "tokens", "array", or the first.
std::size_t token_field(const Schema& schema) {
  OXY_CHECK(!schema.fields.empty(), InvalidArgument, "the dataset has no fields, so it has no tokens.");
  auto found = std::max<std::int64_t>(schema.find("tokens"), -1);
  if (found < 0) found = std::max<std::int64_t>(schema.find("array"), 0);
  const auto& field = schema.fields[static_cast<std::size_t>(found)];
  OXY_CHECK(field.kind == Kind::Array && is_integer(field.dtype) && field.shape.size() <= 1, InvalidArgument, "field '",
            field.name, "' is no row of integers (it is ", field.kind == Kind::Array ? name(field.dtype) : "no array",
            " of ", field.shape.size(), " dimensions), and token windows are cut of those.");
  return static_cast<std::size_t>(found);
}

}  // namespace

TokenSource::~TokenSource() = default;

std::shared_ptr<const Dataset> token_windows(std::shared_ptr<const Dataset> tokens, std::int64_t length) {
  OXY_CHECK(tokens, InvalidArgument, "there is no dataset to take token windows of.");
  OXY_CHECK(length >= 1 && length < std::numeric_limits<std::int64_t>::max() / 8, InvalidArgument,
            "the length of token windows is ", length, "; it must be at least 1.");
  const auto field = token_field(tokens->schema());
  auto source = std::dynamic_pointer_cast<const TokenSource>(tokens);
  auto count = source ? source->tokens() : -1;
  if (count < 0) {
    source = std::make_shared<SampleTokens>(tokens, field);
    count = source->tokens();
  }
  return std::make_shared<TokenWindows>(std::move(tokens), std::move(source), count, length);
}

}  // namespace oxytorch::data
