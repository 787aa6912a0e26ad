#!/usr/bin/env bash
# The torch-free tests under each sanitizer.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
for preset in asan ubsan tsan; do
  say "sanitize: $preset"
  cmake --preset "$preset" --log-level=ERROR
  cmake --build --preset "$preset"
  ctest --preset "$preset"
done
