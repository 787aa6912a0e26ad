#include "optim/archive.h"

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <string>
#include <utility>

#include "oxytorch/error.h"

namespace oxytorch::optim {
namespace {

using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Names and structure are those of torch/csrc/api/include/torch/optim/serialize.h.
constexpr const char* kTorchVersion = "1.5.0";
// In its place where torch could not carry on from the archive: torch refuses every other version.
constexpr const char* kOwnVersion = "oxytorch 1";
constexpr const char* kClass = "oxytorch";

const TailOptimizerOptions& options_of(const OptimizerParamGroup& group) {
  return static_cast<const TailOptimizerOptions&>(group.options());
}

// Calls visit(name, tensor) for each entry of a state but the step count.
template <class State, class Visit>
void each_entry(Algorithm algorithm, State& state, Visit visit) {
  const auto names = moment_names(algorithm);
  for (std::size_t k = 0; k < names.size(); ++k) {
    if (names[k] == nullptr) continue;
    visit(std::string(names[k]), state.moments[k]);
    visit(std::string(names[k]) + "_scale", state.scales[k]);
  }
  visit("master", state.master);
  visit("low_bits", state.low_bits);
  visit("ema", state.ema);
  visit("copy", state.copy);
}

bool torch_could_carry_on(const ParamState& state) {
  return !state.master.defined() && !state.low_bits.defined() &&
         std::none_of(state.scales.begin(), state.scales.end(), [](const at::Tensor& t) { return t.defined(); });
}

// The text of `archive` at `key`; empty if there is none.
std::string text_at(InputArchive& archive, const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value) && value.isString() ? value.toStringRef() : std::string();
}

std::size_t size_at(InputArchive& archive, const std::string& key) {
  at::Tensor size;
  archive.read(key, size);
  return static_cast<std::size_t>(size.item<std::int64_t>());
}

ParamState read_state(InputArchive& archive, const at::Tensor& param, std::size_t index,
                      const TailOptimizerOptions& options) {
  ParamState state;
  std::vector<std::string> known{"step"};
  each_entry(options.algorithm(), state, [&](const std::string& name, at::Tensor& entry) {
    known.push_back(name);
    c10::IValue value;
    if (archive.try_read(name, value) && value.toTensor().defined()) entry = value.toTensor().to(param.device());
  });
  for (const std::string& key : archive.keys()) {
    OXY_CHECK(std::find(known.begin(), known.end(), key) != known.end(), InvalidArgument,
              "the archived state of parameter ", index, " has '", key, "', which ", options.optimizer_name(),
              " does not keep; it is of another optimizer.");
  }
  c10::IValue step;
  if (archive.try_read("step", step)) {
    const bool wide = c10::typeMetaToScalarType(at::get_default_dtype()) == at::kDouble;
    state.step = at::full({}, step.toInt(), at::TensorOptions(wide ? at::kDouble : at::kFloat).device(param.device()));
  }
  return state;
}

}  // namespace

void write_archive(OutputArchive& archive, const ParamGroups& groups, const StepTail& tail) {
  const TailOptimizerOptions* const any = groups.empty() ? nullptr : &options_of(groups.front());
  bool for_torch = true;
  OutputArchive states(archive.compilation_unit()), written_groups(archive.compilation_unit());
  written_groups.write("param_groups/size", torch::tensor(static_cast<std::int64_t>(groups.size())));
  std::size_t index = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const TailOptimizerOptions& options = options_of(groups[g]);
    for_torch = for_torch && !options.group().maximize;
    OutputArchive group(archive.compilation_unit()), written_options(archive.compilation_unit());
    const std::size_t count = groups[g].params().size();
    group.write("params/size", torch::tensor(static_cast<std::int64_t>(count)));
    for (std::size_t i = 0; i < count; ++i, ++index) {
      const std::string key = std::to_string(index);
      group.write("params/" + std::to_string(i), c10::IValue(key));
      const ParamState& state = tail.state(index);
      OutputArchive entries(archive.compilation_unit());
      bool any_entry = state.step.defined();
      if (any_entry) entries.write("step", c10::IValue(static_cast<std::int64_t>(state.step.item<double>())));
      each_entry(options.algorithm(), state, [&](const std::string& name, const at::Tensor& entry) {
        if (!entry.defined()) return;
        entries.write(name, c10::IValue(entry));
        any_entry = true;
      });
      if (any_entry) states.write(key, entries);
      for_torch = for_torch && torch_could_carry_on(state);
    }
    options.serialize(written_options);
    group.write("options", written_options);
    written_groups.write("param_groups/" + std::to_string(g), group);
  }
  archive.write("pytorch_version", c10::IValue(for_torch ? kTorchVersion : kOwnVersion));
  if (any != nullptr) archive.write(kClass, c10::IValue(any->optimizer_name()));
  archive.write("state", states);
  archive.write("param_groups", written_groups);
}

ArchivedOptimizer read_archive(InputArchive& archive, const ParamGroups& groups) {
  ArchivedOptimizer result;
  if (groups.empty()) return result;
  const char* const name = options_of(groups.front()).optimizer_name();
  const std::string version = text_at(archive, "pytorch_version"), saved_class = text_at(archive, kClass);
  OXY_CHECK(version == kTorchVersion || version == kOwnVersion, InvalidArgument,
            "the archive is not one of an optimizer, or of torch before 1.5 (its version is '", version,
            "'); give one that an optimizer's save() wrote.");
  OXY_CHECK(saved_class.empty() || saved_class == name, InvalidArgument, "the archive is of ", saved_class, ", not of ",
            name, "; load it into the optimizer that wrote it.");
  InputArchive states, saved_groups;
  archive.read("state", states);
  archive.read("param_groups", saved_groups);
  const std::size_t count = size_at(saved_groups, "param_groups/size");
  OXY_CHECK(count == groups.size(), InvalidArgument, "the archive has ", count, " parameter groups; the optimizer has ",
            groups.size(), ".");
  for (std::size_t g = 0; g < groups.size(); ++g) {
    InputArchive group, saved_options;
    saved_groups.read("param_groups/" + std::to_string(g), group);
    const std::vector<at::Tensor>& params = groups[g].params();
    const std::size_t saved = size_at(group, "params/size");
    OXY_CHECK(saved == params.size(), InvalidArgument, "group ", g, " of the archive has ", saved,
              " parameters; the optimizer's has ", params.size(), ".");
    std::unique_ptr<torch::optim::OptimizerOptions> options = groups[g].options().clone();
    group.read("options", saved_options);
    options->serialize(saved_options);
    result.options.emplace_back(static_cast<TailOptimizerOptions*>(options.release()));
    for (std::size_t i = 0; i < params.size(); ++i) {
      const std::string key = text_at(group, "params/" + std::to_string(i));
      InputArchive entries;
      const bool found = states.try_read(key, entries);
      result.states.push_back(found ? read_state(entries, params[i], result.states.size(), *result.options.back())
                                    : ParamState());
    }
  }
  return result;
}

}  // namespace oxytorch::optim
