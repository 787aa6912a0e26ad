#!/usr/bin/env bash
# Google Benchmark programs first, then the race against the peers. Figures go to the screen and to bench/report/.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
shopt -s nullglob
if [[ ${DEVICE:-cpu} != cpu ]]; then
  races=(bench/race/"$DEVICE"/*.py)
  ((${#races[@]})) || die "there is no race for DEVICE=$DEVICE, only for cuda"
  for race in "${races[@]}"; do
    python3 "$race" --device "$DEVICE" "$@"
  done
  exit
fi
for program in "$BUILD"/bench/*/*_bench; do
  say "== ${program#"$BUILD"/bench/}"
  "$program" --benchmark_min_time=0.1 --benchmark_out="bench/report/$(basename "$program").json" --benchmark_out_format=json
done
tools/peers.sh
# The stock rivals of a machine whose class is not in rivals.json have to be found first.
[[ " $* " == *" --quick "* ]] || python3 bench/race/orchestrator.py --screen
for race in bench/race/*.py; do
  [[ $(basename "$race") == _* ]] && continue
  say "== $race"
  python3 "$race" "$@"
done
