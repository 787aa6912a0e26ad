// oxytorch-conformance: does this backend keep the contract of oxytorch/backend.h? One process per check, so that a
// crash or a hang is a verdict like any other.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "oxytorch/error.h"
#include "suite.h"

extern char** environ;

namespace conformance {
namespace {

using std::chrono::steady_clock;

constexpr int kGood = 0, kFound = 1, kUsage = 2, kSkip = 77;

struct Options {
  std::string target = "cpu";
  std::vector<std::string> only;
  std::string worker;
  bool json = false, list = false, fail_fast = false;
  double timeout_s = 60;
};

struct Verdict {
  const Check* check = nullptr;
  std::string verdict;  // pass, fail, skip, crash, hang
  std::string expected, seen;
  double seconds = 0;
};

constexpr const char* kUsageText =
    "usage: oxytorch-conformance [LIB.so | NAME] [--json] [--list] [--only CHECK,...] [--fail-fast] [--timeout S]\n"
    "  LIB.so | NAME   a backend library, or the name of a registered backend (default: cpu)\n"
    "  --json          one JSON object instead of lines\n"
    "  --list          the checks and the clauses of oxytorch/backend.h that they cite\n"
    "  --only          these checks only\n"
    "  --fail-fast     stop at the first check that does not pass\n"
    "  --timeout S     a check that takes longer hangs (default: 60)\n"
    "exit status: 0 every check passed, 1 one did not or the backend is unusable here, 2 bad usage or no such "
    "backend\n";

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// "\n" would end a worker's line.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

void print_violation(const Violation& violation) {
  std::printf("expected: %s\nseen: %s\n", one_line(violation.expected).c_str(), one_line(violation.seen).c_str());
  std::fflush(stdout);
}

const oxytorch::backend::Backend& find(const std::string& target) {
  const bool is_path = target.find('/') != std::string::npos || target.ends_with(".so");
  return is_path ? oxytorch::backend::Registry::instance().load(target) : oxytorch::backend::backend(target);
}

const Check* find_check(const std::vector<Check>& checks, const std::string& name) {
  const auto found = std::find_if(checks.begin(), checks.end(), [&](const Check& check) { return name == check.name; });
  return found == checks.end() ? nullptr : &*found;
}

int run_worker(const Options& options) {
  const std::vector<Check> checks = all_checks();
  const Check* check = find_check(checks, options.worker);
  if (check == nullptr) return kUsage;
  on_violation = [](const Violation& violation) {
    print_violation(violation);
    std::_Exit(kFound);
  };
  try {
    check->run(Subject(find(options.target)));
    return kGood;
  } catch (const NotApplicable& skip) {
    std::printf("seen: %s\n", one_line(skip.reason).c_str());
    return kSkip;
  } catch (const std::exception& error) {
    print_violation({"no exception", error.what()});
    return kFound;
  }
}

std::string field(const std::string& output, const std::string& name) {
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name + ": ")) return line.substr(name.size() + 2);
  }
  return {};
}

std::string tail(const std::string& output) {
  constexpr std::size_t kLongest = 400;
  return one_line(output.size() > kLongest ? output.substr(output.size() - kLongest) : output);
}

