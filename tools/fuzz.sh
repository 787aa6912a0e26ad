#!/usr/bin/env bash
# The parsers under libFuzzer with the address and undefined-behaviour sanitizers.
#   fuzz.sh [SECONDS [TARGET...]]      600 seconds of each target of tests/fuzz/fuzz.cpp
# Inputs that show something new stay in build/fuzz/inputs, and the next run begins with them; one that ends the program
# in build/fuzz/found. The targets begin with the files that the tests of the formats write.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
command -v clang++ >/dev/null || die "there is no clang++, which libFuzzer comes with: install clang"
seconds=${1:-600}
shift || true

say "fuzz: building with $(clang++ --version | head -n 1)"
cmake --preset fuzz --log-level=ERROR
cmake --build --preset fuzz
fuzz=$ROOT/build/fuzz/tests/fuzz/oxytorch_fuzz inputs=$ROOT/build/fuzz/inputs found=$ROOT/build/fuzz/found
targets=("$@")
if ((${#targets[@]} == 0)); then mapfile -t targets < <("$fuzz" targets); fi
mkdir -p "$inputs/dataset" "$found"
"$fuzz" seeds "$inputs"
if [[ -x $BUILD/tests/data/data_test ]]; then
  OXYTORCH_SEEDS=$inputs/dataset "$BUILD/tests/data/data_test" --gtest_brief=1 >/dev/null
fi
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=0
bad=()
for target in "${targets[@]}"; do
  say "fuzz: $target, $seconds s"
  "$fuzz" "$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -malloc_limit_mb=1500 -max_len=65536 \
    -print_final_stats=1 -artifact_prefix="$found/$target-" "$inputs/$target" 2>"$found/$target.log" || bad+=("$target")
  grep -E "^stat::number_of_executed|^SUMMARY|Test unit written" "$found/$target.log" || true
done
if ((${#bad[@]})); then die "fuzz: ${bad[*]} failed; the inputs and logs are in build/fuzz/found"; fi
say "fuzz: nothing found"
