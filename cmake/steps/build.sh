#!/usr/bin/env bash
# Configures once, compiles, and makes `import oxytorch` and the `oxytorch` command work from the .venv.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

configured=$BUILD/.configured
torch=$(python3 -c 'from importlib.metadata import version; print(version("torch"))')
if [[ ! -f $BUILD/build.ninja || ! -f $configured || $(<"$configured") != "$torch" || CMakePresets.json -nt $configured ]]; then
  mkdir -p "$BUILD"
  # torch's own CMake files warn at length; its words are shown when they matter.
  cmake --preset dev -DPython3_EXECUTABLE="$VENV/bin/python3" >"$BUILD/configure.log" 2>&1 ||
    { cat "$BUILD/configure.log"; die "cmake could not configure; its log is above"; }
  echo "$torch" >"$configured"
fi
# The second target compiles each public header on its own.
cmake --build --preset dev --target all all_verify_interface_header_sets

# A .venv that is shared through a symlink keeps pointing at the checkout that made it.
packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
link=$packages/oxytorch-checkout.pth
if [[ ! -L .venv || ! -f $link ]] && [[ ! -f $link || $(<"$link") != "$ROOT/python" ]]; then
  echo "$ROOT/python" >"$link"
fi
command=$VENV/bin/oxytorch
if [[ ! -x $command ]]; then
  printf '#!%s\nimport sys\n\nfrom oxytorch.cli import main\n\nsys.exit(main())\n' "$VENV/bin/python3" >"$command"
  chmod +x "$command"
fi
