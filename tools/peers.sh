#!/usr/bin/env bash
# Installs what the races' rivals need and nothing else does: Python packages into build/peers, allocators from Debian.
# What cannot be installed is left out: the race reports it as absent.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
peers=$ROOT/build/peers
wanted=$(cat bench/race/requirements.txt bench/race/apt-packages.txt | sha256sum | cut -d' ' -f1)
stamp=$peers/.oxytorch-peers
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then exit 0; fi

say "Installing the races' rivals into build/peers"
rm -rf "$peers"
# Without dependencies, so that torch stays the one Oxytorch is built against.
complete=yes
if ! python3 -m pip --disable-pip-version-check install --quiet --no-deps --target "$peers" -r bench/race/requirements.txt; then
  say "pip could not install bench/race/requirements.txt: Lightning, Accelerate and the 8-bit optimizers will be absent"
  complete=no
fi
if command -v apt-get >/dev/null && [[ $(id -u) == 0 ]]; then
  export DEBIAN_FRONTEND=noninteractive
  while read -ra names; do
    for name in "${names[@]}"; do
      if apt-get install -y --no-install-recommends "$name" >/dev/null 2>&1; then continue 2; fi
    done
    say "apt-get could not install ${names[0]}: the race goes without it"
  done < <(grep -v '^#' bench/race/apt-packages.txt)
else
  say "No root or no apt-get here: the race has the allocators that are installed already"
fi
if [[ $complete == yes ]]; then echo "$wanted" >"$stamp"; fi
