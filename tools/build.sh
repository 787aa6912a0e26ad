#!/usr/bin/env bash
# Configures once, compiles, and makes `import oxytorch` and the `oxytorch` command work from the environment.
#   build.sh TARGET...     builds these and no more, without tests and benchmarks
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

configured=$BUILD/.configured
torch=$(python3 -c 'from importlib.metadata import version; print(version("torch"))')
if [[ ! -f $BUILD/build.ninja || ! -f $configured || $(<"$configured") != "$torch" || CMakePresets.json -nt $configured ]]; then
  mkdir -p "$BUILD"
  # CMake says much about search paths; what it says of torch itself is shown always, the rest when it matters.
  cmake --preset "$PRESET" -DPython3_EXECUTABLE="$VENV/bin/python3" >"$BUILD/configure.log" 2>&1 ||
    { cat "$BUILD/configure.log"; die "cmake could not configure; its log is above"; }
  sed -n '/^CMake Warning at cmake\/OxytorchDependencies/,/^Call Stack/p' "$BUILD/configure.log"
  echo "$torch" >"$configured"
fi
# The second target compiles each public header on its own.
targets=("$@")
((${#targets[@]})) || targets=(all all_verify_interface_header_sets)
cmake --build "$BUILD" --target "${targets[@]}"

# An environment from elsewhere stays as it is.
[[ $VENV == "$ROOT"/* ]] || exit 0
# A .venv that is shared through a symlink keeps pointing at the checkout that made it.
packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
link=$packages/oxytorch-checkout.pth
if [[ ! -L $VENV || ! -f $link ]] && [[ ! -f $link || $(<"$link") != "$PACKAGES" ]]; then
  echo "$PACKAGES" >"$link"
fi
command=$VENV/bin/oxytorch
if [[ ! -x $command ]]; then
  printf '#!%s\nimport sys\n\nfrom oxytorch.cli import main\n\nsys.exit(main())\n' "$VENV/bin/python3" >"$command"
  chmod +x "$command"
fi
