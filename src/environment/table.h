/// How the registry is written down: rows of text, turned into Settings when they are first asked for.
#pragma once

#include <span>

#include "oxytorch/environment.h"

namespace oxytorch::environment {

/// `accepts`: "bool", "digit", "int", "int LOW..", "int LOW..HIGH", "number LOW..HIGH", "choice a/b" (as written),
/// "Choice a/b" (any case), "list", "path", "text", "level" (a distance in NCCL's topology) or "grammar NAME".
struct Row {
  const char* name;
  const char* accepts;
  const char* standard;
  const char* what;
  const char* since = "";
  const char* until = "";
  const char* deprecated = "";
  const char* replacement = "";
};

struct Table {
  Family family;
  const char* component;
  const char* evidence;
  std::span<const Row> rows;
};

std::span<const Table> cuda_tables();
std::span<const Table> nccl_tables();
std::span<const Table> fabric_tables();
std::span<const Table> gaudi_tables();
std::span<const Table> host_tables();
std::span<const Table> torch_tables();

}  // namespace oxytorch::environment
