#include "data/loader_state.h"

#include <nlohmann/json.hpp>

#include "oxytorch/error.h"

namespace oxytorch::data {

std::string write_loader_state(const LoaderState& state) {
  return nlohmann::json{{"v", 2},
                        {"seed", state.seed},
                        {"epoch", state.epoch},
                        {"batches", state.batches},
                        {"samples", state.samples},
                        {"batch", state.batch},
                        {"dataset", state.dataset},
                        {"order", state.order}}
      .dump();
}

LoaderState read_loader_state(const std::string& text) {
  const auto shown = text.substr(0, 100);
  try {
    const auto json = nlohmann::json::parse(text);
    OXY_CHECK(json.at("v") == 2, InvalidArgument, "the state of the loader is of version ", json.at("v").dump(),
              "; this one reads version 2: ", shown);
    const auto take = [&](const char* name, auto& to) {
      const auto& found = json.at(name);
      // What is too large for a whole number is a floating-point one to the parser.
      OXY_CHECK(found.is_number_integer(), InvalidArgument, "'", name, "' of the loader's state is ", found.dump(),
                ", expected a whole number: ", shown);
      found.get_to(to);
    };
    LoaderState state;
    take("seed", state.seed);
    take("epoch", state.epoch);
    take("batches", state.batches);
    take("samples", state.samples);
    take("batch", state.batch);
    json.at("dataset").get_to(state.dataset);
    json.at("order").get_to(state.order);
    OXY_CHECK(state.epoch >= 0 && state.batches >= 0 && state.samples >= 0 && state.batch > 0, InvalidArgument,
              "the state of the loader has a negative place: ", shown);
    return state;
  } catch (const nlohmann::json::exception& error) {
    OXY_CHECK(false, InvalidArgument, "this is no state of a loader (", error.what(), "): ", shown);
  }
}

}  // namespace oxytorch::data
