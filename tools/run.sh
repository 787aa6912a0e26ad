#!/usr/bin/env bash
# Runs a command with the .venv and this checkout's sources first.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$@"
