#include "tune/operator_call.h"

#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>
#include <array>
#include <string>

#include "tune/deferred.h"

namespace oxytorch::tune {

using at::Tensor;

bool is_operator(const c10::OperatorHandle& op, const char* name, const char* overload) {
  const auto& found = op.operator_name();
  return found.name == name && (overload == nullptr || found.overload_name == overload);
}

bool is_tensor(const c10::IValue& argument) { return argument.isTensor() && argument.toTensor().defined(); }

std::optional<double> number_of(const c10::IValue& argument) {
  if (argument.isScalar()) {
    const auto number = argument.toScalar();
    return number.isComplex() ? std::nullopt : std::optional(number.toDouble());
  }
  if (!is_tensor(argument) || is_deferred(argument.toTensor())) return std::nullopt;
  const Tensor number = argument.toTensor();
  const std::array<Tensor, 1> one{number};
  if (number.dim() != 0 || !number.is_cpu() || number.requires_grad() || at::areAnyTensorSubclassLike(one) ||
      at::isComplexType(number.scalar_type())) {
    return std::nullopt;
  }
  return number.item().toDouble();
}

std::optional<at::ScalarType> converted_to(const c10::OperatorHandle& op, const Arguments& arguments) {
  if (is_operator(op, "aten::to", "dtype") && !arguments[3].toBool() && arguments[4].isNone()) {
    return arguments[1].toScalarType();
  }
  if (is_operator(op, "aten::to", "dtype_layout") && arguments[2].isNone() && !arguments[1].isNone() &&
      arguments[4].isNone() && !arguments[6].toBool() && arguments[7].isNone() &&
      (arguments[3].isNone() || arguments[3].toDevice() == arguments[0].toTensor().device())) {
    return arguments[1].toScalarType();
  }
  if (is_operator(op, "aten::type_as") && is_tensor(arguments[1]) &&
      arguments[1].toTensor().device() == arguments[0].toTensor().device()) {
    return arguments[1].toTensor().scalar_type();
  }
  return std::nullopt;
}

namespace {

// The labels of one operand, a letter for each dimension; digits stand for those of an ellipsis. Nothing where they are
// not one for each.
std::optional<std::string> labels_of(std::string_view text, std::int64_t dims) {
  std::string labels;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ' ') continue;
    if (text[i] == '.') {
      if (text.substr(i, 3) != "..." || !labels.empty()) return std::nullopt;
      i += 2;
      const auto named = std::count_if(text.begin(), text.end(), [](char c) { return c != '.' && c != ' '; });
      for (std::int64_t k = named; k < dims; ++k) labels += static_cast<char>('0' + (k - named));
      continue;
    }
    if (labels.find(text[i]) != std::string::npos) return std::nullopt;  // a diagonal
    labels += text[i];
  }
  return static_cast<std::int64_t>(labels.size()) == dims ? std::optional(labels) : std::nullopt;
}

std::vector<std::int64_t> places_of(const std::string& wanted, const std::string& labels) {
  std::vector<std::int64_t> places;
  for (const char label : wanted) places.push_back(static_cast<std::int64_t>(labels.find(label)));
  return places;
}

}  // namespace

std::optional<EinsumProduct> einsum_product(std::string_view equation, std::int64_t left_dims,
                                            std::int64_t right_dims) {
  const auto comma = equation.find(','), arrow = equation.find("->");
  if (comma == std::string_view::npos || arrow == std::string_view::npos || arrow < comma) return std::nullopt;
  const auto left = labels_of(equation.substr(0, comma), left_dims);
  const auto right = labels_of(equation.substr(comma + 1, arrow - comma - 1), right_dims);
  const auto result = left_dims == right_dims ? labels_of(equation.substr(arrow + 2), left_dims) : std::nullopt;
  if (!left || !right || !result) return std::nullopt;
  const auto is_in = [](char label, const std::string& labels) { return labels.find(label) != std::string::npos; };
  std::string batches, rows, columns, summed;
  for (const char label : *result) {
    (is_in(label, *left) ? is_in(label, *right) ? batches : rows : columns) += label;
  }
  for (const char label : *left) {
    if (!is_in(label, *result)) summed += label;
  }
  if (rows.size() != 1 || columns.size() != 1 || summed.size() != 1 || !is_in(summed[0], *right)) return std::nullopt;
  return EinsumProduct{places_of(batches + rows + summed, *left), places_of(batches + summed + columns, *right),
                       places_of(*result, batches + rows + columns)};
}

std::vector<Tensor> tensors_of(const Arguments& arguments) {
  std::vector<Tensor> found;
  for (const auto& argument : arguments) {
    if (is_tensor(argument)) found.push_back(argument.toTensor());
  }
  return found;
}

}  // namespace oxytorch::tune
