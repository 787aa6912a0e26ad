#!/usr/bin/env bash
# Removes what was built. The .venv stays: it is costly and `make setup` keeps it right.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
rm -rf build dist .mypy_cache .pytest_cache .ruff_cache python/oxytorch/_C*.so python/oxytorch/_build_info.py
find python tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
