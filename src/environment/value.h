/// Whether a value is one that the component reads as meant.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/spelling.h"
#include "oxytorch/environment.h"

namespace oxytorch::environment {

/// What is wrong with the value, as a clause after "is": "not a whole number"; "" where nothing is.
std::string fault_of(const Setting& setting, std::string_view value);

/// A language that values of some settings are written in.
struct Grammar {
  std::string_view name;
  const char* allowed;                     ///< what may be set, for messages
  std::string (*fault)(std::string_view);  ///< as fault_of
};

/// Null where there is none of that name.
const Grammar* find_grammar(std::string_view name);
std::vector<std::string> grammar_names();

/// "key:value" pairs, or those that `by` and `sign` separate; brackets keep what is inside them together.
std::vector<std::pair<std::string, std::string>> pairs_of(std::string_view text, char by, char sign);

/// Whether a flag's text means yes; 0, no, off, false and "" do not.
bool is_on(std::string_view value);

/// Whether it may name a variable of the environment.
bool is_name(std::string_view text);
bool one_of(std::string_view word, std::initializer_list<std::string_view> words);
std::string lower(std::string_view text);
std::vector<std::string_view> split(std::string_view text, char by);
std::optional<long long> whole(std::string_view text);
std::optional<double> real(std::string_view text);

/// Negative, zero or positive as version `a` is older than, equal to or newer than `b`; parts that are not numbers end
/// a version.
int compare_versions(std::string_view a, std::string_view b);

}  // namespace oxytorch::environment
