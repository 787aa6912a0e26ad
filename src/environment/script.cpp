// Reads shell text for the variables that it sets. It runs nothing and forgives everything: what it does not understand
// sets nothing.
#include <algorithm>
#include <map>
#include <set>

#include "oxytorch/environment.h"
#include "value.h"

namespace oxytorch::environment {
namespace {

bool name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool name_part(char c) { return name_start(c) || (c >= '0' && c <= '9'); }

struct Word {
  std::string text;
  bool exact = true;      ///< nothing in it depends on the run
  bool quoted = false;    ///< some of it stands in quotes
  std::size_t plain = 0;  ///< letters at the start that no quote or expansion touched
  int line = 0;
};

/// NAME=value or NAME+=value, with NAME unquoted.
struct Pair {
  std::string name;
  std::string value;
  bool append = false;
};

std::optional<Pair> pair_in(const Word& word) {
  const std::size_t equals = word.text.find('=');
  if (equals == std::string::npos || equals >= word.plain || equals == 0) return std::nullopt;
  const bool append = word.text[equals - 1] == '+';
  std::string name = word.text.substr(0, equals - (append ? 1 : 0));
  if (!is_name(name)) return std::nullopt;
  return Pair{std::move(name), word.text.substr(equals + 1), append};
}

class ScriptReader {
 public:
  ScriptReader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  std::vector<Assignment> read() {
    std::vector<Word> words;
    while (at_ < text_.size()) {
      while (line_start_) sbatch_line();
      if (at_ >= text_.size()) break;
      const char c = text_[at_];
      if (c == '\n') {
        finish(words);
        next_line();
      } else if (c == ' ' || c == '\t' || c == '\r') {
        ++at_;
      } else if (c == '\\' && at_ + 1 < text_.size() && text_[at_ + 1] == '\n') {
        at_ += 2;
        ++line_;
      } else if (c == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (c == '<' || c == '>') {
        redirect();
      } else if (c == '(' && array_value(words)) {
        skip_parentheses();
      } else if (one_of(std::string_view(&c, 1), {";", "&", "|", "(", ")"})) {
        finish(words);
        ++at_;
      } else {
        Word word = read_word("");
        const bool descriptor = at_ < text_.size() && (text_[at_] == '<' || text_[at_] == '>') && whole(word.text);
        if (!descriptor) words.push_back(std::move(word));
      }
    }
    finish(words);
    // A file of assignments alone is one that a launcher reads.
    if (!commands_) exports_all_ = true;
    for (Assignment& one : found_) {
      one.exported = one.exported || exports_all_ || one.removed || exported_.count(one.name) != 0;
    }
    return std::move(found_);
  }

 private:
  // ---- letters ----

  [[nodiscard]] char peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }

  /// Past the newline at which we are, and past the bodies of here-documents that began on the line.
  void next_line() {
    ++at_;
    ++line_;
    for (const auto& [end, tabs] : documents_) {
      while (at_ < text_.size()) {
        const std::size_t stop = std::min(text_.find('\n', at_), text_.size());
        std::string_view body = text_.substr(at_, stop - at_);
        if (!body.empty() && body.back() == '\r') body.remove_suffix(1);
        while (tabs && !body.empty() && body.front() == '\t') body.remove_prefix(1);
        at_ = std::min(stop + 1, text_.size());
        ++line_;
        if (body == end) break;
      }
    }
    documents_.clear();
    line_start_ = true;
  }

  void skip_parentheses() {
    int depth = 0;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n') ++line_;
      if (c == '\\' && at_ + 1 < text_.size()) {
        ++at_;
        if (text_[at_] == '\n') ++line_;
      } else if (c == '\'' || c == '"') {
        skip_quoted(c);
        continue;
      } else if (c == '(') {
        ++depth;
      } else if (c == ')' && --depth <= 0) {
        ++at_;
        return;
      }
      ++at_;
    }
  }

  void skip_quoted(char quote) {
    ++at_;
    while (at_ < text_.size() && text_[at_] != quote) {
      if (quote != '\'' && text_[at_] == '\\' && at_ + 1 < text_.size()) ++at_;
      if (text_[at_] == '\n') ++line_;
      ++at_;
    }
    if (at_ < text_.size()) ++at_;
  }

  void redirect() {
    const char first = text_[at_++];
    if (first == '<' && peek() == '<' && peek(1) != '<') {
      ++at_;
      const bool tabs = peek() == '-';
      if (tabs) ++at_;
      skip_blanks();
      Word end = read_word("");
      if (!end.text.empty()) documents_.emplace_back(std::move(end.text), tabs);
      return;
    }
    while (peek() == '<' || peek() == '>' || peek() == '&' || peek() == '|') ++at_;
    if (peek() == '(') {
      skip_parentheses();
      return;
    }
    skip_blanks();
    if (at_ < text_.size() && text_[at_] != '\n') read_word("");
  }