Verdict run(const Options& options, const Check& check) {
  Verdict verdict{&check, "crash", {}, {}, 0};
  const auto start = steady_clock::now();
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    verdict.seen = std::string("no pipe: ") + std::strerror(errno);
    return verdict;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  std::vector<std::string> words{"oxytorch-conformance", options.target, "--worker", check.name};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int failed = posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (failed != 0) {
    close(ends[0]);
    verdict.seen = std::string("cannot start a worker: ") + std::strerror(failed);
    return verdict;
  }
  std::string output;
  bool hangs = false;
  for (;;) {
    const double left = options.timeout_s - std::chrono::duration<double>(steady_clock::now() - start).count();
    pollfd waiting{ends[0], POLLIN, 0};
    const int ready = left <= 0 ? 0 : poll(&waiting, 1, static_cast<int>(left * 1e3) + 1);
    if (ready == 0) {
      hangs = true;
      kill(child, SIGKILL);
      break;
    }
    char buffer[4096];
    const ssize_t got = read(ends[0], buffer, sizeof(buffer));
    if (got <= 0) break;
    output.append(buffer, static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  verdict.seconds = std::chrono::duration<double>(steady_clock::now() - start).count();
  verdict.expected = field(output, "expected");
  verdict.seen = field(output, "seen");
  if (hangs) {
    verdict.verdict = "hang";
    verdict.expected = "an end within " + std::to_string(static_cast<int>(options.timeout_s)) + " s";
    verdict.seen = "none";
  } else if (WIFEXITED(status) && WEXITSTATUS(status) == kGood) {
    verdict.verdict = "pass";
  } else if (WIFEXITED(status) && WEXITSTATUS(status) == kSkip) {
    verdict.verdict = "skip";
  } else if (WIFEXITED(status) && WEXITSTATUS(status) == kFound && !verdict.expected.empty()) {
    verdict.verdict = "fail";
  } else {
    verdict.expected = "the process goes on (C6)";
    verdict.seen = (WIFSIGNALED(status) ? "signal " + std::string(strsignal(WTERMSIG(status)))
                                        : "exit status " + std::to_string(WEXITSTATUS(status))) +
                   "; " + tail(output);
  }
  return verdict;
}

void print(const Verdict& verdict) {
  std::string word = verdict.verdict;
  std::transform(word.begin(), word.end(), word.begin(), [](unsigned char c) { return std::toupper(c); });
  std::printf("%-5s %-28s %s\n", word.c_str(), verdict.check->name,
              verdict.verdict == "skip" ? verdict.seen.c_str() : "");
  if (verdict.verdict == "pass" || verdict.verdict == "skip") return;
  std::printf("        clause %s: %s\n        expected: %s\n        seen:     %s\n", verdict.check->clause,
              verdict.check->says, verdict.expected.c_str(), verdict.seen.c_str());
  std::fflush(stdout);
}

int list(const std::vector<Check>& checks, bool json) {
  for (std::size_t i = 0; i < checks.size(); ++i) {
    if (json) {
      std::printf("%s{\"name\": %s, \"clause\": %s, \"says\": %s}%s\n", i == 0 ? "[" : " ",
                  quoted(checks[i].name).c_str(), quoted(checks[i].clause).c_str(), quoted(checks[i].says).c_str(),
                  i + 1 == checks.size() ? "]" : ",");
    } else {
      std::printf("%-28s %-3s %s\n", checks[i].name, checks[i].clause, checks[i].says);
    }
  }
  return kGood;
}

void print_json(const Options& options, const Subject& subject, const std::vector<Verdict>& verdicts,
                std::size_t passed, std::size_t skipped) {
  std::printf(
      "{\"backend\": %s, \"target\": %s, \"origin\": %s, \"score\": %d, \"reason\": %s, \"devices\": %d,\n"
      " \"passed\": %zu, \"skipped\": %zu, \"failed\": %zu, \"checks\": [",
      quoted(subject.backend.name()).c_str(), quoted(options.target).c_str(), quoted(subject.backend.origin()).c_str(),
      subject.score, quoted(subject.reason).c_str(), subject.devices, passed, skipped,
      verdicts.size() - passed - skipped);
  for (std::size_t i = 0; i < verdicts.size(); ++i) {
    const Verdict& verdict = verdicts[i];
    std::printf(
        "%s\n  {\"name\": %s, \"clause\": %s, \"says\": %s, \"verdict\": %s, \"expected\": %s, \"seen\": %s, "
        "\"seconds\": %.4f}",
        i == 0 ? "" : ",", quoted(verdict.check->name).c_str(), quoted(verdict.check->clause).c_str(),
        quoted(verdict.check->says).c_str(), quoted(verdict.verdict).c_str(), quoted(verdict.expected).c_str(),
        quoted(verdict.seen).c_str(), verdict.seconds);
  }
  std::printf("]}\n");
}

// A library that the registry refuses: for the caller a verdict, not a usage error.
int refuse(const Options& options, const oxytorch::Error& error) {
  const bool missing = error.code() == oxytorch::ErrorCode::NotFound ||
                       (options.target.find('/') == std::string::npos && !options.target.ends_with(".so"));
  if (missing) {
    std::fprintf(stderr, "oxytorch-conformance: %s\n", error.what());
    return kUsage;
  }
  if (options.json) {
    std::printf("{\"target\": %s, \"refused\": %s}\n", quoted(options.target).c_str(), quoted(error.what()).c_str());
  } else {
    std::printf("FAIL  contract.loads\n        clauses C1 to C3\n        seen:     %s\n", error.what());
  }
  return kFound;
}

int run_all(const Options& options) {
  const std::vector<Check> checks = all_checks();
  for (const std::string& name : options.only) {
    if (find_check(checks, name) == nullptr) {
      std::fprintf(stderr, "oxytorch-conformance: there is no check '%s'; see --list.\n", name.c_str());
      return kUsage;
    }
  }
  if (options.list) return list(checks, options.json);
  const oxytorch::backend::Backend* backend = nullptr;
  try {
    backend = &find(options.target);
  } catch (const oxytorch::Error& error) {
    return refuse(options, error);
  }
  const Subject subject(*backend);
  if (!options.json) {
    std::printf("%s (%s): score %d, %d device(s); %s\n", backend->name().c_str(), backend->origin().c_str(),
                subject.score, subject.devices, subject.reason.c_str());
  }
  if (subject.score <= 0) {
    if (options.json) print_json(options, subject, {}, 0, 0);
    if (!options.json) std::printf("unusable here, so nothing was proven\n");
    return kFound;
  }
  std::vector<Verdict> verdicts;
  std::size_t passed = 0, skipped = 0;
  for (const Check& check : checks) {
    const auto& only = options.only;
    if (!only.empty() && std::find(only.begin(), only.end(), check.name) == only.end()) continue;
    verdicts.push_back(run(options, check));
    passed += verdicts.back().verdict == "pass";
    skipped += verdicts.back().verdict == "skip";
    if (!options.json) print(verdicts.back());
    if (options.fail_fast && passed + skipped < verdicts.size()) break;
  }
  const std::size_t failed = verdicts.size() - passed - skipped;
  if (options.json) {
    print_json(options, subject, verdicts, passed, skipped);
  } else {
    std::printf("%zu checks: %zu passed, %zu skipped, %zu failed\n", verdicts.size(), passed, skipped, failed);
  }
  return failed == 0 ? kGood : kFound;
}

bool parse(int argc, char** argv, Options& options) {
  bool has_target = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&](std::string& into) {
      if (i + 1 >= argc) return false;
      into = argv[++i];
      return true;
    };
    std::string text;
    if (word == "--json") {
      options.json = true;
    } else if (word == "--list") {
      options.list = true;
    } else if (word == "--fail-fast") {
      options.fail_fast = true;
    } else if (word == "--worker") {
      if (!value(options.worker)) return false;
    } else if (word == "--only") {
      if (!value(text)) return false;
      std::istringstream names(text);
      for (std::string name; std::getline(names, name, ',');) options.only.push_back(name);
    } else if (word == "--timeout") {
      if (!value(text)) return false;
      options.timeout_s = std::atof(text.c_str());
      if (!(options.timeout_s > 0)) return false;
    } else if (word.starts_with("-") || has_target) {
      return false;
    } else {
      options.target = word;
      has_target = true;
    }
  }
  return true;
}

int main_of(int argc, char** argv) {
  Options options;
  if (argc == 2 && (std::strcmp(argv[1], "--help") == 0 || std::strcmp(argv[1], "-h") == 0)) {
    std::fputs(kUsageText, stdout);
    return kGood;
  }
  if (!parse(argc, argv, options)) {
    std::fputs(kUsageText, stderr);
    return kUsage;
  }
  try {
    return options.worker.empty() ? run_all(options) : run_worker(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "oxytorch-conformance: %s\n", error.what());
    return kUsage;
  }
}

}  // namespace
}  // namespace conformance

int main(int argc, char** argv) { return conformance::main_of(argc, argv); }
