#!/usr/bin/env bash
# The whole suite on each device that is here: the CPU, the fake ones of tests/device, and CUDA where torch has a card.
# DEVICE="hpu sim" chooses. Stops at nothing, fails if anything failed, and ends with one line of counts.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
reports=$ROOT/build/test-reports/devices
rm -rf "$reports" && mkdir -p "$reports"
cores=$(nproc)
devices=${DEVICE:-cpu sim hpu privateuse1}
if [[ -z ${DEVICE:-} ]] && python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  devices+=" cuda"
fi
failed=()

for device in $devices; do
  export OXYTORCH_DEVICE=$device
  say "== $device"
  run_ctest "$reports/ctest-$device" -L torch -LE device || failed+=("ctest $device")
  pytest_with_timeout -n "$cores" --junit-xml="$reports/pytest-$device.xml" "$@" || failed+=("pytest $device")
done

counts=$(python3 tools/counts.py "$reports" || true)
if ((${#failed[@]})); then
  say "make test-devices: FAILED (${failed[*]}); $counts"
  exit 1
fi
say "make test-devices: passed; $counts"
