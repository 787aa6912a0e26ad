#!/usr/bin/env bash
# What takes too long for `make test`: the Gaudi files against the headers of older torch versions; the optimizers' random
# cases, spread over the cores: all of them, and a part under the address sanitizer, in C++ and in Python; the parsers under
# libFuzzer; the Python tests as on a CPU without AVX-512; a wheel built from the source distribution; a build without units of
# several sources; and `make test` with other torch versions.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python3 tools/headers.py || { [[ $? == 75 ]] && say "nightly: headers skipped"; }
export OXYTORCH_FUZZ_CASES=${OXYTORCH_FUZZ_CASES:-20000}
python3 -m pytest -n "$(nproc)" --dist=load tests/optim/test_fuzz.py "$@"
"$BUILD/tests/optim/optimizer_edits_test"
OXYTORCH_KILLS=1000 "$BUILD/tests/data/data_test" --gtest_filter="*KillsAndResumes*"

say "nightly: the optimizers under the address sanitizer"
cmake --preset asan-torch --log-level=ERROR
cmake --build --preset asan-torch
# torch and Python keep what they allocate until the process ends.
export ASAN_OPTIONS=detect_leaks=0 OXYTORCH_FUZZ_CASES=$((OXYTORCH_FUZZ_CASES / 10))
"$ROOT/build/asan-torch/tests/optim/optimizer_edits_test"
# The sanitizer has to be there before Python is, and finds the C++ library's exceptions only where that is too.
LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)" \
  PYTHONPATH=$ROOT/build/asan-torch/python python3 -m pytest tests/optim/test_fuzz.py tests/optim/test_edits.py tests/optim/test_shared_memory.py "$@"
unset ASAN_OPTIONS

if command -v clang++ >/dev/null; then
  tools/fuzz.sh "${OXYTORCH_FUZZ_SECONDS:-120}"
else
  say "nightly: there is no clang++, so the parsers are not fuzzed"
fi

older=$BUILD/older_cpu.so
cc -O1 -shared -fPIC -o "$older" tests/device/older_cpu.c
if LD_PRELOAD=$older python3 -c 'import torch; assert torch.backends.cpu.get_cpu_capability() == "AVX2"' 2>/dev/null; then
  say "nightly: Python tests as on a CPU without AVX-512"
  LD_PRELOAD=$older python3 -m pytest -n "$(nproc)" -p no:faulthandler "$@"
else
  say "nightly: this machine cannot pretend to be a CPU without AVX-512; skipped"
fi

say "nightly: a wheel from the source distribution, in an environment of torch and the build requirements alone"
dist=$ROOT/build/nightly-dist empty=$ROOT/build/nightly-venv
rm -rf "$dist" "$empty"
torch=$(python3 -c 'from importlib.metadata import version; print(version("torch"))')
listed=$(python3 tools/extras.py --only build)
mapfile -t needs <<<"$listed"
python3 -m venv "$empty"
# Neither the modules nor the programs of .venv.
in_empty() { env -u PYTHONPATH PATH="$empty/bin:${PATH#"$VENV"/bin:}" "$@"; }
in_empty python -m pip --disable-pip-version-check install --quiet "torch==$torch" "${needs[@]}"
in_empty python -c "from scikit_build_core.build import build_sdist; build_sdist('$dist')"
in_empty python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir "$dist" "$dist"/oxytorch-*.tar.gz
rm -rf "$empty"
OXYTORCH_WHEEL=$(echo "$dist"/oxytorch-*.whl) python3 -m pytest tests/packaging/test_wheel.py

say "nightly: every source as a unit of its own"
cmake --preset dev -B "$ROOT/build/apart" -DPython3_EXECUTABLE="$VENV/bin/python3" -DOXYTORCH_UNITY=OFF -DOXYTORCH_PACKAGE_IN_BUILD=ON
cmake --build "$ROOT/build/apart"

# The oldest, one between, and the newest of cmake/OxytorchDependencies.cmake.
for torch in 2.9.1 2.11.0 2.15.0; do
  say "nightly: torch $torch"
  env -u PYTHONPATH OXYTORCH_TORCH_SPEC="torch==$torch" make test
done
