#!/usr/bin/env bash
# What takes too long for `make test`: the optimizers' random cases, spread over the cores.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OXYTORCH_FUZZ_CASES=${OXYTORCH_FUZZ_CASES:-10000}
exec python3 -m pytest -n "$(nproc)" --dist=load tests/optim/test_fuzz.py "$@"
