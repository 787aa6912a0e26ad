#!/usr/bin/env bash
# Installs what is missing: Debian packages, the .venv, torch at one version, then the rest. Quick when nothing is to do.
#   setup.sh --to-build    only what compiling takes; the rest can come beside it
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
SYSTEM_PYTHON=${PYTHON:-python3}

# The stamp holds a hash of all that decides what setup does.
wanted=$( (echo "$TORCH"; cat cmake/apt-packages.txt pyproject.toml tools/setup.sh) | sha256sum | cut -d' ' -f1)
stamp=$VENV/.oxytorch-setup
is_done() { [[ -x $VENV/bin/python3 && -f $1 && $(<"$1") == "$wanted" ]]; }
if is_done "$stamp"; then exit 0; fi

install_rest() {
  listed=$("$VENV/bin/python3" tools/extras.py test lint docs demo)
  mapfile -t needs <<<"$listed"
  say "Installing ${#needs[@]} Python packages"
  "${pip[@]}" --constraint <(echo "torch==$1") "${needs[@]}"
  listed=$("$VENV/bin/python3" tools/extras.py peers formats)
  mapfile -t peers <<<"$listed"
  say "Installing ${#peers[@]} libraries that tests compare with"
  "${pip[@]}" --no-deps "${peers[@]}"
  echo "$wanted" >"$stamp"
}

missing_packages() {
  comm -23 <(grep -v '^#' cmake/apt-packages.txt | sort -u) \
    <(dpkg-query -W -f='${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p' | sort -u)
}

if command -v dpkg-query >/dev/null; then
  mapfile -t missing < <(missing_packages)
  if ((${#missing[@]})); then
    install="apt-get install -y --no-install-recommends ${missing[*]}"
    if [[ $(id -u) == 0 ]]; then sudo=(); elif sudo -n true 2>/dev/null; then sudo=(sudo); else
      die "Debian packages are missing and there is no root here. Run:  sudo $install"
    fi
    say "Installing Debian packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${sudo[@]}" apt-get update -q >/dev/null || say "apt-get update failed; going on with the lists at hand"
    "${sudo[@]}" $install >/dev/null || die "apt-get could not install: ${missing[*]}"
  fi
else
  say "Not a Debian-like machine: the packages of cmake/apt-packages.txt must be there already."
fi

if [[ ! -x $VENV/bin/python3 ]]; then
  "$SYSTEM_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "Python 3.10 or later is needed; $SYSTEM_PYTHON is $("$SYSTEM_PYTHON" --version 2>&1). Set PYTHON=/path/to/python3."
  say "Making ${VENV#"$ROOT"/} with $("$SYSTEM_PYTHON" --version)"
  "$SYSTEM_PYTHON" -m venv "$VENV"
fi

pip=("$VENV/bin/python3" -m pip --disable-pip-version-check install --quiet)
installed() { "$VENV/bin/python3" -c 'from importlib.metadata import version; print(version("torch"))'; }
if ! is_done "$stamp-build"; then
  # torch first and alone: whatever follows must take this one as it is.
  say "Installing $TORCH"
  "${pip[@]}" "$TORCH"
  listed=$("$VENV/bin/python3" tools/extras.py build)
  mapfile -t needs <<<"$listed"
  "${pip[@]}" --constraint <(echo "torch==$(installed)") "${needs[@]}"
  echo "$wanted" >"$stamp-build"
fi
if [[ ${1:-} != --to-build ]]; then install_rest "$(installed)"; fi
