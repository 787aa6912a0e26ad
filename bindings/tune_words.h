/// Enumerations of the tuner, which are words in Python.
#pragma once

#include <pybind11/typing.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/spelling.h"
#include "bindings.h"
#include "oxytorch/error.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/kind.h"
#include "oxytorch/tune/paired_test.h"

namespace pybind11::detail {

/// An enumeration as one of its words, in the order of its values.
template <class Enum, typing::StringLiteral... Quoted>
struct word_caster {
  PYBIND11_TYPE_CASTER(Enum, (handle_type_name<typing::Literal<Quoted...>>::name));

  static std::string unquoted(std::string_view text) { return std::string(text.substr(1, text.size() - 2)); }
  static const std::vector<std::string>& words() {
    static const std::vector<std::string> kWords{unquoted(Quoted.name)...};
    return kWords;
  }

  bool load(handle source, bool) {
    if (!isinstance<str>(source)) return false;
    const auto word = source.cast<std::string>();
    const auto found = std::find(words().begin(), words().end(), word);
    OXY_CHECK(found != words().end(), InvalidArgument, "unknown word ", oxytorch::in_quotes(word), "; ",
              oxytorch::did_you_mean(word, words()), "use ", oxytorch::list_of(words(), true), '.');
    value = static_cast<Enum>(found - words().begin());
    return true;
  }
  static handle cast(Enum value, return_value_policy, handle) {
    return str(words()[static_cast<std::size_t>(value)]).release();
  }
};

template <>
struct type_caster<oxytorch::tune::Kind>
    : word_caster<oxytorch::tune::Kind, "'exact'", "'tolerance'", "'precision'", "'trade'"> {};
template <>
struct type_caster<oxytorch::tune::Decision> : word_caster<oxytorch::tune::Decision, "'open'", "'accept'", "'reject'"> {
};
template <>
struct type_caster<oxytorch::tune::Status> : word_caster<oxytorch::tune::Status, "'accepted'", "'rejected'",
                                                         "'refused'", "'failed'", "'skipped'", "'rolled back'"> {};

}  // namespace pybind11::detail
