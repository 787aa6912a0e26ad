# Sourced by every step: strict mode, the repository root, the .venv first on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT=$PWD
VENV=$ROOT/.venv
BUILD=$ROOT/build/dev
export PATH=$VENV/bin:$PATH
# The sources of this checkout win over whatever the .venv points at.
export PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
# Settings of the caller's shell must not decide whether the tests pass.
unset OXYTORCH_ISA OXYTORCH_LOG

say() { printf '%s\n' "$*"; }
die() { printf 'oxytorch: %s\n' "$*" >&2; exit 1; }
