#!/usr/bin/env bash
# Every test: lint, C++ tests, Python tests (with consumer, examples, docs, layering), the site. Stops at nothing,
# fails if anything failed, and ends with one line of counts.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
reports=$ROOT/build/test-reports
rm -rf "$reports" && mkdir -p "$reports"
cores=$(nproc)
failed=()
started=$SECONDS

step() {
  local name=$1 begun=$SECONDS
  shift
  say "== $name"
  "$@" || failed+=("$name")
  say "== $name: $((SECONDS - begun)) s"
}

if [[ $PRESET == dev ]]; then  # these say nothing about torch
  tools/docs.sh >"$reports/docs.log" 2>&1 &  # one process, beside those that follow
  docs=$!
  step lint python3 tools/lint.py
fi
# Tests share the cores: a thread of OpenMP that spins while it waits keeps the other test's from running, and both then
# take up to twenty times as long.
export OMP_WAIT_POLICY=passive
# Hundreds of processes import the package.
unset PYTHONDONTWRITEBYTECODE
step ctest run_ctest "$reports/ctest"
if [[ $PRESET == dev ]]; then
  step docs wait "$docs"
  cat "$reports/docs.log"
fi
step pytest pytest_with_timeout -n "$cores" --junit-xml="$reports/pytest.xml" "$@"
# A part of it on fake devices; `make test-devices` runs everything on each. A torch built for CUDA takes no HPU.
devices=(hpu sim)
python3 -c 'import sys, torch; sys.exit(torch.backends.cuda.is_built())' || devices=(sim)
for device in "${devices[@]}"; do
  OXYTORCH_DEVICE=$device step "pytest on $device" pytest_with_timeout -n "$cores" \
    --junit-xml="$reports/pytest-$device.xml" "$@" tests/device tests/amp/test_amp.py tests/trainer/test_fit.py \
    tests/optim/test_device.py tests/optim/test_stability_device.py tests/ops/test_other_devices.py \
    tests/tune/test_goal.py tests/tune/test_checkpointing.py
done

counts=$(python3 tools/counts.py "$reports" || true)
if ((${#failed[@]})); then
  say "make test: FAILED (${failed[*]}); $counts; $((SECONDS - started)) s"
  exit 1
fi
say "make test: passed; $counts; $((SECONDS - started)) s"
