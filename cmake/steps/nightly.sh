#!/usr/bin/env bash
# What takes too long for `make test`: the Gaudi files against the headers of older torch versions, and the optimizers'
# random cases, spread over the cores: all of them, and a part under the address sanitizer, in C++ and in Python.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python3 cmake/steps/headers.py || { [[ $? == 75 ]] && say "nightly: headers skipped"; }
export OXYTORCH_FUZZ_CASES=${OXYTORCH_FUZZ_CASES:-20000}
python3 -m pytest -n "$(nproc)" --dist=load tests/optim/test_fuzz.py "$@"
"$BUILD/tests/optim/optimizer_edits_test"

say "nightly: the optimizers under the address sanitizer"
cmake --preset asan-torch --log-level=ERROR
cmake --build --preset asan-torch
# torch and Python keep what they allocate until the process ends.
export ASAN_OPTIONS=detect_leaks=0 OXYTORCH_FUZZ_CASES=$((OXYTORCH_FUZZ_CASES / 10))
"$ROOT/build/asan-torch/tests/optim/optimizer_edits_test"
# The sanitizer has to be there before Python is, and finds the C++ library's exceptions only where that is too.
LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)" \
  PYTHONPATH=$ROOT/build/asan-torch/python exec python3 -m pytest tests/optim/test_fuzz.py tests/optim/test_edits.py tests/optim/test_shared_memory.py "$@"
