# Sourced by every step: strict mode, the repository root, the .venv first on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
DEFAULT_TORCH=torch==2.13.0
TORCH=${OXYTORCH_TORCH_SPEC:-$DEFAULT_TORCH}
if [[ $TORCH == "$DEFAULT_TORCH" ]]; then
  PRESET=dev BUILD=$ROOT/build/dev VENV=${OXYTORCH_VENV:-$ROOT/.venv} PACKAGES=$ROOT/python
else
  # Another torch has an environment, a build folder and a Python module of its own: build/torch-2.15.0.
  export OXYTORCH_TORCH_NAME=${TORCH//[^A-Za-z0-9.]/-}
  OXYTORCH_TORCH_NAME=${OXYTORCH_TORCH_NAME/--/-}
  PRESET=other-torch BUILD=$ROOT/build/$OXYTORCH_TORCH_NAME VENV=${OXYTORCH_VENV:-$ROOT/.venv-$OXYTORCH_TORCH_NAME}
  PACKAGES=$BUILD/python
fi
export PATH=$VENV/bin:$PATH
# The sources of this checkout win over whatever the environment points at.
export PYTHONPATH=$PACKAGES${PYTHONPATH:+:$PYTHONPATH}
# Settings of the caller's shell must not decide whether the tests pass.
unset OXYTORCH_ISA OXYTORCH_LOG

# run_ctest REPORT [ARGUMENT...]: writes REPORT.xml, and what each suite of a program says to REPORT-suites/.
run_ctest() {
  local report=$1 passed=0
  shift
  rm -f "$BUILD"/test-suites/*.xml
  ctest --preset "$PRESET" -j "$(($(nproc) + 1))" --output-junit "$report.xml" "$@" || passed=1
  mkdir -p "$report-suites" && find "$BUILD/test-suites" -name '*.xml' -exec mv -t "$report-suites" {} +
  return $passed
}

# A test that hangs fails with where it stands, and the rest goes on; one that hangs outside of Python ends the run, as
# does one that ends its process: pytest-xdist would run it again and again.
pytest_with_timeout() {
  python3 -m pytest --timeout 600 --timeout-method signal -o faulthandler_timeout=700 \
    -o faulthandler_exit_on_timeout=true --max-worker-restart 0 "$@"
}

say() { printf '%s\n' "$*"; }
die() { printf 'oxytorch: %s\n' "$*" >&2; exit 1; }