  void skip_blanks() {
    while (peek() == ' ' || peek() == '\t') ++at_;
  }

  /// Whether the parenthesis at which we are opens the array of `NAME=(`.
  bool array_value(std::vector<Word>& words) const {
    if (words.empty() || at_ == 0 || text_[at_ - 1] != '=') return false;
    const auto pair = pair_in(words.back());
    if (!pair || !pair->value.empty()) return false;
    words.pop_back();
    return true;
  }

  // ---- words ----

  void literal(Word& word, char c) const {
    if (!word.quoted && word.plain == word.text.size()) ++word.plain;
    word.text += c;
  }

  /// Up to a blank or an operator, or to one of `stops` where there are any (inside ${...}).
  Word read_word(std::string_view stops, int depth = 0) {
    Word word;
    word.line = line_;
    const std::size_t start = at_;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (stops.empty() ? std::string_view(" \t\r\n;&|<>()").find(c) != std::string_view::npos
                        : stops.find(c) != std::string_view::npos) {
        break;
      }
      if (c == '\\') {
        ++at_;
        if (at_ == text_.size()) break;
        if (text_[at_] == '\n') {
          ++line_;
        } else {
          word.quoted = true;
          word.text += text_[at_];
        }
        ++at_;
      } else if (c == '\'') {
        single_quotes(word);
      } else if (c == '"') {
        double_quotes(word, depth);
      } else if (c == '$') {
        dollar(word, depth);
      } else if (c == '`') {
        skip_quoted('`');
        inexact(word);
      } else {
        if (c == '\n') ++line_;
        literal(word, c);
        ++at_;
      }
    }
    if (at_ == start && stops.empty()) ++at_;  // never stand still
    return word;
  }

  static void inexact(Word& word) {
    word.exact = false;
    word.quoted = true;
  }

  void single_quotes(Word& word) {
    word.quoted = true;
    for (++at_; at_ < text_.size() && text_[at_] != '\''; ++at_) {
      if (text_[at_] == '\n') ++line_;
      word.text += text_[at_];
    }
    if (at_ < text_.size()) ++at_;
  }

  void double_quotes(Word& word, int depth) {
    word.quoted = true;
    ++at_;
    while (at_ < text_.size() && text_[at_] != '"') {
      const char c = text_[at_];
      if (c == '\\' && at_ + 1 < text_.size()) {
        const char after = text_[at_ + 1];
        at_ += 2;
        if (after == '\n') {
          ++line_;
          continue;
        }
        if (!one_of(std::string_view(&after, 1), {"$", "`", "\"", "\\"})) word.text += '\\';
        word.text += after;
      } else if (c == '$') {
        dollar(word, depth);
      } else if (c == '`') {
        skip_quoted('`');
        inexact(word);
      } else {
        if (c == '\n') ++line_;
        word.text += c;
        ++at_;
      }
    }
    if (at_ < text_.size()) ++at_;
  }

  void take(Word& word, const std::string& name) const {
    word.quoted = true;
    if (const auto known = values_.find(name); known != values_.end()) {
      word.text += known->second;
    } else {
      word.exact = false;
    }
  }

  void dollar(Word& word, int depth) {
    const char after = peek(1);
    if (after == '\'') {
      ++at_;
      single_quotes(word);
    } else if (after == '(') {
      ++at_;
      skip_parentheses();
      inexact(word);
    } else if (after == '{') {
      at_ += 2;
      braces(word, depth + 1);
    } else if (name_start(after)) {
      const std::size_t from = ++at_;
      while (name_part(peek())) ++at_;
      take(word, std::string(text_.substr(from, at_ - from)));
    } else if (after == '\0' || std::string_view(" \t\r\n\"").find(after) != std::string_view::npos) {
      literal(word, '$');
      ++at_;
    } else {  // $1, $?, $@ and the like
      at_ += 2;
      if (after == '\n') ++line_;
      inexact(word);
    }
  }

