#!/usr/bin/env bash
# Builds the site into build/docs: Doxygen reads the headers, Sphinx writes the pages. A warning is an error.
# One process: more spend their time on passing pages to each other.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
mkdir -p build/doxygen
doxygen -q docs/Doxyfile
sphinx-build -q -E -W --keep-going -d build/doctrees docs build/docs
say "docs: build/docs/index.html"
