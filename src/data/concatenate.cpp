#include <algorithm>
#include <string>
#include <utility>

#include "data/file.h"
#include "oxytorch/data/dataset.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

std::string described(const Schema& schema) {
  std::string text;
  for (const auto& field : schema.fields) {
    text += (text.empty() ? "" : ", ") + field.name + " " + std::string(name(field.dtype)) + "[";
    for (std::size_t i = 0; i < field.shape.size(); ++i)
      text += (i == 0 ? "" : ", ") + (field.shape[i] < 0 ? "?" : std::to_string(field.shape[i]));
    text += "]";
  }
  return text;
}

class ConcatenatedDataset final : public Dataset {
 public:
  explicit ConcatenatedDataset(std::vector<std::shared_ptr<const Dataset>> parts) : parts_(std::move(parts)) {
    std::vector<std::string> fingerprints;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      OXY_CHECK(parts_[i], InvalidArgument, "dataset ", i, " of those that are to be one is empty.");
      const auto& part = *parts_[i];
      OXY_CHECK(part.schema() == schema(), InvalidArgument, "dataset ", i, " has the fields ", described(part.schema()),
                ", and the first one has ", described(schema()),
                ". Samples of one batch need the same: convert one of them.");
      OXY_CHECK(part.classes() == classes(), InvalidArgument, "dataset ", i, " has ", part.classes().size(),
                " classes, and other names or another order of them than the first one, which has ", classes().size(),
                ": a label would mean different things.");
      const auto before = size();
      OXY_CHECK(part.size() <= kMost - before, InvalidArgument, "the datasets have more than ", kMost, " samples.");
      ends_.push_back(before + part.size());
      fingerprints.push_back(part.fingerprint());
    }
    fingerprint_ = fingerprint_of(fingerprints);
  }

  [[nodiscard]] const Schema& schema() const noexcept override { return parts_.front()->schema(); }
  [[nodiscard]] std::int64_t size() const noexcept override { return ends_.empty() ? 0 : ends_.back(); }
  [[nodiscard]] Sample read(std::int64_t index) const override {
    const auto [part, inside] = find(index);
    return part->read(inside);
  }
  [[nodiscard]] bool reads_into() const noexcept override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->reads_into(); });
  }
  void read_into(std::int64_t index, const std::vector<std::byte*>& fields) const override {
    const auto [part, inside] = find(index);
    part->read_into(inside, fields);
  }
  [[nodiscard]] std::string place(std::int64_t index) const override {
    const auto [part, inside] = find(index);
    return part->place(inside);
  }
  [[nodiscard]] std::string fingerprint() const override { return fingerprint_; }
  void will_read(std::int64_t index) const override {
    const auto [part, inside] = find(index);
    part->will_read(inside);
  }
  [[nodiscard]] bool remote() const noexcept override {
    return std::any_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->remote(); });
  }
  [[nodiscard]] std::string format() const override {
    const auto first = parts_.front()->format();
    const bool alike =
        std::all_of(parts_.begin(), parts_.end(), [&](const auto& part) { return part->format() == first; });
    return alike ? first : "several";
  }
  [[nodiscard]] std::vector<std::string> classes() const override { return parts_.front()->classes(); }
  [[nodiscard]] std::vector<std::int64_t> part_sizes() const override {
    std::vector<std::int64_t> sizes;
    for (const auto& part : parts_) sizes.push_back(part->size());
    return sizes;
  }

 private:
  static constexpr std::int64_t kMost = std::int64_t{1} << 60;

  [[nodiscard]] std::pair<const Dataset*, std::int64_t> find(std::int64_t index) const {
    OXY_CHECK(index >= 0 && index < size(), OutOfRange, "sample ", index, " of a dataset of ", size(), ".");
    const auto part = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin());
    return {parts_[part].get(), part == 0 ? index : index - ends_[part - 1]};
  }

  std::vector<std::shared_ptr<const Dataset>> parts_;
  std::vector<std::int64_t> ends_;  // of each part's samples
  std::string fingerprint_;
};

}  // namespace

std::vector<std::int64_t> Dataset::part_sizes() const { return {size()}; }

std::shared_ptr<const Dataset> concatenate(std::vector<std::shared_ptr<const Dataset>> parts) {
  OXY_CHECK(!parts.empty() && parts.front(), InvalidArgument,
            "there are no datasets to be one: give at least one of them.");
  return std::make_shared<ConcatenatedDataset>(std::move(parts));
}

}  // namespace oxytorch::data