  /// After "${": NAME, NAME:-default, NAME-default, NAME:=default; anything else depends on the run.
  void braces(Word& word, int depth) {
    constexpr int kDeepest = 64;
    const std::size_t from = at_;
    while (name_part(peek())) ++at_;
    const std::string name(text_.substr(from, at_ - from));
    const bool colon = peek() == ':' && (peek(1) == '-' || peek(1) == '=');
    if (is_name(name) && peek() == '}') {
      ++at_;
      take(word, name);
      return;
    }
    word.quoted = true;
    if (is_name(name) && depth < kDeepest && (colon || peek() == '-' || peek() == '=')) {
      at_ += colon ? 2 : 1;
      const Word other = read_word("}", depth);
      if (at_ < text_.size()) ++at_;
      const auto known = values_.find(name);
      if (known != values_.end() && !(colon && known->second.empty())) {
        word.text += known->second;
      } else {
        word.text += other.text;
        word.exact = word.exact && other.exact;
      }
      return;
    }
    word.exact = false;
    int open = 1;
    for (; at_ < text_.size() && open > 0; ++at_) {
      if (text_[at_] == '\n') ++line_;
      if (text_[at_] == '{') ++open;
      if (text_[at_] == '}') --open;
    }
  }

  // ---- commands ----

  void set(const Pair& pair, const Word& word, int scope) {
    Assignment one;
    one.name = pair.name;
    one.value = pair.value;
    one.exact = word.exact;
    one.scope = scope;
    one.exported = scope != 0 || exporting_;
    one.file = file_;
    one.line = word.line;
    if (exporting_) exported_.insert(pair.name);
    if (pair.append) {
      const auto known = values_.find(pair.name);
      one.exact = one.exact && known != values_.end();
      if (known != values_.end()) one.value = known->second + one.value;
    }
    if (scope == 0) {
      if (one.exact) {
        values_[one.name] = one.value;
      } else {
        values_.erase(one.name);
      }
    }
    found_.push_back(std::move(one));
  }

  void unset(const std::string& name, const Word& word, int scope) {
    if (!is_name(name)) return;
    Assignment one;
    one.name = name;
    one.removed = true;
    one.scope = scope;
    one.file = file_;
    one.line = word.line;
    if (scope == 0) values_.erase(name);
    found_.push_back(std::move(one));
  }

  void finish(std::vector<Word>& words) {
    std::size_t first = 0;
    while (first < words.size() && !words[first].quoted &&
           one_of(words[first].text,
                  {"if", "then", "elif", "else", "while", "until", "do", "!", "{", "}", "time", "fi", "done"})) {
      ++first;
    }
    if (first < words.size()) command({words.begin() + static_cast<std::ptrdiff_t>(first), words.end()});
    words.clear();
  }

  void command(const std::vector<Word>& words) {
    std::size_t at = 0;
    while (at < words.size() && pair_in(words[at])) ++at;
    const int scope = at == words.size() ? 0 : ++scopes_;
    commands_ = commands_ || scope != 0;
    for (std::size_t i = 0; i < at; ++i) set(*pair_in(words[i]), words[i], scope);
    // Programs that start others: what follows is a command too.
    while (at < words.size() && !words[at].quoted) {
      std::string_view program = words[at].text;
      if (const std::size_t slash = program.rfind('/'); slash != std::string_view::npos)
        program.remove_prefix(slash + 1);
      ++at;
      if (one_of(program, {"exec", "nohup", "command", "time", "sudo", "builtin"})) {
        while (at < words.size() && words[at].text.starts_with('-')) ++at;
        while (at < words.size() && pair_in(words[at])) {  // sudo A=B command
          set(*pair_in(words[at]), words[at], scope);
          ++at;
        }
        continue;
      }
      if (one_of(program, {"export", "declare", "typeset", "local", "readonly"}))
        return exports(words, at, program == "export");
      if (program == "set") return set_options(words, at);
      if (program == "unset") return unsets(words, at);
      if (program == "env") {
        at = env(words, at, scope);
        continue;
      }
      if (one_of(program, {"srun", "sbatch", "salloc"})) return slurm(words, at, scope);
      if (one_of(program, {"mpirun", "mpiexec", "orterun", "prterun"}))
        return options(words, at, scope, {"-x"}, {"-genv", "-env"});
      if (one_of(program, {"docker", "podman"})) return options(words, at, scope, {"-e", "--env"}, {});
      return;
    }
  }

  void exports(const std::vector<Word>& words, std::size_t at, bool exporting) {
    bool removes = false;
    for (; at < words.size(); ++at) {
      const Word& word = words[at];
      if (word.text.starts_with('-')) {
        removes = removes || word.text == "-n";
        exporting = exporting || word.text.find('x') != std::string::npos;
        if (word.text == "-f") return;
      } else if (removes) {
        unset(word.text, word, 0);
      } else if (const auto pair = pair_in(word)) {
        exporting_ = exporting;
        set(*pair, word, 0);
        exporting_ = false;
      } else if (exporting && is_name(word.text)) {
        exported_.insert(word.text);
      }
    }
  }

