#include "oxytorch/data/stage.h"

#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

class FunctionStage final : public Stage {
 public:
  FunctionStage(std::string name, std::function<void(Item&, PhiloxStream&)> function)
      : name_(std::move(name)), function_(std::move(function)) {
    OXY_CHECK(function_ != nullptr, InvalidArgument, "the stage '", name_, "' was given no function.");
  }
  [[nodiscard]] std::string name() const override { return name_; }
  void apply(Item& item, PhiloxStream& random) const override { function_(item, random); }

 private:
  std::string name_;
  std::function<void(Item&, PhiloxStream&)> function_;
};

}  // namespace

Stage::~Stage() = default;

StagePtr stage(std::string name, std::function<void(Item&, PhiloxStream&)> function) {
  return std::make_shared<FunctionStage>(std::move(name), std::move(function));
}

}  // namespace oxytorch::data
