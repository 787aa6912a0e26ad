#!/usr/bin/env bash
# What takes too long for `make test`: the Gaudi files against the headers of older torch versions, and the optimizers'
# random cases, spread over the cores.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python3 cmake/steps/headers.py || { [[ $? == 75 ]] && say "nightly: headers skipped"; }
export OXYTORCH_FUZZ_CASES=${OXYTORCH_FUZZ_CASES:-10000}
exec python3 -m pytest -n "$(nproc)" --dist=load tests/optim/test_fuzz.py "$@"