  /// `set -a` and `set -o allexport`.
  void set_options(const std::vector<Word>& words, std::size_t at) {
    for (; at < words.size(); ++at) {
      const std::string& text = words[at].text;
      const bool letters = text.size() > 1 && text[0] == '-' && text[1] != '-';
      exports_all_ = exports_all_ || text == "allexport" || (letters && text.find('a') != std::string::npos);
    }
  }

  void unsets(const std::vector<Word>& words, std::size_t at) {
    for (; at < words.size(); ++at) {
      if (words[at].text == "-f") return;
      if (!words[at].text.starts_with('-')) unset(words[at].text, words[at], 0);
    }
  }

  /// Returns where the command begins that `env` starts.
  std::size_t env(const std::vector<Word>& words, std::size_t at, int scope) {
    for (; at < words.size(); ++at) {
      const Word& word = words[at];
      if (word.text == "-u" && at + 1 < words.size()) {
        unset(words[at + 1].text, word, scope);
        ++at;
      } else if (word.text.starts_with("--unset=")) {
        unset(word.text.substr(8), word, scope);
      } else if (const auto pair = pair_in(word)) {
        set(*pair, word, scope);
      } else if (!word.text.starts_with('-')) {
        break;
      }
    }
    return at;
  }

  /// `--export=ALL,A=B`: names alone pass a variable on and set nothing.
  void export_list(const Word& word, std::string_view list, int scope) {
    for (const std::string_view part : split(list, ',')) {
      const std::size_t equals = part.find('=');
      if (equals == std::string_view::npos || !is_name(part.substr(0, equals))) continue;
      set({std::string(part.substr(0, equals)), std::string(part.substr(equals + 1))}, word, scope);
    }
  }

  void slurm(const std::vector<Word>& words, std::size_t at, int scope) {
    for (; at < words.size(); ++at) {
      const std::string& text = words[at].text;
      if (text.starts_with("--export=")) {
        export_list(words[at], std::string_view(text).substr(9), scope);
      } else if (text == "--export" && at + 1 < words.size()) {
        export_list(words[at + 1], words[at + 1].text, scope);
        ++at;
      } else if (!text.starts_with('-') && text == "env") {
        env(words, at + 1, scope);
        return;
      }
    }
  }

  /// Options that take NAME=value as the next word (`joined` too as --env=NAME=value), and those that take two words.
  void options(const std::vector<Word>& words, std::size_t at, int scope, std::initializer_list<std::string_view> one,
               std::initializer_list<std::string_view> two) {
    for (; at < words.size(); ++at) {
      const std::string_view text = words[at].text;
      if (one_of(text, one) && at + 1 < words.size()) {
        Word next = words[++at];
        next.plain = next.text.size();
        if (const auto pair = pair_in(next)) set(*pair, next, scope);
      } else if (one_of(text, two) && at + 2 < words.size()) {
        if (is_name(words[at + 1].text)) set({words[at + 1].text, words[at + 2].text}, words[at + 2], scope);
        at += 2;
      } else if (text.starts_with("--env=") && one_of("--env", one)) {
        Word joined = words[at];
        joined.text = joined.text.substr(6);
        joined.plain = joined.text.size();
        if (const auto pair = pair_in(joined)) set(*pair, joined, scope);
      }
    }
  }

  /// A line `#SBATCH ...`: options of the job, active for all that follows.
  void sbatch_line() {
    line_start_ = false;
    if (!text_.substr(at_).starts_with("#SBATCH")) return;
    at_ += 7;
    std::vector<Word> words;
    while (at_ < text_.size() && text_[at_] != '\n' && text_[at_] != '#') {
      if (std::string_view(" \t\r;&|<>()").find(text_[at_]) != std::string_view::npos) {
        ++at_;
      } else {
        words.push_back(read_word(" \t\r\n"));
      }
    }
    exporting_ = true;
    slurm(words, 0, 0);
    exporting_ = false;
    commands_ = true;
    at_ = std::min(text_.find('\n', at_), text_.size());
    if (at_ < text_.size()) next_line();
  }

  std::string_view text_;
  const std::string& file_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool line_start_ = true;
  int scopes_ = 0;
  bool commands_ = false;     ///< there is more than assignments
  bool exporting_ = false;    ///< what is set now is exported
  bool exports_all_ = false;  ///< all that is set is
  std::set<std::string> exported_;
  std::vector<std::pair<std::string, bool>> documents_;
  std::map<std::string, std::string> values_;  ///< what the script has set so far
  std::vector<Assignment> found_;
};

}  // namespace

std::vector<Assignment> read_script(std::string_view text, const std::string& file) {
  return ScriptReader(text, file).read();
}

}  // namespace oxytorch::environment
